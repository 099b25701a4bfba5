"""The ranks of this tier: without a group, as torchrun starts them, for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.pool import Launches


@pytest.fixture(scope="module")
def pool() -> Iterator[Launches]:
    launches = Launches()
    yield launches
    launches.close()
