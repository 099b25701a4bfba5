"""Calls over shared memory with one wait left out, which the comparison with dense attention must notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

from ringflash.attention import gathered_buffers
from ringflash.comm import call_numbers, transport
from ringflash.comm.transport.lanes import Marker
from tests.helpers.peer_memory import DELAY_S, Later, SharedMemory

LANES, BARRIER = (f"tests.helpers.peer_memory.SharedMemory.{name}" for name in ("run_in_lane", "barrier"))
PULL = "ringflash.attention.gathered_buffers.GatheredKV.pull"
NOTICED = "errors must stay within their budget"


def late(seconds: Callable[[SharedMemory, str], float]) -> Callable[..., Later]:
    """Lanes whose work comes late, by memory and name."""
    run_in_lane = SharedMemory.run_in_lane

    def lane_of(self: SharedMemory, lane: str, work: Callable[[], None], *args: Any, **options: Any) -> Later:
        def delayed() -> None:
            time.sleep(seconds(self, lane))
            work()

        return run_in_lane(self, lane, delayed, *args, **options)

    return lane_of


def slow_lanes(*slow: str) -> Callable[..., Later]:
    """Lanes of which some are slow."""
    return late(lambda _, lane: 5 * DELAY_S if lane in slow else 0.0)


def too_early(self: gathered_buffers.GatheredKV, section: int, start: Marker, computed: list[Marker]) -> Marker:
    """K/V arrive in a buffer that is still read."""
    return _PULL(self, section, start, [start] * len(computed))


_PULL = gathered_buffers.GatheredKV.pull


def verdict(call: Callable[[int], object], times: int, patches: Mapping[str, object]) -> str:
    """Return what calls say with patches in place. A rank that finds a mistake goes on: the others wait for it.

    The numbers of calls, which would notice some mistakes, too, are not compared; the caller forgets them.

    Args:
        call: gets the number of the call, by which values differ in the same buffers.
    """
    found = "passed"
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(transport._open, clear=True))  # of all groups: restored for larger ones
        for target, replacement in patches.items():
            stack.enter_context(mock.patch(target, replacement))
        stack.enter_context(mock.patch.object(call_numbers, "check", lambda *_: None))
        for number in range(times):
            try:
                call(number)
            except (AssertionError, RuntimeError) as error:
                found = str(error)
    return found
