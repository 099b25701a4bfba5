"""What the caller's stream waits for before a call over the copy engine or NCCL returns. One process, no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from ringflash.attention.gather_by_heads import Headwise
from ringflash.comm.watchdog import Unwatched
from ringflash_kernels.mask import Mask


class Memory:
    """Runs the work of its lanes at once; keeps the tokens for which the caller's own stream waits."""

    def __init__(self) -> None:
        self.waited: list[object] = []
        self.num_tokens: dict[str, int] = {}
        self._inside = False

    def mark(self) -> str:
        return "start"

    def beside(self, lane: str, work: Callable[[], None], after: Sequence[object], *, urgent: bool = False) -> str:
        self._inside = True
        work()
        self._inside = False
        self.num_tokens[lane] = self.num_tokens.get(lane, 0) + 1
        return f"{lane} {self.num_tokens[lane]}"

    def wait(self, *tokens: object) -> None:
        if not self._inside:
            self.waited += tokens


def waited(way: str, *work: Callable[[int], None]) -> set[Any]:
    """For which tokens the caller waits in a call of three sections."""
    memory, gathered = Memory(), mock.Mock(sections=3, head_dim=16, device=torch.device("cpu"))
    gathered.all_pulled.return_value = "pulled"
    gathering = mock.Mock(mask=Mask.full(3, 3))
    call = Headwise(gathering, memory, "reference", 1.0, True)  # type: ignore[arg-type]
    call._run_sections(Unwatched(), way, gathered, *work)
    return set(memory.waited)


def nothing(section: int) -> None:
    """In the place of a kernel."""


@pytest.mark.parametrize(
    ("way", "work", "last"),
    [
        ("forward", 1, {"odd 1", "even 2", "pulled"}),
        ("backward", 4, {"odd 2", "even 3", "begin 4", "pulled"}),  # "begin 4" comes after "end 3": test_lane_lifetimes
    ],
)
def test_the_caller_waits_for_the_last_sections_and_messages(way: str, work: int, last: set[str]) -> None:
    """Else the next call writes keys over those that peers still read."""
    assert waited(way, *[nothing] * work) >= last
