"""The worker pool: results in rank order, all ranks' errors, stacks of ranks that hang, and a fresh start after each.

gloo, 2 CPU processes of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.helpers.pool import Context, Pool, WorkerError


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def place(ctx: Context) -> tuple[int, int, int]:
    return ctx.rank, ctx.size, os.getpid()


def wait_for_nobody(ctx: Context) -> None:
    if ctx.rank == 1:
        time.sleep(1000)


def fail_on_one(ctx: Context) -> None:
    if ctx.rank == 1:
        raise ValueError("only here")


def end_process(ctx: Context) -> None:
    if ctx.rank == 0:
        os._exit(3)


def test_same_processes_run_after_run(pair: Pool) -> None:
    first, second = pair.run(place), pair.run(place)
    assert first == second
    assert [(rank, size) for rank, size, _ in first] == [(0, 2), (1, 2)]
    assert pair.run(place, size=1) == [(0, 1, first[0][2])]


def test_a_hang_ends_with_the_stacks_and_a_new_pool(pair: Pool) -> None:
    before = pair.run(place)
    with pytest.raises(WorkerError, match="rank 1 gave no answer") as error:
        pair.run(wait_for_nobody, timeout_s=1)
    assert "in wait_for_nobody" in str(error.value)
    assert {pid for *_, pid in pair.run(place)}.isdisjoint({pid for *_, pid in before})


def test_an_error_of_one_rank_names_it(pair: Pool) -> None:
    with pytest.raises(WorkerError, match="rank 1 raised") as error:
        pair.run(fail_on_one)
    assert "ValueError: only here" in str(error.value) and "rank 0 raised" not in str(error.value)


def test_a_dead_process_is_noticed(pair: Pool) -> None:
    with pytest.raises(WorkerError, match="rank 0 raised\nthe process ended with code 3"):
        pair.run(end_process)
    assert len(pair.run(place)) == 2
