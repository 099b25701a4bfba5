"""Documents in text, JSONL and parquet files, and the division of the files into shards.

A text file is one document. Each line of a .jsonl or .ndjson file and each row of a .parquet file holds one document in
its text field. Shards depend only on the files and the options, not on the number of processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

_LINES = (".jsonl", ".ndjson")  # two names for the same format
SUFFIXES = (".txt", *_LINES, ".parquet")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")


BadLines = Literal["error", "skip"]

_SKIP = "or skip such lines with --bad-lines skip"


class BadLineError(Exception):
    """Error for a line of JSONL or a row of parquet that holds no document, with its remedy.

    `place` is set by the reader of the file. It is a function because finding the line number is slow, and is only
    needed for an error that is shown.
    """

    place: Callable[[], str]

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


@dataclass
class LeftOut:
    """Counts of the empty documents and bad lines in the input of a shard."""

    empty: int = 0
    bad: int = 0


class Document(NamedTuple):
    """The bytes of a document (UTF-8, unless its text file has another encoding) and their place, for errors."""

    place: str
    text: bytes


class TextPiece(NamedTuple):
    """The part of a file that belongs to a shard: bytes [start, stop), or row groups [start, stop) of parquet."""

    path: Path
    start: int
    stop: int
    num_bytes: int


def find_files(inputs: Iterable[str | Path], suffixes: Iterable[str] = SUFFIXES) -> list[Path]:
    """Return the named files, and the files with one of the suffixes in the named folders (recursively), sorted.

    A file with several links is listed once. The name of the link decides the format, because Hugging Face's cache
    names the linked files by their checksums.

    Raises:
        ValueError: an input does not exist, there is nothing to read, or a file is compressed.
    """
    found: dict[Path, Path] = {}  # link name by resolved file
    for path in map(Path, inputs):
        if not path.exists():
            raise ValueError(f"inputs must be files or folders, got {path}; correct the path.")
        below = _below(path) if path.is_dir() else [path]
        chosen = sorted(p for p in below if p.is_file() and (p.name.endswith(tuple(suffixes)) or p == path))
        for p in chosen:
            found.setdefault(p.resolve(), p.parent.resolve() / p.name if p.suffix in SUFFIXES else p.resolve())
    names = sorted(path for path in found.values() if path.stat().st_size or _is_text(path))  # empty texts are counted
    if not any(path.stat().st_size for path in names):
        raise ValueError(
            f"inputs must hold a file that is not empty, and in a folder ends in {' or '.join(suffixes)}, got none; "
            "name others."
        )
    if compressed := [path for path in names if path.suffix in _COMPRESSED]:
        raise ValueError(f"inputs must not be compressed, got {compressed[0]}; decompress it first.")
    return names


def _is_text(path: Path) -> bool:
    return path.suffix not in (*_LINES, ".parquet")


def _below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, following links; each folder is visited once."""
    seen: set[str] = set()
    for at, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(at) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(at))
        yield from (Path(at) / name for name in names)


def cut_into_shards(files: Iterable[Path], shard_bytes: int) -> list[list[TextPiece]]:
    """Return the pieces of each shard, about `shard_bytes` of input per shard.

    Text files stay whole. JSONL is cut at any byte: a line belongs to the piece in which it starts. Parquet is cut
    between row groups.
    """
    shards: list[list[TextPiece]] = []
    room = 0
    for piece in (piece for path in files for piece in _pieces(path, shard_bytes)):
        if room <= 0:
            shards.append([])
            room = shard_bytes
        shards[-1].append(piece)
        room -= piece.num_bytes
    return shards


def _pieces(path: Path, shard_bytes: int) -> Iterator[TextPiece]:
    size = path.stat().st_size
    if path.suffix in _LINES:
        for start in range(0, size, shard_bytes):
            stop = min(start + shard_bytes, size)
            yield TextPiece(path, start, stop, stop - start)
    elif path.suffix == ".parquet":
        metadata = _parquet(path).metadata
        for group in range(metadata.num_row_groups):
            yield TextPiece(path, group, group + 1, metadata.row_group(group).total_byte_size)
    else:
        yield TextPiece(path, 0, size, size)


def documents(
    pieces: Iterable[TextPiece], text_field: str, left_out: LeftOut, bad_lines: BadLines = "error"
) -> Iterator[Document]:
    """Yield the documents of a shard. Empty documents are skipped and counted; so are bad lines, if `bad_lines` allows.

    Args:
        left_out: counts to update.
    Raises:
        ValueError: a line or row has no text; the error names its place.
    """
    for found in (found for piece in pieces for found in _documents_in(piece, text_field)):
        if isinstance(found, Document):
            if found.text:
                yield found
            else:
                left_out.empty += 1
        elif bad_lines == "skip":
            left_out.bad += 1
        else:
            raise ValueError(f"{found} in {found.place()}; {found.remedy}.") from found


def _documents_in(piece: TextPiece, field: str) -> Iterator[Document | BadLineError]:
    if piece.path.suffix in _LINES:
        yield from _jsonl(piece, field)
    elif piece.path.suffix == ".parquet":
        yield from _rows(piece, field)
    else:
        yield Document(str(piece.path), piece.path.read_bytes())


def _jsonl(piece: TextPiece, field: str) -> Iterator[Document | BadLineError]:
    """Yield a document or an error for each line that starts in the piece."""
    with piece.path.open("rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()
        while (at := file.tell()) < piece.stop:
            line = file.readline()
            if not line.strip():
                continue
            try:
                yield _document(str(piece.path), field, _parsed(line))
            except BadLineError as problem:
                problem.place = partial(_line_at, piece.path, at)
                yield problem


def _line_at(path: Path, at: int) -> str:
    """Return the file name and the number (from 1) of the line that starts at byte `at`."""
    with path.open("rb") as file:
        ends = sum(file.read(min(1 << 20, at - start)).count(b"\n") for start in range(0, at, 1 << 20))
    return f"{path}, line {1 + ends}"


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8; lists nested too deeply
        raise BadLineError(f"line must be JSON in UTF-8, got {error}", f"correct the file, {_SKIP}") from error


def _rows(piece: TextPiece, field: str) -> Iterator[Document | BadLineError]:
    file = _parquet(piece.path)
    if field not in file.schema_arrow.names:
        raise ValueError(f"parquet must have a column {field!r}, got {file.schema_arrow.names} in {piece.path}; "
                         "name one with --text-field.")  # fmt: skip
    for row, text in enumerate(_column(file, piece, field)):
        place = f"{piece.path}, row {row} of row group {piece.start}"
        try:
            yield _document(place, field, {field: text})
        except BadLineError as problem:
            problem.place = partial(str, place)
            yield problem


def _column(file: Any, piece: TextPiece, field: str) -> Iterator[Any]:
    """Yield the values of a column in a row group."""
    try:
        for batch in file.iter_batches(batch_size=256, row_groups=[piece.start], columns=[field]):
            yield from batch.column(0).to_pylist()
    except (ValueError, OSError) as error:  # invalid UTF-8, and pyarrow's errors, which derive from these
        raise ValueError(
            f"parquet must be whole and its text UTF-8, got {error} in {piece.path}, row group {piece.start}; "
            "correct the file."
        ) from error


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


def _document(place: str, field: str, row: Any) -> Document:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise BadLineError(
            f"every document must have a string in {field!r}, got {text!r}",
            f"name the field with --text-field, correct the file, {_SKIP}",
        )
    try:
        return Document(place, text.encode())
    except UnicodeEncodeError as error:
        raise BadLineError(f"text must be Unicode, got {error}", f"correct the file, {_SKIP}") from error
