"""Start processes as a user would, or ranks without a launcher, and end all of them when they take too long."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.helpers.forked import forked
from tests.helpers.nan_memory import fill_new_memory

ROOT = Path(__file__).parents[2]
PARTS = {
    ".metadata",
    "meta.pt",
    "__0_0.distcp",
    "__1_0.distcp",
    "checksums.json",
    "written_at",
}  # of a checkpoint of two ranks


def run(command: Sequence[str | Path], *, timeout_s: float = 150.0, **environment: str) -> str:
    """Output of a command run in the repository's root on the CPU, stdout and stderr together.

    Args:
        environment: variables added to the caller's.
    Raises:
        AssertionError: exit status other than 0, or no end in time; with the output.
    """
    with _start(command, environment) as process, _limit(process, timeout_s):
        output, _ = process.communicate()
    assert process.returncode == 0, f"exit status {process.returncode}:\n{output[-8000:]}"
    return output


def interrupt(command: Sequence[str | Path], *, after: str, timeout_s: float = 150.0, **environment: str) -> str:
    """Output of a command that is sent SIGTERM once it has printed `after`, and then exits with status 0."""
    printed = []
    with _start(command, environment) as process, _limit(process, timeout_s):
        for line in process.stdout or ():
            printed.append(line)
            if after in line:
                process.terminate()
                break
        rest, _ = process.communicate()
    output = "".join([*printed, rest])
    assert after in output and process.returncode == 0, f"exit status {process.returncode}:\n{output[-8000:]}"
    return output


class Ranks:
    """`torchrun --nproc_per_node <num_ranks> <program> <arguments>`, started at once, without the launcher.

    The ranks have the variables that torchrun would set.

    Args:
        program: a script, or the name of a module.
        ranks_per_host: as if from so many ranks on there were another host; default all on one.
        processes: how they begin; default forked with the imports already done (tests/helpers/forked.py), on the CPU.
        environment: variables added to the caller's.
    """

    def __init__(
        self, program: str | Path, *arguments: str | Path, num_ranks: int, ranks_per_host: int | None = None,
        processes: BaseContext | None = None, **environment: str,
    ) -> None:  # fmt: skip
        per_host = ranks_per_host or num_ranks
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # lives here, as in torchrun
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name, "output")
        self._output.touch()
        rendezvous = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(per_host),
        }  # fmt: skip
        variables = _environment({**rendezvous, **environment})
        places = (
            {**variables, "RANK": str(i), "LOCAL_RANK": str(i % per_host), "GROUP_RANK": str(i // per_host)}
            for i in range(num_ranks)
        )
        argv = [str(x) for x in (program, *arguments)]
        processes = processes or forked()
        self._ranks = [processes.Process(target=_be_rank, args=(self._output, argv, place)) for place in places]  # type: ignore[attr-defined]
        try:
            for rank in self._ranks:
                rank.start()
        except BaseException:
            self.close()
            raise

    def finish(self, timeout_s: float) -> str:
        """Wait for the ranks and return what they printed.

        Raises:
            AssertionError: a rank failed, which ends the others, or no end in time; with the output.
        """
        try:
            left, deadline = {rank.sentinel: rank for rank in self._ranks}, time.monotonic() + timeout_s
            while left and not any(rank.exitcode for rank in self._ranks) and time.monotonic() < deadline:
                for sentinel in wait(list(left), max(0.0, deadline - time.monotonic())):
                    left.pop(sentinel).join()  # type: ignore[call-overload]
        finally:  # one failed, or time is up
            self.close()
        assert not any(self.statuses()), f"exit statuses {self.statuses()}:\n{self.output()[-8000:]}"
        return self.output()

    def statuses(self) -> list[int | None]:
        """Exit statuses by rank; None of those that still run."""
        return [rank.exitcode for rank in self._ranks]

    def output(self) -> str:
        """Return what the ranks have printed by now."""
        return self._output.read_text(errors="replace")

    def close(self) -> None:
        """End what still runs."""
        for rank in self._ranks:
            if rank.is_alive():
                rank.kill()
                rank.join()


def run_ranks(
    program: str | Path, *arguments: str | Path, num_ranks: int, timeout_s: float = 150.0, **environment: str
) -> str:
    """Start `Ranks` and return what they print."""
    return Ranks(program, *arguments, num_ranks=num_ranks, **environment).finish(timeout_s)


Parts = Mapping[int, Sequence[Callable[[Any], None]]]  # by the number of ranks that make them


def launch_parts(
    tests: Parts, program: str, folder: Path, factory: pytest.TempPathFactory, *arguments: Path, **environment: str
) -> dict[int, list[dict[str, str]]]:
    """Errors of each rank, by part, of a launch for each number of ranks, one after the other."""
    found = {}
    for num_ranks in tests:
        out = factory.mktemp("found")
        run_ranks(program, folder, out, *arguments, num_ranks=num_ranks, **environment)
        found[num_ranks] = read_results(out)
    return found


def each_part(tests: Parts) -> pytest.MarkDecorator:
    """Run a test of (num_ranks, part) for each part, by the number of ranks that make it."""
    made = [(num_ranks, part) for num_ranks, parts in tests.items() for part in parts]
    return pytest.mark.parametrize(("num_ranks", "part"), made, ids=lambda x: getattr(x, "__name__", x))


def make_parts(out: Path, parts: Sequence[Callable[[Any], None]], run: Any) -> None:
    """Make parts of a test on this rank, one after the other; <out>/<rank>.json has what each of them raised, or ""."""
    found = {}
    for part in parts:
        try:
            part(run)
            found[part.__name__] = ""
        except Exception:
            found[part.__name__] = traceback.format_exc()
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def read_results(out: Path) -> list[dict[str, Any]]:
    """Results that each rank has written to <out>/<rank>.json."""
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(len(list(out.glob("*.json"))))]


def assert_made(ranks: Sequence[dict[str, str]], part: Callable[[Any], None]) -> None:
    """Assert that a part raised nothing on any rank."""
    problems = [f"rank {rank}: {found[part.__name__]}" for rank, found in enumerate(ranks) if found[part.__name__]]
    assert not problems, "\n".join(problems)


def error_of(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """The message of the refusal of a call."""
    try:
        call(*args, **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "not refused"


def train(recipe: str | Path, *arguments: str | Path, num_ranks: int, **environment: str) -> str:
    """Run the command to which the launchers hand their arguments, as `run_ranks`."""
    command = ("recipes.lightning.train", "fit", "--config", recipe, *arguments)
    return run_ranks(*command, num_ranks=num_ranks, **environment)  # type: ignore[arg-type]


def _be_rank(output: Path, argv: list[str], environment: dict[str, str]) -> None:
    """One rank, in the forked process: `python` of a script or `python -m` of a module."""
    fill_new_memory()
    gc.freeze()  # collections, of which DeepSpeed's ZeRO 3 asks for many, pass over what was imported before
    with output.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.path += environment["PYTHONPATH"].split(":")
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = argv
    if argv[0].endswith(".py"):
        runpy.run_path(argv[0], run_name="__main__")
    else:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _environment(more: dict[str, str]) -> dict[str, str]:
    here = {"PYTHON": sys.executable, "PYTHONPATH": ".:kernels", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **here, **more}


def _start(command: Sequence[str | Path], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(x) for x in command], cwd=ROOT, env=_environment(environment), text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@contextmanager
def _limit(process: subprocess.Popen[str], timeout_s: float) -> Iterator[None]:
    """Kill the process and all that it started when time is up: whoever reads its output then sees the end."""
    timer = threading.Timer(timeout_s, _kill_session, (process.pid,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill_session(session: int) -> None:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                os.kill(int(stat.parent.name), signal.SIGKILL)


def write_text(folder: Path, num_files: int = 60) -> Path:
    """A folder of small texts with the same content every time, some of them held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(num_files):
        lines = (f"line {j} of text {i} says {(i * 7919 + j * 104729) % 9973}\n" for j in range(1 + i % 7))
        (folder / f"{i}.txt").write_text("".join(lines))
    return folder
