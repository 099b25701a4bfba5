"""Checkpoints written beside the training: overlap, failed writes, the same name twice, the last two kept, no pickles.

Two gloo processes on the CPU (checkpoint_worker.py) do all runs; every test reads its part.
Crashes and resuming are in test_launch_recovery.py and test_lightning_recipes.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from recipes.lightning.resume import leftovers, newest_checkpoint
from ringflash.lightning import ContextParallelStrategy
from ringflash.lightning.checkpoints import COMPLETE, WRITTEN_AT
from tests.recipes.launching import run_ranks, write_text

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    folder, out = write_text(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("found")
    output = run_ranks("tests.recipes.checkpoint_worker", folder, out, num_ranks=WORLD_SIZE)
    assert "unpickled" not in output.splitlines()
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def test_training_goes_on_while_a_checkpoint_is_written(ranks: list[dict[str, Any]]) -> None:
    """Rank 1 starts to write after the next step; until then there is no checkpoint, at the end a whole one."""
    for rank in ranks:
        assert rank["overlap"] == {"in_time": [True], "whole": [[False], [False]], "end": True}


def test_last_two_are_kept(ranks: list[dict[str, Any]]) -> None:
    """The last two of five, with nothing else in the folder."""
    for rank in ranks:
        assert rank["kept"] == ["epoch=0-step=4.ckpt", "epoch=0-step=5.ckpt"]


def test_synchronous_ones_are_whole_when_saving_returns(ranks: list[dict[str, Any]]) -> None:
    """On request while training, and always after it."""
    for rank in ranks:
        assert rank["synchronous"] == [[False], [True]]
        assert rank["afterwards"]


@pytest.mark.parametrize(("when", "steps"), [("next", 4), ("end", 4)])
def test_full_disk_of_one_rank_fails_all(ranks: list[dict[str, Any]], when: str, steps: int) -> None:
    """At the next save where there is one, else at the end of training."""
    for rank in ranks:
        error = rank["failures"][when]["error"]
        assert error.startswith("RuntimeError: a checkpoint was not written: OSError on rank 1: ")
        assert "No space left on device" in error and "(seen on ranks [0, 1])" in error
        assert rank["failures"][when]["steps"] == steps


def test_last_whole_checkpoint_outlives_a_failed_one(ranks: list[dict[str, Any]]) -> None:
    """The one before is there, the failed one has no name, the one after was not begun."""
    for rank in ranks:
        assert rank["failures"]["whole"] == ["good.ckpt"]


def test_folder_that_is_a_file_fails_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "was not written: NotADirectoryError on rank 0" in rank["failures"]["folder"]["error"]


def test_training_that_fails_lets_a_write_end(ranks: list[dict[str, Any]]) -> None:
    """The parts are written after the error, which is the one that is raised."""
    for rank in ranks:
        assert rank["error"] == {"error": "ValueError: planted", "whole": True}


def test_signal_on_the_way_to_the_first_step_stops_both(ranks: list[dict[str, Any]]) -> None:
    """One rank had it, once Lightning's own handler was set: that one sends, and the ranks wait for one another.

    Though the trainer's min_steps, 4, are not reached: Lightning would train on, and save after each step.
    """
    assert [rank["early_signal"] for rank in ranks] == [[2, 4], [2, 4]]


def test_same_name_twice_is_the_later_one(ranks: list[dict[str, Any]]) -> None:
    """Four saves without a pause, three of them to one name, which a crash left while it removed an older one."""
    for rank in ranks:
        assert rank["twice"] == {"steps": {"a.ckpt": 2, "b.ckpt": 1}, "left": []}


def test_checkpoint_of_another_model_is_refused(ranks: list[dict[str, Any]]) -> None:
    """torch would leave a layer too many in it unread; and a training needs more than parameters."""
    for rank in ranks:
        found = rank["fitting"]
        assert found["num_hidden_layers=2"] == "none"
        assert "input_layernorm.weight of shape (32,) in it and none here, and 8 more" in found["num_hidden_layers=1"]
        assert "down_proj.weight of shape (32, 48) in it and (32, 64) here, and 5 more" in found["intermediate_size=64"]
        assert "must have the optimizer's state to be continued, got only parameters" in found["weights"]


def test_damaged_tensor_is_named(ranks: list[dict[str, Any]]) -> None:
    """A flipped bit, seen by the rank that compares this part, refused by both."""
    for rank in ranks:
        assert "step=5.ckpt/__1_0.distcp must hold the bytes that were written, got" in rank["damaged"]["by name"]


def test_previous_checkpoint_takes_the_place_of_a_damaged_one(ranks: list[dict[str, Any]]) -> None:
    """On automatic resume only, on both ranks; if all are damaged, the run ends with the error of the oldest."""
    for rank in ranks:
        assert (rank["damaged"]["step"], rank["damaged"]["path"]) == (4, "epoch=0-step=4.ckpt")
        assert "step=4.ckpt/__0_0.distcp must hold the bytes that were written, got" in rank["damaged"]["all"]


def test_options_that_a_checkpoint_lacks_are_kept(ranks: list[dict[str, Any]]) -> None:
    """A scheduler adds one to its optimizer: torch would not load a checkpoint from before."""
    for rank in ranks:
        found = rank["other_options"]
        assert (found["lr"], found["added"]) == (0, 5) and found["states"] > 0


def test_hostile_pickle_is_refused(ranks: list[dict[str, Any]]) -> None:
    """The error names what it would call, and nothing is called (seen in the output)."""
    for rank in ranks:
        assert rank["hostile"].startswith("ValueError") and "posix.system" in rank["hostile"]


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


def test_one_file_is_not_written_beside_the_training() -> None:
    """Refused before anything starts; left out, the argument follows the other one."""
    with pytest.raises(ValueError, match="async_checkpoint must be False where save_distributed_checkpoint is"):
        ContextParallelStrategy(save_distributed_checkpoint=False, async_checkpoint=True)
    ContextParallelStrategy(save_distributed_checkpoint=False)
