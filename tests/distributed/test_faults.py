"""A rank that dies or stalls in the middle of a ring ends the others with an error that names it. gloo, 3 processes."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

import ringflash
from ringflash import recurrent
from ringflash.attention.sections import Sections
from ringflash.comm import agreement
from ringflash_kernels import reference
from tests.helpers import ring_check
from tests.helpers.cases import Case
from tests.helpers.pool import Context, Pool, WorkerError

VICTIM, SECONDS = 1, 3


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool does not wait long for the victim once the others have ended."""
    monkeypatch.setattr("tests.helpers.pool.GRACE_SECONDS", 5)


def attempt(ctx: Context, fault: str, direction: str) -> None:
    """Make a call in which the victim fails while it still owes its peers messages."""
    ringflash.set_timeout(SECONDS)
    if ctx.rank == VICTIM:
        _plant(fault, direction)
    with mock.patch("ringflash.attention.sections.choose_sections", lambda *_: Sections((1, 1), (1, 1))):
        ring_check.check(ctx, Case())


def _plant(fault: str, direction: str) -> None:
    def fail(*args, **kwargs):
        os._exit(3) if fault == "dies" else time.sleep(600)

    if direction == "forward":
        reference.forward = fail
    else:
        reference.ReferenceBackward.add = fail


@pytest.mark.parametrize("fault, direction", [("dies", "forward"), ("dies", "backward"), ("stalls", "backward")])
def test_the_others_end_with_the_name_of_the_rank(pool: Pool, fault: str, direction: str) -> None:
    with pytest.raises(WorkerError) as error:
        pool.run(attempt, fault, direction, size=3, timeout_s=60)
    text = str(error.value)
    for rank in (0, 2):
        assert f"rank {rank} raised" in text
    limit = f" within {SECONDS} s" if fault == "stalls" else ""  # a closed connection is noticed at once
    assert f"rank {VICTIM} over gloo did not finish{limit} (" in text
    assert re.search(rf"d?K/d?V of section 1 of rank [02] (to|from) rank {VICTIM} over gloo", text)
    # of the pool itself, whose next run has other processes:
    if fault == "dies":
        assert f"rank {VICTIM} raised\nthe process ended with code 3" in text
    else:
        assert f"rank {VICTIM} gave no answer\n" in text and "in fail" in text  # its stack


def scan(ctx: Context, fault: str) -> None:
    """Run a recurrence over the ranks; the victim dies in its own, or stalls before the backward."""
    ringflash.set_timeout(SECONDS)
    q, k, v = torch.ones(3, 1, 4, 2, 3, requires_grad=True)

    def rule(value: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if fault == "dies":
            os._exit(3) if ctx.rank == VICTIM else time.sleep(1)  # its peers then meet a closed connection
        return value, value.new_ones(1, 2, 3, 6) + value.mean()

    options = {"g": torch.zeros(1, 4, 2), "beta": torch.ones(1, 4, 2)}
    out = recurrent.delta_rule(rule, q, k, v, shard=recurrent.ContiguousShard.of(4, ctx.group), **options)
    if ctx.rank == VICTIM:
        time.sleep(600)
    out.sum().backward()


@pytest.mark.parametrize("fault", ["dies", "stalls"])
def test_a_scan_ends_with_the_name_of_the_rank(pool: Pool, fault: str) -> None:
    with pytest.raises(WorkerError) as error:
        pool.run(scan, fault, size=3, timeout_s=60)
    text = str(error.value)
    for rank in (0, 2):
        assert f"rank {rank} raised" in text
        verb = "begin" if fault == "dies" else "finish"
        assert re.search(
            rf"states of a recurrent layer of rank {rank} (to|from) rank {VICTIM} over gloo did not {verb}", text
        )


def compare_late(ctx: Context) -> list[list[int]]:
    """Rank 0 arrives at each comparison after `TIMEOUT`, which is short here; the first one makes its communicator."""
    found = []
    with (
        mock.patch("ringflash.comm.agreement.TIMEOUT", timedelta(seconds=0.3)),
        mock.patch("ringflash.comm.agreement.backend_of", lambda *_: "nccl"),
        mock.patch("ringflash.comm.timeouts._set", timedelta(seconds=60)),
    ):
        for number in range(2):
            time.sleep(0.6 if ctx.rank == 0 else 0.0)
            agreement.agree(ctx.group, {"late call": number})
            time.sleep(0.6 if ctx.rank == 0 else 0.0)
            found.append(agreement.gather(ctx.group, number))
    return found


def test_ranks_that_compare_wait_as_long_as_a_ring(pool: Pool) -> None:
    assert pool.run(compare_late, size=2) == [[[0, 0], [1, 1]]] * 2


def test_the_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="seconds must be positive and finite, got 0"):
        ringflash.set_timeout(0)
