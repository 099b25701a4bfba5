"""Checksums of a distributed checkpoint: computed while it is written, compared before it is loaded.

    checksums.json    piece_bytes, and for each file its length and the CRC-32 of each of its pieces
    __0_0.distcp      | piece 0 | piece 1 | ... | the last one, shorter |

Ranks divide the pieces among them, independently of the number of ranks that wrote them. A CRC-32 detects accidental
damage such as a flipped bit; it does not protect against deliberate changes.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.futures import Future

CHECKSUMS = "checksums.json"
PIECE_BYTES = 64 << 20


@dataclass
class Sums:
    """Length and checksums of one file, whose bytes are added in order."""

    num_bytes: int = 0
    crc32: list[int] = field(default_factory=list)

    def add(self, data: Any) -> None:
        """Count the next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(view):
            start = self.num_bytes % PIECE_BYTES
            if start == 0:
                self.crc32.append(0)
            piece, view = view[: PIECE_BYTES - start], view[PIECE_BYTES - start :]
            self.crc32[-1] = zlib.crc32(piece, self.crc32[-1])
            self.num_bytes += len(piece)


class ChecksumWriter(FileSystemWriter):
    """torch's checkpoint writer with checksums. After `finish`, `sums` on rank 0 has all files by name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _SummedFiles()

    @property
    def sums(self) -> dict[str, Sums]:
        """Checksums of the files that this rank wrote or received from other ranks."""
        return cast(_SummedFiles, self.fs).sums

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's part, and append its checksums to the results, which are sent to rank 0."""
        results = super().write_data(plan, planner).wait()
        answer: Future[list[Any]] = Future()
        answer.set_result([*results, self.sums])
        return answer

    def finish(self, metadata: Any, results: Any) -> None:
        """Collect the checksums of all ranks, and write .metadata."""
        for part in results:
            self.sums.update(part.pop())
        super().finish(metadata, results)


class _SummedFiles(FileSystem):
    """torch's file system, which adds all written bytes to `sums`."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file as torch does; one that is written also computes the checksums of its pieces."""
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            sums = self.sums[Path(path).name] = Sums()
            yield _Summed(stream, sums)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Summed:
    """Stream that adds the bytes of a file, written sequentially, to its checksums."""

    def __init__(self, stream: Any, sums: Sums) -> None:
        self._stream, self._sums = stream, sums

    def write(self, data: Any) -> int:
        self._sums.add(data)
        return cast(int, self._stream.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def write_checksums(directory: Path, sums: dict[str, Sums]) -> None:
    """Write checksums.json."""
    content = {"piece_bytes": PIECE_BYTES, "files": {name: asdict(each) for name, each in sums.items()}}
    with open(directory / CHECKSUMS, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def check_sums(directory: Path, rank: int = 0, num_ranks: int = 1) -> None:
    """Raise ValueError if a file in this rank's share of a checkpoint does not hold the bytes that were written."""
    try:
        damaged = _first_damaged(directory, rank, num_ranks)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise _damage(directory, f"the files that {CHECKSUMS} lists", got) from error
    if damaged is not None:
        raise _damage(directory / damaged[0], "the bytes that were written", damaged[1])


def _first_damaged(directory: Path, rank: int, num_ranks: int) -> tuple[str, str] | None:
    """Return the first damaged file in this rank's share and its damage; every rank compares all lengths."""
    content = json.loads((directory / CHECKSUMS).read_bytes())
    size, files = int(content["piece_bytes"]), {name: Sums(**each) for name, each in content["files"].items()}
    for name, sums in files.items():
        if (found := (directory / name).stat().st_size) != sums.num_bytes:
            return name, f"{found} bytes in place of {sums.num_bytes}"
    pieces = [(name, i * size, crc) for name, sums in files.items() for i, crc in enumerate(sums.crc32)]
    for name, start, crc in pieces[len(pieces) * rank // num_ranks : len(pieces) * (rank + 1) // num_ranks]:
        with open(directory / name, "rb") as file:
            file.seek(start)
            if zlib.crc32(file.read(size)) != crc:
                return name, f"others between byte {start} and {min(start + size, files[name].num_bytes)}"
    return None


def _damage(path: Path, must: str, got: str) -> ValueError:
    return ValueError(f"{path} must hold {must}, got {got}; it is damaged: take another checkpoint, or a copy of it.")
