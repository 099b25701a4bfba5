"""All-to-all of heads inside a host: from all heads of a rank's rows to a share of the heads of the host's rows.

    to the host    own rows, all heads            -> area "heads" -> copies -> rows of the host, a share of the heads
    to the ranks   rows of the host, a share ...  -> area "rows"  -> copies -> own rows, all heads

A rank writes its tensors to an area, joins a barrier, and copies from the areas of the others what it needs. One area
is for each direction, so a call needs no other barrier: a rank that joins the barrier of one direction has ended its
copies of the other one, and may overwrite its area of that after the barrier. Over messages the areas are local, and
messages order the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.attention.gathered_buffers import BEGIN
from ringflash.attention.sections import HEADER_BYTES
from ringflash.comm import call_numbers
from ringflash.comm.call_numbers import CallNumber, Words
from ringflash.comm.transport import PeerMemory, Transport, buffer
from ringflash.comm.transport.lanes import Token
from ringflash.comm.transport.peer_memory import Incoming, Outgoing
from ringflash.comm.wait_timer import waiting
from ringflash.comm.watchdog import CallInFlight, Unwatched, watching
from ringflash.sequence.layout import chunks_of_rank


class Part(NamedTuple):
    """Shape of what one rank of a host sends another of one tensor; `rows` are the rows of a rank."""

    batch: int
    rows: int
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes, rounded up so that the next part is aligned."""
        size = self.batch * self.rows * self.heads * self.width * self.dtype.itemsize
        return -(-size // HEADER_BYTES) * HEADER_BYTES


def area_bytes(size: int, parts: Sequence[Part]) -> int:
    """Return the bytes of an area that holds these parts for each of `size` ranks."""
    return HEADER_BYTES + size * sum(part.num_bytes for part in parts)


class HeadExchange:
    """Both directions of one pass of a call.

    Args:
        memory: areas of the ranks of the host.
        members: these ranks in the group.
        channel: transport with whose calls the watchdog sees this one.
        layout: layout of the rows.
        way: "forward" or "backward".
        call: number of the call; it travels with the first tensors.
    """

    def __init__(
        self, memory: PeerMemory, members: tuple[int, ...], channel: Transport, layout: str, way: str, call: CallNumber
    ) -> None:
        self.memory, self.members, self.channel, self.way, self.call = memory, members, channel, way, call
        self.num_chunks = chunks_of_rank(layout)

    def to_host(self, first: Sequence[Tensor], rest: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Token]:
        """Exchange tensors for the host's rows of this rank's share of the heads.

        Args:
            first, rest: (batch, rows, all heads, any), each.
        Returns:
            first, rest: (batch, rows of the host, heads / ranks, any), each, contiguous; rows by position. They are
                valid until the next exchange.
            arrived: what readers of `rest` must wait for.
        """
        size, memory, device = len(self.members), self.memory, first[0].device
        parts = [Part(x.shape[0], x.shape[1], x.shape[2] // size, x.shape[3], x.dtype) for x in (*first, *rest)]
        passage = self._passage("heads", parts, len(first), device)
        passage.words.write(self.call)
        passage.fill(*first, *rest)
        with watching(self.channel, self.way, device) as watched, waiting(device):
            self._move(passage, watched)
            arrived = memory.run_in_lane("pull", passage.moves[1], [], urgent=True)
            on_host = passage.words.for_host(self.call)
            if on_host is not None:
                on_host.copy_(passage.words.arrived, non_blocking=True)
                senders = [self.members[sender] for sender in passage.words.senders]
                call_numbers.expect(memory.group, memory.mark(), self.call, on_host, senders)
        tensors = passage.arrived()
        return tensors[: len(first)], tensors[len(first) :], arrived

    def to_ranks(self, *tensors: Tensor) -> list[Tensor]:
        """Return this rank's rows of all heads, new and contiguous: the inverse of `to_host`."""
        size, device = len(self.members), tensors[0].device
        parts = [Part(x.shape[0], x.shape[1] // size, x.shape[2], x.shape[3], x.dtype) for x in tensors]
        passage = self._passage("rows", parts, len(parts), device)
        passage.fill(*tensors)
        with watching(self.channel, self.way, device) as watched, waiting(device):
            self._move(passage, watched)
        return passage.arrived()

    def _move(self, passage: Passage, watched: CallInFlight | Unwatched) -> None:
        """Run the barrier and the first transfer in a lane, since batches of copies need one, and wait for them."""

        def move() -> None:
            self.memory.barrier(BEGIN)
            passage.moves[0]()

        moved = self.memory.run_in_lane("pull", move, [self.memory.mark()], urgent=True)
        watched.reach(moved, "for {} of the ranks {} of its host", passage.area, self.members)
        self.memory.wait(moved)

    def _passage(self, area: str, parts: list[Part], num_first: int, device: torch.device) -> Passage:
        arguments = len(self.members), area, self.num_chunks, tuple(parts), num_first, device
        return self.memory.keep(arguments, (area,), lambda: Passage(self.memory, *arguments))


class Passage:
    """Tensors that the ranks of a host exchange together in one direction, and their copies, listed once.

    In an area "heads", and when they arrive from areas "rows", tensors are *by rank*: (ranks, batch, chunks, rows,
    heads, width). In an area "rows", and when they arrive from areas "heads", they are *by position*: (batch, chunks,
    ranks, rows, heads, width). The chunks of a host's ranks are contiguous runs, and in every second run they descend
    with the rank.

    Args:
        memory: areas of the ranks of the host.
        size: number of these ranks.
        area: "heads" or "rows".
        num_chunks: chunks of a rank.
        parts: what a rank sends another of each tensor.
        num_first: number of tensors that travel with the first of two transfers.
    """

    def __init__(
        self, memory: PeerMemory, size: int, area: str, num_chunks: int, parts: tuple[Part, ...], num_first: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.size, self.num_chunks, self.parts = size, num_chunks, parts
        self.area, self.to_host = area, area == "heads"
        rank, num_bytes = memory.rank, area_bytes(size, parts)
        memory.reserve(area, num_bytes)
        areas = {peer: memory.view(area, peer, (num_bytes,), torch.uint8) for peer in range(size)}
        own = areas[rank]
        assert own is not None
        self.received = self._tensors(buffer("heads", (num_bytes,), torch.uint8, device), not self.to_host)
        self.own = self._tensors(own, self.to_host)
        self.words = Words(own[:8].view(torch.int64), [peer for peer in areas if peer != rank], device)
        peers = [*range(rank + 1, size), *range(rank), rank]  # from the next rank on; own copies need SMs, so last
        pulls: tuple[list[Incoming], list[Incoming]] = [], []
        sends: tuple[list[Outgoing], list[Outgoing]] = [], []
        for peer in peers:
            theirs = areas[peer]
            sources = None if theirs is None else self._tensors(theirs, self.to_host)
            for place, target in enumerate(self.received):
                later, targets = place >= num_first, self._pieces(target, peer, not self.to_host)
                mine: Sequence[Tensor | None] = [None] * len(targets)
                if sources is not None:
                    mine = self._pieces(sources[place], rank, self.to_host)
                pulls[later].extend(Incoming(x, peer, source) for x, source in zip(targets, mine, strict=True))
                if peer != rank:
                    pieces = self._pieces(self.own[place], peer, self.to_host)
                    sends[later].extend(Outgoing(x, peer) for x in pieces)
            if peer != rank and self.to_host:
                number = None if theirs is None else theirs[:8].view(torch.int64)
                pulls[0].append(Incoming(self.words.slot_of(peer), peer, number))
                sends[0].append(Outgoing(self.words.own, peer))
        self.moves = [memory.make_transfer(*both, f"exchanged {area}") for both in zip(pulls, sends, strict=True)]

    def fill(self, *tensors: Tensor) -> None:
        """Write this rank's tensors to its area."""
        for own, x in zip(self.own, tensors, strict=True):
            if self.to_host:
                own.copy_(x.unflatten(2, (self.size, -1)).unflatten(1, (self.num_chunks, -1)).movedim(3, 0))
            else:
                own.copy_(x.unflatten(1, own.shape[1:4]))

    def arrived(self) -> list[Tensor]:
        """Return what has arrived, as (batch, rows, heads, width): views of a buffer by position, else new tensors."""
        if self.to_host:
            return [x.flatten(1, 3) for x in self.received]
        return [x.movedim(0, 3).flatten(3, 4).flatten(1, 2).contiguous() for x in self.received]

    def _tensors(self, area: Tensor, by_rank: bool) -> list[Tensor]:
        """Views of an area, one of each part."""
        starts = accumulate((self.size * part.num_bytes for part in self.parts), initial=HEADER_BYTES)
        views = []
        for start, part in zip(starts, self.parts, strict=False):
            places = (self.size, part.batch, self.num_chunks)
            shape = (*(places if by_rank else (*places[1:], self.size)), part.rows // self.num_chunks, *part[2:4])
            flat = area[start : start + math.prod(shape) * part.dtype.itemsize].view(part.dtype)
            views.append(flat.view(shape))
        return views

    def _pieces(self, x: Tensor, rank: int, by_rank: bool) -> list[Tensor]:
        """Contiguous parts of one rank, by sequence of the batch and chunk."""
        if by_rank:
            return [chunk for sequence in x[rank] for chunk in sequence]
        last = self.size - 1
        return [chunk[last - rank if index % 2 else rank] for sequence in x for index, chunk in enumerate(sequence)]
