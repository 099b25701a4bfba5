"""The FP8 quantiser and forward kernel, from their own source and launchers, against their specification. CPU.

Rounding is compared bit by bit. The forward returns fp32 where nothing else is tested, so that what is left between it
and the specification is a probability here and there that fp32 and fp64 round to different neighbours. CPU.
"""

import math

import pytest
import torch

from ringflash_kernels import fp8_reference
from ringflash_kernels.mask import Mask
from tests.emulator.emulator import Emulator
from tests.emulator.host import cuda_properties
from tests.emulator.oracle import MASKS, far_apart
from tests.helpers.mask_oracle import Shape, inputs

_CAUSAL = MASKS["causal, ragged"]
_BOTH = pytest.mark.parametrize("mask", [_CAUSAL, MASKS["documents"]], ids=["band", "bounds"])


def _operands(mask: Mask, shape: Shape):
    q, k, v, _ = inputs(mask, shape)
    return fp8_reference.quantise_q(q), fp8_reference.quantise_kv(k, v, for_backward=False)


def _forward(rows, records, mask, shape, *, emulator=None, out_dtype=torch.float32, acc=None, lse=None, num_sms=2):
    """out and lse of the kernel, written over NaN, and of the specification."""
    exact = torch.empty(rows.values.shape) if acc is None else acc.clone()
    exact_lse = torch.empty(shape.batch, shape.num_heads, mask.seqlen_q) if lse is None else lse.clone()
    fp8_reference.forward_rows(
        rows, records, mask, shape.scale, out=exact, lse=exact_lse, acc=None if acc is None else exact
    )
    out = torch.full(rows.values.shape, math.nan, dtype=out_dtype)
    lse = torch.full(exact_lse.shape, math.nan) if lse is None else lse.clone()
    with cuda_properties(num_sms):
        module = (emulator or Emulator()).load("fp8.forward")
        module.forward(rows, records, mask, shape.scale, out=out, lse=lse, acc=acc, num_sms=num_sms)
    return (out, lse), (exact, exact_lse)


def _check(got, exact) -> None:
    """Nearly all rows agree to the last bits; in the others P' of some key is the neighbouring number in e4m3."""
    (out, lse), (exact_out, exact_lse) = (tuple(x.float() for x in pair) for pair in (got, exact))
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    rounding = 2**-23 if got[0].dtype == torch.float32 else 2**-8
    pairs = (out.transpose(1, 2), exact_out.transpose(1, 2), rounding), (lse[..., None], exact_lse[..., None], 0)
    for x, y, close in pairs:
        error = (x - y).nan_to_num().abs().amax(-1)
        size = y.masked_fill(y.isinf(), 0.0).abs().amax(-1)
        assert (error > close * size + 2e-6 + 1e-6 * size).double().mean() <= 0.02
        assert error.max() <= size.max() / 4


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("resume", [False, True])
def test_masks(mask, resume):
    shape = Shape()
    rows, records = _operands(mask, shape)
    generator = torch.Generator().manual_seed(1)
    acc = torch.randn(rows.values.shape, generator=generator) if resume else None
    lse = torch.randn(1, 2, mask.seqlen_q, generator=generator) if resume else None
    _check(*_forward(rows, records, mask, shape, acc=acc, lse=lse))


@_BOTH
@pytest.mark.parametrize("shape", [Shape(128, 4, 1), Shape(256, 2, 2), Shape(64, 4, 2, batch=2)], ids=str)
def test_shapes(mask, shape):
    rows, records = _operands(mask, shape)
    _check(*_forward(rows, records, mask, shape, out_dtype=torch.bfloat16))
    acc, lse = torch.zeros(rows.values.shape), torch.full((shape.batch, shape.num_heads, mask.seqlen_q), -math.inf)
    _check(*_forward(rows, records, mask, shape, acc=acc, lse=lse))


def test_last_group_of_more_heads():
    """The order of tiles changes no bits."""
    shape, emulator = Shape(num_heads=3, num_kv_heads=3), Emulator()
    operands = _operands(_CAUSAL, shape)
    (first, _), _ = _forward(*operands, _CAUSAL, shape, num_sms=3)
    module = emulator.load("fp8.forward")
    module.kv_heads_per_group, module.heads_at_last = lambda *_: 1, lambda *_: 2
    (other, _), _ = _forward(*operands, _CAUSAL, shape, emulator=emulator, num_sms=3)
    assert torch.equal(first, other)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_interleavings(head_dim):
    """Partitions, blocks and copies in other orders give the same bits."""
    shape = Shape(head_dim)
    operands = _operands(_CAUSAL, shape)
    (first, _), _ = _forward(*operands, _CAUSAL, shape, num_sms=3)
    for seed in range(1, 4):
        (other, _), _ = _forward(*operands, _CAUSAL, shape, emulator=Emulator(seed, resident=3), num_sms=3)
        assert torch.equal(first, other)


def test_hops_give_what_one_call_gives():
    """Cut at a multiple of 128 keys: every probability is rounded alike."""
    mask, shape = Mask.full(128, 384), Shape()
    rows, records = _operands(mask, shape)
    (whole, whole_lse), _ = _forward(rows, records, mask, shape)
    (state, lse), _ = _forward(rows, records[:, :1], Mask.full(128, 128), shape)
    (out, lse), _ = _forward(rows, records[:, 1:], Mask.full(128, 256), shape, acc=state, lse=lse)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_scores_below_zero(head_dim):
    """Row maxima are found among integers, which order negative numbers backwards."""
    mask, shape = MASKS["causal, ragged"], Shape(head_dim)
    q, k, v, _ = inputs(mask, shape)
    q[..., 0], k[..., 0] = 3.0, -4.0 * head_dim**0.5  # scores of -12, and normal numbers
    operands = fp8_reference.quantise_q(q), fp8_reference.quantise_kv(k, v, for_backward=False)
    keys = fp8_reference.unpack(operands[1][:, :1], head_dim, for_backward=False)
    scores = fp8_reference.scores_of(operands[0], keys, slice(0, 64), shape.scale)
    assert (scores < 0).all()
    _check(*_forward(*operands, mask, shape))


@pytest.mark.parametrize("resume", [False, True])
def test_nan_reaches_the_rows_that_see_it(resume):
    mask, shape = _CAUSAL, Shape()
    q, k, v, _ = inputs(mask, shape)
    q[0, 3, 1, 7], k[0, 150, 0, 2] = math.nan, math.inf
    operands = fp8_reference.quantise_q(q), fp8_reference.quantise_kv(k, v, for_backward=False)
    acc, state = (torch.zeros(q.shape), torch.zeros(1, 2, 190)) if resume else (None, None)
    (out, lse), _ = _forward(*operands, mask, shape, acc=acc, lse=state)
    broken = (torch.arange(190) >= 150).repeat(2, 1)
    broken[1, 3] = True
    assert torch.equal(lse[0].isnan(), broken) and torch.equal(out[0].isnan().all(-1).T, broken)
    assert torch.equal(out[0].isnan().any(-1).T, broken)


def test_strided_operands_and_results():
    """Records apart from each other, outputs within a larger tensor: neighbouring memory stays as it was."""
    mask, shape = Mask.band(150, 150, causal=True), Shape(num_heads=2, batch=2)
    rows, records = _operands(mask, shape)
    apart = torch.full((2, 4, 3, records.shape[3] + 256), 255, dtype=torch.uint8)[:, 1:3, 1:2, : records.shape[3]]
    _, exact = _forward(rows, apart.copy_(records), mask, shape)
    out, lse = torch.full((2, 200, 3, 64), 7.0), torch.full((2, 3, 200), 7.0)
    with cuda_properties(2):
        Emulator().load("fp8.forward").forward(
            rows, apart, mask, shape.scale, out=out[:, 20:170, 1:], lse=lse[:, 1:, 20:170], num_sms=2
        )
    _check((out[:, 20:170, 1:], lse[:, 1:, 20:170]), exact)
    assert (out[:, :20] == 7).all() and (out[:, 170:] == 7).all() and (out[:, :, 0] == 7).all()
    assert (lse[:, :, :20] == 7).all() and (lse[:, :, 170:] == 7).all() and (lse[:, 0] == 7).all()


def test_offsets_beyond_32_bits(tmp_path):
    mask, shape = Mask.band(100, 100, causal=True), Shape(batch=3)
    q, k, v, _ = inputs(mask, shape)
    rows, records = _operands(mask, shape)
    q, k, v = (far_apart(x, tmp_path / name) for name, x in (("q", q), ("k", k), ("v", v)))
    out = far_apart(torch.full(q.shape, math.nan), tmp_path / "out")
    _, num_blocks, num_heads, size = records.shape
    step = 2**30 // size + 1  # the third sequence begins beyond 2^31 bytes
    numbers = step * torch.arange(3)[:, None, None] + torch.arange(num_blocks * num_heads).view(num_blocks, num_heads)
    array = torch.from_file(str(tmp_path / "records"), shared=True, size=3 * step * size, dtype=torch.uint8)
    far = array.as_strided(records.shape, (step * size, num_heads * size, size, 1))
    with cuda_properties(2):
        emulator = Emulator()
        quantise = emulator.load("fp8.quantise")
        assert torch.equal(quantise.quantise_q(q).values.float(), rows.values.float())
        quantise.quantise_kv(k, v, for_backward=False, out=array.view(-1, size), numbers=numbers)
        assert torch.equal(far, records)
        lse = torch.empty(3, 2, 100)
        emulator.load("fp8.forward").forward(rows, far, mask, shape.scale, out=out, lse=lse, num_sms=2)
    _, exact = _forward(rows, records, mask, shape)
    _check((out, lse), exact)


@pytest.mark.parametrize("for_backward", [False, True])
@pytest.mark.parametrize("head_dim", fp8_reference.HEAD_DIMS)
def test_quantiser_has_the_bits_of_the_specification(head_dim, for_backward):
    """Ragged, with numbers from 2^-9 to 2^9, zeros, NaN and infinity, and heads or columns interleaved."""
    generator = torch.Generator().manual_seed(head_dim)
    fused = torch.randn(2, 200, 6, head_dim, generator=generator)
    fused *= torch.exp2(torch.randint(-9, 9, (2, 200, 6, 1), generator=generator))
    fused[0, 3, 4, 5], fused[1, 150, 1, 7], fused[1, 150, 5, 7], fused[0, 128:, 4] = math.nan, math.inf, -math.inf, 0
    fused = fused.bfloat16()
    if for_backward:
        fused = fused.repeat_interleave(2, -1)[..., ::2]
    q, k, v = fused.split((2, 2, 2), 2)
    with cuda_properties(2):
        module = Emulator().load("fp8.quantise")
        rows, records = module.quantise_q(q), module.quantise_kv(k, v, for_backward=for_backward)
        dequantised = module.dequantised_q(q)
    exact = fp8_reference.quantise_q(q)
    scales = exact.scales.repeat_interleave(fp8_reference.BLOCK_Q, -1)[..., : q.shape[1]].transpose(1, 2)
    pairs = [(rows.scales, exact.scales), (rows.values, exact.values)]
    pairs += [(dequantised, exact.values.float() * scales.unsqueeze(-1))]
    exact = fp8_reference.quantise_kv(k, v, for_backward=for_backward)
    pairs += zip(*(fp8_reference.unpack(x, head_dim, for_backward=for_backward) for x in (records, exact)), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x.float(), y.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(records[..., -fp8_reference.TAIL_BYTES :], exact[..., -fp8_reference.TAIL_BYTES :])


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_scales_are_fp32_whatever_the_default_dtype_is(default):
    """The forward kernel is compiled for fp32 scales; in a step of Lightning's "bf16-true" the default is bf16."""
    q, *_ = inputs(_CAUSAL, Shape())
    torch.set_default_dtype(default)
    try:
        with cuda_properties(2):
            rows = Emulator().load("fp8.quantise").quantise_q(q)
            numbers = Emulator().load("fp8.backward_operands").QueryNumbers.of(q, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert rows.scales.dtype == numbers.scales.dtype == torch.float32
    assert torch.equal(rows.scales, fp8_reference.quantise_q(q).scales)
    with cuda_properties(2):
        Emulator().load("fp8.quantise").quantise_and_measure_q(q, *numbers[4:6], numbers.maxima)
    blocks = torch.nn.functional.pad(q.float(), (0, 0, 0, 0, 0, -q.shape[1] % 64)).unflatten(1, (-1, 64))
    assert torch.equal(numbers.scales, rows.scales) and not numbers.maxima.any()
    assert torch.equal(numbers.largest_q, blocks.abs().amax((2, 4)).transpose(1, 2))
