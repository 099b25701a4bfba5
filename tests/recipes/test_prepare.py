"""`python -m recipes.data`: text, JSONL and parquet to token files, killed and continued, and its refusals. CPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import pre_tokenizers

from recipes.data.__main__ import _parser, main
from recipes.data.prepare import SEPARATOR, load_tokenizer, prepare
from tests.helpers.ranks import forked
from tests.helpers.tokens import content, read_all, word_tokenizer, write_jsonl, write_tokens
from tests.recipes.launching import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:files below")

TEXTS = [f"Text {i}: " + "größer als nichts. " * (i % 9) for i in range(60)]


def as_bytes(texts: list[str]) -> list[list[int]]:
    """The documents that the byte tokenizer makes."""
    return [[SEPARATOR, *text.encode()] for text in texts]


def write_inputs(folder: Path) -> Path:
    """JSONL of all texts, and text files of the first three."""
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS)
    for i in range(3):
        (folder / f"{i}.txt").write_text(TEXTS[i])
    (folder / "other.md").write_text("not asked for")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as save_pretrained writes it: a few words, <s> and </s>, which are tokens."""
    words = ["<unk>", "<s>", "</s>", "Text", "nichts", ".", "<", "s", ">"]
    split = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    folder = tmp_path_factory.mktemp("tokenizer")
    word_tokenizer(words, split, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture
def pyarrow() -> Any:
    """pyarrow, with what it has for parquet."""
    pytest.importorskip("pyarrow.parquet", reason="the extra ringflash[parquet] is not installed")
    return pytest.importorskip("pyarrow")


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of `prepare` begin with torch imported; those of the test that kills the program import it."""
    context = forked()
    monkeypatch.setattr("recipes.data.prepare.multiprocessing.get_context", lambda method: context)


def test_text_and_jsonl_become_bytes_and_a_separator(tmp_path: Path) -> None:
    """In the order of the files' names; other files of the folder are named; nothing else is left behind."""
    (write_inputs(tmp_path / "in") / ".git").mkdir()
    (tmp_path / "in" / ".git" / "config.md").write_text("hidden")
    (tmp_path / "in" / "b.json").write_text("{}")
    (tmp_path / "in" / "elsewhere").symlink_to(tmp_path)
    with pytest.warns(UserWarning, match="in are left out: 1 .json, 1 linked folders, 1 .md, first .*b.json; name"):
        header = prepare([tmp_path / "in"], tmp_path / "out")
    assert read_all(tmp_path / "out") == as_bytes([*TEXTS[:3], *TEXTS])
    assert (header.dtype, header.vocab_size, header.version) == ("uint16", 257, 1)
    assert sorted(content(tmp_path / "out")) == ["00000.bin", "header.json"]


@pytest.mark.parametrize(
    ("shard_bytes", "suffix"),
    [*((size, "jsonl") for size in (1, 7, 100, 1000, 10**6)), (100, "ndjson"), (100, "json"), (100, "JSONL")],
)
def test_jsonl_is_cut_anywhere_and_keeps_every_line(tmp_path: Path, shard_bytes: int, suffix: str) -> None:
    """Also within a line, and within a character of several bytes; a last line may lack its end."""
    path = write_jsonl(tmp_path / f"a.{suffix}", [text[:20] for text in TEXTS[:6]])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    prepare([path if suffix == "json" else tmp_path], tmp_path / "out", shard_bytes=shard_bytes)
    assert read_all(tmp_path / "out") == as_bytes([text[:20] for text in TEXTS[:6]])


def test_processes_write_the_files_of_one(tmp_path: Path, forked_processes: None) -> None:
    inputs = write_inputs(tmp_path / "in")
    for num_processes in (1, 2):
        prepare([inputs], tmp_path / f"{num_processes}", shard_bytes=300, num_processes=num_processes)
    assert content(tmp_path / "1") == content(tmp_path / "2") and len(content(tmp_path / "1")) > 10


def test_hugging_face_tokenizer_marks_documents(tmp_path: Path, tokenizer: Path) -> None:
    """Tokens are between its bos and its eos; a special token that the text spells out is text."""
    path = write_jsonl(tmp_path / "a.jsonl", ["Text nichts.", "", "Text <s> nichts", "else"])
    header = prepare([path], tmp_path / "out", tokenizer=str(tokenizer))
    assert read_all(tmp_path / "out") == [[1, 3, 4, 5, 2], [1, 3, 6, 7, 8, 4, 2], [1, 0, 2]]
    assert (header.dtype, header.vocab_size) == ("uint16", 9)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    added = {"content": "else", "special": False, "lstrip": False, "rstrip": False, "normalized": False}
    more = tmp_path / "more"
    shutil.copytree(tokenizer, more)
    (more / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": {"9": added}}))
    assert load_tokenizer(str(more)).checksum != header.tokenizer  # another token, with the same tokenizer.json


def test_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    """The last token of a vocabulary of 2 ** 16 + 1 fits, and that of 2 ** 16 takes two bytes."""
    for vocab_size, dtype in ((65536, "uint16"), (65537, "uint32")):
        files = write_tokens(tmp_path / dtype, [[0, vocab_size - 1]], 1, vocab_size)
        assert files.read(0, 0, 2).tolist() == [0, vocab_size - 1] and files.read(0, 0, 2).dtype == dtype
    with pytest.raises(ValueError, match="tokens must be in the vocabulary of 9, got 3 to 9"):
        write_tokens(tmp_path / "small", [[3, 9]], 1, 9)


def test_parquet_rows_are_documents(tmp_path: Path, pyarrow: Any) -> None:
    """The text column, over several row groups; empty rows are left out."""
    table = pyarrow.table({"id": list(range(len(TEXTS) + 1)), "body": [*TEXTS, ""]})
    pyarrow.parquet.write_table(table, tmp_path / "a.PARQUET", row_group_size=7)
    prepare([tmp_path], tmp_path / "out", text_field="body", shard_bytes=500)
    assert read_all(tmp_path / "out") == as_bytes(TEXTS) and len(content(tmp_path / "out")) > 2
    with pytest.raises(ValueError, match=r"parquet must have a column 'text', got \['id', 'body'\] in .*a.PARQUET"):
        prepare([tmp_path / "a.PARQUET"], tmp_path / "other")


def test_parquet_that_cannot_be_read_is_named(tmp_path: Path, pyarrow: Any) -> None:
    """With the file, and where its text is not UTF-8 the row group."""
    ends = pyarrow.array([0, 1, 2], pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, ends, pyarrow.py_buffer(b"a\xff")])
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="its text UTF-8, got .* 0xff .* in .*a.parquet, row group 0; correct the fi"):
        prepare([tmp_path / "a.parquet"], tmp_path / "a")
    with pytest.raises(ValueError, match="parquet must be whole, got .* in .*b.parquet; correct the file"):
        prepare([tmp_path / "b.parquet"], tmp_path / "b")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pyarrow must be installed .* pip install 'ringflash\[parquet\]'"):
        prepare([tmp_path], tmp_path / "out")


def test_killed_and_run_again_gives_the_same_files(tmp_path: Path) -> None:
    """A real kill of the whole program among 200 shards: what was whole is kept, and the result is the same."""
    inputs = write_jsonl(tmp_path / "a.jsonl", [f"{i} " + "x" * 500 for i in range(200)])
    command = [sys.executable, "-m", "recipes.data", "prepare", str(inputs), "--shard_bytes", "524"]
    environment = {**os.environ, "PYTHONPATH": ".:kernels", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "--num_processes", "2", "--out", str(out)], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and len(list(out.glob("*.done.json"))) < 5:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "header.json").exists(), "prepare ended before it could be killed; give it more shards"
    kept = {path.stem: path.stat().st_ino for path in out.glob("*.bin") if path.with_suffix(".done.json").exists()}
    assert len(kept) >= 5
    assert main([*command[3:], "--num_processes", "1", "--out", str(out)]) == 0
    assert main([*command[3:], "--num_processes", "1", "--out", str(tmp_path / "whole")]) == 0
    assert content(out) == content(tmp_path / "whole")
    assert {stem: (out / f"{stem}.bin").stat().st_ino for stem in kept} == kept


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def drop_entry(path: Path) -> None:
    path.with_suffix(".done.json").unlink()


def cut_entry(path: Path) -> None:
    """Cut an entry as a disk may when the power fails."""
    path.with_suffix(".done.json").write_text("{")


@pytest.mark.parametrize("harm", [truncate, drop_entry, cut_entry, Path.unlink])
def test_what_an_interruption_may_leave_is_made_again(
    tmp_path: Path, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after all shards, before the header: a shard cut short, without entry or missing, and a temporary."""
    inputs, done = write_inputs(tmp_path / "in"), []
    prepare([inputs], tmp_path / "whole", shard_bytes=300)

    def stop_at_the_end(now: int, total: int) -> None:
        done.append(now)
        if now == total:
            assert total > 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([inputs], tmp_path / "out", shard_bytes=300, on_shard=stop_at_the_end)
    assert done == sorted(done) and not (tmp_path / "out" / "header.json").exists()
    harm(tmp_path / "out" / "00001.bin")
    (tmp_path / "out" / "00002.bin.1.tmp").write_bytes(b"half")
    seen: list[int] = []
    prepare([inputs], tmp_path / "out", shard_bytes=300, on_shard=lambda now, total: seen.append(now))
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert len(seen) == 2  # what was done, and the one shard made again


@pytest.mark.parametrize("harm", [None, truncate, Path.unlink, lambda x: x.write_bytes(bytes(x.stat().st_size))])
def test_finished_folder_is_made_whole_again(tmp_path: Path, harm: Callable[[Path], None] | None) -> None:
    """The errors of a harmed folder say how; a whole one is not written to."""
    inputs = write_inputs(tmp_path / "in")
    prepare([inputs], tmp_path / "out", shard_bytes=300)
    before, times = content(tmp_path / "out"), {x: x.stat().st_mtime_ns for x in (tmp_path / "out").iterdir()}
    if harm is not None:
        harm(tmp_path / "out" / "00001.bin")
    prepare([inputs], tmp_path / "out", shard_bytes=300)
    assert content(tmp_path / "out") == before
    assert harm is not None or {x: x.stat().st_mtime_ns for x in times} == times


def test_links_are_what_their_names_say(tmp_path: Path) -> None:
    """Hugging Face's cache: links to files that are named by checksums. Two links to one file are one input."""
    write_jsonl(tmp_path / "3fa9", TEXTS[:2])
    (tmp_path / "snapshot").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "snapshot" / name).symlink_to("../3fa9")
    prepare([tmp_path / "snapshot"], tmp_path / "out")
    assert read_all(tmp_path / "out") == as_bytes(TEXTS[:2])
    write_jsonl(tmp_path / "c.jsonl", TEXTS[2:4])
    (tmp_path / "latest").symlink_to("c.jsonl")
    prepare([tmp_path / "latest"], tmp_path / "latest.tokens")
    assert read_all(tmp_path / "latest.tokens") == as_bytes(TEXTS[2:4])


def test_suffixes_are_ends_of_names(tmp_path: Path) -> None:
    """Suffixes of several parts, or without the dot."""
    (tmp_path / "a.en.md").write_text("a")
    (tmp_path / "b.de.md").write_text("b")
    prepare([tmp_path], tmp_path / "out", suffixes=[".en.md"])
    assert read_all(tmp_path / "out") == as_bytes(["a"])
    prepare([tmp_path], tmp_path / "other", suffixes=["MD"])
    assert read_all(tmp_path / "other") == as_bytes(["a", "b"])
    for number, given in enumerate([".en.md,.de.md", "[.en.md, .de.md]"]):
        out = tmp_path / f"{number}"
        assert main(["prepare", str(tmp_path), "--out", str(out), "--num_processes", "1", "--suffixes", given]) == 0
        assert read_all(out) == as_bytes(["a", "b"])


def test_folder_of_other_inputs_is_refused(tmp_path: Path) -> None:
    """Finished, interrupted, of somebody else, or of the text before a change that left the size as it was."""
    inputs = write_inputs(tmp_path / "in")
    prepare([inputs], tmp_path / "out")
    with pytest.raises(ValueError, match="out must be made from the same inputs, tokenizer and options"):
        prepare([inputs], tmp_path / "out", shard_bytes=300)
    (tmp_path / "out" / "header.json").unlink()
    with pytest.raises(ValueError, match="out must be an empty folder or that of an interrupted run"):
        prepare([inputs], tmp_path / "out")
    (tmp_path / "out" / "plan.json").write_text(json.dumps({"plan": "another"}))
    with pytest.raises(ValueError, match="out must be made from the same inputs, tokenizer and options"):
        prepare([inputs], tmp_path / "out")
    (tmp_path / "out" / "00000.bin").unlink()  # the plan of an attempt that wrote nothing does not bind the next
    prepare([inputs], tmp_path / "out")
    assert read_all(tmp_path / "out") == as_bytes([*TEXTS[:3], *TEXTS])
    before = (inputs / "0.txt").stat()
    (inputs / "0.txt").write_bytes((inputs / "0.txt").read_bytes()[::-1])
    os.utime(inputs / "0.txt", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(ValueError, match="out must be made from the same inputs, tokenizer and options"):
        prepare([inputs], tmp_path / "out")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "got JSONDecodeError: .* in .*a.jsonl, line 2; correct the file, name another field with"),
        (b'{"text": "\xff"}', "got UnicodeDecodeError: .* in .*a.jsonl, line 2; "),
        (
            b'{"body": "a"}',
            "documents must be UTF-8 text, in a line or row as 'text', got KeyError: 'text' in .*, line 2",
        ),
        (b'{"text": 1}', "got TypeError: '1' in"),
        (b'["text"]', "got TypeError: list indices .* in .*a.jsonl, line 2"),
        (b'{"text": "\\ud800"}', "got UnicodeEncodeError: .* in .*a.jsonl, line 2; correct the file"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    """With its file and place, and no header is written."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "b"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["plan.json"]  # nothing half written takes room


@pytest.mark.parametrize("num_processes", [1, 2])
def test_text_that_is_not_utf_8_is_named(tmp_path: Path, num_processes: int, forked_processes: None) -> None:
    """The error crosses over from another process with its message."""
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"documents must be UTF-8 text, .* got UnicodeDecodeError: .* in .*a.txt;"):
        prepare([tmp_path], tmp_path / "out", num_processes=num_processes)


BAD_LINES = [b'{"text": "a"', b'{"text": "\xff"}', b'{"body": 1}', b'{"text": null}', b'{"text": "\\ud800"}']


@pytest.mark.parametrize(("shard_bytes", "depth"), [(20, 999), (1 << 20, 99999)])
def test_bad_lines_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shard_bytes: int, depth: int
) -> None:
    """Among empty documents, in one shard or many; a line of white space is neither. The error's remedy works.

    The parser gives up on the deeper line with another error.
    """
    bad_lines = [*BAD_LINES, b"[" * depth]
    lines = [b'{"text": "a"}', b'{"text": ""}', *bad_lines, b"  ", b'{"text": "b"}', b'{"text": ""}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "0.txt").write_bytes(b"finished before the error")
    arguments = ["prepare", str(tmp_path), "--out", str(tmp_path / "out"), "--shard_bytes", str(shard_bytes)]
    assert main([*arguments, "--num_processes", "1"]) == 1
    assert "or add --bad_lines skip" in capsys.readouterr().err
    assert main([*arguments, "--bad_lines", "skip", "--num_processes", "1"]) == 0
    assert (
        "30 tokens of uint16 in 3 documents; 2 empty documents left out; 6 bad lines skipped" in capsys.readouterr().out
    )
    assert read_all(tmp_path / "out") == as_bytes(["finished before the error", "a", "b"])
    assert main([*arguments, "--num_processes", "1"]) == 1
    assert "out must be made from the same inputs, tokenizer and options" in capsys.readouterr().err


def test_bad_rows_are_skipped_and_counted(tmp_path: Path, pyarrow: Any) -> None:
    """A row without text is a bad line of parquet."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="got TypeError: 'None' in .*a.parquet, row 1 of row group 0; correct"):
        prepare([tmp_path / "a.parquet"], tmp_path / "refused")
    (shard,) = prepare([tmp_path / "a.parquet"], tmp_path / "out", bad_lines="skip").shards
    assert (shard.num_documents, shard.num_empty, shard.num_bad) == (2, 1, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b' [{"text": "a"}]', r"got an array in .*a.json; convert it: jq -c '.\[\]' a.json > a.jsonl"),
        ("a.jsonl.GZ", b"\x1f\x8b", "must be text, JSON lines or parquet, got .*a.jsonl.GZ; unpack or convert it"),
        ("a.csv", b"text\na\n", "must be text, JSON lines or parquet, got .*a.csv; unpack or convert it"),
    ],
)
def test_formats_that_are_not_read_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """Before anything is written, also through a link, and if bad lines are skipped."""
    (tmp_path / "3fa9").write_bytes(content)
    (tmp_path / name).symlink_to("3fa9")
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path / name], tmp_path / "out", bad_lines="skip")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nowhere", {}, "inputs must be files or folders, got .*nowhere; correct the path"),
        ("other", {}, "must hold a file that is not empty, and in a folder ends in .txt or .jsonl or .ndjson"),
        ("a.jsonl", {}, "inputs must hold a document that is not empty, got none"),
        ("in", {"shard_bytes": 0}, "shard_bytes and num_processes must be 1 or more"),
        ("in", {"num_processes": 0}, "shard_bytes and num_processes must be 1 or more"),
        ("in", {"bad_lines": "ignore"}, "bad_lines 'error' or 'skip', got 67108864, 1 and 'ignore'"),
    ],
)
def test_wrong_inputs_and_options_are_refused(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    """Inputs that are missing, of another suffix, or empty."""
    write_inputs(tmp_path / "in")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.md").write_text("x")
    write_jsonl(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path / name], tmp_path / "out", **options)


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    """No folder, no marks, or no tokenizer in it."""
    (tmp_path / "a.txt").write_bytes(b"a")
    with pytest.raises(ValueError, match="tokenizer must be 'bytes' or a folder with tokenizer.json, got nowhere"):
        prepare([tmp_path], tmp_path / "out", tokenizer="nowhere")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "bare" / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match="tokenizer must have a bos or an eos token, got neither in"):
        prepare([tmp_path], tmp_path / "out", tokenizer=str(tmp_path / "bare"))
    (tmp_path / "bare" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer must be one that transformers reads, got JSONDecodeError: .* in "):
        prepare([tmp_path], tmp_path / "out", tokenizer=str(tmp_path / "bare"))


def test_processes_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler gives a job some of the host's cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert _parser().parse_args(["prepare", "in", "--out", "out"]).prepare.num_processes == 1


def test_command_says_what_it_wrote_and_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts on stdout, errors in one line on stderr with exit status 1."""
    inputs, out = write_jsonl(tmp_path / "a.jsonl", ["ab", "c"]), tmp_path / "out"
    assert main(["prepare", str(inputs), "--out", str(out), "--num_processes", "1"]) == 0
    assert f"{out}: 5 tokens of uint16 in 2 documents" in capsys.readouterr().out
    assert main(["check", str(out)]) == 0
    assert "5 tokens in 2 documents are as they were written" in capsys.readouterr().out
    (out / "00000.bin").write_bytes(bytes((out / "00000.bin").stat().st_size))
    assert main(["check", str(out)]) == 1
    assert "error: " in capsys.readouterr().err
    assert main(["prepare", str(inputs), "--out", str(inputs), "--num_processes", "1"]) == 1
    assert "error: [Errno 17] File exists" in capsys.readouterr().err
    monkeypatch.setattr("recipes.data.__main__.TokenFiles", Mock(side_effect=KeyboardInterrupt))
    assert main(["check", str(out)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
