"""Recorder of one call: launches of kernels, operators of torch, and what else the call asks of the device.

It sees launches through `observed_launches`, and operators as a dispatch mode. All other work (copies, barriers, work
of the host) must be passed to `GpuAreas.run` or `GpuAreas.run_on_host`, which report it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringflash.attention.recording.repeated_launch import repeat_launch
from ringflash.attention.recording.slots import Slots
from ringflash.attention.recording.step_lists import RecordedEvent, RecordedStep, Role, repeated_steps
from ringflash.attention.recording.steps import (
    OF_EACH_CALL,
    Repetition,
    Step,
    Tensors,
    allocate_step,
    allocator,
    enter_step,
    free_step,
    view_of,
)
from ringflash.comm.driver import driver
from ringflash.comm.transport.gpu_areas import Commands, GpuAreas

ALLOCATIONS = {
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Recorder of one call, and a dispatch mode while the call runs.

    Attributes:
        problems: why the call cannot be repeated; empty: it can.
    """

    def __init__(self, areas: GpuAreas, tensors: Tensors) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.slots = Slots(tensors, self.problems.append)  # not `give_up`, a cycle that keeps the tensors
        self._recorded: list[RecordedStep | RecordedEvent] = []
        self._device = next(x.device.type for x in tensors if x is not None)
        self._allocate = allocator(self._device)
        self._areas, self._first = areas, areas.current()
        self._entered = self._first
        self._made: dict[int, tuple[object, int]] = {}  # events, results of `run_on_host`: each call has its own
        self._seen_by_host: set[int] = set()  # events that the host queries
        self._paused = False

    @property
    def num_events(self) -> int:
        """Number of events of a repetition and results of `run_on_host`."""
        return len(self._made)

    def mark(self, event: Any, stream: torch.cuda.Stream) -> None:
        """Record that a stream records an event."""
        self._drop_freed()
        self._recorded.append(RecordedEvent(self._add_made(event), stream, waits=False))

    def wait(self, event: Any, stream: torch.cuda.Stream) -> None:
        """Record that a stream waits for an event."""
        self._drop_freed()
        self._recorded.append(RecordedEvent(self._index_of(event), stream, waits=True))

    def run(self, work: Callable[..., None], args: tuple[Any, ...], commands: Commands | None) -> None:
        """Run work on the current stream, and record it."""
        self._enter()
        _, again = self._run(work, args)
        made = None if commands is None or driver() is None else commands(self._entered.cuda_stream, self._index_of)
        self._recorded.append(RecordedStep(Role.WORK, again, self._entered, made))

    def run_on_host(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run work of the host, and record it; a repetition runs it again with its own events, number and call."""
        result, again = self._run(work, args)
        if result is None:
            self._add(Role.LATE, again)
        else:
            index = self._add_made(result)
            self._add(Role.EARLY, lambda now: now.keep(index, again(now)))
        return result

    def give_up(self, problem: str) -> None:
        """Remember why the call cannot be repeated."""
        self.problems.append(problem)

    def launch(self, launch: Any) -> None:
        """Record the launch of a kernel; None if triton compiled it, which may allocate."""
        self._drop_freed()
        if launch is None:
            self.give_up("a kernel was compiled")
        else:
            again, commands = repeat_launch(launch, self.slots.place)
            self._recorded.append(RecordedStep(Role.WORK, again, commands=commands))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        if func.is_view:
            self.slots.add_views(args[0], out)
        else:
            self._record_operator(func, args, kwargs or {}, out)
        return out

    def finish(self, results: tuple[Tensor, ...]) -> tuple[list[Step], list[int]]:
        """Return the steps of a repetition, and the slots of the results; both empty if the call cannot be repeated."""
        self._drop_freed()
        slots = [self.slots.of_result(x) for x in results]
        if self.problems:
            return [], []
        steps = repeated_steps(self._recorded, self._seen_by_host, self._areas, self._first, self._allocate)
        return steps, slots

    def _run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Callable[[Repetition], Any]]:
        """Run work without observing it. Return its result, and the function that runs it in a repetition."""
        self._drop_freed()
        self._paused = True
        try:
            result = work(*args)
        finally:
            self._paused = False
        indices = [self._made[id(x)][1] if id(x) in self._made else OF_EACH_CALL.get(type(x)) for x in args]
        replaced = [(place, index) for place, index in enumerate(indices) if index is not None]
        self._seen_by_host |= {index for _, index in replaced if index >= 0}
        template = [x if index is None else None for x, index in zip(args, indices, strict=True)]

        def again(now: Repetition) -> Any:
            arguments = template.copy()
            for place, index in replaced:
                arguments[place] = now.own[index]
            return work(*arguments)

        return result, again if replaced else lambda now: work(*args)

    def _record_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operator that is no view. Leave it out if it writes to no element of a tensor."""
        tensors = [(place, x) for place, x in enumerate(args) if isinstance(x, Tensor)]
        in_place = isinstance(out, Tensor) and bool(tensors) and out is tensors[0][1]
        if in_place and not out.numel():
            return
        self._drop_freed()
        self._enter()
        if func in ALLOCATIONS:
            self._record_allocation(out)
            return
        nested = len([x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]) > len(tensors)
        if nested or not (in_place or self.slots.is_new(out)):
            self.give_up(f"the operator {func}")
            return
        template, views = list(args), list[tuple[int, int, Callable[[Tensor], Tensor]]]()
        for place, x in tensors:
            slot, offset = self.slots.place(x)
            if slot is not None:
                views.append((place, slot, view_of(x, offset)))
                template[place] = None
                if not self.slots.has_dtype(slot, x):
                    self.give_up(f"the operator {func} on a tensor of another dtype")
        made_slot = -1 if in_place else self.slots.add(out, self._entered)

        def again(now: Repetition) -> None:
            for place, slot, view in views:
                template[place] = view(now.tensors[slot])  # type: ignore[arg-type]
            made = func(*template, **kwargs)
            for place, *_ in views:
                template[place] = None
            if not in_place:
                now.allocated(made_slot, made)

        self._recorded.append(RecordedStep(Role.WORK, again, self._entered))

    def _record_allocation(self, out: Tensor) -> None:
        """Give a new tensor a slot, and record its allocation."""
        if out.device.type != self._device:
            self.give_up("memory of another device")
        slot = self.slots.add(out, self._entered)
        step, num_bytes = allocate_step(slot, out, self._allocate), out.untyped_storage().nbytes()
        self._recorded.append(RecordedStep(Role.ALLOCATE, step, self._entered, slot=slot, num_bytes=num_bytes))

    def _add(self, role: Role, step: Step) -> None:
        self._recorded.append(RecordedStep(role, step))

    def _drop_freed(self) -> None:
        """Record that the tensors that this call has freed since the last step are freed here."""
        for slot, stream in self.slots.freed():
            self._recorded.append(RecordedStep(Role.DROP, free_step(slot), stream, slot=slot))

    def _enter(self) -> None:
        """Record that the stream that is current now is current in the following steps."""
        stream = self._areas.current()
        if stream != self._entered:
            self._entered = stream
            self._add(Role.ENTER, enter_step(self._areas, stream))

    def _add_made(self, thing: object) -> int:
        """Return the index of an event, or of a result of `run_on_host`, that each call makes."""
        index = len(self._made)
        self._made[id(thing)] = thing, index
        return index

    def _index_of(self, event: Any) -> int:
        if id(event) not in self._made:
            self.give_up("an event of another call")
            return 0
        return self._made[id(event)][1]
