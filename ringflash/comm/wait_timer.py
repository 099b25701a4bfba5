"""How long a rank waits for K/V and gradients between the kernels of its rings. Measured only where it is asked for:

with measured() as waits:
    step()
waits.seconds()
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ringflash.comm.cuda_graphs import capturing


class Waits:
    """Time between kernels, of all rings while it is the one that is measured."""

    def __init__(self) -> None:
        self._host_seconds = 0.0
        self._on_device: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def seconds(self) -> float:
        """Of this rank so far; waits for the device.

        On a device, from the end of what came before to when the K/V were there, the host's own lateness included.
        """
        if self._on_device:
            torch.cuda.synchronize()
        return self._host_seconds + sum(begin.elapsed_time(end) for begin, end in self._on_device) / 1e3

    @contextmanager
    def add(self, device: torch.device) -> Iterator[None]:
        """Count what happens inside."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._host_seconds += time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._on_device.append((begin, end))


_measured: Waits | None = None


@contextmanager
def measured() -> Iterator[Waits]:
    """Count the waits of every ring of this process meanwhile; one at a time."""
    global _measured
    if _measured is not None:
        raise RuntimeError("waits must be measured by one at a time, got a second; leave the first context.")
    _measured = Waits()
    try:
        yield _measured
    finally:
        _measured = None


def measuring() -> bool:
    """Whether somebody does: what runs side by side then takes turns, or a wait could not be told from work."""
    return _measured is not None


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    """What a ring does here is no kernel of its own. Costs nothing worth counting while nobody measures."""
    if _measured is None or capturing(device):
        yield
    else:
        with _measured.add(device):
            yield
