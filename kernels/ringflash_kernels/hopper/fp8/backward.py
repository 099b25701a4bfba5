"""Backward of FP8 attention on Hopper: dQ, dK and dV of one or several hops, with K and V in records.

S is recomputed from the operands of the forward, so that rows of P sum to 1. Products that have e4m3 operands:

    "bf16"        none: the bf16 kernels run on the dequantised q, k and v, which bf16 holds exactly
    "fp8_scores"  S and dP
    "fp8"         all five: S, dP, dV, dK and dQ
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringflash_kernels.api import device_guard
from ringflash_kernels.fp8_reference import BLOCK_K, BLOCK_Q, check_num_kv_heads, check_products, check_row_max
from ringflash_kernels.hopper.backward import host
from ringflash_kernels.hopper.backward.host import HopRectangle, hop_of, row_tile
from ringflash_kernels.hopper.backward.tiles import BACKWARD_TILES
from ringflash_kernels.hopper.compat import TensorDescriptor
from ringflash_kernels.hopper.descriptors import block_descriptor, cut
from ringflash_kernels.hopper.forward.host import count_sms, tile_counter
from ringflash_kernels.hopper.fp8.backward_keys import backward_keys_fp8
from ringflash_kernels.hopper.fp8.backward_operands import (
    KeyOperands,
    QueryNumbers,
    QueryOperands,
    add_rotated_back,
    parts,
    rescale,
    statistics,
)
from ringflash_kernels.hopper.fp8.backward_queries import backward_queries_fp8
from ringflash_kernels.hopper.fp8.backward_wide import backward_wide_fp8
from ringflash_kernels.hopper.fp8.quantise import dequantised_kv, dequantised_q, quantise_and_measure_q, quantise_kv
from ringflash_kernels.hopper.launcher import Launcher
from ringflash_kernels.mask import Mask

_PROMOTE = 64  # blocks of 64 queries that tensor cores sum before fp32 registers do: their sums have 13 bits
_KEYS_IN_16_BITS = 2**17  # whose dQ fp16 holds: 1,024 random sums add an error of 0.5%, equal ones at most 6%
_FEW_PARTS = 8  # this many parts of a sum are added in the dtype of dk and dv: the error is small compared with e4m3's

_KEYS, _WIDE, _QUERIES = map(Launcher, (backward_keys_fp8, backward_wide_fp8, backward_queries_fp8))


class Fp8Backward:
    """Gradients of one attention call, hop by hop; see `api.begin_backward`.

    Args:
        dout, q, out: (batch, seqlen_q, num_heads, head_dim). lse, dlse: (batch, num_heads, seqlen_q), fp32.
        products: a key of `fp8_reference.PRODUCTS`.
        num_kv_heads: heads of the keys that `add` takes. num_keys: of all calls of `add` together, if known.
        row_max: as lse, the largest score of each row in natural units or a little more. Only for "fp8", in which P of
            long rows would otherwise round to 0.
    Raises:
        ValueError, from `add`: another number of KV heads.
        NotImplementedError: `deterministic` without "bf16"; head_dim 256 with "fp8_scores".
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
        num_keys: int | None = None,
    ) -> None:
        check_products(products, q.shape[-1], deterministic)
        check_row_max(products, row_max)
        self.q, self.num_kv_heads, self.softmax_scale = q, num_kv_heads, softmax_scale
        dout, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, out))
        if products == "bf16":
            self._pass: _Dequantised | _Products = _Dequantised(
                dout, dequantised_q(q), out, lse, softmax_scale, dlse, deterministic
            )
        else:
            with device_guard(q.device):
                self._pass = _Products(
                    dout, q, out, lse, num_kv_heads, softmax_scale, dlse, products, row_max, num_keys
                )

    def add(self, k: Tensor, v: Tensor, mask: Mask, dk: Tensor, dv: Tensor, *, accumulate: bool = True) -> None:
        """Add the gradients of the visible pairs; see `api.BackwardPass`."""
        host.check_gradients(k, dk, dv, accumulate)
        if isinstance(self._pass, _Dequantised):
            check_num_kv_heads(k, self.num_kv_heads)
            with device_guard(dk.device):
                self._pass.add_dequantised(*dequantised_kv(k, v), mask, dk, dv, accumulate)
        else:
            self.add_records(quantise_kv(k, v, for_backward=True), mask, dk, dv, accumulate=accumulate)

    def add_records(self, records: Tensor, mask: Mask, dk: Tensor, dv: Tensor, *, accumulate: bool = True) -> None:
        """Compute `add` of quantised keys.

        Args:
            records: (batch, num_blocks, num_kv_heads, record_bytes) of `quantise_kv` for the backward.
        """
        check_num_kv_heads(records, self.num_kv_heads)
        with device_guard(dk.device):
            self._pass.add(records, mask, dk, dv, accumulate)

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return dq: see `api.BackwardPass`."""
        out = host.checked_dq(self.q, out)
        with device_guard(self.q.device):
            self._pass.write_dq(out)
        return out


class _Dequantised:
    """Gradients by the bf16 kernels, from the rotated and rounded q, k and v."""

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        softmax_scale: float,
        dlse: Tensor | None,
        deterministic: bool,
    ) -> None:
        scale = softmax_scale / dout.shape[-1]
        self.softmax_scale, self._lse = softmax_scale, lse
        self._backward = host.HopperBackward(
            dout.to(torch.bfloat16), q, out, lse, softmax_scale=scale, dlse=dlse,
            deterministic=deterministic,
        )  # fmt: skip

    def write_dq(self, out: Tensor) -> None:
        """Write dQ, rotated back."""
        scale = self.softmax_scale / out.shape[-1]
        add_rotated_back(_by_rows(self._backward.accumulated_dq(), out), out, scale, interleaved=True)

    def add(self, records: Tensor, mask: Mask, dk: Tensor, dv: Tensor, accumulate: bool) -> None:
        keys = KeyOperands(records, dk.shape[-1], self._lse, mode="bf16", softmax_scale=self.softmax_scale)
        k, v = (cut(x, 1, (0, mask.seqlen_k)) for x in (keys.k, keys.v))
        self.add_dequantised(k, v, mask, dk, dv, accumulate)

    def add_dequantised(self, k: Tensor, v: Tensor, mask: Mask, dk: Tensor, dv: Tensor, accumulate: bool) -> None:
        """Compute `add` of the rotated k, and v."""
        # The error of a second rounding of dK to bf16 is small compared with that of e4m3.
        dtype = torch.float32 if accumulate or dk.dtype == torch.float16 else dk.dtype
        rotated = torch.empty_like(dk, dtype=dtype, memory_format=torch.contiguous_format)
        values = dv if dv.dtype == dtype else torch.empty_like(rotated)
        if accumulate:
            rotated.zero_()
        self._backward.add(k, v, mask, rotated, values, accumulate=accumulate)
        add_rotated_back(rotated, dk, 1.0, accumulate=accumulate)
        if values is not dv:
            dv.copy_(values)


class _Products(host.HopperBackward):
    """Gradients with S and dP, and with "fp8" also dV and dK, in e4m3."""

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        num_kv_heads: int,
        softmax_scale: float,
        dlse: Tensor | None,
        products: str,
        row_max: Tensor | None,
        num_keys: int | None,
    ) -> None:
        self.tiles = BACKWARD_TILES[q.shape[-1]]
        self.q, self.softmax_scale, self.deterministic = q, softmax_scale, False
        self.products = products
        numbers = QueryNumbers.of(q, num_kv_heads)
        self._rows = quantise_and_measure_q(q, numbers.scales, numbers.largest_q, numbers.maxima)
        row_max = lse if products != "fp8" or row_max is None else row_max
        in_16_bits = products == "fp8" and num_keys is not None and num_keys <= _KEYS_IN_16_BITS
        dq_dtype = torch.float16 if in_16_bits else torch.float32
        self.dq = statistics(dout, out, lse, dlse, row_max, numbers, dq_dtype, zeros=not self.tiles.wide)
        self._dq_is_written = not self.tiles.wide
        self._operands = None  # prepared already
        q = q if q.stride(-1) == 1 else q.contiguous()
        self.operands = QueryOperands(dout, q, numbers, fp8_gradients=products == "fp8")
        self.stats, self.factor, self.clock, self._maxima = numbers.stats, numbers.factor, numbers.clock, numbers.maxima
        self.maxima = self._maxima if in_16_bits else None
        self._views = {}
        self._added = False

    def add(self, records: Tensor, mask: Mask, dk: Tensor, dv: Tensor, accumulate: bool) -> None:
        """See `Fp8Backward.add_records`."""
        hop = hop_of(mask, dk.device, aligned=(BLOCK_Q, BLOCK_K))
        group = self._group(dk, hop)
        # Heads of a group that are computed apart, and sums that leave the tensor cores in parts, are added up.
        blocks = -(-hop.num_rows // BLOCK_Q) * group if self.products == "fp8" else 1
        heads_apart = self.q.shape[2] // dk.shape[2] // group
        num_parts = -(-blocks // _PROMOTE) * heads_apart
        in_parts = num_parts > 1
        if self.q.shape[3] != 128 and heads_apart == 1 and num_parts <= _FEW_PARTS:
            in_parts = False  # a CTA stores the first part and adds the others; at 128 that takes too many registers
        in_fp32, empty = num_parts > _FEW_PARTS, hop.num_rows == 0
        with host.written(hop, dk, dv, accumulate, in_parts, in_fp32=in_fp32, zeros=empty) as (dk, dv, adds):
            if empty:
                return
            keys = KeyOperands(
                records, self.q.shape[3], self._maxima, mode=self.products, softmax_scale=self.softmax_scale,
                has_unit=self.maxima is not None, zeros=(dk, dv) if adds and not accumulate else None,
            )  # fmt: skip
            if self.maxima is not None and self._added:
                rescale(self.dq, self.maxima)  # fp16
            self._added = True
            self._add_keys_fp8(records, keys, mask, hop, group, dk, dv, adds)
            if self.tiles.wide:
                self._add_queries_fp8(records, keys, mask)

    def write_dq(self, out: Tensor) -> None:
        """Write dQ, rotated back and with the factors of its rows."""
        scale = self.softmax_scale / out.shape[-1]
        add_rotated_back(
            _by_rows(self.accumulated_dq(), out), out, scale, factor=self.factor, maxima=self.maxima, interleaved=True
        )  # fmt: skip

    def _add_keys_fp8(
        self,
        records: Tensor,
        keys: KeyOperands,
        mask: Mask,
        hop: HopRectangle,
        group: int,
        dk: Tensor,
        dv: Tensor,
        accumulate: bool,
    ) -> None:
        """Launch the kernel of dK and dV, which also computes dQ unless dQ has a separate kernel."""
        batch, _, num_heads, head_dim = self.q.shape
        num_groups = batch * num_heads // group
        tables = self._tables(mask, hop, dk.device, num_groups)
        heads_together = max(1 if self.tiles.wide else self._section(num_groups, hop.num_rows), tables.heads_together)
        num_tiles = -(-hop.num_keys // self.tiles.block_n)
        num_works = num_tiles * num_groups
        fp8_gradients = self.products == "fp8"
        first = hop.k_start // BLOCK_K
        k8, v8, _ = parts(cut(records, 1, (first, records.shape[1])), head_dim)
        k8, v8 = (_key_tile(x, (64, head_dim)) for x in (k8, v8))
        stats = block_descriptor(self.stats, (1, 2, 64))
        # Gradients in 16 bits leave shared memory for K and V of a next tile.
        drawn = fp8_gradients and dk.dtype != torch.float32 and not self.tiles.wide
        columns = head_dim // 2 if dk.dtype == torch.float32 else head_dim
        if self.tiles.wide:
            columns //= 2
        stores = [row_tile(cut(x, 1, (hop.k_start, hop.k_stop)), 64, columns) for x in (dk, dv)]
        scales = (
            self._rows.scales[..., hop.q_start // BLOCK_Q :], self._rows.scales.shape[2],
            keys.scales[:, :, first:], keys.scales.shape[2],
        )  # fmt: skip
        scalars = (
            tables.begins, *self._bounds(hop), *tables.walks,
            hop.min_row, hop.num_rows, hop.num_keys, hop.q_start, self.q.shape[1], num_heads,
            dk.shape[2], num_tiles, heads_together, num_works, group,
            hop.first_shift, hop.split, hop.second_shift, hop.stop_shift,
            self._period(hop, group, tables.period), self.clock,
        )  # fmt: skip
        choices = dict(
            STAGES=2, PROMOTE=_PROMOTE, BOUNDS=hop.has_bounds, TWO_SIDED=hop.two_sided, BEGINS=hop.has_begins,
            ACCUMULATE=accumulate,
        )  # fmt: skip
        variant = (
            head_dim, hop.has_bounds, hop.two_sided, hop.has_begins, fp8_gradients, _PROMOTE, dk.dtype, self.dq.dtype,
            accumulate,
        )  # fmt: skip
        in_parts = -(-hop.num_rows // BLOCK_Q) * group > _PROMOTE
        if self.tiles.wide:
            _WIDE(
                (*variant, in_parts), min(num_works, count_sms(dk.device)), *self._query_tiles(hop), k8, v8, stats,
                *stores, *scales, tile_counter(dk.device), *scalars, PARTS=in_parts, **choices,
            )  # fmt: skip
            return
        ahead = fp8_gradients and head_dim == 64
        if fp8_gradients:
            k = _key_tile(cut(keys.k, 1, (first, records.shape[1])), (head_dim, 64))
        else:
            k = row_tile(cut(keys.k, 1, (hop.k_start, keys.k.shape[1])), 64, head_dim)
        store_first = fp8_gradients and in_parts and not accumulate
        _KEYS(
            (*variant, store_first), min(num_works, count_sms(dk.device)) if drawn else num_works,
            *self._query_tiles(hop), k, k8, v8, stats, block_descriptor(self.dq.flatten(0, 1), (64, head_dim // 2)),
            *stores, *scales, tile_counter(dk.device) if drawn else self.clock, *scalars, 1.0, 1.0,
            FP8_GRADIENTS=fp8_gradients, KV_BUFFERS=2 if drawn else 1,
            # With three more operands in registers of 8 bits, ptxas (12.8) loses K's or V's: wrong gradients.
            KV_IN_REGISTERS=self.tiles.kv_in_registers and not fp8_gradients,
            TURN_BEFORE_EXP=self.tiles.pieces == (64,), AHEAD=ahead, STORE_FIRST=store_first,
            **choices | {"STAGES": 4 if ahead else 2},
        )  # fmt: skip

    def _add_queries_fp8(self, records: Tensor, keys: KeyOperands, mask: Mask) -> None:
        """Launch the kernel that computes only dQ."""
        # Queries and keys exchanged: its rows are the keys.
        hop = hop_of(mask, self.q.device, transposed=True, aligned=(BLOCK_Q, BLOCK_K))
        batch, _, num_heads, head_dim = self.q.shape
        num_kv_heads = records.shape[2]
        heads_together = num_heads // num_kv_heads * self._section(batch * num_kv_heads, hop.num_rows)
        num_tiles = -(-hop.num_keys // host.HELD_QUERIES)
        num_works = num_tiles * batch * num_heads
        first = hop.q_start // BLOCK_K
        k8, v8, _ = parts(cut(records, 1, (first, records.shape[1])), head_dim)
        k1 = _key_tile(cut(keys.k, 1, (first, records.shape[1])), (head_dim, 64))
        q, dout = (
            row_tile(cut(x, 1, (hop.k_start, hop.k_stop)), 64, head_dim)
            for x in (self._rows.values, self.operands.dout8)
        )
        ends, *tables = None, None, None
        if hop.two_sided:
            ends, *tables = self._query_tables(mask, self.q.device)
        has_unit = self.maxima is not None
        add = self._dq_is_written or hop.num_keys < self.q.shape[1]
        dq = self.accumulated_dq() if add else self.dq
        self._dq_is_written = True
        _QUERIES(
            (head_dim, _PROMOTE, has_unit, add, hop.has_bounds, hop.two_sided),
            min(num_works, count_sms(self.q.device)),
            q, dout, _key_tile(k8, (64, head_dim)), _key_tile(v8, (64, head_dim)), k1,
            block_descriptor(dq, (1, 64, 64)), ends,
            self._rows.scales[..., hop.k_start // BLOCK_Q :], self._rows.scales.shape[2],
            keys.scales[:, :, first:], keys.scales.shape[2], self._maxima,
            tile_counter(self.q.device), self.stats, *self._bounds(hop), *tables, self.stats.stride(1), hop.k_start,
            self.q.shape[1], hop.num_rows, hop.num_keys, num_heads, num_kv_heads, num_tiles, heads_together, num_works,
            hop.first_shift, hop.stop_shift,
            # dQ in fp32 leaves no room for a third.
            STAGES=3 if has_unit else 2, PROMOTE=_PROMOTE, HAS_UNIT=has_unit, ADD=add, DRAWN=True,
            BOUNDS=hop.has_bounds, TWO_SIDED=hop.two_sided,
        )  # fmt: skip

    def _query_tiles(self, hop: HopRectangle) -> tuple[TensorDescriptor, ...]:
        """Return descriptors of Q and dO, for S and dP and for dK and dV."""
        head_dim, rows = self.q.shape[3], (hop.q_start, hop.q_stop)
        x = self.operands
        q8, dout8 = (row_tile(cut(y, 1, rows), 64, head_dim) for y in (self._rows.values, x.dout8))
        if self.products == "fp8":
            padded = (hop.q_start, -(-hop.q_stop // BLOCK_Q) * BLOCK_Q)
            q1, dout1 = (block_descriptor(cut(y, 3, padded), (1, 1, head_dim, 64)) for y in (x.q1, x.dout1))
        else:
            q1, dout1 = (row_tile(cut(y, 1, rows), 64, head_dim) for y in (x.q1, x.dout1))
        return q8, q1, dout8, dout1


def _by_rows(dq: Tensor, out: Tensor) -> Tensor:
    """Return dq (batch * num_heads, seqlen_q, head_dim) in the order of dimensions of `out`."""
    return dq.unflatten(0, (out.shape[0], -1)).transpose(1, 2)


def _key_tile(x: Tensor, shape: tuple[int, int]) -> TensorDescriptor:
    """Return a descriptor of 64 keys of one record: (batch, num_blocks, num_kv_heads, 128, head_dim), or transposed."""
    return block_descriptor(x.transpose(1, 2), (1, 1, 1, *shape))
