"""Start processes as a user would, and end all of them when they take too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(command: Sequence[str | Path], *, timeout_s: float = 150.0, **environment: str) -> str:
    """Output of a command run in the repository's root on the CPU, stdout and stderr together.

    Args:
        environment: variables beside the caller's.
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


def _start(command: Sequence[str | Path], environment: dict[str, str]) -> subprocess.Popen[str]:
    here = {"PYTHON": sys.executable, "PYTHONPATH": ".:kernels", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [str(x) for x in command], cwd=ROOT, env={**os.environ, **here, **environment}, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@contextmanager
def _limit(process: subprocess.Popen[str], timeout_s: float) -> Iterator[None]:
    """Kill the process and all that it started when time is up: whoever reads its output then sees the end."""
    timer = threading.Timer(timeout_s, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def write_text(folder: Path, num_files: int = 60) -> Path:
    """A folder of small texts with the same content every time, some of them held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(num_files):
        lines = (f"line {j} of text {i} says {(i * 7919 + j * 104729) % 9973}\n" for j in range(1 + i % 7))
        (folder / f"{i}.txt").write_text("".join(lines))
    return folder
