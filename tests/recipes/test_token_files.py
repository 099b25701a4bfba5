"""Token files that are not as they were written: each is refused by name. One process, CPU."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringflash.data import TokenFileError, TokenFiles
from tests.helpers.tokens import read_all, write_tokens

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change of the header."""

    def apply(folder: Path) -> None:
        header = json.loads((folder / "header.json").read_text())
        change(header)
        (folder / "header.json").write_text(json.dumps(header))

    return apply


def overwrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """A change of a file's bytes."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


HARMS = {
    "no_header": (lambda f: (f / "header.json").unlink(), "folder must hold header.json, got none in"),
    "cut_header": (overwrite("header.json", lambda x: x[: len(x) // 2]), "header.json must be JSON, got"),
    "binary_header": (overwrite("header.json", lambda x: b"\xff" + x), "header.json must be JSON, got"),
    "no_object": (overwrite("header.json", lambda x: b"[]"), "header.json must be an object, got list"),
    "newer": (edit(lambda h: h.update(version=2)), "header.json must be of version 1, got 2; prepare"),
    "missing_key": (edit(lambda h: h.pop("tokenizer")), r"header.json must have the keys \['dtype', 'plan', .*, got"),
    "missing_shards": (edit(lambda h: h.pop("shards")), "shards in .* must be a list, .*got None"),
    "odd_shards": (edit(lambda h: h.update(shards=3)), "shards in .* must be a list, not negative, got 3"),
    "odd_shard": (edit(lambda h: h["shards"].append("x")), r"must have the keys \['name', .*got x"),
    "text_for_count": (edit(lambda h: h.update(vocab_size="257")), "vocab_size in .* must be an int.* got '257'"),
    "true_for_count": (edit(lambda h: h.update(vocab_size=True)), "vocab_size in .* must be an int.* got True"),
    "negative_count": (
        edit(lambda h: h["shards"][0].update(num_tokens=-4)),
        "num_tokens in .* must be an int, not negative, got -4",
    ),
    "wrong_dtype": (
        edit(lambda h: h.update(dtype="uint32")),
        "must have dtype uint16 for a vocabulary of 257, got uint32",
    ),
    "wrong_vocabulary": (edit(lambda h: h.update(vocab_size=10**6)), "must have dtype uint32 .* got uint16"),
    "outside": (
        edit(lambda h: h["shards"][0].update(name="../00000.bin")),
        "name in .*header.json must be that of a file in the same folder, got '../00000.bin'; prepare",
    ),
    "folder_itself": (edit(lambda h: h["shards"][0].update(name="..")), "a file in the same folder, got '..'"),
    "no_name": (edit(lambda h: h["shards"][0].update(name="")), "a file in the same folder, got ''"),
    "zero_byte": (edit(lambda h: h["shards"][0].update(name="0\0")), r"a file in the same folder, got '0\\x00'"),
    "twice": (edit(lambda h: h["shards"].append(h["shards"][0])), "must be named only once each, got 00000.bin more"),
    "none": (edit(lambda h: h.update(shards=[])), "shards in .* must name at least one file, got none"),
    "no_vocabulary": (edit(lambda h: h.update(vocab_size=0)), "vocab_size in .* must be from 1 to 4294967296, got 0"),
    "endless_vocabulary": (edit(lambda h: h.update(vocab_size=1 << 33, dtype="uint32")), "must be from 1 to 42949"),
    "endless": (lambda f: (f / "header.json").write_text("[" * 200_000), "header.json must be JSON, got .*recursion"),
    "more_keys": (edit(lambda h: h["shards"][0].update(size=3)), r"must have the keys .*, got \[.*'size'\]"),
    "no_shard": (lambda f: (f / "00001.bin").unlink(), "00001.bin must have 24 bytes .*, got no file; copy it whole"),
    "cut_shard": (overwrite("00000.bin", lambda x: x[:-1]), "00000.bin must have 24 bytes for 4 tokens .* got 23"),
    "long_shard": (overwrite("00001.bin", lambda x: x + b"\0"), "00001.bin must have 24 bytes .*, got 25"),
    "wrong_count": (edit(lambda h: h["shards"][0].update(num_tokens=9)), "00000.bin must have 40 bytes .*, got 24"),
    "falling_bounds": (
        overwrite("00000.bin", lambda x: x[:8] + x[16:] + x[8:16]),
        "must have bounds that rise from 0 to 4, got others",
    ),
    "empty_document": (overwrite("00000.bin", lambda x: x[:8] + bytes([4]) + x[9:]), "bounds that rise from 0 to 4"),
    "short_bounds": (overwrite("00000.bin", lambda x: x[:16] + bytes([2]) + x[17:]), "bounds that rise from 0 to 4"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, of two documents and of one."""
    write_tokens(tmp_path, DOCUMENTS, 2)
    return tmp_path


@pytest.mark.parametrize("harm", HARMS)
def test_harm_is_named_when_files_are_opened(folder: Path, harm: str) -> None:
    """Without reading a token."""
    change, message = HARMS[harm]
    change(folder)
    with pytest.raises(TokenFileError, match=message):
        TokenFiles(folder)


@pytest.mark.parametrize("byte", range(24))
@pytest.mark.parametrize("name", ["00000.bin", "00001.bin"])
def test_no_changed_byte_passes_the_check(folder: Path, name: str, byte: int) -> None:
    """Tokens, filling and bounds."""
    overwrite(name, lambda x: x[:byte] + bytes([x[byte] ^ 1]) + x[byte + 1 :])(folder)
    with pytest.raises(TokenFileError, match=f"(shards in .* got others in {name}|{name} must have bounds)"):
        TokenFiles(folder).check()


@pytest.mark.parametrize("vocab_size", [7, 9])
def test_check_names_a_token_outside_the_vocabulary(folder: Path, vocab_size: int) -> None:
    """The checksum cannot tell: the header states both."""
    edit(lambda h: h.update(vocab_size=vocab_size))(folder)
    with pytest.raises(TokenFileError, match="checksums and the vocabulary of their header, got others in 00001.bin"):
        TokenFiles(folder).check()
    edit(lambda h: h.update(vocab_size=10))(folder)
    TokenFiles(folder).check()


def test_a_header_without_the_newer_counts_is_read(folder: Path) -> None:
    """Files prepared before empty documents and bad lines were counted."""
    edit(lambda h: [shard.pop(name) for shard in h["shards"] for name in ("num_empty", "num_bad")])(folder)
    assert read_all(folder) == DOCUMENTS


def test_file_has_its_name_once_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure may leave a whole name on half a file."""
    done: list[str] = []
    for name in ("fsync", "replace"):
        made = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, made=made: (done.append(name), made(*args)))
    write_tokens(tmp_path, DOCUMENTS, 3)
    assert done == ["fsync", "replace"] * 2


def test_unharmed_files_are_read(folder: Path) -> None:
    """The documents, by number and by part, also in another process; the work of checking can be shared."""
    assert read_all(folder) == DOCUMENTS
    files = TokenFiles(folder)
    assert len(files) == 3 and files.read(2, 1, 3).tolist() == [6, 7]
    again = pickle.loads(pickle.dumps(files))
    assert again.read(2, 1, 3).tolist() == [6, 7] and vars(again.read(2, 1, 3))["_mmap"] is not None  # not a copy
    overwrite("00001.bin", lambda x: bytes([x[0] ^ 1]) + x[1:])(folder)
    assert (files.corrupt_shards(0, 2), files.corrupt_shards(1, 2)) == ([], ["00001.bin"])


def test_fingerprint_names_the_tokens(tmp_path: Path) -> None:
    """Equal for equal files; another for another token."""
    prints = [
        write_tokens(tmp_path / str(i), documents, 2).header.fingerprint
        for i, documents in enumerate((DOCUMENTS, DOCUMENTS, [*DOCUMENTS[:2], [5, 6, 7, 8, 0]]))
    ]
    assert prints[0] == prints[1] != prints[2]
