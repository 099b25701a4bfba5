"""Removal of older checkpoints by the thread that writes them. One process."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from ringflash.checkpoint.safe_files import check_together
from ringflash.lightning.checkpoints import CheckpointWriter


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    """The group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    writer = CheckpointWriter(timedelta(minutes=1))
    yield writer
    writer.close()
    dist.destroy_process_group()


def save(writer: CheckpointWriter, path: Path) -> None:
    writer.save({"state_dict": {"weight": torch.ones(3)}}, {"global_step": 1}, path)


def test_older_checkpoint_is_removed_last(writer: CheckpointWriter, tmp_path: Path) -> None:
    older, newer = tmp_path / "older.ckpt", tmp_path / "newer.ckpt"
    save(writer, older)
    save(writer, newer)
    writer.remove(older)
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == [newer.name]
    check_together(newer)


def test_older_checkpoint_outlives_a_failed_one(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ModelCheckpoint` asks for the removal before it can know."""
    older, newer = tmp_path / "older.ckpt", tmp_path / "newer.ckpt"
    save(writer, older)
    writer.finish()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    save(writer, newer)
    writer.remove(older)
    with pytest.raises(RuntimeError, match="a checkpoint was not written: OSError on rank 0: .*No space"):
        writer.finish()
    check_together(older)
    assert not newer.exists()
