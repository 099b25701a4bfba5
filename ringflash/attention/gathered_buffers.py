"""Memory of an all-gather by heads: gathered K/V on every rank, and the gradients that return to their owners.

`GatheredKV` and `GradientReturn` list every copy or message of a call once. Later calls with the same mask and shape
only replay these lists.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from ringflash.attention import sections
from ringflash.attention.schedule import Gathering, Piece, Reader
from ringflash.attention.sections import HEADER_BYTES, buffer_heads
from ringflash.comm import call_numbers
from ringflash.comm.call_numbers import CallNumber, Words
from ringflash.comm.transport.buffers import buffer
from ringflash.comm.transport.lanes import Token
from ringflash.comm.transport.peer_memory import Incoming, Outgoing, PeerMemory
from ringflash_kernels.api import collect, publish, state_dtype

BEGIN, PULLED, READY, FREE = range(4)  # channels of barriers


class GatheredKV:
    """K/V of all sections as this rank's kernels read them, and their transfers.

    If the K/V of all heads fit (`sections.fits_unbuffered`), they are gathered into the same area from which other
    ranks pull, so that the rank's own K/V are in place already. (A copy within one GPU needs SMs, which a running
    kernel does not give up before it ends.) Otherwise the area holds the rank's own K/V only, and sections are gathered
    into `memory.turns` buffers, which they use in rotation.

    Args:
        memory: areas of the group; every rank makes the same calls with tensors of the same shapes.
        gathering: keys that this rank needs.
        k: (batch, seqlen_local, num_kv_heads, head_dim); only its shape, dtype and device are used.
        num_heads: heads of q.
        heads: KV heads of each section.
        value_dim: head_dim of v; default that of k.
    """

    def __init__(
        self,
        memory: PeerMemory,
        gathering: Gathering,
        k: torch.Tensor,
        num_heads: int,
        heads: tuple[int, ...],
        value_dim: int | None = None,
    ) -> None:
        self.memory, self.gathering, self.device, self.heads = memory, gathering, k.device, heads
        batch, rows, num_kv_heads, head_dim = k.shape
        self.widths = head_dim, value_dim or head_dim
        self.line = sum(self.widths)  # K and V of a head, side by side
        self.shape = batch, rows, num_kv_heads, self.line // 2
        self.num_sections, self.group = len(heads), num_heads // num_kv_heads
        self.first_heads = [0, *accumulate(heads)]
        self.buffered = not sections.fits_unbuffered(self.shape, gathering.capacity, k.dtype)
        self.area_rows = rows if self.buffered else gathering.capacity
        self._map_areas(k)
        self.slots = self._buffers(k) if self.buffered else [x[:, : gathering.num_rows] for x in self._own_sections]
        self.pulls = [self._pulls(section, batch) for section in range(self.num_sections)]
        self.sends = [self._sends(section) for section in self._own_sections]
        self._add_numbers(self.pulls[0], self.sends[0])
        self.moves = [
            memory.moving(pulls, sends, f"K/V of section {section}")
            for section, (pulls, sends) in enumerate(zip(self.pulls, self.sends, strict=True))
        ]
        self.head_offsets, self.row_map = self._offsets(batch).to(k.device), self._row_map(rows).to(k.device)

    def publish(self, k: torch.Tensor, v: torch.Tensor, impl: str, call: CallNumber) -> None:
        """Write this rank's K and V, and the number of its call, to the area that other ranks pull from."""
        self.words.write(call)
        publish(impl, k, v, self.own, self.head_offsets, self.row_map, self.area_rows)
        self.memory.barrier(BEGIN)

    def pull(self, section: int, start: Token, computed: list[Token]) -> Token:
        """Start to pull the K/V of a section.

        Args:
            start: beginning of the call.
            computed: sections computed so far. If sections are buffered, one of them was the last to read the buffer.
        """
        last = section - self.memory.turns
        used = computed[last : last + 1] if self.buffered and last >= 0 else []
        return self.memory.beside("pull", self.moves[section], [start, *used], urgent=True)

    def all_pulled(self, call: CallNumber) -> Token:
        """Start the barrier after every rank's last pull. No kernel waits for it: each needs only its own rank's K/V.

        The host also receives the numbers of the peers' calls.
        """
        on_host = self.words.for_host(call)

        def end() -> None:
            if on_host is not None:
                on_host.copy_(self.words.arrived, non_blocking=True)
            self.memory.barrier(PULLED)

        token = self.memory.beside("pull", end, [], urgent=True)
        if on_host is not None:
            call_numbers.expect(self.memory.group, token, call, on_host, self.words.senders)
        return token

    def keys_values(self, section: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a section: (batch, rows gathered, heads of the section, head_dim)."""
        keys, values = self.slots[section].split(self.widths, 3)
        return keys, values

    def query_heads(self, section: int) -> slice:
        """The query heads that share the K/V of a section."""
        return slice(self.first_heads[section] * self.group, self.first_heads[section + 1] * self.group)

    def _map_areas(self, k: torch.Tensor) -> None:
        """Reserve the area and map it on every rank: `_areas`, `_numbers` and `words`."""
        memory, places = self.memory, (k.shape[0], self.area_rows)
        size = math.prod(places) * k.shape[2] * self.line
        memory.reserve("kv", HEADER_BYTES + size * k.itemsize)
        owners = sorted({piece.owner for piece in self.gathering.pieces})
        parts = {owner: _number_and_kv(memory, owner, size, k.dtype) for owner in owners}
        self._numbers = {owner: number for owner, (number, _) in parts.items()}
        own_number, own = parts[memory.rank]
        assert own_number is not None and own is not None
        self.own = own
        self.words = Words(own_number, [owner for owner in owners if owner != memory.rank], k.device)
        self._areas = {
            owner: None if area is None else split_heads(area, places, self.heads, self.line)
            for owner, (_, area) in parts.items()
        }
        own_sections = self._areas[memory.rank]
        assert own_sections is not None
        self._own_sections = own_sections

    def _buffers(self, k: torch.Tensor) -> list[torch.Tensor]:
        """A view of each section's buffer."""
        places, count = (k.shape[0], self.gathering.num_rows), self.memory.turns
        buffers = [
            buffer(f"kv.{index}", (math.prod(places) * most * self.line,), k.dtype, k.device)
            for index, most in enumerate(buffer_heads(self.heads, count))
        ]
        return [
            split_heads(buffers[section % count], places, (heads,), self.line)[0]
            for section, heads in enumerate(self.heads)
        ]

    def _pulls(self, section: int, batch: int) -> list[Incoming]:
        """K/V that arrive for a section, in pull order."""
        pulls, slot = [], self.slots[section]
        for piece in self._in_pull_order():
            if not self.buffered and piece.owner == self.memory.rank:
                continue
            area = self._areas[piece.owner]
            for sequence in range(batch):
                source = None if area is None else area[section][sequence, _rows(self._area_row(piece), piece)]
                pulls.append(Incoming(slot[sequence, _rows(piece.row, piece)], piece.owner, source))
        return pulls

    def _sends(self, section: torch.Tensor) -> list[Outgoing]:
        """K/V of a section that other ranks receive."""
        sends = []
        for segment, readers in zip(self.gathering.segments, self.gathering.readers, strict=True):
            first = segment.row if self.buffered else dict(readers)[self.memory.rank]
            for reader in readers:
                if reader.rank != self.memory.rank:
                    sends += [Outgoing(rows[first : first + segment.size], reader.rank) for rows in section]
        return sends

    def _add_numbers(self, pulls: list[Incoming], sends: list[Outgoing]) -> None:
        """Let the numbers of the ranks' calls travel with the first section."""
        pulls += [Incoming(self.words.of(owner), owner, self._numbers[owner]) for owner in self.words.senders]
        pulls.sort(key=lambda pull: self._distance(pull.rank))
        readers = {reader.rank for readers in self.gathering.readers for reader in readers}
        sends += [Outgoing(self.words.own, reader) for reader in sorted(readers - {self.memory.rank})]

    def _offsets(self, batch: int) -> torch.Tensor:
        """Offset of each head in the area, and the distance of its rows: (num_kv_heads, 2), in elements."""
        return torch.tensor(
            [
                (self.line * (batch * self.area_rows * first + head), heads * self.line)
                for first, heads in zip(self.first_heads, self.heads, strict=False)
                for head in range(heads)
            ]
        )

    def _row_map(self, rows: int) -> torch.Tensor:
        """Row of the area that each of this rank's rows is written to."""
        row_map = torch.empty(rows, dtype=torch.int32)
        for piece in self.gathering.pieces:
            if piece.owner == self.memory.rank:
                row_map[_rows(piece.start, piece)] = torch.arange(piece.size, dtype=torch.int32) + self._area_row(piece)
        return row_map

    def _area_row(self, piece: Piece) -> int:
        """First row of a piece in its owner's area."""
        return piece.start if self.buffered else piece.there

    def _in_pull_order(self) -> list[Piece]:
        """Pieces from the next rank on, so that ranks do not all read from rank 0 first. Local pieces are last."""
        return sorted(self.gathering.pieces, key=lambda piece: self._distance(piece.owner))

    def _distance(self, owner: int) -> tuple[bool, bool, int]:
        """Sort key of owners, from the next rank round to this one."""
        return owner <= self.memory.rank, owner == self.memory.rank, owner


class GradientReturn:
    """Gradients of gathered K/V on their way back to the owners.

    Numerics: partial sums in fp32 (fp64 for fp64), added to the owner's in the order of the ranks.

    Args:
        gathered: K/V of the same call.
        k: (batch, seqlen_local, num_kv_heads, head_dim); only its shape, dtype and device are used.
    """

    def __init__(self, gathered: GatheredKV, k: torch.Tensor) -> None:
        gathering, heads = gathered.gathering, gathered.heads
        self.gathered, self.memory = gathered, gathered.memory
        num_heads, self.dtype = k.shape[2] * gathered.group, state_dtype(k.dtype)
        self.num_buffers = sections.choose_num_gradient_buffers(
            gathered.shape, num_heads, gathering.capacity, gathering.pairs, k.dtype, heads
        )
        batches = sections.return_batches(gathered.num_sections, self.num_buffers)
        self.batches = {batch[-1]: batch for batch in batches}  # by the section after which they return
        self._map_areas(k)
        readers = [[reader for reader in row if reader.rank != self.memory.rank] for row in gathering.readers]
        lines = [len(row) * k.shape[0] * segment.size for row, segment in zip(readers, gathering.segments, strict=True)]
        received = buffer("dkv.in", (sum(lines) * max(heads) * gathered.line,), self.dtype, k.device)
        self.sums, self.stages, self.pulls, self.sends = [], [], [], []
        for section, count in enumerate(heads):
            partial = split_heads(received, (sum(lines),), (count,), gathered.line)[0]
            stages = self._stages(section)
            own = stages[self.memory.rank]
            assert own is not None
            self.sums.append((own, partial))
            own = own[:, : gathering.num_rows]
            self.stages.append(own.split(gathered.widths, 3))
            self.pulls.append(self._pulls(partial.split(lines), readers, stages))
            self.sends.append(self._sends(own))
        self.moves = [
            self.memory.moving(pulls, sends, f"dK/dV of section {section}")
            for section, (pulls, sends) in enumerate(zip(self.pulls, self.sends, strict=True))
        ]
        self.max_readers = max(map(len, readers))
        self.sources = _sources(gathering, self.memory.rank, lines, k.shape[1]).to(k.device)

    def collect(self, section: int, dk: torch.Tensor, dv: torch.Tensor, impl: str) -> None:
        """Return the gradients of the batch that ends with this section, if one does, and sum dk and dv of its heads.

        Gradients are copied before they are added: an addition that reads a peer's memory would occupy SMs as long.
        """
        batch = self.batches.get(section, ())
        if batch:
            self.memory.barrier(READY)
        for each in batch:
            self.moves[each]()
            if each == section and batch[0] + self.num_buffers < self.gathered.num_sections:
                self.memory.barrier(FREE)  # the last buffers are free after the next call's BEGIN
            heads = slice(*self.gathered.first_heads[each : each + 2])
            collect(impl, *self.sums[each], self.sources, self.max_readers, dk[:, :, heads], dv[:, :, heads])

    def _map_areas(self, k: torch.Tensor) -> None:
        """Reserve the gradient buffers of this rank and map those of its readers."""
        self._places = (k.shape[0], self.gathered.gathering.capacity)
        most = buffer_heads(self.gathered.heads, self.num_buffers)
        self._sizes = [math.prod(self._places) * heads * self.gathered.line for heads in most]
        self.memory.reserve("dkv", sum(self._sizes) * self.dtype.itemsize)
        self._areas = {
            rank: self.memory.view("dkv", rank, (sum(self._sizes),), self.dtype)
            for rank in {reader.rank for readers in self.gathered.gathering.readers for reader in readers}
        }

    def _stages(self, section: int) -> dict[int, torch.Tensor | None]:
        """The buffer of a section on each reader: (batch, rows, heads, line); None if out of reach."""
        index, heads = section % self.num_buffers, (self.gathered.heads[section],)
        return {
            rank: None
            if area is None
            else split_heads(area.split(self._sizes)[index], self._places, heads, self.gathered.line)[0]
            for rank, area in self._areas.items()
        }

    def _pulls(
        self,
        received: tuple[torch.Tensor, ...],
        readers: list[list[Reader]],
        stages: dict[int, torch.Tensor | None],
    ) -> list[Incoming]:
        """Gradients of this rank's rows that arrive from readers, in the same order as K/V."""
        pulls, rank, batch = [], self.memory.rank, self._places[0]
        for part, row, segment in zip(received, readers, self.gathered.gathering.segments, strict=True):
            targets = part.view(len(row), batch, segment.size, *part.shape[1:])
            for target, reader in zip(targets, row, strict=True):
                stage = stages[reader.rank]
                for sequence in range(batch):
                    source = None if stage is None else stage[sequence, reader.row :][: segment.size]
                    pulls.append(Incoming(target[sequence], reader.rank, source))
        return sorted(pulls, key=lambda pull: (pull.rank <= rank, pull.rank))

    def _sends(self, own: torch.Tensor) -> list[Outgoing]:
        """Gradients that other owners receive."""
        pieces = [piece for piece in self.gathered.gathering.pieces if piece.owner != self.memory.rank]
        return [Outgoing(sequence[_rows(piece.row, piece)], piece.owner) for piece in pieces for sequence in own]


def split_heads(
    area: torch.Tensor, places: tuple[int, ...], heads: tuple[int, ...], line: int
) -> tuple[torch.Tensor, ...]:
    """Views of consecutive parts of an area, one for each section: (*places, heads of the section, line)."""
    sizes = [math.prod(places) * count * line for count in heads]
    parts = area[: sum(sizes)].split(sizes)
    return tuple(part.view(*places, count, line) for part, count in zip(parts, heads, strict=True))


def _sources(gathering: Gathering, rank: int, lines: list[int], rows: int) -> torch.Tensor:
    """Rows at which the gradients of each of this rank's rows are found, as `ringflash_kernels.api.collect` takes them.

    Args:
        lines: rows received for each segment, one segment after another.
    """
    sources = torch.empty(4, rows, dtype=torch.int32)
    firsts = accumulate(lines, initial=0)
    for segment, readers, first in zip(gathering.segments, gathering.readers, firsts, strict=False):
        own = sources[:, segment.row : segment.row + segment.size]
        places = torch.arange(segment.size)
        own[0] = dict(readers)[rank] + places
        own[1] = first + places
        own[2:] = torch.tensor([[segment.size], [len(readers) - 1]])
    return sources


def _number_and_kv(
    memory: PeerMemory, owner: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The number of the call and the K/V in a rank's area; None if the area is out of reach."""
    area = memory.view("kv", owner, (HEADER_BYTES + size * dtype.itemsize,), torch.uint8)
    return (None, None) if area is None else (area[:8].view(torch.int64), area[HEADER_BYTES:].view(dtype))


def _rows(first: int, piece: Piece) -> slice:
    return slice(first, first + piece.size)
