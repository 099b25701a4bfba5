"""Memory of an all-gather by heads in the backward: gradients of gathered K/V return to their owners."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ringflash.attention import sections
from ringflash.attention.gathered_buffers import GatheredKV, split_heads
from ringflash.attention.schedule import Gathering, Reader
from ringflash.attention.sections import Unit, buffer_heads
from ringflash.comm.transport.areas import FREE, READY, Incoming, Outgoing
from ringflash.comm.transport.buffers import buffer
from ringflash.comm.transport.lanes import Marker
from ringflash_kernels.api import collect, state_dtype


class GradientReturn:
    """Gradients of gathered K/V on their way back to the owners.

    Numerics: partial sums in fp32 (fp64 for fp64), added to the owner's block by block, in the order of the ranks.

    Args:
        gathered: K/V of the same call.
        k: (batch, seqlen_local, num_kv_heads, head_dim); only its shape, dtype and device are used.
    """

    def __init__(self, gathered: GatheredKV, k: torch.Tensor) -> None:
        blocks, heads = gathered.blocks, gathered.heads
        self.gathered, self.memory, self.dtype = gathered, gathered.memory, state_dtype(k.dtype)
        self._batch, self._rows = k.shape[:2]
        self._units = [gathered.units[index] for index in gathered.travelling]  # by transfer
        self.num_buffers = min(2, len(self._units))
        if len(blocks) == 1:
            pairs, dtype = blocks[0].pairs, gathered.operands.dtype
            self.num_buffers = sections.choose_num_gradient_buffers(
                gathered.shape, k.shape[2] * gathered.heads_per_kv_head, blocks[0].capacity, pairs, dtype, heads
            )
        batches = sections.return_batches(len(self._units), self.num_buffers)
        self.batches = {batch[-1]: batch for batch in batches}  # by their last transfer
        self._map_areas()
        readers = [
            [[reader for reader in row if reader.rank != self.memory.rank] for row in block.readers] for block in blocks
        ]
        arriving = [
            [len(row) * self._batch * segment.size for row, segment in zip(rows, block.segments, strict=True)]
            for rows, block in zip(readers, blocks, strict=True)
        ]
        self._list_transfers(k, readers, arriving)
        self.max_readers = [max(map(len, rows)) for rows in readers]
        self.sources = [
            _sources(block, self.memory.rank, counts, k.shape[1]).to(k.device)
            for block, counts in zip(blocks, arriving, strict=True)
        ]

    def _list_transfers(self, k: torch.Tensor, readers: list[list[list[Reader]]], arriving: list[list[int]]) -> None:
        """List for each unit the buffers of its gradients, and the transfers that return them.

        Args:
            readers: other ranks that gather each segment of this rank, by block.
            arriving: rows that arrive for each segment, by block.
        """
        gathered, blocks, heads = self.gathered, self.gathered.blocks, self.gathered.heads
        most = max(sum(arriving[unit.block]) * heads[unit.section] for unit in self._units)
        received = buffer("dkv.in", (most * gathered.line,), self.dtype, k.device)
        own_sums = self._own_sums(k) if len(blocks) > 1 else []
        self.sums, self.kernel_grads, self.pulls, self.sends = [], [], [], []
        for unit in gathered.units:
            own = own_sums[unit.section] if own_sums else None
            if unit.transfer is None:
                assert own is not None
                self.kernel_grads.append(own.split(gathered.widths, 3))
                continue
            block, count = blocks[unit.block], heads[unit.section]
            partial = split_heads(received, (sum(arriving[unit.block]),), (count,), (gathered.line,))[0]
            buffers = self._buffers(unit, readers[unit.block])
            mine = buffers[self.memory.rank]
            assert mine is not None
            self.sums.append((mine if own is None else own, partial))
            mine = mine[:, : block.num_rows]
            self.kernel_grads.append(mine.split(gathered.widths, 3))
            self.pulls.append(self._pulls(partial.split(arriving[unit.block]), readers[unit.block], buffers, block))
            self.sends.append(self._sends(mine, block))
        self.moves = [
            self.memory.make_transfer(pulls, sends, f"dK/dV of {gathered.name(unit)}")
            for unit, pulls, sends in zip(self._units, self.pulls, self.sends, strict=True)
        ]

    def freed(self, index: int, returns: list[Marker]) -> list[Marker]:
        """Return the markers that the kernel of a unit waits for before it overwrites its buffer.

        In a call of one block there are none, since the section has waited when it began.

        Args:
            returns: ends of the returns so far, by transfer.
        """
        transfer = self.gathered.units[index].transfer
        if len(self.gathered.blocks) == 1 or transfer is None or transfer < self.num_buffers:
            return []
        return [returns[transfer - self.num_buffers]]

    def collect(self, index: int, dk: Sequence[torch.Tensor], dv: Sequence[torch.Tensor], impl: str) -> None:
        """If a batch of returns ends with this unit, pull its gradients and sum dk and dv of its heads.

        Gradients are copied before they are added: an addition that reads a peer's memory would hold SMs for as long.

        Args:
            dk, dv: the heads of each section.
        """
        last = self.gathered.units[index].transfer
        batch = () if last is None else self.batches.get(last, ())
        if batch:
            self.memory.barrier(READY)
        for transfer in batch:
            self.moves[transfer]()
            if transfer == last and batch[0] + self.num_buffers < len(self._units):
                self.memory.barrier(FREE)  # the last buffers are free after the next call's BEGIN
            unit, (own, partial) = self._units[transfer], self.sums[transfer]
            final = unit.block == len(self.gathered.blocks) - 1
            sums = (dk[unit.section], dv[unit.section]) if final else own.split(self.gathered.widths, 3)
            collect(impl, own, partial, self.sources[unit.block], self.max_readers[unit.block], *sums)

    def _map_areas(self) -> None:
        """Reserve the gradient buffers of this rank and map those of its readers."""
        row = self._batch * self.gathered.line
        sizes = [row * self.gathered.blocks[unit.block].capacity * self._heads(unit) for unit in self._units]
        self._sizes = list(buffer_heads(tuple(sizes), self.num_buffers))
        self.memory.reserve("dkv", sum(self._sizes) * self.dtype.itemsize)
        readers = {reader.rank for block in self.gathered.blocks for row in block.readers for reader in row}
        areas = {
            rank: self.memory.view("dkv", rank, (sum(self._sizes),), self.dtype)
            for rank in {*readers, self.memory.rank}
        }
        self._areas = {rank: None if area is None else area.split(self._sizes) for rank, area in areas.items()}

    def _own_sums(self, k: torch.Tensor) -> list[torch.Tensor]:
        """Return the sums of gradients of this rank's own keys, for each section: (batch, rows, heads, line)."""
        head, heads = self._batch * self._rows * self.gathered.line, self.gathered.heads
        buffers = [
            buffer(f"dkv.sum.{index}", (head * most,), self.dtype, k.device)
            for index, most in enumerate(buffer_heads(heads))
        ]
        return [
            split_heads(buffers[section % 2], (self._batch, self._rows), (count,), (self.gathered.line,))[0]
            for section, count in enumerate(heads)
        ]

    def _heads(self, unit: Unit) -> int:
        return self.gathered.heads[unit.section]

    def _buffers(self, unit: Unit, readers: list[list[Reader]]) -> dict[int, torch.Tensor | None]:
        """Return the buffer of a unit on this rank and on each reader of its block, (batch, rows, heads, line).

        A buffer that cannot be mapped is None.
        """
        assert unit.transfer is not None
        index, leading = unit.transfer % self.num_buffers, (self._batch, self.gathered.blocks[unit.block].capacity)
        heads, line = (self._heads(unit),), (self.gathered.line,)
        areas = {reader.rank: self._areas[reader.rank] for row in readers for reader in row}
        areas[self.memory.rank] = self._areas[self.memory.rank]
        return {
            rank: None if area is None else split_heads(area[index], leading, heads, line)[0]
            for rank, area in areas.items()
        }

    def _pulls(
        self,
        received: tuple[torch.Tensor, ...],
        readers: list[list[Reader]],
        buffers: dict[int, torch.Tensor | None],
        block: Gathering,
    ) -> list[Incoming]:
        """List the gradients of this rank's rows that arrive from readers, in the order of K/V."""
        pulls, batch = [], self._batch
        for part, row, segment in zip(received, readers, block.segments, strict=True):
            targets = part.view(len(row), batch, segment.size, *part.shape[1:])
            for target, reader in zip(targets, row, strict=True):
                theirs = buffers[reader.rank]
                for sequence in range(batch):
                    source = None if theirs is None else theirs[sequence, reader.row :][: segment.size]
                    pulls.append(Incoming(target[sequence], reader.rank, source))
        return sorted(pulls, key=lambda pull: self.gathered.pull_order(pull.rank))

    def _sends(self, own: torch.Tensor, block: Gathering) -> list[Outgoing]:
        """List the gradients that other owners receive."""
        pieces = [piece for piece in block.pieces if piece.owner != self.memory.rank]
        return [
            Outgoing(sequence[piece.row : piece.row + piece.size], piece.owner) for piece in pieces for sequence in own
        ]


def _sources(gathering: Gathering, rank: int, arriving: list[int], rows: int) -> torch.Tensor:
    """Return the rows at which `ringflash_kernels.api.collect` finds the gradients of each of this rank's rows.

    Args:
        arriving: number of rows received for each segment.
    """
    sources = torch.empty(4, rows, dtype=torch.int32)
    firsts = accumulate(arriving, initial=0)
    for segment, readers, first in zip(gathering.segments, gathering.readers, firsts, strict=False):
        own = sources[:, segment.row : segment.row + segment.size]
        offsets = torch.arange(segment.size)
        own[0] = dict(readers).get(rank, segment.row) + offsets
        own[1] = first + offsets
        own[2:] = torch.tensor([[segment.size], [sum(reader.rank != rank for reader in readers)]])
    return sources
