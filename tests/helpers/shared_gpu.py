"""Ranks that share GPUs, for machines with fewer GPUs than a test has ranks: what they compute, not how fast.

NCCL and torch's symmetric memory refuse two ranks of one host on one GPU. To NCCL each rank is therefore a host of its
own, and messages pass through sockets; symmetric memory has a variable that allows it, and our own check of places is
left out. The processes take turns on the GPU.
"""

import math
import os

import torch

from ringflash.comm.transport import copy_engine


def num_gpus(num_ranks: int) -> int:
    """Number of GPUs in use: one a rank, or as many as have equally many ranks each."""
    return math.gcd(num_ranks, torch.cuda.device_count()) if is_shared(num_ranks) else num_ranks


def visible(num_ranks: int) -> str:
    """The CUDA_VISIBLE_DEVICES of new processes of this test: those in use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus(num_ranks)))))


def is_shared(num_ranks: int) -> bool:
    """Return whether this machine has fewer GPUs than ranks."""
    return torch.cuda.device_count() < num_ranks


def use_gpu(rank: int, num_ranks: int) -> torch.device:
    """The GPU of this rank, which is then the current one; before the process joins a group.

    Args:
        rank: among all ranks of the machine.
    """
    if is_shared(num_ranks):
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        copy_engine._check_locations = lambda places: None
    device = torch.device("cuda", rank % num_gpus(num_ranks))
    torch.cuda.set_device(device)
    return device
