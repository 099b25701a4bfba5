"""FP8 attention in plain torch, on any device: the specification of the FP8 kernels.

q, k and v are rounded to e4m3 by blocks of rows, the probabilities block by block of keys. Sums are in fp64.

    rotation   q and k times one Hadamard matrix with random signs, along head_dim: outliers spread over the head,
               q k^T is unchanged but for the factor head_dim
    scales     powers of two: of q for every 64 rows, of k and of v for every 128 keys, and for every head. They follow
               from the rows of the block only, so however a sequence is cut at multiples of 128, each row has the same
               bits on every rank.
    records    a block of 128 keys of one head in one piece of memory: k, v and their scales. This is what travels.

P is rounded relative to the largest score m of its row *within the block of keys*: P' = 2^(s - m + OFFSET), between
2^-10 and 2^OFFSET. So a key that outweighs all others flushes those of its own block only, and P' too has the same bits
on every rank. The sum over a block is scaled by 2^m and by the scale of v when it is added to O, in fp32.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ringflash_kernels.mask import Mask
from ringflash_kernels.merge import merge_

BLOCK_Q = 64  # rows of q that share a scale
BLOCK_K = 128  # keys of a record
# The keys of every 16 as the transposed v stores them: the registers of S are then the operand of P V as they are.
KEY_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
HEAD_DIMS = (64, 128, 256)
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
OFFSET = 8.0  # P of a block's largest score is 2^OFFSET, which e4m3 holds exactly, and smaller ones keep more bits
SMALLEST_EXPONENT = -60  # of a scale; a block of zeros has this one
TAIL_BYTES = 128  # of a record, behind k and v: their scales in fp32, then zeros

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_SCORES = 1 << 20  # elements of one block of the score matrix


class Rows(NamedTuple):
    """Quantised q: values as q in e4m3, scales (batch, num_heads, num_blocks) in fp32."""

    values: torch.Tensor
    scales: torch.Tensor


class Keys(NamedTuple):
    """Unpacked records: k, v (batch, num_blocks * 128, num_kv_heads, head_dim), scales (batch, num_blocks, heads)."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor


def unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Return why this implementation cannot take the call; None when it can."""
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} (fp16, bf16 or fp32)"
    if q.shape[-1] not in HEAD_DIMS:
        return f"head_dim {q.shape[-1]} (one of {', '.join(map(str, HEAD_DIMS))})"
    return None


# ---------------------------------------------------------------------------------------------------- quantisation


@functools.cache
def sign_bits() -> tuple[int, ...]:
    """256 random bits in eight words: a set bit negates that column of q and k before the transform."""
    digest = hashlib.sha256(b"ringflash").digest()
    return tuple(int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(8))


def signs(head_dim: int) -> torch.Tensor:
    """The sign of each column, +1 or -1: (head_dim,), fp32."""
    words = sign_bits()
    return torch.tensor([1.0 - 2.0 * (words[i // 32] >> i % 32 & 1) for i in range(head_dim)])


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of x by the signs and the Hadamard matrix of +1 and -1.

    Args:
        x: (..., head_dim).
    Returns:
        fp32. The products of two rotated rows are head_dim times those of the rows.
    Numerics: sums in fp32, of columns 1, 2, 4, ... apart in this order: the same bits on every device.
    """
    x = x.float() * signs(x.shape[-1]).to(x.device)
    distance = 1
    while distance < x.shape[-1]:
        low, high = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([low + high, low - high], -2).flatten(-3)
        distance *= 2
    return x


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Invert `rotate`: (..., head_dim), fp32."""
    sign = signs(x.shape[-1]).to(x.device)
    return rotate(x.float() * sign) * (sign / x.shape[-1])


def power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that brings |x| <= `largest` within e4m3: fp32, at least 2^SMALLEST_EXPONENT."""
    bits = largest.float().contiguous().view(torch.int32)
    exponent = (bits + 0x1FFFFF >> 23) - 8  # 448 is 1.75 * 2^8: one more for a significand above 1.75
    return (exponent.clamp(min=127 + SMALLEST_EXPONENT) << 23).view(torch.float32)


def round_blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
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


def quantise_q(q: torch.Tensor) -> Rows:
    """Rotate and round the queries: one scale for each 64 rows and head."""
    values, scales = round_blocks(rotate(q), BLOCK_Q)
    return Rows(values.flatten(1, 2)[:, : q.shape[1]].contiguous(), scales.transpose(1, 2).contiguous())


def record_bytes(head_dim: int) -> int:
    """Bytes of one block of 128 keys and head."""
    return 2 * BLOCK_K * head_dim + TAIL_BYTES


def quantise_kv(
    k: torch.Tensor, v: torch.Tensor, *, for_backward: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Records of k and v: what a rank publishes and the kernels read.

    A record is the tile of k8 (128 keys, head_dim) | the tile of v8 | the scales of k and of v in fp32 | zeros up to
    128 bytes. The tile of v8 of the forward is transposed, (head_dim, 128 keys), with the keys of every 16 in
    KEY_ORDER; that of the backward is (128 keys, head_dim). Keys that pad the last block are zeros.

    Args:
        k, v: (batch, seqlen_k, num_kv_heads, head_dim).
        out: as the result, any strides of the first three dimensions. Default new.
    Returns:
        (batch, num_blocks, num_kv_heads, record_bytes), uint8.
    """
    k8, k_scales = round_blocks(rotate(k), BLOCK_K)
    v8, v_scales = round_blocks(v.float(), BLOCK_K)
    k8, v8 = (x.view(torch.uint8).permute(0, 1, 3, 2, 4) for x in (k8, v8))  # batch, block, head, key, column
    if not for_backward:
        v8 = v8.unflatten(3, (-1, 16))[..., list(KEY_ORDER), :].flatten(3, 4).transpose(3, 4)
    tail = torch.stack([k_scales, v_scales], -1)
    tail = torch.nn.functional.pad(tail, (0, TAIL_BYTES // 4 - tail.shape[-1])).view(torch.uint8)
    records = torch.cat([k8.flatten(3), v8.flatten(3), tail], -1)
    return records if out is None else out.copy_(records)


def unpack(records: torch.Tensor, head_dim: int, *, for_backward: bool) -> Keys:
    """k8, v8 and their scales of records: the inverse of `quantise_kv`'s layout."""
    size = BLOCK_K * head_dim
    k8, v8, tail = records.split((size, size, TAIL_BYTES), -1)
    k8 = k8.contiguous().view(E4M3).unflatten(-1, (BLOCK_K, head_dim))
    if for_backward:
        v8 = v8.contiguous().view(E4M3).unflatten(-1, (BLOCK_K, head_dim))
    else:
        place = torch.tensor(KEY_ORDER).argsort().tolist()
        v8 = v8.unflatten(-1, (head_dim, BLOCK_K // 16, 16))[..., place].flatten(-2).transpose(-1, -2)
        v8 = v8.contiguous().view(E4M3)
    k8, v8 = (x.transpose(2, 3).flatten(1, 2) for x in (k8, v8))
    scales = tail.contiguous().view(torch.float32)
    return Keys(k8, v8, scales[..., 0], scales[..., 1])


# --------------------------------------------------------------------------------------------------------- forward


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    acc: torch.Tensor | None = None,
) -> None:
    """See `api.attention_forward`; arguments are checked there."""
    forward_rows(quantise_q(q), quantise_kv(k, v, for_backward=False), mask, softmax_scale, out=out, lse=lse, acc=acc)


def forward_rows(
    rows: Rows,
    records: torch.Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    acc: torch.Tensor | None = None,
) -> None:
    """`forward` of quantised operands: key j of the mask is row j % 128 of record j // 128."""
    if acc is None:
        out.zero_()
        lse.fill_(-math.inf)
    state = out.to(lse.dtype) if acc is None else acc
    for queries, keys, visible in blocks(rows.values, mask):
        scores = scores_of(rows, records, queries, keys, softmax_scale)
        part, part_lse = _attend(scores.masked_fill(~visible, -math.inf), visible, *_values(records, rows, keys))
        merge_(state[:, queries], lse[..., queries], part, part_lse.to(lse.dtype))
    if state is not out:
        out.copy_(state)


def blocks(q8: torch.Tensor, mask: Mask) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Blocks of query rows with a visible key: rows, columns from the beginning of a record, visibility of each pair.

    Columns go on to the end of the last record; nobody sees the keys that pad it.
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


def scores_of(rows: Rows, records: torch.Tensor, queries: slice, keys: slice, softmax_scale: float) -> torch.Tensor:
    """Scaled scores in units of log 2: (batch, num_kv_heads, group, rows, keys), fp64, exact for rounded operands."""
    head_dim, num_kv_heads = rows.values.shape[-1], records.shape[2]
    q = rows.values[:, queries].double()
    index = torch.arange(queries.start, queries.stop, device=q.device) // BLOCK_Q
    q = (q * rows.scales.transpose(1, 2)[:, index].double().unsqueeze(-1)).unflatten(2, (num_kv_heads, -1))
    found = unpack(records[:, keys.start // BLOCK_K : keys.stop // BLOCK_K], head_dim, for_backward=False)
    k = found.k.double() * found.k_scales.double().repeat_interleave(BLOCK_K, 1).unsqueeze(-1)
    return torch.einsum("bihgd,bjhd->bhgij", q, k) * (softmax_scale / head_dim / math.log(2.0))


def _values(records: torch.Tensor, rows: Rows, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return v8 and its scales (batch, num_kv_heads, num_blocks), in fp64."""
    head_dim = rows.values.shape[-1]
    found = unpack(records[:, keys.start // BLOCK_K : keys.stop // BLOCK_K], head_dim, for_backward=False)
    return found.v.double(), found.v_scales.double().transpose(1, 2)


def _attend(
    scores: torch.Tensor, visible: torch.Tensor, v8: torch.Tensor, v_scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (batch, rows, num_heads, head_dim) and lse of scores in units of log 2, -inf where hidden."""
    scores = scores.unflatten(-1, (-1, BLOCK_K))  # batch, kv head, group, row, block, key
    largest = scores.amax(-1, keepdim=True)
    p = torch.exp2(scores - torch.where(largest == -math.inf, 0.0, largest) + OFFSET)
    top = largest.amax(-2, keepdim=True)
    weights = torch.where(largest == -math.inf, 0.0, torch.exp2(largest - top))
    total = (p * weights).sum((-1, -2))
    rounded = p.float().clamp(max=LARGEST).to(E4M3).double() * weights * v_scales[:, :, None, None, :, None]
    out = _weighted_values(rounded.flatten(-2), v8, visible)
    empty = total == 0
    lse = ((top.flatten(-3) - OFFSET) * math.log(2.0) + total.log()).masked_fill(empty, -math.inf)
    return (out / total.masked_fill(empty, 1.0).permute(0, 3, 1, 2).unsqueeze(-1)).flatten(2, 3), lse.flatten(1, 2)


def _weighted_values(p: torch.Tensor, v8: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return p v: (batch, rows, num_kv_heads, group, head_dim), where a NaN in v reaches only the rows that see it."""
    broken = ~v8.isfinite()
    out = torch.einsum("bhgij,bjhd->bihgd", p, v8.masked_fill(broken, 0.0))
    if broken.any():
        seen = torch.einsum("ij,bjhd->bihd", visible.double(), broken.double()) > 0
        out = out.masked_fill(seen.unsqueeze(3), math.nan)
    return out
