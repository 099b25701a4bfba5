"""Operator calls that the FlashAttention paths make of a mask, against the operator's own window rules. CPU.

The operator itself needs a GPU (tests/multi_gpu). Here its rules are written out: windows are counted from the
bottom right corner, a side of seqlen_k or more is open, and an open side becomes seqlen_k if the other is closed.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringflash.sequence.mask import SequenceMask
from ringflash_kernels import api
from ringflash_kernels.flash_calls import FlashCall, MergedBackward, calls, merged_forward
from ringflash_kernels.mask import Mask, Region
from tests.two_sided import kernel_masks
from tests.two_sided.kernel_masks import one_by_one
from tests.unit.test_mask import regions

LENGTH = 12


def operator(seqlen_q: int, seqlen_k: int, left: int, right: int, max_seqlen_k: int) -> torch.Tensor:
    """Visible pairs of one document of an operator call: (seqlen_q, seqlen_k)."""
    left, right = (-1 if side >= max_seqlen_k else side for side in (left, right))
    causal = left < 0 and right == 0
    if left < 0 and right < 0:
        return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    left, right = (max_seqlen_k if side < 0 else side for side in (left, right))
    distance = torch.arange(seqlen_k)[None] - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    return (distance <= right) & ((distance >= -left) | causal)


def covered(mask: Mask, batch: int = 1) -> torch.Tensor:
    """Count how often the calls compute each pair."""
    count = torch.zeros(mask.seqlen_q, mask.seqlen_k, dtype=torch.int32)
    for call in calls(mask, batch):
        assert batch == 1 or not call.is_packed
        longest = max(b - a for a, b in pairwise(call.k_bounds))
        for (q0, q1), (k0, k1) in zip(pairwise(call.q_bounds), pairwise(call.k_bounds), strict=True):
            rows = slice(call.rows.start + q0, call.rows.start + q1)
            cols = slice(call.cols.start + k0, call.cols.start + k1)
            count[rows, cols] += operator(q1 - q0, k1 - k0, *call.window, longest).int()
    return count


@given(regions(LENGTH))
@settings(max_examples=500, deadline=None)
def test_one_region(region: Region) -> None:
    mask = Mask.of(LENGTH, LENGTH, [region])
    assert torch.equal(covered(mask), mask.dense().int())


@pytest.mark.parametrize("mask", kernel_masks.MASKS.values(), ids=kernel_masks.MASKS.keys())
def test_two_sided_masks(mask: Mask) -> None:
    """Regions, whose results are merged."""
    assert torch.equal(covered(mask), mask.dense().int())


@given(
    st.integers(1, 4), st.sampled_from(["zigzag", "contiguous"]), st.booleans(),
    st.tuples(*2 * [st.sampled_from([-1, 0, 1, 3, 7])]), st.lists(st.integers(1, 63), max_size=12),
)  # fmt: skip
@example(4, "zigzag", False, (0, -1), [49])  # nine queries on one key, then a window: in one call the operator would
@example(4, "zigzag", False, (1, -1), [25, 28, 30])  # take the open side for seven
@settings(max_examples=200, deadline=None)
def test_every_block_of_keys(
    cp_size: int, layout: str, causal: bool, window_size: tuple[int, int], cuts: list[int]
) -> None:
    seqlen = 16 * cp_size
    bounds = tuple(sorted({0, seqlen, *(cut for cut in cuts if cut < seqlen)}))
    mask = SequenceMask(seqlen, causal, window_size, bounds)
    for rank in range(cp_size):
        for block in one_by_one(mask, cp_size, rank, layout):
            assert torch.equal(covered(block.mask), block.mask.dense().int())


@pytest.mark.parametrize("causal", [True, False])
def test_few_calls(causal: bool) -> None:
    """A thousand documents are one variable-length call, not a thousand; a block of keys of a causal mask is one."""
    blocks = one_by_one(SequenceMask(64), 4, 1, "zigzag") if causal else ()
    for mask in (Mask.documents(range(0, 3001, 3), causal=causal), *(block.mask for block in blocks)):
        assert len(calls(mask)) == 1


def test_a_batch_has_no_packed_call() -> None:
    """A window leaves squares along the diagonal, which are documents to the operator, in one sequence only."""
    mask = one_by_one(SequenceMask(64, window_size=(3, -1)), 4, 1, "zigzag")[0].mask
    assert [call.is_packed for call in calls(mask)] == [True]
    assert torch.equal(covered(mask, batch=2), mask.dense().int())
    q = torch.zeros(2, mask.seqlen_q, 2, 8, dtype=torch.bfloat16)
    lse, seen = torch.zeros(2, 2, mask.seqlen_q), []

    def flash(q: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        seen.append(others[2])
        return torch.zeros_like(q), torch.zeros(2, 2, q.shape[1])

    merged_forward(flash, q, q, q, mask, 1.0, out=torch.empty_like(q), lse=lse, acc=None)  # type: ignore[arg-type]
    backward = Ones(q, q, q, lse, softmax_scale=1.0)
    backward.add(q, q, mask, torch.zeros(q.shape), torch.zeros(q.shape))
    assert seen == backward.seen == calls(mask, 2)


class Ones(MergedBackward):
    """Counts, in place of gradients, the calls that hold a row."""

    def __init__(self, *tensors: torch.Tensor, softmax_scale: float) -> None:
        super().__init__(*tensors, softmax_scale=softmax_scale)
        self.seen: list[FlashCall] = []

    def gradients(self, dout: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        *qkv, _, _, _, call = others
        self.seen.append(call)
        return tuple(map(torch.ones_like, qkv))


def test_merged_gradients_into_views() -> None:
    """dq goes to the heads of a larger tensor, dk and dv, stored in fp32, are interleaved."""
    q = torch.zeros(1, LENGTH, 2, 8, dtype=torch.bfloat16)
    backward = Ones(q, q, q, torch.zeros(1, 2, LENGTH), softmax_scale=1.0)
    mask = Mask.of(LENGTH, LENGTH, [Region(0, 4, 0, 6), Region(4, 8, 6, 8)])
    dk, dv = torch.full((1, LENGTH, 2, 2, 8), torch.nan).unbind(3)
    backward.add(q, q, mask, dk, dv, accumulate=False)
    for x in (dk, dv):
        assert bool((x[:, :8] == 1).all()) and not x[:, 8:].any()
    whole = torch.zeros(1, LENGTH, 4, 8, dtype=torch.bfloat16)
    assert torch.equal(backward.finish(whole[:, :, 1:3]), backward.finish())
    assert bool((whole[:, :8, 1:3] == 1).all()) and not whole[:, 8:].any() and not whole[:, :, [0, 3]].any()


def test_values_narrower_than_keys() -> None:
    """The operators, which take one head_dim, see the values padded with zeros; results are as narrow as the values."""
    torch.manual_seed(0)
    q, k, wide = torch.randn(3, 1, LENGTH, 2, 8, dtype=torch.float64)
    v, dout, mask = wide[..., :5], torch.randn(1, LENGTH, 2, 5, dtype=torch.float64), Mask.documents((0, 5, LENGTH))
    want, want_lse = api.attention_forward(q, k, v, impl="reference", mask=mask)
    out, lse = torch.empty_like(want), torch.empty_like(want_lse)

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        assert v.shape == k.shape
        out, lse = api.attention_forward(q[None], k[None], v[None], impl="reference", mask=mask)
        return out[0], lse[0]

    class Gradients(MergedBackward):
        def gradients(
            self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
            lse: torch.Tensor, dlse: None, call: FlashCall,
        ) -> tuple[torch.Tensor, ...]:  # fmt: skip
            assert v.shape == k.shape and out.shape == dout.shape == q.shape
            dout, q, k, v, out, lse = (x[None] for x in (dout, q, k, v, out, lse))
            found = api.attention_backward(dout, q, k, v, out, lse, impl="reference", mask=mask, softmax_scale=1.0)
            return tuple(x[0] for x in found)

    merged_forward(flash, q, k, v, mask, 1.0, out=out, lse=lse, acc=None)
    assert out.shape == v.shape and torch.allclose(out, want, rtol=0, atol=1e-12) and torch.allclose(lse, want_lse)
    wanted = api.attention_backward(dout, q, k, v, out, lse, impl="reference", mask=mask, softmax_scale=1.0)
    backward = Gradients(dout, q, out, lse, softmax_scale=1.0)
    dk, dv = torch.empty_like(k, dtype=torch.float32), torch.empty_like(v, dtype=torch.float32)
    backward.add(k, v, mask, dk, dv, accumulate=False)
    for got, expected in zip((backward.finish(), dk, dv), wanted, strict=True):
        assert torch.allclose(got.double(), expected, atol=1e-5)


def test_fp8_refuses_values_narrower_than_keys() -> None:
    q = torch.zeros(1, LENGTH, 2, 128)
    with pytest.raises(NotImplementedError, match=r"values of 64 columns for keys of 128 \(equally wide\); use one of"):
        api.attention_forward(q, q, q[..., :64], impl="reference_fp8")
