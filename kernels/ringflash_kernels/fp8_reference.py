"""FP8 attention in plain torch, on any device: the specification of the FP8 kernels.

q, k and v are rounded to e4m3 by blocks of rows, the probabilities block by block of keys. Sums are in fp64.

    rotation   q and k are multiplied by a Hadamard matrix with random signs, along head_dim: outliers spread over the
               head, and q k^T only gets a factor head_dim
    scales     powers of two: one of q per 64 rows and head, one of k and one of v per 128 keys and head. They depend
               on the rows of the block only. So a sequence may be cut at any multiple of 128, and each row has the
               same bits on every rank.
    records    128 keys of one head in contiguous memory: k, v and their scales. Ranks send and receive records.

P is rounded relative to the largest score m of its row *within the block of keys*: P' = 2^(s - m + OFFSET), between
2^-7 and 2^OFFSET. So a key that outweighs all others flushes only P' of its own block to 0, and P' has the same bits
on every rank, too. The sum over a block is scaled by 2^m and by the scale of v when it is added to O, in fp32.

P' is rounded by its logarithm (`rounded_powers`). out is normalised by sums of the rounded P', and lse is their log.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash_kernels.mask import Mask
from ringflash_kernels.merge import merge_

BLOCK_Q = 64  # rows of q that share a scale
BLOCK_K = 128  # keys of a record
# Order in which the transposed v stores each 16 keys: the registers of S are then the operand of P V, unmoved.
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
HEAD_DIMS = (64, 128, 256)
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # largest number of e4m3
OFFSET = 8.0  # P' of a block's largest score is 2^OFFSET: e4m3 holds it exactly, and smaller P' keep more bits
CENTRE = -0.45  # added to the bits of P', so that its error has a mean of 0.0006
SMALLEST_EXPONENT = -60  # smallest exponent of a scale, that of a block of zeros
TAIL_BYTES = 128  # bytes of a record after k and v: their scales in fp32, then zeros

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_SCORES = 1 << 20  # elements of one block of the score matrix


class Rows(NamedTuple):
    """Quantised q: values as q in e4m3, scales (batch, num_heads, num_blocks) in fp32."""

    values: Tensor
    scales: Tensor


class Keys(NamedTuple):
    """Unpacked records: k, v (batch, num_blocks * 128, num_kv_heads, head_dim), scales (batch, num_blocks, heads)."""

    k: Tensor
    v: Tensor
    k_scales: Tensor
    v_scales: Tensor


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the reason why this implementation cannot take the call, or None if it can."""
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} (fp16, bf16 or fp32)"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head_dim {q.shape[-1]} (one of {', '.join(map(str, HEAD_DIMS))})"
    return None


# ---------------------------------------------------------------------------------------------------- quantisation


@functools.cache
def sign_bits() -> tuple[int, ...]:
    """Return 256 random bits in eight words: a set bit negates that column of q and k before the transform."""
    digest = hashlib.sha256(b"ringflash").digest()
    return tuple(int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(8))


def signs(head_dim: int) -> Tensor:
    """Return the sign of each column, +1 or -1: (head_dim,), fp32."""
    words = sign_bits()
    return torch.tensor([1.0 - 2.0 * (words[i // 32] >> i % 32 & 1) for i in range(head_dim)], dtype=torch.float32)


def rotate(x: Tensor) -> Tensor:
    """Multiply the rows of x by the signs and the Hadamard matrix of +1 and -1.

    Args:
        x: (..., head_dim).
    Returns:
        rotated: as x, fp32. The product of two rotated rows is head_dim times that of the rows.
    Numerics: fp32; sums of columns 1 apart, then 2, 4, ... apart, so that every device returns the same bits.
    """
    x = x.float() * signs(x.shape[-1]).to(x.device)
    distance = 1
    while distance < x.shape[-1]:
        low, high = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([low + high, low - high], -2).flatten(-3)
        distance *= 2
    return x


def rotate_back(x: Tensor) -> Tensor:
    """Invert `rotate`: (..., head_dim), fp32."""
    sign = signs(x.shape[-1]).to(x.device)
    return rotate(x.float() * sign) * (sign / x.shape[-1])


def power_of_two(largest: Tensor) -> Tensor:
    """Return the smallest power of two by which |x| <= `largest` is divided to fit e4m3, in fp32."""
    bits = largest.float().contiguous().view(torch.int32)
    exponent = (bits + 0x1FFFFF >> 23) - 8  # 448 is 1.75 * 2^8: one more for a significand above 1.75
    return (exponent.clamp(min=127 + SMALLEST_EXPONENT) << 23).view(torch.float32)


def round_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Round x to e4m3 with one scale for each block of rows and head.

    Args:
        x: (batch, seqlen, num_heads, head_dim), fp32.
    Returns:
        values: (batch, num_blocks, block, num_heads, head_dim), e4m3, padded with zeros; NaN where x is not finite.
        scales: (batch, num_blocks, num_heads), fp32, powers of two.
    """
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % block)).unflatten(1, (-1, block))
    finite = x.isfinite()
    scales = power_of_two(x.abs().masked_fill(~finite, 0.0).amax((2, 4)))
    scaled = (x / scales[:, :, None, :, None]).masked_fill(~finite, math.nan)
    return scaled.to(E4M3), scales


def measure_rounding(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Measure the range of q, k and v, and how many of their values e4m3 loses.

    Returns:
        amax_q, amax_k, amax_v: largest absolute value, before the rotation.  saturated: fraction of values beyond 448
        times their scale, or not finite; 0 if q, k and v are finite.  flushed: fraction of values that are rounded to
        0. All are scalars in fp32.
    """
    found = {f"amax_{name}": x.abs().amax().float() for name, x in (("q", q), ("k", k), ("v", v))}
    lost = torch.zeros(2, dtype=torch.float32, device=q.device)
    for x, block in ((rotate(q), BLOCK_Q), (rotate(k), BLOCK_K), (v.float(), BLOCK_K)):
        values, scales = round_blocks(x, block)
        rounded = values.flatten(1, 2)[:, : x.shape[1]].float()
        limits = LARGEST * scales.repeat_interleave(block, 1)[:, : x.shape[1]].unsqueeze(-1)
        saturated = ~(x.abs() <= limits)
        lost += torch.stack([saturated.sum(), ((rounded == 0) & (x != 0)).sum()])
    saturated, flushed = lost / (q.numel() + 2 * k.numel())
    return {**found, "saturated": saturated, "flushed": flushed}


def quantise_q(q: Tensor) -> Rows:
    """Rotate and round the queries: one scale for each 64 rows and head."""
    values, scales = round_blocks(rotate(q), BLOCK_Q)
    return Rows(values.flatten(1, 2)[:, : q.shape[1]].contiguous(), scales.transpose(1, 2).contiguous())


def record_bytes(head_dim: int) -> int:
    """Return the bytes of a record: 128 keys of one head."""
    return 2 * BLOCK_K * head_dim + TAIL_BYTES


def quantise_kv(
    k: Tensor, v: Tensor, *, for_backward: bool, out: Tensor | None = None, numbers: Tensor | None = None
) -> Tensor:
    """Return the records of k and v, which a rank publishes and the kernels read.

    A record is the tile of k8 (128 keys, head_dim) | the tile of v8 | the scales of k and of v in fp32 | zeros up to
    128 bytes. The tile of v8 of the forward is transposed, (head_dim, 128 keys), with the keys of every 16 in
    KEY_ORDER; that of the backward is (128 keys, head_dim). Keys that pad the last block are zeros.

    Args:
        k, v: (batch, seqlen_k, num_kv_heads, head_dim).
        out: tensor for the result, or with `numbers` an array of records, (any, record_bytes). Default: a new tensor.
        numbers: (batch, num_blocks, num_kv_heads), int64: the number in `out` of each record.
    Returns:
        records: `out`; by default (batch, num_blocks, num_kv_heads, record_bytes), uint8.
    """
    k8, k_scales = round_blocks(rotate(k), BLOCK_K)
    v8, v_scales = round_blocks(v.float(), BLOCK_K)
    k8, v8 = (x.view(torch.uint8).permute(0, 1, 3, 2, 4) for x in (k8, v8))  # batch, block, head, key, column
    if not for_backward:
        v8 = v8.unflatten(3, (-1, 16))[..., list(KEY_ORDER), :].flatten(3, 4).transpose(3, 4)
    tail = torch.stack([k_scales, v_scales], -1)
    tail = torch.nn.functional.pad(tail, (0, TAIL_BYTES // 4 - tail.shape[-1])).view(torch.uint8)
    records = torch.cat([k8.flatten(3), v8.flatten(3), tail], -1)
    if out is None:
        return records
    if numbers is None:
        return out.copy_(records)
    out[numbers] = records
    return out


def unpack(records: Tensor, head_dim: int, *, for_backward: bool) -> Keys:
    """Return k8, v8 and their scales from records: the inverse of `quantise_kv`'s layout."""
    size = BLOCK_K * head_dim
    k8, v8, tail = records.split((size, size, TAIL_BYTES), -1)
    k8 = k8.contiguous().view(E4M3).unflatten(-1, (BLOCK_K, head_dim))
    if for_backward:
        v8 = v8.contiguous().view(E4M3).unflatten(-1, (BLOCK_K, head_dim))
    else:
        inverse = torch.tensor(KEY_ORDER).argsort().tolist()
        v8 = v8.unflatten(-1, (head_dim, BLOCK_K // 16, 16))[..., inverse].flatten(-2).transpose(-1, -2)
        v8 = v8.contiguous().view(E4M3)
    k8, v8 = (x.transpose(2, 3).flatten(1, 2) for x in (k8, v8))
    scales = tail.contiguous().view(torch.float32)
    return Keys(k8, v8, scales[..., 0], scales[..., 1])


# --------------------------------------------------------------------------------------------------------- forward


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None = None,
    row_max: Tensor | None = None,
) -> None:
    """See `api.attention_forward`; arguments are checked there."""
    operands = quantise_q(q), quantise_kv(k, v, for_backward=False)
    forward_rows(*operands, mask, softmax_scale, out=out, lse=lse, acc=acc, row_max=row_max)


def forward_rows(
    rows: Rows,
    records: Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None = None,
    row_max: Tensor | None = None,
) -> None:
    """Compute `forward` of quantised operands.

    Args:
        rows: result of `quantise_q`.
        records: result of `quantise_kv`, made for the forward: key j of the mask is row j % 128 of record j // 128.
            Later keys are not read.
    """
    if acc is None:
        out.zero_()
        lse.fill_(-math.inf)
        if row_max is not None:
            row_max.fill_(-math.inf)
    state = out.to(lse.dtype) if acc is None else acc
    for queries, cols, visible in blocks(rows.values, mask):
        of_cols = records[:, cols.start // BLOCK_K : cols.stop // BLOCK_K]
        keys = unpack(of_cols, rows.values.shape[-1], for_backward=False)
        scores = scores_of(rows, keys, queries, softmax_scale).masked_fill(~visible, -math.inf)
        if row_max is not None:
            largest = scores.amax(-1).flatten(1, 2) * math.log(2.0)
            row_max[..., queries] = torch.maximum(row_max[..., queries], largest.to(row_max.dtype))
        part, part_lse = _attend(scores, visible, keys.v.double(), keys.v_scales.double().transpose(1, 2))
        merge_(state[:, queries], lse[..., queries], part, part_lse.to(lse.dtype))
    if state is not out:
        out.copy_(state)


def blocks(q8: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield blocks of query rows with a visible key: rows, columns of whole records, visibility of each pair.

    The keys that pad the last record are not visible.
    """
    if not mask.regions:
        return
    first_key, end_key = mask.k_span
    cols = slice(first_key // BLOCK_K * BLOCK_K, -(-end_key // BLOCK_K) * BLOCK_K)
    visible = torch.nn.functional.pad(mask.dense(q8.device), (0, -mask.seqlen_k % BLOCK_K))
    count = max(1, _MAX_SCORES // (q8.shape[0] * q8.shape[2] * (cols.stop - cols.start)))
    first, end = mask.q_span
    for start in range(first, end, count):
        rows = slice(start, min(start + count, end))
        yield rows, cols, visible[rows, cols]


def scores_of(rows: Rows, keys: Keys, queries: slice, softmax_scale: float) -> Tensor:
    """Return scaled scores in units of log 2: (batch, num_kv_heads, group, rows, keys), fp64, exact for e4m3."""
    head_dim, num_kv_heads = rows.values.shape[-1], keys.k.shape[2]
    q = rows.values[:, queries].double()
    index = torch.arange(queries.start, queries.stop, device=q.device) // BLOCK_Q
    q = (q * rows.scales.transpose(1, 2)[:, index].double().unsqueeze(-1)).unflatten(2, (num_kv_heads, -1))
    k = keys.k.double() * keys.k_scales.double().repeat_interleave(BLOCK_K, 1).unsqueeze(-1)
    return torch.einsum("bihgd,bjhd->bhgij", q, k) * (softmax_scale / head_dim / math.log(2.0))


def _attend(scores: Tensor, visible: Tensor, v8: Tensor, v_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (batch, rows, num_heads, head_dim) and lse of scores in units of log 2, -inf where hidden."""
    scores = scores.unflatten(-1, (-1, BLOCK_K))  # batch, kv head, group, row, block, key
    largest = scores.amax(-1, keepdim=True)
    p = rounded_powers(scores - torch.where(largest == -math.inf, 0.0, largest) + OFFSET)
    top = largest.amax(-2, keepdim=True)
    weights = torch.where(largest == -math.inf, 0.0, torch.exp2(largest - top))
    total = (p * weights).sum((-1, -2))
    weighted = (p * weights * v_scales[:, :, None, None, :, None]).flatten(-2)
    out = _sums("bhgij,bjhd->bihgd", weighted, v8, visible)
    empty = total == 0
    lse = ((top.flatten(-3) - OFFSET) * math.log(2.0) + total.log()).masked_fill(empty, -math.inf)
    return (out / total.masked_fill(empty, 1.0).permute(0, 3, 1, 2).unsqueeze(-1)).flatten(2, 3), lse.flatten(1, 2)


def rounded_powers(x: Tensor) -> Tensor:
    """Return 2^x in e4m3 by its bits: 8 (x + 7) + CENTRE, rounded to an integer; 0 below 2^-6.9.

    The bits of an e4m3 number, as an integer, are eight times its binary logarithm plus 56: exactly at powers of two,
    up to 0.7 less between them. So no exponential is computed. The error is 3.1% in the root mean square and at most
    8%; of 2^x rounded to the nearest number it is 2.6% and 6%.
    """
    bits = (8 * (x + 7) + CENTRE).clamp(min=0).round().nan_to_num(nan=127)
    return bits.to(torch.uint8).view(E4M3).to(x.dtype)


def _sums(formula: str, pairs: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """Return sums over rows of queries or keys, where a NaN or infinity in a row reaches only those that see it.

    Args:
        formula: of the einsum of pairs and rows.
        pairs: factors, (batch, num_kv_heads, group, queries, keys), 0 for hidden pairs.
    """
    broken = ~rows.isfinite()
    sums = torch.einsum(formula, pairs, rows.masked_fill(broken, 0.0))
    if broken.any():
        reached = torch.einsum(formula, visible.to(pairs.dtype).expand_as(pairs), broken.to(pairs.dtype)) > 0
        sums = sums.masked_fill(reached, math.nan)
    return sums


# -------------------------------------------------------------------------------------------------------- backward

PRODUCTS = ("bf16", "fp8_scores", "fp8")
LARGEST_P = 256.0  # of the P' that is rounded to e4m3
SMALLEST_FACTOR = 2.0**-9  # of a row of dO and Q in the sums for dV and dK, while its P' has a larger one


class Fp8ReferenceBackward:
    """Gradients of one attention, hop by hop; see `api.begin_backward`.

    S is computed from the operands of the forward. `products` names the other products with operands in e4m3; the
    remaining ones have bf16 operands:

        "bf16"        none
        "fp8_scores"  dP = dO V^T
        "fp8"         dP, dV = P^T dO, dK = dS^T Q and dQ = dS K

    The gradients are those of attention over the rounded q, k and v; rounding itself has the gradient 1
    (straight-through). `hopper.fp8.backward_operands` explains the factors of rows and blocks, and that nothing
    saturates.

    Args:
        num_kv_heads: heads of the keys that `add` takes.
        row_max: (batch, num_heads, seqlen_q), the largest score of each row in natural units or more, for "fp8" only.
    """

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        num_kv_heads: int,
        softmax_scale: float,
        dlse: Tensor | None = None,
        deterministic: bool = False,
        products: str = "bf16",
        row_max: Tensor | None = None,
    ) -> None:
        check_products(products, q.shape[-1], deterministic)
        check_row_max(products, row_max)
        self.q, self.softmax_scale, self.products, self.num_kv_heads = q, softmax_scale, products, num_kv_heads
        self._rows = quantise_q(q)
        delta = (out.double() * dout.double()).sum(-1).transpose(1, 2)
        size = dout.double().norm(dim=-1).transpose(1, 2)
        if dlse is not None:
            delta, size = delta - dlse, size + dlse.abs()
        size = size.masked_fill(~size.isfinite(), math.nan)
        row_max = lse if row_max is None else row_max
        self._queries = self._operands(dout.double(), lse.double(), row_max.double(), delta, size)
        self.dq = torch.zeros_like(q, dtype=torch.float64)

    def add(self, k: Tensor, v: Tensor, mask: Mask, dk: Tensor, dv: Tensor, *, accumulate: bool = True) -> None:
        """Add the gradients of the visible pairs; see `api.BackwardPass`."""
        self.add_records(quantise_kv(k, v, for_backward=True), mask, dk, dv, accumulate=accumulate)

    def add_records(self, records: Tensor, mask: Mask, dk: Tensor, dv: Tensor, *, accumulate: bool = True) -> None:
        """Compute `add` of quantised keys."""
        check_num_kv_heads(records, self.num_kv_heads)
        seqlen = records.shape[1] * BLOCK_K
        grad_k, grad_v = (torch.zeros(x.shape[0], seqlen, *x.shape[2:], dtype=torch.float64) for x in (dk, dv))
        for rows, cols, visible in blocks(self._rows.values, mask):
            for total, part in zip(
                (self.dq[:, rows], grad_k[:, cols], grad_v[:, cols]),
                self._block(records, rows, cols, visible),
                strict=True,
            ):
                total += part.to(total.device)
        for total, part in ((dk, grad_k), (dv, grad_v)):
            part = part[:, : total.shape[1]].to(total.device)
            total.add_(part) if accumulate else total.copy_(part)

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return dq: (batch, seqlen_q, num_heads, head_dim), dtype of q; in `out` if given."""
        dq = rotate_back(self.dq * _of_rows(self._queries.factor) * self.softmax_scale)
        return dq.to(self.q.dtype) if out is None else out.copy_(dq)

    def _operands(self, dout: Tensor, lse: Tensor, row_max: Tensor, delta: Tensor, size: Tensor) -> _QuerySide:
        """Return the query side of every product as the kernels round it, for the products of this backward."""
        q, log2e = self.q.double(), math.log2(math.e)
        if self.products == "bf16":
            scales = self._rows.scales.repeat_interleave(BLOCK_Q, -1)[..., : q.shape[1]].transpose(1, 2).unsqueeze(-1)
            dout = dout.bfloat16().double()
            rounded = rotate_back(self._rows.values.float() * scales).double()
            return _QuerySide(lse * log2e, delta, dout, dout, rounded, torch.ones_like(size), None)
        seen = lse != -math.inf
        of_row = torch.where(size == 0, 0.0, LARGEST / size)
        relative = torch.where(seen, delta * of_row, 0.0)  # NaN also if only delta is
        relative = relative.masked_fill(relative.isinf(), math.nan)
        scaled = dout * _of_rows(of_row)
        if self.products == "fp8_scores":
            factor = size / LARGEST
            q1 = (q * _of_rows(factor)).bfloat16().double()
            return _QuerySide(
                lse * log2e, relative, rounded_to_e4m3(scaled), dout.bfloat16().double(), q1, factor, None
            )
        weight = torch.where(seen, size * torch.exp(row_max - torch.where(seen, lse, 0.0)), 0.0)
        total, largest_delta, largest_q = (
            _largest_of_group(x.abs(), self.num_kv_heads) for x in (weight, relative, q.abs().amax(-1).transpose(1, 2))
        )
        group = q.shape[2] // self.num_kv_heads
        of_heads = total.repeat_interleave(group, 1).unsqueeze(-1)
        share = torch.where(weight == 0, 0.0, weight / of_heads)
        of_operand = torch.maximum(share, share.sqrt().clamp(max=SMALLEST_FACTOR))
        of_p = torch.where(share == 0, 0.0, share / of_operand)
        reference = torch.where(of_p > 0, row_max * log2e - math.log2(LARGEST_P) - of_p.log2(), math.inf)
        of_q = of_operand * (LARGEST / largest_q.repeat_interleave(group, 1).unsqueeze(-1))
        maxima = torch.stack([total, largest_delta, largest_q])
        dout1, q1 = rounded_to_e4m3(scaled * _of_rows(of_operand)), rounded_to_e4m3(q * _of_rows(of_q))
        factor = of_operand * of_heads / (LARGEST * LARGEST_P)
        return _QuerySide(reference, relative, rounded_to_e4m3(scaled), dout1, q1, factor, maxima)

    def _gains(self, v: Tensor) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Return 2^g of each key, (batch, keys, num_kv_heads), and the factors of the sums for dK and for dV."""
        if self._queries.maxima is None:
            return v.new_ones(v.shape[:3]), self.softmax_scale, 1.0
        total, delta, largest_q = self._queries.maxima
        size = v.norm(dim=-1).nan_to_num(0.0, 0.0).unflatten(1, (-1, BLOCK_K)).amax(2)
        bound = (480.0 * size + delta.unsqueeze(1)) * (LARGEST_P / LARGEST)
        gain = torch.exp2(bound.log2().ceil().clamp(-60, 60)).repeat_interleave(BLOCK_K, 1)
        of_dv = total / (LARGEST * LARGEST_P)
        of_dk = self.softmax_scale * of_dv * largest_q / LARGEST
        return gain, gain.unsqueeze(-1) * of_dk[:, None, :, None], of_dv[:, None, :, None]

    def _block(self, records: Tensor, rows: slice, cols: slice, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the terms of a block of rows in dq, before its factors, and in dk and dv."""
        x, num_kv_heads = self._queries, records.shape[2]
        of_cols = records[:, cols.start // BLOCK_K : cols.stop // BLOCK_K]
        found = unpack(of_cols, self.q.shape[-1], for_backward=True)
        k, v = (
            values.double() * scales.double().repeat_interleave(BLOCK_K, 1).unsqueeze(-1)
            for values, scales in ((found.k, found.k_scales), (found.v, found.v_scales))
        )
        gain, of_dk, of_dv = self._gains(v)
        scores = scores_of(self._rows, found, rows, self.softmax_scale)
        reference, delta = (y[..., rows].unflatten(1, (num_kv_heads, -1)).unsqueeze(-1) for y in (x.reference, x.delta))
        dout, dout1, q1 = (y[:, rows].unflatten(2, (num_kv_heads, -1)) for y in (x.dout, x.dout1, x.q1))
        hidden = ~visible | (reference == -math.inf)
        p = torch.exp2(scores - reference).masked_fill(hidden, 0.0)
        dp = torch.einsum("bihgd,bjhd->bhgij", dout, v)
        relative = ((dp - delta) / gain.permute(0, 2, 1)[:, :, None, None]).masked_fill(hidden, 0.0)
        ds = ds_of_dk = p * relative
        if self.products == "fp8" and k.shape[3] > 128:  # there P is in fp16
            ds_of_dk = p.half().double() * relative
        low = rounded_to_e4m3 if self.products == "fp8" else rounded_to_bf16
        grad_q = _sums("bhgij,bjhd->bihgd", low(ds), k * gain.unsqueeze(-1), visible).flatten(2, 3)
        grad_k = _sums("bhgij,bihgd->bjhd", low(ds_of_dk), q1, visible) * of_dk
        return grad_q, grad_k, _sums("bhgij,bihgd->bjhd", low(p), dout1, visible) * of_dv


class _QuerySide(NamedTuple):
    """The query side in fp64: reference of P, delta, dO of dP, dO of dV, Q of dK, factor of dQ; maxima of groups."""

    reference: Tensor
    delta: Tensor
    dout: Tensor
    dout1: Tensor
    q1: Tensor
    factor: Tensor
    maxima: Tensor | None


begin_backward = Fp8ReferenceBackward


def check_products(products: str, head_dim: int, deterministic: bool) -> None:
    """Raise NotImplementedError unless such gradients can be computed."""
    assert products in PRODUCTS, products
    remedy = "use 'hopper_fp8', whose backward is in bf16"
    if products == "fp8_scores" and head_dim > 128:
        raise NotImplementedError(
            f"head_dim must be at most 128 with only scores of the backward in FP8, got {head_dim}; use "
            "'hopper_fp8_all' or 'hopper_fp8'."
        )
    if products != "bf16" and deterministic:
        raise NotImplementedError(
            "deterministic must be False with a backward in FP8, got True, or torch.use_deterministic_algorithms is "
            f"on; {remedy}."
        )


def check_row_max(products: str, row_max: Tensor | None) -> None:
    """Raise ValueError if gradients need the largest scores and there are none."""
    if products == "fp8" and row_max is None:
        raise ValueError(
            "row_max must be given with all products in FP8, or probabilities of long rows would round to 0, got None; "
            "pass what attention_forward writes there."
        )


def check_num_kv_heads(records: Tensor, num_kv_heads: int) -> None:
    """Raise ValueError unless records have the heads for which a backward has begun."""
    if records.shape[2] != num_kv_heads:
        raise ValueError(
            f"k and v must have the {num_kv_heads} heads with which the backward began, got {records.shape[2]}; begin "
            "another one for them."
        )


def rounded_to_e4m3(x: Tensor) -> Tensor:
    """Round x to e4m3, saturating, and return it in its dtype."""
    return x.float().clamp(-LARGEST, LARGEST).to(E4M3).to(x.dtype)


def rounded_to_bf16(x: Tensor) -> Tensor:
    """Round x to bf16, and return it in its dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def _of_rows(x: Tensor) -> Tensor:
    """View (batch, num_heads, rows) as a factor of (batch, rows, num_heads, head_dim)."""
    return x.transpose(1, 2).unsqueeze(-1)


def _largest_of_group(x: Tensor, num_kv_heads: int) -> Tensor:
    """Return the largest finite value of the query heads that share keys: (batch, num_kv_heads).

    Args:
        x: (batch, num_heads, rows).
    """
    return x.masked_fill(~x.isfinite(), 0.0).amax(-1).unflatten(1, (num_kv_heads, -1)).amax(-1)
