"""Which checkpoint a run that is started again goes on from."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import lightning
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from ringflash.agreement import agree
from ringflash.lightning.writing import leftovers, restore

COMPLETE = "complete"  # a file in a checkpoint of DeepSpeed's once all ranks have written theirs


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The checkpoint below a folder that was completed last, whichever version of the run wrote it.

    One that a crash has cut short has another name (ringflash.lightning.writing), or lacks its end: it does not count.
    """
    restore(output_dir)
    complete = [path for path in Path(output_dir).glob("**/*.ckpt") if is_complete(path)]
    return max(complete, key=_age, default=None)


def is_complete(checkpoint: Path) -> bool:
    """Whether all of a distributed checkpoint was written.

    Once every rank has written its part, rank 0 writes the list of them (.metadata), then the rest of the
    trainer's state: a zip file, whose directory is at its end. Of DeepSpeed's it writes COMPLETE.
    """
    whole = (checkpoint / ".metadata").is_file() and zipfile.is_zipfile(checkpoint / "meta.pt")
    return whole or (checkpoint / COMPLETE).is_file()


def _age(checkpoint: Path) -> tuple[int, int]:
    """When it was completed; for a file system with coarse clocks then its step."""
    step = re.search(r"step=(\d+)", checkpoint.name)
    last = checkpoint / ("meta.pt" if (checkpoint / "meta.pt").is_file() else COMPLETE)
    return last.stat().st_mtime_ns, int(step[1]) if step else -1


class SameCheckpoint(lightning.Callback):
    """Fails on every rank where ranks do not continue from the same checkpoint, as they do when the hosts do not
    share the folder. Lightning would load that of the first rank where there is one, and wait where there is none.

    Args:
        ckpt_path: what this rank continues from.
        output_dir: below which rank 0 then removes what a crash while writing has left.
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
