"""What is tried rather than read: kernels against fp64, and a ring exchange. Each runs as a process of its own:

python -m ringflash.doctor.probe kernel <device>
torchrun --nproc_per_node 2 -m ringflash.doctor.probe ring
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import ringflash
from ringflash.verify import dense, tolerance

_TOKENS, _HEADS, _KV_HEADS, _HEAD_DIM = 1024, 8, 2, 128
_EXCHANGES = 5


def kernel(device: torch.device) -> dict[str, Any]:
    """Error over budget of the kernel that impl="auto" takes, forward and backward, and its name."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, _TOKENS, heads, _HEAD_DIM, generator=generator).to(device, dtype)
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS, _HEADS)
    )
    want, base = (
        dense.attention(*(x.to(kind) for x in (q, k, v, dout)), causal=True) for kind in (torch.float64, dtype)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ringflash.ring_attention(*leaves, group=None)
    assert isinstance(out, torch.Tensor)
    got = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True))}
    spent = tolerance.measure(got, {x: want[x] for x in got}, {x: base[x] for x in got}, num_chunks=2)
    return {"impl": ringflash.explain(q, k, v, group=None).impl, "spent": max(max(r.maximum, r.mean) for r in spent)}


def ring(megabytes: float = 64.0) -> dict[str, Any]:
    """GB/s at which each rank reads its neighbour's K/V in a ring, and the transport's name."""
    group = dist.group.WORLD
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    tokens = 2 * max(1, int(megabytes * 1e6 / (2 * _HEAD_DIM * dtype.itemsize * 2 * 2)))
    kv = torch.randn(1, tokens, 1, _HEAD_DIM, device=device, dtype=dtype)
    transport = ringflash.explain(kv[:, :2], kv[:, :2], kv[:, :2], group=group).transport
    sent, got = torch.stack((kv, kv)), torch.empty(2, *kv.shape, device=device, dtype=dtype)
    rank, size = dist.get_rank(), dist.get_world_size()
    seconds = []
    for _ in range(_EXCHANGES):
        dist.barrier()
        start = time.perf_counter()
        operations = [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"transport": transport, "gbytes_per_second": sent.numel() * sent.itemsize / min(seconds[1:]) / 1e9}


def main(arguments: list[str]) -> None:
    """Print a probe's result as the last line, on the first rank."""
    if arguments[0] == "kernel":
        print(json.dumps(kernel(torch.device(arguments[1]))))
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank(0))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    found = ring()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
