"""Damage to any file of a distributed checkpoint is found, whatever the number of ranks that look. One process."""

import json
import warnings
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ringflash.checkpoint import checksums
from ringflash.checkpoint.checksums import CHECKSUMS, ChecksumWriter, check_sums, write_checksums
from ringflash.checkpoint.safe_files import check_checkpoint

PIECE = 1000  # bytes, so that a small file has several pieces
FILES = {".metadata", "__0_0.distcp"}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(checksums, "PIECE_BYTES", PIECE)
    writer = ChecksumWriter(tmp_path / "a.ckpt")
    state = {"weight": torch.randn(50, 50), "bias": torch.randn(7).bfloat16(), "lr": 0.1}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of torch, about one process
        dcp.save(state, storage_writer=writer, no_dist=True)
    write_checksums(tmp_path / "a.ckpt", writer.sums)
    return tmp_path / "a.ckpt"


def test_checksums_are_those_of_the_files(checkpoint: Path) -> None:
    content = json.loads((checkpoint / CHECKSUMS).read_text())
    assert content["piece_bytes"] == PIECE and content["files"].keys() == FILES
    for name, sums in content["files"].items():
        data = (checkpoint / name).read_bytes()
        assert sums["num_bytes"] == len(data) > PIECE
        assert sums["crc32"] == [zlib.crc32(data[i : i + PIECE]) for i in range(0, len(data), PIECE)]
    check_checkpoint(checkpoint)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 1.0])
def test_one_rank_finds_a_flipped_bit(checkpoint: Path, num_ranks: int, place: float) -> None:
    """In the first byte and the last, too."""
    path = checkpoint / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    byte = int(place * (len(data) - 1))
    data[byte] ^= 4
    path.write_bytes(data)
    errors = []
    for rank in range(num_ranks):
        try:
            check_sums(checkpoint, rank, num_ranks)
        except ValueError as error:
            errors.append(str(error))
    start = byte // PIECE * PIECE
    assert len(errors) == 1
    assert f"__0_0.distcp must hold the bytes that were written, got others between byte {start} and" in errors[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_other_lengths_are_seen_by_all_ranks(checkpoint: Path, rank: int) -> None:
    path = checkpoint / "__0_0.distcp"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match=f"got {size + 1} bytes in place of {size}; it is damaged"):
        check_sums(checkpoint, rank, 2)
    path.unlink()
    with pytest.raises(ValueError, match=r"must hold the files that checksums.json lists, got FileNotFoundError"):
        check_sums(checkpoint, rank, 2)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"piece_bytes": 1, "files": {"a": {"x": 1}}}', "\x00"])
def test_damaged_checksums_are_an_error(checkpoint: Path, content: str) -> None:
    (checkpoint / CHECKSUMS).write_text(content)
    with pytest.raises(ValueError, match=r"a.ckpt must hold the files that checksums.json lists, got"):
        check_checkpoint(checkpoint)


def test_checkpoint_without_checksums_is_noted(checkpoint: Path) -> None:
    """A checkpoint of an older version, or of torch: the first rank warns once."""
    (checkpoint / CHECKSUMS).unlink()
    with pytest.warns(UserWarning, match=r"a.ckpt has no checksums.json: damaged tensors in it would not be found"):
        check_checkpoint(checkpoint)
    with warnings.catch_warnings(action="error"):
        check_checkpoint(checkpoint, rank=1, num_ranks=2)
