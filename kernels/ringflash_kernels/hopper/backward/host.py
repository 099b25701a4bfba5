"""Backward of attention on Hopper: dQ, dK and dV of one or several hops.

    preprocess   once: delta = rowsum(dout * out) - dlse, and zeros in the fp32 dQ accumulator if hops add to it
    add          one hop: P = exp(S - lse), dV = P^T dO, dS = P (dO V^T - delta), dK = dS^T Q, dQ += dS K
    postprocess  dQ scaled and cast

The kernels read every tensor through its own strides and write dK and dV into the caller's tensors.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash_kernels.api import device_guard
from ringflash_kernels.hopper.backward.keys import backward_keys
from ringflash_kernels.hopper.backward.latent import backward_latent
from ringflash_kernels.hopper.backward.preprocess import postprocess, preprocess, statistics
from ringflash_kernels.hopper.backward.queries import backward_queries
from ringflash_kernels.hopper.backward.tiles import SMS, STEPS_OF_A_TILE, backward_tiles
from ringflash_kernels.hopper.backward.wide import backward_wide
from ringflash_kernels.hopper.compat import MANY_ADDRESSES, TensorDescriptor
from ringflash_kernels.hopper.descriptors import Descriptor, block_descriptor, cut, geometry, misaligned
from ringflash_kernels.hopper.forward.host import FEW_WAVES, count_sms, last_group, second_band
from ringflash_kernels.hopper.launcher import Launcher
from ringflash_kernels.hopper.walks import LONG_WALK, Walks, has_begins, limits, walks
from ringflash_kernels.mask import Mask, Region, upload

_FAR = 1 << 29  # an open side of a band
_MANY_TILES = 192  # enough tiles of unequal length, longest first, to keep the SMs busy to the end
# Q and dO of the heads that run concurrently should stay in L2 (50 MB) with their dQ; larger sections measured slower.
_L2_BYTES_PER_SECTION = 16 * 2**20
# The SMs have tiles of many short heads at a time. With more of them, dQ in fp32 would leave L2 between two tiles.
_SHORT_ROWS, _ROWS_TOGETHER = 2048, 8192
# In a fixed order, tiles of one head wait for one another, so more heads run concurrently. With more than 16 heads, too
# few tiles of each run at a time to share Q and dO in L2.
_ORDERED_ROWS_PER_SECTION, _ORDERED_HEADS_PER_SECTION = 2**18, 16
_LONG_TILE = 0.25  # of the blocks that each SM visits
_HEADS_TOGETHER = 8  # so 16 tiles of each run at a time, and read the same rows from L2
_SHORT_BLOCKS, _SHORT_MASKED = 64, 0.1  # of a tile on average, and the share of them that is masked
# Under a window, long walks go from document to document, each at its own pace. In parts that are launched near the
# other tiles of the same rows, they find these in L2. Each part costs a tile's start; head_dim 64 gains nothing.
_PART_BLOCKS, _PARTS_TOGETHER, _SUMMED = LONG_WALK // 2, 2, 1 / 3
_EARLY_PART_BLOCKS, _EARLY_PARTS_TOGETHER = 17, 4  # a start costs less there
_BESIDE_TOGETHER = 2  # with `RowPasses`, which run while the tiles of other heads do
IN_STEP_BYTES = 8 * 2**20  # Q, dO and dQ of a group; smaller ones stay in L2 even if CTAs are at different blocks
HELD_QUERIES = 128  # per CTA of `backward_queries`

_NO_PASSES = (None,) * 20

_KEYS, _LATENT, _WIDE, _QUERIES = map(Launcher, (backward_keys, backward_latent, backward_wide, backward_queries))
# With 3.9, ptxas makes code of head_dim 96 at this level that is 1% faster, without spills.
_KEYS_96 = Launcher(backward_keys, ptx_options="--opt-level=1" if MANY_ADDRESSES else "")
# For one band ptxas would compute the many addresses of 3.9 in vector registers, and move 48 of them a step.
_LATENT_BAND = Launcher(backward_latent, ptx_options="--register-usage-level=0" if MANY_ADDRESSES else "")


class HopperBackward:
    """Gradients of one attention call, hop by hop.

    Args:
        dout, q, out: (batch, seqlen_q, num_heads, head_dim), dout and out as wide as v.
        lse, dlse: (batch, num_heads, seqlen_q), fp32.
        deterministic: repeated calls give bitwise equal gradients: key tiles add to dQ in a fixed order (wide heads
            always do; narrow values take wide kernels then), and one CTA sums the heads of a group.
        only_dq: what `finish` will be given, if `add` is called once: it may write this without a sum in fp32.
    Numerics: P and dS are rounded to the inputs' dtype, every sum is fp32; dQ is cast once, after the last hop.
    """

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        dlse: Tensor | None = None,
        deterministic: bool = False,
        only_dq: Tensor | None = None,
    ) -> None:
        self.tiles = backward_tiles(q.shape[-1], dout.shape[-1], deterministic)
        self.q, self.softmax_scale, self.deterministic = q, softmax_scale, deterministic
        # A gradient may be expanded (that of a sum has stride 0) or a misaligned view: then TMA needs a copy.
        self.dout = dout if misaligned(dout) is None else dout.clone(memory_format=torch.contiguous_format)
        out = out if out.stride(-1) == 1 else out.contiguous()
        self._only_dq = None if only_dq is None or misaligned(only_dq) else checked_dq(q, only_dq)
        self._cast = 0  # heads whose dQ is scaled and cast already
        self.stats, self.dq = statistics(q)
        self._operands: tuple[Tensor, Tensor, Tensor | None] | None = out, lse, dlse
        if not self._may_wait():
            self._prepare()
        self._dq_is_written = not self.tiles.wide
        self.clock = q.new_empty(1, dtype=torch.int32)
        if self.ordered:
            self.numbers = q.new_zeros(self.dq.shape[0], self.stats.shape[2] // 64, dtype=torch.int32)
            self._next_number = 1
        self._views: dict[tuple[int, int], _Queries] = {}

    def _may_wait(self) -> bool:
        """Return whether spare warps of `backward_keys` may do the preprocessing of later heads (`RowPasses`).

        The caller uses this under a window only. It is for head_dim 128; at 64 it gained nothing.
        """
        assert self._operands is not None
        out, _, dlse = self._operands
        return (
            self._only_dq is not None and dlse is None and out.dtype == self.q.dtype and misaligned(out) is None
            and self.tiles.columns == 256 and not (self.deterministic or self.tiles.wide)
        )  # fmt: skip

    def _prepare(self, heads: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Compute the statistics of all or the first heads, unless that was done; return out and lse if it was not."""
        if self._operands is None:
            return None
        (out, lse, dlse), self._operands = self._operands, None
        with device_guard(self.q.device):
            preprocess(
                self.dout, out, lse, dlse, self.stats, self.dq, self.dq.shape[0] if heads is None else heads,
                zeros=not self.tiles.wide,
            )  # fmt: skip
        return out, lse

    @functools.cached_property
    def ordered(self) -> bool:
        """True if the additions to dQ of `backward_keys` have a fixed order."""
        return self.deterministic and not self.tiles.wide

    @functools.cached_property
    def drawn(self) -> Tensor:
        """Memory of persistent CTAs of `backward_keys`: two counters of tiles, and the next tile of each CTA."""
        return self.q.new_zeros(2 + count_sms(self.q.device), dtype=torch.int32)

    def add(self, k: Tensor, v: Tensor, mask: Mask, dk: Tensor, dv: Tensor, *, accumulate: bool = True) -> None:
        """Add the gradients of the pairs of `mask` to dk, dv and self.dq.

        Args:
            k, v: (batch, seqlen_k, num_kv_heads, head_dim), v possibly narrower.
            dk, dv: shape of k, v, both of one dtype.
            accumulate: add to dk and dv, which are fp32. Otherwise overwrite them, in fp32 or the dtype of k.
        """
        if self._cast:
            raise RuntimeError("add must be called once if only_dq is given, got another call; leave only_dq out.")
        if not self.q.dtype == k.dtype == v.dtype:  # kernels are compiled for one dtype
            raise ValueError(f"k and v must be in {self.q.dtype} as q is, got {k.dtype} and {v.dtype}; cast them.")
        check_gradients(k, dk, dv, accumulate)
        hop = hop_of(mask, k.device)
        group = self._group(k, hop)
        in_parts = group < self.q.shape[2] // k.shape[2]
        with written(hop, dk, dv, accumulate, in_parts) as (dk, dv, adds):
            if hop.num_rows:
                with device_guard(k.device):
                    self._add_keys(k, v, mask, hop, group, dk, dv, adds)
                    if self.tiles.wide:
                        self._add_queries(k, v, mask)

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return dq: (batch, seqlen_q, num_heads, head_dim), dtype of q; in `out` if given, unit last stride."""
        if self._cast and out is not self._only_dq:
            raise ValueError("out must be the tensor that was given as only_dq, got another; leave only_dq out.")
        if self._cast == self.dq.shape[0]:
            return out
        out = checked_dq(self.q, out)
        with device_guard(self.q.device):
            postprocess(self.accumulated_dq(), out, self.softmax_scale, first=self._cast)
        return out

    def accumulated_dq(self) -> Tensor:
        """Return the sum so far, unscaled: (batch * num_heads, seqlen_q, head_dim), fp32, its columns interleaved."""
        self._prepare()
        if not self._dq_is_written:
            self.dq.zero_()
            self._dq_is_written = True
        return self.dq

    def _group(self, k: Tensor, hop: HopRectangle) -> int:
        """Return the number of query heads that one CTA processes for a tile of keys: all that share the keys, or one.

        With all of them, K, V, dK and dV move once per group, but fewer tiles remain to keep the SMs busy.
        """
        group = self.q.shape[2] // k.shape[2]
        works = -(-hop.num_keys // self.tiles.block_n) * k.shape[0] * k.shape[2]
        if self.deterministic:
            return group
        if not hop.is_full:
            return group if works >= _MANY_TILES else 1
        steps = -(-hop.num_rows // 64)
        grouped = -(-works // SMS) * (steps * group + STEPS_OF_A_TILE)
        separate = -(-works * group // SMS) * (steps + STEPS_OF_A_TILE)
        return group if grouped < separate else 1

    def _is_early(self, hop: HopRectangle) -> bool:
        """Return whether CTAs of `backward_keys` draw their tiles because of a window; other tables lost 0 to 3%."""
        # Tiles of two pieces (head_dim 96) would spill registers.
        return hop.has_begins and not (self.ordered or self.tiles.wide or self.tiles.rest)

    def _is_drawn(self, hop: HopRectangle, group: int, accumulate: bool) -> bool:
        """Return whether CTAs of `backward_keys` draw tiles of single heads: entering and leaving one takes 10 steps.

        In a ring, only short tiles that are stored: a kernel for another rank may get an SM when a CTA ends.
        """
        drawn = group == 1 and self.tiles.columns == 256 and not (self.ordered or hop.has_bounds)
        return drawn and (self._only_dq is not None or (self._is_short(hop, group) and not accumulate))

    def _is_short(self, hop: HopRectangle, group: int) -> bool:
        """Return whether tiles are of single short heads, without bounds and in any order."""
        short = max(hop.num_rows, hop.num_keys) <= _SHORT_ROWS
        return short and group == 1 and not (self.ordered or hop.has_bounds)

    def _section(self, num_heads: int, num_rows: int, group: int = 1) -> int:
        """Return the largest divisor of num_heads for which two operands of num_rows rows fit their share of L2, or 1.

        In a fixed order of additions to dQ more of them may run concurrently; each is a group of `group` heads.
        """
        limit = _L2_BYTES_PER_SECTION // (num_rows * self.tiles.columns * self.q.element_size())
        if self.ordered:
            limit = max(limit, min(_ORDERED_HEADS_PER_SECTION, _ORDERED_ROWS_PER_SECTION // (num_rows * group)))
        return _largest_divisor(num_heads, limit)

    def _period(self, hop: HopRectangle, group: int, period: int) -> int:
        """Return the number of query blocks after which the clock begins again at the first one; 0 for no clock.

        The clock keeps all CTAs at the same query block at a time. With `deterministic`, the fixed order does this.
        """
        row_bytes = (self.q.shape[3] * 4 + self.tiles.columns * 2) * group
        if self.deterministic or hop.num_rows * row_bytes <= IN_STEP_BYTES:
            return 0
        return period or -(-hop.num_rows // 64)

    def heads_together(self, hop: HopRectangle, num_groups: int, group: int) -> int:
        """Return how many heads, or groups of heads, alternate in the order of `backward_keys`."""
        together = self._section(num_groups, hop.num_rows, group)
        if self._is_short(hop, group):
            together = _largest_divisor(num_groups, min(together, _ROWS_TOGETHER // hop.num_rows))
        return together

    def _add_keys(
        self, k: Tensor, v: Tensor, mask: Mask, hop: HopRectangle, group: int, dk: Tensor, dv: Tensor, accumulate: bool
    ) -> None:
        """Launch the kernel of dK and dV of a hop, which also computes dQ unless dQ has a separate kernel."""
        tiles, (batch, _, num_heads, head_dim) = self.tiles, self.q.shape
        num_groups = batch * num_heads // group
        in_parts = not (tiles.wide or tiles.latent or self.ordered)
        tables = self._tables(mask, hop, k.device, num_groups, in_parts=in_parts)
        summed = None if accumulate else tables.summed
        heads_together = 1 if tiles.wide else self.heads_together(hop, num_groups, group)
        heads_together = max(heads_together, tables.heads_together)
        num_tiles = tables.num_walks or -(-hop.num_keys // tiles.block_n)
        at_last = () if tiles.wide else (heads_together,)
        if not (tiles.wide or self.ordered or hop.has_bounds) and num_tiles * num_groups <= FEW_WAVES * SMS:
            at_last = (heads_at_last(hop._replace(bounds=()), tiles.block_n, num_groups, group, heads_together),)
        num_works = num_tiles * num_groups
        queries = self._queries(hop.q_start, hop.q_stop)
        keys = [cut(x, 1, (hop.k_start, hop.k_stop)) for x in (k, v, dk, dv)]
        scalars = (
            hop.min_row, hop.num_rows, hop.num_keys, hop.q_start, self.q.shape[1], num_heads,
            k.shape[2], num_tiles, heads_together, *at_last, num_works, group,
            hop.first_shift, hop.split, hop.second_shift, hop.stop_shift,
            0 if tables.descending else self._period(hop, group, tables.period), self.clock,
        )  # fmt: skip
        scales = self.softmax_scale * math.log2(math.e), self.softmax_scale
        pieces = (tiles.pieces, tiles.value_pieces)
        loads = [_piece_descriptors(x, columns) for x, columns in zip(keys[:2], pieces, strict=True)]
        choices = dict(
            SPLIT=tiles.pieces[0], REST=tiles.rest, STAGES=tiles.stages, BOUNDS=hop.has_bounds,
            TWO_SIDED=hop.two_sided, BEGINS=hop.has_begins, ACCUMULATE=accumulate,
        )  # fmt: skip
        variant = (
            head_dim, v.shape[3], self.q.dtype, dk.dtype, hop.has_bounds, hop.two_sided, hop.has_begins, self.ordered,
            tables.descending, accumulate, summed is not None,
        )  # fmt: skip
        if tiles.wide:
            stores = [row_tile(x, 64, 64) for x in keys[2:]]
            _WIDE(
                variant, num_works,
                *queries.q, *loads[0], *loads[1], *queries.dout, queries.stats, *stores,
                tables.begins, *self._bounds(hop), *tables.walks, *scalars, *scales, VALUE_REST=tiles.value_rest,
                HELD=tiles.held, **choices,
            )  # fmt: skip
        elif tiles.latent:
            stores = [row_tile(x, 64, 64) for x in keys[2:]]
            (_LATENT if hop.has_bounds or hop.two_sided else _LATENT_BAND)(
                variant, num_works,
                *queries.q, *loads[0], loads[1][0], queries.dout[0], queries.stats, *queries.dq, *stores,
                tables.begins, *self._bounds(hop), *tables.walks, *scalars, *scales, **choices,
            )  # fmt: skip
        else:
            halves = (32, 32) if tiles.rest else (tiles.pieces[0] // 2,)
            stores = [_piece_descriptors(x, halves if x.dtype == torch.float32 else tiles.pieces) for x in keys[2:]]
            sums, stores_of_sums = [], [[None, None]] * 2
            if summed is not None:
                rows = -(-len(summed) // tiles.block_n) * tiles.block_n
                sums = [x.new_zeros(batch, rows, *x.shape[2:], dtype=torch.float32) for x in keys[2:]]
                stores_of_sums = [_piece_descriptors(x, halves) for x in sums]
            beside = self._is_early(hop)
            persistent = beside or self._is_drawn(hop, group, accumulate)
            passes = self._row_passes(num_groups // heads_together, heads_together * group) if beside else None
            self._prepare()
            (_KEYS_96 if tiles.rest and not self.ordered else _KEYS)(
                (*variant, persistent, passes is not None), min(num_works,
                count_sms(k.device)) if persistent else num_works,
                *queries.q, *loads[0], *loads[1], *queries.dout, queries.stats, *queries.dq, *stores[0], *stores[1],
                *stores_of_sums[0], *stores_of_sums[1],
                tables.begins, *self._bounds(hop), *tables.walks, *scalars, *self._order(num_tiles),
                self.drawn if persistent else self.clock, *(passes or _NO_PASSES), *scales,
                # In a fixed order head_dim 96 runs only without them: ptxas (12.8) has lost such registers before.
                KV_IN_REGISTERS=tiles.kv_in_registers and not (self.ordered and tiles.rest),
                ORDERED=self.ordered, DESCENDING=tables.descending,
                DQ_BUFFERS=tiles.dq_buffers if self.ordered else 1 + persistent,
                TURN_AFTER=4 if self.ordered else tiles.turn_after, SPLIT_WALKS=summed is not None,
                PERSISTENT=persistent,
                SPARE_WARPS=passes is not None, **choices,
            )  # fmt: skip
            for x, total in zip(keys[2:], sums, strict=False):
                x.index_copy_(1, summed, total[:, : len(summed)].to(x.dtype))

    def _row_passes(self, sections: int, heads: int) -> tuple | None:
        """Prepare the first of several sections of heads; return the arguments of `RowPasses`, which does the others.

        None if there is one section, or if all heads are prepared.
        """
        if sections == 1 or self._operands is None:
            return None
        prepared = self._prepare(heads)
        assert prepared is not None and self._only_dq is not None
        out, lse = prepared
        self._cast = heads * (sections - 1)
        counters = self.q.new_zeros(1 + 2 * sections, dtype=torch.int32)
        return (
            counters, out, self.dout, lse, self.stats, self.dq, self._only_dq, *_eighths(out), *_eighths(self.dout),
            *lse.stride(), *_eighths(self._only_dq), self.q.shape[1],
        )  # fmt: skip

    def _add_queries(self, k: Tensor, v: Tensor, mask: Mask) -> None:
        """Launch the kernel that computes only dQ of a hop. The first hop stores dQ if it covers every query."""
        hop = hop_of(
            mask, k.device, transposed=True, aligned=(1, 1)
        )  # queries and keys exchanged: its rows are the keys
        tiles, choices = self.tiles, self.tiles.queries
        batch, _, num_heads, head_dim = self.q.shape
        # The heads of a group read the same keys.
        heads_together = num_heads // k.shape[2] * self._section(batch * k.shape[2], hop.num_rows)
        num_tiles = -(-hop.num_keys // HELD_QUERIES)
        num_works = num_tiles * batch * num_heads
        queries = self._queries(hop.k_start, hop.k_stop)
        add = self._dq_is_written or hop.num_keys < self.q.shape[1]
        if self._only_dq is not None and choices.stores_result and not add:
            dq_desc, self._cast = row_tile(self._only_dq, 64, tiles.pieces[0] // 2), self.dq.shape[0]
        else:
            dq_desc = block_descriptor(self.accumulated_dq() if add else self.dq, (1, 64, tiles.pieces[0] // 2))
            self._dq_is_written = True
        keys = [
            _piece_descriptors(cut(x, 1, (hop.q_start, hop.q_stop)), pieces)
            for x, pieces in ((k, tiles.pieces), (v, tiles.value_pieces))
        ]
        ends, *tables = None, None, None
        if hop.two_sided:
            ends, *tables = self._query_tables(mask, k.device)
        _QUERIES(
            (head_dim, v.shape[3], self.q.dtype, hop.has_bounds, hop.two_sided, add, self._cast > 0), num_works,
            *queries.q, *keys[0], *keys[1], *queries.dout, dq_desc, ends, self.stats, *self._bounds(hop), *tables,
            self.stats.stride(1), hop.k_start, self.q.shape[1], hop.num_rows, hop.num_keys,
            num_heads, k.shape[2], num_tiles, heads_together, num_works,
            hop.first_shift, hop.stop_shift, self.softmax_scale * math.log2(math.e), self.softmax_scale,
            SPLIT=tiles.pieces[0], REST=tiles.rest, VALUE_REST=tiles.value_rest,
            SLOTS=choices.slots, EXP_UNDER_DP=choices.exp_under_dp, TURNS=choices.turns, HELD=choices.held,
            BOUNDS=hop.has_bounds, TWO_SIDED=hop.two_sided, ADD=add,
        )  # fmt: skip

    def _order(self, num_tiles: int) -> tuple[Tensor, int, int]:
        """Return the arguments of `DqOrder` for a launch; those that are not read if any order will do."""
        if not self.ordered:
            return self.clock, 0, 0
        first = self._next_number
        self._next_number += num_tiles
        return self.numbers, self.numbers.shape[1], first

    def _bounds(self, hop: HopRectangle) -> tuple[Tensor, Tensor]:
        """Return the bounds of a hop; if it has none, any two tensors, since the kernels then read neither."""
        return hop.bounds if hop.has_bounds else (self.stats, self.stats)

    def _tables(
        self, mask: Mask, hop: HopRectangle, device: torch.device, num_groups: int, *, in_parts: bool = False
    ) -> Tables:
        """Return the tables of a two-sided mask for the kernel of dK and dV; those of another mask are empty."""
        if not hop.two_sided:
            return Tables()
        side, block_n = mask.cached("transposed", mask.transposed), self.tiles.block_n
        rows = 0, side.seqlen_q
        walk = walks(side, device, rows, block_n, 64, near=True, ordered=self.ordered)
        begins = block_descriptor(first_keys(mask, device), (1, 64)) if hop.has_begins else None
        # Rows of short walks stay in L2 for several heads. A long tile of the last head would run by itself at the end,
        # and in a fixed order tiles of one head wait for one another.
        short = walk.blocks <= _SHORT_BLOCKS * len(walk.tiles)
        together = short or self.ordered or walk.longest * SMS > _LONG_TILE * walk.blocks * num_groups
        # Under a window, long tiles are at different rows at a time, and read them from memory: fewer run together.
        most = _HEADS_TOGETHER // 2 if hop.has_begins and not self.ordered else _HEADS_TOGETHER
        beside = in_parts and self._operands is not None and self._is_early(hop)
        most = _BESIDE_TOGETHER if beside else most
        descending = short and walk.masked <= _SHORT_MASKED * walk.blocks
        descending = descending and not (hop.has_begins or self.ordered or self.tiles.wide or self.tiles.latent)
        together, period = _largest_divisor(num_groups, most) if together else 1, walk.mean
        if in_parts and _is_cut(hop, walk, self.tiles.columns):
            persistent = self._is_early(hop)
            part, parts = (_EARLY_PART_BLOCKS, _EARLY_PARTS_TOGETHER) if persistent else (_PART_BLOCKS, _PARTS_TOGETHER)
            most = _BESIDE_TOGETHER if beside else parts
            walk, descending = walks(side, device, rows, block_n, 64, part=part), False
            together = _largest_divisor(num_groups, most)
        return Tables(begins, walk[:2], together, descending, period, len(walk.tiles), walk.summed)

    def _query_tables(self, mask: Mask, device: torch.device) -> tuple[TensorDescriptor, Tensor, Tensor]:
        """Return the tables of a two-sided mask for the kernel of dQ: ends of the keys, and `Walks`."""
        rows = 0, mask.seqlen_q
        tiles, stretches, *_ = walks(mask, device, rows, HELD_QUERIES, 64)
        return block_descriptor(limits(mask, device, HELD_QUERIES, rows).ends, (1, 64)), tiles, stretches

    def _queries(self, start: int, stop: int) -> _Queries:
        """Return descriptors of the query side for the rows [start, stop), made once."""
        if (start, stop) not in self._views:
            tiles = self.tiles
            q, dout = (
                _piece_descriptors(cut(x, 1, (start, stop)), pieces)
                for x, pieces in ((self.q, tiles.pieces), (self.dout, tiles.value_pieces))
            )
            dq = [block_descriptor(self.dq.flatten(0, 1), (64, n)) for n in tiles.dq_pieces]
            stats = block_descriptor(self.stats, (1, 2, 64))
            self._views[start, stop] = _Queries(q, dout, stats, _padded(dq))
        return self._views[start, stop]


def checked_dq(q: Tensor, out: Tensor | None) -> Tensor:
    """Return `out` after checking that it fits q, or a new tensor if it is None."""
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.shape != q.shape or out.dtype != q.dtype or out.stride(-1) != 1:
        raise ValueError(
            f"out must be {tuple(q.shape)} in {q.dtype} with unit last stride, got {tuple(out.shape)} in "
            f"{out.dtype} with strides {out.stride()}; leave it out."
        )
    return out


def check_gradients(k: Tensor, dk: Tensor, dv: Tensor, accumulate: bool) -> None:
    """Raise ValueError unless the kernels can write dk and dv."""
    dtypes = [torch.float32] if accumulate else [torch.float32, k.dtype]
    for name, x in (("dk", dk), ("dv", dv)):
        problem = misaligned(x)
        if problem is not None:
            raise ValueError(f"{name} must be addressable by TMA, got {problem}; allocate it with torch.empty.")
        if x.dtype not in dtypes or x.dtype != dk.dtype:
            raise ValueError(f"dk and dv must share one dtype of {dtypes}, got {dk.dtype}, {dv.dtype}; cast them.")


def _is_cut(hop: HopRectangle, walk: Walks, columns: int) -> bool:
    """Return whether long walks are cut into parts: under a window, if they make few of the visits."""
    return hop.has_begins and columns > 64 and 0 < walk.of_long <= _SUMMED * walk.blocks


@contextlib.contextmanager
def written(
    hop: HopRectangle,
    dk: Tensor,
    dv: Tensor,
    accumulate: bool,
    in_parts: bool,
    *,
    in_fp32: bool = True,
    zeros: bool = True,
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield the dk and dv that the kernel of a hop writes, and whether it adds to them.

    If several parts are added up and dk and dv are overwritten, these are sums that begin with 0: dk and dv themselves
    if they are fp32 or need not be (`in_fp32`), else copied to them at the end. Without `zeros`, the caller writes
    these. Keys outside of the hop's rectangle get zeros.
    """
    if accumulate:
        yield dk, dv, True
    elif in_parts:
        in_place = dk.dtype == torch.float32 or not in_fp32
        sums = [x if in_place else torch.empty_like(x, dtype=torch.float32) for x in (dk, dv)]
        for x in sums if zeros else ():
            x.zero_()
        yield sums[0], sums[1], True
        if not in_place:
            dk.copy_(sums[0])
            dv.copy_(sums[1])
    else:
        for unseen in (slice(0, hop.k_start), slice(hop.k_stop, dk.shape[1])):
            if unseen.start < unseen.stop:
                dk[:, unseen] = dv[:, unseen] = 0
        yield dk, dv, False


_Pieces = list["TensorDescriptor | None"]  # two per operand; the second is None if its columns are one piece


def _eighths(x: Tensor) -> list[int]:
    """Return the strides of a tensor that TMA addresses in 8 elements, but the last one."""
    return [stride // 8 for stride in x.stride()[:3]]


class _Queries(NamedTuple):
    """Descriptors of the query side of a hop, and of the dQ to which `backward_keys` adds."""

    q: _Pieces
    dout: _Pieces
    stats: TensorDescriptor
    dq: _Pieces


class Tables(NamedTuple):
    """Tables of a two-sided mask for the kernel of dK and dV.

    Args:
        begins: first key of each row, if rows need them.
        walks: tiles and stretches of `Walks`.
        heads_together: smallest number of heads, or groups of heads, whose tiles alternate in the order of the launch.
        descending: walks go from their last block to the first, and at each block through all heads of a group. Tiles
            of a document end at the same block, so they are at the same rows at a time. This is faster for short
            walks with few masked blocks, without a window.
        num_walks: parts of tiles, and other tiles; summed: see `Walks`.
        period: number of blocks after which the clock begins again. If it were more than most tiles visit, the clock
            would often show a block that they do not visit.
    """

    begins: TensorDescriptor | None = None
    walks: tuple[Tensor | None, Tensor | None] = (None, None)
    heads_together: int = 1
    descending: bool = False
    period: int = 0
    num_walks: int = 0
    summed: Tensor | None = None


class HopRectangle(NamedTuple):
    """A mask in the form of the kernels: a rectangle, and the rows that see each key (see `BackwardProblem`)."""

    min_row: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    first_shift: int
    split: int
    second_shift: int
    stop_shift: int
    has_bounds: bool
    bounds: tuple[Tensor, ...]
    two_sided: bool = False
    has_begins: bool = False

    @property
    def num_rows(self) -> int:
        """Query rows of the rectangle."""
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
        """Keys of the rectangle."""
        return self.k_stop - self.k_start

    def rows_seeing(self, key: int) -> tuple[int, int]:
        """Return the rows [first, stop) of the rectangle that see a key, if there are no bounds."""
        first = min(max(key + self.first_shift, self.min_row), self.split)
        first += min(max(key + self.second_shift, self.split), self.num_rows) - self.split
        return first, min(max(key + self.stop_shift, 0), self.num_rows)

    def steps_of_tiles(self, block_n: int) -> list[int]:
        """Return the number of query blocks that each tile of keys visits, if there are no bounds."""
        starts = range(0, self.num_keys, block_n)
        rows = [(self.rows_seeing(i)[0], self.rows_seeing(min(i + block_n, self.num_keys) - 1)[1]) for i in starts]
        return [-(-stop // 64) - first // 64 if first < stop else 0 for first, stop in rows]

    @property
    def is_full(self) -> bool:
        """True if every row sees every key."""
        return not self.has_bounds and self.first_shift == -_FAR and self.stop_shift == _FAR


def hop_of(
    mask: Mask, device: torch.device, *, transposed: bool = False, aligned: tuple[int, int] = (4, 1)
) -> HopRectangle:
    """Return `mask` by keys (the rows that see each key) or, `transposed`, by queries (the keys that each row sees).

    Args:
        aligned: the rectangle begins at multiples of these, by row and by key. TMA reads the statistics of rows from
            addresses that are multiples of 16 bytes, hence 4.
    """
    key = ("hop rectangle", device, transposed, aligned)
    return mask.cached(key, lambda: _new_rectangle(mask, device, transposed, aligned))


def _new_rectangle(mask: Mask, device: torch.device, transposed: bool, aligned: tuple[int, int]) -> HopRectangle:
    """Return `hop_of` of a mask: a rectangle with one band or two causal ones, or tables of bounds for any other."""
    second = None if transposed else second_band(mask)
    region = mask.regions[0] if mask.regions else Region(0, 0, 0, 0)
    unaligned = region.k_start % aligned[1] or (transposed and region.q_start % aligned[0])
    if (len(mask.regions) > 1 and second is None) or unaligned:
        side = mask if transposed else mask.cached("transposed", mask.transposed)
        two_sided = mask.is_two_sided
        return HopRectangle(
            0, 0, side.seqlen_k, 0, side.seqlen_q, 0, 0, 0, 0, True, side.bounds(device),
            two_sided, two_sided and has_begins(mask),
        )  # fmt: skip
    region = region.transposed() if transposed else region
    q_start, q_stop, k_start, k_stop, lower, upper = region
    min_row = 0 if transposed else q_start % aligned[0]
    q_start -= min_row
    corner = k_start - q_start  # row i of the rectangle sees its key j if lower <= j + corner - i <= upper
    first_shift = -_FAR if upper is None else corner - upper
    stop_shift = _FAR if lower is None else corner - lower + 1
    split, second_shift = q_stop - q_start, 0
    if second is not None:
        assert second.upper is not None
        q_stop, k_stop, second_shift = second.q_stop, second.k_stop, corner - second.upper
    return HopRectangle(
        min_row, q_start, q_stop, k_start, k_stop, first_shift, split, second_shift, stop_shift, False, ()
    )


def first_keys(mask: Mask, device: torch.device) -> Tensor:
    """Return `mask.begins` for whole blocks of 64 rows on a device, (1, rows), cached with the mask."""

    def make() -> Tensor:
        (first,) = upload(device, torch.nn.functional.pad(mask.begins(), (0, -mask.seqlen_q % 64))[None])
        return first

    return mask.cached(("begins", torch.device(device)), make)


def row_tile(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of `rows` rows of one head of x (batch, seqlen, heads, head_dim)."""
    # Rows next to columns: TMA moves a box as two-dimensional slices.
    (batch, seqlen, heads, head_dim), (of_batch, of_row, of_head, one) = x.shape, x.stride()
    shape, strides = (batch, heads, seqlen, head_dim), (of_batch, of_head, of_row, one)
    return Descriptor(x, *geometry(shape, strides, (1, 1, rows, columns), x.dtype))


def _piece_descriptors(x: Tensor, columns: tuple[int, ...]) -> _Pieces:
    """Return descriptors of 64 rows of one head of x, one for each piece of its columns."""
    return _padded([row_tile(x, 64, n) for n in columns])


def _padded(descriptors: list[TensorDescriptor]) -> _Pieces:
    return [*descriptors, None][:2]


@functools.lru_cache(maxsize=256)
def heads_at_last(hop: HopRectangle, block_n: int, num_groups: int, group: int, together: int) -> int:
    """Return how many groups of heads should alternate at last, so that the SMs finish at about the same time.

    Fewer groups share Q and dO in L2 better: see `last_group`.
    """
    costs = tuple(steps * group + STEPS_OF_A_TILE for steps in hop.steps_of_tiles(block_n))
    num = num_groups // together
    return together * last_group(costs, num, num, together, SMS)


@functools.lru_cache(maxsize=256)
def _largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number that is at most `limit`, or 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(1, limit))
