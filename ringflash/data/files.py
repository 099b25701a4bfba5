"""Reader of token files: documents by number, from memory-mapped files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from ringflash.data.format import BOUND, DTYPES, Shard, TokenFileError, read_header


class TokenFiles:
    """Documents of a folder of token files, numbered across its shards. Opening reads their bounds but no token.

    Args:
        folder: folder that `python -m recipes.data prepare` wrote.
    Attributes:
        lengths: (num_documents,), int64, number of tokens of each document.
    Raises:
        TokenFileError: the header or a shard is missing, truncated, or of another version or dtype.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.header = read_header(self.folder)
        self._tokens = [self._map_tokens(shard) for shard in self.header.shards]
        bounds = [self._bounds(shard) for shard in self.header.shards]
        self._starts = np.concatenate([np.zeros(0, BOUND), *(x[:-1] for x in bounds)])  # offsets in the shard
        self.lengths = np.concatenate([np.zeros(0, BOUND), *(np.diff(x) for x in bounds)])
        self._shard_ends = np.cumsum([shard.num_documents for shard in self.header.shards])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without tokens: a pickled memmap is an array of its content."""
        return {**vars(self), "_tokens": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the tokens again, in a loader's worker that was not forked."""
        vars(self).update(state)
        self._tokens = [self._map_tokens(shard) for shard in self.header.shards]

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of one document: a memory-mapped view in the dtype of the file."""
        shard = int(np.searchsorted(self._shard_ends, document, side="right"))
        first = int(self._starts[document])
        return self._tokens[shard][first + start : first + stop]

    def corrupt_shards(self, first: int = 0, step: int = 1) -> list[str]:
        """Return the names of the corrupt shards among the shards first, first + step, ...

        A shard is corrupt if its checksum differs from the header's or a token is outside the vocabulary. The shards
        are read completely; ranks share the work by passing their rank and the number of ranks.
        """
        chosen = list(zip(self.header.shards, self._tokens, strict=True))[first::step]
        return [
            shard.name
            for shard, tokens in chosen
            if checksum(self.folder / shard.name) != shard.sha256 or tokens.max(initial=0) >= self.header.vocab_size
        ]

    def check(self) -> None:
        """Read every shard completely and verify it.

        Raises:
            TokenFileError: names the shards whose content has changed since they were written.
        """
        raise_for(self.folder, self.corrupt_shards())

    def _map_tokens(self, shard: Shard) -> np.ndarray:
        path, dtype = self.folder / shard.name, DTYPES[self.header.dtype]
        check_size(path, shard, self.header.dtype)
        if not shard.num_tokens:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, "r", shape=(shard.num_tokens,))

    def _bounds(self, shard: Shard) -> np.ndarray:
        """Return 0 followed by the end of each document."""
        path = self.folder / shard.name
        ends = np.fromfile(path, BOUND, shard.num_documents, offset=shard.bounds_at(self.header.dtype))
        bounds = np.concatenate([np.zeros(1, BOUND), ends])
        if (np.diff(bounds) <= 0).any() or bounds[-1] != shard.num_tokens:
            raise TokenFileError.of(path, f"have bounds that rise from 0 to {shard.num_tokens}", "others")
        return bounds


def check_size(path: Path, shard: Shard, dtype: str) -> None:
    """Raise TokenFileError unless the file exists and has the size that its counts imply."""
    got = path.stat().st_size if path.is_file() else None
    if got != shard.num_bytes(dtype):
        raise TokenFileError(
            f"{path} must have {shard.num_bytes(dtype)} bytes for {shard.num_tokens} tokens of {dtype} in "
            f"{shard.num_documents} documents, got {'no file' if got is None else got}; copy it whole, or prepare the "
            "files again."
        )


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def raise_for(folder: Path, corrupt: list[str]) -> None:
    """Raise TokenFileError if any shard is corrupt."""
    if corrupt:
        raise TokenFileError(
            f"shards in {folder} must have the checksums and the vocabulary of their header, got others in "
            f"{', '.join(corrupt)}; "
            "copy them again, or prepare the files again."
        )
