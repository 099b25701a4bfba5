"""Copies handed to the driver in one call: its arguments, and what happens where it does not take them. CPU, no driver.

That the driver copies right, also while kernels run, is tested in tests/multi_gpu.
"""

import ctypes
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringflash.comm.command_issuer import compiled
from ringflash.comm.driver import CommandList
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
    memory.rank, memory._device, memory.entered = 1, CPU, STREAM
    pairs = pieces(7)
    incoming = [
        Incoming(target, owner, source) for (target, source), owner in zip(pairs, (1, 2, 1, 0, 1, 3, 0), strict=True)
    ]
    memory.make_transfer(incoming, [], "K/V")()
    assert [count for count, _ in driver.calls] == [4, 3]
    assert all(torch.equal(target, source) for target, source in pairs)


@pytest.mark.parametrize("problem", [0, 1])
def test_commands_ask_for_the_same(driver: Driver, problem: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of commands copies in one call, or one by one after the driver has refused that."""
    driver.problem, pairs, started = problem, pieces(3), list[tuple[int, ...]]()
    copy, number = Copies(pairs, CPU), ctypes.c_uint64
    with warnings.catch_warnings(action="ignore"):
        copy(STREAM)
    for target, _ in pairs:
        target.zero_()

    def start_all(targets: int, sources: int, sizes: int, count: int, *others: int) -> int:
        started.append((count, *others[2:]))
        arrays = [(number * count).from_address(address) for address in (targets, sources, sizes)]
        return max(start_one(*each, 9) for each in zip(*arrays, strict=True))

    def start_one(target: int, source: int, size: int, stream: int) -> int:
        ctypes.memmove(target, source, size)
        started.append((size, stream))
        return 0

    functions = [ctypes.CFUNCTYPE(ctypes.c_int, *[number] * count)(f) for count, f in ((8, start_all), (4, start_one))]
    monkeypatch.setattr(copies, "_driver_batch", lambda: functions[0])
    table = (ctypes.c_void_p * 6)(0, 0, 0, ctypes.cast(functions[1], ctypes.c_void_p).value)
    known: Any = SimpleNamespace(functions=table, issue=compiled(), check=lambda error: None)
    CommandList(known, copy.commands(9)).issue([], [], 0)
    assert all(torch.equal(target, source) for target, source in pairs)
    assert started == [(3, 1, 9)] * (not problem) + [(source.nbytes, 9) for _, source in pairs]
