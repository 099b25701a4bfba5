"""The FP8 backward on one Hopper GPU: against its specification, for every choice of products and head_dim, and where
rows are too long for the specification to follow.
"""

import math

import pytest
import torch

from ringflash_kernels import attention_backward, attention_forward, fp8_reference
from ringflash_kernels.mask import Mask, Region
from tests.helpers.nan_reach import PLACES, check_reach, plant
from tests.two_sided import kernel_masks

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from ringflash_kernels.hopper.fp8.backward import Fp8Backward
from ringflash_kernels.hopper.fp8.quantise import quantise_kv, quantise_q

pytestmark = pytest.mark.gpu

MASKS = {
    "full, ragged": Mask.full(333, 457),
    "causal, ragged": Mask.band(1100, 1100, causal=True),
    "causal, fewer keys": Mask.band(457, 333, causal=True),
    "window": Mask.band(700, 700, causal=True, window_size=(150, 0)),
    "documents": Mask.documents([0, 1, 131, 195, 502, 567]),
    "part of both": Mask.of(500, 600, [Region(101, 407, 50, 333, None, 170)]),
    **{name: kernel_masks.MASKS[name] for name in ("deep", "deep, window")},
}
CHOICES = [(head_dim, x) for head_dim in (64, 128) for x in fp8_reference.PRODUCTS] + [(256, "bf16"), (256, "fp8")]


def draw(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def difference(x, y) -> float:
    """The norm of the difference as a share of that of y."""
    assert x.isfinite().all()
    return float((x.double() - y.double()).norm() / y.double().norm())


def forward(q, k, v, mask, impl="reference_fp8"):
    """Return out, lse and row_max."""
    row_max = torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
    return *attention_forward(q, k, v, impl=impl, mask=mask, row_max=row_max), row_max


def gradients(impl, mask, q, k, v, dout, out, lse, row_max, products):
    impl += {"bf16": "", "fp8_scores": "_scores", "fp8": "_all"}[products]
    return attention_backward(dout, q, k, v, out, lse, impl=impl, mask=mask, row_max=row_max)


@pytest.mark.parametrize("head_dim, products", CHOICES)
@pytest.mark.parametrize(
    "mask, dtype",
    [*((name, torch.bfloat16) for name in MASKS), ("causal, ragged", torch.float16)],
    ids=[*MASKS, "causal, ragged, fp16"],
)
def test_kernels_follow_the_specification(mask, dtype, head_dim, products):
    """Sums in other orders move a few values to the neighbour in e4m3."""
    mask = MASKS[mask]
    q, dout = (draw(2, mask.seqlen_q, 4, head_dim, seed=i, dtype=dtype) for i in (0, 1))
    k, v = (draw(2, mask.seqlen_k, 2, head_dim, seed=i, dtype=dtype) for i in (2, 3))
    state = forward(q, k, v, mask)
    got, want = (gradients(impl, mask, q, k, v, dout, *state, products) for impl in ("hopper_fp8", "reference_fp8"))
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert difference(x, y) <= 0.012, name


@pytest.mark.parametrize("head_dim, products", [*((128, x) for x in fp8_reference.PRODUCTS), (256, "fp8")])
def test_sets_of_keys_add_up(head_dim, products):
    """Keys in three hops, and heads in slices of larger tensors, give the gradients of one call."""
    mask = Mask.band(900, 1000, causal=True)
    q, dout = draw(1, 900, 8, head_dim)[:, :, :4], draw(1, 900, 4, head_dim, seed=1)
    k, v = (draw(1, 1000, 6, head_dim, seed=i)[:, :, 2:4] for i in (2, 3))
    out, lse, row_max = forward(q, k, v, mask)
    want = gradients("hopper_fp8", mask, q, k, v, dout, out, lse, row_max, products)
    options = {"num_kv_heads": 2, "softmax_scale": head_dim**-0.5, "products": products, "row_max": row_max}
    run = Fp8Backward(dout, q, out, lse, **options)
    dk, dv = torch.zeros(2, *k.shape, device="cuda")
    for start, stop in ((0, 256), (256, 512), (512, 1000)):
        hop = Mask.of(900, stop - start, [Region(0, 900, 0, stop - start, upper=100 - start)])
        run.add(k[:, start:stop], v[:, start:stop], hop, dk[:, start:stop], dv[:, start:stop])
    for name, x, y in zip(("dq", "dk", "dv"), (run.finish(), dk, dv), want, strict=True):
        assert difference(x, y) <= 5e-3, name


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("head_dim, products", [(128, "fp8_scores"), (128, "fp8"), (256, "fp8")])
def test_sums_in_16_bits_are_those_in_fp32(head_dim, products, group):
    """dK and dV of few parts are added up in bf16, by CTAs that draw their tiles: again and again, from one counter."""
    mask = Mask.band(8100, 8100, causal=True)
    q, dout = (draw(1, 8100, 8, head_dim, seed=i) for i in (0, 1))
    k, v = (draw(1, 8100, 8 // group, head_dim, seed=i) for i in (2, 3))
    out, lse, row_max = forward(q, k, v, mask, "hopper_fp8")
    options = {"num_kv_heads": 8 // group, "softmax_scale": head_dim**-0.5, "products": products, "row_max": row_max}
    run = Fp8Backward(dout, q, out, lse, **options)
    want_dk, want_dv = torch.zeros(2, *k.shape, device="cuda")
    run.add(k, v, mask, want_dk, want_dv)
    want_dq = run.finish()
    for _ in range(3):
        dq, dk, dv = gradients("hopper_fp8", mask, q, k, v, dout, out, lse, row_max, products)
        for name, x, y in (("dq", dq, want_dq), ("dk", dk, want_dk), ("dv", dv, want_dv)):
            assert difference(x, y) <= 5e-3, name


def test_bf16_products_repeat_their_bits():
    mask = Mask.band(1000, 1000, causal=True)
    q, k, v, dout = (draw(1, 1000, 4, 128, seed=i) for i in range(4))
    out, lse = attention_forward(q, k, v, impl="reference_fp8", mask=mask)
    first, second = (
        attention_backward(dout, q, k, v, out, lse, impl="hopper_fp8", mask=mask, deterministic=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_million_equal_keys(head_dim):
    """Probabilities of 2^-20 reach dV and dK."""
    seqlen_k, seqlen_q, scale = 1 << 20, 1024, head_dim**-0.5
    q, dout = (draw(1, seqlen_q, 1, head_dim, seed=i) for i in (0, 1))
    k = draw(1, 1, 1, head_dim, seed=2).expand(1, seqlen_k, 1, head_dim).contiguous()
    v = draw(1, seqlen_k, 1, head_dim, seed=3)
    rows = quantise_q(q)
    keys = fp8_reference.unpack(quantise_kv(k[:, :128], v[:, :128], for_backward=True), head_dim, for_backward=True)
    key = keys.k[0, 0, 0].double() * keys.k_scales[0, 0, 0].double()
    scores = rows.values[0, :, 0].double() @ key * rows.scales[0, 0].repeat_interleave(64).double() * scale / head_dim
    row_max = scores.float()[None, None].contiguous()
    mask = Mask.full(seqlen_q, seqlen_k)
    out, lse, kept = forward(q, k, v, mask, impl="hopper_fp8")
    # A score is a sum of head_dim products with 13 bits.
    torch.testing.assert_close(lse, row_max + math.log(seqlen_k), rtol=0, atol=1e-3 * head_dim / 128)
    assert ((kept >= row_max - 1e-4) & (kept <= row_max + 0.7)).all()
    run = Fp8Backward(dout, q, out, lse, num_kv_heads=1, softmax_scale=scale, products="fp8", row_max=kept)
    dk, dv = torch.zeros(2, *k.shape, device="cuda")
    run.add(k, v, mask, dk, dv)
    exact = dout[0, :, 0].double()
    assert difference(dv[0, :, 0], (exact.sum(0) / seqlen_k).expand(seqlen_k, head_dim)) <= 0.05
    delta = (exact * out[0, :, 0].double()).sum(-1, keepdim=True)
    some = slice(0, seqlen_k, 997)
    ds = (exact @ v[0, some, 0].double().T - delta) / seqlen_k
    assert difference(dk[0, some, 0], ds.T @ q[0, :, 0].double() * scale) <= 0.07


def test_a_million_queries_of_few_keys():
    """Sums over queries keep their size, although the tensor cores add e4m3 products with 13 bits."""
    mask = Mask.full(1 << 20, 128)
    q, dout = draw(1, 1 << 20, 1, 128), draw(1, 1 << 20, 1, 128, seed=1) + 0.25
    k, v = (draw(1, 128, 1, 128, seed=i) for i in (2, 3))
    out, lse, row_max = forward(q, k, v, mask, impl="hopper_fp8")
    p = torch.exp(q[0, :, 0].float() @ k[0, :, 0].float().T * 128**-0.5 - lse[0, 0, :, None])
    exact = p.double().T @ dout[0, :, 0].double()
    dv = gradients("hopper_fp8", mask, q, k, v, dout, out, lse, row_max, "fp8")[2]
    ratio = (dv[0, :, 0].double() * exact).sum() / exact.square().sum()
    assert abs(float(ratio) - 1) <= 0.02


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("zeros", [slice(420, 430), slice(400, 512)], ids=["some", "all"])
def test_nan_reaches_every_gradient_that_depends_on_it(zeros, place, head_dim):
    """Also if dO is 0 in some or all of the rows that see it. Other documents keep their gradients."""
    mask, row = Mask.documents([0, 256, 512]), 400
    q, k, v, dout = (draw(1, 512, 2, head_dim, seed=i) for i in range(4))
    dout[0, zeros] = 0.0
    state = forward(q, k, v, mask, impl="hopper_fp8")
    choices = [x for width, x in CHOICES if width == head_dim]
    clean = {x: gradients("hopper_fp8", mask, q, k, v, dout, *state, x) for x in choices}
    plant(place, row, q, k, v, dout)
    state = forward(q, k, v, mask, impl="hopper_fp8")
    for products, expected in clean.items():
        got = gradients("hopper_fp8", mask, q, k, v, dout, *state, products)
        check_reach(mask, place[0], row, dict(zip(("dq", "dk", "dv"), got, strict=True)))
        for x, y in zip(got, expected, strict=True):
            assert difference(x[0, :256], y[0, :256]) <= 5e-3


@pytest.mark.parametrize("head_dim, products", [(128, "fp8_scores"), (128, "fp8"), (256, "fp8")])
@pytest.mark.parametrize("mask", [Mask.band(6000, 6000, causal=True), Mask.documents([0, 5000, 6000])], ids=str)
def test_overwritten_gradients_equal_added_ones(mask, head_dim, products):
    """Also where sums leave the tensor cores: rows of more than 64 blocks of queries."""
    q, dout = (draw(1, 6000, 4, head_dim, seed=i) for i in (0, 1))
    k, v = (draw(1, 6000, 4, head_dim, seed=i) for i in (2, 3))
    out, lse, row_max = forward(q, k, v, mask, impl="hopper_fp8")
    results = []
    for dtype in (None, torch.float32, torch.bfloat16):
        options = {"num_kv_heads": 4, "softmax_scale": head_dim**-0.5, "products": products, "row_max": row_max}
        run = Fp8Backward(dout, q, out, lse, **options)
        fill, dtype = (math.nan, dtype) if dtype else (0.0, None)
        dk, dv = (torch.full(x.shape, fill, dtype=dtype or torch.float32, device="cuda") for x in (k, v))
        run.add(k, v, mask, dk, dv, accumulate=dtype is None)
        results.append((run.finish(), dk, dv))
    for stored in results[1:]:
        for name, x, y in zip(("dq", "dk", "dv"), stored, results[0], strict=True):
            assert difference(x, y) <= 5e-3, name
