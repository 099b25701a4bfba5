"""Waits of the caller's stream before a call over the copy engine or NCCL returns. One process, no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from ringflash.attention.gather_by_heads import BackwardUnits, HeadGather, UnitWork, run_units
from ringflash.attention.sections import Unit, order_units
from ringflash.comm.watchdog import Unwatched


class Memory:
    """Runs the work of its lanes at once; keeps the tokens for which the caller's own stream waits."""

    def __init__(self) -> None:
        self.waited: list[object] = []
        self.num_tokens: dict[str, int] = {}
        self._inside = False

    def mark(self) -> str:
        return "start"

    def run_in_lane(self, lane: str, work: Callable[[], None], after: Sequence[object], *, urgent: bool = False) -> str:
        self._inside = True
        work()
        self._inside = False
        self.num_tokens[lane] = self.num_tokens.get(lane, 0) + 1
        return f"{lane} {self.num_tokens[lane]}"

    def wait(self, *tokens: object) -> None:
        if not self._inside:
            self.waited += tokens


class NothingForward(UnitWork):
    """A forward without kernels."""

    def _launch(self, index: int, unit: Unit) -> None:
        pass


class NothingBackward(BackwardUnits):
    """A backward without kernels."""

    def begin(self, section: int) -> None:
        pass

    finish_queries = return_gradients = begin
    _launch = NothingForward._launch


def waited(backward: bool) -> set[Any]:
    """For which tokens the caller waits in a call of three sections."""
    memory, gathered = Memory(), mock.Mock(units=order_units(3, 1), head_dim=16, device=torch.device("cpu"))
    gathered.heads, gathered.blocks, gathered.travelling = (1, 1, 1), (mock.Mock(),), [0, 1, 2]
    gathered.all_pulled.return_value = "pulled"
    call, q = HeadGather(gathered.blocks, memory, "reference", 1.0, True), torch.empty(1, 1, 3, 1)  # type: ignore[arg-type]
    returned = mock.Mock(**{"freed.return_value": []})
    work = (
        NothingBackward(call, gathered, returned, q, (q, None, q, q, None), (q, q, q))
        if backward
        else NothingForward(call, gathered, q)
    )
    run_units(work, "arrived", Unwatched(), in_order=False)
    return set(memory.waited)


@pytest.mark.parametrize(
    ("backward", "last"),
    [
        (False, {"odd 1", "even 2", "pulled"}),
        (True, {"odd 2", "even 3", "begin 4", "pulled"}),  # "begin 4" comes after "end 3": test_lane_lifetimes
    ],
)
def test_the_caller_waits_for_the_last_sections_and_messages(backward: bool, last: set[str]) -> None:
    """Else the next call writes keys over those that peers still read."""
    assert waited(backward) >= last
