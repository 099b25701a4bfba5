"""Tape of a pass: what its host code asks of the device, recorded in one call and repeated in later ones.

Calls of one form (shapes, strides, mask, options) ask for the same allocations, launches, copies, barriers, events and
waits, on the same streams and in the same order. Only addresses, events and the number of the call differ. To work out
what to ask takes the host several times as long as to ask the driver, so only the first calls do it.

    Tape.record   the second call of a form: it runs as usual, and is recorded
    Tape.repeat   later ones

Whatever `Recorder` cannot repeat makes it give up, and calls of that form go on as before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ringflash.attention.recording.recorder import Recorder
from ringflash.attention.recording.steps import Repetition, Step, Tensors
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.transport.gpu_areas import GpuAreas
from ringflash.comm.wait_timer import measuring
from ringflash.comm.watchdog import CallInFlight, Unwatched
from ringflash_kernels.api import launches_are_traced, observed_launches

_CALLS = 4  # after this number of calls, a form is no longer recorded


class Tape:
    """Steps of the calls of one form; none before a call has been recorded.

    Args:
        kept: object that must live as long as the tape, because the tape's key has its id.
    """

    def __init__(self, kept: object) -> None:
        self.kept = [kept]
        self.steps: list[Step] = []
        self.results: list[int] = []
        self.num_slots = self.num_events = 0
        self.calls = 0

    def record(
        self, areas: GpuAreas, tensors: Tensors, issue: Callable[[Any], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Make a call by `issue(tensors)`, and record it unless it is the first of its form, which builds tables."""
        self.calls += 1
        ids = [id(x) for x in tensors if x is not None]
        if not 1 < self.calls <= _CALLS or len(set(ids)) < len(ids):  # a tensor is given twice
            return issue(tensors)
        recorder = areas.recorder = Recorder(areas, tensors)
        try:
            with observed_launches(recorder.launch), recorder:
                results = issue(tensors)
        finally:
            areas.recorder = None
        self.steps, self.results = recorder.finish(results)
        if not recorder.problems:
            self.kept += recorder.slots.kept
            self.num_slots, self.num_events = len(recorder.slots), recorder.num_events
        return results

    def repeat(
        self, areas: GpuAreas, tensors: Tensors, number: CallNumber, watched: CallInFlight | Unwatched
    ) -> tuple[Tensor, ...]:
        """Make a call with other tensors of the same form, and return its results."""
        now, caller = Repetition(tensors, number, watched, self.num_slots, self.num_events), areas.current()
        try:
            for step in self.steps:
                step(now)
        finally:
            if areas.current() is not caller:
                areas.enter(caller)
        return tuple([now.tensors[slot] for slot in self.results])  # type: ignore[misc]


def form_of(tensors: Tensors) -> Hashable:
    """Return the part of a tape's key that its tensors decide: shapes, strides, dtypes, and addresses modulo 16.

    Kernels are compiled separately for addresses that are multiples of 16 bytes.
    """
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors])


def can_repeat(impl: str, device: torch.device) -> bool:
    """Return True if a call can be a list of steps: all launches are observed, and no profiler or graph sees them."""
    return (
        device.type == "cuda"
        and impl.startswith("hopper")
        and not torch.cuda.is_current_stream_capturing()
        and not torch.autograd._profiler_enabled()
        and not measuring()
        and not launches_are_traced()
    )
