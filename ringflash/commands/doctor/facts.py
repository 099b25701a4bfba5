"""Facts of one rank about its machine, as JSON values; `judge` evaluates them."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ringflash.comm.group import this_host
from ringflash_kernels.api import hopper_environment_error

PACKAGES = (
    "ringflash", "torch", "triton", "lightning", "pytorch-lightning", "deepspeed", "transformers", "accelerate", "trl",
    "liger-kernel", "megatron-core", "torchtitan",
)  # fmt: skip
VARIABLES = ("NCCL_", "RINGFLASH_", "TORCH_", "CUDA_", "PYTORCH_", "OMP_NUM_THREADS", "WORLD_SIZE", "RANK")
_TIMEOUT_S = 20


def collect() -> dict[str, Any]:
    """Return all facts of this rank."""
    host = this_host()
    return {
        "host": host.name,
        "boot": host.boot,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "driver": _driver(),
        "gpus": _gpus(),
        "peers": _peers(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)},
        "kernel_environment": hopper_environment_error(),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version of the driver, even if torch cannot use it; None if nvidia-smi does not say it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip().partition("\n")[0] or None


def _gpus() -> list[dict[str, Any]]:
    properties = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [{"name": p.name, "capability": [p.major, p.minor], "memory_bytes": p.total_memory} for p in properties]


def _peers() -> list[list[bool]]:
    """Return the matrix of peer access: True if GPU i can read the memory of GPU j."""
    count = torch.cuda.device_count()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
