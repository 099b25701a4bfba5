"""Machine, versions, command and commit of a measurement: the header of every result file."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def describe(*packages: str) -> dict[str, str]:
    """Return commit, command, machine and versions, including those of further packages."""
    cuda = torch.cuda.is_available()
    return {
        "commit": _commit(),
        "command": shlex.join([_script(), *sys.argv[1:]]),
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if cuda else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "none",
        "cudnn": str(torch.backends.cudnn.version()) if cuda else "none",
        **{package: _version(package) for package in ("triton", *packages)},
    }


def _script() -> str:
    """Return the path of the running script in a clone."""
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _commit() -> str:
    """Return the commit, "-dirty" if files differ from it; RINGFLASH_COMMIT names it for sources without history."""
    if "RINGFLASH_COMMIT" in os.environ:
        return os.environ["RINGFLASH_COMMIT"]
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
