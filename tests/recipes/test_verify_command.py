"""The command `ringflash verify` as a user starts it: exit status, table and JSON. CPU, 2 processes each; needs the
huggingface and lightning extras."""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from ringflash.commands.cli import main
from ringflash.verify import command
from tests.helpers.examples import example
from tests.recipes.launching import ROOT, run, run_ranks
from tests.recipes.test_wrap_lightning import write_changed

pytest.importorskip("transformers")
pytest.importorskip("lightning")


def test_the_documents_example_passes(tmp_path: Path) -> None:
    """As docs/verify.md prints it, and with its arguments."""
    code = example("docs/verify.md", "# my_training.py")
    (tmp_path / "my_training.py").write_text(code)
    arguments = code.splitlines()[0].split("ringflash ")[1].split()
    printed = run([sys.executable, "-m", "ringflash", *arguments], PYTHONPATH=f".:kernels:{tmp_path}")
    assert "cp=2 against cp=1: 64 tokens, 2 document(s), float32, cpu" in printed
    assert "passed: cp=N trains what cp=1 trains" in printed


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all LightningModules, by one launch."""
    folder = tmp_path_factory.mktemp("verify")
    write_changed(folder)
    out = folder / "reports.json"
    run_ranks("tests.recipes.verify_worker", folder, out, num_ranks=2)
    return json.loads(out.read_text())


def test_a_rank_that_fails_alone_ends_all_with_its_error(tmp_path: Path) -> None:
    """As the module is imported, or builds; the others waited for it half an hour, and nobody said why."""
    with ThreadPoolExecutor() as threads:
        list(threads.map(_fail_alone, [tmp_path / "import", tmp_path / "build"]))


def _fail_alone(folder: Path) -> None:
    """At the place that the folder is named by."""
    folder.mkdir()
    problem = 'if os.environ["RANK"] == "1":\n    raise ImportError("planted")\n'
    code = example("docs/verify.md", "# my_training.py")
    if folder.name == "build":
        code = code.replace("def build(group):\n", "def build(group):\n" + indent(problem, "    "))
    at_import = problem if folder.name == "import" else ""
    (folder / "failing.py").write_text(f"import os\nimport lightning\n{code}{at_import}")
    command = [sys.executable, "-m", "ringflash", "verify", "failing:build", "--nproc", "2", "--seqlen", "64"]
    with pytest.raises(AssertionError, match=r"(?s)exit status 2:.*planted"):
        run(command, PYTHONPATH=f".:kernels:{folder}", timeout_s=100)


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if check["verdict"] == "FAILED"]


def test_a_right_lightning_module_passes(reports: dict[str, Any]) -> None:
    report = reports["right"]
    assert (report["status"], report["passed"], failed(report)) == (0, True, [])
    assert all(check["verdict"] == "ok" for check in report["checks"])


def test_a_lightning_evaluation_times_cp_is_named(reports: dict[str, Any]) -> None:
    report = reports["summed_evaluation"]
    assert (report["status"], failed(report)) == (1, ["evaluation loss"])
    assert report["first_difference"] == "evaluation loss: eval_loss/verify"
    assert report["likely_cause"].startswith("eval_loss/verify is 2x")


def test_a_missed_layer_of_a_lightning_module_is_named(reports: dict[str, Any]) -> None:
    report = reports["missed_layer"]
    assert report["status"] == 1
    assert "layers.1.self_attn at position 12 (chunk 1, held by rank 1)" in report["first_difference"]
    assert "this layer was missed" in report["likely_cause"]


def test_documents_that_no_run_sees_are_named(reports: dict[str, Any]) -> None:
    report = reports["without_documents"]
    assert (report["status"], failed(report)) == (1, ["mask", "masks of layers"])
    assert "position 18 reaches 19 at cp=1 and cp=N" in report["likely_cause"]


def test_a_module_of_ones_own_is_verified(reports: dict[str, Any]) -> None:
    """With the README's diff it cuts its batches itself."""
    report = reports["own"]
    assert (report["status"], report["passed"], failed(report)) == (0, True, [])
    assert {check["name"] for check in report["checks"] if check["verdict"] == "not compared"} == {
        "logits",
        "masks of layers",
    }


def test_positions_of_the_shard_in_a_module_of_ones_own_are_named(reports: dict[str, Any]) -> None:
    """By verify, before the check that the module brings along."""
    report = reports["misplaced"]
    assert report["status"] == 1 and "layer outputs" in failed(report)
    assert "position 12 (chunk 1, held by rank 1)" in report["first_difference"]
    assert "positions" in report["likely_cause"]


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
        (["docs"], "target must be a folder with config.json, got docs without; name the model's own folder"),
        (["pyproject.toml"], "config.json must be one that transformers reads, got OSError (It looks like"),
        (["json:nothing"], "target must name a function of json, got 'nothing'"),
        (["json.none:build"], "target must name a module that can be imported, got ModuleNotFoundError: No module"),
        (["json:loads", "--device", "cuda"], "device cuda must have a GPU for every rank, got 0 for 1 or more"),
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
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.chdir(ROOT)
    assert main(["verify", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_with_the_shells_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's launcher ends the ranks, and then raises an error of its own."""
    stopped = Mock(side_effect=SignalException("planted", signal.SIGINT))
    monkeypatch.setattr(command, "elastic_launch", Mock(return_value=stopped))
    with pytest.raises(SystemExit) as end:
        main(["verify", "json:loads", "--nproc", "2"])
    assert end.value.code == 130
