"""Timer of the waits for K/V and gradients between the kernels of ring calls.

    with measured() as waits:
        step()
    waits.seconds()

It runs only inside `measured()`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ringflash.comm.cuda_graphs import capturing


class Waits:
    """Time between kernels, summed over all ring calls while `measured()` is active."""

    def __init__(self) -> None:
        self._host_seconds = 0.0
        self._on_device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def seconds(self) -> float:
        """Return the waiting time of this rank so far; synchronises the device.

        On a device, a wait lasts from the end of the previous work until the K/V have arrived. It includes any delay of
        the host.
        """
        if self._on_device:
            torch.cuda.synchronize()
        return self._host_seconds + sum(begin.elapsed_time(end) for begin, end in self._on_device) / 1e3

    @contextmanager
    def add(self, device: torch.device) -> Iterator[None]:
        """Count the enclosed code. On the host, waits may be nested; the time is then counted once."""
        if device.type != "cuda":
            before, start = self._host_seconds, time.perf_counter()
            yield
            self._host_seconds = before + time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._on_device.append((begin, end))


_measured: Waits | None = None


@contextmanager
def measured() -> Iterator[Waits]:
    """Count the waits of every ring call of this process inside the context; contexts must not be nested."""
    global _measured
    if _measured is not None:
        raise RuntimeError("waits must be measured by one context at a time, got a second; exit the first one.")
    _measured = Waits()
    try:
        yield _measured
    finally:
        _measured = None


def measuring() -> bool:
    """Return True while waits are being measured.

    Sections then run one at a time. Otherwise waiting and computing would overlap, and could not be told apart.
    """
    return _measured is not None


_NOTHING = nullcontext()


def waiting(device: torch.device) -> AbstractContextManager[None]:
    """Count the enclosed code as waiting, not compute. Negligible cost unless `measured()` is active."""
    return _NOTHING if _measured is None or capturing(device) else _measured.add(device)
