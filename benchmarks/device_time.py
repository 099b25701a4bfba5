"""Breakdown of device time by kind of kernel, from a profiler trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

MESSAGE, WAIT = r"ncclDevKernel|Memcpy PtoP", r"barrier_kernel|_signal_kernel"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MARK = "spin_kernel"  # of torch.cuda._sleep, which separates the backward from the optimizer
IDLE = "idle"

# The first pattern that matches a name gives its kind.
_KINDS = {
    "communication": re.compile(rf"nccl|{MESSAGE}|{WAIT}"),
    "attention": re.compile(
        r"^forward_(kernel|fp8)|^backward_|^quantise_(rows|records)|flash_(fwd|bwd)|flex_attention"
        r"|^_(preprocess|postprocess|publish|collect|statistics|query_operands|key_operands|rotate_back)$"
    ),
    "linear": re.compile(r"nvjet|gemm|gemv|cutlass|cublas|splitK", re.IGNORECASE),
    "host copies": re.compile(r"Memcpy (DtoH|HtoD)"),
}
# Concurrent time counts for the first of these kinds; communication therefore gets only its exposed time.
PRECEDENCE = ("attention", "linear", "optimizer", "other", "host copies", "communication")


class Span(NamedTuple):
    """Begin and end of a kernel, in microseconds, and its kind."""

    kind: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """Return the kind of a kernel or copy by its name; "other" includes norms, rotary embedding and loss."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "other")


def device_events(events: list[dict]) -> list[dict]:
    """Return the kernels, copies and fills of a Chrome trace, in order of time."""
    found = [event for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE]
    return sorted(found, key=lambda event: float(event["ts"]))


def span_of(event: dict) -> tuple[float, float]:
    """Return the begin and end of a trace event."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def step_spans(events: list[dict]) -> list[Span]:
    """Return the kernels of a training step; all after `MARK` except communication belong to the optimizer."""
    found, kinds = device_events(events), PRECEDENCE
    marked = next((float(event["ts"]) for event in found if MARK in event["name"]), float("inf"))
    spans = []
    for event in found:
        kind, (begin, end) = kind_of(event["name"]), span_of(event)
        late = begin >= marked and kinds.index(kind) < kinds.index("communication")
        spans.append(Span("optimizer" if late else kind, begin, end))
    return spans


def shared_out(spans: Iterable[Span]) -> dict[str, float]:
    """Return the microseconds of each kind; every instant counts only for the first running kind in `PRECEDENCE`.

    Example: attention from 0 to 4 and communication from 2 to 6 take 4 and 2. The sum is the time the device is busy.
    """
    edges = sorted(edge for span in spans for edge in ((span.begin, 1, span.kind), (span.end, -1, span.kind)))
    total, running, last = dict.fromkeys(PRECEDENCE, 0.0), Counter[str](), 0.0
    for moment, change, kind in edges:
        first = next((kind for kind in PRECEDENCE if running[kind]), None)
        if first is not None:
            total[first] += moment - last
        running[kind] += change
        last = moment
    return total


def parts_of_step(spans: Iterable[Span], seconds: float) -> dict[str, float]:
    """Return the seconds of a step by kind and of idle time, which add up to the step.

    Args:
        seconds: wall-clock time of the whole step.
    """
    parts = {kind: us / 1e6 for kind, us in shared_out(spans).items()}
    return {**parts, IDLE: seconds - sum(parts.values())}


def longest_kernels(events: list[dict], count: int) -> list[dict[str, object]]:
    """Return the kernel names with the longest total time and their kinds, for comparison with the parts of a step."""
    seconds, calls = Counter[str](), Counter[str]()
    for event in device_events(events):
        seconds[event["name"]] += float(event["dur"]) / 1e6
        calls[event["name"]] += 1
    return [
        {"kernel": name[:100], "kind": kind_of(name), "seconds": round(total, 4), "calls": calls[name]}
        for name, total in seconds.most_common(count)
    ]
