"""The distributed cases on GPUs: NCCL, one process a GPU, low precision by the tolerance policy. Two GPUs or more.

The cases are those of the gloo tier, with chunks long enough that a kernel has several tiles; a few more run at a
length where most tiles are full. Some have many sections, which no case is long enough for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringflash.attention import schedule, sections
from ringflash.attention.sections import Sections
from ringflash.comm.transport import choose_transport
from ringflash.testing.tolerance import Ratio, assert_within
from tests.helpers import refusals, ring_check
from tests.helpers.cases import Case, all_cases
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup, Table

pytestmark = pytest.mark.multi_gpu

CHUNK = 160  # tokens, of a striped layout 10; no multiple of a kernel's tile
LONG_CHUNK = 2048

LONG = [
    Case(head_dim=128),
    Case(head_dim=128, causal=False),
    Case(head_dim=128, window="left", documents="mixed"),
    Case(head_dim=64, layout="contiguous", documents="crossing"),
    Case(head_dim=128, layout="striped", documents="mixed"),
    Case(head_dim=128, layout="documents", documents="divisible", window="left"),
    Case(head_dim=128, layout="balanced", documents="deep"),
    Case(head_dim=64, documents="rollouts", window="left"),
]
HEAD_DIMS = [
    replace(case, head_dim=size)
    for size in (96, 192, 256)
    for case in (
        Case(),
        Case(causal=False, layout="contiguous"),
        Case(window="left", documents="mixed", layout="striped"),
        Case(num_heads=6, num_kv_heads=2, documents="crossing"),
    )
]


def suited(case: Case, impl: str) -> Case:
    """The case with the next head_dim that the kernel has."""
    sizes = (64, 96, 128, 192, 256) if impl in ("hopper", "fa4") else range(8, 257, 8)
    return replace(case, head_dim=next(size for size in sizes if size >= case.head_dim))


SECTIONS = [
    Case(num_heads=16, num_kv_heads=8, head_dim=128),
    Case(num_heads=8, num_kv_heads=8, documents="mixed", batch=1),
    Case(num_heads=12, num_kv_heads=6, batch=2, causal=False, window="both"),
    Case(num_heads=6, num_kv_heads=6, window="left", layout="contiguous"),
    Case(num_heads=6, num_kv_heads=6, documents="crossing", layout="striped"),
]


@contextmanager
def over(transport: str) -> Iterator[None]:
    """All calls take this transport, as if they asked for it."""
    with (
        mock.patch("ringflash.attention.plan.choose_transport", lambda _, *of: choose_transport(transport, *of)),
        mock.patch.dict("ringflash.attention.plan.plan_cache", clear=True),
    ):
        yield


@contextmanager
def in_sections(turns: bool) -> Iterator[None]:
    """A head a section, published in parts; keys in buffers that take turns, as where they are many, or whole, with a
    third stage."""
    _forget_blocks()
    with (
        mock.patch.dict("ringflash.attention.plan.plan_cache", clear=True),
        mock.patch.object(sections, "choose_sections", lambda sizes, *_: Sections(*[(1,) * sizes.kv[2]] * 2)),
        mock.patch.object(sections, "PUBLISHED_BYTES", 0),
        mock.patch.object(sections, "MAX_UNBUFFERED_KV_BYTES", 0 if turns else sections.MAX_UNBUFFERED_KV_BYTES),
        mock.patch.object(sections, "choose_num_gradient_buffers", lambda *args: min(2 if turns else 3, len(args[-1]))),
    ):
        yield
    _forget_blocks()


def _forget_blocks() -> None:
    """Drop planned blocks, to which areas keep transfers: a rank that kept those of other sections would hang."""
    schedule.plan_single_block.cache_clear()
    schedule.plan_blocks.cache_clear()


@contextmanager
def in_blocks() -> Iterator[None]:
    """Every call is cut into blocks, as those of many ranks are."""

    def choose(_: Any, num_distances: int, *args: Any) -> tuple[int, ...]:
        return (1, *[1] * min(2, num_distances - 1), *[num_distances - 3] * (num_distances > 3))

    with (
        mock.patch("ringflash.attention.plan.choose_blocks", choose),
        mock.patch.dict("ringflash.attention.plan.plan_cache", clear=True),
    ):
        yield


CUTS: dict[str, Callable[[], AbstractContextManager]] = {
    "": nullcontext, "sections": partial(in_sections, False), "turns": partial(in_sections, True), "blocks": in_blocks,
}  # fmt: skip
CALLS = [  # name, cut, case, tokens of a chunk
    *((f"{case}", "", case, CHUNK) for case in all_cases()),
    *((f"head_dim-{case}", "", case, CHUNK) for case in HEAD_DIMS),
    *((f"long-{case}", "", case, LONG_CHUNK) for case in LONG),
    *((f"sections-{case}", "sections", case, CHUNK) for case in SECTIONS),
    *((f"sections-{case}-turns", "turns", case, CHUNK) for case in SECTIONS),
    *((f"blocks-{case}", "blocks", case, CHUNK) for case in SECTIONS),
]


def measure(ctx: Context, transport: str, cut: str, *args: Any) -> list[Ratio]:
    """`ring_check.measure` over one transport, not over what auto would take."""
    with CUTS[cut](), over(transport):
        return ring_check.measure(ctx, *args)


def repeats(ctx: Context, transport: str, *args: Any) -> bool:
    with over(transport):
        return ring_check.repeats_exactly(ctx, *args)


def measure_elsewhere(ctx: Context, *args: Any) -> list[Ratio]:
    """The first calls of a group, over each transport, with another GPU as the current one."""
    torch.cuda.set_device((ctx.rank + 1) % ctx.size)
    try:
        there, spent = ctx._replace(group=dist.new_group()), []
        for transport in ("copy_engine", "nccl"):
            with over(transport):
                spent += ring_check.measure(there, *args)
        return spent
    finally:
        torch.cuda.set_device(ctx.device)


def test_current_device_need_not_be_the_tensors(pool: Pool, setup: Setup, table: Table) -> None:
    if setup.backend != "nccl":
        pytest.skip("a CPU has no current device")
    if setup.shared:
        pytest.skip("each rank needs a second GPU")
    spent = pool.run(measure_elsewhere, suited(Case(), setup.impl), CHUNK, setup.dtype, setup.impl)
    assert_within(table.add("elsewhere", spent))


@pytest.mark.parametrize("name, cut, case, chunk", CALLS, ids=[name for name, *_ in CALLS])
def test_case(pool: Pool, setup: Setup, table: Table, name: str, cut: str, case: Case, chunk: int) -> None:
    case = suited(case, setup.impl)
    spent = pool.run(measure, setup.transport, cut, case, chunk, setup.dtype, setup.impl)
    assert_within(table.add(name, spent))


@pytest.mark.parametrize("case", [Case(), Case(documents="mixed", window="both", causal=False)], ids=str)
def test_deterministic(pool: Pool, setup: Setup, case: Case) -> None:
    args = suited(case, setup.impl), CHUNK, setup.dtype, setup.impl
    assert all(pool.run(repeats, setup.backend, *args))


@pytest.mark.parametrize("policy", ["always", "changed"])
@pytest.mark.parametrize("name", refusals.REFUSALS)
def test_refusal(pool: Pool, name: str, policy: str) -> None:
    """NCCL ranks compare by default only calls that differ from their last: a rank that repeats its own does not."""
    if (name, policy) == ("ranks_differ_after_both_calls", "changed"):
        pytest.skip("both calls are known")
    refusals.assert_refused(name, pool.run(refusals.attempt, name, policy, timeout_s=60))
