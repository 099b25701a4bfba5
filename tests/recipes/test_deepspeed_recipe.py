"""The DeepSpeed quickstart, scaled down by flags: two gloo processes on the CPU, fp32.

It trains four steps by the command that launch/local.sh prints; continued from its checkpoint after two steps, it has
the same bits.
"""

import json
import shutil
from pathlib import Path

import pytest

from recipes.lightning.compare import newest_curve, read_losses
from tests.recipes.launching import ROOT, run, train
from tests.recipes.test_lightning_recipes import arguments as scaled_down

pytest.importorskip("deepspeed")

RECIPES = ["recipes/lightning/quickstart.yaml", "--config", "recipes/deepspeed/quickstart.yaml"]
STEPS = 4


def arguments(folder: Path, name: str, **flags: object) -> list[str | Path]:
    return [*RECIPES, *scaled_down(folder, name, **{"trainer.plugins": "null"}, **flags)[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def quickstart(folder: Path) -> tuple[str, dict[int, float]]:
    """Output of the uninterrupted run, and its losses."""
    output = train(*arguments(folder, "quickstart"), num_ranks=2, DS_ACCELERATOR="cpu")
    return output, read_losses(newest_curve(folder / "quickstart"))


def test_launcher_hands_both_configs_on() -> None:
    shown = run(["launch/local.sh", "--dry-run", *RECIPES, "--trainer.plugins=null"], NPROC="2")
    assert f"-m recipes.lightning.train fit --config {' '.join(RECIPES)} --trainer.plugins=null" in shown


def test_quickstart_trains(quickstart: tuple[str, dict[int, float]]) -> None:
    """A loss and a line for every step, with the norm that DeepSpeed found; losses over fixed sequences."""
    output, losses = quickstart
    assert sorted(losses) == list(range(STEPS)) and losses[STEPS - 1] < losses[0]
    for step in range(1, STEPS + 1):
        assert f"step {step:>6}  loss  {losses[step - 1]:.4f}  grad_norm" in output
    assert f"step {STEPS:>6}  loss over fixed sequences: train" in output
    assert "deprecated" not in output  # torch's opinions on DeepSpeed's calls, in every step


def test_resume_continues_exactly(folder: Path, quickstart: tuple[str, dict[int, float]]) -> None:
    """The same bits as without the interruption."""
    (checkpoint,) = folder.glob("quickstart/version_0/checkpoints/*step=2.ckpt")
    shutil.copytree(checkpoint, folder / "resumed" / checkpoint.name)
    flags = {"ckpt_path": "auto", "trainer.limit_val_batches": 0}
    train(*arguments(folder, "resumed", **flags), num_ranks=2, DS_ACCELERATOR="cpu")
    assert read_losses(newest_curve(folder / "resumed")) == {step: quickstart[1][step] for step in (2, 3)}


def test_every_config_is_commented() -> None:
    """The README.md of their folder has a row for each key."""
    configs = sorted((ROOT / "recipes" / "deepspeed").glob("*.json"))
    readme = (ROOT / "recipes" / "deepspeed" / "README.md").read_text()
    assert len(configs) == 5
    for path in configs:
        assert f"`{path.name}`" in readme
        for key in keys(json.loads(path.read_text())):
            assert f"| `{key}` |" in readme, (path.name, key)


def keys(content: dict[str, object]) -> set[str]:
    """All of them, of inner dictionaries too."""
    inner = [keys(value) for value in content.values() if isinstance(value, dict)]
    return set(content).union(*inner)
