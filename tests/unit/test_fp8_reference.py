"""The specification of FP8 attention: rotation, rounding, records, and its error against exact attention. CPU.

Lengths are a few blocks of 128 keys. The kernels are tested against this specification, bit by bit where they round
(tests/emulator, tests/kernels).
"""

import math

import pytest
import torch

from ringflash_kernels import IMPLS, attention_forward, choose_impl, fp8_reference, measure_fp8_rounding

HEAD_DIMS = fp8_reference.HEAD_DIMS


def draw(*shape: int, seed: int = 0, outliers: bool = False) -> torch.Tensor:
    """Normal numbers in bf16; with outliers, one in a thousand ten times as large (FlashAttention-3's test)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if outliers:
        rare = torch.rand(*shape, generator=generator) < 1e-3
        x = x + 10 * torch.randn(*shape, generator=generator) * rare
    return x.bfloat16()


def qkv(seqlen: int, head_dim: int, **kind: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence, four query heads, two of keys."""
    return tuple(draw(1, seqlen, heads, head_dim, seed=i, **kind) for i, heads in enumerate((4, 2, 2)))


def rmse(x: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean squared difference."""
    return float((x.double() - exact.double()).square().mean().sqrt())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_keeps_products_and_can_be_undone(head_dim: int) -> None:
    x, y = draw(5, head_dim).float(), draw(5, head_dim, seed=1).float()
    products = fp8_reference.rotate(x) @ fp8_reference.rotate(y).T / head_dim
    torch.testing.assert_close(products, x @ y.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(fp8_reference.rotate_back(fp8_reference.rotate(x)), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448.0, 1.0), (448.1, 2.0), (1.0, 2.0**-8), (1.75, 2.0**-8), (1.76, 2.0**-7), (0.0, 2.0**-60)],
)
def test_scales_are_the_smallest_powers_of_two(largest: float, scale: float) -> None:
    assert fp8_reference.power_of_two(torch.tensor([largest])).item() == scale


def test_powers_are_right_in_the_mean() -> None:
    x = torch.linspace(-6, 8, 100_001, dtype=torch.float64)
    errors = fp8_reference.rounded_powers(x) * torch.exp2(-x) - 1
    assert errors.mean().abs() < 1e-3 and errors.square().mean().sqrt() < 0.0316 and errors.abs().max() < 0.08
    ends = torch.tensor([-math.inf, -7.0, 8.0, math.nan], dtype=torch.float64)
    assert fp8_reference.rounded_powers(ends)[:3].tolist() == [0, 0, 256]
    assert fp8_reference.rounded_powers(ends)[3].isnan()


@pytest.mark.parametrize("for_backward", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_records_hold_what_was_rounded(head_dim: int, for_backward: bool) -> None:
    """Both layouts give back the same k8 and v8, padded with zeros; in bf16 they are exact, and near k and v."""
    _, k, v = qkv(200, head_dim)
    records = fp8_reference.quantise_kv(k, v, for_backward=for_backward)
    keys = fp8_reference.unpack(records, head_dim, for_backward=for_backward)
    scale = keys.v_scales.repeat_interleave(128, 1).unsqueeze(-1)
    values = keys.v.float() * scale
    assert torch.equal(values.bfloat16().float(), values) and not values[:, 200:].any()
    assert ((values[:, :200] - v).abs() <= v.abs() / 16 + scale[:, :200] * 2**-10).all()
    k8, scales = fp8_reference.round_blocks(fp8_reference.rotate(k), 128)
    assert torch.equal(keys.k.float(), k8.flatten(1, 2).float()) and torch.equal(keys.k_scales, scales)


def test_every_rank_rounds_alike() -> None:
    """However the sequence is cut at multiples of 128."""
    q, k, v = qkv(640, 64, outliers=True)
    records, rows = fp8_reference.quantise_kv(k, v, for_backward=False), fp8_reference.quantise_q(q)
    pieces = [slice(0, 128), slice(128, 512), slice(512, 640)]
    parts = [fp8_reference.quantise_kv(k[:, piece], v[:, piece], for_backward=False) for piece in pieces]
    assert torch.equal(torch.cat(parts, 1), records)
    parts = [fp8_reference.quantise_q(q[:, piece]) for piece in pieces]
    assert torch.equal(torch.cat([part.values for part in parts], 1).float(), rows.values.float())
    assert torch.equal(torch.cat([part.scales for part in parts], 2), rows.scales)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(broken: float) -> None:
    q, k, v = qkv(256, 64)
    clean = fp8_reference.quantise_q(q)
    q[0, 70, 1, 5] = broken
    rows = fp8_reference.quantise_q(q)
    expected = clean.values.float()
    expected[0, 70, 1] = math.nan
    assert rows.values[0, 70, 1].float().isnan().all()
    others = torch.arange(256) // 64 != 1  # a scale may change with the largest of the row's own block
    assert torch.equal(rows.values[:, others].float(), clean.values[:, others].float())
    k[0, 100, 0, 3] = v[0, 200, 1, 7] = broken
    out, lse = attention_forward(q, k, v, impl="reference_fp8", causal=True)
    seen = torch.arange(256)
    assert torch.equal(out[0, :, 3, 7].isnan(), seen >= 200) and not out[0, :, 3, 8].isnan().any()
    assert torch.equal(lse[0, 0].isnan(), seen >= 100) and torch.equal(out[0, :, 0].isnan().all(-1), seen >= 100)


@pytest.mark.parametrize(
    ("head_dim", "most", "causal"), [(64, 1.6e-2, True), (128, 9.3e-3, False), (128, 9.3e-3, True), (256, 7.7e-3, True)]
)
def test_error_against_exact_attention(head_dim: int, most: float, causal: bool) -> None:
    """On normal numbers 6% of what is returned; on FlashAttention-3's outliers its published class of error."""
    for kind, bound in ((False, None), (True, most)):
        q, k, v = qkv(2048, head_dim, outliers=kind)
        out, lse = attention_forward(q.float(), k.float(), v.float(), impl="reference_fp8", causal=causal)
        exact, exact_lse = attention_forward(q.float(), k.float(), v.float(), impl="reference", causal=causal)
        late = slice(256, None)  # the first rows see few keys: their error is that of single numbers
        bound = bound or 0.06 * rmse(exact[:, late], torch.zeros(()))
        assert rmse(out[:, late], exact[:, late]) <= bound
        assert rmse(lse, exact_lse) <= (0.15 if kind else 0.03)


def test_hops_give_what_one_call_gives() -> None:
    """Probabilities are rounded alike, whatever other keys a call covers: only sums in fp32 differ."""
    q, k, v = qkv(512, 64, outliers=True)
    q, k, v = q.float(), k.float(), v.float()
    out, lse = attention_forward(q, k, v, impl="reference_fp8")
    state, state_lse = attention_forward(q, k[:, :128], v[:, :128], impl="reference_fp8")
    state, state_lse = attention_forward(
        q, k[:, 128:], v[:, 128:], impl="reference_fp8", acc=state, lse=state_lse, out=state
    )
    torch.testing.assert_close(state, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state_lse, lse, rtol=1e-6, atol=1e-6)


def test_a_heavy_key_leaves_the_others_their_weight() -> None:
    """One key weighs e^13 times as much as each of 65,536 others, which together weigh a seventh of it."""
    seqlen, head_dim = 65536, 64
    q = torch.zeros(1, 1, 1, head_dim)
    q[..., 0] = 13 * head_dim**0.5  # 104, which e4m3 holds exactly
    k, v = (torch.zeros(1, seqlen, 1, head_dim) for _ in range(2))
    k[:, 0, :, 0], v[:, 128:] = 1.0, 1.0
    exact, _ = attention_forward(q, k, v, impl="reference")
    out, _ = attention_forward(q, k, v, impl="reference_fp8")
    assert 0.12 < exact.mean() < 0.14
    torch.testing.assert_close(out, exact, rtol=1e-3, atol=0.0)


def test_rows_without_keys_are_empty() -> None:
    q, k, v = qkv(190, 64)
    out, lse = attention_forward(q, k[:, :100], v[:, :100], impl="reference_fp8", causal=True)
    assert not out[:, :90].any() and (lse[:, :, :90] == -math.inf).all() and lse[:, :, 90:].isfinite().all()


def test_never_chosen_and_never_proposed() -> None:
    """It is not exact: only who names it gets it."""
    q, k, v = qkv(16, 64)
    assert "fp8" not in choose_impl(q, k, v).impl
    assert {"hopper_fp8", "reference_fp8"} <= set(IMPLS)
    with pytest.raises(NotImplementedError, match=r"use one of \['flash2'?.*'reference'\]|use one of \['reference'\]"):
        attention_forward(q, k, v, impl="hopper_fp8")
    for impl in ("hopper_fp8", "reference_fp8"):
        with pytest.raises(NotImplementedError, match=r"got head_dim 96 \(one of 64, 128, 256\)"):
            attention_forward(*(draw(1, 16, 2, 96, seed=i) for i in range(3)), impl=impl)


def test_rounding_is_measured() -> None:
    """A value that is 2^-18 of its block's largest is flushed; infinity counts as saturated, with its rotated row."""
    q, k, v = torch.zeros(3, 1, 128, 1, 64)
    v[0, :, 0, 0] = 2.0**-18
    v[0, 5, 0, 1] = -1.0
    q[0, 0, 0, 0], k[0, 3, 0, 2] = 3.0, 7.0
    found = {name: x.item() for name, x in fp8_reference.measure_rounding(q, k, v).items()}
    assert found == {"amax_q": 3, "amax_k": 7, "amax_v": 1, "saturated": 0, "flushed": pytest.approx(128 / 3 / 8192)}
    k[0, 3, 0, 2] = torch.inf
    assert fp8_reference.measure_rounding(q, k, v)["saturated"].item() == pytest.approx(64 / 3 / 8192)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_is_not_used(default: torch.dtype) -> None:
    """Lightning's "bf16-true" and DoublePrecision set it in a step."""
    x = [draw(1, 640, heads, 64, seed=i, outliers=True) for i, heads in enumerate((4, 2, 2))]
    want = measured = None
    for dtype in (torch.float32, default):
        torch.set_default_dtype(dtype)
        try:
            got, found = attention_forward(*x, impl="reference_fp8", causal=True), measure_fp8_rounding(*x)
        finally:
            torch.set_default_dtype(torch.float32)
        want, measured = want or got, measured or found
    assert all(map(torch.equal, got, want))
    assert found == measured and {x.dtype for x in found.values()} == {torch.float32}
