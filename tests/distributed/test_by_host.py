"""All-to-all of heads in a host, and the ring between hosts, against dense attention in fp64. 4 or 6 CPU processes.

Hosts are pretended: a mesh names them, or `this_host` is patched. Heads are exchanged by messages over gloo, and over
shared memory and slow threads, as the copy engine does. Cases follow the splits; the ring between hosts has its own
tests in every case. tests/unit/test_happens_before.py leaves out each wait in turn.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringflash
from ringflash.attention import head_exchange, plan, ulysses
from ringflash.attention.head_exchange import AllToAll, Share
from ringflash.comm import call_numbers
from ringflash.comm.group import Host, HostSplit, known_split, remember_split, resolve
from ringflash.comm.hosts import split_hosts
from ringflash.comm.transport import Message, Pending, PointToPoint
from ringflash.sequence import layout as layouts
from tests.distributed.test_blocks_of_keys import in_blocks
from tests.helpers import refusals, ring_check
from tests.helpers.cases import Case, narrow_cases
from tests.helpers.peer_memory import SharedMemory, heads_in_shared_memory
from tests.helpers.pool import Context, Pool, WorkerError, on_ranks

CASES = [
    Case(num_kv_heads=4),
    Case(documents="mixed", window="left"),
    Case(causal=False, window="both", documents="crossing", num_kv_heads=1),
    Case(layout="contiguous", batch=2, num_heads=8, num_kv_heads=4),
    Case(documents="crossing", lse_gradient=False, strides="fused_qkv"),
    Case(num_heads=12, num_kv_heads=3, window="self"),
    Case(window="wide", documents="aligned", strides="expanded_dout"),
    Case(documents="deep"),
    replace(narrow_cases()[0], num_heads=4),
]
STRIPED = Case(layout="striped", documents="mixed", window="left")


def on_hosts(ctx: Context, num_hosts: int) -> Context:
    """The context with a mesh of this number of hosts; with none, as it is."""
    if not num_hosts:
        return ctx
    grid = torch.arange(ctx.size).view(num_hosts, -1)
    mesh = DeviceMesh(ctx.device.type, grid, mesh_dim_names=("host", "gpu"))
    assert known_split(resolve(mesh)) == grid.shape  # whatever meshes earlier tests made of the same ranks
    return ctx._replace(group=mesh)


def check_all(ctx: Context, transport: str, num_hosts: int, cases: list[Case], chunk: int = 6) -> None:
    ctx = on_hosts(ctx, num_hosts)
    for case in cases:
        ring_check.check(ctx, replace(case, transport=transport), chunk)


def test_ulysses(pool: Pool) -> None:
    pool.run(check_all, "ulysses", 0, CASES)
    pool.run(check_all, "ulysses", 0, [STRIPED], 32, size=2)


@pytest.mark.parametrize("num_hosts", [2, 1, 4])
def test_by_host(pool: Pool, num_hosts: int) -> None:
    pool.run(check_all, "by_host", num_hosts, CASES if num_hosts == 2 else CASES[1:3])
    if num_hosts == 2:
        pool.run(check_all, "by_host", num_hosts, [STRIPED], 32)


@pytest.mark.parametrize("num_hosts", [2, 0])
@on_ranks(4)
def test_in_shared_memory(ctx: Context, num_hosts: int) -> None:
    with heads_in_shared_memory():
        for number, case in enumerate(CASES):
            with ExitStack() as blocks:
                if number % 2:
                    blocks.enter_context(in_blocks(1 + number % 3))
                transport = "by_host" if num_hosts else "ulysses"
                check_all(ctx, transport, num_hosts, [case], (6, 3, 9, 1, 5)[number % 5])


def test_hosts_of_other_sizes() -> None:
    """Three hosts of two ranks, and two of three."""
    pool, cases = Pool(6), [Case(num_heads=12, num_kv_heads=4), Case(num_heads=12, num_kv_heads=1, documents="mixed")]
    try:
        for split in (HostSplit(3, 2), HostSplit(2, 3)):
            pool.run(check_split, split, cases)
    finally:
        pool.close()


def check_split(ctx: Context, split: HostSplit, cases: list[Case]) -> None:
    remember_split(ctx.group, split)
    check_all(ctx, "by_host", 0, cases[:1])
    with heads_in_shared_memory(), in_blocks(2):
        check_all(ctx, "by_host", 0, cases)


class Host2:
    """Areas of the ranks of one host in this process."""

    def __init__(self, rank: int, areas: dict[tuple[str, int], torch.Tensor]) -> None:
        self.rank, self.areas = rank, areas

    def reserve(self, name: str, num_bytes: int) -> None:
        self.areas.setdefault((name, self.rank), torch.empty(num_bytes, dtype=torch.uint8))

    def view(self, name: str, rank: int, *_: object) -> torch.Tensor:
        self.areas.setdefault((name, rank), torch.empty_like(self.areas[name, self.rank]))
        return self.areas[name, rank]

    make_transfer = SharedMemory.make_transfer


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize(("num_hosts", "num_gpus"), [(3, 2), (2, 3), (4, 8), (1, 5), (5, 1)])
def test_rows_of_a_host_are_a_shard_over_hosts(num_hosts: int, num_gpus: int, layout: str) -> None:
    size, cpu = num_hosts * num_gpus, torch.device("cpu")
    for rows, host in product((1, 3), range(num_hosts)):  # of a chunk
        seqlen = rows * layouts.granularity(size, layout)
        mine = [ringflash.local_positions(seqlen, size, host * num_gpus + gpu, layout) for gpu in range(num_gpus)]
        theirs = ringflash.local_positions(seqlen, num_hosts, host, layout)
        areas: dict[tuple[str, int], torch.Tensor] = {}
        part = Share(1, seqlen // size, 1, 1, torch.int64)
        chunks = layouts.chunks_of_rank(layout)
        with mock.patch.object(head_exchange, "buffer", lambda _, *rest: torch.empty(rest[0], dtype=rest[1])):
            there, back = (
                [AllToAll(Host2(gpu, areas), num_gpus, area, chunks, (part,), 1, cpu) for gpu in range(num_gpus)]  # type: ignore[arg-type]
                for area in ("heads", "rows")
            )
        for exchanges, given, want in (
            (there, [x[None, :, None, None].expand(1, -1, num_gpus, 1) for x in mine], [theirs] * num_gpus),
            (back, [theirs[None, :, None, None]] * num_gpus, mine),
        ):
            for all_to_all, x in zip(exchanges, given, strict=True):
                all_to_all.fill(x)
            for all_to_all, positions in zip(exchanges, want, strict=True):
                all_to_all.transfers[0]()
                (got,) = all_to_all.received_tensors()
                assert all(torch.equal(got[0, :, head, 0], positions) for head in range(got.shape[2]))
                assert all_to_all.to_host or got.untyped_storage().nbytes() == got.nbytes  # no view of a buffer


def test_shared_kv_heads() -> None:
    """Every rank has the KV heads of its query heads, in groups of equal size."""
    for num_ranks, num_heads, num_kv_heads in ((4, 8, 2), (8, 32, 8), (2, 12, 3), (8, 64, 8), (2, 6, 1), (4, 4, 4)):
        heads = ulysses.kv_heads_by_rank(num_ranks, num_heads, num_kv_heads)
        served = torch.tensor(heads).repeat_interleave(num_heads // len(heads))
        assert served.tolist() == [head * num_kv_heads // num_heads for head in range(num_heads)]
        assert len(heads) % num_ranks == 0
    assert ulysses.kv_heads_by_rank(8, 32, 8) == tuple(range(8))


def test_gradients_of_shared_heads_are_summed_in_fp32() -> None:
    """In bf16 256 + 1 is 256."""
    grad = torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16().view(1, 1, 4, 1)
    assert ulysses._sum_shared(grad, (0, 0, 0, 0), 1).item() == 260


@on_ranks(4)
def test_low_precision_of_shared_heads(ctx: Context) -> None:
    """The gradients of one KV head are the sum of four ranks' or two."""
    for num_hosts in (1, 2):
        ring_check.check(on_hosts(ctx, num_hosts), Case(num_kv_heads=1, transport="by_host"), 32, "bfloat16")


@on_ranks(4)
def test_words_of_heads_are_used_again(ctx: Context) -> None:
    """Host memory for the numbers of calls does not grow with the calls."""
    q, held = torch.randn(1, 8, 4, 16), []
    for _ in range(4):
        ringflash.ring_attention(q, q, q, group=ctx.group, transport="ulysses")
        held.append(len(call_numbers._host_words))
    assert held[0] == held[-1]


def without(ctx: Context, name: str) -> float:
    """Largest part of the tolerance that a call spends if one step is wrong."""
    wrong: dict[str, Callable[..., Any]] = {
        "_chunks_of": lambda self, x, rank, by_rank: _CHUNKS_OF(self, x if by_rank else x.movedim(2, 0), rank, True),
        "_sum_shared": lambda grad, shared, heads: grad[:, :, :heads],
    }
    owner = ulysses if name == "_sum_shared" else AllToAll
    with mock.patch.object(owner, name, wrong[name]):
        case = Case(num_kv_heads=1, transport="by_host")
        return max(ratio.maximum for ratio in ring_check.measure(on_hosts(ctx, 2), case, 6, "float64", "reference"))


_CHUNKS_OF = AllToAll._chunks_of


@pytest.mark.parametrize("name", ["_chunks_of", "_sum_shared"])
def test_a_wrong_step_is_noticed(pool: Pool, name: str) -> None:
    assert min(pool.run(without, name)) > 1


def bytes_between_hosts(ctx: Context, transport: str, case: Case) -> int:
    """Bytes of K/V and gradients that this rank sends to the other of two hosts in one forward and backward."""
    sent = 0

    def post(self: PointToPoint, sends: list[Message], recvs: list[Message]) -> Pending:
        nonlocal sent
        for message in sends:
            is_number = message.tensor.nbytes == 8  # of the call
            if not is_number and self.rank_in_group(message.rank) // 2 != ctx.rank // 2:
                sent += message.tensor.nbytes
        return original(self, sends, recvs)

    original = PointToPoint.post
    with mock.patch.object(PointToPoint, "post", post):
        ring_check.check(on_hosts(ctx, 2), replace(case, transport=transport))
    return sent


@pytest.mark.parametrize("case", [Case(causal=False), Case(), Case(num_heads=8, num_kv_heads=8)], ids=str)
def test_each_key_enters_a_host_once(pool: Pool, case: Case) -> None:
    flat, nested = (pool.run(bytes_between_hosts, transport, case) for transport in ("gloo", "by_host"))
    rows, heads = 2 * 6 * 2, case.num_kv_heads // 2  # of a host; of a rank
    half = rows * heads * case.head_dim * 8  # K and V of a chunk
    sent = (1, 2) if case.causal else (2, 2)  # chunks that the other host sees: of 0 and 3, and of 1 and 2
    assert nested == [(2 * sent[host] + sent[1 - host]) * half for host in (0, 0, 1, 1)]  # in both passes; gradients
    assert sum(flat) == 2 * sum(nested)


def from_names(ctx: Context, hosts: list[str]) -> list[str]:
    """Errors of a call over a group that finds its hosts, of one name, by itself, and of one with other heads."""
    texts = []
    group = torch.distributed.new_group(list(range(ctx.size)))
    for num_heads in (4, 6, 6):
        case = Case(num_heads=num_heads, transport="by_host")
        with mock.patch("ringflash.comm.hosts.this_host", lambda: Host("image", hosts[ctx.rank])):
            try:
                ring_check.check(ctx._replace(group=group), case)
                texts.append("")
            except (ValueError, NotImplementedError) as error:
                texts.append(str(error))
    return texts


def test_a_group_finds_its_hosts(pool: Pool) -> None:
    for good, *bad in pool.run(from_names, ["a", "a", "b", "b"]):
        assert not good and not any(bad)  # six heads over two ranks
    for texts in pool.run(from_names, ["a", "a", "a", "a"]):  # Ulysses
        assert not texts[0] and all("num_heads must be divisible by the 4 ranks" in text for text in texts[1:])
    for texts in pool.run(from_names, ["a", "b", "a", "b"]):
        assert all("must have the same number of ranks, numbered host by host" in text for text in texts)


def chosen_by_auto(ctx: Context, hosts: list[str]) -> tuple[str, list[str]]:
    """Return what auto takes for heads that hosts can and cannot divide, after a first call over "NCCL"."""
    ctx = ctx._replace(group=torch.distributed.new_group(list(range(ctx.size))))
    x = torch.ones(1, 8, 4, 16)
    with (
        mock.patch("ringflash.comm.hosts.this_host", lambda: Host(hosts[ctx.rank], "")),
        mock.patch.object(plan, "choose_transport", lambda *_: plan.UNDECIDED),
        mock.patch.object(
            plan,
            "open_transport",
            lambda name, group: PointToPoint("gloo", group) if name is not plan.UNDECIDED else None,
        ),
        mock.patch.object(plan, "transport_name", lambda channel: "gloo" if channel else "nccl"),
    ):
        before = ringflash.explain(x, x, x, group=ctx.group)
        ring_check.check(ctx, Case())
    return str(before), [str(ringflash.explain(y, y, y, group=ctx.group)) for y in (x, x[:, :, :3])]


def test_auto_takes_by_host(pool: Pool) -> None:
    for before, (four, three) in pool.run(chosen_by_auto, ["a", "a", "b", "b"]):
        assert "algorithm gather or by_host, transport copy_engine or nccl (decided by the first call)" in before
        assert "algorithm by_host, transport gloo (2 x 2 (hosts x GPUs))" in four
        assert "all-to-all of heads: 2 of 4 query heads of 16 rows of the host, 2 of 4 KV heads" in four
        assert "attention between ranks (" in four and " keys of ranks [" in four
        assert "algorithm gather, transport gloo (2 x 2 (hosts x GPUs): 3 query heads cannot be divided by 2)" in three
    for _, texts in pool.run(chosen_by_auto, ["a", "b", "b", "b"]):
        assert all("gloo (all hosts of the group must have the same number of ranks" in text for text in texts)
    for _, texts in pool.run(chosen_by_auto, ["a"] * 4):
        assert all("heads are exchanged only between several GPUs on each of several hosts" in text for text in texts)


@on_ranks(4)
def test_auto_follows_a_mesh_on_cpus(ctx: Context) -> None:
    ctx = on_hosts(ctx, 2)
    ring_check.check(ctx, Case())
    x = torch.ones(1, 8, 4, 16)
    explained = ringflash.explain(x, x, x, group=ctx.group)
    assert (explained.algorithm, explained.transport) == ("by_host", "gloo")


def test_hosts_from_names() -> None:
    assert split_hosts(["x", "x", "y", "y", "z", "z"]) == (3, 2)
    assert split_hosts(["x", "y"]) == (2, 1)
    with pytest.raises(NotImplementedError, match=r"got \[2, 1\] consecutive ranks on 2 hosts"):
        split_hosts(["x", "x", "y"])


@on_ranks(4, timeout_s=20)
def test_refused_on_every_rank(ctx: Context) -> None:
    """Calls that exchange heads; good calls before and after are unharmed."""
    good = {**refusals.good_call(ctx), "group": on_hosts(ctx, 2).group, "transport": "by_host"}
    ringflash.ring_attention(**good)
    q = good["q"]
    for message, change in (
        (
            "num_heads must be divisible by the 2 ranks that exchange heads, got 3",
            {"q": torch.ones(1, refusals.LENGTH, 3, 16), "k": q[:, :, :1], "v": q[:, :, :1]},
        ),
        (r"transport gloo \(rank 0\), by_host \(rank 1, 2, 3\)", {"transport": "by_host" if ctx.rank else "gloo"}),
        ("impl must be", {"impl": "reference" if ctx.rank else "flash9"}),
        ("whose ranks ascend", {"group": DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("host", "gpu"))}),
    ):
        with pytest.raises(ValueError, match=message):
            ringflash.ring_attention(**{**good, **change})
    ringflash.ring_attention(**good)


def lose_the_last(ctx: Context) -> None:
    """The last rank dies after its first exchange of heads, while its host and its rail wait for it."""
    ringflash.set_timeout(3)
    if ctx.rank == ctx.size - 1:
        AllToAll.received_tensors = lambda *_: os._exit(3)  # type: ignore[method-assign]
    ring_check.check(on_hosts(ctx, 2), Case(transport="by_host"))


def test_a_lost_rank_ends_all_others(pool: Pool) -> None:
    with pytest.raises(WorkerError) as error:
        pool.run(lose_the_last, timeout_s=60)
    text = str(error.value)
    assert all(f"rank {rank} raised" in text for rank in range(3))
    assert "exchanged rows of rank 2 to rank 3 over gloo" in text
    assert re.search("K/V of section 0 of rank 1 (to|from) rank 3 over gloo", text)
