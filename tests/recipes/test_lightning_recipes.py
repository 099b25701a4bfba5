"""The quickstart recipe, scaled down by flags: two gloo processes on the CPU, fp64.

It trains four steps; the same run interrupted after two and continued on one rank has its losses
(test_launch_recovery.py continues on two).
tests/recipes/test_8b_recipes.py has the other recipes.
"""

import csv
import re
from pathlib import Path

import pytest
import torch

from recipes.lightning import compare
from recipes.lightning.compare import largest_difference, newest_curve, read_losses
from recipes.lightning.train import _loggers, main
from tests.recipes.accidents import STEP
from tests.recipes.launching import PARTS, ROOT, run, train, write_text

RTOL_FP64 = 1e-11
RECIPE = ROOT / "recipes" / "lightning" / "quickstart.yaml"
STEPS = 4

SCALED_DOWN = {
    "trainer.max_steps": STEPS, "trainer.val_check_interval": 2,
    "trainer.plugins": "lightning.pytorch.plugins.DoublePrecision", "checkpoint.every_n_train_steps": 2,
    "checkpoint.save_top_k": -1, "progress.every_n_steps": 1, "data.seqlen": 96, "data.suffix": ".txt",
    "data.num_eval_sequences": 2, "model.model.hidden_size": 32, "model.model.intermediate_size": 48,
    "model.model.num_hidden_layers": 2,
}  # fmt: skip


def arguments(folder: Path, name: str, **flags: object) -> list[str | Path]:
    """The recipe on the folder's text, scaled down, with its results in the folder."""
    flags = {**SCALED_DOWN, "output_dir": folder / name, "data.folder": write_text(folder / "text"), **flags}
    return [RECIPE, *(f"--{key}={value}" for key, value in flags.items())]


class Run:
    """One run of a recipe: what it printed, and where its results are."""

    def __init__(self, folder: Path, name: str, num_ranks: int, **flags: object) -> None:
        self.output = train(*arguments(folder, name, **flags), num_ranks=num_ranks)
        self.results = newest_curve(folder / name).parent
        self.losses = read_losses(newest_curve(folder / name))

    def checkpoint(self, step: int) -> Path:
        """The directory written after a step."""
        (found,) = (self.results / "checkpoints").glob(f"*step={step}.ckpt")
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Run:
    """The uninterrupted run that the others are compared with."""
    return Run(folder, "two", 2)


def test_recipe_trains(two_ranks: Run) -> None:
    """A loss for every step, and the losses over fixed sequences fall."""
    assert sorted(two_ranks.losses) == list(range(STEPS))
    with (two_ranks.results / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("eval_loss/train", "eval_loss/held_out"):
        losses = [float(row[name]) for row in rows if row[name]]
        assert len(losses) == 3 and losses[0] > losses[1] > losses[2], losses


def test_recipe_prints_its_progress(two_ranks: Run) -> None:
    """A line for each step, the losses before and after, and where the results are."""
    for step in range(1, STEPS + 1):
        assert f"step {step:>6}  loss  {two_ranks.losses[step - 1]:.4f}  grad_norm" in two_ranks.output
        assert f" s a step  {step * SCALED_DOWN['data.seqlen']:,} tokens seen  0:0" in two_ranks.output
    assert "tokens/s" in two_ranks.output and "GiB" in two_ranks.output and "TFLOP/s a rank" in two_ranks.output
    assert "MFU" not in two_ranks.output  # a CPU has no peak in the table
    assert "tokens of the document before" in two_ranks.output
    assert "step 0" in two_ranks.output and f"step {STEPS}" in two_ranks.output
    assert str(two_ranks.checkpoint(STEPS)) in two_ranks.output and str(two_ranks.results) in two_ranks.output


def test_recipe_writes_its_results(two_ranks: Run) -> None:
    """TensorBoard's file, the recipe as it ran, and whole checkpoints with a part of each rank."""
    assert list(two_ranks.results.glob("events.out.tfevents.*"))
    assert "context_parallel_size" in (two_ranks.results / "config.yaml").read_text()
    for step in (2, 4):
        parts = {path.name for path in two_ranks.checkpoint(step).iterdir()}
        assert parts == PARTS


def test_resume_continues_on_another_number_of_ranks(folder: Path, two_ranks: Run) -> None:
    """The same sequences and the same state; one rank sums in another order.

    Context parallelism changes how a loss is computed, not the loss.
    """
    resumed = Run(folder, "resumed-on-one", 1, ckpt_path=two_ranks.checkpoint(2))
    difference, count = largest_difference(resumed.losses, two_ranks.losses)
    assert re.search(r"continuing from \S*step=2.ckpt: step 2, 192 tokens seen", resumed.output)
    assert count == 2 and difference <= RTOL_FP64 * max(two_ranks.losses.values())
    shown = run(["bash", "-c", '"$PYTHON" -m recipes.lightning.compare "$@"', "-", resumed.results, two_ranks.results])
    assert f"losses of the {count} steps that both have differ by {difference:.2e} at most" in shown


@pytest.mark.parametrize("every_n_epochs", ["null", 1])
def test_checkpoints_are_judged_by_their_evaluation(folder: Path, every_n_epochs: object) -> None:
    """A save is due at every step, an evaluation after every second: no checkpoint has another step's loss."""
    monitor = {"checkpoint.monitor": "eval_loss/held_out", "checkpoint.mode": "min"}
    epochs = {"checkpoint.every_n_train_steps": 1, "trainer.check_val_every_n_epoch": every_n_epochs}
    if every_n_epochs != "null":
        epochs |= {"trainer.limit_train_batches": 2, "trainer.val_check_interval": 1.0, "trainer.max_epochs": -1}
    run = Run(folder, f"judged-{every_n_epochs}", 1, **monitor, **epochs)
    with (run.results / "metrics.csv").open(newline="") as file:
        rows = [(int(row["step"]) + 1, float(x)) for row in csv.DictReader(file) if (x := row["eval_loss/held_out"])]
    state = torch.load(run.checkpoint(STEPS) / "meta.pt", weights_only=True)["callbacks"]
    (kept,) = (value["best_k_models"] for name, value in state.items() if name.startswith("ModelCheckpoint"))
    judged = {int(Path(path).stem.rpartition("=")[2]): loss.item() for path, loss in kept.items()}
    assert judged == pytest.approx(dict(rows[1:])) and sorted(judged) == [2, STEPS]


def test_signal_ends_a_run_with_a_checkpoint(folder: Path) -> None:
    """Rank 0 gets SIGTERM; both finish the next step with all its batches, write their parts, and evaluate no more.

    The place in the data is that of the step.
    """
    name, endless = "interrupted", {"trainer.max_steps": 10**6, "trainer.val_check_interval": 10**6}
    given = arguments(folder, name, **endless, **{"trainer.accumulate_grad_batches": 3})
    happens = "--trainer.callbacks+=tests.recipes.accidents.Preemption"
    output = train(*given, happens, num_ranks=2, SIGNAL="SIGTERM")
    assert output.count("loss over fixed sequences") == 1  # before the first step
    (checkpoint,) = (folder / name / "version_0").glob("interrupted-step=*.ckpt")
    assert {path.name for path in checkpoint.iterdir()} == PARTS
    meta = torch.load(checkpoint / "meta.pt", weights_only=True)
    step = int(checkpoint.stem.rpartition("=")[2])
    assert meta["global_step"] == meta["TextData"]["num_consumed"] / 3 == step == STEP + 1


def test_run_without_loggers_stays_in_its_output_dir(folder: Path) -> None:
    """Its checkpoints are there, not where it was started; the second start meets what the first has written."""
    name, output_dir = "without-loggers", folder / "without-loggers"
    quick = {"loggers": "[]", "checkpoint.every_n_train_steps": 1, "trainer.limit_val_batches": 0}
    for steps in (1, 2):
        flags = {**quick, "trainer.max_steps": steps, "ckpt_path": "auto"}
        train(*arguments(folder, name, **flags), num_ranks=1)
    assert sorted(x.name for x in output_dir.iterdir()) == ["checkpoints", "config.yaml"]
    checkpoints = {x.name for x in (output_dir / "checkpoints").iterdir()}
    assert checkpoints == {"epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt"}
    assert not (ROOT / "checkpoints").exists()


@pytest.mark.parametrize("strategy", ["lightning", "deepspeed"])
def test_bucket_is_refused(folder: Path, strategy: str) -> None:
    """Before the first step: checkpoints would be in a folder memory: of this machine, and none in the bucket."""
    name = f"bucket-{strategy}"
    given = arguments(folder, name, **{"checkpoint.dirpath": "memory://bucket/run"})
    if strategy == "deepspeed":
        given[1:1] = ["--config", ROOT / "recipes" / "deepspeed" / "quickstart.yaml", "--trainer.plugins=null"]
    with pytest.raises(AssertionError) as failed:
        train(*given, num_ranks=1)
    assert "checkpoints must go to a folder of a file system, got memory://bucket/run; name one" in str(failed.value)
    assert "step      1 " not in str(failed.value) and not (ROOT / "memory:").exists()


def test_missing_last_checkpoint_is_refused(folder: Path) -> None:
    """Lightning looks for it in the new version's own folder, finds none, warns, and starts from nothing."""
    with pytest.raises(ValueError, match="ckpt_path must be auto or a checkpoint .*, got last, .*; give auto"):
        main(["fit", "--config", *map(str, arguments(folder, "last", ckpt_path="last"))])


def test_run_without_a_curve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["compare", "nowhere", "nowhere"])
    with pytest.raises(SystemExit, match="error: run must hold version_N/metrics.csv, got none in nowhere; train into"):
        compare.main()


def test_mistyped_flag_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """Usage of every flag, on every rank, would hide it."""
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", str(RECIPE), "--trainer.maxsteps", "3"])
    said = capsys.readouterr().err
    assert "maxsteps" in said and len(said.splitlines()) < 10


def test_curves_without_a_common_step_are_refused() -> None:
    with pytest.raises(ValueError, match="curves must have a step in common, got 1 and 1 others;"):
        largest_difference({0: 1.0}, {1: 1.0})


def test_wandb_is_refused_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.lightning.train.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="wandb must be installed for loggers .*; pip install wandb, or drop it"):
        _loggers(["csv", "wandb"], str(tmp_path))


def test_loggers_share_one_version(tmp_path: Path) -> None:
    csv_logger, tensorboard = _loggers(["csv", "tensorboard"], str(tmp_path))
    assert csv_logger.log_dir == tensorboard.log_dir == str(tmp_path / "version_0")
    assert _loggers([], str(tmp_path)) == []
