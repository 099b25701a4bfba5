"""Checkpoints written during training: overlap, failed writes, the same name twice, the last two kept, no pickles.

Two gloo processes on the CPU do all runs (checkpoint_worker.py, which says what each part shows).
Crashes and resuming are in test_launch_recovery.py and test_lightning_recipes.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.lightning.resume import leftovers, newest_checkpoint
from ringflash.lightning import ContextParallelStrategy
from ringflash.lightning.checkpoint_loading import SingleFile
from ringflash.lightning.checkpoints import COMPLETE, WRITTEN_AT
from tests.recipes.checkpoint_worker import TESTS
from tests.recipes.launching import assert_made, read_results, run_ranks, write_text


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Errors of each rank, by part."""
    folder, out = write_text(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("found")
    output = run_ranks("tests.recipes.checkpoint_worker", folder, out, num_ranks=2)
    assert "unpickled" not in output.splitlines()
    return read_results(out)


@pytest.mark.parametrize("part", TESTS, ids=lambda part: part.__name__)
def test_on_two_ranks(ranks: list[dict[str, str]], part: Callable[[Any], None]) -> None:
    assert_made(ranks, part)


def test_replaced_checkpoint_has_its_name_back(tmp_path: Path) -> None:
    """After a crash between the two renames; what is not whole stays out of the search."""
    for name in ("a.ckpt.replaced", "a.ckpt.partial", "b.ckpt", "b.ckpt.replaced"):
        (tmp_path / "version_0" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) is None
    assert (tmp_path / "version_0" / "a.ckpt").is_dir()
    assert {path.name for path in leftovers(tmp_path)} == {"a.ckpt.partial", "b.ckpt.replaced"}


def test_the_newest_is_the_one_that_was_completed_last(tmp_path: Path) -> None:
    """A checkpoint's own time counts, if it holds one: copies were made one by one, the oldest last."""
    for name, noted, copied in (("step=9", 30, 1), ("step=2", 40, 2), ("step=7", 10, 3)):
        checkpoint = tmp_path / f"{name}.ckpt"
        checkpoint.mkdir()
        (checkpoint / WRITTEN_AT).write_text(str(noted))
        (checkpoint / COMPLETE).touch()
        os.utime(checkpoint / COMPLETE, ns=(copied, copied))
    assert newest_checkpoint(tmp_path) == tmp_path / "step=2.ckpt"
    for path in tmp_path.glob("*.ckpt"):
        (path / WRITTEN_AT).unlink()
        os.utime(path / COMPLETE, ns=(5, 5 + ("step=7" in path.name)))
    assert newest_checkpoint(tmp_path) == tmp_path / "step=7.ckpt"


def test_file_with_groups_of_other_names_is_refused(tmp_path: Path) -> None:
    """The groups have equal shapes, so that only the names tell."""
    module, path = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), tmp_path / "file.ckpt"
    named = list(module.named_parameters())
    content = {"state_dict": module.state_dict(), "optimizer_states": [torch.optim.AdamW(named).state_dict()]}
    torch.save(content, path)
    file = SingleFile(path, weights_only=True)
    file.load_optimizer(0, module, torch.optim.AdamW(named))
    with pytest.raises(ValueError, match="must have the parameter groups of the optimizer, got groups of .* or others"):
        file.load_optimizer(0, module, torch.optim.AdamW([*named[2:], *named[:2]]))


def test_one_file_is_not_written_beside_the_training() -> None:
    """Refused before anything starts; left out, the argument follows the other one."""
    with pytest.raises(ValueError, match="async_checkpoint must be False if save_distributed_checkpoint is False"):
        ContextParallelStrategy(save_distributed_checkpoint=False, async_checkpoint=True)
    ContextParallelStrategy(save_distributed_checkpoint=False)
