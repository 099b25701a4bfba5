"""Attention over several devices: ours by transport beside its peers, as a share of what the devices could do.

    torchrun --nproc-per-node 8 benchmarks/bench_ring.py [--rows causal] [--rounds 7] [--json results.json]
    torchrun --nproc-per-node 2 benchmarks/bench_ring.py --toy            (CPU, gloo)

100% is the faster kernel on the whole sequence on one device, divided by their number, with all devices loaded at
once. All contenders of a row run in one process, in random order; a sample follows a run of the same contender.
A sample's time is that of the slowest rank; figures are medians. Windows and documents have an ideal of their own
mask, so their share is of the visible work. Memory: what the transport holds after the row's call.
Run on CPUs so far, which shows no speed; the branches for GPUs have not run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

import ringflash  # noqa: E402
from benchmarks.environment import describe  # noqa: E402
from benchmarks.ring_contenders import CONTENDERS, IDEALS, Built, Row, Setting  # noqa: E402

K = 1024
TOY = tuple(Row(64, 4, 2, 16, kind) for kind in ("causal", "full", "window", "documents"))
ROWS = (
    *(Row(length * K, 32, 8, 128, "causal") for length in (4, 8, 32, 128)),
    *(Row(length * K, 32, 8, 128, "full") for length in (8, 32)),
    *(Row(8 * K, *shape, "causal") for shape in ((32, 8, 64), (64, 8, 128), (32, 32, 128))),
    *(Row(128 * K, 32, 8, 128, kind) for kind in ("window", "documents")),
)


def main() -> None:
    """Time the rows and write them."""
    options = arguments()
    device = join(options.toy)
    assert dist.group.WORLD is not None
    rows = [row for row in (TOY if options.toy else ROWS) if options.rows in str(row)]
    results = []
    for row in rows:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        results += bench(Setting(row, dist.group.WORLD, device, dtype), options.rounds)
        if dist.get_rank() == 0:
            print("\n".join(map(line, results[-2:])), flush=True)
    if options.json and dist.get_rank() == 0:
        about = describe("flash-attn-4", "ring-flash-attn")
        head = {"environment": about, "ranks": dist.get_world_size(), "rounds": options.rounds}
        options.json.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=7, help="samples of a contender")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--toy", action="store_true", help="small rows on the CPU: shows that it runs, and no speed")
    return parser.parse_args()


def join(toy: bool) -> torch.device:
    """This rank's device, once all ranks are there."""
    if toy:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def bench(setting: Setting, rounds: int) -> list[dict]:
    """One result forward, and one forward and backward."""
    built, left_out = {}, {}
    for name, build in (IDEALS | CONTENDERS).items():
        entry = build(setting)
        if isinstance(entry, str):
            left_out[name] = entry
        else:
            built[name] = entry
    held = {name: transport_bytes(built[name]) for name in built if name.startswith("ringflash, ")}
    return [
        {
            "row": str(setting.row),
            "pass": direction,
            **shares(measure(built, setting, rounds, backward), setting.group.size()),
            "transport_bytes": held,
            "left_out": left_out,
        }
        for direction, backward in (("forward", False), ("forward + backward", True))
    ]


def transport_bytes(entry: Built) -> int:
    """What one forward and backward leaves allocated for communication."""
    ringflash.release_buffers()
    run(entry, True)
    return ringflash.buffer_bytes()


def run(entry: Built, backward: bool) -> None:
    """One call."""
    if not backward:
        with torch.no_grad():
            entry.call(*entry.inputs)
        return
    out = entry.call(*entry.inputs)
    torch.autograd.grad(out, entry.inputs, out.detach())


def measure(built: dict[str, Built], setting: Setting, rounds: int, backward: bool) -> dict[str, float]:
    """Median milliseconds of every contender, in an order that all ranks draw alike."""
    samples: dict[str, list[float]] = {name: [] for name in built}
    order = random.Random(str(setting.row))
    for _ in range(rounds):
        for name in order.sample(list(built), len(built)):
            run(built[name], backward)
            samples[name].append(sample_ms(built[name], setting, backward))
    return {name: statistics.median(values) for name, values in samples.items()}


def sample_ms(entry: Built, setting: Setting, backward: bool) -> float:
    """Time of the slowest rank."""
    wait = torch.cuda.synchronize if setting.device.type == "cuda" else lambda: None
    wait()
    dist.barrier(setting.group)
    wait()
    begin = time.perf_counter()
    run(entry, backward)
    wait()
    taken = torch.tensor((time.perf_counter() - begin) * 1e3, dtype=torch.float64, device=setting.device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=setting.group)
    return taken.item()


def shares(ms: dict[str, float], num_devices: int) -> dict:
    """Times, the ideal, and what each contender reaches of it."""
    ideal = min(ms[name] for name in IDEALS if name in ms) / num_devices
    return {
        "ms": ms,
        "ideal_ms": ideal,
        "percent": {name: 100 * ideal / taken for name, taken in ms.items() if name not in IDEALS},
    }


def line(result: dict) -> str:
    """A result in words."""
    reached = ", ".join(f"{name} {percent:.1f}%" for name, percent in result["percent"].items())
    return f"{result['row']}, {result['pass']}: ideal {result['ideal_ms']:.2f} ms; {reached}"


if __name__ == "__main__":
    main()
