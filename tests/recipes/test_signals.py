"""SIGTERM to one rank of a training as docs/lightning.md has it, wherever it arrives: all ranks save and stop.

Three CPU processes, and two with DeepSpeed, each for all places. The last rank gets the signal. Lightning's own
handler broadcasts from inside the collective that it has interrupted, and hangs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.recipes.launching import run_ranks, write_text
from tests.recipes.signal_worker import PLACES, SIGNALLED


@pytest.fixture(scope="module", params=[("lightning", 3), ("deepspeed", 2)], ids=str)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    kind, num_ranks = request.param
    folder = tmp_path_factory.mktemp("signals")
    out = folder / "out"
    out.mkdir()
    texts = write_text(folder / "texts")
    run_ranks("tests.recipes.signal_worker", texts, out, kind, num_ranks=num_ranks, DS_ACCELERATOR="cpu")
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_save_and_stop(ranks: list[dict[str, Any]], place: str) -> None:
    """Within two steps: notes are compared at the end of a batch, and the answer is read at the end of the next."""
    step = ranks[0][place]["step"]
    assert SIGNALLED < step <= SIGNALLED + 2
    assert [rank[place] for rank in ranks] == [{"step": step, "saved": [f"interrupted-step={step}.ckpt"]}] * len(ranks)


def test_an_evaluation_by_itself_ends_at_once(ranks: list[dict[str, Any]]) -> None:
    """It has nothing to save."""
    assert [rank["evaluation"] for rank in ranks] == [[True] * 3] * len(ranks)
