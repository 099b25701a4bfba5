"""Tensors that CUDA graphs keep, and launches without triton's look at the arguments, with CUDA played by stand-ins."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.knobs import runtime

import ringflash
from ringflash.attention import ring_call
from ringflash.comm import cuda_graphs
from ringflash.comm.transport import buffer, buffers, gpu_areas
from ringflash.comm.transport.areas import BEGIN
from ringflash.comm.transport.copy_engine import CopyEngine
from ringflash.comm.transport.message_gather import NcclGather
from ringflash_kernels.api import observed_launches
from ringflash_kernels.flash_calls import calls
from ringflash_kernels.hopper import launcher
from ringflash_kernels.hopper.forward import host
from ringflash_kernels.hopper.launcher import Launch, Launcher
from ringflash_kernels.mask import Mask
from tests.unit.test_transports import symmetric_memory_on_cpu

CPU = torch.device("cpu")
STREAMS = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))  # driver of triton


class Capture:
    """A switch: a graph is captured if the test says so."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self, device: torch.device) -> bool:
        return self.on


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    monkeypatch.setattr(buffers, "_storage", {})
    capture = Capture()
    monkeypatch.setattr(cuda_graphs, "capturing", capture)
    yield capture
    cuda_graphs.drop_captured()


def test_a_captured_buffer_outlives_its_growth(capture: Capture) -> None:
    buffer("kv", (4,), torch.float32, CPU)
    capture.on = True
    captured = buffer("kv", (4,), torch.float32, CPU)
    capture.on = False
    grown = buffer("kv", (8,), torch.float32, CPU)
    assert grown.data_ptr() != captured.data_ptr()
    assert [held.data_ptr() for held in cuda_graphs.held_tensors()] == [captured.data_ptr()]
    assert ringflash.buffer_bytes() == 16 + 32
    ringflash.release_buffers()
    assert ringflash.buffer_bytes() == 0 and not cuda_graphs.held_tensors()


def test_a_buffer_may_not_grow_in_a_capture(capture: Capture) -> None:
    capture.on = True
    with pytest.raises(RuntimeError, match="'kv' would grow to 16 bytes; run the same call once before"):
        buffer("kv", (4,), torch.float32, CPU)


def test_a_capture_with_documents_is_refused(capture: Capture) -> None:
    """Replays would use its bounds for other documents. The backward of an eager forward has them, too."""
    q = torch.ones(1, 16, 2, 8, requires_grad=True)
    bounds = torch.tensor([0, 5, 16], dtype=torch.int32)
    out = ringflash.ring_attention(q, q, q, group=None, cu_seqlens=bounds)
    capture.on = True
    ringflash.ring_attention(q, q, q, group=None)
    with pytest.raises(NotImplementedError, match="cu_seqlens must be None while a CUDA graph is captured"):
        ringflash.ring_attention(q, q, q, group=None, cu_seqlens=bounds)
    with pytest.raises(NotImplementedError, match="every replay would use the bounds of the capture"):
        out.sum().backward()


class Handle:
    """Areas that all ranks have mapped."""

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Do nothing."""


@pytest.fixture
def areas(monkeypatch: pytest.MonkeyPatch) -> CopyEngine:
    """Areas of a group of one, on the CPU."""
    symmetric_memory_on_cpu(monkeypatch, rendezvous=lambda *_: Handle(), gather=lambda group, said: [said])
    return CopyEngine(mock.Mock(rank=lambda: 0), 1000)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("messages", [True, False])
def test_captured_areas_outlive_their_growth(
    capture: Capture, areas: CopyEngine | NcclGather, messages: bool, captured: bool
) -> None:
    areas = NcclGather(mock.Mock(rank=0, members=()), CPU) if messages else areas
    areas.reserve("kv", 16)
    old = [areas._areas["kv"], *([] if messages else [areas._handles["kv"]])]  # type: ignore[union-attr]
    capture.on = captured
    views = areas.cached("views", ("kv",), lambda: ["of the area"])
    capture.on = False
    areas.reserve("kv", 32)
    assert areas.cached("views", ("kv",), lambda: ["of the new one"]) is not views
    held = {id(thing) for thing in cuda_graphs._held.values()}
    assert held == ({id(views), *map(id, old)} if captured else set())


def test_an_area_that_grew_is_held_no_more(capture: Capture, areas: CopyEngine) -> None:
    areas.reserve("kv", 16)
    capture.on = True
    areas.cached("views", ("kv",), lambda: ["of the area"])
    capture.on = False
    for size in (32, 64):
        areas.reserve("kv", size)
    assert [held.nbytes for held in cuda_graphs.held_tensors()] == [16]


def test_a_captured_forward_keeps_its_barriers(capture: Capture, areas: CopyEngine) -> None:
    """Its graph holds the address of their pad, whichever areas the calls between two replays have grown."""
    for name, size in (("kv", 16), ("dkv", 16), ("kv", 32)):  # "dkv" is then the oldest area
        areas.reserve(name, size)
    used = []
    with mock.patch.object(Handle, "barrier", lambda pad, *_: used.append(ref(pad))):
        capture.on = True
        areas.cached("forward", ("kv",), lambda: ["views"])
        areas.barrier(BEGIN)
        capture.on = False
        areas.reserve("dkv", 64)
        areas.reserve("kv", 64)
        gc.collect()
        areas.barrier(BEGIN)
    assert used[0]() is not None and used[0]() is used[1]()


class Compiled:
    """A kernel that notes its launches."""

    packed_metadata, function = (), "function"

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
        return lambda *args, stream: self.launches.append(("hooks", stream, *args))

    def run(self, *args: object) -> None:
        *grid, stream, function, metadata, of_launch, enter, leave = args[:9]
        assert (*grid, function, metadata, of_launch, enter, leave) == (1, 1, 1, "function", (), None, None, None)
        self.launches.append(("direct", stream, *args[9:]))


class Kernel:
    """A kernel of triton: compiles at every call."""

    params = tuple(SimpleNamespace(name=name) for name in ("x", "n", "BLOCK"))

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]):  # type: ignore[no-untyped-def]
        def call(*args: object, **options: object) -> Compiled:
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return call


@pytest.mark.parametrize("specialised, variants", [(True, 4), (False, 2)])
def test_launches_compile_once_for_what_triton_finds(
    monkeypatch: pytest.MonkeyPatch, specialised: bool, variants: int
) -> None:
    monkeypatch.setattr(launcher, "driver", STREAMS)
    kernel, x, lengths = Kernel(), torch.zeros(8), (32, 48, 1, 1, 33, 35, 1 << 32)
    launch, told = Launcher(kernel, specialised=specialised), list[Any]()
    with observed_launches(told.append):
        for length in lengths:
            launch("variant", 1, x, length, BLOCK=64)
    assert len(kernel.compiled) == variants
    launches = [args for compiled in kernel.compiled for args in compiled.launches]
    assert len(launches) == len(lengths) - variants
    assert all((way, stream, block) == ("direct", 7, 64) for way, stream, _, _, block in launches)
    assert told.count(None) == variants and len(told) == len(lengths)
    first = next(filter(None, told))
    first.run(*first.head, *first.args)  # the same launch
    assert [args for compiled in kernel.compiled for args in compiled.launches].count(launches[0]) >= 2


def test_a_launch_is_repeated() -> None:
    """A kernel that needs scratch memory, and one of a launcher that is not known, cannot be read from a capture."""
    launches = list[tuple[Any, ...]]()
    run = mock.Mock(side_effect=lambda *every: launches.append(every), global_scratch_size=0, profile_scratch_size=0)
    made = Launch(run, (4, 1, 1, 7, "function"), (5,))
    made.repeat([6])
    made.repeat([6], 8)
    assert launches == [(4, 1, 1, 7, "function", 6), (4, 1, 1, 8, "function", 6)] and made.is_readable
    run.profile_scratch_size = 8
    assert not made.is_readable and not Launch(print, made.head, ()).is_readable


def test_a_profiler_of_triton_sees_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "driver", STREAMS)
    kernel, x = Kernel(), torch.zeros(8)
    launch = Launcher(kernel)
    for hooks in ([], [print], []):
        monkeypatch.setattr(runtime.launch_enter_hook, "calls", hooks)
        launch("variant", 1, x, 32, BLOCK=64)
    (compiled,) = kernel.compiled
    assert compiled.launches == [("hooks", 7, x, 32, 64), ("direct", 7, x, 32, 64)]


def test_an_unaligned_pointer_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "driver", STREAMS)
    kernel, x = Kernel(), torch.zeros(8)
    launch = Launcher(kernel, specialised=True)
    for tensor in (x, x[1:], x.double()):
        launch("variant", 1, tensor, 32, BLOCK=64)
    assert len(kernel.compiled) == 3


class OpsOf(TorchDispatchMode):
    """Names of the operators whose result is on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.names = device, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device == self.device:
            self.names.add(str(func))
        return result


def test_what_a_mask_keeps_is_there_for_any_stream() -> None:
    """It is made on the host and copied, which waits. Another stream could read what kernels are still computing."""
    mask, meta = Mask.documents([0, 3, 300]), torch.device("meta")
    with OpsOf(meta) as seen:
        host.tile_table(mask, meta, 128, mask.q_span)
        mask.bounds(meta)
    assert seen.names == {"aten._to_copy.default"}


@pytest.mark.parametrize("what", ["bounds", "tiles", "documents"])
def test_what_a_mask_keeps_is_not_made_in_a_capture(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Calls outside of the graph would find it before a replay has filled it."""
    device, mask = torch.device("cuda", 0), Mask.documents([0, 3, 9])
    if what == "tiles":  # those of another head_dim are there
        mask.cached(("bounds", device), mask.bounds)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="the mask of a call must have been used before .*; run the call once"):
        if what == "bounds":
            mask.bounds(device)
        elif what == "tiles":
            host.tile_table(mask, device, 128, mask.q_span)
        else:
            calls(mask)[0].lengths(device)
    assert mask.bounds()[0].tolist() == [0, 0, 0, *[3] * 6]  # of the CPU


def test_streams_have_separate_counters_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream's zeros may lie behind much other work when another stream launches."""
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for stream in (5, 7, 5):
        current = SimpleNamespace(cuda_stream=stream, synchronize=lambda stream=stream: waited.append(stream))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_, current=current: current)
        host.tile_counter(torch.device("cpu", 3)).add_(1)
    assert waited == [5]
    assert host.tile_counter(torch.device("cpu", 3)).tolist() == [2, 2]


class SlotsOfTwoThreads(dict):
    """Slots of streams, in which a second thread asks for one while the first counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.second: threading.Thread | None = None

    def __len__(self) -> int:
        count = super().__len__()
        if self.second is None:
            self.second = threading.Thread(target=lambda: host._new_slot(self, 2))
            self.second.start()
            self.second.join(0.2)
        return count


def test_streams_of_threads_have_separate_counters() -> None:
    """Two launches that share a tile counter leave out tiles."""
    slots = SlotsOfTwoThreads()
    host._new_slot(slots, 1)
    assert slots.second is not None
    slots.second.join()
    assert sorted(slots.values()) == [0, 1]


def test_no_stream_shares_a_counter() -> None:
    slots: dict[int, int] = {}
    assert [host._new_slot(slots, stream) for stream in range(256)] == list(range(256))
    with pytest.raises(RuntimeError, match="at most 256 streams .* got one more; reuse streams"):
        host._new_slot(slots, 256)
    assert len(slots) == 256


class Stream:
    """Notes for which streams it waits."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def test_call_on_another_stream_waits_for_the_previous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use the same buffers. A capture is ordered by its graph; a single process shares no buffer."""
    first, second, captured, alone = streams = [Stream() for _ in range(4)]
    device, group, now = torch.device("cuda", 0), mock.Mock(), first
    monkeypatch.setattr(ring_call, "_last_streams", {})
    monkeypatch.setattr(ring_call, "current_stream", lambda _: now)
    monkeypatch.setattr(cuda_graphs, "capturing", lambda _: now is captured)
    for now in (first, first, second, captured, second, alone, first):
        ring_call.order_streams(None if now is alone else group, device)
    assert [stream.waited for stream in streams] == [[second], [first], [], []]


def test_join_in_a_capture_leaves_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error: to wait for a stream outside of the capture would invalidate the capture and hide the error."""
    waits: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            waits.append((self.name, other.name))

    captured, other, caller = Stream("pull"), Stream("even"), Stream("caller")
    areas = object.__new__(CopyEngine)
    areas._named_streams, areas._device, areas.entered = {"pull": captured, "even": other}, CPU, caller  # type: ignore
    monkeypatch.setattr(gpu_areas, "_is_captured", lambda stream: stream is captured)
    monkeypatch.setattr(cuda_graphs, "capturing", lambda _: True)
    areas.join()
    assert waits == [("caller", "pull"), ("pull", "caller")]
    monkeypatch.setattr(cuda_graphs, "capturing", lambda _: False)
    areas.join()
    assert len(waits) == 2 + 4
