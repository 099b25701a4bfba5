"""Copies handed to the driver in one call: its arguments, and what happens where it does not take them. CPU, no driver.

That the driver copies right, also while kernels run, is tested in tests/multi_gpu.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringflash.comm.transport import copies
from ringflash.comm.transport.areas import Incoming
from ringflash.comm.transport.copies import Copies
from ringflash.comm.transport.copy_engine import CopyEngine

CPU = torch.device("cpu")
STREAM: Any = SimpleNamespace(cuda_stream=7)


class Driver:
    """cuMemcpyBatchAsync over host memory. `problem`: the error that it returns, after `made` copies."""

    def __init__(self) -> None:
        self.problem, self.made = 0, 1 << 30
        self.calls: list[tuple[int, int]] = []  # copies and stream

    def __call__(self, *args: Any) -> int:
        targets, sources, sizes, count, attributes, firsts, kinds, stream = args
        assert (kinds, firsts.value) == (1, 0)
        assert (attributes.source_access_order, attributes.flags, ctypes.sizeof(attributes)) == (1, 1, 24)
        self.calls.append((count, stream))
        for target, source, size in [*zip(targets, sources, sizes, strict=True)][: self.made]:
            ctypes.memmove(target, source, size)
        return self.problem


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(copies, "_driver_batch", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: STREAM)
    return driver


def pieces(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Targets and sources of several sizes, in larger tensors."""
    target, source = torch.zeros(100, 3, dtype=torch.bfloat16), torch.randn(100, 3).bfloat16()
    return [(target[10 * i : 10 * i + i + 1], source[5 * i : 5 * i + i + 1]) for i in range(count)]


def test_one_call_for_all(driver: Driver) -> None:
    pairs = pieces(7)
    copy = Copies(pairs, CPU)
    for _ in range(2):
        copy(STREAM)
        assert all(torch.equal(target, source) for target, source in pairs)
        pairs[0][0].zero_()
    assert driver.calls == [(7, 7), (7, 7)]


@pytest.mark.parametrize("count, captured", [(0, False), (1, False), (3, True)])
def test_few_or_captured_copies_are_torchs(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, count: int, captured: bool
) -> None:
    monkeypatch.setattr(copies, "capturing", lambda device: captured)
    pairs = pieces(count)
    Copies(pairs, CPU)(STREAM)
    assert all(torch.equal(target, source) for target, source in pairs) and not driver.calls


def test_an_older_driver_gets_torchs_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    copies._driver_batch.cache_clear()
    pairs = pieces(3)
    Copies(pairs, CPU)(STREAM)
    copies._driver_batch.cache_clear()
    assert all(torch.equal(target, source) for target, source in pairs)


def test_what_the_driver_refuses_torch_copies(driver: Driver) -> None:
    """It may have made some of them by then."""
    driver.problem, pairs = 801, pieces(3)
    driver.made = 1
    with pytest.warns(UserWarning, match="one by one, .* returned error 801 for 3 copies"):
        Copies(pairs, CPU)(STREAM)
    assert all(torch.equal(target, source) for target, source in pairs) and driver.calls == [(3, 7)]


def test_copies_within_a_gpu_follow_those_of_peers(driver: Driver) -> None:
    """They wait for SMs, which a kernel may keep to its end."""
    memory = CopyEngine.__new__(CopyEngine)
    memory.rank, memory._device, memory.known = 1, CPU, None
    pairs = pieces(7)
    incoming = [
        Incoming(target, owner, source) for (target, source), owner in zip(pairs, (1, 2, 1, 0, 1, 3, 0), strict=True)
    ]
    memory.make_transfer(incoming, [], "K/V")()
    assert [count for count, _ in driver.calls] == [4, 3]
    assert all(torch.equal(target, source) for target, source in pairs)
