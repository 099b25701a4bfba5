"""Merging attention over disjoint keys: an algebra with the empty row as its zero. CPU, one process."""

import pytest
import torch

from ringflash.testing.tolerance import assert_close
from ringflash_kernels import merge_

State = tuple[torch.Tensor, torch.Tensor]


def attend(keys: slice, dtype: torch.dtype = torch.float64) -> State:
    """(out, lse) of a fixed problem over some of its 12 keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 8, generator=generator, dtype=torch.float64) for n in (5, 12, 12))
    scores = torch.einsum("bihd,bjhd->bhij", q, k[:, keys])
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v[:, keys])
    return out.to(dtype), scores.logsumexp(-1).to(dtype)


def empty(dtype: torch.dtype = torch.float64) -> State:
    """Attention over no keys."""
    return torch.zeros(2, 5, 3, 8, dtype=dtype), torch.full((2, 3, 5), float("-inf"), dtype=dtype)


def merged(a: State, b: State) -> dict[str, torch.Tensor]:
    """a and b, left as they are."""
    acc, lse = a[0].clone(), a[1].clone()
    merge_(acc, lse, *b)
    return {"out": acc, "lse": lse}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_empty_is_neutral_to_the_bit(dtype: torch.dtype) -> None:
    a = attend(slice(0, 12), dtype)
    for result in (merged(a, empty(dtype)), merged(empty(dtype), a)):
        assert torch.equal(result["out"], a[0]) and torch.equal(result["lse"], a[1])


def test_rows_are_merged_each_by_itself() -> None:
    """Rows empty on the left, on the right and on both sides, among full ones, which are those of all keys."""
    a, b = attend(slice(0, 5)), attend(slice(5, 12))
    for state, rows in ((a, [0, 2]), (b, [1, 2])):
        state[0][:, rows] = 0
        state[1][..., rows] = float("-inf")
    result = merged(a, b)
    assert torch.equal(result["out"][:, 0], b[0][:, 0]) and torch.equal(result["out"][:, 1], a[0][:, 1])
    assert not result["out"][:, 2].any() and bool(torch.isneginf(result["lse"][..., 2]).all())
    out, lse = attend(slice(0, 12))
    full = {"out": result["out"][:, 3:], "lse": result["lse"][..., 3:]}
    assert_close(full, {"out": out[:, 3:], "lse": lse[..., 3:]})


def test_far_apart_scores_do_not_overflow() -> None:
    a, b = attend(slice(0, 5)), attend(slice(5, 12))
    result = merged((a[0], a[1] + 2000), (b[0], b[1] - 2000))
    assert torch.equal(result["out"], a[0]) and torch.equal(result["lse"], a[1] + 2000)


def test_low_precision_part_is_merged_in_the_state() -> None:
    a, b = attend(slice(0, 5), torch.float32), attend(slice(5, 12), torch.float32)
    part = b[0].bfloat16()
    assert torch.equal(merged(a, (part, b[1]))["out"], merged(a, (part.float(), b[1]))["out"])
