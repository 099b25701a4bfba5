"""Host time of a call of ring_attention: how long Python takes to issue a forward, and a forward with its backward.

    python benchmarks/host_time.py --out host.json
    torchrun --nproc-per-node 2 benchmarks/host_time.py --out host.json

The tensors are so small that the GPU waits for its host, and it is idle when a call begins. With one GPU,
`--share-gpus` lets both ranks use it: the host does the same work.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import ringflash
from benchmarks.environment import describe, result_text

TOKENS = 256  # of a rank
CALLS = 200


def main() -> None:
    """Time both and write or print the medians of the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the results; default the screen")
    parser.add_argument("--share-gpus", action="store_true", help="more ranks than GPUs")
    options = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank)
    if options.share_gpus:
        from tests.helpers.shared_gpu import use_gpu

        device = use_gpu(rank, size)
    torch.cuda.set_device(device)
    group = None
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=None if options.share_gpus else device)
        group = dist.group.WORLD
    found = measure(group, device)
    if rank == 0:
        content = result_text({**describe(), "ranks": size, "microseconds": found})
        if options.out is None:
            print(content, end="")
        else:
            options.out.write_text(content)
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


def measure(group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
    """Return medians in µs, for 32 heads of 128 and 8 KV heads in bf16, causal."""
    make = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(1, TOKENS, heads, 128, **make) for heads in (32, 8, 8))  # type: ignore[arg-type]
    dout = torch.randn_like(q)

    def forward() -> None:
        with torch.no_grad():
            ringflash.ring_attention(q, k, v, group=group)

    def both() -> None:
        out = ringflash.ring_attention(q, k, v, group=group)
        torch.autograd.grad(out, (q, k, v), dout)  # type: ignore[arg-type]

    found = {}
    for threads in (False, True):
        with torch.autograd.set_multithreading_enabled(threads):
            suffix = ", autograd in its own thread" if threads else ""
            found["forward" + suffix] = _median(forward, device)
            found["forward and backward" + suffix] = _median(both, device)
    return {name: value for name, value in found.items() if name != "forward, autograd in its own thread"}


def _median(call: Callable[[], None], device: torch.device) -> float:
    times = []
    for i in range(CALLS + 20):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        call()
        if i >= 20:
            times.append(1e6 * (time.perf_counter() - begun))
    return round(statistics.median(times), 1)


if __name__ == "__main__":
    main()
