"""What a device's time went into, from a profiler's trace: kernels by kind, and time shared out among them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

MESSAGE, WAIT = r"ncclDevKernel|Memcpy PtoP", r"barrier_kernel|_signal_kernel"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MARK = "spin_kernel"  # of torch.cuda._sleep: the backward lies before it, the optimizer after
IDLE = "idle"

# The first pattern in a name is its kind.
_KINDS = {
    "communication": re.compile(rf"nccl|{MESSAGE}|{WAIT}"),
    "attention": re.compile(r"^forward_kernel|^backward_|^_(preprocess|postprocess|publish|collect)$|flash_(fwd|bwd)"),
    "linear": re.compile(r"nvjet|gemm|gemv|cutlass|cublas|splitK", re.IGNORECASE),
    "host copies": re.compile(r"Memcpy (DtoH|HtoD)"),
}
# Of what runs at once the first one counts: what is left for communication, nothing hides.
PRECEDENCE = ("attention", "linear", "optimizer", "other", "host copies", "communication")


class Span(NamedTuple):
    """What ran from one moment to another, in microseconds."""

    kind: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """What a kernel or copy of this name is for; "other" are norms, rotary embedding, loss and all else."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "other")


def device_events(events: list[dict]) -> list[dict]:
    """Kernels, copies and fills of a Chrome trace, in order of time."""
    found = [event for event in events if event.get("ph") == "X" and event.get("cat") in ON_DEVICE]
    return sorted(found, key=lambda event: float(event["ts"]))


def span_of(event: dict) -> tuple[float, float]:
    """Begin and end of a trace's event."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def step_spans(events: list[dict]) -> list[Span]:
    """The kernels of a training step; those after `MARK` are the optimizer's, but for communication."""
    found, kinds = device_events(events), PRECEDENCE
    marked = next((float(event["ts"]) for event in found if MARK in event["name"]), float("inf"))
    spans = []
    for event in found:
        kind, (begin, end) = kind_of(event["name"]), span_of(event)
        late = begin >= marked and kinds.index(kind) < kinds.index("communication")
        spans.append(Span("optimizer" if late else kind, begin, end))
    return spans


def shared_out(spans: Iterable[Span], precedence: tuple[str, ...] = PRECEDENCE) -> dict[str, float]:
    """Microseconds of each kind: of every instant the first kind of those that run. Together: when anything runs.

    Example: attention from 0 to 4 and communication from 2 to 6 are 4 and 2.
    """
    edges = sorted(edge for span in spans for edge in ((span.begin, 1, span.kind), (span.end, -1, span.kind)))
    total, running, last = dict.fromkeys(precedence, 0.0), Counter[str](), 0.0
    for moment, change, kind in edges:
        first = next((kind for kind in precedence if running[kind]), None)
        if first is not None:
            total[first] += moment - last
        running[kind] += change
        last = moment
    return total


def parts_of_step(spans: Iterable[Span], seconds: float) -> dict[str, float]:
    """Seconds of a step by kind, and those in which nothing ran: they add up to the step.

    Args:
        seconds: of the whole step, by the clock.
    """
    parts = {kind: us / 1e6 for kind, us in shared_out(spans).items()}
    return {**parts, IDLE: seconds - sum(parts.values())}


def longest_kernels(events: list[dict], count: int) -> list[dict[str, object]]:
    """The names with the most time in all, each with its kind: to be compared with the parts of a step."""
    seconds, calls = Counter[str](), Counter[str]()
    for event in device_events(events):
        seconds[event["name"]] += float(event["dur"]) / 1e6
        calls[event["name"]] += 1
    return [
        {"kernel": name[:100], "kind": kind_of(name), "seconds": round(total, 4), "calls": calls[name]}
        for name, total in seconds.most_common(count)
    ]
