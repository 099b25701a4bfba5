"""Conversion of text to token files, in parallel; a run that was killed continues when it is started again.

    plan.json         checksum of the inputs and options; a run with others is refused
    00000.bin         a finished shard: it gets this name only once it is complete
    00000.done.json   counts and checksum of the shard; if they match, the next run keeps the shard
    header.json       the entries of all shards; once it is written, the other JSON files are deleted

A text file is one document. Each line of a .jsonl, .ndjson or .json file and each row of a .parquet file holds one
document in its text field. Suffixes may be in capitals. A shard depends only on its pieces of the inputs, so
interruptions and the number of processes do not change the files.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ringflash.data.files import checksum
from ringflash.data.format import (
    HEADER,
    Header,
    Shard,
    TokenFileError,
    Tokens,
    dtype_for,
    read_header,
    read_json,
    read_shard_entry,
    write_json,
    write_shard,
)  # fmt: skip

SEPARATOR = 256  # first token of each document of the byte tokenizer, which has 257
_LINES, _PARQUET = (".jsonl", ".ndjson", ".json"), ".parquet"
SUFFIXES = (".txt", ".jsonl", ".ndjson", _PARQUET)  # in a folder, .json files are often settings
_UNREAD = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".7z", ".csv", ".tsv", ".arrow")
_PLAN, _BATCH_DOCUMENTS = "plan.json", 256

BadLines = Literal["error", "skip"]


class _Piece(NamedTuple):
    """Part of a file that belongs to a shard: bytes [start, stop), or row groups [start, stop) of parquet."""

    path: Path
    start: int
    stop: int
    num_bytes: int


class _Job(NamedTuple):
    """Instructions for a process to write one shard."""

    path: Path
    pieces: list[_Piece]
    tokenizer: str
    text_field: str
    bad_lines: BadLines

    @property
    def entry_path(self) -> Path:
        return self.path.with_suffix(".done.json")


@dataclass
class _LeftOut:
    num_empty: int = 0
    num_bad: int = 0


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
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> Header:
    """Write the token files of all documents; files that an earlier run wrote are kept if they are intact.

    Args:
        inputs: files, and folders to search for files with one of the suffixes.
        out: folder of the token files. Only one run at a time may write it.
        tokenizer: "bytes", or the folder of a Hugging Face tokenizer.
        text_field: name of the text field of JSONL and of the text column of parquet.
        suffixes: ends of the names of files to read in folders, small or capital; a warning names what is left out.
        bad_lines: "error" rejects a line or row without a document and reports its place; "skip" counts it in the
            header (`Shard.num_bad`). Empty documents are always skipped and counted (`num_empty`).
        shard_bytes: bytes of input per token file.
        num_processes: number of processes that tokenize.
        on_shard: called with (shards done, all shards); the first call reports the work of earlier runs.
    Raises:
        ValueError: there are no documents, a document cannot be read, or the folder holds something else.
    """
    if min(shard_bytes, num_processes) < 1 or bad_lines not in get_args(BadLines):
        raise ValueError(
            "shard_bytes and num_processes must be 1 or more and bad_lines 'error' or 'skip', got "
            f"{shard_bytes}, {num_processes} and {bad_lines!r}; correct them."
        )
    out, files, loaded = Path(out), find_files(inputs, tuple(suffixes)), load_tokenizer(tokenizer)
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    options = [stamps, loaded.checksum, text_field, shard_bytes]
    plan, plan_of_error = (hashlib.sha256(json.dumps([*options, x]).encode()).hexdigest() for x in (bad_lines, "error"))
    out.mkdir(parents=True, exist_ok=True)
    finished = read_header(out) if (out / HEADER).exists() else None
    _claim(out, plan, finished, (plan, plan_of_error))  # a file that was finished with "error" has no bad lines
    jobs = [
        _Job(out / f"{i:05}.bin", pieces, tokenizer, text_field, bad_lines)
        for i, pieces in enumerate(_cut_into_shards(files, shard_bytes))
    ]
    entries = _write_missing(jobs, finished.shards if finished else (), num_processes, on_shard)
    if not any(entry.num_documents for entry in entries):
        raise ValueError("inputs must hold a document that is not empty, got none; name others.")
    header = Header(dtype_for(loaded.vocab_size), loaded.vocab_size, loaded.checksum, plan, tuple(entries))
    if header != finished:
        write_json(out / HEADER, header)
    for path in (*out.glob("*.done.json"), *out.glob("*.tmp"), out / _PLAN):
        path.unlink(missing_ok=True)
    return header


def _claim(out: Path, plan: str, finished: Header | None, equal_plans: tuple[str, ...]) -> None:
    """Write plan.json, after checking that the files in the folder are of a run with the same inputs and options."""
    if finished is None and not (out / _PLAN).exists():
        if any(path.suffix != ".tmp" for path in out.iterdir()):
            raise ValueError(f"out must be an empty folder or that of an interrupted run, got {out}; name another.")
    elif finished is not None:
        if finished.plan != plan:
            raise _of_others(out)
        return
    elif read_json(out / _PLAN).get("plan") not in equal_plans and any(out.glob("*.bin")):
        raise _of_others(out)
    write_json(out / _PLAN, {"plan": plan})


def _of_others(out: Path) -> ValueError:
    return ValueError(
        f"out must be made from the same inputs, tokenizer and options, got {out}, which is not; name another "
        "folder, or delete this one."
    )


def _write_missing(
    jobs: list[_Job], known: Iterable[Shard], num_processes: int, on_shard: Callable[[int, int], None]
) -> list[Shard]:
    """Write the shards that are not intact, and return the entries of all shards in order."""
    by_name = {shard.name: shard for shard in known}
    found = {job.path: _finished(job, by_name.get(job.path.name)) for job in jobs}
    missing = [job for job in jobs if found[job.path] is None]
    on_shard(len(jobs) - len(missing), len(jobs))
    for done, (job, entry) in enumerate(_write(missing, num_processes), len(jobs) - len(missing) + 1):
        found[job.path] = entry
        on_shard(done, len(jobs))
    return [entry for entry in found.values() if entry is not None]


def _finished(job: _Job, known: Shard | None) -> Shard | None:
    """Return the entry of a shard that an earlier run finished, if the file still has its checksum."""
    try:
        entry = known or read_shard_entry(job.entry_path)
        return entry if checksum(job.path) == entry.sha256 else None
    except (FileNotFoundError, TokenFileError):
        return None


def _write(jobs: list[_Job], num_processes: int) -> Iterator[tuple[_Job, Shard]]:
    if num_processes == 1:
        yield from ((job, _write_one(job)) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, spawn, initializer=_end_with_parent) as pool:
        try:
            yield from zip(jobs, pool.map(_write_one, jobs), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Initialize a worker: no threads in the tokenizer (there is one process per core), and exit with the parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()  # type: ignore[func-returns-value]


def _write_one(job: _Job) -> Shard:
    tokenizer, left_out = load_tokenizer(job.tokenizer), _LeftOut()
    found = (document for piece in job.pieces for document in _documents(piece, job, left_out))
    batches = iter(lambda: list(islice(found, _BATCH_DOCUMENTS)), [])
    encoded = (tokens for batch in batches for tokens in tokenizer.encode(batch))
    written = write_shard(job.path, encoded, tokenizer.vocab_size)
    entry = replace(written, num_empty=left_out.num_empty, num_bad=left_out.num_bad)
    write_json(job.entry_path, entry)
    return entry


def find_files(inputs: Iterable[str | Path], suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """Return the named files, and the files with one of the suffixes below the named folders, sorted.

    A file with several links is listed once. The name of the link decides the format, because Hugging Face's cache
    names the linked files by their checksums. Links to folders are not followed. A warning names what is left out.

    Raises:
        ValueError: an input does not exist or is of a format that is not read, or there is nothing to read.
    """
    ends = tuple(suffix.lower() for suffix in suffixes)
    found: dict[Path, Path] = {}  # name by resolved file
    for path in map(Path, inputs):
        if not path.exists():
            raise ValueError(f"inputs must be files or folders, got {path}; correct the path.")
        below = sorted(path.rglob("*")) if path.is_dir() else []
        chosen = [p for p in below if p.name.lower().endswith(ends)] if path.is_dir() else [path]
        for p in filter(Path.is_file, chosen):
            known = p.suffix.lower() in (*_LINES, _PARQUET, ".txt", *_UNREAD)
            found.setdefault(p.resolve(), p.parent.resolve() / p.name if known else p.resolve())
        _warn_of_others(path, below, set(chosen))
    names = sorted(path for path in found.values() if path.stat().st_size)
    if not names:
        raise ValueError(
            f"inputs must hold a file that is not empty, and in a folder ends in {' or '.join(suffixes)}, got none; "
            "name others."
        )
    for path in names:
        _check_format(path)
    return names


def _warn_of_others(folder: Path, below: list[Path], chosen: set[Path]) -> None:
    """Warn of the files and linked folders below a folder that are not read, except hidden ones."""
    others = [p for p in below if p not in chosen and (p.is_file() or p.is_symlink())]
    others = [p for p in others if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    if others:
        kinds = Counter("linked folders" if p.is_dir() else p.suffix or "without a suffix" for p in others)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        warnings.warn(
            f"files below {folder} are left out: {counts}, first {others[0]}; name them as inputs, or their suffixes "
            "with --suffixes.",
            stacklevel=4,
        )


def _check_format(path: Path) -> None:
    """Raise ValueError if the name or the first character shows a format that is not read."""
    kind = path.suffix.lower()
    if kind in _UNREAD:
        raise ValueError(
            f"inputs must be text, JSON lines or parquet, got {path}; unpack or convert it, or rename it "
            "to .txt if it is one document."
        )
    if kind == ".json":
        with path.open("rb") as file:
            if file.read(1 << 12).lstrip().startswith(b"["):
                raise ValueError(
                    f"JSON must be one object on each line, got an array in {path}; convert it: "
                    f"jq -c '.[]' {path.name} > {path.stem}.jsonl"
                )


def _cut_into_shards(files: Iterable[Path], shard_bytes: int) -> list[list[_Piece]]:
    """Return the pieces of each shard, about `shard_bytes` of input per shard.

    Text files stay whole. JSONL is cut at any byte: a line belongs to the piece in which it starts. Parquet is cut
    between row groups.
    """
    shards: list[list[_Piece]] = []
    room = 0
    for piece in (piece for path in files for piece in _pieces(path, shard_bytes)):
        if room <= 0:
            shards.append([])
            room = shard_bytes
        shards[-1].append(piece)
        room -= piece.num_bytes
    return shards


def _pieces(path: Path, shard_bytes: int) -> Iterator[_Piece]:
    size = path.stat().st_size
    if path.suffix.lower() == _PARQUET:
        metadata = _parquet(path).metadata
        for group in range(metadata.num_row_groups):
            yield _Piece(path, group, group + 1, metadata.row_group(group).total_byte_size)
    elif path.suffix.lower() in _LINES:
        for start in range(0, size, shard_bytes):
            yield _Piece(path, start, min(start + shard_bytes, size), min(shard_bytes, size - start))
    else:
        yield _Piece(path, 0, size, size)


def _documents(piece: _Piece, job: _Job, left_out: _LeftOut) -> Iterator[str]:
    """Yield the documents of a piece; count the empty ones and, if they are to be skipped, the bad ones."""
    kind = piece.path.suffix.lower()
    read = _lines if kind in _LINES else _rows if kind == _PARQUET else _whole_file
    for at, raw in read(piece, job.text_field):
        try:
            text = json.loads(raw)[job.text_field] if read is _lines else raw.decode() if read is _whole_file else raw
            if not isinstance(text, str):
                raise TypeError(f"{str(text)[:80]!r}")
            text.encode()  # JSON can hold half a pair of surrogates
        except (ValueError, TypeError, KeyError, RecursionError) as error:  # also lists nested too deeply
            if job.bad_lines == "skip":
                left_out.num_bad += 1
                continue
            raise ValueError(
                f"documents must be UTF-8 text, in a line or row as {job.text_field!r}, got {type(error).__name__}: "
                f"{error} in {_place(piece, at)}; correct the file, name another field with --text_field, or add "
                "--bad_lines skip."
            ) from error
        if text:
            yield text
        else:
            left_out.num_empty += 1


def _whole_file(piece: _Piece, field: str) -> Iterator[tuple[int, bytes]]:
    yield 0, piece.path.read_bytes()


def _lines(piece: _Piece, field: str) -> Iterator[tuple[int, bytes]]:
    """Yield each line that starts in the piece, and where it starts."""
    with piece.path.open("rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()
        while (at := file.tell()) < piece.stop:
            if (line := file.readline()).strip():
                yield at, line


def _rows(piece: _Piece, field: str) -> Iterator[tuple[int, Any]]:
    """Yield the text of each row of a row group, and the number of the row."""
    file = _parquet(piece.path)
    if field not in file.schema_arrow.names:
        raise ValueError(f"parquet must have a column {field!r}, got {file.schema_arrow.names} in {piece.path}; "
                         "name one with --text_field.")  # fmt: skip
    try:
        batches = file.iter_batches(batch_size=_BATCH_DOCUMENTS, row_groups=[piece.start], columns=[field])
        texts = [text for batch in batches for text in batch.column(0).to_pylist()]
    except (ValueError, OSError) as error:  # invalid UTF-8, and pyarrow's errors, which derive from these
        raise ValueError(
            f"parquet must be whole and its text UTF-8, got {error} in {piece.path}, row group {piece.start}; "
            "correct the file."
        ) from error
    yield from enumerate(texts)


def _place(piece: _Piece, at: int) -> str:
    """Return the file name with the number (from 1) of the line that starts at byte `at`, or with the row."""
    if (kind := piece.path.suffix.lower()) not in _LINES:
        return f"{piece.path}, row {at} of row group {piece.start}" if kind == _PARQUET else f"{piece.path}"
    with piece.path.open("rb") as file:
        ends = sum(file.read(min(1 << 20, at - start)).count(b"\n") for start in range(0, at, 1 << 20))
    return f"{piece.path}, line {1 + ends}"


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"pyarrow must be installed to read parquet, got {missing}; pip install 'ringflash[parquet]'."
        ) from missing
    try:
        return parquet.ParquetFile(path)
    except ValueError as error:  # base class of pyarrow's errors
        raise ValueError(f"parquet must be whole, got {error} in {path}; correct the file.") from error


class Bytes:
    """Tokenizer that returns SEPARATOR and the bytes of UTF-8: the vocabulary of `recipes.lightning.text.TextData`."""

    vocab_size = SEPARATOR + 1
    checksum = hashlib.sha256(b"bytes behind 256").hexdigest()

    def encode(self, documents: list[str]) -> list[Tokens]:
        """Return the separator and the bytes of each document."""
        return [np.insert(np.frombuffer(x.encode(), np.uint8).astype(np.uint16), 0, SEPARATOR) for x in documents]


class HuggingFace:
    """Tokenizer of a folder with tokenizer.json. Documents start with its bos and end with its eos, if it has them.

    Special tokens that are spelled out in the text are encoded as plain text. Nothing is downloaded, and no code in the
    folder is run.

    Raises:
        ValueError: the folder has no tokenizer, or the tokenizer has neither bos nor eos.
    """

    def __init__(self, folder: str) -> None:
        if not (Path(folder) / "tokenizer.json").is_file():
            raise ValueError(f"tokenizer must be 'bytes' or a folder with tokenizer.json, got {folder}; save it there.")
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as missing:
            raise ImportError(
                f"transformers must be installed to read {folder}, got {missing}; pip install 'ringflash[huggingface]'."
            ) from missing
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises nothing narrower
            raise ValueError(
                f"tokenizer must be one that transformers reads, got {type(error).__name__}: {error} in {folder}; "
                "write it with save_pretrained."
            ) from error
        marks = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if marks == (None, None):
            raise ValueError(
                f"tokenizer must have a bos or an eos token, got neither in {folder}; "
                "name one in tokenizer_config.json."
            )
        self._first, self._last = ([] if x is None else [x] for x in marks)
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
        whole = self._tokenizer.backend_tokenizer.to_str()  # tokenizer_config.json may add tokens to tokenizer.json
        self.checksum = hashlib.sha256(json.dumps([whole, *marks]).encode()).hexdigest()

    def encode(self, documents: list[str]) -> list[Tokens]:
        """Return the tokens of each document between bos and eos."""
        found = self._tokenizer(
            documents, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [[*self._first, *tokens, *self._last] for tokens in found]


@lru_cache(maxsize=1)
def load_tokenizer(tokenizer: str) -> Bytes | HuggingFace:
    """Load a tokenizer by name: "bytes" or a folder."""
    return Bytes() if tokenizer == "bytes" else HuggingFace(tokenizer)
