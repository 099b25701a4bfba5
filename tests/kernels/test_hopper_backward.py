"""The Hopper backward against fp64, on one Hopper GPU: every head_dim, both dtypes, masks, ragged lengths, GQA,
strides, several hops, rows that see nothing, repeat runs. Every head_dim meets every mask in bf16; fp16 and the
deterministic path meet a subset, since they differ in the operands' type and in the order of the additions to dQ only
(at head_dim 192 and 256 not even in that).
"""

import pytest
import torch

from ringflash.testing.tolerance import assert_close
from ringflash_kernels.mask import Mask, Region
from tests.helpers.mask_oracle import Shape, attention, inputs, oracle_and_baseline
from tests.two_sided import kernel_masks

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from ringflash_kernels.hopper.backward import host
from ringflash_kernels.hopper.backward.host import HopperBackward

pytestmark = pytest.mark.gpu

HEAD_DIMS = (64, 96, 128, 192, (192, 128), 256)  # of keys and values, if values are narrower


def documents(*lengths, causal=True):
    """Packed documents of these lengths."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return Mask.documents(ends, causal=causal)


MASKS = {
    "full": Mask.full(512, 640),
    "causal": Mask.band(640, 640, causal=True),
    "ragged": Mask.full(333, 457),
    "ragged causal, more keys": Mask.band(333, 457, causal=True),
    "ragged causal, fewer keys": Mask.band(457, 333, causal=True),  # the first queries see nothing
    "window": Mask.band(700, 700, causal=True, window_size=(150, 0)),
    "two-sided window": Mask.band(500, 611, window_size=(70, 33)),
    "part of both": Mask.of(500, 600, [Region(101, 407, 50, 333, None, 170)]),
    "documents": documents(1, 130, 64, 7, 300, 65),
    "full documents": documents(200, 3, 190, 120, causal=False),
    "gap": Mask.of(300, 700, [Region(0, 150, 0, 100), Region(150, 300, 500, 633)]),  # whole tiles that no query sees
    "chunks before all keys": Mask.of(
        256, 640, [Region(0, 128, 0, 320, upper=192), Region(128, 256, 0, 640, upper=384)]
    ),
    "three keys": Mask.full(70, 3),
    "one query": Mask.full(1, 300),
    **kernel_masks.MASKS,
}


def draw(shape, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


class Case:
    """Inputs in a low dtype, gradients in fp64 (`exact`) and by plain attention in the low dtype (`baseline`)."""

    def __init__(self, mask, head_dim, num_heads=2, num_kv_heads=2, batch=2, dtype=torch.bfloat16, seed=0, dlse=False):
        width, value_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, None)
        shape = Shape(width, num_heads, num_kv_heads, batch, dtype, value_dim)
        self.mask, self.scale = mask, shape.scale
        self.q, self.k, self.v, self.dout = inputs(mask, shape, seed=seed, device="cuda")
        self.dlse = draw((batch, num_heads, mask.seqlen_q), torch.float32, seed + 9) if dlse else None
        self.compute()

    def compute(self):
        """Compute the gradients to compare with, and out and lse, from which a backward begins."""
        grads = {"dout": self.dout} | ({} if self.dlse is None else {"dlse": self.dlse})
        self.exact, self.baseline = oracle_and_baseline(self.q, self.k, self.v, self.mask, self.scale, **grads)
        self.out, self.lse = self.exact["out"].to(self.q.dtype), self.exact["lse"].float()

    def backward(self, **options):
        return HopperBackward(
            self.dout, self.q, self.out, self.lse, softmax_scale=self.scale, dlse=self.dlse, **options
        )

    def run(self, accumulate, *, fp32=False, **options):
        """dq, dk, dv of one hop; buffers to be overwritten hold NaN before, in fp32 they are views of one."""
        backward = self.backward(**options)
        dtype = torch.float32 if accumulate or fp32 else self.k.dtype
        fill = 0.0 if accumulate else float("nan")
        widths = [x.shape[3] for x in (self.k, self.v)]
        if fp32:
            dk, dv = torch.full((*self.k.shape[:3], sum(widths)), fill, dtype=dtype, device="cuda").split(widths, 3)
        else:
            dk, dv = (torch.full(x.shape, fill, dtype=dtype, device="cuda") for x in (self.k, self.v))
        backward.add(self.k, self.v, self.mask, dk, dv, accumulate=accumulate)
        return backward.finish(options.get("only_dq")), dk, dv

    def check(self, grads):
        """Assert the errors of dq, dk, dv, chunk by chunk."""
        assert_close(dict(zip(("dq", "dk", "dv"), grads, strict=True)), self.exact, self.baseline, num_chunks=4)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_masks(head_dim, name, accumulate):
    case = Case(MASKS[name], head_dim)
    case.check(case.run(accumulate))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", ["deep, window", "full", "ragged causal, fewer keys"])
def test_several_tiles_of_a_cta(name, head_dim, accumulate, monkeypatch):
    """Three CTAs draw all tiles, at 64 under a window only; again and again, from one counter."""
    monkeypatch.setattr(host, "count_sms", lambda device: 3)
    for heads in (2, 2), (4, 2):
        case = Case(MASKS[name], head_dim, *heads)
        for _ in range(3):
            case.check(case.run(accumulate, only_dq=torch.full_like(case.q, torch.nan)))


@pytest.mark.parametrize("num_sms", [3, 132])
@pytest.mark.parametrize("accumulate", [False, True])
def test_other_heads_are_done_beside(accumulate, num_sms, monkeypatch):
    """Each head is a section of its own, prepared and cast beside the tiles of others; again and again."""
    monkeypatch.setattr(host, "count_sms", lambda device: num_sms)
    for name in ("_L2_BYTES_PER_SECTION", "_BESIDE_TOGETHER"):
        monkeypatch.setattr(host, name, 1)
    case = Case(MASKS["deep, window"], 128, 8, 8)
    for _ in range(10):
        dq, dk, dv = torch.full_like(case.q, torch.nan), *(torch.zeros(case.k.shape, device="cuda") for _ in range(2))
        backward = case.backward(only_dq=dq)
        backward.add(case.k, case.v, case.mask, dk, dv, accumulate=accumulate)
        case.check((backward.finish(dq), dk, dv))


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_heads(head_dim, heads, accumulate):
    case = Case(MASKS["ragged causal, more keys"], head_dim, *heads)
    case.check(case.run(accumulate))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", ["ragged causal, more keys", "documents", "part of both", "gap"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_stored_in_fp32(head_dim, name, heads, deterministic):
    """Heads that share keys are summed by one CTA (deterministic) or added to zeros."""
    case = Case(MASKS[name], head_dim, *heads)
    case.check(case.run(False, fp32=True, deterministic=deterministic))


@pytest.mark.parametrize("name", ["ragged causal, fewer keys", "documents"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fp16(head_dim, name):
    case = Case(MASKS[name], head_dim, dtype=torch.float16)
    case.check(case.run(False))


@pytest.mark.parametrize("name", ["causal", "ragged causal, fewer keys", "documents", "part of both", "deep, window"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_deterministic(head_dim, name, accumulate):
    case = Case(MASKS[name], head_dim, 4, 2)
    first = case.run(accumulate, deterministic=True)
    case.check(first)
    for _ in range(3):
        again = case.run(accumulate, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_sums_of_many_tiles_repeat(head_dim):
    """fp32 sums over 64 key tiles, before they are cast; without `deterministic` they differ from run to run."""
    q, k, v, dout = (draw((1, 8192, heads, head_dim), torch.bfloat16, heads) for heads in (4, 2, 2, 4))
    lse = torch.full((1, 4, 8192), 9.5, device="cuda")

    def sums(deterministic: bool) -> torch.Tensor:
        backward = HopperBackward(dout, q, q, lse, softmax_scale=head_dim**-0.5, deterministic=deterministic)
        dk, dv = (torch.zeros(k.shape, device="cuda") for _ in range(2))
        backward.add(k, v, Mask.band(8192, 8192, causal=True), dk, dv)
        return backward.accumulated_dq()

    first = sums(True)
    assert first.isfinite().all() and all(torch.equal(first, sums(True)) for _ in range(5))
    assert not torch.equal(sums(False), sums(False))


@pytest.mark.parametrize("name", ["causal", "documents"])
@pytest.mark.parametrize("head_dim", [192, 256])
def test_dq_of_wide_heads_repeats(head_dim, name):
    """It is computed apart, in a fixed order, in any case."""
    case = Case(MASKS[name], head_dim, 4, 2)
    first = case.run(True)
    case.check(first)
    assert all(torch.equal(first[0], case.run(True)[0]) for _ in range(3))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradient_through_lse(head_dim):
    case = Case(MASKS["ragged causal, fewer keys"], head_dim, dlse=True)
    case.check(case.run(False))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_hops(head_dim, deterministic):
    """Two hops over halves of the keys, gradients added, equal one over all of them."""
    case = Case(MASKS["causal"], head_dim, 4, 2)
    backward = case.backward(deterministic=deterministic)
    dk, dv = (torch.zeros(x.shape, device="cuda") for x in (case.k, case.v))
    for keys in (slice(0, 320), slice(320, 640)):
        mask = Mask.of(640, 320, [Region(0, 640, 0, 320, None, -keys.start)])
        backward.add(case.k[:, keys], case.v[:, keys], mask, dk[:, keys], dv[:, keys])
    case.check((backward.finish(), dk, dv))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_strides(head_dim):
    """Heads before the sequence, and slices of a fused projection, read in place."""
    case = Case(MASKS["causal"], head_dim)
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    case.dout = torch.cat((case.dout, case.dout), 3)[..., : case.dout.shape[3]]
    case.k, case.v = (torch.cat((x, x), 2)[:, :, 2:] for x in (case.k, case.v))
    case.check(case.run(False))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dq_into_a_view(head_dim, deterministic):
    """The heads of a larger tensor are written, the others left."""
    case = Case(MASKS["ragged causal, more keys"], head_dim)
    backward = case.backward(deterministic=deterministic)
    dk, dv = (torch.empty_like(x) for x in (case.k, case.v))
    backward.add(case.k, case.v, case.mask, dk, dv, accumulate=False)
    whole = torch.full((2, 333, 5, case.q.shape[3]), float("nan"), dtype=case.q.dtype, device="cuda")
    dq = backward.finish(whole[:, :, 1:3])
    case.check((whole[:, :, 1:3], dk, dv))
    assert torch.equal(dq, backward.finish())
    assert whole[:, :, [0, 3, 4]].isnan().all()


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_nothing_visible(num_kv_heads):
    case = Case(Mask.of(64, 96, []), 64, 2, num_kv_heads)
    assert all(not x.any() for x in case.run(False))


def test_expanded_gradient():
    """The gradient of a sum is one number seen everywhere, with strides of 0."""
    case = Case(MASKS["causal"], 64)
    case.dout = torch.ones_like(case.dout)
    case.compute()
    case.dout = case.dout[:1, :1, :1, :1].expand(case.q.shape)
    case.check(case.run(False))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_negative_control(head_dim):
    """The tolerance notices one missing key block."""
    case = Case(MASKS["causal"], head_dim)
    full, case.mask = case.mask, Mask.of(640, 640, [Region(0, 640, 0, 512, None, 0)])
    grads = case.run(False)
    case.mask = full
    with pytest.raises(AssertionError):
        case.check(grads)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_random_shapes(head_dim):
    generator = torch.Generator().manual_seed(sum(head_dim) if isinstance(head_dim, tuple) else head_dim)
    pick = lambda *values: values[int(torch.randint(len(values), (), generator=generator))]  # noqa: E731
    for seed in range(8):
        seqlen_q, seqlen_k = (int(torch.randint(16, 500, (), generator=generator)) for _ in range(2))
        window = pick((-1, -1), (100, 0), (37, 90))
        mask = Mask.band(seqlen_q, seqlen_k, causal=pick(True, False), window_size=window)
        num_kv_heads = pick(1, 2)
        case = Case(mask, head_dim, num_kv_heads * pick(1, 3), num_kv_heads, pick(1, 3), seed=seed)
        case.check(case.run(pick(True, False)))


def test_offsets_beyond_32_bits():
    """The last head of a tensor of more than 2**32 elements equals the same head in a tensor without the others."""
    seqlen, num_heads, head_dim = 1 << 20, 33, 128
    q, dout = (torch.empty(1, seqlen, num_heads, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rows = slice(seqlen - 512, seqlen)
    for x in (q, dout):
        x[:, :, -1].normal_()
    k, v = (draw((1, 512, num_heads, head_dim), torch.bfloat16, i) for i in range(2))
    lse = torch.full((1, num_heads, seqlen), float("inf"), device="cuda")
    mask = Mask.of(seqlen, 512, [Region(rows.start, rows.stop, 0, 512)])
    small_q, small_k, small_v = q[:, rows, -1:], k[:, :, -1:], v[:, :, -1:]
    small = (x.float() for x in (small_q, small_k, small_v))
    out, small_lse = attention(*small, Mask.full(512, 512), head_dim**-0.5).values()
    lse[:, -1:, rows] = small_lse
    full_out = torch.zeros_like(q)
    full_out[:, rows, -1:] = out.bfloat16()
    grads = []
    for args, keys, m in (
        ((dout, q, full_out, lse), (k, v), mask),
        ((dout[:, rows, -1:], small_q, out.bfloat16(), small_lse), (small_k, small_v), Mask.full(512, 512)),
    ):
        backward = HopperBackward(*args, softmax_scale=head_dim**-0.5, deterministic=True)
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in keys)
        backward.add(*keys, m, dk, dv, accumulate=False)
        grads.append((backward.finish()[:, -512:, -1:], dk[:, :, -1:], dv[:, :, -1:]))
        del backward
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
