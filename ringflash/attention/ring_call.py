"""One ring call on this rank: take the lock, get a number, plan, agree with the other ranks, run, record an error.

`operators.py` makes one `RingCall` per forward and backward. A single process needs no lock, number or comparison.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from threading import Lock
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.attention.gather_by_heads import GatherAttention
from ringflash.attention.inputs import CallInputs, CallShape, align_for_kernels
from ringflash.attention.local_attention import LocalAttention
from ringflash.attention.plan import CallPlan, plan_of
from ringflash.attention.ulysses import Ulysses
from ringflash.comm import call_numbers, cuda_graphs
from ringflash.comm.agreement import TrackedCall
from ringflash.comm.call_numbers import NO_NUMBER
from ringflash.comm.transport.gpu_areas import current_stream

_locks: defaultdict[torch.device, Lock] = defaultdict(Lock)
_last_streams: dict[torch.device, torch.cuda.Stream] = {}  # stream of the last call that sent


class RingCall:
    """One call: plan it, compare it with the other ranks' if it sends, then start it.

    Calls over several ranks use the same buffers, and must be issued in the same order on all ranks. Therefore:
    - a lock lets only one thread of a process make them at a time;
    - each call has a number, which the ranks compare;
    - after an error the ranks compare the next call, and refuse it unless all of them failed at the same place.

    Args:
        group: None for a single process.
        device: device of the tensors.
        forward: number of the forward, if the call is a backward.
    Raises:
        RuntimeError: the ranks made earlier calls in different orders.
    """

    __slots__ = ("_ends", "_plan", "device", "error", "forward", "group", "number")

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, forward: int = 0) -> None:
        self.group, self.device, self.forward = group, device, forward
        self.number = NO_NUMBER
        self.error: Exception | None = None
        self._plan: CallPlan | None = None
        self._ends = ExitStack()  # what the end of the call undoes, last first

    def __enter__(self) -> Self:
        if self.group is not None:
            with ExitStack() as ends:
                self._acquire(ends)
                call_numbers.check(self.group, self.device)
                self.number = call_numbers.next_number(self.group, self.forward)
                self._ends = ends.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ends.__exit__(*error)

    def plan(self, call: CallInputs, *others: Tensor) -> tuple[Tensor, ...]:
        """Check and plan the call. If it sends, an error is kept in `error`, to be raised on all ranks together.

        Returns:
            tensors: q, k, v and the others, each copied if kernels cannot read its strides.
        """
        if self.error is None:
            try:
                self._plan, call = plan_of(call)
                others = tuple(map(align_for_kernels, others))
            except Exception as error:  # for example an ImportError, if one host lacks a kernel's package
                if self.group is None:
                    raise
                self.error = error
        return call.q, call.k, call.v, *others

    @property
    def checked_plan(self) -> CallPlan:
        """The plan of a call without an error."""
        assert self._plan is not None
        return self._plan

    def start(self, shape: CallShape) -> LocalAttention | GatherAttention | Ulysses:
        """Return the algorithm of a call that all ranks agreed on. Autocast is off from here to the end of the call."""
        enter = self._ends.enter_context
        if torch.is_inference_mode_enabled():  # buffers are reused, but inference tensors become read-only
            enter(torch.inference_mode(False))
            enter(torch.no_grad())
        if torch.is_autocast_enabled(self.device.type):
            enter(torch.autocast(self.device.type, enabled=False))
        if self.group is None:
            return self.checked_plan.open(shape, self.number)
        tracked = enter(TrackedCall(self.group))
        order_streams(self.group, self.device)
        work = self.checked_plan.open(shape, self.number)
        tracked.count_by(work.num_posted)
        return work

    def _acquire(self, ends: ExitStack) -> None:
        """Take the device's lock; if another thread has it, keep the error, to be raised on all ranks together."""
        lock = _locks[self.device]
        if lock.acquire(blocking=False):
            ends.callback(lock.release)
        else:
            self.error = RuntimeError(
                "two threads of this process called ring attention at the same time, but calls share buffers and must "
                "have one order on all ranks; make all calls from one thread."
            )


def order_streams(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Order a call after the previous one if that was issued on another stream: both use the same buffers.

    A single process shares no buffers. A CUDA graph orders the calls that it captures.
    """
    if group is not None and device.type == "cuda":
        stream, last = current_stream(device.index), _last_streams.get(device)
        if stream != last and not cuda_graphs.capturing(device):
            if last is not None:
                stream.wait_stream(last)
            _last_streams[device] = stream
