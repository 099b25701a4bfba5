"""Launch of the forward kernel: checks, tile tables, descriptors and counters."""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash_kernels.api import device_guard
from ringflash_kernels.hopper.compat import MANY_ADDRESSES, TensorDescriptor
from ringflash_kernels.hopper.descriptors import block_descriptor, cut, misaligned, tile_descriptor
from ringflash_kernels.hopper.forward.kernel import ForwardVariant, forward_kernel
from ringflash_kernels.hopper.forward.tiles import FORWARD_TILES, NARROW_FORWARD_TILES, ForwardTiles, forward_tiles
from ringflash_kernels.hopper.launcher import Launcher
from ringflash_kernels.hopper.walks import has_begins, limits, walks
from ringflash_kernels.mask import Mask, Region, upload

_FAR = 1 << 30  # an open side of a band; sums with a row number still fit int32
_LN2 = math.log(2.0)
# K and V of the heads that run concurrently should stay in L2 (50 MB); larger groups measured slower.
_L2_BYTES_PER_GROUP = 16 * 2**20
_GROUPS_AT_LAST = 3  # groups of heads that may run together at the end of a launch, with three times these bytes
_BLOCKS_OF_A_TILE = 2  # cost of entering and leaving a tile, in blocks of keys
FEW_WAVES = 32  # with more waves of tiles, the SMs finish at about the same time in any order of heads


_LAUNCHER = Launcher(forward_kernel)


class LaunchArgs(NamedTuple):
    """A launch of `forward_kernel`: the key of its compiled variant, number of programs, arguments."""

    variant: tuple
    num_programs: int
    arguments: tuple


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return the reason why the kernel cannot take these tensors, whatever their device, or None if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} (fp16 or bf16)"
    if forward_tiles(q.shape[-1], v.shape[-1]) is None:
        return _head_dims(q.shape[-1], v.shape[-1])
    for name, x in (("q", q), ("k", k), ("v", v)):
        problem = misaligned(x)
        if problem is not None:
            return f"{name} with {problem}; make it contiguous"
    return None


def _head_dims(head_dim: int, value_dim: int) -> str:
    if head_dim == value_dim:
        return f"head_dim {head_dim} (one of {', '.join(map(str, FORWARD_TILES))})"
    narrow = " or ".join(f"{keys} and {values}" for keys, values in NARROW_FORWARD_TILES)
    return f"head_dim {head_dim} of q and k and {value_dim} of v ({narrow}, or one for all)"


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
    num_sms: int | None = None,
) -> None:
    """Compute attention over the visible pairs of `mask`, continuing the state (acc, lse) of other keys if given.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), bf16 or fp16; any strides that are multiples of 16 bytes, the
            last 1; the same holds for k, v, out and acc.
        k, v: (batch, seqlen_k, num_kv_heads, head_dim); v and out narrower as in NARROW_FORWARD_TILES.
        out: as q, in the dtype of q or fp32; every row is written. May be `acc`.
        lse: (batch, num_heads, seqlen_q), fp32, last stride 1: written without `acc`, updated with it.
        acc: as out, fp32. A row that sees nothing keeps its state.
        num_sms: multiprocessors to use; default all.
    Raises:
        ValueError: a scale that is not positive, or out, acc or lse with strides TMA cannot address.
    Numerics: scores and state in fp32, P rounded to the dtype of q for P V; out is cast once.
    Source: online softmax over tiles, Dao et al. 2022 (arXiv:2205.14135) and Shah et al. 2024 (arXiv:2407.08608);
        resuming from (acc, lse) in the epilogue is ours.
    """
    check_state(softmax_scale, out, lse, acc)
    first, stop = mask.q_span
    write_unseen_rows(out, lse, acc, slice(0, first))
    write_unseen_rows(out, lse, acc, slice(stop, q.shape[1]))
    if first < stop:
        with device_guard(q.device):
            launch = build_launch(q, k, v, mask, softmax_scale, out=out, lse=lse, acc=acc,
                                  num_sms=num_sms or count_sms(q.device), counter=tile_counter(q.device))  # fmt: skip
            _LAUNCHER(launch.variant, launch.num_programs, *launch.arguments)


def build_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax_scale: float,
    *,
    out: Tensor,
    lse: Tensor,
    acc: Tensor | None,
    num_sms: int,
    counter: Tensor,
) -> LaunchArgs:
    """Return the launch that covers the rows of `mask.q_span`. If the mask is one region, q, k and v are cut to it.

    Args:
        counter: two int32 zeros, which are zeros again after the launch.
    """
    rows = mask.q_span
    tiles = _tiles(q.shape[3], v.shape[3], acc is not None or out.dtype == torch.float32)
    ends = start = stop = table = stretches = None
    bands = bands_of(mask) if tiles.skips or len(mask.regions) == 1 else None
    kind, keys, diagonals = bands or table_of(mask)
    q, out, lse, acc = cut(q, 1, rows), cut(out, 1, rows), cut(lse, 2, rows), cut(acc, 1, rows)
    k, v = cut(k, 1, keys), cut(v, 1, keys)
    starts = kind == "ends" and has_begins(mask)
    heads_per_kv = q.shape[2] // k.shape[2]
    heads = 2 if kind in ("bounds", "ends") and tiles.num_warpgroups == 2 and heads_per_kv % 2 == 0 else 1
    variant = _variant(tiles, kind, acc is not None, starts, heads)
    if kind == "bounds":
        start, stop = (bound[slice(*rows)] for bound in mask.bounds(q.device))
        table = tile_table(mask, q.device, variant.rows, rows)
    elif kind == "ends":
        ends, start, stop = limits(mask, q.device, variant.rows, rows)
        ends = block_descriptor(ends, (1, variant.tiles.block_n))
        sizes = variant.rows, variant.tiles.block_n
        table, stretches, *_ = walks(mask, q.device, rows, *sizes, near=True, shifted=True)
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1], k.shape[2]
    num_row_tiles = -(-seqlen_q // variant.rows)
    num_tiles = batch * num_heads // heads * num_row_tiles
    per_group = heads_per_kv * kv_heads_per_group(num_kv_heads, seqlen_k * (head_dim + v.shape[3]) * k.element_size())
    at_last = heads_at_last(mask.regions, variant.tiles, rows, batch * num_heads, per_group, num_sms)
    arguments = (
        *_descriptors(q, k, v, out, acc, variant.tiles),
        ends, lse, start, stop, table, stretches, counter,
        seqlen_q, seqlen_k, num_heads // heads, heads_per_kv // heads, per_group // heads, at_last // heads,
        num_row_tiles, num_tiles, *diagonals, lse.stride(0), lse.stride(1),
        softmax_scale / _LN2, variant,
    )  # fmt: skip
    key = (head_dim, v.shape[3], kind, acc is not None, starts, heads, q.dtype, out.dtype)
    return LaunchArgs(key, min(num_sms, num_tiles), arguments)


def check_state(softmax_scale: float, out: Tensor, lse: Tensor, acc: Tensor | None) -> None:
    """Raise ValueError unless the kernel can take this scale and write these tensors."""
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale must be positive for impl='hopper', got {softmax_scale}; use impl='flash2'.")
    if lse.stride(2) != 1:
        raise ValueError(f"lse must have last stride 1, got {lse.stride()}; make it contiguous.")
    for name, x in (("out", out), ("acc", acc)):
        problem = None if x is None else misaligned(x)
        if problem is not None:
            raise ValueError(f"{name} must be addressable by TMA, got {problem}; make it contiguous.")


def write_unseen_rows(out: Tensor, lse: Tensor, acc: Tensor | None, rows: slice) -> None:
    """Write rows that see no key and that no launch covers: empty without `acc`, otherwise `acc`, cast."""
    if rows.start == rows.stop:
        return
    if acc is None:
        out[:, rows] = 0
        lse[:, :, rows] = -math.inf
    elif acc is not out and acc.data_ptr() != out.data_ptr():
        out[:, rows] = acc[:, rows]


@functools.cache
def _tiles(head_dim: int, value_dim: int, wide: bool) -> ForwardTiles:
    """Return the tiles for results of 16 bits that continue no state, or for those that need more room (`wide`)."""
    tiles = forward_tiles(head_dim, value_dim)
    assert tiles is not None
    if tiles.stages_of_16_bits is None:
        return tiles
    if wide:
        return replace(tiles, joint=False)  # with two stages a block would wait for its V
    return replace(tiles, num_stages=tiles.stages_of_16_bits)


@functools.cache
def _variant(tiles: ForwardTiles, mask: str, resume: bool, starts: bool, heads: int) -> ForwardVariant:
    # In joint steps, short documents lose 5%, and full masks with triton 3.9.
    if mask in ("bounds", "ends") or (mask == "none" and MANY_ADDRESSES):
        tiles = replace(tiles, joint=False, turns=tiles.turns and tiles.schedule == "overlap")
    return ForwardVariant(tiles, mask, resume, starts, heads)


def second_band(mask: Mask) -> Region | None:
    """Return the second of two causal regions, one below the other (zigzag chunks against all keys), or None."""
    if len(mask.regions) != 2:
        return None
    above, below = mask.regions
    below_another = (above.q_stop, above.k_start) == (below.q_start, below.k_start)
    causal = above.lower is below.lower is None and above.upper is not None and below.upper is not None
    # Rows of the region above must not count as seeing keys past its last one.
    if not (below_another and causal and above.k_stop == above.q_stop + above.upper and above.upper <= below.upper):
        return None
    return below


class VisibleKeys(NamedTuple):
    """Keys that rows see, as a kernel finds them.

    Args:
        kind: as `ForwardVariant.mask`.
        keys: [first, end) of the keys that the kernel gets.
        diagonals: `lower`, `upper`, `split` and `jump` of `Problem`.
    """

    kind: str
    keys: tuple[int, int]
    diagonals: tuple[int, int, int, int]


def bands_of(mask: Mask) -> VisibleKeys | None:
    """Return a single region or two causal ones as diagonals, or None for any other mask."""
    first, second = mask.regions[0], second_band(mask)
    keys = first.k_start, mask.regions[-1].k_stop
    if second is not None:
        split, jump = second.q_start - first.q_start, second.upper - first.upper
        return VisibleKeys("bands", keys, (*band_of(first), split, jump))
    kind = "none" if first.lower is None and first.upper is None else "band"
    return VisibleKeys(kind, keys, (*band_of(first), 0, 0)) if len(mask.regions) == 1 else None


def table_of(mask: Mask) -> VisibleKeys:
    """Return a mask of which a table of tiles says what rows see."""
    return VisibleKeys("ends" if mask.is_two_sided else "bounds", (0, mask.seqlen_k), (0, 0, 0, 0))


def band_of(region: Region) -> tuple[int, int]:
    """Return (lower, upper) of the band, counted from the region's own first row and key."""
    shift = region.q_start - region.k_start
    lower = -_FAR if region.lower is None else region.lower + shift
    return lower, _FAR if region.upper is None else region.upper + shift


def _descriptors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, acc: Tensor | None, tiles: ForwardTiles
) -> tuple[TensorDescriptor | None, ...]:
    """Return descriptors of q, k, v, out and acc for the first part of the head, then for the second if it differs.

    Without acc, out takes its place.
    """
    pairs = [
        _part_descriptors(q, tiles.block_m, tiles.parts),
        _part_descriptors(k, tiles.block_n, tiles.parts),
        _part_descriptors(v, tiles.block_n, tiles.value_parts),
        _part_descriptors(out, tiles.block_m, tiles.value_parts),
    ]
    pairs.append(pairs[-1] if acc is None else _part_descriptors(acc, tiles.block_m, tiles.value_parts))
    first, second = zip(*pairs, strict=True)
    return *first, *second


def _part_descriptors(x: Tensor, rows: int, parts: tuple[int, ...]) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Return descriptors of tiles of both parts of a head; None for a second part of the first one's width."""
    second = None if parts[-1] == parts[0] else tile_descriptor(x, rows, parts[1])
    return tile_descriptor(x, rows, parts[0]), second


def kv_heads_per_group(num_kv_heads: int, kv_bytes_per_head: int) -> int:
    """Return the largest divisor of num_kv_heads whose K and V fit their share of L2."""
    count = max(1, min(num_kv_heads, _L2_BYTES_PER_GROUP // kv_bytes_per_head))
    while num_kv_heads % count:
        count -= 1
    return count


def heads_at_last(
    regions: tuple[Region, ...],
    tiles: ForwardTiles,
    rows: tuple[int, int],
    num_heads: int,
    per_group: int,
    num_sms: int,
) -> int:
    """Return the number of heads in the last group of a launch: see `last_group`.

    With several documents it is `per_group`, as in other groups: documents differ in each call, and to simulate each
    launch would take the host too long.

    Args:
        num_heads: heads of all sequences together.
    """
    num_tiles = -(-(rows[1] - rows[0]) // tiles.rows) * num_heads
    if len(regions) > 2 or num_tiles > FEW_WAVES * num_sms:
        return per_group
    costs = tile_costs(regions, tiles, rows)
    return per_group * last_group(costs, num_heads // per_group, _GROUPS_AT_LAST, per_group, num_sms)


@functools.lru_cache(maxsize=256)
def tile_costs(regions: tuple[Region, ...], tiles: ForwardTiles, rows: tuple[int, int]) -> tuple[int, ...]:
    """Return the costs of the tiles of a head, in blocks of keys, the largest first."""
    costs = []
    for first in range(*rows, tiles.rows):
        parts = [(max(first, x.q_start), min(first + tiles.rows, x.q_stop), x) for x in regions]
        seen = [
            (
                x.k_start if x.lower is None else max(x.k_start, start + x.lower),
                x.k_stop if x.upper is None else min(x.k_stop, stop + x.upper),
            )
            for start, stop, x in parts
            if start < stop
        ]
        num_keys = max(stop for _, stop in seen) - min(start for start, _ in seen) if seen else 0
        costs.append(-(-num_keys // tiles.block_n) + _BLOCKS_OF_A_TILE)
    return tuple(sorted(costs, reverse=True))


@functools.lru_cache(maxsize=256)
def last_group(costs: tuple[int, ...], num_groups: int, most: int, together: int, num_sms: int) -> int:
    """Return how many groups of `together` heads should alternate at last, so that SMs finish at about the same time.

    Each SM takes the next tile when it has finished one. Groups that alternate share L2, so this is the least number,
    up to `most`, with which the last SM finishes within 1% of the best.

    Args:
        costs: of the tiles of a head, in their order.
    """
    ideal, finished = sum(costs) * num_groups * together / num_sms, dict[int, int]()
    for last in range(1, min(num_groups, most) + 1):
        times = [0] * num_sms
        for heads in [together] * (num_groups - last) + [last * together]:
            for cost in costs:
                for _ in range(heads):
                    heapq.heapreplace(times, times[0] + cost)
        finished[last] = max(times)
        if finished[1] <= 1.01 * ideal:
            return 1
    return next(last for last, time in finished.items() if time <= 1.01 * min(finished.values()))


def tile_table(mask: Mask, device: torch.device, rows_per_tile: int, rows: tuple[int, int]) -> Tensor:
    """Return the table of row tiles of the rows [first, end), most keys first: (tiles, 8) int32, cached with the mask.

    Columns: tile, first_key, last_start, first_stop, end_key. Some row sees each of the keys [first_key, end_key), and
    every row sees those of [last_start, first_stop).
    """
    key = ("forward_tiles", torch.device(device), rows_per_tile, rows)
    return mask.cached(key, lambda: _new_tile_table(mask, device, rows_per_tile, rows))


def _new_tile_table(mask: Mask, device: torch.device, rows_per_tile: int, rows: tuple[int, int]) -> Tensor:
    """Return `tile_table` of a mask; a row that sees no key counts in no minimum or maximum of its tile."""
    start, stop = (bound[slice(*rows)] for bound in mask.bounds())
    empty = start == stop

    def extreme(values: Tensor, of_empty: int, of_padding: int, reduce: str) -> Tensor:
        values = values.masked_fill(empty, of_empty)
        values = torch.nn.functional.pad(values, (0, -len(values) % rows_per_tile), value=of_padding)
        return getattr(values.view(-1, rows_per_tile), reduce)(1)

    first_key = extreme(start, _FAR, _FAR, "amin")
    last_start = extreme(start, _FAR, 0, "amax")
    first_stop = extreme(stop, 0, _FAR, "amin")
    end_key = extreme(stop, 0, 0, "amax")
    first_key = torch.minimum(first_key, end_key)
    order = torch.argsort(end_key - first_key, descending=True, stable=True)
    columns = (torch.arange(len(order), device=start.device), first_key, last_start, first_stop, end_key)
    table = torch.stack([column.int() for column in columns], 1)[order]
    (table,) = upload(device, torch.nn.functional.pad(table, (0, 3)).contiguous())
    return table


@functools.cache
def count_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


_MAX_STREAMS = 256


@functools.cache
def _counters(device: torch.device) -> tuple[tuple[Tensor, ...], dict[int, int]]:
    zeros = torch.zeros(_MAX_STREAMS, 2, dtype=torch.int32, device=device)
    torch.cuda.current_stream(device.index).synchronize()  # before another stream launches with the zeros
    return zeros.unbind(), {}


def tile_counter(device: torch.device) -> Tensor:
    """Return two zeros for the tile counter of a launch. Concurrent launches on two streams must not share them.

    Each launch in a CUDA graph gets its own: the graph may be replayed concurrently with other work of the stream on
    which it was captured.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    counters, slots = _counters(device)
    stream = torch.cuda.current_stream(device.index).cuda_stream
    slot = slots.get(stream)
    return counters[_new_slot(slots, stream) if slot is None else slot]


_slots_lock = Lock()


def _new_slot(slots: dict[int, int], stream: int) -> int:
    """Assign a slot to a new stream; two threads with new streams must not get the same one."""
    with _slots_lock:
        slot = slots.setdefault(stream, len(slots))
        if slot < _MAX_STREAMS:
            return slot
        del slots[stream]
    raise RuntimeError(
        f"kernels must be launched on at most {_MAX_STREAMS} streams of a device, got one more; reuse streams, as "
        "torch.cuda.Stream() does."
    )
