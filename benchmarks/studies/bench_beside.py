"""Times of ring attention and of an FSDP2-like all-gather on another communicator, in turn and concurrently.

    torchrun --nproc-per-node 2 benchmarks/studies/bench_beside.py [--transport nccl [--comm_sms 8]]
    torchrun --nproc-per-node 2 benchmarks/studies/bench_beside.py --toy                  (CPU, gloo: only tests the script)

The time of both together is at best the longer of the two, and at worst, without any overlap, their sum.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

import ringflash  # noqa: E402
from benchmarks.bench_ring import ROWS, TOY, join, run, timed  # noqa: E402
from benchmarks.ring_contenders import Setting, ring_over  # noqa: E402

CALLS, GATHERS, ROUNDS = 6, 4, 5


def main() -> None:
    """Time both passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="", help="default gloo on CPUs, copy_engine on GPUs")
    parser.add_argument("--comm_sms", type=int, default=0, help="SMs that the forward leaves free, over nccl")
    parser.add_argument("--toy", action="store_true", help="small, on the CPU")
    options = parser.parse_args()
    if options.comm_sms and options.transport != "nccl":
        parser.error(
            f"--comm_sms must be given with --transport nccl only, got {options.transport!r}; others take no SMs."
        )
    device = join(options.toy)
    assert dist.group.WORLD is not None
    row = TOY[0] if options.toy else next(row for row in ROWS if "8192 tokens" in str(row))
    setting = Setting(row, dist.group.WORLD, device, torch.float32 if options.toy else torch.bfloat16)
    entry = ring_over(options.transport or ("gloo" if options.toy else "copy_engine"), setting)
    ringflash.set_comm_sms(options.comm_sms)
    other = dist.new_group(list(range(dist.get_world_size())))
    shard = torch.randn(1 << (10 if options.toy else 26), device=device).bfloat16()
    whole = torch.empty(dist.get_world_size() * shard.numel(), device=device, dtype=shard.dtype)

    def gathers() -> list[dist.Work]:
        works = [dist.all_gather_into_tensor(whole, shard, group=other, async_op=True) for _ in range(GATHERS)]
        return [work for work in works if work is not None]

    for name, backward in (("forward", False), ("forward + backward", True)):

        def calls(backward: bool = backward) -> None:
            for _ in range(CALLS):
                run(entry, backward)

        def both(calls: Callable[[], None] = calls) -> None:
            works = gathers()
            calls()
            _wait(works)

        ms = [median_ms(what, setting) for what in (calls, lambda: _wait(gathers()), both)]
        if dist.get_rank() == 0:
            apart = f"{CALLS} calls {ms[0]:.2f} ms, {GATHERS} all-gathers of {shard.nbytes >> 20} MiB {ms[1]:.2f} ms"
            print(f"{row}, {name}: {apart}, together {ms[2]:.2f} ms", flush=True)
    dist.destroy_process_group()


def median_ms(what: Callable[[], object], setting: Setting) -> float:
    """Return the median over rounds of the slowest rank's time, after an untimed run."""
    what()
    return statistics.median(timed(what, setting)[0] for _ in range(ROUNDS))


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


if __name__ == "__main__":
    main()
