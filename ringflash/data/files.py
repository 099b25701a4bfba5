"""Reading token files: documents by number, out of files that are mapped and not loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from ringflash.data.format import BOUND, DTYPES, Shard, TokenFileError, read_header


class TokenFiles:
    """The documents of a folder, numbered through all its shards. Opening it reads their bounds, no token.

    Args:
        folder: what `python -m ringflash.data prepare` wrote.
    Attributes:
        lengths: (num_documents,), int64, tokens of each document.
    Raises:
        TokenFileError: a header or a shard that is missing, truncated, or of another version or dtype.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.header = read_header(self.folder)
        self._tokens = [self._map_tokens(shard) for shard in self.header.shards]
        bounds = [self._bounds(shard) for shard in self.header.shards]
        self._starts = np.concatenate([np.zeros(0, BOUND), *(x[:-1] for x in bounds)])  # in the document's own shard
        self.lengths = np.concatenate([np.zeros(0, BOUND), *(np.diff(x) for x in bounds)])
        self._shard_ends = np.cumsum([shard.num_documents for shard in self.header.shards])

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of one document, in the dtype of the file; a view of the disk."""
        shard = int(np.searchsorted(self._shard_ends, document, side="right"))
        first = int(self._starts[document])
        return self._tokens[shard][first + start : first + stop]

    def corrupt_shards(self, first: int = 0, step: int = 1) -> list[str]:
        """Names of the shards whose content is not what the header says, of the shards first, first + step, ...

        Their checksum is another, or a token is outside the vocabulary. Reads them whole; several ranks share the work
        by their rank and number.
        """
        chosen = list(zip(self.header.shards, self._tokens, strict=True))[first::step]
        return [
            shard.name
            for shard, tokens in chosen
            if checksum(self.folder / shard.name) != shard.sha256 or tokens.max(initial=0) >= self.header.vocab_size
        ]

    def check(self) -> None:
        """Read every shard whole.

        Raises:
            TokenFileError: names the shards whose content is not what was written.
        """
        raise_for(self.folder, self.corrupt_shards())

    def _map_tokens(self, shard: Shard) -> np.ndarray:
        path, dtype = self.folder / shard.name, DTYPES[self.header.dtype]
        check_size(path, shard, self.header.dtype)
        if not shard.num_tokens:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, "r", shape=(shard.num_tokens,))

    def _bounds(self, shard: Shard) -> np.ndarray:
        """0 and the end of each document."""
        path = self.folder / shard.name
        ends = np.fromfile(path, BOUND, shard.num_documents, offset=shard.bounds_at(self.header.dtype))
        bounds = np.concatenate([np.zeros(1, BOUND), ends])
        if (np.diff(bounds) <= 0).any() or bounds[-1] != shard.num_tokens:
            raise TokenFileError(
                f"{path} must have bounds that rise from 0 to {shard.num_tokens}, got others; prepare the files again."
            )
        return bounds


def check_size(path: Path, shard: Shard, dtype: str) -> None:
    """Raise TokenFileError unless the file is there and as long as its counts ask."""
    got = path.stat().st_size if path.is_file() else None
    if got != shard.num_bytes(dtype):
        found = "no file" if got is None else f"{got}"
        raise TokenFileError(
            f"{path} must have {shard.num_bytes(dtype)} bytes for {shard.num_tokens} tokens of {dtype} in "
            f"{shard.num_documents} documents, got {found}; copy it whole, or prepare the files again."
        )


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def raise_for(folder: Path, corrupt: list[str]) -> None:
    """Raise TokenFileError if there are corrupt shards."""
    if corrupt:
        raise TokenFileError(
            f"shards in {folder} must have the checksums and the vocabulary of their header, got others in "
            f"{', '.join(corrupt)}; "
            "copy them again, or prepare the files again."
        )
