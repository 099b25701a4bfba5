"""Speed of attention over several devices: ours by transport, and its peers, as a percentage of the ideal.

    torchrun --nproc-per-node 8 benchmarks/bench_ring.py [--rows causal] [--rounds 7] [--json results.json]
    torchrun --nproc-per-node 2 benchmarks/bench_ring.py --toy            (CPU, gloo)

The ideal (100%) is the time of the fastest kernel for the whole sequence on one device, divided by the number of
devices, with all devices busy concurrently. With `--ideal heads` each device computes the whole sequence for its share
of the heads: the same work per device, but a fraction of the time, since the whole would take minutes.

All contenders of a row run in one process, in random order. A sample follows an untimed run of the same contender. It
is a series of calls of at least --sample-ms, as in the layers of a model: all forwards, then all backwards in one pass
of autograd. Its time is that of the slowest rank. Figures are medians. The ideal of windows and documents has the same
mask, so percentages refer to visible work. Host: time to enqueue a call. Memory: buffers of the transport after a call.
With `--impl hopper_fp8` (toy: `reference_fp8`) ours and the ideal are in FP8, and peers with kernels of their own are
left out.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

import ringflash  # noqa: E402
from benchmarks.environment import describe, result_text  # noqa: E402
from benchmarks.ring_contenders import CONTENDERS, DOCUMENTS, IDEALS, IDEALS_BY_HEADS, PROBES, Built, Row, Setting  # noqa: E402

K = 1024
TOY = (
    *(Row(64, 4, 2, 64, kind) for kind in ("causal", "full", "window")),
    *(Row(256, 4, 2, 64, kind) for kind in DOCUMENTS),
)
ROWS = (
    *(Row(length * K, 32, 8, 128, "causal") for length in (4, 8, 16, 32, 64, 128)),
    *(Row(length * K, 32, 8, 128, "full") for length in (8, 32)),
    *(Row(8 * K, *shape, "causal") for shape in ((32, 8, 64), (64, 8, 128))),
    *(Row(length * K, 32, 32, 128, "causal") for length in (4, 8, 16, 32)),
    *(Row(128 * K, 32, 8, 128, kind) for kind in ("window", *DOCUMENTS)),
)


def main() -> None:
    """Time the rows and write them."""
    options = arguments()
    device = join(options.toy)
    assert dist.group.WORLD is not None
    rows = [row for row in (TOY if options.toy else ROWS) if is_asked_for(row, options.rows)]
    sample_ms = options.sample_ms or (1.0 if options.toy else 30.0)
    results = []
    for row in rows:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        every = CONTENDERS | (PROBES if options.probes else {})
        ideals = IDEALS_BY_HEADS if options.ideal == "heads" else IDEALS
        entries = ideals | {name: build for name, build in every.items() if re.search(options.contenders, name)}
        setting = Setting(row, dist.group.WORLD, device, dtype, options.impl)
        results += bench(setting, entries, options.rounds, sample_ms)
        if dist.get_rank() == 0:
            for result in results[-2:]:
                print(("toy, no speed: " if options.toy else "") + line(result), flush=True)
            if options.json:  # after every row, so that an interrupted run keeps its results
                about = describe("flash-attn-4", "ring-flash-attn")
                head = {"environment": about, "ranks": dist.get_world_size(), "rounds": options.rounds}
                head |= {"toy": True} if options.toy else {}
                options.json.write_text(result_text({**head, "results": results}))
    dist.destroy_process_group()


def is_asked_for(row: Row, pattern: str) -> bool:
    """Return True if any result of the row has a requested name; all results of a row are timed together."""
    return any(re.search(pattern, f"{row}, {direction}") for direction in ("forward", "forward + backward"))


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows in whose name this pattern is found")
    parser.add_argument("--contenders", default="", help="only contenders in whose name this pattern is found")
    parser.add_argument("--ideal", choices=("whole", "heads"), default="whole", help="what 100%% is, see above")
    parser.add_argument("--impl", default="auto", help="kernel of ours and of the ideal, see above (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="samples of a contender")
    parser.add_argument("--sample-ms", type=float, help="length of a sample; default 30, of a toy 1")
    parser.add_argument("--probes", action="store_true", help="also time rings without messages or copies")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--toy", action="store_true", help="small rows on the CPU: shows that it runs, and no speed")
    return parser.parse_args()


def join(toy: bool) -> torch.device:
    """Join the process group and return this rank's device."""
    if toy:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def bench(
    setting: Setting, entries: dict[str, Callable[[Setting], Built | str]], rounds: int, sample_ms: float
) -> list[dict]:
    """Return the results of a row: forward, and forward with backward."""
    built, left_out = {}, {}
    for name, build in entries.items():
        entry = build(setting)
        if isinstance(entry, str):
            left_out[name] = entry
        elif problem := trial(entry, setting):
            left_out[name] = problem
        else:
            built[name] = entry
    if not built.keys() & (IDEALS.keys() | IDEALS_BY_HEADS.keys()):
        raise ValueError(f"a kernel on one device must be there as the ideal, got {left_out}; use --ideal whole.")
    held = {name: transport_bytes(built[name]) for name in built if name.startswith("ringflash, ")}
    results = []
    for direction, backward in (("forward", False), ("forward + backward", True)):
        ms, host_us = measure(built, setting, rounds, sample_ms, backward)
        about = {"row": setting.name, "pass": direction, "transport_bytes": held, "left_out": left_out}
        results.append({**about, **shares(ms, setting.group.size()), "host_us": host_us})
    return results


def trial(entry: Built, setting: Setting) -> str:
    """Make the first call, which compiles and allocates; return the text of an error on any rank."""
    problem = ""
    try:
        run(entry, True)
    except Exception as error:  # a peer that does not fit this torch must not end the run
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    problems: list[str] = [""] * setting.group.size()
    dist.all_gather_object(problems, problem, group=setting.group)
    return next((text for text in problems if text), "")


def transport_bytes(entry: Built) -> int:
    """Return the bytes that one forward and backward leaves allocated for communication."""
    ringflash.release_buffers()
    run(entry, True)
    return ringflash.buffer_bytes()


def run(entry: Built, backward: bool, calls: int = 1) -> None:
    """Make calls like the layers of a model: all forwards in sequence, then all backwards in one pass of autograd."""
    with entry.around():
        if not backward:
            with torch.no_grad():
                for _ in range(calls):
                    entry.call(*entry.inputs)
            return
        # Separate leaves for each call, so that gradients are not accumulated over the calls.
        leaves = [tuple(x.detach().requires_grad_() for x in entry.inputs) for _ in range(calls)]
        outs = [entry.call(*inputs) for inputs in leaves]
        torch.autograd.grad(outs, [x for inputs in leaves for x in inputs], [out.detach() for out in outs])


def capture(entry: Built, backward: bool) -> Callable[[int], None]:
    """Capture calls in a CUDA graph, and return the function that replays it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(entry, backward)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        run(entry, backward)

    def replay(calls: int) -> None:
        for _ in range(calls):
            graph.replay()

    return replay


def measure(
    built: dict[str, Built], setting: Setting, rounds: int, sample_ms: float, backward: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return median milliseconds and host microseconds of a call by contender, timed in one order on all ranks."""
    runs: dict[str, Callable[[int], None]] = {
        name: capture(entry, backward) if entry.captured else partial(run, entry, backward)
        for name, entry in built.items()
    }
    calls = {name: max(1, round(sample_ms / timed(partial(call, 1), setting)[0])) for name, call in runs.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in built}
    order = random.Random(str(setting.row))
    for _ in range(rounds):
        for name in order.sample(list(built), len(built)):
            train = partial(runs[name], calls[name])
            train()
            ms, host_us = timed(train, setting)
            samples[name].append((ms / calls[name], host_us / calls[name]))
    medians = {
        name: [statistics.median(column) for column in zip(*both, strict=True)] for name, both in samples.items()
    }
    return {name: both[0] for name, both in medians.items()}, {name: both[1] for name, both in medians.items()}


def timed(work: Callable[[], object], setting: Setting) -> tuple[float, float]:
    """Return the slowest rank's milliseconds until the device has finished and microseconds until the host has."""
    wait = torch.cuda.synchronize if setting.device.type == "cuda" else lambda: None
    wait()
    dist.barrier(setting.group)
    wait()
    begin = time.perf_counter()
    work()
    enqueued = time.perf_counter()
    wait()
    both = torch.tensor([time.perf_counter() - begin, enqueued - begin], dtype=torch.float64, device=setting.device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=setting.group)
    return both[0].item() * 1e3, both[1].item() * 1e6


def shares(ms: dict[str, float], num_devices: int) -> dict:
    """Return the times, the ideal, and the percentage of it that each contender reaches."""
    divisors = dict.fromkeys(IDEALS, num_devices) | dict.fromkeys(IDEALS_BY_HEADS, 1)
    ideal = min(ms[name] / divisor for name, divisor in divisors.items() if name in ms)
    return {
        "ms": ms,
        "ideal_ms": ideal,
        "percent": {name: 100 * ideal / taken for name, taken in ms.items() if name not in divisors},
    }


def line(result: dict) -> str:
    """Return the text of a result."""
    reached = ", ".join(f"{name} {percent:.1f}%" for name, percent in result["percent"].items())
    return f"{result['row']}, {result['pass']}: ideal {result['ideal_ms']:.2f} ms; {reached}"


if __name__ == "__main__":
    main()
