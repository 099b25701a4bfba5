"""The README's diff, applied to a plain LightningModule: two ranks train and judge as one process without it.

Two gloo processes on the CPU (wrap_worker.py), fp64.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.launching import ROOT, run_ranks

RTOL = 1e-10


def readme_diff() -> list[str]:
    """Its lines."""
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return block.splitlines()


def apply(diff: list[str], text: str) -> str:
    """A text after the diff: a line that goes is replaced by the one that follows it, an import is added on top."""
    header = ""
    for i, line in enumerate(diff):
        if line.startswith("-"):
            assert text.count(line[1:] + "\n") == 1 and diff[i + 1].startswith("+"), line
            text = text.replace(line[1:] + "\n", diff[i + 1][1:] + "\n")
        elif line.startswith("+") and not (i and diff[i - 1].startswith("-")):
            header += line[1:] + "\n"
    return header + text


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("wrap")
    plain = (ROOT / "tests/recipes/plain_gpt.py").read_text()
    (folder / "changed_gpt.py").write_text(apply(readme_diff(), plain))
    run_ranks("tests.recipes.wrap_worker", folder, folder, num_ranks=2)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def test_the_diff_changes_three_lines() -> None:
    """Beside the import."""
    assert sum(line.startswith("-") for line in readme_diff()) == 3


@pytest.mark.parametrize("quantity", ["weights", "loss", "eval_loss"])
def test_training_equals_the_plain_module(ranks: list[dict[str, Any]], quantity: str) -> None:
    """After three steps; the evaluation shows the true loss, not cp_size times it."""
    assert all(rank[quantity] <= RTOL for rank in ranks), ranks


def test_local_positions_are_found_before_the_first_step(ranks: list[dict[str, Any]]) -> None:
    """On every rank, by the layer's name."""
    for rank in ranks:
        assert rank["planted"].startswith("model.blocks.0.attn must be given the q"), rank
