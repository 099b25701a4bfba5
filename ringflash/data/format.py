"""Format of a folder of token files. Every file is written atomically.

    header.json    version, dtype, vocabulary, tokenizer, and the counts and checksum of each shard
    00000.bin      tokens of its documents, concatenated | zero padding to 8 bytes | end of each document, int64
    00001.bin      ...

Numbers are little-endian. If header.json is missing, `prepare` has not finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

VERSION = 1
HEADER = "header.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
BOUND = np.dtype("<i8")
MAX_VOCAB_SIZE = 1 << 32  # number of values of uint32

Tokens = list[int] | np.ndarray


class TokenFileError(ValueError):
    """Error for a token file that is missing, truncated, corrupt, or of another version or dtype."""

    @classmethod
    def of(cls, what: object, must: str, got: object) -> TokenFileError:
        """Return the error for files that `prepare` does not write."""
        return cls(f"{what} must {must}, got {got}; prepare the files again.")


@dataclass(frozen=True)
class Shard:
    """Header entry of one token file.

    Args:
        num_empty: number of documents without text, which were left out.
        num_bad: number of unreadable lines and rows that `prepare` was told to skip.
    """

    name: str
    num_tokens: int
    num_documents: int
    sha256: str
    num_empty: int = 0
    num_bad: int = 0

    def bounds_at(self, dtype: str) -> int:
        """Return the offset in bytes at which the ends of the documents start."""
        return -(-self.num_tokens * DTYPES[dtype].itemsize // BOUND.itemsize) * BOUND.itemsize

    def num_bytes(self, dtype: str) -> int:
        """Return the size of the file."""
        return self.bounds_at(dtype) + self.num_documents * BOUND.itemsize


@dataclass(frozen=True)
class Header:
    """Content of header.json.

    Args:
        dtype: a key of DTYPES, the smallest that holds the vocabulary.
        tokenizer: checksum of the tokenizer.
        plan: checksum of the inputs and the options.
    """

    dtype: str
    vocab_size: int
    tokenizer: str
    plan: str
    shards: tuple[Shard, ...]
    version: int = VERSION

    @property
    def fingerprint(self) -> str:
        """Checksum of the tokens and their order: equal for equal files, whatever inputs they were made from."""
        content = [self.dtype, *((shard.num_tokens, shard.sha256) for shard in self.shards)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def dtype_for(vocab_size: int) -> str:
    """Return the name of the smallest dtype that holds every token of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing and rename it to `path` once all its content is on the disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # frees the space if the disk is full
        raise


def write_json(path: Path, content: Any) -> None:
    """Write a dataclass or a dict as JSON, atomically."""
    with atomic_file(path) as file:
        whole = asdict(content) if is_dataclass(content) else content  # type: ignore[arg-type]
        file.write((json.dumps(whole, indent=1) + "\n").encode())


def write_shard(path: Path, documents: Iterable[Tokens], vocab_size: int) -> Shard:
    """Write one file of non-empty documents and return its header entry.

    Raises:
        ValueError: a token is outside the vocabulary.
    """
    dtype, digest, ends, num_tokens = dtype_for(vocab_size), hashlib.sha256(), array("q"), 0
    with atomic_file(path) as file:

        def write(data: bytes) -> None:
            digest.update(data)
            file.write(data)

        for document in documents:
            write(_checked(document, vocab_size).astype(DTYPES[dtype]).tobytes())
            num_tokens += len(document)
            ends.append(num_tokens)
        write(bytes(-file.tell() % BOUND.itemsize))
        write(np.array(ends, dtype=BOUND).tobytes())
    return Shard(path.name, num_tokens, len(ends), digest.hexdigest())


def _checked(document: Tokens, vocab_size: int) -> np.ndarray:
    """Return a document's tokens as an array; raise ValueError for one that is not in the vocabulary."""
    tokens = np.asarray(document)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"tokens must be in the vocabulary of {vocab_size}, got {tokens.min()} to {tokens.max()}; "
            "give the tokenizer its added tokens in tokenizer.json."
        )
    return tokens


def read_header(folder: Path) -> Header:
    """Read and validate the header.

    Raises:
        TokenFileError: there is no header, or this version cannot read it.
    """
    path = folder / HEADER
    if not path.is_file():
        raise TokenFileError(
            f"folder must hold {HEADER}, got none in {folder}; run the same prepare command to its end."
        )
    content = read_json(path)
    if content.get("version") != VERSION:
        raise TokenFileError.of(path, f"be of version {VERSION}", content.get("version"))
    shards = content.get("shards")
    entries = tuple(_build(Shard, entry, path) for entry in shards) if isinstance(shards, list) else shards
    header: Header = _build(Header, {**content, "shards": entries}, path)
    if not 0 < header.vocab_size <= MAX_VOCAB_SIZE:
        raise TokenFileError.of(f"vocab_size in {path}", f"be from 1 to {MAX_VOCAB_SIZE}", header.vocab_size)
    _check_names([shard.name for shard in header.shards], path)
    if header.dtype != (wanted := dtype_for(header.vocab_size)):
        raise TokenFileError.of(path, f"have dtype {wanted} for a vocabulary of {header.vocab_size}", header.dtype)
    return header


def _check_names(names: list[str], path: Path) -> None:
    """Raise TokenFileError unless the shards are files directly in the folder, each named once."""
    if not names:
        raise TokenFileError.of(f"shards in {path}", "name at least one file", "none")
    for name in names:
        if not re.fullmatch(r"[^/\\\0]+", name) or name in (".", ".."):
            raise TokenFileError.of(f"name in {path}", "be that of a file in the same folder", repr(name))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TokenFileError.of(f"shards in {path}", "be named only once each", f"{twice} more than once")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        TokenFileError: the file is not JSON, or holds another type.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8; lists nested too deeply
        raise TokenFileError.of(path, "be JSON", error) from error
    if not isinstance(content, dict):
        raise TokenFileError.of(path, "be an object", type(content).__name__)
    return content


def read_shard_entry(path: Path) -> Shard:
    """Read the entry of a single shard, as `write_json` wrote it."""
    entry: Shard = _build(Shard, read_json(path), path)
    return entry


_TYPES = {"int": (int, "an int"), "str": (str, "a string"), "tuple[Shard, ...]": (tuple, "a list")}


def _build(kind: type, content: Any, path: Path) -> Any:
    """Build a dataclass from JSON with exactly its fields and types; fields with defaults may be missing."""
    rules = {field.name: _TYPES[str(field.type)] for field in fields(kind)}
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if not isinstance(content, dict) or not required <= content.keys() <= rules.keys():
        got = sorted(content) if isinstance(content, dict) else content
        raise TokenFileError.of(path, f"have the keys {sorted(rules)}", got)
    for name, (rule, words) in ((name, rules[name]) for name in content):
        if type(content[name]) is not rule or (rule is int and content[name] < 0):
            raise TokenFileError.of(f"{name} in {path}", f"be {words}, not negative", repr(content[name]))
    return kind(**content)
