"""Breakdown of a ring's time by section, from a profiler trace of one forward and backward.

    torchrun --nproc-per-node 8 benchmarks/trace_ring.py --folder traces
    torchrun --nproc-per-node 2 benchmarks/trace_ring.py --toy --folder traces     (CPU, gloo)

Every rank writes traces/rank<r>.json for chrome://tracing or Perfetto; rank 0 prints its sections. Devices spin until
all hosts have issued two calls of both passes, and the second call is shown: as in a training step, the host is then
ahead and links are awake. Kernel time is that of a section's range; two sections may overlap. The gap before a section
is exposed communication while a message, a copy or a wait for one runs in it, otherwise idle time. traces/timeline.json
is the timeline of rank 1's device, for the figure in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from benchmarks.bench_ring import ROWS, TOY, join, run  # noqa: E402
from benchmarks.device_time import MARK, MESSAGE, ON_DEVICE, WAIT, device_events, span_of  # noqa: E402
from benchmarks.environment import describe, result_text  # noqa: E402
from benchmarks.ring_contenders import Built, Setting, ring_over  # noqa: E402

_SPIN_CYCLES = 150_000_000  # about 80 ms, since a profiler makes the host several times slower
_SECTION = re.compile(r"ringflash::(forward|backward)_section(\d+)$")
_COMMUNICATION = re.compile(rf"{MESSAGE}|{WAIT}")
_KINDS = {
    "forward": re.compile(r"^forward_kernel"),
    "backward": re.compile(r"^backward_"),
    "message": re.compile(MESSAGE),
    "wait": re.compile(WAIT),
}


class Section(NamedTuple):
    """Microseconds of one section; the gap is between its kernel and that of the previous section in the same pass."""

    direction: str
    number: int
    kernel_us: float
    exposed_us: float
    idle_us: float


def main() -> None:
    """Trace a row of the benchmark after a warm-up call, which allocates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the traces")
    parser.add_argument("--transport", default="", help="default gloo on CPUs, nccl on GPUs")
    parser.add_argument("--rows", default="", help="the first row in whose name this pattern is found")
    parser.add_argument("--toy", action="store_true", help="small, on the CPU")
    options = parser.parse_args()
    device = join(options.toy)
    assert dist.group.WORLD is not None
    dtype = torch.float32 if options.toy else torch.bfloat16
    rows = [row for row in (TOY if options.toy else ROWS) if re.search(options.rows, str(row))]
    if not rows:
        parser.error(
            f"--rows must be found in the name of a row, got {options.rows!r}; bench_ring.py prints the names."
        )
    row = rows[0]
    setting = Setting(row, dist.group.WORLD, device, dtype)
    entry = ring_over(options.transport or ("gloo" if options.toy else "nccl"), setting)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"rank{dist.get_rank()}.json"
    trace(entry, path)
    events = after_mark(json.loads(path.read_text())["traceEvents"])
    if dist.get_rank() == 0:
        print(table(sections(events)))
    if dist.get_rank() == 1:
        result = {"environment": describe(), "row": str(row), "spans": timeline(events)}
        (options.folder / "timeline.json").write_text(result_text(result))
    dist.destroy_process_group()


def trace(entry: Built, path: Path) -> None:
    """Write a Chrome trace of one forward and backward."""
    run(entry, True)
    dist.barrier()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(_SPIN_CYCLES)
            run(entry, True)
            torch.cuda._sleep(1)  # the mark
        run(entry, True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def after_mark(events: list[dict]) -> list[dict]:
    """Return a trace without the device events before and during the spin; host events are kept."""
    ends = [span_of(event)[1] for event in device_events(events) if MARK in event["name"]]
    begin = max(ends, default=float("-inf"))
    on_device = (*ON_DEVICE, "gpu_user_annotation")
    return [event for event in events if event.get("cat") not in on_device or float(event["ts"]) >= begin]


def sections(events: list[dict]) -> list[Section]:
    """Return the sections of a trace in order of time, from the GPU's ranges if there are any, else from the host's."""
    timed = [event for event in events if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") == "gpu_user_annotation" for event in timed)
    ranges = [event for event in timed if event.get("cat") == ("gpu_user_annotation" if on_gpu else "user_annotation")]
    others = [event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy")] if on_gpu else ranges
    busy = _united([span_of(event) for event in others if _COMMUNICATION.search(event["name"])])
    found, last = [], {}
    for event in sorted(ranges, key=lambda event: event["ts"]):
        match = _SECTION.search(event["name"])
        if match is None:
            continue
        direction, (begin, end) = match[1], span_of(event)
        gap = (last.get(direction, begin), begin)
        exposed = sum(max(0.0, min(gap[1], stop) - max(gap[0], start)) for start, stop in busy)
        found.append(Section(direction, int(match[2]), end - begin, exposed, max(0.0, gap[1] - gap[0]) - exposed))
        last[direction] = end
    return found


def timeline(events: list[dict]) -> list[dict[str, object]]:
    """Return the device's kernels, messages, waits and the rest in order, in microseconds since the first one."""
    timed = device_events(events)
    begin = float(timed[0]["ts"]) if timed else 0.0
    spans = []
    for event in timed:
        name = event["name"]
        kind = next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "other")
        spans.append(
            {"kind": kind, "start_us": round(float(event["ts"]) - begin, 1), "us": round(float(event["dur"]), 1)}
        )
    return spans


def table(found: list[Section]) -> str:
    """Return a table with one line per section."""
    lines = [f"{'section':>12} {'kernel us':>11} {'exposed us':>11} {'idle us':>11}"]
    lines += [
        f"{x.direction:>9} {x.number:>2} {x.kernel_us:11.1f} {x.exposed_us:11.1f} {x.idle_us:11.1f}" for x in found
    ]
    return "\n".join(lines)


def _united(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping intervals."""
    united: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if united and begin <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((begin, end))
    return united


if __name__ == "__main__":
    main()
