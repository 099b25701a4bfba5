"""Search for the checkpoint from which an interrupted run continues (`--ckpt_path auto`)."""

from __future__ import annotations

import re
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path

import lightning
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from ringflash.comm.agreement import agree
from ringflash.lightning.checkpoints import COMPLETE, PARTIAL, REPLACED, WRITTEN_AT


def restore(folder: str | Path) -> None:
    """Rename back a complete checkpoint that a crash left under its `REPLACED` name.

    Any number of ranks may call this concurrently.
    """
    for path in Path(folder).glob(f"**/*.ckpt{REPLACED}"):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if not original.exists():
            with suppress(FileNotFoundError):  # another rank was faster
                path.rename(original)


def leftovers(folder: str | Path) -> list[Path]:
    """Return the partial and replaced checkpoints that a crash has left below a folder; call it when no rank writes."""
    return [path for suffix in (PARTIAL, REPLACED) for path in Path(folder).glob(f"**/*.ckpt{suffix}")]


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the most recently completed checkpoint below a folder, whichever version of the run wrote it."""
    return next(iter(complete_checkpoints(output_dir)), None)


def complete_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return all complete checkpoints below a folder, newest first.

    A checkpoint that a crash has cut short has another name (`PARTIAL`) or lacks its end, and is left out.
    """
    restore(output_dir)
    complete = [path for path in Path(output_dir).glob("**/*.ckpt") if is_complete(path)]
    return sorted(complete, key=_age, reverse=True)


def is_complete(checkpoint: Path) -> bool:
    """Return True if all of a distributed checkpoint was written.

    Once every rank has written its part, rank 0 writes the list of parts (.metadata), then the rest of the trainer's
    state: a zip file, whose directory is at its end. In a DeepSpeed checkpoint it writes `COMPLETE`.
    """
    whole = (checkpoint / ".metadata").is_file() and zipfile.is_zipfile(checkpoint / "meta.pt")
    return whole or (checkpoint / COMPLETE).is_file()


def _age(checkpoint: Path) -> tuple[int, int]:
    """Sort key of a checkpoint: the time recorded in it, or that of its last file; then the step in its name."""
    step, noted = re.search(r"step=(\d+)", checkpoint.name), checkpoint / WRITTEN_AT
    text = noted.read_text() if noted.is_file() else ""
    last = checkpoint / ("meta.pt" if (checkpoint / "meta.pt").is_file() else COMPLETE)
    return int(text) if text.isdecimal() else last.stat().st_mtime_ns, int(step[1]) if step else -1


class SameCheckpoint(lightning.Callback):
    """Callback that raises on every rank if ranks would continue from different checkpoints.

    They do if the hosts do not share the folder. Lightning would load the first rank's checkpoint if there is one, and
    hang if there is none.

    Args:
        ckpt_path: the checkpoint that this rank continues from.
        output_dir: folder in which rank 0 then removes the leftovers of a crash, and which has older checkpoints; None
            for a checkpoint that the user named.
    """

    def __init__(self, ckpt_path: str | Path | None, output_dir: str | Path | None = None) -> None:
        self.ckpt_path = ckpt_path
        self.output_dir = output_dir

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Compare paths after the processes have joined and before any rank loads; then remove leftovers."""
        agree(dist.group.WORLD, {"ckpt_path": self.ckpt_path and str(self.ckpt_path)})
        if self.output_dir is not None and dist.get_rank() == 0:
            for path in leftovers(self.output_dir):
                rank_zero_info(f"Removing {path}, which a crash has left")
                shutil.rmtree(path, ignore_errors=True)

    def older_checkpoints(self, path: Path) -> list[Path]:
        """Return the checkpoints, newest first, with which the strategy continues if the one at `path` is damaged."""
        if self.output_dir is None or self.ckpt_path != path:
            return []
        found = complete_checkpoints(self.output_dir)
        return found[found.index(path) + 1 :] if path in found else []
