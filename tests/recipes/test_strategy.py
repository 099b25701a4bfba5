"""Training on a 2 x 2 mesh of data and context against one process: gradients, clipping, weights, losses.

Four gloo processes on the CPU do all runs (strategy_worker.py, which says what each part shows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.recipes.launching import assert_made, read_results, run_ranks, write_text
from tests.recipes.strategy_worker import TESTS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Errors of each rank, by part."""
    folder, out = write_text(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("found")
    run_ranks("tests.recipes.strategy_worker", folder, out, num_ranks=4)
    return read_results(out)


@pytest.mark.parametrize("part", TESTS, ids=lambda part: part.__name__)
def test_on_four_ranks(ranks: list[dict[str, str]], part: Callable[[Any], None]) -> None:
    assert_made(ranks, part)
