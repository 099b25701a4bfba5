"""Machine, versions, command and commit of a measurement: the header of every result file."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def result_text(result: dict[str, Any]) -> str:
    """Return the text of a result file, with a line for each row, so that a diff shows the rows that changed."""
    parts = []
    for key, value in result.items():
        text = json.dumps(value)
        if isinstance(value, list | dict) and value:
            pairs = [("", x) for x in value] if isinstance(value, list) else value.items()
            items = (f"{name and json.dumps(name) + ': '}{json.dumps(x)}" for name, x in pairs)
            text = f"{text[0]}\n  " + ",\n  ".join(items) + f"\n {text[-1]}"
        parts.append(f"\n {json.dumps(key)}: {text}")
    return "{" + ",".join(parts) + "\n}\n"


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
