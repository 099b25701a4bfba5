"""Start processes as a user would, and end all of them when they take too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(command: Sequence[str | Path], *, timeout_s: float = 150.0, **environment: str) -> str:
    """Output of a command run in the repository's root on the CPU, stdout and stderr together.

    Args:
        environment: variables beside the caller's.
    Raises:
        AssertionError: exit status other than 0, or no end in time; with the output.
    """
    here = {"PYTHON": sys.executable, "PYTHONPATH": ".:kernels", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, **here, **environment}
    with subprocess.Popen(
        [str(x) for x in command], cwd=ROOT, env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"no end within {timeout_s} s:\n{output[-4000:]}") from None
    assert process.returncode == 0, f"exit status {process.returncode}:\n{output[-8000:]}"
    return output


def write_text(folder: Path, num_files: int = 60) -> Path:
    """A folder of small texts with the same content every time, some of them held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(num_files):
        lines = (f"line {j} of text {i} says {(i * 7919 + j * 104729) % 9973}\n" for j in range(1 + i % 7))
        (folder / f"{i}.txt").write_text("".join(lines))
    return folder
