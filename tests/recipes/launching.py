"""Start commands as a user would, and end all of their processes when they take too long."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.ranks import ROOT, environment_of, run_ranks

# Parts of a checkpoint of two ranks.
PARTS = {".metadata", "meta.pt", "__0_0.distcp", "__1_0.distcp", "checksums.json", "written_at"}


class Run(NamedTuple):
    """Folders of texts and of results."""

    texts: str
    out: Path


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


def _start(command: Sequence[str | Path], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(x) for x in command], cwd=ROOT, env=environment_of(**environment), text=True,
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


def write_scripts(folder: Path, **scripts: str) -> None:
    """Commands that stand in for others, for a PATH that begins with the folder."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def write_text(folder: Path, num_files: int = 60) -> Path:
    """A folder of small texts with the same content every time, some of them held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(num_files):
        lines = (f"line {j} of text {i} says {(i * 7919 + j * 104729) % 9973}\n" for j in range(1 + i % 7))
        (folder / f"{i}.txt").write_text("".join(lines))
    return folder
