"""The worker pool of this tier: gloo on the CPU, started by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.pool import Pool

MAX_RANKS = 4


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks; `size=` of a run takes fewer."""
    pool = Pool(MAX_RANKS, backend="gloo")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def alone() -> Iterator[Pool]:
    """One worker, the only one of its job: accelerate asks torch how many there are."""
    pool = Pool(1)
    yield pool
    pool.close()
