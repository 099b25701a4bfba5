"""Sections and blocks of an all-gather by heads: how many KV heads, and keys of how many ranks, are gathered at a time.

`CallPlan` and `GatherAttention` call it. Pure Python, with the same result on every rank; the constants were tuned on
H200s (docs/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

import torch

from ringflash.attention.schedule import KeyBlock
from ringflash.comm.call_numbers import HEADER_BYTES
from ringflash.comm.transport import NcclGather, Undecided
from ringflash_kernels.api import state_dtype

GIB, MIB = 1 << 30, 1 << 20
# A kernel *hides* a transfer that runs at the same time and ends before it. What no kernel hides is *exposed*.
MAX_UNBUFFERED_KV_BYTES = 2 * GIB  # up to this size the K/V of all heads are gathered into one area, without buffers
MIN_SECTION_PAIRS = 1 << 18  # query heads * keys of a section: below it, the host takes longer than the GPU
_MIN_HALVED_WORK = 1 << 30  # query heads * queries * keys of a call that is halved even below MIN_SECTION_PAIRS
MAX_GATHER_BYTES = 12 * GIB  # buffers of a call of one block: a call that needs more is cut into blocks
MAX_BLOCK_DISTANCES = 8  # over NCCL, ranks whose keys are one block: for more, several blocks need fewer messages
BLOCK_BYTES = 512 * MIB  # largest buffer of gradients of a unit, in a call of several blocks
STATE_BYTES = 256 * MIB  # largest fp32 output of a section, in a call of several blocks
MIN_UNIT_WORK = 1 << 35  # heads * visible pairs * head_dim of a unit: below it, the host takes longer than the GPU
_LONG_CALL_WORK = 1 << 39  # heads * queries * keys * head_dim of a call: below it, few sections save the host's time
_IDLE_LINK_WORK = 1 << 43  # heads * visible pairs * head_dim of a call whose backward takes 140 ms: links can fall idle
BUFFER_BYTES = 192 * MIB  # largest buffer of K/V, or of gradients, of a section, unless the smallest section is larger
_GRADIENT_BUFFERS_BYTES = 1280 * MIB  # size of all buffers of gradients, if more than two let links fall idle
PUBLISHED_BYTES = 64 * MIB  # size of own K/V whose writing takes longer than the transfer of their first section
_PULL_QUERY_ROWS = 3000  # number of query rows whose kernel takes as long as the pull of the keys that they see
# Returns of gradients that a backward kernel hides, divided by the pulls that a forward kernel hides. A backward takes
# 2.6 times as long, and gradients in fp32 are twice the bytes; barriers reduce the quotient from 1.3 to 0.8.
_BACKWARD_OVERLAP = 0.8
_MAX_EXPOSED = 0.025  # part of a forward that the first pull may take; if it takes more, there is one more section
_MAX_EXPOSED_SHORT = 0.05  # the same for short calls, in which the host takes longer for a section


class Sections(NamedTuple):
    """KV heads of each section."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


class GatherSizes(NamedTuple):
    """Sizes of a call, the same on all ranks, by which it is divided into sections and blocks.

    Args:
        kv: shape of a rank's k: (batch, rows, num_kv_heads, head_dim).
        num_heads: heads of q.
        keys: largest number of keys that any rank gathers of one sequence.
        returned_rows: largest number of rows of gradients of one sequence that any rank receives.
        pairs: visible pairs of one sequence, divided by the number of ranks.
        dtype: in which K and V travel.
    """

    kv: torch.Size | tuple[int, ...]
    num_heads: int
    keys: int
    returned_rows: int
    pairs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, blocks: Sequence[KeyBlock], kv: tuple[int, ...], num_heads: int, dtype: torch.dtype) -> GatherSizes:
        """Return the sizes of a call that gathers these blocks of keys."""
        keys, returned = (max(column) for column in zip(*((x.capacity, x.returned_rows) for x in blocks), strict=True))
        return cls(kv, num_heads, keys, returned, blocks[0].pairs, dtype)


def choose_sections(sizes: GatherSizes, num_blocks: int = 1, transport: str | Undecided | None = None) -> Sections:
    """Divide the KV heads into sections. The first one is small, because its pull is exposed.

    Args:
        num_blocks: blocks of the call; in several, sections have the heads that memory allows.
        transport: "nccl" or another.
    """
    (batch, rows, num_kv_heads, head_dim), num_heads, keys, _, _, dtype = sizes
    sharing = num_heads // num_kv_heads  # query heads that share a KV head
    if num_blocks > 1:
        return Sections(*[_equal_parts(num_kv_heads, _block_heads(sizes))] * 2)
    min_heads = max(1, -(-MIN_SECTION_PAIRS // (sharing * batch * keys)))
    overlap_ratio = max(1.0, sharing * rows / _PULL_QUERY_ROWS)  # KV heads whose pull the kernel of one KV head hides
    if min_heads >= num_kv_heads:
        too_small = num_kv_heads == 1 or batch * num_heads * rows * keys < _MIN_HALVED_WORK
        # In MHA over NCCL there would be many sections, whose messages take SMs.
        if too_small or (transport == "nccl" and overlap_ratio < 2):
            return Sections((num_kv_heads,), (num_kv_heads,))
        min_heads = -(-num_kv_heads // 2)
    head = 2 * batch * keys * head_dim  # elements of K and V of one KV head
    max_heads = num_kv_heads if fits_unbuffered(sizes) else max(min_heads, BUFFER_BYTES // (head * dtype.itemsize))
    is_long = batch * num_heads * rows * keys * head_dim >= _LONG_CALL_WORK
    max_exposed = _MAX_EXPOSED if is_long else _MAX_EXPOSED_SHORT
    forward = _forward_sections(num_kv_heads, overlap_ratio, max_heads, max_exposed)
    max_heads = max(min_heads, BUFFER_BYTES // (head * state_dtype(dtype).itemsize))
    if not is_long:
        return Sections(forward, _short_backward_sections(num_kv_heads, overlap_ratio, min_heads, max_heads))
    return Sections(forward, _backward_sections(num_kv_heads, overlap_ratio, max_heads))


def choose_blocks(sizes: GatherSizes, num_distances: int, transport: str | Undecided | None) -> tuple[int, ...]:
    """Return how many ring distances each block of keys has: the argument `sizes` of `schedule.plan_blocks`.

    One block needs the fewest launches. A call has several if the buffers of one would exceed MAX_GATHER_BYTES. Long
    calls have several in two more cases: over NCCL with more than MAX_BLOCK_DISTANCES distances, to save messages,
    and with a single KV head, because no other section could hide its keys and gradients.

    The first of several blocks is the rank's own keys, which need no transfer. The next ones and the last ones are
    small, since little hides their keys and their gradients.

    Args:
        num_distances: number of distances at which any rank sees keys (`schedule.active_distances`).
        transport: "nccl" or another.
    """
    (batch, rows, num_kv_heads, head_dim), dtype = sizes.kv, sizes.dtype
    work = batch * sizes.num_heads * sizes.pairs * head_dim
    single_head, many_messages = num_kv_heads == 1, transport == "nccl" and num_distances > MAX_BLOCK_DISTANCES
    too_large = gather_bytes(sizes) > MAX_GATHER_BYTES
    worth_cutting = too_large or ((single_head or many_messages) and work >= 4 * MIN_UNIT_WORK)
    if num_distances == 1 or not worth_cutting:
        return (num_distances,)
    heads = _block_heads(sizes)
    shard_bytes = 2 * batch * rows * heads * head_dim * state_dtype(dtype).itemsize  # gradients of one distance
    num_sections, others = -(-num_kv_heads // heads), num_distances - 1
    min_size = -(-MIN_UNIT_WORK * num_distances * num_sections // work)  # distances of a unit with enough work
    return 1, *_block_sizes(others, max(min_size, others // 64), max(1, min_size, BLOCK_BYTES // shard_bytes))


def _block_sizes(total: int, smallest: int, largest: int) -> tuple[int, ...]:
    """Divide a total into sizes that grow from `smallest` by a factor of 4, and shrink by this factor at the end."""
    growing: list[int] = []
    size = smallest
    while size < largest and 2 * (sum(growing) + size) < total:
        growing.append(size)
        size *= 4
    return *growing, *_equal_parts(total - 2 * sum(growing), largest), *reversed(growing)


def _block_heads(sizes: GatherSizes) -> int:
    """Return the most KV heads of a section in a call of several blocks."""
    batch, rows, num_kv_heads, head_dim = sizes.kv
    head_bytes = batch * rows * head_dim * state_dtype(sizes.dtype).itemsize
    fitting = min(STATE_BYTES // (head_bytes * sizes.num_heads // num_kv_heads), BLOCK_BYTES // (2 * head_bytes))
    return min(num_kv_heads, max(1, fitting))


def fits_unbuffered(sizes: GatherSizes) -> bool:
    """True if the gathered K/V of all heads fit into one area; otherwise sections share buffers."""
    batch, _, num_kv_heads, head_dim = sizes.kv
    return 2 * batch * sizes.keys * num_kv_heads * head_dim * sizes.dtype.itemsize <= MAX_UNBUFFERED_KV_BYTES


class Unit(NamedTuple):
    """A section of heads over a block of keys: what is gathered and computed at a time.

    Args:
        transfer: number of the transfer that brings its keys, which go into buffers in rotation; None for a rank's own
            keys in a call of several blocks.
    """

    section: int
    block: int
    transfer: int | None


def order_units(num_sections: int, num_blocks: int) -> tuple[Unit, ...]:
    """List the units of a call in order; a call of several blocks computes two sections side by side."""
    if num_blocks == 1:
        return tuple(Unit(section, 0, section) for section in range(num_sections))
    pairs = (range(first, min(first + 2, num_sections)) for first in range(0, num_sections, 2))
    order = [(section, block) for pair in pairs for block in range(num_blocks) for section in pair]
    counts = accumulate(block > 0 for _, block in order)
    return tuple(Unit(*unit, count - 1 if unit[1] else None) for unit, count in zip(order, counts, strict=True))


def buffer_sizes(sizes: tuple[int, ...], num_buffers: int = 2) -> tuple[int, ...]:
    """Return the sizes of buffers that units use in turn, unit i buffer i % num_buffers: each fits its largest unit."""
    return tuple(max(sizes[index::num_buffers]) for index in range(min(num_buffers, len(sizes))))


def shared_buffer_sizes(sections: Sections, num_buffers: int) -> tuple[int, ...]:
    """Return `buffer_sizes` of buffers that forward and backward share."""
    return tuple(map(max, zip_longest(*(buffer_sizes(heads, num_buffers) for heads in sections), fillvalue=0)))


def choose_num_gradient_buffers(sizes: GatherSizes, heads: tuple[int, ...]) -> int:
    """Return the number of gradient buffers: two, or more if NVLink can then fall idle between two returns.

    An NVLink stays active for 50 ms after a transfer, and takes power from the kernels, which then run more slowly. A
    call that ends within this time gains nothing, nor does a call that gathers K/V through buffers, because its
    transfers do not pause.

    Args:
        heads: KV heads of each section of the backward.
    """
    batch, _, _, head_dim = sizes.kv
    short = batch * sizes.num_heads * sizes.pairs * head_dim < _IDLE_LINK_WORK
    if short or not fits_unbuffered(sizes):
        return min(2, len(heads))
    buffer = max(heads) * 2 * batch * sizes.keys * head_dim * state_dtype(sizes.dtype).itemsize
    return min(max(2, _GRADIENT_BUFFERS_BYTES // buffer), len(heads))


def return_batches(num_sections: int, num_buffers: int) -> list[tuple[int, ...]]:
    """Group the sections whose gradients return to their owners together.

    A batch leaves one buffer free for the kernel that runs meanwhile. The last section returns by itself.
    """
    equal = _equal_parts(num_sections - 1, max(1, num_buffers - 1)) if num_sections > 1 else ()
    ends = [0, *accumulate(equal), num_sections]
    return [tuple(range(*both)) for both in pairwise(ends)]


def gather_bytes(sizes: GatherSizes) -> int:
    """Return the most bytes of buffers that any rank needs over NCCL, in addition to its own K/V."""
    (batch, _, num_kv_heads, head_dim), keys, dtype = sizes.kv, sizes.keys, sizes.dtype
    sections = choose_sections(sizes, 1, "nccl")
    kv = num_kv_heads if fits_unbuffered(sizes) else sum(shared_buffer_sizes(sections, NcclGather.num_buffers))
    num_buffers = choose_num_gradient_buffers(sizes, sections.backward)
    gradients = sum(buffer_sizes(sections.backward, num_buffers)) * keys + max(sections.backward) * sizes.returned_rows
    num_bytes = kv * keys * dtype.itemsize + gradients * state_dtype(dtype).itemsize
    return HEADER_BYTES + 2 * batch * head_dim * num_bytes


@lru_cache(maxsize=64)
def _forward_sections(num_heads: int, overlap_ratio: float, max_heads: int, max_exposed: float) -> tuple[int, ...]:
    """Divide KV heads into few sections, each small enough that the kernel of the previous one hides its pull.

    Args:
        max_heads: heads of a section, at most.
        overlap_ratio: KV heads whose pull the kernel of one KV head hides.
        max_exposed: part of the forward that the first pull may take.
    """
    for count in range(2, 5):
        first = math.ceil(num_heads / sum(overlap_ratio**power for power in range(count)))
        if first <= max_exposed * num_heads * overlap_ratio:
            break
    heads: list[int] = []
    following = first
    while sum(heads) < num_heads:
        heads.append(min(following, max_heads, num_heads - sum(heads)))
        following = math.floor(heads[-1] * overlap_ratio)
    return tuple(heads)


def _backward_sections(num_heads: int, overlap_ratio: float, max_heads: int) -> tuple[int, ...]:
    """Divide KV heads for a backward: a small first section, and shrinking last ones that hide the previous return.

    Args: as `_forward_sections`.
    """
    first = math.ceil(min(num_heads / 16, max_heads))
    last = [first][: num_heads - first]
    grown = math.floor(first * overlap_ratio * _BACKWARD_OVERLAP)
    while last and last[0] < grown < max_heads and first + sum(last) + grown <= num_heads:
        last.insert(0, grown)
        grown = math.floor(grown * overlap_ratio * _BACKWARD_OVERLAP)
    return first, *_equal_parts(num_heads - first - sum(last), max_heads), *last


def _short_backward_sections(num_heads: int, overlap_ratio: float, min_heads: int, max_heads: int) -> tuple[int, ...]:
    """Divide KV heads for the backward of a short call into equal parts.

    The last of two is smaller, if its kernel still hides the return of the first one's gradients.

    Args: as `_forward_sections`; min_heads: heads of a part, at least.
    """
    parts = _equal_parts(num_heads, min_heads)
    last = math.ceil(max(num_heads / 4, num_heads / (1 + overlap_ratio * _BACKWARD_OVERLAP)))
    if len(parts) == 2 and last < parts[1] and num_heads - last <= max_heads:
        return num_heads - last, last
    return parts


def _equal_parts(total: int, largest: int) -> tuple[int, ...]:
    """Divide a total into as few parts of at most `largest` as possible, as equal as possible."""
    count = -(-total // largest)
    return tuple(total // count + (index < total % count) for index in range(count))
