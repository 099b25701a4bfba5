"""Training on a 2 x 2 mesh of data and context against one process: gradients, clipping, weights, losses.

Four gloo processes on the CPU do all runs (strategy_worker.py, which says what each part shows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.recipes.launching import assert_made, each_part, launch_parts, write_text
from tests.recipes.strategy_worker import TESTS


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    folder = write_text(tmp_path_factory.mktemp("text"))
    return launch_parts(TESTS, "tests.recipes.strategy_worker", folder, tmp_path_factory)


@each_part(TESTS)
def test_on_ranks(launches: dict[int, list[dict[str, str]]], num_ranks: int, part: Callable[[Any], None]) -> None:
    assert_made(launches[num_ranks], part)
