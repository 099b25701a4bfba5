"""Ranks that die, raise or sleep in a ring whose host does not wait: the others end and name the cause. 3 processes.

Over the shared memory of CPU processes, by the watch as it runs on GPUs but for the driver's events. And what keys
gathered by messages, and recurrent layers, tell the watch, in gloo's processes.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from ringflash.attention.sections import Sections
from ringflash.recurrent.messages import states_before
from tests.helpers import ring_check
from tests.helpers.cases import Case
from tests.helpers.faulty_job import GOOD_STEPS, Job
from tests.helpers.peer_memory import messages_by_heads
from tests.helpers.pool import Context, on_ranks

TIMEOUT_S = 4
LIMIT_S = 120.0  # of a busy machine; the ranks end seconds after they began
BACKWARD = f"in backward call {2 * (GOOD_STEPS + 1)}"


Ended = tuple[list[int | None], list[str]]  # exit codes and what was printed, by rank


def begun(
    fault: str, victim: int = 1, size: int = 3, timeout_s: float = TIMEOUT_S, transport: str = "copy_engine"
) -> Job:
    return Job(
        size, transport=transport, fault=fault, device="cpu", impl="reference", victim=victim, timeout_s=timeout_s
    )


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, int], Ended]:
    """Jobs by fault and victim, side by side: they wait most of their time."""
    faults = (("raises", 1), ("dies", 1), ("sleeps", 1), ("dies", 0))
    jobs = {(fault, victim): begun(fault, victim) for fault, victim in faults}
    jobs["none", 1] = begun("none", size=2, timeout_s=60)
    jobs["dies while heads are exchanged", 1] = begun("dies", size=2, transport="ulysses")
    found = {which: job.finish(LIMIT_S) for which, job in jobs.items()}
    assert jobs["raises", 1].ended[0] == 1  # waits for no other rank
    return found


def test_a_rank_that_raises_ends_first_and_is_named(ended: dict[tuple[str, int], Ended]) -> None:
    codes, texts = ended["raises", 1]
    assert codes == [1, 1, 1], texts
    assert texts[1].rstrip().endswith("ValueError: planted") and "made no progress" not in texts[1]
    for rank in (0, 2):
        assert "; rank 1 does not answer: it has died, or its host is stuck; " in texts[rank], texts[rank]


def test_a_rank_that_dies_is_named_by_all_others(ended: dict[tuple[str, int], Ended]) -> None:
    codes, texts = ended["dies", 1]
    assert codes == [1, -9, 1], texts
    for rank in (0, 2):
        assert f"rank {rank} has done {GOOD_STEPS} steps" in texts[rank]
        report = next(
            line for line in texts[rank].splitlines() if "made no progress" in line and "; it asks" not in line
        )
        assert f"ring attention over copy_engine made no progress for {TIMEOUT_S} s: rank 0 has been waiting " in report
        assert report.count(f"s for the gradients of section 0 {BACKWARD};") == 2
        assert "; rank 1 does not answer: it has died, or its host is stuck; " in report


def test_a_rank_that_sleeps_ends_too(ended: dict[tuple[str, int], Ended]) -> None:
    codes, texts = ended["sleeps", 1]
    assert codes == [1, 1, 1], texts
    for text in texts:
        assert re.search(rf"; rank 1 has been waiting \d+ s for section 0 {BACKWARD}; rank 2 has", text), text
    assert "in _fail" in texts[1]  # where Python was


def test_rank_that_keeps_the_store_may_die(ended: dict[tuple[str, int], Ended]) -> None:
    codes, texts = ended["dies", 0]
    assert codes == [-9, 1, 1], texts
    for rank in (1, 2):
        assert f"s: rank {rank} has been waiting" in texts[rank]
        assert f"s for the gradients of section 0 {BACKWARD}; no other rank could be asked" in texts[rank]
        assert "the process that keeps the group's store, often rank 0, may be gone" in texts[rank]


def test_ranks_without_a_fault_end_well(ended: dict[tuple[str, int], Ended]) -> None:
    codes, texts = ended["none", 1]
    assert codes == [0, 0], texts
    assert all("has ended well" in text and "made no progress" not in text for text in texts)


def test_an_exchange_of_heads_is_watched(ended: dict[tuple[str, int], Ended]) -> None:
    """Rank 1 dies in its backward; rank 0 waits in vain for the rows of its gradients."""
    codes, texts = ended["dies while heads are exchanged", 1]
    assert codes == [1, -9], texts
    report = next(line for line in texts[0].splitlines() if "made no progress" in line and "; it asks" not in line)
    assert "ring attention over copy_engine made no progress" in report
    assert re.search(
        r"rank 0 has been waiting \d+ s for rows of the ranks \(0, 1\) of its host in backward call", report
    )
    assert "; rank 1 does not answer: it has died, or its host is stuck; " in report


class Recorder(AbstractContextManager):
    """A call that is watched, without a device to look at."""

    def __init__(self, transport: Any, way: str, device: Any) -> None:
        self.marks = [way]
        recorded.append(self.marks)

    def reach(self, waypoint: object, what: str, *values: object) -> None:
        self.mark(what, *values)

    def mark(self, what: str, *values: object) -> None:
        self.marks.append(what.format(*values))

    def __exit__(self, *error: object) -> None:
        self.marks.append("issued")


recorded: list[list[str]] = []


@on_ranks(2)
def test_keys_by_messages_name_the_section_awaited(ctx: Context) -> None:
    """No rank waits for all to begin, as over the copy engine: it waits for the messages of a section."""
    recorded.clear()
    with (
        messages_by_heads(),
        mock.patch("ringflash.attention.gather_by_heads.watching", Recorder),
        mock.patch("ringflash.attention.sections.choose_sections", lambda *_: Sections((1, 1), (2,))),
    ):
        ring_check.check(ctx, Case(), 4)
    assert recorded == [
        ["forward", "for its device to begin", "for section 0", "for section 1", "issued"],
        ["backward", "for its device to begin", "for section 0", "for the gradients of section 0", "issued"],
    ]


@on_ranks(3)
def test_recurrent_layer_says_it_waits_for_states(ctx: Context) -> None:
    recorded.clear()
    with mock.patch("ringflash.recurrent.messages.watching", Recorder):
        x = torch.ones(2, 3, requires_grad=True)
        states_before(x, ctx.group).sum().backward()
    assert recorded == [
        ["forward", "for states of a recurrent layer", "issued"],
        ["backward", "for gradients of states of a recurrent layer", "issued"],
    ]
