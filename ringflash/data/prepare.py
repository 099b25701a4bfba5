"""From text to token files, shard by shard, in several processes; killed at any moment, it goes on where it was.

    plan.json         what this folder is being made of; a run that would make it of something else is refused
    00000.bin         a shard under its own name is whole
    00000.done.json   its counts and checksum, by which the next run keeps it
    header.json       all of that together; then the files above that are not tokens go

A shard depends on its pieces of the inputs alone: interrupted or not, by one process or by many, the files are the
same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import get_args

from ringflash.data import tokenizers
from ringflash.data.files import checksum
from ringflash.data.format import (
    HEADER,
    VERSION,
    Header,
    Shard,
    TokenFileError,
    dtype_for,
    read_header,
    read_json,
    read_shard_entry,
    write_json,
    write_shard,
)
from ringflash.data.sources import (
    SUFFIXES,
    BadLines,
    Document,
    LeftOut,
    Piece,
    cut_into_shards,
    documents,
    find_files,
)

PLAN = "plan.json"
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 20, 512

OnShard = Callable[[int, int], None]


@dataclass(frozen=True)
class Plan:
    """Checksum of the inputs and the options."""

    plan: str


@dataclass(frozen=True)
class Job:
    """One shard, as a process is told to write it."""

    path: Path
    pieces: list[Piece]
    tokenizer: str
    text_field: str
    bad_lines: BadLines

    @property
    def entry_path(self) -> Path:
        """Where the shard's counts and checksum go."""
        return self.path.with_suffix(".done.json")

    @property
    def num_bytes(self) -> int:
        """Of input."""
        return sum(piece.num_bytes for piece in self.pieces)


def prepare(
    inputs: Iterable[str | Path],
    out: str | Path,
    *,
    tokenizer: str = "bytes",
    text_field: str = "text",
    suffixes: Iterable[str] = SUFFIXES,
    bad_lines: BadLines = "error",
    shard_bytes: int = 64 << 20,
    num_processes: int = 1,
    on_shard: OnShard = lambda done, total: None,
) -> Header:
    """Write the token files of all documents, or what is missing of them or no longer as it was written.

    Args:
        inputs: files, and folders searched for files that end in one of the suffixes.
        tokenizer: "bytes", or the folder of a Hugging Face tokenizer.
        text_field: of JSONL and parquet.
        bad_lines: "error" refuses a line or a row that holds no document, with its place; "skip" counts it in the
            header (`Shard.num_bad`), as empty documents always are (`num_empty`).
        shard_bytes: of input for each file of tokens.
        on_shard: told the bytes of input done and in all, first with what an earlier run has done.
    Raises:
        ValueError: no documents, or a folder that holds something else.
        RuntimeError: another run writes the folder, or a process was killed.
    """
    _check_positive(shard_bytes=shard_bytes, num_processes=num_processes)
    out, files, loaded = Path(out), find_files(inputs, tuple(suffixes)), _loaded(tokenizer)
    if bad_lines not in get_args(BadLines):
        raise ValueError(f"bad_lines must be 'error' or 'skip', got {bad_lines!r}; 'error' is the default.")
    plan = _fingerprint(files, loaded, text_field, shard_bytes, bad_lines)
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        finished = read_header(out) if (out / HEADER).exists() else None
        if finished is not None:
            _check_plan(finished.plan, plan, out)
        else:
            _claim(out, plan)
        shards = enumerate(cut_into_shards(files, shard_bytes))
        jobs = [Job(out / f"{i:05}.bin", pieces, tokenizer, text_field, bad_lines) for i, pieces in shards]
        known = {} if finished is None else {out / shard.name: shard for shard in finished.shards}
        entries = _write_missing(jobs, known, num_processes, on_shard)
        _check_documents(entries)
        header = Header(dtype_for(loaded.vocab_size), loaded.vocab_size, loaded.checksum, plan, tuple(entries), VERSION)
        if header != finished:
            write_json(out / HEADER, header)
        _remove(out, "*.done.json", PLAN, "*.tmp")
        return read_header(out)


def _write_missing(jobs: list[Job], known: dict[Path, Shard], num_processes: int, on_shard: OnShard) -> list[Shard]:
    """The entries of all shards, in order; those of an earlier run are kept.

    Args:
        known: what a finished header says of them.
    """
    found = {job.path: entry for job in jobs if (entry := _finished(job, known.get(job.path))) is not None}
    missing = [job for job in jobs if job.path not in found]
    total = sum(job.num_bytes for job in jobs)
    done = total - sum(job.num_bytes for job in missing)
    on_shard(done, total)
    for job, entry in _write(missing, num_processes):
        found[job.path] = entry
        done += job.num_bytes
        on_shard(done, total)
    return [found[job.path] for job in jobs]


def _finished(job: Job, known: Shard | None) -> Shard | None:
    """The entry of a shard that an earlier run wrote whole and that is still as it was written."""
    try:
        entry = known or read_shard_entry(job.entry_path)
        return entry if checksum(job.path) == entry.sha256 else None
    except (FileNotFoundError, TokenFileError):
        return None


def _write(jobs: list[Job], num_processes: int) -> Iterator[tuple[Job, Shard]]:
    """Each shard as it is done; in this process where one is asked for."""
    if num_processes == 1:
        yield from ((job, _write_one(job)) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, spawn, initializer=_end_with_parent) as pool:
        futures = {pool.submit(_write_one, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "processes must live until their shards are done, got one killed; "
                "run the same command again, with fewer processes or smaller shards where memory was short."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _write_one(job: Job) -> Shard:
    tokenizer, left_out = _loaded(job.tokenizer), LeftOut()
    found = documents(job.pieces, job.text_field, left_out, job.bad_lines)
    encoded = (tokens for batch in _batches(found) for tokens in tokenizer.encode(batch))
    written = write_shard(job.path, encoded, tokenizer.vocab_size)
    entry = replace(written, num_empty=left_out.empty, num_bad=left_out.bad)
    write_json(job.entry_path, entry)
    return entry


@lru_cache(maxsize=1)
def _loaded(tokenizer: str) -> tokenizers.Tokenizer:
    return tokenizers.load(tokenizer)


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents that a tokenizer takes at once."""
    batch: list[Document] = []
    size = 0
    for document in found:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _end_with_parent() -> None:
    """One process for each core is parallel enough; and none outlives a run that was killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _fingerprint(
    files: list[Path], tokenizer: tokenizers.Tokenizer, text_field: str, shard_bytes: int, bad_lines: BadLines
) -> str:
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    options = [text_field, shard_bytes, *([bad_lines] if bad_lines != "error" else [])]
    content = json.dumps([VERSION, found, tokenizer.checksum, *options])
    return hashlib.sha256(content.encode()).hexdigest()


def _claim(out: Path, plan: str) -> None:
    """Write down what the folder is for, or find that an earlier run has; clear what it left unfinished."""
    if (out / PLAN).exists():
        _check_plan(read_json(out / PLAN).get("plan"), plan, out)
    elif any(path.suffix != ".tmp" for path in out.iterdir()):
        raise ValueError(f"out must be an empty folder or that of an interrupted run, got {out}; name another.")
    _remove(out, "*.tmp")
    write_json(out / PLAN, Plan(plan))


def _check_plan(got: object, plan: str, out: Path) -> None:
    if got != plan:
        raise ValueError(
            f"out must be of the same inputs, tokenizer and options, got {out} of others; name another folder."
        )


def _check_documents(entries: list[Shard]) -> None:
    if not any(entry.num_documents for entry in entries):
        raise ValueError("inputs must hold a document that is not empty, got none; name others.")


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}; leave it out for the default.")


def _remove(out: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)  # a process of a killed run may still take its own away


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Only one run at a time; the lock goes with the process."""
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(folder)
        raise RuntimeError(f"out must be written by one run at a time, got {out} in use; wait for it.") from error
    try:
        yield
    finally:
        os.close(folder)
