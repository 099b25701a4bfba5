"""Checkpoints written beside the training, each under a temporary name until it is whole.

save(step 100): copy to the host's memory | train on ...          | save(step 200): wait for 100, copy, ...
a thread:                                 | write, rename, remove |
"""

from __future__ import annotations

import io
import os
import re
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ringflash.checkpoint_checksums import ChecksumWriter, Sums, write_checksums

WRITTEN_AT = "written_at"  # a file in a checkpoint with the time in ns, which its files lose where it is copied
PARTIAL = ".partial"  # behind the name of a checkpoint that is not whole
REPLACED = ".replaced"  # behind that of a whole one, for the moment in which another takes its name


class CheckpointWriter:
    """Writes one distributed checkpoint at a time in a thread of its own; all ranks make the same calls.

    Once all ranks have written their parts, rank 0 adds what Lightning keeps beside them (meta.pt), the time and the
    checksums of all files, and renames the directory: under its name a checkpoint is whole or does not exist.

    Args:
        timeout: how long a rank waits for the others' parts.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)  # the training's own group stays free
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []

    def save(self, state: dict[str, Any], rest: dict[str, Any], path: Path) -> None:
        """Wait for the checkpoint before, copy the state, and return while it is written.

        Args:
            state: what the ranks hold parts of.
            rest: what rank 0 writes to meta.pt.
        Raises:
            RuntimeError: the checkpoint before was not written; on every rank.
        """
        self.finish()
        if dist.get_rank() == 0:
            shutil.rmtree(_partial(path), ignore_errors=True)
        meta = io.BytesIO()
        torch.save(rest, meta)
        storage, copy = ChecksumWriter(_partial(path)), DefaultStager(StagingOptions(*[False] * 4))
        written = dcp.async_save(state, storage_writer=storage, async_stager=copy, process_group=self._group)
        assert isinstance(written, Future)
        self._jobs.append(self._thread.submit(_complete, written, storage, meta.getvalue(), path))

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, after those asked for so far are whole; never if one of them fails."""
        self._jobs.append(self._thread.submit(_remove, list(self._jobs), path))

    def finish(self) -> None:
        """Wait until all that was asked for is on the disk.

        Raises:
            RuntimeError: some of it failed on some rank; on every rank.
        """
        if not self._jobs:
            return
        mine = self._wait()
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self._group)
        failed = {rank: text for rank, text in enumerate(found) if text}
        if failed:
            raise RuntimeError(
                f"a checkpoint must be written in full, got {next(iter(failed.values()))} (seen on ranks "
                f"{list(failed)}); make room, or name another folder. The last whole one is untouched."
            )

    def close(self) -> str | None:
        """Wait without asking the other ranks, who may be gone, and end the thread and the group.

        Returns:
            What failed on this rank, if anything did.
        """
        failed = self._wait()
        self._thread.shutdown()
        dist.destroy_process_group(self._group)
        return failed

    def _wait(self) -> str | None:
        """The first failure of this rank's jobs, in words."""
        errors = [job.exception() for job in self._jobs]
        self._jobs = []
        return next((_in_words(error) for error in errors if error is not None), None)


def check_local(place: str | Path) -> None:
    """Refuse the address of a bucket: as a path it is that of a folder here, named s3: for instance.

    Raises:
        ValueError: an address in the place of a folder.
    """
    if re.match(r"[A-Za-z][\w+.-]+:/", str(place)):  # Path makes one slash of two
        raise ValueError(
            f"checkpoints must go to a folder of a file system, got {place}; name one that all hosts share, and "
            "copy them on from there."
        )


def restore(folder: str | Path) -> None:
    """Give a checkpoint its name back that a crash left nameless while another was about to take it.

    Any number of ranks may call this at once.
    """
    for path in Path(folder).glob(f"**/*.ckpt{REPLACED}"):
        original = path.with_name(path.name.removesuffix(REPLACED))
        if not original.exists():
            with suppress(FileNotFoundError):  # another rank was faster
                path.rename(original)


def leftovers(folder: str | Path) -> list[Path]:
    """What a crash while writing has left below a folder to which nobody writes now."""
    return [path for suffix in (PARTIAL, REPLACED) for path in Path(folder).glob(f"**/*.ckpt{suffix}")]


def note_time(checkpoint: Path) -> None:
    """Note in it that it was written now."""
    (checkpoint / WRITTEN_AT).write_text(str(time.time_ns()))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def _complete(written: Future[Any], storage: ChecksumWriter, meta: bytes, path: Path) -> None:
    """On rank 0, whose part of the writing ends after all others': the rest, then the name."""
    written.result()
    if dist.get_rank() != 0:
        return
    with open(_partial(path) / "meta.pt", "wb") as file:
        file.write(meta)
        file.flush()
        os.fsync(file.fileno())
    sums = Sums()
    sums.add(meta)
    write_checksums(_partial(path), {**storage.sums, "meta.pt": sums})
    note_time(_partial(path))
    replaced = path.with_name(path.name + REPLACED)
    if path.is_dir():
        shutil.rmtree(replaced, ignore_errors=True)  # of a crash while it was removed
        path.rename(replaced)
    else:
        path.unlink(missing_ok=True)
    _partial(path).rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def _remove(before: list[Future[None]], path: Path) -> None:
    if dist.get_rank() == 0 and all(job.exception() is None for job in before) and path.exists():
        shutil.rmtree(path)


def _in_words(error: BaseException) -> str:
    """Type and message; of a failure that all ranks were told of, that of the first rank that failed."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"{type(cause).__name__} on rank {rank}: {cause}"
    return f"{type(error).__name__}: {error}"
