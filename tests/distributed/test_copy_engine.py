"""The protocol of the transport "copy_engine" over shared memory and slow threads. 2 to 4 CPU processes, fp64.

Everything but the memory itself is the code that GPUs run; the copies, streams and signals of CUDA are not tested
here. Cases run many to a message, in one process after another length and another number of ranks, since that is what
buffers have to survive. Controls leave out one thing each and must be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

import ringflash
from ringflash import peer_exchange, transport
from ringflash.transport.buffers import buffer
from tests.helpers import ring_check
from tests.helpers.cases import Case, mask_cases, single_cases
from tests.helpers.peer_memory import SharedMemory, copy_engine
from tests.helpers.pool import Context, Pool

CASES = [*mask_cases()[::5], *single_cases()[::4]]  # all masks run over gloo; 5 has no factor of the grid but one
LENGTHS = (6, 3, 9, 1, 5)  # tokens a chunk, in turn


def check_all(ctx: Context, pushed: bool) -> int:
    """Every case against the dense oracle; the transport's bytes at the end."""
    with copy_engine(pushed=pushed):
        for number, case in enumerate(CASES):
            ring_check.check(ctx, case, LENGTHS[number % len(LENGTHS)])
        return ringflash.buffer_bytes()


@pytest.mark.parametrize("pushed", [True, False], ids=["pushed", "staged"])
@pytest.mark.parametrize("size", [2, 4, 3])
def test_equals_dense(pool: Pool, size: int, pushed: bool) -> None:
    assert min(pool.run(check_all, pushed, size=size)) > 0


def repeats(ctx: Context) -> bool:
    pushed = mock.patch.object(peer_exchange.PushedGradients, "__init__", side_effect=AssertionError("pushed"))
    with copy_engine(pushed=True), pushed:
        return all(ring_check.repeats_exactly(ctx, Case(causal=False), 6, "float32", "reference") for _ in range(5))


def test_deterministic_mode_is_staged_and_repeats(pool: Pool) -> None:
    assert all(pool.run(repeats, size=4))


def sizes(ctx: Context, pushed: bool) -> list[int]:
    """Bytes of all buffers: nothing, after a call, after a shorter one, after their release, after a call again."""
    with copy_engine(pushed=pushed):
        ringflash.release_buffers()
        found = [ringflash.buffer_bytes()]
        for chunk in (8, 3):
            ring_check.check(ctx, Case(), chunk)
            found.append(ringflash.buffer_bytes())
        ringflash.release_buffers()
        found.append(ringflash.buffer_bytes())
        ring_check.check(ctx, Case(), 8)
        return [*found, ringflash.buffer_bytes()]


@pytest.mark.parametrize("pushed, gradients", [(True, 1), (False, 4)], ids=["pushed", "staged"])
def test_buffers_are_kept_counted_and_released(pool: Pool, pushed: bool, gradients: int) -> None:
    """Three K/V, own and two that arrive; one or four gradients; fp64 here for both."""
    case, chunk = Case(), 8
    kv = 2 * (2 * chunk) * case.num_kv_heads * case.head_dim * 8
    for found in pool.run(sizes, pushed, size=3):
        assert found == [0, (3 + gradients) * kv, (3 + gradients) * kv, 0, (3 + gradients) * kv]


def no_barrier(self: SharedMemory) -> None:
    """Nobody waits for anybody."""


def one_buffer(self: peer_exchange.PeerExchange, index: int) -> torch.Tensor:
    """The next hop's K/V arrive where this hop's are read."""
    return buffer("kv.0", self.shape, self.k.dtype, self.k.device)


def no_wait(self: object) -> None:
    """Whatever runs beside, nobody waits for it."""


def no_signal_awaited(self: peer_exchange.StagedGradients, theirs: torch.Tensor, reader: int) -> None:
    """The owner adds what lies in the stage, full or not."""
    self.total.add_(theirs)
    self.memory.wait_signal(reader, peer_exchange.READY)
    self.memory.signal(reader, peer_exchange.FREE)


def early_copy(self: SharedMemory, lane: str, work: Callable[[], None]) -> mock.Mock:
    """What is posted happens at once: the earliest moment that the protocol allows."""
    work()
    return mock.Mock()


MEMORY = "tests.helpers.peer_memory"
PLANTS: dict[str, tuple[dict[str, Callable], bool]] = {
    "nothing": ({}, True),
    "nothing, staged": ({}, False),
    "barriers": ({f"{MEMORY}.SharedMemory.barrier": no_barrier}, True),
    "second buffer": (
        {
            "ringflash.peer_exchange.PeerExchange._incoming": one_buffer,
            f"{MEMORY}.SharedMemory.beside": early_copy,
        },
        True,
    ),
    "arrival": ({f"{MEMORY}.Later.wait": no_wait}, True),
    "ready": ({"ringflash.peer_exchange.StagedGradients._add": no_signal_awaited}, False),
}


def verdict(ctx: Context, plant: str) -> str:
    """What ten calls say with one thing left out. A rank that finds a mistake goes on: the others wait for it."""
    replacements, pushed = PLANTS[plant]
    found = "passed"
    transport._open.clear()
    with copy_engine(pushed=pushed), ExitStack() as patches:
        for target, replacement in replacements.items():
            patches.enter_context(mock.patch(target, replacement))
        for _ in range(10):
            try:
                ring_check.check(ctx, Case(causal=False))
            except AssertionError as error:
                found = str(error)
    transport._open.clear()
    return found


@pytest.mark.parametrize("plant", [name for name in PLANTS if not name.startswith("nothing")])
def test_what_is_left_out_is_noticed(pool: Pool, plant: str) -> None:
    verdicts = pool.run(verdict, plant, size=4)
    assert any("errors must stay within their budget" in text for text in verdicts), verdicts


@pytest.mark.parametrize("plant", ["nothing", "nothing, staged"])
def test_the_control_of_the_controls(pool: Pool, plant: str) -> None:
    assert pool.run(verdict, plant, size=4) == ["passed"] * 4


def test_refused_on_the_cpu(pool: Pool) -> None:
    assert all("got 'copy_engine'; use 'auto'" in text for text in pool.run(refusal, size=2))


def refusal(ctx: Context) -> str:
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(NotImplementedError) as error:
        ringflash.ring_attention(q, q, q, group=ctx.group, transport="copy_engine")
    return str(error.value)
