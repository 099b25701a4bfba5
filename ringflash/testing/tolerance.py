"""The single criterion for correct attention, shared by `ringflash verify`, all tests and the benchmarks.

fp64 is compared with fp64, relative to the largest value. In a lower dtype the budget is twice the error of plain eager
attention in that dtype, plus one rounding. Both are checked chunk by chunk, for the maximum and the mean: over a whole
causal sequence the early rows would set the scale, and zeroed last rows would pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

RTOL_FP64 = 1e-11

SEQUENCE_DIM = {"lse": 2, "dlse": 2}  # dim 1 for all other tensors


class Ratio(NamedTuple):
    """Error divided by budget for one tensor and chunk; correct if at most 1.

    If error and budget are both 0, the ratio is 0.
    """

    name: str
    chunk: int
    maximum: float
    mean: float


def ratios(name: str, got: Tensor, want: Tensor, baseline: Tensor | None = None, *, num_chunks: int = 1) -> list[Ratio]:
    """Return the share of its error budget that a result uses, by chunk.

        max|got - want| <= 2 max|baseline - want| + eps max|want|        (and the same with means)

    Args:
        got: out, lse, dq, dk or dv, (batch, seqlen, heads, head_dim) or (batch, heads, seqlen).
        want: the reference, in fp64.
        baseline: plain eager attention in the low dtype; None compares fp64 with fp64 to RTOL_FP64.
        num_chunks: number of chunks of the sequence; each has a separate budget.
    Raises:
        AssertionError: shapes differ, or `got` and `want` are not finite at the same elements.
    """
    assert got.shape == want.shape, f"{name} must be {tuple(want.shape)}, got {tuple(got.shape)}"
    odd = ~torch.isfinite(want)
    same = torch.isfinite(got).ne(odd).all() and torch.allclose(got[odd].double(), want[odd], equal_nan=True)
    assert same, f"{name} must be finite exactly where the reference is, got {int((~torch.isfinite(got)).sum())} others"
    eps = RTOL_FP64 if baseline is None else torch.finfo(baseline.dtype).eps
    size = want.masked_fill(odd, 0.0).abs()
    error, allowed = _error(got, want, odd), torch.zeros_like(want) if baseline is None else _error(baseline, want, odd)
    dim = SEQUENCE_DIM.get(name, 1)
    parts = zip(*(x.chunk(num_chunks, dim) for x in (error, allowed, size)), strict=True)
    return [
        Ratio(
            name,
            chunk,
            _ratio(e.max().item(), 2 * a.max().item() + eps * s.max().item()),
            _ratio(e.mean().item(), 2 * a.mean().item() + eps * s.mean().item()),
        )
        for chunk, (e, a, s) in enumerate(parts)
    ]


def assert_close(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    baseline: Mapping[str, Tensor] | None = None,
    *,
    num_chunks: int = 1,
) -> list[Ratio]:
    """Assert that every tensor of `got` is within its budget; return the ratios."""
    spent = measure(got, want, baseline, num_chunks=num_chunks)
    assert_within(spent)
    return spent


def measure(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    baseline: Mapping[str, Tensor] | None = None,
    *,
    num_chunks: int = 1,
) -> list[Ratio]:
    """Return the ratios of every tensor of `got`, for a table; only finiteness and shapes are asserted."""
    base = baseline or {}
    return [r for name in got for r in ratios(name, got[name], want[name], base.get(name), num_chunks=num_chunks)]


def assert_within(spent: Iterable[Ratio]) -> None:
    """Assert that no budget is exceeded.

    Raises:
        AssertionError: lists each tensor and chunk that exceeds its budget.
    """
    beyond = [ratio for ratio in spent if not (ratio.maximum <= 1 and ratio.mean <= 1)]
    assert not beyond, "errors must stay within their budget, got " + "; ".join(
        f"{r.name} of chunk {r.chunk}: {r.maximum:.3g} times (mean {r.mean:.3g})" for r in beyond
    )


def _error(x: Tensor, want: Tensor, odd: Tensor) -> Tensor:
    return (x.double() - want).abs().masked_fill(odd, 0.0)


def _ratio(error: float, budget: float) -> float:
    return 0.0 if error == 0 else error / budget if budget > 0 else float("inf")
