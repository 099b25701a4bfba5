"""Memory that streams share is freed behind all of them. Streams that record their order; CPU, one process.

torch gives a freed block back to the stream that allocated it, and may unmap it once that stream is idle. So the
allocating stream must be ordered after every stream that uses the block. The host code of the real kernels runs; their
launches only name the tensors that they use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringflash.attention import gather_units, schedule, sections
from ringflash.attention.gather_by_heads import GatherAttention
from ringflash.attention.inputs import BackwardInputs
from ringflash.attention.sections import Sections
from ringflash.comm.transport import NcclGather, Pending, PointToPoint, gpu_areas
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.api import begin_checked_backward, needs_row_max, rounds
from ringflash_kernels.hopper.launcher import Launcher
from tests.emulator.host import cuda_properties


class Stream:
    """A stream that knows up to which work of each stream it is ordered."""

    def __init__(self, *_: object, **__: object) -> None:
        self.seen: dict[Stream, int] = {self: 0}

    def record_event(self) -> Event:
        self.seen[self] += 1  # whatever was issued since the last event
        return Event(dict(self.seen))

    def wait_stream(self, other: Stream) -> None:
        other.record_event().wait(self)

    def is_after(self, other: Stream) -> bool:
        return self.seen.get(other, 0) >= other.seen[other]


class Event:
    """A point of a stream."""

    def __init__(self, seen: dict[Stream, int]) -> None:
        self.seen = seen

    def wait(self, stream: Stream) -> None:
        for other, place in self.seen.items():
            stream.seen[other] = max(place, stream.seen.get(other, 0))


class Streams:
    """The current stream, as torch.cuda has it."""

    def __init__(self) -> None:
        self.caller = self.current = Stream()

    def set(self, stream: Stream) -> None:
        self.current = stream


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    made = Streams()
    cuda = SimpleNamespace(Stream=Stream, set_stream=made.set)
    with mock.patch.multiple(gpu_areas, torch=SimpleNamespace(cuda=cuda), current_stream=lambda _: made.current):
        yield made


class Allocations(TorchDispatchMode):
    """Allocations of torch, with their streams and users; `faults` name those that were freed too early."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams, self.faults = streams, set[str]()
        self.held: dict[int, tuple[StorageWeakRef, Stream, str, dict[Stream, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.look()
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in tree_leaves(out):
                storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
                if storage is not None and storage._cdata not in self.held:
                    name = f"{func} {tuple(x.shape)}"
                    self.held[storage._cdata] = StorageWeakRef(storage), self.streams.current, name, {}
            self.use(*tree_leaves((args, kwargs, out)))
        return out

    def use(self, *things: Any) -> None:
        """The current stream reads or writes these tensors."""
        stream = self.streams.current
        for x in things:
            x = getattr(x, "base", x)  # of a descriptor
            if isinstance(x, torch.Tensor) and (known := self.held.get(x.untyped_storage()._cdata)):
                known[3][stream] = stream.seen[stream] + 1

    def look(self) -> None:
        """Judge what has been freed since the last look: before any stream waits for more."""
        for key in [key for key, known in self.held.items() if known[0].expired()]:
            _, stream, name, uses = self.held.pop(key)
            if any(stream.seen.get(user, 0) < place for user, place in uses.items() if user is not stream):
                self.faults.add(name)


@contextmanager
def allocations(streams: Streams) -> Iterator[Allocations]:
    """Note allocations and their uses, by torch's operators and by launches."""
    wait, made = Event.wait, Allocations(streams)

    def look_and_wait(self: Event, stream: Stream) -> None:
        made.look()
        wait(self, stream)

    with (
        mock.patch.object(Event, "wait", look_and_wait),
        mock.patch.object(Launcher, "__call__", lambda _, variant, programs, *args, **constants: made.use(*args)),
        cuda_properties(132),
        made,
    ):
        yield made
        made.look()


def areas_of_messages() -> NcclGather:
    """Areas of rank 0 of 2, which receives nothing."""
    channel = SimpleNamespace(name="gloo", rank=0, group=None, members=(), post=lambda *_: Pending([]), num_posted=0)
    return NcclGather(cast(PointToPoint, channel), torch.device("cpu"))


def passes(
    areas: NcclGather, num_sections: int, impl: str = "reference", dims: tuple[int, int] = (16, 16),
    num_blocks: int = 1, **options: Any,
) -> None:  # fmt: skip
    """Run a forward and a backward of two query heads a section, with a gradient of lse. An OutOfMemory ends it."""
    rows = 256 if rounds(impl) else 8
    mask, multiple = SequenceMask(2 * rows, False), 128 if rounds(impl) else 1
    blocks: tuple[schedule.KeyBlock, ...] = (schedule.plan_single_block(mask, 2, 0, "zigzag", multiple),)
    if num_blocks > 1:
        blocks = schedule.plan_blocks(mask, 2, 0, "zigzag", (1,) * num_blocks, multiple)
    dtype = torch.float32 if impl == "reference" else torch.bfloat16
    q, dout, k, v = (
        torch.zeros(1, rows, heads * num_sections, dim, dtype=dtype)
        for heads, dim in ((2, dims[0]), (2, dims[1]), (1, dims[0]), (1, dims[1]))
    )
    row_max = torch.zeros(1, 2 * num_sections, rows) if needs_row_max(impl) else None
    heads = (1,) * num_sections
    deterministic = options.pop("deterministic", False)
    with mock.patch.object(sections, "choose_sections", lambda *_: Sections(heads, heads)):
        call = GatherAttention(blocks, areas, impl, 1.0, deterministic, fp8=rounds(impl), **options)
        out, lse = call.forward(q, k, v, row_max)
        call.backward(BackwardInputs(dout, torch.zeros_like(lse), q, k, v, out, lse, row_max))


KERNELS: dict[str, dict[str, Any]] = {
    "reference": {},
    "hopper": {"impl": "hopper", "dims": (128, 128)},
    "hopper, blocks": {"impl": "hopper", "dims": (128, 128), "num_blocks": 2},
    "hopper, deterministic": {"impl": "hopper", "dims": (96, 96), "deterministic": True},
    "hopper, wide": {"impl": "hopper", "dims": (256, 256)},
    "hopper, narrow values": {"impl": "hopper", "dims": (192, 128)},
    "reference_fp8": {"impl": "reference_fp8_all", "dims": (64, 64)},
    **{impl: {"impl": impl, "dims": (128, 128)} for impl in ("hopper_fp8", "hopper_fp8_scores", "hopper_fp8_all")},
    "hopper_fp8, blocks": {"impl": "hopper_fp8_all", "dims": (64, 64), "num_blocks": 2},
}


def faults(streams: Streams, num_sections: int, kernel: str) -> set[str]:
    """Return what the second call frees too early; the first one builds tables, and runs its sections in order."""
    areas = areas_of_messages()
    with allocations(streams) as made:
        passes(areas, num_sections, **KERNELS[kernel])
        made.faults.clear()  # of buffers that grow, for which the device is synchronised
        passes(areas, num_sections, **KERNELS[kernel])
        assert {"begin", "end", "even", "pull"} <= set(areas._named_streams)
    return made.faults


@pytest.mark.parametrize("num_sections", [1, 5])
@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_is_freed_behind_its_users(streams: Streams, kernel: str, num_sections: int) -> None:
    assert faults(streams, num_sections, kernel) == set()


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.startswith("hopper")])
def test_kernels_run_between_begin_and_end_of_a_call(streams: Streams, kernel: str) -> None:
    """Memory of a repeated call may therefore be that of the caller's stream."""
    areas, caller, begun, last = areas_of_messages(), streams.caller, [0], dict[Stream, int]()

    def launch(*_: object, **__: object) -> None:
        stream = streams.current
        assert stream is caller or stream.seen[caller] > begun[0]
        last[stream] = stream.seen[stream] + 1

    def issue(call: GatherAttention, _: str, work: Any, tensors: Any) -> Any:
        caller.record_event()  # of earlier work, which may use the same memory
        begun[0] = caller.seen[caller]
        results = work(tensors)
        assert len(last) > 1 and all(caller.seen[stream] >= place for stream, place in last.items() if stream != caller)
        last.clear()
        return results

    with (
        mock.patch.object(Launcher, "__call__", launch),
        mock.patch.object(GatherAttention, "_issue", issue),
        cuda_properties(132),
    ):
        passes(areas, 3, **KERNELS[kernel])


class Late:
    """A backward that allocates when the first keys arrive, on another stream than that in which it is dropped."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._begin = lambda: begin_checked_backward(*args, **options)

    def add(self, *args: Any, **options: Any) -> None:
        self._begun = self._begin()
        self._begun.add(*args, **options)

    def finish(self, out: torch.Tensor) -> None:
        self._begun.finish(out)


def test_memory_that_a_kernel_allocates_is_noticed(streams: Streams) -> None:
    with mock.patch.object(gather_units, "begin_checked_backward", Late):
        assert any("(1, 8, 2, 128)" in fault or "(2, 8, 128)" in fault for fault in faults(streams, 5, "hopper"))


@pytest.mark.parametrize("failing", range(20))
def test_streams_are_ordered_after_an_error(streams: Streams, failing: int) -> None:
    """A forward and backward of three sections, in which the work of a stream raises."""
    issued, beside, areas = [], gpu_areas.GpuAreas.run_on_stream, areas_of_messages()

    def refused(self: Any, stream: str, work: Any, *args: Any, **options: Any) -> Any:
        issued.append(stream)
        work = mock.Mock(side_effect=MemoryError("no memory left")) if len(issued) == failing + 1 else work
        return beside(self, stream, work, *args, **options)

    with mock.patch.object(gpu_areas.GpuAreas, "run_on_stream", refused), pytest.raises(MemoryError):
        passes(areas, 3)
    assert len(issued) == failing + 1
    places = [cast(Any, stream) for stream in areas._named_streams.values()]
    assert all(one.is_after(other) for one in (streams.caller, *places) for other in places)
