"""Probes: a kernel against fp64, and a ring exchange over each transport.

Each runs as a separate process:

python -m ringflash.commands.doctor.probe kernel <device>
torchrun --nproc_per_node 2 -m ringflash.commands.doctor.probe ring [<ranks of a host>]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringflash
from ringflash.comm.transport import PointToPoint, open_transport
from ringflash.comm.transport.copy_engine import NoCopyEngine
from ringflash.testing.ring import measure_ring

_TOKENS, _HEADS, _KV_HEADS, _HEAD_DIM = 1024, 8, 2, 128
_EXCHANGES = 5


def kernel(device: torch.device) -> dict[str, Any]:
    """Return the name of the kernel that impl="auto" chooses, and its error over budget, forward and backward."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spent = measure_ring(None, device, dtype, (_TOKENS, _HEADS, _KV_HEADS, _HEAD_DIM), causal=True)
    q, k = (torch.empty(1, _TOKENS, heads, _HEAD_DIM, device=device, dtype=dtype) for heads in (_HEADS, _KV_HEADS))
    return {"impl": ringflash.explain(q, k, k, group=None).impl, "spent": max(spent.values())}


def ring(stride: int = 1, megabytes: float = 64.0) -> dict[str, Any]:
    """Return by transport the GB/s at which each rank receives its neighbour's values, and if these are correct.

    All ranks exchange at the same time. On GPUs, `missing` says why the copy engine is not available, if it is not.

    Args:
        stride: the neighbour is the rank this far away: 1, or the number of ranks of a host for one on the next host.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    numbers = int(megabytes * 1e6 / 4)
    sent = _numbers(dist.get_rank(), numbers, device)
    neighbour = _numbers((dist.get_rank() - stride) % dist.get_world_size(), numbers, device)
    ways: dict[str, Callable[[Tensor], None]] = {"nccl" if cuda else "gloo": _messages(sent, stride)}
    missing = ""
    if cuda:
        try:
            ways["copy_engine"] = _pulls(sent, stride)
        except NoCopyEngine as problem:
            missing = str(problem)
    return {"exchanges": {name: _timed(way, neighbour) for name, way in ways.items()}, "missing": missing}


def _numbers(rank: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device, dtype=torch.int32) * (rank + 1)


def _messages(sent: Tensor, stride: int) -> Callable[[Tensor], None]:
    """Return an exchange that sends to one neighbour and receives from the other."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def exchange(got: Tensor) -> None:
        there, here = (rank + stride) % size, (rank - stride) % size
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, there), dist.P2POp(dist.irecv, got, here)]):
            work.wait()

    return exchange


def _pulls(sent: Tensor, stride: int) -> Callable[[Tensor], None]:
    """Return an exchange that copies from the neighbour's memory, like the transport "copy_engine"."""
    assert dist.group.WORLD is not None
    memory = open_transport("copy_engine", dist.group.WORLD)
    assert not isinstance(memory, PointToPoint)
    memory.reserve("kv", sent.numel() * sent.itemsize)
    own = memory.view("kv", dist.get_rank(), tuple(sent.shape), sent.dtype)
    assert own is not None
    own.copy_(sent)
    memory.barrier(0)
    source = (dist.get_rank() - stride) % dist.get_world_size()

    def exchange(got: Tensor) -> None:
        def copy() -> None:
            there = memory.view("kv", source, tuple(got.shape), got.dtype)
            assert there is not None
            got.copy_(there)

        memory.wait(memory.run_on_stream("pull", copy, [memory.mark()]))

    return exchange


def _timed(exchange: Callable[[Tensor], None], expected: Tensor) -> dict[str, Any]:
    """Time an exchange several times on all ranks; return speeds in GB/s, and whether every rank got `expected`."""
    got, seconds = torch.zeros_like(expected), []
    for _ in range(_EXCHANGES):
        dist.barrier()
        start = time.perf_counter()
        exchange(got)
        if got.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    speed = got.numel() * got.itemsize / min(seconds[1:]) / 1e9
    mine = torch.tensor([speed, float(torch.equal(got, expected))], device=got.device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    speeds, right = torch.stack(found).T.tolist()
    return {"gbytes_per_second": min(speeds), "each": [round(speed, 3) for speed in speeds], "right": min(right) == 1.0}


def main(arguments: list[str]) -> None:
    """Run a probe; the first rank prints its result as the last line."""
    if arguments[0] == "kernel":
        print(json.dumps(kernel(torch.device(arguments[1]))))
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank(0) % torch.cuda.device_count())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    found = ring(*map(int, arguments[1:]))
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
