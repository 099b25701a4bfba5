"""Planted mistakes make the comparison fail: the tier would notice them. gloo, 2 and 4 CPU processes.

Each is planted on all ranks, as a mistake in the code would be.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from ringflash.attention import schedule
from ringflash.sequence import layout
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.mask import Region
from ringflash_kernels.merge import merge_
from tests.distributed.test_blocks_of_keys import in_blocks
from tests.helpers import ring_check
from tests.helpers.cases import Case
from tests.helpers.pool import Context, Pool

BEYOND = "errors must stay within their budget"


def dropped_merge(acc: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor) -> None:
    """Only the first block of keys that a row sees counts."""
    if bool(torch.isneginf(lse).all()):
        merge_(acc, lse, out, out_lse)


def rounded_merge(acc: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor) -> None:
    """The state passes through bf16 between blocks of keys."""
    merge_(acc, lse, out, out_lse)
    acc.copy_(acc.bfloat16())


def wrong_order(seqlen: int, cp_size: int, cp_rank: int, *rest: Any) -> tuple[layout.Chunk, ...]:
    """The ranks are counted from the other end."""
    return layout.chunks(seqlen, cp_size, cp_size - 1 - cp_rank, *rest)


def local_positions(
    mask: SequenceMask, q_shard: tuple[layout.Chunk, ...], k_shard: tuple[layout.Chunk, ...]
) -> tuple[Region, ...]:
    """Causal by the row of the shard instead of the position in the sequence."""
    rows, keys = (sum(chunk.size for chunk in shard) for shard in (q_shard, k_shard))
    return (Region(0, rows, 0, keys, None, 0),)


PLANTS: dict[str, tuple[str, Callable]] = {
    "dropped_merge": ("ringflash_kernels.reference.merge_", dropped_merge),
    "rounded_merge": ("ringflash_kernels.reference.merge_", rounded_merge),
    "wrong_order": ("ringflash.attention.schedule.chunks", wrong_order),
    "local_positions": ("ringflash.attention.shard_masks.joined_regions", local_positions),
}


def verdict(ctx: Context, plant: str | None, case: Case) -> str:
    """Return the comparison's verdict with the mistake in place."""
    target, replacement = PLANTS[plant] if plant else ("ringflash.attention.schedule.chunks", layout.chunks)
    _forget_schedules()
    try:
        with mock.patch(target, replacement), in_blocks(1) if "merge_" in target else nullcontext():
            ring_check.check(ctx, case)
    except AssertionError as error:
        return str(error)
    finally:
        _forget_schedules()
    return "passed"


def _forget_schedules() -> None:
    for planned in (schedule.plan_single_block, schedule.plan_blocks, schedule.active_distances):
        planned.cache_clear()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(layout="contiguous"),
        Case(layout="balanced", documents="crossing"),
        Case(layout="documents", documents="divisible"),
    ],
    ids=str,
)
@pytest.mark.parametrize("plant", PLANTS)
def test_mistake_is_noticed(pool: Pool, plant: str, case: Case, size: int) -> None:
    verdicts = pool.run(verdict, plant, case, size=size)
    assert any(BEYOND in text for text in verdicts), verdicts


@pytest.mark.parametrize("size", [2, 4])
def test_the_control_of_the_controls(pool: Pool, size: int) -> None:
    """The same procedure without a mistake passes."""
    assert pool.run(verdict, None, Case(), size=size) == ["passed"] * size
