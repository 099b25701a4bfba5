"""The specification of the FP8 backward: against autograd, against exact gradients, and where rows are long. CPU."""

import math

import pytest
import torch

from ringflash_kernels import attention_backward, attention_forward, begin_backward, fp8_reference
from ringflash_kernels.api import needs_row_max
from ringflash_kernels.fp8_reference import BLOCK_K, BLOCK_Q, PRODUCTS, Fp8ReferenceBackward
from ringflash_kernels.mask import Mask, Region
from tests.helpers.mask_oracle import attention
from tests.helpers.nan_reach import PLACES, check_reach, plant

_NAMES = ("dq", "dk", "dv")
# Root mean square of the error, as a share of the gradient's, that three bits of significand leave.
# Fewer columns of a head spread an outlier less.
_LIMITS = {(64, "normal"): 0.075, (64, "outliers"): 0.13, (128, "normal"): 0.07, (128, "outliers"): 0.12}
_LIMITS |= {(256, "normal"): 0.07, (256, "outliers"): 0.12}


def _tensors(kind: str, seqlen: int, head_dim: int) -> list[torch.Tensor]:
    """q, k, v and dout; two query heads share one of keys. Outliers: N(0, 100) added to one element in a thousand."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, seqlen, heads, head_dim, generator=generator) for heads in (2, 1, 1, 2)]
    if kind == "outliers":
        for x in tensors[:3]:
            rare = torch.rand(x.shape, generator=generator) < 1e-3
            x += 10 * torch.randn(x.shape, generator=generator) * rare
    return [x.bfloat16() for x in tensors]


def _forward(q, k, v, mask: Mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, lse and row_max."""
    out, (lse, row_max) = torch.empty_like(q), torch.empty(2, q.shape[0], q.shape[2], q.shape[1])
    fp8_reference.forward(q, k, v, mask, q.shape[-1] ** -0.5, out=out, lse=lse, row_max=row_max)
    return out, lse, row_max


def _gradients(q, k, v, dout, out, lse, row_max, mask: Mask, products: str, dlse=None) -> dict[str, torch.Tensor]:
    options = {"softmax_scale": q.shape[-1] ** -0.5, "products": products, "row_max": row_max, "dlse": dlse}
    run = Fp8ReferenceBackward(dout, q, out, lse, num_kv_heads=k.shape[2], **options)
    dk, dv = (torch.zeros(x.shape) for x in (k, v))
    run.add(k, v, mask, dk, dv)
    return dict(zip(_NAMES, (run.finish(), dk, dv), strict=True))


def _error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim, kind", _LIMITS)
def test_errors_of_gradients(head_dim, kind, causal):
    q, k, v, dout = _tensors(kind, 640, head_dim)
    mask = Mask.band(640, 640, causal=causal)
    exact = attention(*(x.double() for x in (q, k, v)), mask, head_dim**-0.5, dout=dout.double())
    state = _forward(q, k, v, mask)
    for products in PRODUCTS if head_dim <= 128 else ("bf16", "fp8"):
        for name, x in _gradients(q, k, v, dout, *state, mask, products).items():
            assert _error(x, exact[name]) <= _LIMITS[head_dim, kind], (products, name)


def test_gradients_of_what_was_rounded():
    """Products in bf16 are autograd's gradients of attention over the rounded operands, but for bf16's 8 bits."""
    q, k, v, dout = _tensors("normal", 256, 64)
    mask = Mask.band(256, 256, causal=True)
    rows, records = fp8_reference.quantise_q(q), fp8_reference.quantise_kv(k, v, for_backward=True)
    keys = fp8_reference.unpack(records, 64, for_backward=True)
    rounded = (
        (rows.values.double(), rows.scales.transpose(1, 2).repeat_interleave(BLOCK_Q, 1)),
        (keys.k.double(), keys.k_scales.repeat_interleave(BLOCK_K, 1)),
        (keys.v.double(), keys.v_scales.repeat_interleave(BLOCK_K, 1)),
    )
    q8, k8, v8 = (values * scales.unsqueeze(-1) for values, scales in rounded)
    exact = attention(q8, k8, v8, mask, 64**-1.5, dout=dout.double())
    exact["dq"], exact["dk"] = (64 * fp8_reference.rotate_back(exact[name]).double() for name in ("dq", "dk"))
    got = _gradients(q, k, v, dout, exact["out"].bfloat16(), exact["lse"].float(), None, mask, "bf16")
    for name in _NAMES:
        assert _error(got[name], exact[name]) <= 4e-3, name


def test_probabilities_of_long_rows_are_kept():
    """Queries see 2^20 equal keys, of which this is the first block; the lse is made up."""
    q, _, v, dout = _tensors("normal", BLOCK_K, 64)
    k, mask = torch.ones(1, BLOCK_K, 1, 64).bfloat16(), Mask.full(BLOCK_K, BLOCK_K)
    out, _, row_max = _forward(q, k, v, mask)
    exact = dout.double().sum((1, 2), keepdim=True).expand(1, BLOCK_K, 1, 64) / (1 << 20)
    for largest, kept in ((row_max, True), (row_max + math.log(1 << 20), False)):
        dv = _gradients(q, k, v, dout, out, row_max + math.log(1 << 20), largest, mask, "fp8")["dv"]
        assert _error(dv, exact) <= 0.05 if kept else not dv.any()


@pytest.mark.parametrize("products", PRODUCTS)
def test_sets_of_keys_add_up(products):
    q, k, v, dout = _tensors("normal", 256, 64)
    mask = Mask.band(256, 256, causal=True)
    state = _forward(q, k, v, mask)
    whole = _gradients(q, k, v, dout, *state, mask, products)
    options = {"softmax_scale": 0.125, "products": products, "row_max": state[2]}
    run = Fp8ReferenceBackward(dout, q, *state[:2], num_kv_heads=1, **options)
    dk, dv = torch.zeros(2, *k.shape)
    for start in (0, 128):
        keys = slice(start, start + 128)
        hop = Mask.of(256, 128, [Region(0, 256, 0, 128, upper=-start)])
        run.add(k[:, keys], v[:, keys], hop, dk[:, keys], dv[:, keys])
    for name, x in zip(_NAMES, (run.finish(), dk, dv), strict=True):
        assert _error(x, whole[name].double()) <= 1e-3, name


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_gradients_follow_the_scale_of_dout(products, scale):
    """A scaled loss makes no gradient overflow or round to 0."""
    q, k, v, dout = _tensors("normal", 128, 64)
    mask = Mask.band(128, 128, causal=True)
    state = _forward(q, k, v, mask)
    plain = _gradients(q, k, v, dout, *state, mask, products)
    scaled = _gradients(q, k, v, dout * 2.0 ** round(math.log2(scale)), *state, mask, products)
    for name in _NAMES:
        assert _error(scaled[name].double() / 2.0 ** round(math.log2(scale)), plain[name].double()) <= 4e-3, name


@pytest.mark.parametrize("products", PRODUCTS)
def test_gradients_of_lse(products):
    """Rows with a dout, and those whose dout is 0, which only dlse scales."""
    q, k, v, dout = _tensors("normal", 256, 64)
    dlse, mask = torch.randn(1, 2, 256, generator=torch.Generator().manual_seed(1)), Mask.band(256, 256, causal=True)
    dout[:, 128:] = 0.0
    inputs = (x.double() for x in (q, k, v))
    exact = attention(*inputs, mask, 0.125, dout=dout.double(), dlse=dlse.double())
    got = _gradients(q, k, v, dout, *_forward(q, k, v, mask), mask, products, dlse)
    for name, rows in (("dq", slice(128)), ("dq", slice(128, None)), ("dk", slice(None)), ("dv", slice(None))):
        assert _error(got[name][:, rows], exact[name][:, rows]) <= _LIMITS[64, "normal"], (name, rows)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("zeros", [slice(220, 230), slice(200, 256)], ids=["some", "all"])
def test_nan_reaches_every_gradient_that_depends_on_it(zeros, place, products):
    """Also if dO is 0 in some or all of the rows that see it. Rows of other documents keep their bits."""
    q, k, v, dout = _tensors("normal", 256, 64)
    dout[0, zeros] = 0.0
    mask, row = Mask.documents([0, 128, 256]), 200
    clean = _gradients(q, k, v, dout, *_forward(q, k, v, mask), mask, products)
    plant(place, row, q, k, v, dout)
    broken = _gradients(q, k, v, dout, *_forward(q, k, v, mask), mask, products)
    check_reach(mask, place[0], row, broken)
    assert torch.equal(broken["dq"][0, :128], clean["dq"][0, :128])


@pytest.mark.parametrize(
    "products, head_dim, deterministic, error, message",
    [
        ("fp8_scores", 256, False, NotImplementedError, "head_dim .* at most 128 .*, got 256; use 'hopper_fp8_all"),
        ("fp8", 64, False, ValueError, "row_max must be given .*, got None; pass what attention_forward writes"),
        ("fp8_scores", 64, True, NotImplementedError, "deterministic must be False .*, got True, .*; use 'hopper_fp8'"),
    ],
)
def test_refusals(products, head_dim, deterministic, error, message):
    q = torch.zeros(1, 64, 1, head_dim, dtype=torch.bfloat16)
    with pytest.raises(error, match=message):
        Fp8ReferenceBackward(
            q, q, q, torch.zeros(1, 1, 64), num_kv_heads=1, softmax_scale=1.0, products=products,
            deterministic=deterministic,
        )  # fmt: skip


def _call(impl: str, **options) -> tuple[torch.Tensor, ...]:
    q, k, v, dout = _tensors("normal", 128, 64)
    row_max = torch.empty(1, 2, 128) if needs_row_max(impl) else None
    out, lse = attention_forward(q, k, v, impl=impl, causal=True, row_max=row_max)
    options = {"row_max": row_max} | options
    return attention_backward(dout, q, k, v, out, lse, impl=impl, causal=True, **options)


def test_the_products_are_chosen_by_name():
    bf16, scores, fp8 = (_call(f"reference_fp8{x}") for x in ("", "_scores", "_all"))
    assert not torch.equal(bf16[0], scores[0]) and not torch.equal(scores[1], fp8[1])


def test_row_maxima_and_heads_must_be_used_and_fit():
    q, k = torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 128, 1, 64)
    run = Fp8ReferenceBackward(q, q, q, torch.zeros(1, 4, 128), num_kv_heads=2, softmax_scale=1.0)
    with pytest.raises(ValueError, match="must have the 2 heads with which the backward began, got 1; begin another"):
        run.add(k, k, Mask.full(128, 128), k, k)
    with pytest.raises(ValueError, match="num_kv_heads must be given with impl 'reference_fp8', got None"):
        begin_backward(q, q, q, torch.zeros(1, 4, 128), impl="reference_fp8")
    with pytest.raises(ValueError, match="row_max must be left out with impl='reference', got one; use"):
        _call("reference", row_max=torch.zeros(1, 2, 128))
    with pytest.raises(ValueError, match="row_max must be .*, got .*; make it with torch.empty_like"):
        _call("reference_fp8_all", row_max=torch.zeros(1, 2, 64))


def test_the_forward_keeps_the_largest_scores():
    """Over one set of keys or two; rows that see nothing have -inf."""
    q, k, v, _ = _tensors("normal", 256, 64)
    mask = Mask.of(256, 256, [Region(64, 256, 0, 256)])
    row_max = torch.empty(1, 2, 256)
    attention_forward(q, k, v, impl="reference_fp8", mask=mask, row_max=row_max)
    scores = torch.einsum("bihd,bjd->bhij", q.float(), k[:, :, 0].float()) / 8
    assert (row_max[..., :64] == -math.inf).all()
    torch.testing.assert_close(row_max[..., 64:], scores.amax(-1)[..., 64:], rtol=0, atol=0.2)
    state = {"out": torch.empty(q.shape), "lse": torch.empty_like(row_max), "row_max": torch.empty_like(row_max)}
    attention_forward(q, k[:, :128], v[:, :128], impl="reference_fp8", **state)
    attention_forward(q, k[:, 128:], v[:, 128:], impl="reference_fp8", acc=state["out"], **state)
    assert torch.equal(state["row_max"][..., 64:], row_max[..., 64:])
