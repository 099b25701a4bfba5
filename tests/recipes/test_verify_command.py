"""The command `ringflash verify`: exit status, table and JSON. CPU, 2 processes; needs the huggingface and lightning
extras. tests/recipes/test_newcomer.py has the ranks that it starts."""

import json
import signal
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from ringflash.commands import verify as command
from ringflash.commands.cli import main
from tests.helpers.examples import example
from tests.recipes.launching import ROOT, run_ranks
from tests.recipes.test_wrap_lightning import write_changed

pytest.importorskip("transformers")
pytest.importorskip("lightning")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All trainings' reports, by one launch."""
    folder = tmp_path_factory.mktemp("verify")
    write_changed(folder)
    code = example("docs/verify.md", "# my_training.py")
    (folder / "my_training.py").write_text(code)
    write_failing(folder, code)
    arguments = code.splitlines()[0].split("ringflash verify ")[1].split()
    out = folder / "reports.json"
    output = run_ranks("tests.recipes.verify_worker", folder, out, *arguments, num_ranks=2)
    return {**json.loads(out.read_text()), "output": output}


def write_failing(folder: Path, code: str) -> None:
    """The document's example, which fails on rank 1 as it is imported, or as it builds."""
    problem = 'if os.environ["RANK"] == "1":\n    raise ImportError("planted")\n'
    in_build = code.replace("def build(group):\n", "def build(group):\n" + indent(problem, "    "))
    for name, failing in (("import", code + problem), ("build", in_build)):
        (folder / f"failing_{name}.py").write_text("import os\nimport lightning\n" + failing)


def test_the_documents_example_passes(reports: dict[str, Any]) -> None:
    """The example of docs/verify.md, run as printed and with its arguments."""
    first, second = reports["example"]
    assert (first["status"], second["status"], second["printed"]) == (0, 0, "")
    assert "cp=2 against cp=1: 64 tokens, 2 document(s), float32, cpu" in first["printed"]
    assert "passed: cp=N trains what cp=1 trains" in first["printed"]
    assert "Tip:" not in reports["output"]  # of Lightning, for each of its trainers


@pytest.mark.parametrize("place", ["import", "build"])
def test_error_of_one_rank_ends_all(reports: dict[str, Any], place: str) -> None:
    """The others used to wait for it half an hour without a message."""
    assert [rank["status"] for rank in reports[place]] == [2, 2]
    assert "planted" in reports[place][0]["errors"]


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if check["verdict"] == "FAILED"]


def test_a_lightning_evaluation_times_cp_is_named(reports: dict[str, Any]) -> None:
    """All else of this module is right."""
    report = reports["summed_evaluation"]
    assert (report["status"], failed(report)) == (1, ["evaluation loss"])
    assert {check["verdict"] for check in report["checks"]} == {"ok", "FAILED"}
    assert report["first_difference"] == "evaluation loss: eval_loss/verify"
    assert report["likely_cause"].startswith("eval_loss/verify is 2x")


def test_a_module_of_ones_own_is_verified(reports: dict[str, Any]) -> None:
    """With the diff of docs/lightning.md it cuts its batches itself."""
    report = reports["own"]
    assert (report["status"], report["passed"], failed(report)) == (0, True, [])
    left_out = {check["name"] for check in report["checks"] if check["verdict"] == "not compared"}
    assert left_out == {"logits", "masks of layers"}


def test_shard_positions_of_a_module_are_named(reports: dict[str, Any]) -> None:
    """Verify finds them before the check that the module brings along."""
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
        (["docs"], "target must be a folder with config.json, got docs without it; name the model's folder"),
        (["pyproject.toml"], "got the file pyproject.toml; name a model's folder. For a recipe, python -m recipes."),
        (["recipes/deepspeed/zero1.json"], "config.json must be one that transformers reads, got "),
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
    """torch's launcher ends the ranks, and then raises another error."""
    stopped = Mock(side_effect=SignalException("planted", signal.SIGINT))
    monkeypatch.setattr(command, "elastic_launch", Mock(return_value=stopped))
    with pytest.raises(SystemExit) as end:
        main(["verify", "json:loads", "--nproc", "2"])
    assert end.value.code == 130
