"""Machines on which the copy engine may run, from what ranks told one another, and NCCL elsewhere. One process."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.multiprocessing.reductions import StorageWeakRef

from ringflash.attention import gather_by_heads, gradient_return, plan, schedule, sections
from ringflash.attention.inputs import CallInputs, CallShape, KVShape
from ringflash.attention.options import Algorithm, CallOptions
from ringflash.comm import communicator
from ringflash.comm.group import HostSplit
from ringflash.comm.timeouts import timeout
from ringflash.comm.transport import buffer, buffers, copy_engine, registry
from ringflash.sequence.mask import Documents, SequenceMask

GPU = torch.device("cuda")


class Messages:
    """PointToPoint without NCCL."""

    def __init__(self, name: str, group: object) -> None:
        self.name, self.group_channel = name, self


NO_NCCL = mock.patch.object(registry, "PointToPoint", Messages)
OUT_OF_REACH = copy_engine.OutOfReach("no peer access")
NOT_PERMITTED = copy_engine.NoCopyEngine("pidfd_getfd: not permitted")
HERE = ["host0", "gpu0", []], ["host0", "gpu1", []]


@pytest.mark.parametrize(
    "place, got",
    [
        (["host1", "gpu2", []], "hosts ['host0', 'host1']"),
        (["host0", "gpu1", []], "3 ranks on 2 GPUs"),
        (["host0", "gpu2", ["gpu0"]], "ranks [2] have no peer access"),
    ],
)
def test_refused_unless_on_one_host_in_reach(place: list, got: str) -> None:
    copy_engine._check_locations([*HERE, ["host0", "gpu2", ["gpu7"]]])  # gpu7 is not in the group
    with pytest.raises(RuntimeError, match="copy_engine.* must have each rank on another GPU .*use 'nccl'") as error:
        copy_engine._check_locations([*HERE, place])
    assert got in str(error.value)


def test_a_rank_without_memory_stops_all() -> None:
    copy_engine._raise_together(["", ""])
    with pytest.raises(RuntimeError, match="could not allocate .*{1: 'out of memory'}"):
        copy_engine._raise_together(["", "out of memory"])


@pytest.mark.parametrize("failures, made", [(0, True), (1, True), (2, False)])
def test_cached_blocks_are_given_back_for_an_area(failures: int, made: bool) -> None:
    """The driver knows nothing of torch's cache: gigabytes of it may stand in the way."""
    area, out = torch.empty(1), RuntimeError("CUDA driver error: out of memory")
    make = mock.Mock(side_effect=[*[out] * failures, area])
    with mock.patch.object(torch.cuda, "empty_cache") as empty:
        got, problem = copy_engine._allocate(make)
    assert (got is area) == made and (problem == "") == made
    assert empty.call_count == min(failures, 1)


@pytest.fixture(autouse=True)
def nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_open", {})


@pytest.mark.parametrize(
    "problem, chosen", [(None, "copy_engine"), (OUT_OF_REACH, "nccl"), (NOT_PERMITTED, "nccl")], ids=str
)
def test_auto_takes_the_copy_engine_in_reach(problem: copy_engine.NoCopyEngine | None, chosen: str) -> None:
    """The reason why auto does without is said, except of ranks that are out of reach."""
    group, memory = mock.Mock(_device_types=()), mock.Mock(side_effect=problem)
    with (
        mock.patch.object(registry, "backend_of", lambda group, device: "nccl"),
        mock.patch.object(registry, "CopyEngine", memory),
        NO_NCCL,
    ):
        names = [registry.choose_transport(name, group, GPU) for name in ("auto", "nccl", "copy_engine")]
        assert names == [registry.UNDECIDED, "nccl", "copy_engine"]
        with pytest.warns(UserWarning, match="pidfd_getfd") if problem is NOT_PERMITTED else nullcontext():
            opened = registry.open_transport(registry.UNDECIDED, group)
        assert registry.transport_name(opened) == chosen
        assert registry.choose_transport("auto", group, GPU) == chosen
        assert registry.open_transport(chosen, group) is opened


@pytest.mark.parametrize("name", ["nccl", "nccl2", "nccl-lazy"])
def test_groups_of_every_nccl_are_taken(name: str) -> None:
    """A group that torch 2.15 creates with "nccl" says "nccl2"."""
    group = mock.Mock(_get_backend=lambda device: mock.Mock(**{"name.return_value": name}))
    assert registry.choose_transport("nccl", group, GPU) == "nccl"


def test_groups_without_nccl_are_refused() -> None:
    group = mock.Mock(_get_backend=lambda device: mock.Mock(**{"name.return_value": "gloo"}))
    with pytest.raises(NotImplementedError, match="group must have backend 'nccl' for tensors on cuda, got 'gloo'"):
        registry.choose_transport("auto", group, GPU)


@pytest.mark.parametrize(
    "name, algorithm, moved_by",
    [
        ("auto", registry.UNDECIDED, registry.UNDECIDED), ("nccl", Algorithm.GATHER, "nccl"),
        ("copy_engine", Algorithm.GATHER, "copy_engine"), ("by_host", Algorithm.BY_HOST, "nccl"),
        ("ulysses", Algorithm.ULYSSES, registry.UNDECIDED),
    ],
)  # fmt: skip
def test_transport_argument_names_algorithms_too(name: str, algorithm: object, moved_by: object) -> None:
    group, shape = mock.Mock(size=lambda: 4), CallShape(8, KVShape(1, 16, 2, 64), torch.bfloat16, GPU)
    with (
        mock.patch.object(registry, "backend_of", lambda group, device: "nccl"),
        mock.patch.object(plan, "known_split", lambda group: HostSplit(2, 2)),
    ):
        assert plan._choose_algorithm(CallOptions(group, transport=name), shape)[:2] == (algorithm, moved_by)


class Part(Messages):
    """Messages among the ranks of a host."""

    num_posted, rank, group = 0, 0, mock.Mock(group_name="0")

    def among(self, members: tuple[int, ...]) -> Part:
        self.members = members
        return self


@pytest.mark.parametrize("problem", [None, OUT_OF_REACH, NOT_PERMITTED])
def test_heads_travel_over_the_copy_engine_in_reach(problem: copy_engine.NoCopyEngine | None) -> None:
    group, memory = mock.Mock(_device_types=(), rank=lambda: 3), mock.Mock()
    memory.side_effect = problem
    warned: Any = pytest.warns(UserWarning, match="by messages of NCCL, since .* pidfd_getfd")
    with (
        mock.patch.object(registry, "CopyEngine", memory),
        mock.patch.object(registry, "PointToPoint", Part),
        warned if problem is NOT_PERMITTED else nullcontext(),
    ):
        opened = registry.open_exchange_areas(group, HostSplit(2, 2), GPU)
        assert registry.open_exchange_areas(group, HostSplit(2, 2), GPU) is opened
    if problem is None:
        assert opened is memory.return_value and memory.call_args.args[2] == HostSplit(2, 2)
    else:
        assert registry.transport_name(opened) == "nccl" and opened.members == (2, 3)


def test_ranks_of_a_host_are_found_by_name() -> None:
    group, store = mock.Mock(group_name="0", rank=lambda: 3), dist.HashStore()
    with mock.patch("ringflash.comm.communicator._get_process_group_store", lambda _: store):
        name, made = communicator.register_members(group, (2, 3))
        other, _ = communicator.register_members(group, (2, 3))
    assert name != other and _resolve_process_group(name) is made  # type: ignore[arg-type]
    assert (made.rank(), made.size()) == (1, 2)


def test_each_host_is_checked() -> None:
    """Two hosts of two GPUs share no memory, and each rank that of its host; one without peer access stops all."""
    places = [[f"host{rank // 2}", f"gpu{rank}", []] for rank in range(4)]
    group = mock.Mock(group_name="0", rank=lambda: 3)
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(copy_engine, "_location", lambda _: None),
        mock.patch.object(copy_engine, "gather", lambda *_: places),
        mock.patch.object(copy_engine, "register_members", lambda _, members: (f"of {members}", None)),
        mock.patch.object(copy_engine.cuda_graphs, "capturing", lambda _: False),
        mock.patch.object(copy_engine.CopyEngine, "_count_exchanges"),
        mock.patch.object(copy_engine.CopyEngine, "_map"),
        mock.patch.object(copy_engine, "register_peers"),
    ):
        memory = copy_engine.CopyEngine(group, 1000, HostSplit(2, 2))
        assert (memory.rank, memory.members, memory._mapping[0]) == (1, (2, 3), "of (2, 3)")
        places[0][2] = ["gpu1"]
        with pytest.raises(copy_engine.OutOfReach, match=r"ranks \[0\] have no peer access"):
            copy_engine.CopyEngine(group, 1000, HostSplit(2, 2))


class Process:
    """A rank, in a thread, that maps memory as torch does: in two exchanges of keys, whose numbers it counts.

    Args:
        by_store: count by store, as torch 2.15 does, and not by process.
        fails: sizes of the groups in which its mappings fail.
    """

    here = threading.local()
    rounds = threading.Barrier(2, timeout=30)
    answers: list[Any] = [None, None]

    def __init__(self, rank: int, by_store: bool = False, fails: tuple[int, ...] = ()) -> None:
        self.rank, self.by_store, self.count, self.of_group = rank, by_store, 0, Counter[str]()
        self.fails = fails

    def rendezvous(self, area: torch.Tensor, name: str) -> torch.Tensor:
        group = _resolve_process_group(name)  # type: ignore[arg-type]
        if group.size() in self.fails:
            raise RuntimeError("too many open files")
        store = group.get_group_store()
        for _ in range(2):
            number = self.of_group[name] if self.by_store else self.count
            self.of_group[name] += 1
            self.count += 1
            store.set(f"CUDASymmetricMemory/{number}/{group.rank()}", "here")
            store.wait([f"CUDASymmetricMemory/{number}/{rank}" for rank in range(group.size())])
        return area

    @classmethod
    def gather(cls, group: object, said: object) -> list:
        cls.answers[cls.here.process.rank] = said
        cls.rounds.wait()
        answers = cls.answers.copy()
        cls.rounds.wait()
        return answers


def symmetric_memory_on_cpu(
    monkeypatch: pytest.MonkeyPatch, rendezvous: Any, gather: Any, backend: str | None = None
) -> None:
    """Let torch's symmetric memory be of the CPU, on ranks that are in reach of one another.

    Args:
        rendezvous, gather: stand in for what maps memory, and for what collects answers of ranks.
        backend: of symmetric memory; torch has one with CUDA only.
    """
    kind = copy_engine._SymmetricMemory
    monkeypatch.setattr(kind, "empty_strided_p2p", lambda size, _, dtype, __: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(kind, "rendezvous", rendezvous)
    monkeypatch.setattr(kind, "get_backend", lambda _: backend)
    monkeypatch.setattr(copy_engine, "gather", gather)
    for name in ("_check_locations", "_location", "register_peers"):
        monkeypatch.setattr(copy_engine, name, lambda *_: None)
    for name in ("current_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Function that reserves an area on two ranks at once; it returns their errors."""
    here = Process.here
    symmetric_memory_on_cpu(
        monkeypatch, rendezvous=lambda *what: here.process.rendezvous(*what), gather=Process.gather, backend="CUDA"
    )
    monkeypatch.setattr(copy_engine.cuda_graphs, "capturing", lambda _: False)

    def reserve(ranks: list[Process], timeout_s: float = 30.0) -> list[Any]:
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=timeout_s))

        def run(process: Process) -> Exception | None:
            here.process = process
            group = dist.ProcessGroup(store, process.rank, 2)
            name = f"both {process.rank}"
            torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
            try:
                memory = copy_engine.CopyEngine(mock.Mock(rank=lambda: process.rank, group_name=name), 1000)
                memory.reserve("kv", 16)
                return None
            except RuntimeError as error:
                return error
            finally:
                torch._C._distributed_c10d._unregister_process_group(name)  # type: ignore[arg-type]

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, ranks))

    return reserve


@pytest.mark.parametrize("ahead", [0, 2, 3, 7])
def test_ranks_that_mapped_unequally_map_together(processes: Callable[..., list[Any]], ahead: int) -> None:
    """Other groups of one rank grew more often, or another library mapped memory, of three exchanges with multicast."""
    first, second = Process(0), Process(1)
    second.count = ahead
    assert processes([first, second]) == [None, None]
    assert first.count == second.count


def test_exchanges_counted_by_store_are_equal(processes: Callable[..., list[Any]]) -> None:
    ranks = [Process(rank, by_store=True) for rank in range(2)]
    ranks[1].count = 7
    assert processes(ranks) == [None, None]
    assert ranks[1].count - 7 == ranks[0].count  # nothing was added


def test_an_error_of_one_rank_is_raised_on_both(processes: Callable[..., list[Any]]) -> None:
    """Before the ranks map memory together, where the other one would wait."""
    begun = [Process(0), Process(1, fails=(1, 2))]
    for error in processes(begun):
        assert isinstance(error, copy_engine.NoCopyEngine) and "{1: 'too many open files'}" in str(error)
    assert begun[0].count == 2  # only its own


def test_error_of_a_single_rank_is_named(processes: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is in the mapping still, and does not answer."""
    silent = RuntimeError("some of the 2 ranks of the group did not join the call")

    def gather(group: object, said: object) -> list:
        if said == "too many open files":
            Process.rounds.abort()
            raise silent
        return Process.gather(group, said)

    monkeypatch.setattr(copy_engine, "gather", gather)
    monkeypatch.setattr(Process, "rounds", threading.Barrier(2))
    error = processes([Process(0), Process(1, fails=(2,))], 0.2)[1]
    assert isinstance(error, copy_engine.NoCopyEngine) and "too many open files" in str(error)
    assert error.__cause__ is silent


def test_barriers_give_up_after_the_watch_has_reported() -> None:
    with mock.patch.object(registry, "CopyEngine") as memory:
        registry.open_transport("copy_engine", mock.Mock(_device_types=()))
    timeout_ms = memory.call_args.args[1]
    assert timeout_ms > timeout().total_seconds() * 1000 == 600_000


def test_auto_hides_no_other_error() -> None:
    """A rank that does not answer, or a call that is captured before its first: not a matter of the transport."""
    memory = mock.Mock()
    memory.side_effect = RuntimeError("no answer from some of 4 ranks")
    group = mock.Mock(_device_types=())
    with mock.patch.object(registry, "CopyEngine", memory), pytest.raises(RuntimeError, match="no answer"):
        registry.open_transport(registry.UNDECIDED, group)
    assert group not in registry._decided


def test_memory_of_messages_lives_with_its_group() -> None:
    """A group of the same name, made after the first was destroyed, has its own; the first one's is given back."""
    first, second = (mock.Mock(group=mock.Mock(group_name="0")) for _ in range(2))
    for channel in (first, second):
        channel.name, channel.members = "nccl", ()
    cpu, before = torch.device("cpu"), registry.buffer_bytes()
    memory = registry.open_gather_areas(first, cpu)
    memory.reserve("kv", 1000)
    assert registry.open_gather_areas(first, cpu) is memory and registry.buffer_bytes() == before + 1000
    gone = ref(memory)
    del memory
    assert registry.open_gather_areas(second, cpu).channel is second
    gc.collect()
    assert gone() is None and registry.buffer_bytes() == before


def test_all_ranks_choose_the_same_blocks() -> None:
    """The rank with most keys decides: of these documents ranks see different numbers of chunks."""
    mask = SequenceMask(1 << 16, True, (-1, -1), (0, 30000, 30001, 1 << 16))
    groups = [mock.Mock(**{"size.return_value": 4, "rank.return_value": rank}) for rank in range(4)]
    plans = [plan.CallPlan(mask, "reference", "", Algorithm.GATHER, "nccl", CallOptions(group)) for group in groups]
    assert len({one.all_keys.num_rows for one in plans}) > 1
    q, k = (torch.empty(1, 1 << 14, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    limit = sections.gather_bytes(sections.GatherSizes.of([plans[0].all_keys], k.shape, 32, k.dtype))
    for most, num_blocks in ((limit, 1), (limit - 1, 4)):
        with mock.patch.object(sections, "MAX_GATHER_BYTES", most):
            for name in ("nccl", "copy_engine", registry.UNDECIDED):
                moved = [replace(one, transport=name) for one in plans]
                assert [len(one.key_blocks(CallShape.of(q, k, k))) for one in moved] == [num_blocks] * 4


def test_a_buffer_that_grew_is_held_by_no_earlier_mask() -> None:
    """Packed data bring masks of ever more keys: what is kept of the calls before would hold each one's buffers."""
    channel = mock.Mock(group=mock.Mock(group_name="0"), rank=1)
    k = torch.empty(1, 64, 2, 8)
    held: list[StorageWeakRef] = []
    with mock.patch.object(sections, "MAX_UNBUFFERED_KV_BYTES", 0), mock.patch.object(buffers, "_storage", {}):
        memory = registry.NcclGather(channel, k.device)
        for window in (9, 30, 60):
            block = schedule.plan_single_block(SequenceMask(192, False, (window, window)), 3, 1, "contiguous")
            call = gather_by_heads.GatherAttention((block,), memory, "reference", 1.0, False)
            gathered = call._gathered("backward", k, k, 2)
            call._cached("return", ("kv", "dkv"), k, k, 2, partial(gradient_return.GradientReturn.of, gathered, k))
            del gathered
            assert all(storage.expired() for storage in held)
            held = [StorageWeakRef(storage.untyped_storage()) for storage in buffers._storage.values()]
            assert len(held) == 2  # of K/V, and of gradients that returned


def test_buffer_is_freed_before_a_larger_one() -> None:
    empty = torch.empty
    with mock.patch.object(buffers, "_storage", {}):
        held = StorageWeakRef(buffer("kv.0", (8,), torch.uint8, torch.device("cpu")).untyped_storage())

        def larger(*args: int, **options: Any) -> torch.Tensor:
            assert held.expired()
            return empty(*args, **options)

        with mock.patch.object(torch, "empty", larger):
            assert buffer("kv.0", (9,), torch.uint8, torch.device("cpu")).numel() == 9


def test_plans_are_kept_for_equal_calls_of_live_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of other strides or addresses, and other options or hosts, are planned anew."""
    made, alive = list[Any](), [object()]
    decided = [Algorithm.GATHER]

    def make(call: CallInputs) -> plan.CallPlan:
        made.append(call.grad_flags)
        return plan.CallPlan(mock.Mock(), "hopper", "", decided[0], "copy_engine", call.options)

    monkeypatch.setattr(plan, "plan_cache", {})
    monkeypatch.setattr(plan, "plan_call", make)
    monkeypatch.setattr(plan, "store_of", lambda group: group if group in alive else None)
    monkeypatch.setattr(plan, "known_split", lambda _: splits[0])
    monkeypatch.setattr(plan.cuda_graphs, "capturing", lambda _: False)
    splits: list[HostSplit | None] = [None]

    def ask(
        stride: int = 8, address: int = 0, flags: int = 0, group: object = alive[0], causal: bool = True,
        documents: Documents | None = None,
    ) -> int:  # fmt: skip
        x: Any = mock.Mock(device=torch.device("cuda", 0), shape=(1, 8, 2, 8), dtype=torch.bfloat16)
        x.stride.return_value, x.data_ptr.return_value = (stride,), address
        plan.plan_of(CallInputs(x, x, x, documents, CallOptions(group, causal), flags))  # type: ignore[arg-type]
        return len(made)

    assert [ask(), ask(), ask(address=32), ask(stride=9), ask(address=2), ask(flags=7)] == [1, 1, 1, 2, 3, 4]
    assert [ask(causal=False), ask(), ask(causal=False)] == [5, 5, 5]
    splits[0] = HostSplit(1, 2)
    assert [ask(), ask()] == [6, 6]
    packed = Documents((0, 3, 16))
    assert [ask(documents=packed), ask(documents=packed)] == [7, 7]
    with mock.patch.object(plan.cuda_graphs, "capturing", lambda _: True):  # `plan_call` refuses them
        assert [ask(), ask(documents=packed)] == [7, 8]
    decided[0] = registry.UNDECIDED  # type: ignore[call-overload]
    assert [ask(stride=7), ask(stride=7)] == [9, 10]
    decided[0], other = Algorithm.GATHER, object()
    alive[:] = [other]
    assert ask(group=other) == 11 and len(plan.plan_cache) == 1
    for bound in range(1, 60):  # packed data have other documents in each step
        ask(group=other, documents=Documents((0, bound, 64)))
    assert len(plan.plan_cache) <= schedule.plan_single_block.cache_parameters()["maxsize"] + 1
    for bound in range(46, 60):  # rows of a batch, which each layer attends in turn
        ask(group=other, documents=Documents((0, bound, 64)))
    assert ask(group=other) == 11 + 59  # and calls without documents keep theirs
