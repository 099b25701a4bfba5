"""Memory of an all-gather by heads in the backward: gradients of gathered K/V return to their owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ringflash.attention import sections, transfers
from ringflash.attention.gathered_buffers import GatheredKV, PassSizes, split_heads
from ringflash.attention.schedule import KeyBlock
from ringflash.attention.sections import Unit, buffer_sizes
from ringflash.comm.transport.areas import FREE, READY, GroupAreas, Incoming, Outgoing
from ringflash.comm.transport.buffers import buffer
from ringflash.comm.transport.gpu_areas import Marker
from ringflash_kernels.api import collect, state_dtype


@dataclass(frozen=True)
class GradientReturn:
    """Gradients of gathered K/V on their way back to the owners.

    Numerics: partial sums in fp32 (fp64 for fp64), added to the owner's block by block, in the order of the ranks.

    Args:
        sizes: units of the backward.
        areas: memory areas of the group.
        num_buffers: buffers of gradients that kernels write and owners read, used in rotation.
        batches: transfers whose gradients return together, by the last transfer of each batch.
        kernel_grads: by unit: dK and dV, each (batch, keys of the block, heads of the section, head_dim), fp32.
        sums: by transfer: this rank's own gradients, (batch, rows, heads, line), and the received gradients, which are
            added to them, (received rows, heads, line); both fp32.
        transfers: by transfer: function that brings the gradients of this rank's keys, to be run on a stream.
        sources: by block: (4, rows), int32, rows at which `collect` finds the gradients of each of this rank's rows.
        max_readers: by block: largest number of other ranks that read one segment of this rank.
    """

    sizes: PassSizes
    areas: GroupAreas
    num_buffers: int
    batches: dict[int, tuple[int, ...]]
    kernel_grads: list[tuple[Tensor, ...]]
    sums: list[tuple[Tensor, Tensor]]
    transfers: list[Callable[[], None]]
    sources: list[Tensor]
    max_readers: list[int]

    @classmethod
    def of(cls, gathered: GatheredKV, k: Tensor) -> GradientReturn:
        """Reserve the memory of the gradients of a pass, and list their transfers.

        Args:
            gathered: K/V of the same call.
            k: (batch, seqlen_local, num_kv_heads, head_dim); only its dtype is used.
        """
        sizes, areas = gathered.sizes, gathered.areas
        rank, batch, dtype, device = areas.rank, sizes.shape.batch, state_dtype(k.dtype), gathered.device
        units = [sizes.units[index] for index in sizes.travelling]  # by transfer
        num_buffers = _num_buffers(sizes)
        mapped = _map_areas(areas, sizes, units, num_buffers, dtype)
        arriving = [transfers.arriving_rows(block, rank, batch) for block in sizes.blocks]
        received_rows = [sum(rows) for rows in arriving]
        most = max(received_rows[unit.block] * sizes.heads[unit.section] for unit in units)
        received = buffer("dkv.in", (most * sizes.line,), dtype, device)
        own_sums = _own_sums(sizes, dtype, device) if len(sizes.blocks) > 1 else []
        kernel_grads: list[tuple[Tensor, ...]] = []
        sums: list[tuple[Tensor, Tensor]] = []
        listed: list[tuple[list[Incoming], list[Outgoing], str]] = []
        for unit in sizes.units:
            if unit.transfer is None:
                kernel_grads.append(own_sums[unit.section].split(sizes.kv_format.head_dims, 3))
                continue
            count = (sizes.heads[unit.section],)
            arrived = split_heads(received, (received_rows[unit.block],), count, (sizes.line,))[0]
            buffers = _unit_buffers(sizes, unit, mapped, unit.transfer % num_buffers, rank)
            own = buffers[rank]
            assert own is not None
            sums.append((own_sums[unit.section] if own_sums else own, arrived))
            written = own[:, : sizes.blocks[unit.block].num_rows]
            kernel_grads.append(written.split(sizes.kv_format.head_dims, 3))
            pulls, sends = _incoming(sizes, unit, arrived, buffers, rank), _outgoing(sizes, unit, written, rank)
            listed.append((pulls, sends, f"dK/dV of {sizes.name(unit)}"))
        return cls(
            sizes,
            areas,
            num_buffers,
            {batch[-1]: batch for batch in sections.return_batches(len(units), num_buffers)},
            kernel_grads,
            sums,
            [areas.make_transfer(*transfer) for transfer in listed],
            [
                _sources(block, rank, rows, sizes.shape.rows).to(device)
                for block, rows in zip(sizes.blocks, arriving, strict=True)
            ],
            [max(sum(reader.rank != rank for reader in row) for row in block.readers) for block in sizes.blocks],
        )

    def freed(self, index: int, returns: list[Marker]) -> list[Marker]:
        """Return the markers that the kernel of a unit waits for before it overwrites its buffer.

        In a call of one block there are none, because `BackwardUnits.begin` of the section has already waited.

        Args:
            returns: ends of the returns so far, by transfer.
        """
        transfer = self.sizes.units[index].transfer
        if len(self.sizes.blocks) == 1 or transfer is None or transfer < self.num_buffers:
            return []
        return [returns[transfer - self.num_buffers]]

    def collect(self, index: int, dk: Sequence[Tensor], dv: Sequence[Tensor], impl: str) -> None:
        """If a batch of returns ends with this unit, pull its gradients and sum dk and dv of its heads.

        Gradients are copied before they are added, because an addition that reads a peer's memory would hold SMs for as
        long as the transfer takes.

        Args:
            dk, dv: the heads of each section.
        """
        units, travelling = self.sizes.units, self.sizes.travelling
        last = units[index].transfer
        batch = () if last is None else self.batches.get(last, ())
        if batch:
            self.areas.barrier(READY)
        for transfer in batch:
            self.transfers[transfer]()
            if transfer == last and batch[0] + self.num_buffers < len(travelling):
                self.areas.barrier(FREE)  # the last buffers are free after the next call's BEGIN
            unit, (own, arrived) = units[travelling[transfer]], self.sums[transfer]
            final = unit.block == len(self.sizes.blocks) - 1
            sums = (dk[unit.section], dv[unit.section]) if final else own.split(self.sizes.kv_format.head_dims, 3)
            collect(impl, own, arrived, self.sources[unit.block], self.max_readers[unit.block], *sums)


def _num_buffers(sizes: PassSizes) -> int:
    """Return the number of buffers of gradients."""
    if len(sizes.blocks) > 1:
        return min(2, len(sizes.travelling))
    return sections.choose_num_gradient_buffers(sizes.gather_sizes, sizes.heads)


def _map_areas(
    areas: GroupAreas, sizes: PassSizes, units: list[Unit], num_buffers: int, dtype: torch.dtype
) -> dict[int, tuple[Tensor, ...] | None]:
    """Reserve the buffers of gradients, and return views of them for this rank and for each rank that reads its keys.

    The views of a rank are None if this process cannot map its memory, as over messages.
    """
    row = sizes.shape.batch * sizes.line
    needed = tuple(row * sizes.blocks[unit.block].capacity * sizes.heads[unit.section] for unit in units)
    elements = list(buffer_sizes(needed, num_buffers))
    areas.reserve("dkv", sum(elements) * dtype.itemsize)
    readers = {reader for block in sizes.blocks for reader in transfers.reader_ranks(block, areas.rank)}
    mapped = {rank: areas.view("dkv", rank, (sum(elements),), dtype) for rank in {*readers, areas.rank}}
    return {rank: None if area is None else area.split(elements) for rank, area in mapped.items()}


def _own_sums(sizes: PassSizes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return the sums of gradients of this rank's own keys, for each section: (batch, rows, heads, line)."""
    leading, line = sizes.shape[:2], sizes.line
    buffers = [
        buffer(f"dkv.sum.{index}", (sizes.shape.batch * sizes.shape.rows * line * most,), dtype, device)
        for index, most in enumerate(buffer_sizes(sizes.heads))
    ]
    return [
        split_heads(buffers[section % 2], leading, (count,), (line,))[0] for section, count in enumerate(sizes.heads)
    ]


def _unit_buffers(
    sizes: PassSizes, unit: Unit, mapped: dict[int, tuple[Tensor, ...] | None], index: int, rank: int
) -> dict[int, Tensor | None]:
    """Return the buffer of a unit on this rank and on its readers, (batch, rows, heads, line); None if not mapped."""
    block, heads = sizes.blocks[unit.block], (sizes.heads[unit.section],)
    leading = sizes.shape.batch, block.capacity
    buffers = {peer: mapped[peer] for peer in (*transfers.reader_ranks(block, rank), rank)}
    return {
        peer: None if area is None else split_heads(area[index], leading, heads, (sizes.line,))[0]
        for peer, area in buffers.items()
    }


def _incoming(
    sizes: PassSizes, unit: Unit, arrived: Tensor, buffers: dict[int, Tensor | None], rank: int
) -> list[Incoming]:
    """List the gradients of this rank's rows that arrive from readers of a unit."""
    batch, incoming = sizes.shape.batch, []
    for peer, row, peer_row, num_rows in transfers.gradient_pulls(sizes.blocks[unit.block], rank, batch):
        of_peer = buffers[peer]
        for sequence in range(batch):
            first = row + sequence * num_rows
            source = None if of_peer is None else of_peer[sequence, peer_row : peer_row + num_rows]
            incoming.append(Incoming(arrived[first : first + num_rows], peer, source))
    return incoming


def _outgoing(sizes: PassSizes, unit: Unit, written: Tensor, rank: int) -> list[Outgoing]:
    """List the gradients of a unit that other owners receive."""
    sends = transfers.gradient_sends(sizes.blocks[unit.block], rank)
    return [Outgoing(sequence[row : row + num_rows], peer) for peer, row, num_rows in sends for sequence in written]


def _sources(block: KeyBlock, rank: int, arriving: list[int], rows: int) -> Tensor:
    """Return the rows at which `ringflash_kernels.api.collect` finds the gradients of each of this rank's rows.

    Args:
        arriving: number of rows received for each segment.
    """
    sources = torch.empty(4, rows, dtype=torch.int32)
    firsts = accumulate(arriving, initial=0)
    for segment, readers, first in zip(block.own_segments, block.readers, firsts, strict=False):
        of_segment = sources[:, segment.row : segment.row + segment.size]
        offsets = torch.arange(segment.size)
        of_segment[0] = dict(readers).get(rank, segment.row) + offsets
        of_segment[1] = first + offsets
        of_segment[2:] = torch.tensor([[segment.size], [sum(reader.rank != rank for reader in readers)]])
    return sources
