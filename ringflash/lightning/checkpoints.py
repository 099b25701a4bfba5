"""Checkpoints: written while training continues, and ranked by evaluations.

save(step 100): copy to host memory | continue training ...   | save(step 200): wait for 100, copy, ...
a thread:                           | write, rename, remove   |

A checkpoint is written under a temporary name and renamed once it is complete.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import lightning
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import callbacks
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from ringflash.checkpoint.checksums import ChecksumWriter, Sums, write_checksums
from ringflash.comm import agreement
from ringflash.comm.comparison import checksum, gather_values

WRITTEN_AT = "written_at"  # file in a checkpoint: the time in ns, because copying changes the files' own times
COMPLETE = "complete"  # file in a DeepSpeed checkpoint, written once all ranks have written their parts
PARTIAL = ".partial"  # suffix of a checkpoint that is being written
_SAVED_OTHERWISE = {"state_dict", "optimizer_states", "hyper_parameters", "datamodule_hyper_parameters"}
_SHARDED = "sharded"
REPLACED = ".replaced"  # suffix of a complete checkpoint for the moment in which a new one takes its name


class CheckpointWriter:
    """Writer of distributed checkpoints, one at a time in a background thread; all ranks make the same calls.

    Once all ranks have written their parts, rank 0 adds the rest of Lightning's state (meta.pt), the time and the
    checksums of all files, and renames the directory. Under its final name a checkpoint is complete or does not exist.

    Args:
        timeout: how long a rank waits for the parts of other ranks.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        group = dist.new_group(backend="gloo", timeout=timeout)  # the training uses its own meanwhile
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []

    def save(self, state: dict[str, Any], rest: dict[str, Any], path: Path) -> None:
        """Wait for the previous checkpoint, copy the state, and return while it is written.

        Args:
            state: tensors and values; each rank writes its part of them.
            rest: everything else, which rank 0 writes to meta.pt.
        Raises:
            RuntimeError: the previous checkpoint was not written; on every rank.
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
        """Remove a checkpoint once all checkpoints requested so far are complete; never if one of them fails."""
        self._jobs.append(self._thread.submit(_remove, list(self._jobs), path))

    def finish(self) -> None:
        """Wait until every requested checkpoint is on disk.

        Raises:
            RuntimeError: writing or removing failed on some rank; on every rank.
        """
        if not self._jobs:
            return
        mine = self._wait()
        problems = gather_values(self._group, mine)
        failed = {rank: text for rank, text in enumerate(problems) if text}
        if failed:
            raise RuntimeError(
                f"a checkpoint was not written: {next(iter(failed.values()))} (seen on ranks {list(failed)}); free "
                "disk space, or choose another folder. The last complete checkpoint is untouched."
            )

    def close(self) -> str | None:
        """Wait without contacting the other ranks, which may be gone, and end the thread and the group.

        Returns:
            The first failure on this rank, in words; None if there was none.
        """
        failed = self._wait()
        self._thread.shutdown()
        dist.destroy_process_group(self._group)
        return failed

    def _wait(self) -> str | None:
        """Return the first failure of this rank's jobs, in words, after all of them have ended."""
        errors = [job.exception() for job in self._jobs]
        self._jobs = []
        return next((_describe_error(error) for error in errors if error is not None), None)


def check_local(folder: str | Path) -> None:
    """Raise ValueError for the address of a bucket: as a path it would be a local folder, named s3: for example."""
    if re.match(r"[A-Za-z][\w+.-]+:/", str(folder)):  # Path turns two slashes into one
        raise ValueError(
            f"checkpoints must go to a folder of a file system, got {folder}; name one that all hosts share, and "
            "copy them on from there."
        )


def check_same_state(checkpoint: Mapping[str, Any], trainer: lightning.Trainer) -> None:
    """Check that ranks save the same state of callbacks, loops and data; all ranks call this together.

    A checkpoint has only the first rank's, from which every rank would continue. What only the first rank saves passes,
    as do the times and scores of Lightning's own callbacks.

    Args:
        checkpoint: what Lightning has collected on this rank.
    Raises:
        ValueError: values differ, or are sharded tensors; on every rank.
    """
    own = (callbacks.ModelCheckpoint, callbacks.EarlyStopping, callbacks.Timer)
    ignored = {callback.state_key for callback in trainer.callbacks if isinstance(callback, own)}
    state = {name: value for name, value in checkpoint.items() if name not in _SAVED_OTHERWISE}
    state["callbacks"] = {name: value for name, value in state.get("callbacks", {}).items() if name not in ignored}
    mine = dict(_described(state, ""))
    summary = hashlib.sha256(repr(mine).encode()).hexdigest()
    of_ranks, world = [mine], cast(dist.ProcessGroup, dist.group.WORLD)
    if len({*agreement.gather(world, summary)}) > 1:
        of_ranks = gather_values(world, mine)
    first, *others = of_ranks
    for name, rank in [(name, 0) for name in first] + [(name, r) for r, x in enumerate(others, 1) for name in x]:
        if of_ranks[rank][name] == _SHARDED or of_ranks[rank][name] != first.get(name):
            got = "a sharded tensor" if of_ranks[rank][name] == _SHARDED else "another value"
            raise ValueError(
                f"{name} must be the same on all ranks to be saved, because every rank continues from the first one's, "
                f"got {got} on rank {rank}; in state_dict gather shards (full_tensor), in load_state_dict take this "
                "rank's shard, as the moving average in docs/lightning.md does; return other values only where all "
                "ranks agree on them."
            )


def _described(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each value in nested dicts and lists, and a text that tells it from others."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _described(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, DTensor):
        yield name, _SHARDED
    elif isinstance(value, Tensor):
        yield name, f"{value.dtype} {tuple(value.shape)} {checksum(value)}"
    else:
        plain = isinstance(value, str | bytes | int | float | complex | None)
        yield name, repr(value) if plain else type(value).__qualname__


def note_time(checkpoint: Path) -> None:
    """Record the present time in a checkpoint as the time at which it was written."""
    (checkpoint / WRITTEN_AT).write_text(str(time.time_ns()))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def _complete(written: Future[Any], storage: ChecksumWriter, meta: bytes, path: Path) -> None:
    """Wait for this rank's part; rank 0, which torch ends last, then adds the remaining files and renames."""
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
        shutil.rmtree(replaced, ignore_errors=True)  # left by a crash during its removal
        path.rename(replaced)
    else:
        path.unlink(missing_ok=True)
    _partial(path).rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def _remove(before: list[Future[None]], path: Path) -> None:
    if dist.get_rank() == 0 and all(job.exception() is None for job in before) and path.exists():
        shutil.rmtree(path)


def _describe_error(error: BaseException) -> str:
    """Return type and message of an error; if it lists errors of several ranks, of the first rank's error."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"{type(cause).__name__} on rank {rank}: {cause}"
    return f"{type(error).__name__}: {error}"


class ModelCheckpoint(callbacks.ModelCheckpoint):
    """Lightning's ModelCheckpoint, except that a step is ranked only by the evaluation of that same step.

    Lightning uses the latest evaluation, even if the step's own evaluation is about to run. If `monitor` is a metric
    of evaluations, a save that is due waits for the next evaluation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before: dict[str, Any] = {}  # all metrics at the start of the evaluation
        self._of_evaluations: set[str] = set()  # metrics that evaluations have logged
        self._in_batch = False

    def on_train_batch_end(self, *args: Any) -> None:
        """Save if a checkpoint is due, unless it has to wait for an evaluation."""
        self._in_batch = True
        super().on_train_batch_end(*args)
        self._in_batch = False

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Remember the metrics so far: those that change from now on belong to an evaluation."""
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save the checkpoint that has waited for this evaluation."""
        metrics = trainer.callback_metrics.items()
        self._of_evaluations |= {name for name, value in metrics if value is not self._before.get(name)}
        super().on_validation_end(trainer, pl_module)

    def _monitor_candidates(self, trainer: lightning.Trainer) -> dict[str, Any]:
        hidden = self._of_evaluations if self._in_batch else set()
        return {name: value for name, value in super()._monitor_candidates(trainer).items() if name not in hidden}

    def _should_save_on_train_epoch_end(self, trainer: lightning.Trainer) -> bool:
        """Return False while a save waits for an evaluation: Lightning would drop it at the end of an epoch."""
        return not self._defer_save_until_validation and super()._should_save_on_train_epoch_end(trainer)


def check_folders(trainer: lightning.Trainer) -> None:
    """Run `check_local` on the folders of a trainer's checkpoints."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, callbacks.ModelCheckpoint) and callback.dirpath is not None:
            check_local(callback.dirpath)
