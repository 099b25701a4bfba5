"""The distributed cases on GPUs: NCCL, one process a GPU, low precision by the tolerance policy. Two GPUs or more.

The cases are those of the gloo tier, with chunks long enough that a kernel has several tiles; a few more run at a
length where most tiles are full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.helpers import refusals, ring_check
from tests.helpers.cases import Case, all_cases
from tests.helpers.pool import Context, Pool
from tests.helpers.tolerance import Ratio, assert_within
from tests.multi_gpu.conftest import Setup, Table

pytestmark = pytest.mark.multi_gpu

CHUNK = 160  # tokens; no multiple of a kernel's tile
LONG_CHUNK = 2048

LONG = [
    Case(head_dim=128),
    Case(head_dim=128, causal=False),
    Case(head_dim=128, window="left", documents="mixed"),
    Case(head_dim=64, layout="contiguous", documents="crossing"),
]


def suited(case: Case, impl: str) -> Case:
    """The case with the next head_dim that the kernel has."""
    sizes = (64, 96, 128, 192, 256) if impl in ("hopper", "fa4") else range(8, 257, 8)
    return replace(case, head_dim=next(size for size in sizes if size >= case.head_dim))


def measure(ctx: Context, transport: str, *args: Any) -> list[Ratio]:
    """`ring_check.measure` over one transport, not over what auto would take."""
    with mock.patch("ringflash.ops.choose_transport", lambda *_: transport):
        return ring_check.measure(ctx, *args)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(pool: Pool, setup: Setup, table: Table, case: Case) -> None:
    case = suited(case, setup.impl)
    spent = pool.run(measure, setup.backend, case, CHUNK, setup.dtype, setup.impl)
    assert_within(table.add(str(case), spent))


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long(pool: Pool, setup: Setup, table: Table, case: Case) -> None:
    spent = pool.run(measure, setup.backend, case, LONG_CHUNK, setup.dtype, setup.impl)
    assert_within(table.add(f"long-{case}", spent))


@pytest.mark.parametrize("case", [Case(), Case(documents="mixed", window="both", causal=False)], ids=str)
def test_deterministic(pool: Pool, setup: Setup, case: Case) -> None:
    assert all(pool.run(ring_check.repeats_exactly, suited(case, setup.impl), CHUNK, setup.dtype, setup.impl))


@pytest.mark.parametrize("name", refusals.REFUSALS)
def test_refusal(pool: Pool, name: str) -> None:
    refusals.assert_refused(name, pool.run(refusals.attempt, name, "always", timeout_s=60))


@pytest.mark.parametrize("name", [name for name in refusals.REFUSALS if name != "ranks_differ_after_both_calls"])
def test_refusal_by_default(pool: Pool, name: str) -> None:
    """Without 'always', NCCL ranks compare calls that differ from their last: a rank that repeats its own does not."""
    refusals.assert_refused(name, pool.run(refusals.attempt, name, "changed", timeout_s=60))
