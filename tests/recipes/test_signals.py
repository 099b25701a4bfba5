"""SIGTERM to one rank of a training as docs/lightning.md has it, wherever it arrives: all ranks save and stop.

Two CPU processes, and two with DeepSpeed, each for all places. The last rank gets the signal. Lightning's own handler
broadcasts from inside the collective that it has interrupted, and hangs.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.launching import read_results, run_ranks, write_text
from tests.recipes.signal_worker import PLACES, SIGNALLED


@pytest.fixture(scope="module", params=["lightning", "deepspeed"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    folder = tmp_path_factory.mktemp("signals")
    out = folder / "out"
    out.mkdir()
    texts = write_text(folder / "texts")
    run_ranks("tests.recipes.signal_worker", texts, out, request.param, num_ranks=2, DS_ACCELERATOR="cpu")
    return read_results(out)


@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_save_and_stop(ranks: list[dict[str, Any]], place: str) -> None:
    """Within two steps: notes are compared at the end of a batch, and the answer is read at the end of the next."""
    step = ranks[0][place]["step"]
    assert SIGNALLED < step <= SIGNALLED + 2
    assert [rank[place] for rank in ranks] == [{"step": step, "saved": [f"interrupted-step={step}.ckpt"]}] * len(ranks)


def test_an_evaluation_by_itself_ends_at_once(ranks: list[dict[str, Any]]) -> None:
    """It has nothing to save."""
    assert [rank["evaluation"] for rank in ranks] == [[True] * 3] * len(ranks)
