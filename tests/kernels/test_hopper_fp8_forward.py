"""The FP8 quantiser and forward kernel on a GPU against their specification: bits, masks, long rows, error.

Runs on one GPU of compute capability 9.0, skipped elsewhere. The quantiser has the specification's very bits. The
forward differs from it by what tensor cores drop: sums of e4m3 products keep 13 bits of significand. A first run
compiles some twenty variants, a minute.
"""

from __future__ import annotations

import math

import pytest
import torch

from ringflash_kernels import attention_forward, fp8_reference
from tests.kernels.test_hopper_forward import MASKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

HEAD_DIMS = fp8_reference.HEAD_DIMS


def draw(seqlen_q: int, seqlen_k: int, head_dim: int, *, outliers: bool = False) -> list[torch.Tensor]:
    """q, k and v of two sequences, in bf16, as views of one tensor; outliers as in FlashAttention-3's test."""
    generator = torch.Generator("cuda").manual_seed(seqlen_q)
    shape = (2, max(seqlen_q, seqlen_k), 8, head_dim)
    x = torch.randn(shape, device="cuda", generator=generator)
    if outliers:
        rare = torch.rand(shape, device="cuda", generator=generator) < 1e-3
        x = x + 10 * torch.randn(shape, device="cuda", generator=generator) * rare
    q, k, v = x.bfloat16().split((4, 2, 2), 2)
    return [q[:, :seqlen_q], k[:, :seqlen_k], v[:, :seqlen_k]]


def rms(x: torch.Tensor) -> float:
    """Root of the mean square."""
    return float(x.double().square().mean().sqrt())


def check(out: torch.Tensor, lse: torch.Tensor, exact: torch.Tensor, exact_lse: torch.Tensor) -> None:
    """Require the specification's out to 1%, a fifth of the rounding error, and its lse to 5e-3, with a bias of 1e-3.

    In the root mean square: where scores differ in the last bits, P' of a key can be the neighbouring number in e4m3,
    6 to 12% off. lse is made of the rounded P'; their error by itself is 3.1%.
    """
    assert out.isfinite().all() and torch.equal(lse.isfinite(), exact_lse.isfinite())
    assert rms(out.float() - exact) <= 1e-2 * rms(exact)
    error = (lse - exact_lse).nan_to_num()
    assert rms(error) <= 5e-3 and error.double().mean().abs() <= 1e-3


@pytest.mark.parametrize("for_backward", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_quantiser_has_the_bits_of_the_specification(head_dim: int, for_backward: bool) -> None:
    from ringflash_kernels.hopper.fp8 import quantise

    q, k, v = draw(333, 333, head_dim, outliers=True)
    q[0, 3, 1, 5], k[1, 150, 1, 7], v[0, 20, 0, 1], k[0, 256:] = math.nan, math.inf, -math.inf, 0.0
    rows, exact = quantise.quantise_q(q), fp8_reference.quantise_q(q)
    scales = exact.scales.repeat_interleave(fp8_reference.BLOCK_Q, -1)[..., : q.shape[1]].transpose(1, 2)
    pairs = [(rows.values, exact.values), (rows.scales, exact.scales)]
    pairs += [(quantise.dequantised_q(q), exact.values.float() * scales.unsqueeze(-1))]
    records = [module.quantise_kv(k, v, for_backward=for_backward) for module in (quantise, fp8_reference)]
    pairs += zip(*(fp8_reference.unpack(x, head_dim, for_backward=for_backward) for x in records), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, head_dim: int) -> None:
    """A fresh call in bf16, and one that resumes in fp32."""
    mask = MASKS[name]
    q, k, v = draw(mask.seqlen_q, mask.seqlen_k, head_dim)
    if not mask.regions:
        pytest.skip("nothing to compare")
    exact = attention_forward(q, k, v, impl="reference_fp8", mask=mask, out=torch.empty(q.shape, device="cuda"))
    check(*attention_forward(q, k, v, impl="hopper_fp8", mask=mask), *exact)
    state, lse = torch.randn(q.shape, device="cuda"), torch.randn(2, 4, mask.seqlen_q, device="cuda")
    results = []
    for impl in ("hopper_fp8", "reference_fp8"):
        acc = state.clone()
        results += attention_forward(q, k, v, impl=impl, mask=mask, acc=acc, lse=lse.clone(), out=acc)
    check(*results)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_repeats_are_equal_bit_by_bit(head_dim: int) -> None:
    """Also under another default dtype, which a kernel that is compiled already must not notice."""
    q, k, v = draw(900, 900, head_dim)
    out, lse = attention_forward(q, k, v, impl="hopper_fp8", causal=True)
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            again = attention_forward(q, k, v, impl="hopper_fp8", causal=True)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_long_row_keeps_its_sum(head_dim: int) -> None:
    """Over 131,072 keys, tensor cores by themselves would return 42% of the sum: 13 bits of significand."""
    seqlen = 131072
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, n, 1, head_dim, device="cuda", generator=generator).bfloat16() for n in (192, seqlen, seqlen)
    )
    out, _ = attention_forward(q, k, v + 1, impl="hopper_fp8", out=torch.empty(q.shape, device="cuda"))
    exact, _ = attention_forward(q, k, v + 1, impl="reference_fp8", out=torch.empty(q.shape, device="cuda"))
    assert rms(out - exact) <= 1e-3 * rms(exact)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_below_zero(head_dim: int) -> None:
    """Row maxima are found among integers, which order negative numbers backwards."""
    q, k, v = draw(500, 500, head_dim)
    q[..., 0], k[..., 0] = 3.0, -2.0 * head_dim**0.5  # scores of -6, and normal numbers
    exact = attention_forward(q, k, v, impl="reference_fp8", causal=True, out=torch.empty(q.shape, device="cuda"))
    check(*attention_forward(q, k, v, impl="hopper_fp8", causal=True), *exact)


def test_nan_stays_in_the_rows_that_see_it() -> None:
    q, k, v = draw(300, 300, 64)
    q[0, 3, 1, 5] = k[1, 150, 0, 7] = math.nan
    out, lse = attention_forward(q, k, v, impl="hopper_fp8", causal=True)
    broken = torch.zeros(2, 4, 300, dtype=torch.bool, device="cuda")
    broken[0, 1, 3] = broken[1, :2, 150:] = True
    assert torch.equal(lse.isnan(), broken)
    assert torch.equal(out.isnan().all(-1).transpose(1, 2), broken)
    assert torch.equal(out.isnan().any(-1).transpose(1, 2), broken)


def test_a_million_equal_keys() -> None:
    q, k, v = (torch.full((1, n, 1, 64), x, device="cuda").bfloat16() for n, x in ((64, 0), (1 << 20, 0), (1 << 20, 1)))
    out, lse = attention_forward(q, k, v, impl="hopper_fp8")
    assert (out == 1).all()
    torch.testing.assert_close(lse, torch.full_like(lse, 20 * math.log(2.0)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "most"), [(64, 1.6e-2), (128, 9.3e-3), (256, 7.7e-3)])
def test_error_on_outliers(head_dim: int, most: float, causal: bool) -> None:
    q, k, v = draw(4096, 4096, head_dim, outliers=True)
    out, _ = attention_forward(q, k, v, impl="hopper_fp8", causal=causal)
    exact, _ = attention_forward(q.float(), k.float(), v.float(), impl="reference", causal=causal)
    assert rms(out.float() - exact) <= most
