"""ringflash bench: reading, comparing, showing and plotting results, and a small ring that it runs itself. No GPU."""

import json
import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import ringflash
from benchmarks import command
from benchmarks.compare import changes, read_results
from benchmarks.ring_contenders import PROBES
from ringflash.commands import cli
from ringflash.commands.cli import main
from tests.recipes.launching import ROOT

COMMITTED = ROOT / "benchmarks" / "results" / "kernels_h200.json"


def write(path: Path, **figures: dict[str, float]) -> Path:
    """Results with these TFLOP/s by row."""
    rows = [{"row": name, "pass": "forward", "tflops": tflops} for name, tflops in figures.items()]
    path.write_text(json.dumps({"environment": {"device": "planted"}, "results": rows}))
    return path


def test_committed_results_are_read() -> None:
    environment, rows = read_results(COMMITTED)
    assert "H200" in environment.get("device", environment.get("gpu", "")) and len(rows) > 20
    first, written = rows[0], json.loads(COMMITTED.read_text())["results"][0]
    assert first.name == f"{written['row']}, {written['pass']}" and first.peer == "flash-attn-4"
    assert first.unit == "TFLOP/s"
    assert first.ratio == pytest.approx(written["tflops"]["ringflash"] / written["tflops"]["flash-attn-4"])


def test_rows_are_compared_over_the_same_peer(tmp_path: Path) -> None:
    """A machine that is slower as a whole is no regression; without the peer only the figure itself is left."""
    old = write(tmp_path / "old", a={"ringflash": 600, "fa": 600}, b={"ringflash": 600}, c={"ringflash": 1})
    new = write(tmp_path / "new", a={"ringflash": 540, "fa": 540}, b={"ringflash": 540}, d={"ringflash": 1})
    found = changes(read_results(new)[1], read_results(old)[1])
    assert [(change.name, round(change.ratio, 3), change.against_peer) for change in found] == [
        ("a, forward", 1.0, True), ("b, forward", 0.9, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("tolerance", "status"), [("0.05", 1), ("0.2", 0)])
def test_a_regression_is_named_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tolerance: str, status: int
) -> None:
    old = write(tmp_path / "old", a={"ringflash": 600, "fa": 600}, b={"ringflash": 500, "fa": 600})
    new = write(tmp_path / "new", a={"ringflash": 540, "fa": 600}, b={"ringflash": 500, "fa": 600})
    arguments = ["bench", str(new), "--baseline", str(old), "--tolerance", tolerance]
    assert main(arguments) == status
    printed = capsys.readouterr().out
    assert ("slower than the baseline: a, forward, 0.900" in printed) is (status == 1)
    assert main([*arguments, "--json"]) == status
    assert json.loads(capsys.readouterr().out)["regressions"] == (["a, forward"] if status else [])


def test_a_row_that_is_gone_is_named_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that fails leaves its row out; a row that was not asked for is not missed."""
    old = write(tmp_path / "old", a={"ringflash": 600}, b={"ringflash": 500})
    new = write(tmp_path / "new", a={"ringflash": 600}, b={"fa": 500})
    arguments = ["bench", str(new), "--baseline", str(old)]
    assert main(arguments) == 1
    assert "only in the baseline: b, forward" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["gone"] == ["b, forward"]
    assert main([*arguments, "--rows", "^a"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must hold results of ringflash bench"),
        ('{"results": ["x"], "environment": {}}', "must hold results of ringflash bench"),
        ({"a": {"fa": 1}}, "x must hold a row that ringflash computes, got none"),
        # A ratio to 0 is none, and NaN is neither slower than a baseline nor JSON.
        ({"a": {"ringflash": 0.0, "fa": 600}}, "figures of a must be positive"),
        ({"a": {"ringflash": float("nan"), "fa": 600}}, "figures of a must be positive"),
    ],
)
def test_non_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Any, message: str) -> None:
    (tmp_path / "x").write_text(text) if isinstance(text, str) else write(tmp_path / "x", **text)
    assert main(["bench", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err


def test_baseline_without_a_common_row_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If nothing was compared, nothing is known to be as fast as it was."""
    old, new = (write(tmp_path / name, **{name: {"ringflash": 600}}) for name in ("old", "new"))
    assert main(["bench", str(new), "--baseline", str(old)]) == 2
    assert "must have rows of these results, got none in common" in capsys.readouterr().err


def test_rows_are_chosen_and_ours_is_the_plain_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hop that begins anew is timed in addition to ours, and is not ours."""
    path = write(tmp_path / "x", hop={"ringflash, fresh": 648, "ringflash": 639}, causal={"ringflash": 600})
    assert main(["bench", str(path), "--rows", "^ho[pq]", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["name"], row["ours"]) == ("hop, forward", "ringflash")


def test_a_probe_is_no_peer(tmp_path: Path) -> None:
    """Kernels without messages leave out what a ring is timed for."""
    probes = dict.fromkeys(PROBES, 99.0)
    (row,) = read_results(write(tmp_path / "x", ring={**probes, "ringflash, nccl": 90, "Ulysses": 80}))[1]
    assert row.peer == "Ulysses"


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, head in (("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")):
        assert main(["bench", str(COMMITTED), "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(head)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.json"], "nothing.json must hold results of ringflash bench"),
        ([str(COMMITTED), "--baseline", "nothing.json"], "nothing.json must hold results"),
        ([str(COMMITTED), "--plot", "plot.gif"], "--plot must end in .png, .svg or .pdf, got plot.gif"),
        (["ring"], "a ring must have 2 GPUs or more, got 0; --toy runs it"),
        (["ring", "--nproc", "4"], "a ring must have 4 GPUs, got 0; --toy runs it"),
        (["ring", "--toy", "--rounds", "0"], "--rounds must be 1 or more, got 0; leave it out for 5"),
        (["ring", "--toy", "--out", "."], "--out must be a file that can be written, got .; name another"),
        (["ring", "--toy", "--plot", "nowhere/x.png"], "--plot must be in a folder that exists, got nowhere/x.png"),
        (["kernels"], "kernels must be timed on a GPU, got none; bench ring --toy runs without"),
        ([str(COMMITTED), "--rows", "hd("], "--rows must be a regular expression, got 'hd('"),
        ([str(COMMITTED), "--rows", "hd7"], "--rows must be found in the name of a row, got 'hd7'"),
        ([str(COMMITTED), "--tolerance", "5"], "--tolerance must be a fraction from 0 to below 1, got 5; 5% is 0.05"),
        ([str(COMMITTED), "--out", "x.json"], "--out must be given with kernels or ring only, got"),
        ([str(COMMITTED), "--rounds", "5"], "--rounds must be given with kernels or ring only, got"),
        (["kernels", "--toy"], "--toy must be given with ring only, got 'kernels'"),
        (["kernels", "--nproc", "2"], "--nproc must be given with ring only, got 'kernels'"),
        (["ring", "--toy", "--nproc", "1000000000"], "--nproc must be at most 64 with --toy, got 1000000000;"),
        (["ring", "--toy", "--nproc", "1"], "--nproc must be 2 or more, got 1; a ring of one sends nothing"),
        (["ring", "--toy", "--out", "nowhere/x.json"], "--out must be in a folder that exists, got nowhere/x.json"),
    ],
)
def test_what_cannot_be_done_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_stopped_command_is_no_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C, or a reader that has ended, such as `head`: neither a traceback nor status 1."""
    monkeypatch.setattr(command, "read_results", Mock(side_effect=KeyboardInterrupt))
    assert main(["bench", str(COMMITTED)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.undo()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["bench", str(COMMITTED)]) == 141


@pytest.mark.parametrize("arguments", [["ring", "--toy"], [str(COMMITTED)], ["--help"]], ids=str)
def test_installation_without_benchmarks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """A wheel has none; the other commands run."""
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert f"ringflash bench: benchmarks must be next to the package, got none in {tmp_path}; run ringflash" in said
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])


def test_version_says_where_the_documents_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A wheel has none, but messages name their pages."""
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == f"ringflash {ringflash.__version__}, documents: {urls['Documentation']}"


def test_results_of_an_earlier_run_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that finds no row of that name writes nothing."""
    out = write(tmp_path / "ring.json", a={"ringflash": 1})
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert main(["bench", "ring", "--toy", "--rows", "causal$", "--out", str(out)]) == 2
    assert "--rows must be found in the name of a row, got 'causal$'" in capsys.readouterr().err


def test_a_small_ring_is_run_kept_and_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Over gloo on two ranks, a row by the name that is shown; against itself it has not changed."""
    out = tmp_path / "ring.json"
    run = ["bench", "ring", "--toy", "--rounds", "2", "--out", str(out)]
    assert main([*run, "--rows", "causal, forward$"]) == 0
    printed, of_run = capfd.readouterr()
    assert "ours, % of the ideal of a toy" in printed and "toy, no speed: " in of_run
    assert "fastest peer" in printed and "causal, forward" in printed and "backward" not in printed
    assert main(["bench", str(out), "--rows", "causal, forward$", "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)["rows"]
    assert row["name"].endswith("causal, forward")
    arguments: list[Any] = ["bench", str(out), "--baseline", str(out), "--json"]
    assert main(arguments) == 0
    said = json.loads(capfd.readouterr().out)
    assert len(said["rows"]) == 2 and all(row["ours"] == "ringflash, gloo" for row in said["rows"])
    assert said["rows"][0]["unit"] == "% of the ideal of a toy"
    assert [change["ratio"] for change in said["compared"]] == [1.0, 1.0]
