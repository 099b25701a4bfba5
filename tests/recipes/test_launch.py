"""The launch files without training: style, schemas, and what they would run. One process, no GPU, no cluster."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.lightning.resume import newest_checkpoint
from ringflash.lightning.checkpoints import COMPLETE
from tests.recipes.launching import ROOT, interrupt, run, write_scripts

LAUNCH = ROOT / "launch"
RECIPE = "recipes/lightning/128k_cp8_8gpus.yaml"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch", ROOT / "tests" / "recipes" / "two_hosts.sh"]


def script(name: str, *path: str) -> str:
    """A shell script inside a YAML file, with the repository where the file expects it."""
    content: Any = yaml.safe_load((LAUNCH / name).read_text())
    for key in path:
        content = content[key]
    text = content[0] if isinstance(content, list) else content
    return text.replace("cd /ringflash", f"cd {ROOT}")


def dry_run(*command: str | Path, **environment: str) -> str:
    """Return the command that a launcher would run."""
    return run(command, DRY_RUN="1", **environment)


@pytest.mark.skipif(shutil.which("shellcheck", path=PATH) is None, reason="needs shellcheck")
def test_scripts_pass_shellcheck() -> None:
    """Scripts in files, and those in YAML."""
    run(["shellcheck", "--external-sources", *SCRIPTS], PATH=PATH)
    for text in (
        script("kubernetes.yaml", "spec", "trainer", "args"),
        script("skypilot.yaml", "run"),
        script("skypilot.yaml", "setup"),
    ):
        check = ["shellcheck", "--shell=bash", "--exclude=SC2155,SC2164", "-"]
        subprocess.run(check, input=text, text=True, check=True, env={**os.environ, "PATH": PATH})


def test_kubernetes_file_has_the_schema_of_kubeflow() -> None:
    """Kubeflow's own classes accept it, and know every key: what they do not know they drop."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    content = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    job = models.TrainerV1alpha1TrainJob.from_dict(content)
    assert job.to_dict() == content
    assert (job.api_version, job.kind) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert (job.spec.runtime_ref.kind, job.spec.runtime_ref.name) == ("ClusterTrainingRuntime", "torch-distributed")
    content["spec"]["trainer"]["processes"] = 8  # the control
    assert models.TrainerV1alpha1TrainJob.from_dict(content).to_dict() != content


def test_skypilot_file_has_only_keys_of_a_task() -> None:
    """Keys that SkyPilot's reference names, of the types it names."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    types = {
        "name": str, "num_nodes": int, "resources": dict, "workdir": str, "envs": dict, "volumes": dict,
        "setup": str, "run": str,
    }  # fmt: skip
    assert {key: type(value) for key, value in task.items()} == types
    assert all(isinstance(value, str) for value in task["envs"].values())


def test_local_dry_run() -> None:
    """One line for one host: torchrun's own rendezvous, the number of restarts, both signals kept from torchrun."""
    line = dry_run("launch/local.sh", RECIPE, "--ckpt_path", "auto", "--output_dir", "a b", NPROC="3", MAX_RESTARTS="2")
    assert "PET_MAX_RESTARTS=2" in line and "SIGTERM" not in line
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line
    assert "torch.distributed.run --standalone --nproc_per_node 3 -m recipes.lightning.train fit" in line
    assert rf"--config {RECIPE} --ckpt_path auto --output_dir a\ b" in line
    assert "OMP_NUM_THREADS=1" in line and line.count("\n") == 1


def test_host_dry_run() -> None:
    """Several: where the hosts meet, and which of them keeps the meeting."""
    shown = dry_run("launch/host.sh", NNODES="4", NODE_RANK="0", RDZV_ENDPOINT="a:1", RDZV_ID="job", NPROC="8")
    meeting = "--nnodes 4 --rdzv_id job --rdzv_backend c10d --rdzv_endpoint a:1 --rdzv_conf is_host=1"
    assert f"torch.distributed.run {meeting} --nproc_per_node 8 -m recipes.lightning.train" in shown
    shown = dry_run("launch/host.sh", NNODES="4", NODE_RANK="3", RDZV_ENDPOINT="a:1", LOCAL_ADDR="b", NPROC="8")
    assert "--rdzv_id ringflash" in shown and "is_host=0 --local_addr b" in shown


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(
            (name, "", f"{name} must be set .* on one host use launch/local.sh")
            for name in ("NNODES", "NODE_RANK", "RDZV_ENDPOINT")
        ),
        # bash reads 08 as octal, fails, and would go on without a meeting; for host 2 of 2 the first would wait
        *(("NODE_RANK", x, f"NODE_RANK must be a whole number, from 0 to 1, got {x};") for x in ("08", "x", "-1", "2")),
        *(
            (name, value, f"{name} must be a whole number, .* got {value};")
            for name in ("NPROC", "MAX_RESTARTS", "NNODES", "DRY_RUN")
            for value in ("x", {"NPROC": "0", "NNODES": "1:4"}.get(name, "yes"))
        ),
    ],
)
def test_wrong_variables_of_a_host_are_refused(name: str, value: str, message: str) -> None:
    known = {"NNODES": "2", "NODE_RANK": "0", "RDZV_ENDPOINT": "a:1", "NPROC": "1", "SLURM_NODEID": "", "DRY_RUN": "1"}
    with pytest.raises(AssertionError, match=f"status 2:\n{message}"):
        run(["launch/host.sh"], **known | {name: value})


@pytest.mark.parametrize("dry", ["0", "1"])
@pytest.mark.parametrize("launcher", ["local.sh", "host.sh", "slurm.sbatch"])
def test_a_recipe_that_is_not_there_is_refused(launcher: str, dry: str) -> None:
    """A dry run too: it must not show a command that would fail."""
    place = {"NNODES": "1", "NODE_RANK": "0", "RDZV_ENDPOINT": "a:1", "NPROC": "1", "OMP_NUM_THREADS": "1"}
    with pytest.raises(AssertionError, match="status 2:\nthe recipe must be a file, got nowhere.yaml, looked for from"):
        run(["bash", f"launch/{launcher}", "nowhere.yaml"], DRY_RUN=dry, **place)


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("local.sh", ("dry-run", "NPROC")),
        ("host.sh", ("dry-run", "NPROC", "RDZV_ENDPOINT")),
        ("slurm.sbatch", ("DRY_RUN", "SPARE")),
    ],
)
def test_help_names_options_and_variables(launcher: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """From any folder; and where the recipe's own flags are listed."""
    command = ["bash", "-c", f"cd {tmp_path} && bash {LAUNCH / launcher} --help"]
    shown = run(command)
    assert [word for word in ("recipe.yaml", "train fit --help", "MAX_RESTARTS", *words) if word not in shown] == []
    assert "#" not in shown and "SBATCH" not in shown


def test_slurm_dry_run() -> None:
    """One host script for each node, from the newest checkpoint; the user's flags are last; no spare without CHECK."""
    with pytest.raises(AssertionError, match="SPARE must be a whole number, from 0 to 0, got 1"):
        dry_run("bash", "launch/slurm.sbatch", SPARE="1")
    job = {"SLURM_NNODES": "4", "SLURM_CPUS_ON_NODE": "96"}
    shown = dry_run("bash", "launch/slurm.sbatch", RECIPE, "--trainer.max_steps", "3", **job)
    assert "NNODES=4 MAX_RESTARTS=3 RDZV_ENDPOINT=localhost:29500 RDZV_ID=" in shown
    assert "srun --ntasks-per-node=1 --cpu-bind=none --cpus-per-task 96 --kill-on-bad-exit=1 --nodes 4 " in shown
    assert f"launch/host.sh {RECIPE} --ckpt_path auto --trainer.max_steps 3" in shown
    shown = dry_run("bash", "launch/slurm.sbatch", RECIPE, SRUN_FLAGS="--container-image=a --mpi=none", **job)
    assert " --cpus-per-task 96 --container-image=a --mpi=none --kill-on-bad-exit=1 --nodes 4 " in shown


def batch(folder: Path, **environment: str) -> str:
    """Output of the batch script, with the scripts of a folder in place of SLURM's commands."""
    command = ["bash", "-c", "LAUNCHER=$$ exec bash launch/slurm.sbatch"]
    known = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    return run(command, timeout_s=30.0, **known, **environment)


FARM = """#!/usr/bin/env bash
# Nodes a1 to a4: a1 has a fault, and a2 gets one in the first training. $SIGNAL is sent during the check after it.
echo "$*" >>"$FOLDER/asked"
case "$*" in
  *check.sh*)
    if [[ -e $FOLDER/broken && $SIGNAL ]]; then kill -s "$SIGNAL" "$LAUNCHER"; fi
    for i in 4 3 2; do if [[ $i != 2 || ! -e $FOLDER/broken ]]; then echo "a$i"; fi; done ;;
  *a2,a3*) touch "$FOLDER/broken"; exit 3 ;;
esac
"""


@pytest.mark.parametrize(
    ("spare", "sent", "trained", "ends"),
    [
        ("2", "", ["a2,a3", "a3,a4"], ""), ("1", "", ["a2,a3,a4"], "needs 3 nodes without a fault, got 2 of 4"),
        ("0", "", [], "got 3 of 4"), ("2", "USR1", ["a2,a3"], "requeue 7"),
    ],
)  # fmt: skip
def test_slurm_trains_on_healthy_nodes(tmp_path: Path, spare: str, sent: str, trained: list[str], ends: str) -> None:
    """A node that fails meanwhile is replaced by a spare, until there are too few, or the time is over."""
    scontrol = "#!/usr/bin/env bash\nif [[ $1 == show ]]; then printf 'a%s\\n' 1 2 3 4; else echo \"$*\"; fi\n"
    write_scripts(tmp_path, srun=FARM, scontrol=scontrol)
    job = {"SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "a[1-4]", "FOLDER": str(tmp_path), "SIGNAL": sent}
    try:
        output = batch(tmp_path, CHECK="1", SPARE=spare, **job)
    except AssertionError as failed:
        output = str(failed)
    assert ends in output and ("exit status" in output) == ("got" in ends)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split("--nodelist ")[1].split()[0] for line in asked if "--nodelist" in line] == trained


@pytest.mark.parametrize("healthy", [True, False])
def test_a_node_with_a_fault_does_not_print_its_name(tmp_path: Path, healthy: bool) -> None:
    write_scripts(tmp_path, python=f"#!/usr/bin/env bash\nexit {int(not healthy)}\n")
    shown = run(["launch/check.sh"], PYTHON=str(tmp_path / "python"), SLURMD_NODENAME="a1")
    assert ("left out" in shown) != healthy and "a1" in shown


@pytest.mark.parametrize("flag", [("--ckpt_path", "runs/a.ckpt"), ("--ckpt_path=null",)], ids=str)
def test_checkpoint_of_every_start_is_refused(flag: tuple[str, ...]) -> None:
    """A job that is queued again, or started again after a crash, would lose the steps since."""
    value = flag[-1].removeprefix("--ckpt_path=")
    with pytest.raises(AssertionError, match=f"must be auto where SLURM may queue the job again, got {value}: "):
        dry_run("bash", "launch/slurm.sbatch", RECIPE, *flag)
    with pytest.raises(AssertionError, match=f"must be auto where MAX_RESTARTS is 2, got {value}: .* auto finds it"):
        dry_run("launch/local.sh", *flag, NPROC="2", MAX_RESTARTS="2")
    assert value in dry_run("launch/local.sh", *flag, NPROC="2")
    assert "--ckpt_path auto" in dry_run("bash", "launch/slurm.sbatch", RECIPE, "--ckpt_path", "auto")


def test_kubernetes_dry_run(tmp_path: Path) -> None:
    """Kubeflow's variables become ours; a process for each GPU."""
    pod = {"PET_NNODES": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500"}
    text = script("kubernetes.yaml", "spec", "trainer", "args")
    write_scripts(tmp_path, python="#!/usr/bin/env bash\necho 3\n")  # the number of GPUs
    pod["PYTHON"] = str(tmp_path / "python")
    shown = dry_run("bash", "-c", text, MAX_RESTARTS="3", LOCAL_ADDR="10.0.0.2", **pod)
    assert "PET_MAX_RESTARTS=3" in shown and "--nnodes 8" in shown and "--nproc_per_node 3" in shown
    assert "--rdzv_endpoint job-node-0-0.job:29500 --rdzv_conf is_host=0 --local_addr 10.0.0.2" in shown
    assert "--output_dir /runs/quickstart --ckpt_path auto" in shown


@pytest.mark.parametrize(
    ("clone", "package", "shown"),
    [
        (True, "", "-m pip install .[huggingface,lightning,liger]"),
        (False, "./a.whl", "-m pip install ./a.whl[huggingface,lightning,liger]"),
        (False, "", "PACKAGE: must name ringflash outside a clone; put the wheel into this folder"),
    ],
)
def test_skypilot_installs_a_clone_or_a_wheel(tmp_path: Path, clone: bool, package: str, shown: str) -> None:
    """In a folder that `ringflash recipes --copy` made there is nothing to install."""
    (tmp_path / ("ringflash" if clone else "recipes")).mkdir()
    write_scripts(tmp_path / "bin", python3="#!/bin/bash\nmkdir -p .venv/bin && ln -s /bin/echo .venv/bin/python")
    setup = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["setup"]
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PACKAGE": package}
    done = subprocess.run(["bash", "-c", setup], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown in done.stdout + done.stderr and (done.returncode == 0) is shown.startswith("-m")


def test_skypilot_dry_run() -> None:
    node = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    known = {**task["envs"], **node, "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "task"}
    shown = run(["bash", "-c", task["run"]], **{**known, "DRY_RUN": "1"})
    assert "--nnodes 2 --rdzv_id task" in shown and "--nproc_per_node 8" in shown
    assert "--rdzv_endpoint 10.0.0.1:29500 --rdzv_conf is_host=0 --local_addr 10.0.0.2" in shown


WORKER = """
import os, signal, sys
assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
for number in (signal.SIGTERM, signal.SIGUSR1):
    os.kill(os.getppid(), number)
os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pause()
"""
AGENT = f"import subprocess, sys; print('status', subprocess.run([sys.executable, '-c', {WORKER!r}]).returncode)"
SUPERVISE = 'set -euo pipefail; export LAUNCHER=$$; source launch/common.sh; supervise ask_workers deaf "$@"'


def test_starting_process_hears_the_signal_later() -> None:
    """The launcher gets it before the process listens; the agent between them, which gets it too, does not die."""
    assert run(["bash", "-c", SUPERVISE, "-", sys.executable, "-c", AGENT], timeout_s=30.0) == "status 0\n"


STOPPED = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} waits: {sys.argv[1:]}", flush=True)
signal.pause()
"""


def test_local_launcher_ends_well_after_a_signal(tmp_path: Path) -> None:
    """In a new folder, where the training is a few lines: torchrun starts two, and ends with status 0."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    folder = tmp_path / "recipes" / "lightning"
    folder.mkdir(parents=True)
    (folder / "quickstart.yaml").touch()
    (folder / "train.py").write_text(STOPPED)
    output = interrupt([tmp_path / "launch/local.sh", "--data.seqlen", "96"], after="rank 1 of 2 waits", NPROC="2")
    flags = ["fit", "--config", "recipes/lightning/quickstart.yaml", "--data.seqlen", "96"]
    assert f"rank 1 of 2 waits: {flags}" in output


def test_run_ends_what_a_launcher_leaves_behind() -> None:
    """A job in a new process group, as supervise starts it, which holds the pipe that `run` reads."""
    with pytest.raises(AssertionError, match="exit status 7:\n$"):
        run(["bash", "-c", "set -m; (sleep 20; echo late) & exit 7"], timeout_s=1.0)


def test_signals_do_not_change_the_status() -> None:
    """Eight launchers get one every 20 ms; waiting for a `sleep`, one in ten took the signal's status for its own.

    bash itself may still die of one while it exits, for half a millisecond.
    """
    command = ["bash", "-c", SUPERVISE, "-", "bash", "-c", "echo ready; sleep 0.2; exit 7"]
    launchers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(8)]
    for launcher in launchers:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"ready\n"
    while any(launcher.poll() is None for launcher in launchers):
        for launcher in launchers:
            launcher.send_signal(signal.SIGUSR1)
        time.sleep(0.02)
    statuses = {launcher.returncode for launcher in launchers}
    assert 7 in statuses and statuses <= {7, -signal.SIGUSR1}


@pytest.mark.parametrize("name", ["INT", "HUP", "QUIT"])
def test_other_signals_reach_the_command(name: str) -> None:
    """A terminal that closes must not leave a training behind that ignores SIGTERM."""
    agent = (
        f"import os, signal, sys, time; signal.signal(signal.SIG{name}, lambda *_: sys.exit(5)); "
        f"os.kill(int(os.environ['LAUNCHER']), signal.SIG{name}); time.sleep(10)"
    )
    with pytest.raises(AssertionError, match="exit status 5:"):
        # A shell passes on no signal that it was started to ignore, as nohup has it.
        run(
            ["env", f"--default-signal={name}", "bash", "-c", SUPERVISE, "-", sys.executable, "-c", agent],
            timeout_s=30.0,
        )


SIGNALLED = """
set -euo pipefail
source launch/common.sh
trap 'received=USR1' USR1
ask() { :; }
echo ready
for _ in {1..%d}; do %s; done
"""
SUPERVISE_SHORTLY = "read() { :; }; supervise ask true 2>/dev/null"  # without half a second for each command


@pytest.mark.parametrize(
    ("times", "what"), [(3000, "ask_workers 999999999"), (600, SUPERVISE_SHORTLY)], ids=["asks", "supervises"]
)
def test_a_signal_breaks_no_supervision(times: int, what: str) -> None:
    """Thousands of signals; the trap of one runs at every place of the loop (bash 5.2 failed in `$(...)` and `<(...)`).

    With a pause between them: bash dies of those that arrive faster than it runs their traps, whatever it does.
    """
    command = ["bash", "-c", SIGNALLED % (times, what)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(5e-4)
    assert (process.returncode, process.stdout.read()) == (0, b"")


EARLY = r"""
source launch/common.sh
set() { builtin set "$@"; if [[ $1 == +m ]]; then kill -USR1 $$; fi; }  # right after the command has started
ask() { kill -TERM "$1"; }
supervise ask sleep 5 || echo "$? $received"
"""


def test_a_signal_right_after_the_start_is_not_lost() -> None:
    """The shell used to set its traps after the start: the signal ended it, and left the command without a parent."""
    assert run(["bash", "-c", EARLY], timeout_s=30.0) == "143 USR1\n"


SRUN = """#!/usr/bin/env bash
trap 'exit "$STATUS"' USR1
kill -"$SIGNAL" "$LAUNCHER"
while true; do sleep 0.1; done
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $2 == hostnames ]]; then
  for i in {1..2000}; do echo "a-host-with-a-long-name-$i"; done
elif [[ $1 == show ]]; then
  echo "   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=$PREEMPTED"
else
  echo "scontrol $*"
fi
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder with an srun that tells the script of a signal, and ends when it is handed on."""
    write_scripts(tmp_path, srun=SRUN, scontrol=SCONTROL)
    return tmp_path


@pytest.mark.parametrize(
    ("signal", "preempted", "requeued"),
    [("USR1", "None", True), ("TERM", "2026-01-01T00:01:00", True), ("TERM", "None", False)],
    ids=["time limit", "preemption", "cancelled"],
)
def test_slurm_requeues_what_it_interrupted(slurm: Path, signal: str, preempted: str, requeued: bool) -> None:
    """And exits 0; a job that its user cancels is not started again."""
    output = batch(slurm, SIGNAL=signal, PREEMPTED=preempted, STATUS="0")
    assert output == ("scontrol requeue 7\n" if requeued else "")


def test_slurm_meets_on_the_first_of_many_hosts(slurm: Path) -> None:
    """The names of two thousand fill a pipe."""
    output = batch(slurm, SLURM_JOB_NODELIST="a[1-2000]", DRY_RUN="1")
    assert "RDZV_ENDPOINT=a-host-with-a-long-name-1:29500" in output


def test_slurm_does_not_requeue_what_failed_to_save(slurm: Path) -> None:
    """The status is handed on."""
    with pytest.raises(AssertionError, match="exit status 3:\n$"):
        batch(slurm, SIGNAL="USR1", PREEMPTED="None", STATUS="3")


def write_checkpoint(path: Path, *, age: int, parts: tuple[str, ...] = (".metadata", "meta.pt")) -> Path:
    """A directory as the strategy writes it, or the beginning of one."""
    path.mkdir(parents=True)
    for part in parts:
        content = b"PK\5\6" + bytes(18) if part == "meta.pt" else b""  # the end of an empty zip file
        (path / part).write_bytes(content)
        os.utime(path / part, ns=(10**18 - age, 10**18 - age))
    return path


def test_newest_checkpoint_of_all_versions_is_found(tmp_path: Path) -> None:
    """The time of completion counts, then the step, if clocks are coarse; one in an older version may be the newest."""
    assert newest_checkpoint(tmp_path / "none") is None
    write_checkpoint(tmp_path / "version_1/checkpoints/epoch=0-step=40.ckpt", age=9)
    write_checkpoint(tmp_path / "version_0/checkpoints/epoch=0-step=9.ckpt", age=5)
    newest = write_checkpoint(tmp_path / "version_0/interrupted-step=10.ckpt", age=5)
    assert newest_checkpoint(tmp_path) == newest


def test_incomplete_checkpoints_are_passed_over(tmp_path: Path) -> None:
    """A crash leaves one without its list of parts, without the trainer's state, or with the beginning of it.

    DeepSpeed writes the name of its latest one before all ranks have written their parts.
    """
    complete = write_checkpoint(tmp_path / "step=1.ckpt", age=9)
    write_checkpoint(tmp_path / "step=2.ckpt", age=3, parts=("meta.pt",))
    write_checkpoint(tmp_path / "step=3.ckpt", age=2, parts=(".metadata",))
    cut = write_checkpoint(tmp_path / "step=4.ckpt", age=1)
    (cut / "meta.pt").write_bytes(b"PK\3\4 and no more")
    of_deepspeed = write_checkpoint(tmp_path / "step=5.ckpt", age=99, parts=("latest",))
    assert newest_checkpoint(tmp_path) == complete
    (of_deepspeed / COMPLETE).touch()
    assert newest_checkpoint(tmp_path) == of_deepspeed
