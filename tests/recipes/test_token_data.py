"""Lightning on token files: every batch against `prepare_batch`, resume on another mesh, refusals on every rank.

Two launches of tokens_worker.py, which says what each part shows, of two gloo processes and of one, on the CPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringflash.lightning import TokenData
from tests.helpers.tokens import write_tokens
from tests.recipes.launching import assert_made, each_part, launch_parts
from tests.recipes.tokens_worker import TESTS

DOCUMENTS = [[256, *((i * 31 + j * 7) % 256 for j in range(5 + i * 13 % 60))] for i in range(40)]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """A launch of two ranks, and one of one rank that continues their checkpoint."""
    folder = tmp_path_factory.mktemp("data") / "tokens"
    write_tokens(folder, DOCUMENTS, 15)
    write_tokens(folder.with_name("tokens-other"), [*DOCUMENTS[:-1], [1]], 15)
    corrupt = Path(shutil.copytree(folder, folder.with_name("tokens-corrupt"))) / "00001.bin"
    corrupt.write_bytes(b"\xff" + corrupt.read_bytes()[1:])
    saved = folder.with_name("saved.ckpt")
    return launch_parts(TESTS, "tests.recipes.tokens_worker", folder, tmp_path_factory, saved)


@each_part(TESTS)
def test_on_ranks(launches: dict[int, list[dict[str, str]]], num_ranks: int, part: Callable[[Any], None]) -> None:
    assert_made(launches[num_ranks], part)


@pytest.mark.parametrize("percent", [0.0, 100.0, -1.0])
def test_held_out_part_that_is_none_or_all_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match=f"held_out_percent must be between 0 and 100, got {percent}"):
        TokenData("tokens", 48, held_out_percent=percent)


def test_checkpoint_of_another_order_is_refused() -> None:
    """Its place names other documents. Before documents were mixed by length, checkpoints did not name their order."""
    data: Any = TokenData("tokens", 48)
    data.files, data.train = SimpleNamespace(header=SimpleNamespace(fingerprint="f")), range(5)
    state = data.state_dict()
    data.load_state_dict(state)
    for older in ({**state, "order": 1}, {name: x for name, x in state.items() if name != "order"}):
        with pytest.raises(ValueError, match=r"order must be that of the checkpoint \((1|None)\), got 2; resume with"):
            data.load_state_dict(older)
