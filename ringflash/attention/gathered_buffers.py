"""Memory of an all-gather by heads: gathered K/V on every rank.

`HeadGather` makes a `GatheredKV` and a `GradientReturn` (`gradient_return.py`) for each mask and shape. They list every
copy or message of a call once, and later calls only replay these lists.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import torch

from ringflash.attention import sections
from ringflash.attention.inputs import KVShape
from ringflash.attention.operands import Operands
from ringflash.attention.schedule import Gathering, Piece
from ringflash.attention.sections import Unit, buffer_heads
from ringflash.comm import call_numbers
from ringflash.comm.call_numbers import HEADER_BYTES, CallNumber, Words, word_in
from ringflash.comm.transport.areas import BEGIN, PUBLISHED, PULLED, GroupAreas, Incoming, Outgoing
from ringflash.comm.transport.buffers import buffer
from ringflash.comm.transport.lanes import Marker
from ringflash_kernels.api import publish, publish_records


class GatheredKV:
    """K/V of all units as this rank's kernels read them, and their transfers.

    If the K/V of all heads fit (`sections.fits_unbuffered`), they are gathered into the same area from which other
    ranks pull, so that the rank's own K/V are in place already. (A copy within one GPU needs SMs, which a running
    kernel does not give up before it ends.) Otherwise, and in calls of several blocks, the area holds the rank's own
    K/V only, and units are gathered into `memory.num_buffers` buffers, which they use in rotation. A block of a rank's
    own keys is read from the area.

    Args:
        memory: areas of the group; every rank makes the same calls with tensors of the same shapes.
        blocks: keys that this rank needs.
        k: (batch, seqlen_local, num_kv_heads, head_dim); only its shape, dtype and device are used.
        num_heads: heads of q.
        heads: KV heads of each section.
        operands: form in which K and V travel. Default: as they are.
    """

    def __init__(
        self,
        memory: GroupAreas,
        blocks: tuple[Gathering, ...],
        k: torch.Tensor,
        num_heads: int,
        heads: tuple[int, ...],
        operands: Operands | None = None,
    ) -> None:
        self.operands = operands = operands or Operands.of(k, k, rounded=False, for_backward=False)
        self.memory, self.blocks, self.device, self.heads = memory, blocks, k.device, heads
        batch, rows, num_kv_heads, _ = k.shape
        self.widths, self.line = operands.widths, sum(operands.widths)  # elements of a line of gradients
        self.shape = KVShape(batch, rows, num_kv_heads, self.line // 2)
        self.heads_per_kv_head = num_heads // num_kv_heads
        self.units = sections.order_units(len(heads), len(blocks))
        self.travelling = [index for index, unit in enumerate(self.units) if unit.transfer is not None]
        self.buffered = len(blocks) > 1 or not sections.fits_unbuffered(self.shape, blocks[0].capacity, operands.dtype)
        self.area_lines = (rows if self.buffered else blocks[0].capacity) // operands.keys
        self._map_areas(k)
        slots = self._buffers(k) if self.buffered else self._own_slots()
        self.keys_values = [operands.unpack(slot) for slot in slots]  # by unit, as kernels take them
        self.pulls = [self._pulls(unit, slot) for unit, slot in zip(self.units, slots, strict=True)]
        self.sends = [self._sends(unit) for unit in self.units]
        for unit, pulls, sends in zip(self.units, self.pulls, self.sends, strict=True):
            if unit.section == 0:
                self._add_numbers(blocks[unit.block], pulls, sends)
        self.moves = [
            memory.make_transfer(pulls, sends, f"K/V of {self.name(unit)}")
            for unit, pulls, sends in zip(self.units, self.pulls, self.sends, strict=True)
        ]
        self.head_offsets, self.line_map = self._offsets(batch).to(k.device), self._line_map(rows).to(k.device)
        # Kernels of own keys do not wait for a pull, and would leave no SM to a barrier in the lane of the pulls.
        self.begins_in_lane = len(blocks) == 1
        own_bytes = math.prod(operands.lines_of(k)) * operands.dtype.itemsize
        in_parts = len(heads) > 1 and own_bytes >= sections.PUBLISHED_BYTES
        ends = [0, *heads[:1], num_kv_heads] if in_parts else [0, num_kv_heads]
        self.parts = [slice(*both) for both in pairwise(ends)]  # heads that are published together
        records = self._records(batch) if operands.rounded else None
        self.records = [] if records is None else [records[..., part].contiguous() for part in self.parts]

    def name(self, unit: Unit) -> str:
        """Name a unit for errors and traces."""
        return f"section {unit.section}" + (f", block {unit.block}" if len(self.blocks) > 1 else "")

    def publish(self, k: torch.Tensor, v: torch.Tensor, impl: str, number: CallNumber) -> Marker:
        """Write this rank's K and V, and the number of its call, to the area that other ranks pull from.

        The first unit is pulled at once. Its section of large K and V is written before the others, so that it travels
        meanwhile.

        Returns:
            arrival of the first unit. The others may be pulled after all this work.
        """
        self.words.write(number)
        self._publish(k, v, impl, 0)
        if not self.begins_in_lane:
            self.memory.barrier(BEGIN)
        arrived = self.pull(self.travelling[0], self.memory.mark(), [])
        if len(self.parts) > 1:
            self._publish(k, v, impl, 1)
            self.memory.barrier(PUBLISHED)
        return arrived

    def _publish(self, k: torch.Tensor, v: torch.Tensor, impl: str, part: int) -> None:
        heads = self.parts[part]
        k, v = k[:, :, heads], v[:, :, heads]
        if self.operands.rounded:
            publish_records(impl, k, v, self.own, self.records[part], for_backward=self.operands.for_backward)
        else:
            publish(impl, k, v, self.own, self.head_offsets[heads], self.line_map, self.area_lines)

    def pull(self, index: int, start: Marker, computed: list[Marker]) -> Marker:
        """Start to pull the K/V of a unit.

        Args:
            index: of the unit.
            start: end of the work of `publish` on which it depends.
            computed: units computed so far. If K/V are buffered, one of them was the last to read the buffer.
        """
        transfer = self.units[index].transfer
        assert transfer is not None
        before = transfer - self.memory.num_buffers
        used = [computed[self.travelling[before]]] if self.buffered and before >= 0 else []

        def move() -> None:
            if transfer == 0 and self.begins_in_lane:
                self.memory.barrier(BEGIN)
            self.moves[index]()

        return self.memory.run_in_lane("pull", move, [start, *used], urgent=True)

    def all_pulled(self, number: CallNumber) -> Marker:
        """Start the barrier after every rank's last pull. No kernel waits for it: each needs only its own rank's K/V.

        The host also receives the numbers of the peers' calls.
        """
        on_host = self.words.for_host(number)

        def end() -> None:
            if on_host is not None:
                on_host.copy_(self.words.arrived, non_blocking=True)
            self.memory.barrier(PULLED)

        marker = self.memory.run_in_lane("pull", end, [], urgent=True)
        if on_host is not None:
            members = self.memory.members
            senders = [members[sender] if members else sender for sender in self.words.senders]
            call_numbers.expect(self.memory.group, marker, number, on_host, senders)
        return marker

    def by_section(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        """Return views of x, which has all query heads along `dim`: for each section those that share its K/V."""
        return x.split_with_sizes([count * self.heads_per_kv_head for count in self.heads], dim)

    def pull_order(self, rank: int) -> tuple[bool, bool, int]:
        """Return the sort key of a rank: from the next one round to this one, whose own pieces are last."""
        return rank <= self.memory.rank, rank == self.memory.rank, rank

    def _map_areas(self, k: torch.Tensor) -> None:
        """Reserve the area, map those of the owners, and view K/V and call numbers in them."""
        memory, leading, operands = self.memory, (k.shape[0], self.area_lines), self.operands
        size = math.prod(leading) * k.shape[2] * operands.elements
        memory.reserve("kv", HEADER_BYTES + size * operands.dtype.itemsize)
        owners = sorted({piece.owner for block in self.blocks for piece in block.pieces})
        parts = {owner: _number_and_kv(memory, owner, size, operands.dtype) for owner in owners}
        self._numbers = {owner: number for owner, (number, _) in parts.items()}
        own_number, own = parts[memory.rank]
        assert own_number is not None and own is not None
        self.own = own
        self.words = Words(own_number, [owner for owner in owners if owner != memory.rank], k.device)
        self._areas = {
            owner: None if area is None else split_heads(area, leading, self.heads, operands.shape)
            for owner, (_, area) in parts.items()
        }
        own_sections = self._areas[memory.rank]
        assert own_sections is not None
        self._own_sections = own_sections

    def _own_slots(self) -> list[torch.Tensor]:
        """Return the K/V of each section in this rank's area."""
        return [lines[:, self.operands.lines(0, self.blocks[0].num_rows)] for lines in self._own_sections]

    def _buffers(self, k: torch.Tensor) -> list[torch.Tensor]:
        """Return the K/V of each unit: a view of a buffer, or of the area for this rank's own keys."""
        batch, count, operands = k.shape[0], self.memory.num_buffers, self.operands
        lines = [self.blocks[unit.block].num_rows // operands.keys for unit in self.units]
        units = [(unit, number, self.heads[unit.section]) for unit, number in zip(self.units, lines, strict=True)]
        sizes = [batch * operands.elements * number * heads for _, number, heads in units]
        travelling = [sizes[index] for index in self.travelling]
        buffers = [
            buffer(f"kv.{index}", (most,), operands.dtype, k.device)
            for index, most in enumerate(buffer_heads(tuple(travelling), count))
        ]
        return [
            self._own_sections[unit.section]
            if unit.transfer is None
            else split_heads(buffers[unit.transfer % count], (batch, number), (heads,), operands.shape)[0]
            for unit, number, heads in units
        ]

    def _pulls(self, unit: Unit, slot: torch.Tensor) -> list[Incoming]:
        """List the K/V that arrive for a unit, from the next rank on: ranks must not all read from rank 0 first."""
        pulls = []
        for piece in sorted(self.blocks[unit.block].pieces, key=lambda piece: self.pull_order(piece.owner)):
            if (unit.transfer is None or not self.buffered) and piece.owner == self.memory.rank:
                continue
            area = self._areas[piece.owner]
            for sequence, rows in enumerate(slot):
                lines = self.operands.lines(self._area_row(piece), piece.size)
                source = None if area is None else area[unit.section][sequence, lines]
                pulls.append(Incoming(rows[self.operands.lines(piece.row, piece.size)], piece.owner, source))
        return pulls

    def _sends(self, unit: Unit) -> list[Outgoing]:
        """List the K/V of a unit that other ranks receive."""
        sends, block = [], self.blocks[unit.block]
        for segment, readers in zip(block.segments, block.readers, strict=True):
            first = segment.row if self.buffered else dict(readers)[self.memory.rank]
            for reader in readers:
                if reader.rank != self.memory.rank:
                    own = self._own_sections[unit.section]
                    lines = self.operands.lines(first, segment.size)
                    sends += [Outgoing(rows[lines], reader.rank) for rows in own]
        return sends

    def _add_numbers(self, block: Gathering, pulls: list[Incoming], sends: list[Outgoing]) -> None:
        """Add the call numbers, which travel with the first section of each block."""
        owners = sorted({piece.owner for piece in block.pieces} - {self.memory.rank})
        pulls += [Incoming(self.words.slot_of(owner), owner, self._numbers[owner]) for owner in owners]
        pulls.sort(key=lambda pull: self.pull_order(pull.rank))
        readers = {reader.rank for readers in block.readers for reader in readers}
        sends += [Outgoing(self.words.own, reader) for reader in sorted(readers - {self.memory.rank})]

    def _offsets(self, batch: int) -> torch.Tensor:
        """Return where each head begins in the area and the stride of its lines: (num_kv_heads, 2), in elements."""
        line = self.operands.elements
        return torch.tensor(
            [
                (batch * self.area_lines * line * first + head * line, heads * line)
                for first, heads in zip([0, *accumulate(self.heads)], self.heads, strict=False)
                for head in range(heads)
            ]
        )

    def _line_map(self, rows: int) -> torch.Tensor:
        """Return the line of the area to which each of this rank's lines is written: (lines,), int32."""
        operands = self.operands
        line_map = torch.empty(rows // operands.keys, dtype=torch.int32)
        for piece in self.blocks[0].pieces:
            if piece.owner == self.memory.rank:
                target = operands.lines(self._area_row(piece), piece.size)
                line_map[operands.lines(piece.start, piece.size)] = torch.arange(target.start, target.stop)
        return line_map

    def _records(self, batch: int) -> torch.Tensor:
        """Return the index in the area of each of this rank's records: (batch, lines, num_kv_heads)."""
        lines = torch.arange(batch, device=self.device)[:, None] * self.area_lines + self.line_map
        return (self.head_offsets[:, 0] + lines[..., None] * self.head_offsets[:, 1]) // self.operands.elements

    def _area_row(self, piece: Piece) -> int:
        """Return the first row of a piece in its owner's area."""
        return piece.start if self.buffered else piece.owner_row


def split_heads(
    area: torch.Tensor, leading: tuple[int, ...], heads: tuple[int, ...], line: tuple[int, ...]
) -> tuple[torch.Tensor, ...]:
    """Return views of consecutive pieces of an area, one for each section: (*leading, heads of the section, *line)."""
    sizes = [math.prod((*leading, count, *line)) for count in heads]
    parts = area[: sum(sizes)].split(sizes)
    return tuple(part.view(*leading, count, *line) for part, count in zip(parts, heads, strict=True))


def _number_and_kv(
    memory: GroupAreas, owner: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the number of the call and the K/V in a rank's area; None if the area cannot be mapped."""
    area = memory.view("kv", owner, (HEADER_BYTES + size * dtype.itemsize,), torch.uint8)
    return (None, None) if area is None else (word_in(area), area[HEADER_BYTES:].view(dtype))
