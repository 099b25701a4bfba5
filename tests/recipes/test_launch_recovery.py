"""Runs that crash, are stopped, or span two hosts, as the launchers start them: two gloo processes on the CPU.

Each is compared with one that nothing happened to, and no launcher started: the same losses, to the bit. Where no
launcher is what is tested, none starts them either: it takes longer than their training.
tests/recipes/accidents.py is what happens. SLURM's commands are stood in for by scripts of a few lines; two_hosts.sh
makes the hosts.
"""

import os
from pathlib import Path

import pytest
import torch

from recipes.lightning.compare import read_losses
from recipes.lightning.resume import newest_checkpoint
from tests.recipes.accidents import STEP
from tests.recipes.launching import PARTS, ROOT, run, train, write_scripts
from tests.recipes.test_lightning_recipes import arguments

STEPS = 6
FLAGS = {"trainer.max_steps": STEPS, "trainer.num_sanity_val_steps": 0, "trainer.limit_val_batches": 0}
SRUN = '#!/usr/bin/env bash\nwhile [[ $1 != launch/* ]]; do shift; done\nexec tests/recipes/two_hosts.sh "$@"\n'
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '10.77.0.%s\\n' 0 1; else echo "scontrol $*"; fi
"""  # the addresses of two_hosts.sh


def flags(folder: Path, name: str, accident: str | None = None) -> list[str | Path]:
    """The recipe on the folder's text, with its results in the folder, and what happens to it."""
    happens = [f"--trainer.callbacks+=tests.recipes.accidents.{accident}"] if accident else []
    return [*arguments(folder, name, **FLAGS), *happens]


def losses(folder: Path, version: int) -> dict[int, float]:
    """Losses of one version of a run."""
    return read_losses(folder / f"version_{version}" / "metrics.csv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> dict[int, float]:
    """Losses of the run that the others are compared with."""
    train(*flags(folder, "uninterrupted"), num_ranks=2)
    expected = losses(folder / "uninterrupted", 0)
    assert sorted(expected) == list(range(STEPS))
    return expected


def slurm(folder: Path, arguments: list[str | Path], **environment: str) -> str:
    """Output of the batch script on two nodes of a SLURM that is two scripts; $LAUNCHER is the batch script."""
    write_scripts(folder / "bin", srun=SRUN, scontrol=SCONTROL)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "hosts", "SLURM_SUBMIT_DIR": str(ROOT)}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    batch = ["bash", "-c", 'LAUNCHER=$$ exec bash launch/slurm.sbatch "$@"', "-", *arguments]
    return run(batch, timeout_s=250.0, PATH=path, NPROC="1", **job, **environment)


def test_two_hosts_of_slurm_crash_and_are_preempted(folder: Path, uninterrupted: dict[int, float]) -> None:
    """One process on each. That of the second is killed past a checkpoint, and both continue from it.

    Then SLURM preempts the job. Both ranks write their parts, the script exits with 0, and what it would start again
    finishes the run.
    """
    output = slurm(folder, flags(folder, "slurm", "CrashThenPreemption"), SIGNAL="SIGUSR1", MAX_RESTARTS="1")
    assert "network namespace" in output.partition("\n")[0]
    assert "failed (exitcode: -9)" in output and "GLOBAL_RANK: 1" in output and "scontrol requeue 7" in output
    (saved,) = (folder / "slurm").glob("version_*/interrupted-step=*.ckpt")
    step = int(saved.stem.rpartition("=")[2])
    for path in (saved, folder / f"slurm/version_1/checkpoints/epoch=0-step={STEP + 1}.ckpt"):
        assert {part.name for part in path.iterdir()} == PARTS
    meta = torch.load(saved / "meta.pt", weights_only=True)
    assert meta["global_step"] == meta["TextData"]["num_consumed"] == step < STEPS
    newest = newest_checkpoint(folder / "slurm")  # of the same step, where a regular one was due at its end
    by_time = "--checkpoint.every_n_train_steps=null", "--checkpoint.train_time_interval=00:00:00"
    output = train(*flags(folder, "slurm"), *by_time, "--ckpt_path=auto", num_ranks=2)
    checkpoints = {path.stem for path in (folder / "slurm" / "version_2" / "checkpoints").iterdir()}
    assert checkpoints == {f"epoch=0-step={i}" for i in range(step + 1, STEPS + 1)}  # one whenever no time has passed
    assert f"Restored all states from the checkpoint at {newest}" in output
    for version, steps in ((1, range(STEP - 1, step)), (2, range(step, STEPS))):
        assert losses(folder / "slurm", version) == {i: uninterrupted[i] for i in steps}


def test_crash_in_the_middle_of_a_write(folder: Path, uninterrupted: dict[int, float]) -> None:
    """One rank is killed with its part of the second checkpoint unwritten: all continue from the first one."""
    command = [*flags(folder, "midway", "CrashWhileSaving"), "--ckpt_path=auto"]
    with pytest.raises(AssertionError, match=r"exit statuses \[.*-9"):
        train(*command, num_ranks=2)
    output = train(*command, num_ranks=2)
    first, second = (folder / f"midway/version_0/checkpoints/epoch=0-step={step}.ckpt" for step in (2, 4))
    assert f"Restored all states from the checkpoint at {first}" in output
    assert f"Removing {second}.partial, which a crash has left" in output
    assert losses(folder / "midway", 1) == {step: uninterrupted[step] for step in range(2, STEPS)}
    assert sorted((folder / "midway/version_0/checkpoints").iterdir()) == [first]
