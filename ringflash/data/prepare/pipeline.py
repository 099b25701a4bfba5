"""Crash-safe, parallel conversion of text to token files: a run that was killed can be resumed.

    plan.json         checksum of the inputs and options; a run with others is refused
    00000.bin         a finished shard: it gets this name only once it is complete
    00000.done.json   counts and checksum of the shard; if they match, the next run keeps the shard
    header.json       the entries of all shards; once it is written, the other JSON files are deleted

A shard depends only on its pieces of the inputs, so interruptions and the number of processes do not change the files.
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
from ringflash.data.prepare import tokenizers
from ringflash.data.prepare.sources import (
    SUFFIXES,
    BadLines,
    Document,
    LeftOut,
    TextPiece,
    cut_into_shards,
    documents,
    find_files,
)

PLAN = "plan.json"
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 20, 512

OnShard = Callable[[int, int], None]


@dataclass(frozen=True)
class PreparePlan:
    """Content of plan.json: a checksum of the inputs and the options."""

    plan: str


@dataclass(frozen=True)
class PrepareJob:
    """Instructions for a process to write one shard."""

    path: Path
    pieces: list[TextPiece]
    tokenizer: str
    text_field: str
    bad_lines: BadLines

    @property
    def entry_path(self) -> Path:
        """Path of the JSON file for the shard's counts and checksum."""
        return self.path.with_suffix(".done.json")

    @property
    def num_bytes(self) -> int:
        """Size of the shard's input."""
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
    """Write the token files of all documents; files that an earlier run wrote are kept if they are intact.

    Args:
        inputs: files, and folders to search for files with one of the suffixes.
        tokenizer: "bytes", or the folder of a Hugging Face tokenizer.
        text_field: name of the text field of JSONL and of the text column of parquet.
        bad_lines: "error" rejects a line or row without a document and reports its place; "skip" counts it in the
            header (`Shard.num_bad`). Empty documents are always skipped and counted (`num_empty`).
        shard_bytes: bytes of input per token file.
        on_shard: called with (bytes of input done, total bytes); the first call reports the work of earlier runs.
    Raises:
        ValueError: there are no documents, or the folder holds something else.
        RuntimeError: another run is writing the folder, or a process was killed.
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
        jobs = [PrepareJob(out / f"{i:05}.bin", pieces, tokenizer, text_field, bad_lines) for i, pieces in shards]
        known = {} if finished is None else {out / shard.name: shard for shard in finished.shards}
        entries = _write_missing(jobs, known, num_processes, on_shard)
        _check_documents(entries)
        header = Header(dtype_for(loaded.vocab_size), loaded.vocab_size, loaded.checksum, plan, tuple(entries), VERSION)
        if header != finished:
            write_json(out / HEADER, header)
        _remove(out, "*.done.json", PLAN, "*.tmp")
        return read_header(out)


def _write_missing(
    jobs: list[PrepareJob], known: dict[Path, Shard], num_processes: int, on_shard: OnShard
) -> list[Shard]:
    """Write the shards that an earlier run has not finished, and return the entries of all shards in order.

    Args:
        known: entries of a finished header, by path.
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


def _finished(job: PrepareJob, known: Shard | None) -> Shard | None:
    """Return the entry of a shard that an earlier run finished, if the file still has its checksum."""
    try:
        entry = known or read_shard_entry(job.entry_path)
        return entry if checksum(job.path) == entry.sha256 else None
    except (FileNotFoundError, TokenFileError):
        return None


def _write(jobs: list[PrepareJob], num_processes: int) -> Iterator[tuple[PrepareJob, Shard]]:
    """Yield each shard when it is finished; a single process means this one."""
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


def _write_one(job: PrepareJob) -> Shard:
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
    """Yield batches of documents for one call of the tokenizer."""
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
    """Initialize a worker: no threads in the tokenizer (there is one process per core), and exit with the parent."""
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
    """Write plan.json, or check the one of an interrupted run; delete the temporary files of that run."""
    if (out / PLAN).exists():
        _check_plan(read_json(out / PLAN).get("plan"), plan, out)
    elif any(path.suffix != ".tmp" for path in out.iterdir()):
        raise ValueError(f"out must be an empty folder or that of an interrupted run, got {out}; name another.")
    _remove(out, "*.tmp")
    write_json(out / PLAN, PreparePlan(plan))


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
            path.unlink(missing_ok=True)  # a worker of a killed run may still be deleting its temporary file


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold an exclusive lock on the folder, which the system releases if the process dies."""
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
