"""By what checkpoints are judged, and which one a run that is started again goes on from."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import lightning
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.utilities import rank_zero_info

from ringflash.comm.agreement import agree
from ringflash.lightning.writing import WRITTEN_AT, check_local, leftovers, restore

COMPLETE = "complete"  # a file in a checkpoint of DeepSpeed's once all ranks have written theirs


class ModelCheckpoint(callbacks.ModelCheckpoint):
    """Lightning's, which judges a step by what an evaluation of that step has logged, and by no other.

    Lightning's own takes the evaluation that came last, also where the step's own is about to follow. Where `monitor`
    is a metric of evaluations, a save that is due waits for the next of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before: dict[str, Any] = {}  # all metrics when the evaluation began
        self._of_evaluations: set[str] = set()
        self._in_batch = False

    def on_train_batch_end(self, *args: Any) -> None:
        """Save where one is due, unless an evaluation is to be waited for."""
        self._in_batch = True
        super().on_train_batch_end(*args)
        self._in_batch = False

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """What is logged from here on is of an evaluation."""
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save what has waited for this."""
        metrics = trainer.callback_metrics.items()
        self._of_evaluations |= {name for name, value in metrics if value is not self._before.get(name)}
        super().on_validation_end(trainer, pl_module)

    def _monitor_candidates(self, trainer: lightning.Trainer) -> dict[str, Any]:
        hidden = self._of_evaluations if self._in_batch else set()
        return {name: value for name, value in super()._monitor_candidates(trainer).items() if name not in hidden}

    def _should_save_on_train_epoch_end(self, trainer: lightning.Trainer) -> bool:
        """Not what waits for an evaluation, which Lightning would forget there."""
        return not self._defer_save_until_validation and super()._should_save_on_train_epoch_end(trainer)


def check_folders(trainer: lightning.Trainer) -> None:
    """Refuse a trainer whose checkpoints would go to a bucket, as `check_local` does.

    Raises:
        ValueError: an address in the place of a folder.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, callbacks.ModelCheckpoint) and callback.dirpath is not None:
            check_local(callback.dirpath)


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the checkpoint below a folder that was completed last, whichever version of the run wrote it."""
    return next(iter(complete_checkpoints(output_dir)), None)


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return all complete checkpoints below a folder, the newest first.

    One that a crash has cut short has another name (ringflash.lightning.writing), or lacks its end: it does not count.
    """
    restore(output_dir)
    complete = [path for path in Path(output_dir).glob("**/*.ckpt") if is_complete(path)]
    return sorted(complete, key=_age, reverse=True)


def is_complete(checkpoint: Path) -> bool:
    """Whether all of a distributed checkpoint was written.

    Once every rank has written its part, rank 0 writes the list of them (.metadata), then the rest of the
    trainer's state: a zip file, whose directory is at its end. Of DeepSpeed's it writes COMPLETE.
    """
    whole = (checkpoint / ".metadata").is_file() and zipfile.is_zipfile(checkpoint / "meta.pt")
    return whole or (checkpoint / COMPLETE).is_file()


def _age(checkpoint: Path) -> tuple[int, int]:
    """When it was completed, as noted in it or by the time of its last file; where that is the same, its step."""
    step, noted = re.search(r"step=(\d+)", checkpoint.name), checkpoint / WRITTEN_AT
    text = noted.read_text() if noted.is_file() else ""
    last = checkpoint / ("meta.pt" if (checkpoint / "meta.pt").is_file() else COMPLETE)
    return int(text) if text.isdecimal() else last.stat().st_mtime_ns, int(step[1]) if step else -1


class SameCheckpoint(lightning.Callback):
    """Fails on every rank where ranks do not continue from the same checkpoint, as they do when the hosts do not
    share the folder. Lightning would load that of the first rank where there is one, and wait where there is none.

    Args:
        ckpt_path: what this rank continues from.
        output_dir: below which rank 0 then removes what a crash while writing has left, and where the strategy finds
            `older_checkpoints`.
    """

    def __init__(self, ckpt_path: str | Path | None, output_dir: str | Path | None = None) -> None:
        self.ckpt_path = ckpt_path
        self.output_dir = output_dir

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Compare, once the ranks have met and before any loads; then tidy up, once all have looked."""
        agree(dist.group.WORLD, {"ckpt_path": self.ckpt_path and str(self.ckpt_path)})
        if self.output_dir is not None and dist.get_rank() == 0:
            for path in leftovers(self.output_dir):
                rank_zero_info(f"Removing {path}, which a crash has left")
                shutil.rmtree(path, ignore_errors=True)


def older_checkpoints(trainer: lightning.Trainer, path: Path) -> list[Path]:
    """Return the checkpoints, the newest first, that automatic resume takes if the one at `path` is damaged.

    None of them for a path that the user named.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, SameCheckpoint) and callback.output_dir is not None and callback.ckpt_path == path:
            found = complete_checkpoints(callback.output_dir)
            return found[found.index(path) + 1 :] if path in found else []
    return []
