"""The command `ringflash verify` as a user starts it: exit status, table and JSON. CPU, 2 processes each; needs the
huggingface and lightning extras."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ringflash.cli import main
from tests.helpers.examples import example
from tests.recipes.launching import run

pytest.importorskip("transformers")
pytest.importorskip("lightning")

STATUS = "import sys; from ringflash.cli import main; print('exit status', main(sys.argv[1:]))"


def test_the_documents_example_passes(tmp_path: Path) -> None:
    """As docs/verify.md prints it, and with its arguments."""
    code = example("docs/verify.md", "# my_training.py")
    (tmp_path / "my_training.py").write_text(code)
    arguments = code.splitlines()[0].split("ringflash ")[1].split()
    printed = run([sys.executable, "-m", "ringflash", *arguments], PYTHONPATH=f".:kernels:{tmp_path}")
    assert "cp=2 against cp=1: 64 tokens, 2 document(s), float32, cpu" in printed
    assert "passed: cp=N trains what cp=1 trains" in printed


def test_a_wrong_lightning_module_fails() -> None:
    """Status 1, and JSON that says why."""
    arguments = [
        "verify",
        "tests.recipes.verify_trainings:summed_evaluation",
        "--nproc",
        "2",
        "--seqlen",
        "48",
        "--json",
    ]
    printed = run([sys.executable, "-c", STATUS, *arguments])
    assert "exit status 1" in printed
    report, _ = json.JSONDecoder().raw_decode(printed[printed.index('{\n  "passed"') :])
    assert [c["name"] for c in report["checks"] if c["verdict"] == "FAILED"] == ["evaluation loss"]
    assert report["first_difference"] == "evaluation loss: eval_loss/verify"
    assert report["likely_cause"].startswith("eval_loss/verify is 2x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "verify must run on two ranks or more, got 1; add --nproc 2"),
        (["nowhere", "--nproc", "1"], "verify must run on two ranks or more, got 1"),
    ],
)
def test_one_process_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "target must be a folder with config.json or 'package.module:factory', got 'nowhere'"),
        (["json:nothing"], "target must name a function of json, got 'nothing'"),
        (["json:loads", "--layers", "2"], "layers must be left out for a factory"),
        (["json:loads", "--dtype", "int8"], "dtype must be one of"),
        (["json:loads", "--device", "tpu"], "device must be cpu or cuda"),
        (["json:loads", "--window", "0"], "window must be 1 or more"),
        (["json:loads", "--cu_seqlens", "[0,7]"], "cu_seqlens must end at the global sequence length (256), got 7"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the ranks join, on every rank."""
    monkeypatch.setenv("RANK", "0")
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err
