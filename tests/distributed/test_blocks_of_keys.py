"""Calls whose keys are gathered a block at a time, over shared memory and over messages, against dense attention.

2 to 4 CPU processes, fp64, with memories whose streams dawdle (tests/helpers/peer_memory.py).
tests/unit/test_happens_before.py leaves out each wait in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest

from ringflash.attention import schedule, sections
from ringflash.attention.plan import CallPlan
from ringflash.attention.schedule import KeyBlock
from ringflash.attention.sections import GatherSizes, Sections
from tests.helpers import ring_check
from tests.helpers.cases import Case, mask_cases, single_cases
from tests.helpers.peer_memory import copy_engine, messages_by_heads
from tests.helpers.pool import Context, Pool

Memory = Callable[[], AbstractContextManager]
CASES = [
    *mask_cases()[::7],
    *single_cases()[1::5],
    Case(num_heads=4, num_kv_heads=1),  # the blocks of one section
    Case(num_heads=12, num_kv_heads=6, batch=2, causal=False, lse_gradient=True),
]
LENGTHS = (6, 3, 9, 1, 5)  # tokens a chunk, in turn


@contextmanager
def in_blocks(
    most: int, heads: Callable[[int], tuple[int, ...]] = lambda num_heads: (1,) * num_heads
) -> Iterator[None]:
    """Calls have blocks of at most so many distances, after one of their own keys, and these sections."""

    def key_blocks(self: CallPlan, *_: Any) -> tuple[KeyBlock, ...]:
        place, layout = self.size_and_rank, self.options.layout
        others = len(schedule.active_distances(self.mask, place[0], layout)) - 1
        sizes = (1, *[most] * (others // most), *[others % most][: others % most])
        return schedule.plan_blocks(self.mask, *place, layout, sizes, self.keys_per_line)

    def choose(sizes: GatherSizes, *_: Any) -> Sections:
        return Sections(*[heads(sizes.kv[2])] * 2)

    with mock.patch.object(CallPlan, "key_blocks", key_blocks), mock.patch.object(sections, "choose_sections", choose):
        yield


def check(ctx: Context, memory: Memory, first: int) -> None:
    with memory():
        for number, case in list(enumerate(CASES))[first::2]:
            whole = number % 3 == 1
            with in_blocks(1 + number % 2, (lambda count: (count,)) if whole else lambda count: (1,) * count):
                ring_check.check(ctx, case, LENGTHS[number % len(LENGTHS)])
        with in_blocks(2, lambda _: (1, 3, 2)):
            ring_check.check(ctx, Case(num_heads=12, num_kv_heads=6, batch=2), 4)
        with in_blocks(1, lambda count: (count,)):
            ring_check.check(ctx, Case(layout="striped", documents="crossing"), 64)
            ring_check.check(ctx, Case(layout="balanced", documents="mixed"), 6)
            ring_check.check(ctx, Case(layout="balanced", documents="crossing"), 40)
            ring_check.check(ctx, Case(layout="documents", documents="divisible"), 6)
            ring_check.check(ctx, Case(layout="balanced", documents="deep"), 12)
            ring_check.check(ctx, Case(documents="diffusion", window="left"), 9)


@pytest.mark.parametrize(("memory", "size"), [(messages_by_heads, 4), (messages_by_heads, 3), (copy_engine, 4)])
def test_equals_dense(pool: Pool, memory: Memory, size: int) -> None:
    pool.run(check, memory, size % 2, size=size)
