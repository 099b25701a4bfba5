"""Memory of an all-gather by heads: gathered K/V on every rank.

`GatherAttention` makes a `GatheredKV` and a `GradientReturn` (`gradient_return.py`) for each mask and shape. They
list every copy or message of a call once (`transfers.py` says which rows), and later calls only replay these lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.attention import sections, transfers
from ringflash.attention.inputs import KVShape
from ringflash.attention.kv_format import KVFormat
from ringflash.attention.schedule import KeyBlock
from ringflash.attention.sections import GatherSizes, Unit, buffer_sizes
from ringflash.comm.call_numbers import HEADER_BYTES, CallNumber, CallWords, call_word_of
from ringflash.comm.transport.areas import BEGIN, PUBLISHED, PULLED, GroupAreas, Incoming, Outgoing
from ringflash.comm.transport.buffers import buffer
from ringflash.comm.transport.gpu_areas import Marker
from ringflash_kernels.api import publish, publish_records


@dataclass(frozen=True)
class PassSizes:
    """Units of one pass and their sizes: everything about its K/V that needs no memory.

    *Unbuffered*: if the K/V of all heads fit (`sections.fits_unbuffered`), they are gathered into this rank's area,
    from which other ranks pull. The rank's own K/V are published at their places there and need no copy. (A copy within
    one GPU is a kernel, and might wait until the running attention kernel frees SMs.)

    *Buffered*: otherwise, and in calls of several blocks, the area holds this rank's own K/V only. Each unit is pulled
    into one of a few buffers, used in rotation; a block of the rank's own keys is read from the area.

    Args:
        blocks: keys that this rank needs.
        heads: KV heads of each section.
        shape: shape of a rank's k and v.
        heads_per_kv_head: query heads that share a KV head.
        kv_format: format in which K and V travel.
    """

    blocks: tuple[KeyBlock, ...]
    heads: tuple[int, ...]
    shape: KVShape
    heads_per_kv_head: int
    kv_format: KVFormat

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Units of the pass, in order."""
        return sections.order_units(len(self.heads), len(self.blocks))

    @cached_property
    def travelling(self) -> list[int]:
        """Indices of the units whose keys are pulled, by transfer."""
        return [index for index, unit in enumerate(self.units) if unit.transfer is not None]

    @cached_property
    def buffered(self) -> bool:
        """True if units are pulled into buffers, False if into the area."""
        return len(self.blocks) > 1 or not sections.fits_unbuffered(self.gather_sizes)

    @property
    def gather_sizes(self) -> GatherSizes:
        """Sizes from which the sections were chosen."""
        num_heads = self.shape.heads * self.heads_per_kv_head
        return GatherSizes.of(self.blocks, self.shape, num_heads, self.kv_format.dtype)

    @property
    def area_lines(self) -> int:
        """Lines of one sequence and head in an area."""
        return (self.shape.rows if self.buffered else self.blocks[0].capacity) // self.kv_format.keys_per_line

    @cached_property
    def published(self) -> list[slice]:
        """KV heads that are published together: the first section of large K/V before the others."""
        batch, rows, num_kv_heads, _ = self.shape
        lines = batch * -(-rows // self.kv_format.keys_per_line) * num_kv_heads
        own_bytes = lines * self.kv_format.line_elements * self.kv_format.dtype.itemsize
        in_parts = len(self.heads) > 1 and own_bytes >= sections.PUBLISHED_BYTES
        ends = [0, *self.heads[:1], num_kv_heads] if in_parts else [0, num_kv_heads]
        return [slice(*both) for both in pairwise(ends)]

    @property
    def line(self) -> int:
        """Elements of a line of gradients: dK and dV of one head, for one key."""
        return sum(self.kv_format.head_dims)

    def name(self, unit: Unit) -> str:
        """Name a unit for errors and traces."""
        return f"section {unit.section}" + (f", block {unit.block}" if len(self.blocks) > 1 else "")

    def by_section(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Return, for each section, the view of x with its query heads; x has all query heads along `dim`."""
        return x.split_with_sizes([count * self.heads_per_kv_head for count in self.heads], dim)


class OwnerArea(NamedTuple):
    """Views of an owner's area: call number, K/V flat, and K/V by section (batch, lines, heads of the section, *line).

    All are None if this rank cannot map the area.
    """

    number: Tensor | None
    flat: Tensor | None
    by_section: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class GatheredKV:
    """K/V of all units as this rank's kernels read them, and their transfers.

    Args:
        sizes: units of the pass.
        areas: memory areas of the group.
        own: (elements,), K/V in this rank's area, dtype of the format.
        words: numbers of this call on this rank and on the owners.
        keys_values: by unit: K and V, each (batch, keys of the block, heads of the section, head_dim), or the records.
        transfers: by unit: function that brings its K/V, to be run on a stream.
        head_offsets: (num_kv_heads, 2), int64: first element of each head in the area, and stride of its lines.
        line_map: (lines,), int32: line of the area to which each of this rank's lines is written.
        records: with FP8, for each of `sizes.published`: (batch, lines, heads), int64, indices of records in the area.
    """

    sizes: PassSizes
    areas: GroupAreas
    own: Tensor
    words: CallWords
    keys_values: list[tuple[Tensor, ...]]
    transfers: list[Callable[[], None]]
    head_offsets: Tensor
    line_map: Tensor
    records: list[Tensor]

    @classmethod
    def of(
        cls,
        areas: GroupAreas,
        blocks: tuple[KeyBlock, ...],
        k: Tensor,
        num_heads: int,
        heads: tuple[int, ...],
        kv_format: KVFormat | None = None,
    ) -> GatheredKV:
        """Reserve the memory of a pass, and list its transfers.

        Args:
            areas: memory areas of the group; every rank makes the same calls with tensors of the same shapes.
            blocks, heads: as `PassSizes`.
            k: (batch, seqlen_local, num_kv_heads, head_dim); only its shape, dtype and device are used.
            num_heads: heads of q.
            kv_format: default: K and V as they are.
        """
        kv_format = kv_format or KVFormat.of(k, k, fp8=False, for_backward=False)
        batch, rows, num_kv_heads, _ = k.shape
        shape = KVShape(batch, rows, num_kv_heads, sum(kv_format.head_dims) // 2)
        sizes = PassSizes(blocks, heads, shape, num_heads // num_kv_heads, kv_format)
        mapped = _map_areas(areas, sizes)
        own = mapped[areas.rank]
        assert own.number is not None and own.flat is not None and own.by_section is not None
        words = CallWords(own.number, [owner for owner in mapped if owner != areas.rank], k.device)
        if sizes.buffered:
            targets = _buffers(sizes, own.by_section, areas.num_buffers, k.device)
        else:
            targets = [lines[:, kv_format.line_slice(0, blocks[0].num_rows)] for lines in own.by_section]
        unit_transfers = [
            areas.make_transfer(
                _incoming(sizes, unit, target, mapped, words, areas.rank),
                _outgoing(sizes, unit, own.by_section[unit.section], words, areas.rank),
                f"K/V of {sizes.name(unit)}",
            )
            for unit, target in zip(sizes.units, targets, strict=True)
        ]
        head_offsets, line_map = _head_offsets(sizes).to(k.device), _line_map(sizes, areas.rank).to(k.device)
        records = _records(sizes, head_offsets, line_map) if kv_format.fp8 else []
        keys_values = [kv_format.unpack(target) for target in targets]
        return cls(sizes, areas, own.flat, words, keys_values, unit_transfers, head_offsets, line_map, records)

    @property
    def device(self) -> torch.device:
        """Device of the K/V."""
        return self.own.device

    @property
    def begins_on_pull_stream(self) -> bool:
        """True if the barrier BEGIN is on the stream of the pulls, False if on the caller's stream, before kernels.

        In a call of several blocks, the first kernels need only the rank's own keys and wait for no pull. They may hold
        all SMs, for which the barrier, a kernel as well, would wait on another stream.
        """
        return len(self.sizes.blocks) == 1

    def publish(self, k: Tensor, v: Tensor, impl: str, number: CallNumber) -> tuple[Marker, Marker]:
        """Write this rank's K and V, and the number of its call, to the area that other ranks pull from.

        The first unit is pulled at once. If K and V are large, its section is written before the others, so that it
        travels while these are written.

        Returns:
            start: end of this work, after which the other units may be pulled.
            arrived: arrival of the first unit.
        """
        self.areas.run(self.words.write, number, commands=self.words.write_commands)
        self._publish(k, v, impl, 0)
        if not self.begins_on_pull_stream:
            self.areas.barrier(BEGIN)
        start = self.areas.mark()
        arrived = self.pull(self.sizes.travelling[0], start, [])
        if len(self.sizes.published) > 1:
            self._publish(k, v, impl, 1)
            self.areas.barrier(PUBLISHED)
            start = self.areas.mark()
        return start, arrived

    def _publish(self, k: Tensor, v: Tensor, impl: str, part: int) -> None:
        """Write part `part` of `sizes.published` of this rank's K and V to its area."""
        heads, kv_format = self.sizes.published[part], self.sizes.kv_format
        k, v = k[:, :, heads], v[:, :, heads]
        if kv_format.fp8:
            publish_records(impl, k, v, self.own, self.records[part], for_backward=kv_format.for_backward)
        else:
            publish(impl, k, v, self.own, self.head_offsets[heads], self.line_map, self.sizes.area_lines)

    def pull(self, index: int, start: Marker, computed: list[Marker]) -> Marker:
        """Start to pull the K/V of a unit.

        Args:
            index: of the unit.
            start: end of the work of `publish` on which it depends.
            computed: units computed so far. If K/V are buffered, one of them was the last to read the buffer.
        """
        transfer = self.sizes.units[index].transfer
        assert transfer is not None
        before = transfer - self.areas.num_buffers
        used = [computed[self.sizes.travelling[before]]] if self.sizes.buffered and before >= 0 else []

        def move() -> None:
            if transfer == 0 and self.begins_on_pull_stream:
                self.areas.barrier(BEGIN)
            self.transfers[index]()

        return self.areas.run_on_stream("pull", move, [start, *used], urgent=True)

    def all_pulled(self, number: CallNumber) -> Marker:
        """Start the barrier after every rank's last pull. No kernel waits for it: kernels read only their own GPU.

        The host also receives the numbers of the peers' calls.
        """
        on_host = self.areas.run_on_host(self.words.for_host, number)

        def end() -> None:
            if on_host is not None:
                commands = partial(self.words.send_commands, on_host)
                self.areas.run(self.words.send_to_host, on_host, commands=commands)
            self.areas.barrier(PULLED)

        marker = self.areas.run_on_stream("pull", end, [], urgent=True)
        if on_host is not None:
            compare_later = partial(self.words.compare_later, self.areas.group, self.areas.members)
            self.areas.run_on_host(compare_later, number, marker, on_host)
        return marker


def split_heads(
    area: Tensor, leading: tuple[int, ...], heads: tuple[int, ...], line: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Return consecutive views of an area, one for each section: (*leading, heads of the section, *line)."""
    sizes = [math.prod((*leading, count, *line)) for count in heads]
    parts = area[: sum(sizes)].split(sizes)
    return tuple(part.view(*leading, count, *line) for part, count in zip(parts, heads, strict=True))


def _map_areas(areas: GroupAreas, sizes: PassSizes) -> dict[int, OwnerArea]:
    """Reserve the area, and return views of the areas of all owners, by rank."""
    kv_format, leading = sizes.kv_format, (sizes.shape.batch, sizes.area_lines)
    dtype, size = kv_format.dtype, math.prod(leading) * sizes.shape.heads * kv_format.line_elements
    num_bytes = HEADER_BYTES + size * dtype.itemsize
    areas.reserve("kv", num_bytes)
    mapped = {}
    for owner in sorted({segment.owner for block in sizes.blocks for segment in block.segments}):
        area = areas.view("kv", owner, (num_bytes,), torch.uint8)
        if area is None:
            mapped[owner] = OwnerArea(None, None, None)
        else:
            flat = area[HEADER_BYTES:].view(dtype)
            by_section = split_heads(flat, leading, sizes.heads, kv_format.line_shape)
            mapped[owner] = OwnerArea(call_word_of(area), flat, by_section)
    return mapped


def _buffers(sizes: PassSizes, own: tuple[Tensor, ...], num_buffers: int, device: torch.device) -> list[Tensor]:
    """Return memory for the K/V of each unit: a view of a buffer, or of the area for this rank's own keys."""
    batch, kv_format = sizes.shape.batch, sizes.kv_format
    shapes = [
        (
            batch,
            sizes.blocks[unit.block].num_rows // kv_format.keys_per_line,
            sizes.heads[unit.section],
            *kv_format.line_shape,
        )
        for unit in sizes.units
    ]
    travelling = tuple(math.prod(shapes[index]) for index in sizes.travelling)
    buffers = [
        buffer(f"kv.{index}", (most,), kv_format.dtype, device)
        for index, most in enumerate(buffer_sizes(travelling, num_buffers))
    ]
    return [
        own[unit.section]
        if unit.transfer is None
        else buffers[unit.transfer % num_buffers][: math.prod(shape)].view(shape)
        for unit, shape in zip(sizes.units, shapes, strict=True)
    ]


def _incoming(
    sizes: PassSizes, unit: Unit, target: Tensor, mapped: dict[int, OwnerArea], words: CallWords, rank: int
) -> list[Incoming]:
    """List the tensors that arrive for a unit; with the first section of a block also the numbers of the calls."""
    block, line_slice = sizes.blocks[unit.block], sizes.kv_format.line_slice
    own_in_place = unit.transfer is None or not sizes.buffered
    incoming = []
    for pull in transfers.key_pulls(block, rank, buffered=sizes.buffered, own_in_place=own_in_place):
        peer, peer_lines = pull.peer, line_slice(pull.peer_row, pull.num_rows)
        of_peer = mapped[peer].by_section
        for index, sequence in enumerate(target):
            source = None if of_peer is None else of_peer[unit.section][index, peer_lines]
            incoming.append(Incoming(sequence[line_slice(pull.row, pull.num_rows)], peer, source))
    if unit.section == 0:
        owners = transfers.owner_ranks(block, rank)
        incoming += [Incoming(words.arrival_of(owner), owner, mapped[owner].number) for owner in owners]
        incoming.sort(key=lambda pull: transfers.nearest_first(pull.rank, rank))
    return incoming


def _outgoing(sizes: PassSizes, unit: Unit, own: Tensor, words: CallWords, rank: int) -> list[Outgoing]:
    """List the tensors of a unit that other ranks receive; with the first section of a block also the call's number."""
    block, line_slice = sizes.blocks[unit.block], sizes.kv_format.line_slice
    sends = transfers.key_sends(block, rank, buffered=sizes.buffered)
    outgoing = [
        Outgoing(sequence[line_slice(row, num_rows)], peer) for peer, row, num_rows in sends for sequence in own
    ]
    if unit.section == 0:
        outgoing += [Outgoing(words.own, reader) for reader in transfers.reader_ranks(block, rank)]
    return outgoing


def _head_offsets(sizes: PassSizes) -> Tensor:
    """Return `GatheredKV.head_offsets`, in elements."""
    line = sizes.kv_format.line_elements
    return torch.tensor(
        [
            (sizes.shape.batch * sizes.area_lines * line * first + head * line, heads * line)
            for first, heads in zip([0, *accumulate(sizes.heads)], sizes.heads, strict=False)
            for head in range(heads)
        ]
    )


def _line_map(sizes: PassSizes, rank: int) -> Tensor:
    """Return `GatheredKV.line_map`."""
    kv_format = sizes.kv_format
    line_map = torch.empty(sizes.shape.rows // kv_format.keys_per_line, dtype=torch.int32)
    for segment in sizes.blocks[0].segments:
        if segment.owner == rank:
            target = kv_format.line_slice(transfers.area_row(segment, sizes.buffered), segment.size)
            line_map[kv_format.line_slice(segment.start, segment.size)] = torch.arange(target.start, target.stop)
    return line_map


def _records(sizes: PassSizes, head_offsets: Tensor, line_map: Tensor) -> list[Tensor]:
    """Return `GatheredKV.records`: (batch, lines, heads of each) each."""
    lines = torch.arange(sizes.shape.batch, device=line_map.device)[:, None] * sizes.area_lines + line_map
    records = (head_offsets[:, 0] + lines[..., None] * head_offsets[:, 1]) // sizes.kv_format.line_elements
    return [records[..., heads].contiguous() for heads in sizes.published]
