"""All-to-all of heads inside a host: from all heads of a rank's rows to a share of the heads of the host's rows.

    to the host    own rows, all heads            -> area "heads" -> copies -> rows of the host, a share of the heads
    to the ranks   rows of the host, a share ...  -> area "rows"  -> copies -> own rows, all heads

`ulysses.py` calls it around attention between hosts. A rank writes its tensors to an area, joins a barrier, and copies
what it needs from the areas of the others. Each direction has its own area, so one barrier per direction is enough: a
rank that joins it has finished its copies of the other direction, whose area may then be overwritten. Over messages
the areas are local, and the messages order the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ringflash.comm.call_numbers import HEADER_BYTES, CallNumber, CallWords, call_word_of
from ringflash.comm.transport import GroupAreas, Transport, buffer
from ringflash.comm.transport.areas import BEGIN, Incoming, Outgoing
from ringflash.comm.transport.gpu_areas import Marker
from ringflash.comm.wait_timer import waiting
from ringflash.comm.watchdog import CallInFlight, Unwatched, watching
from ringflash.sequence.layout import chunks_of_rank


class Share(NamedTuple):
    """Shape of the share of one tensor that a rank sends to another rank of its host; `rows` are the rows of a rank."""

    batch: int
    rows: int
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes, rounded up so that the next share is aligned."""
        size = self.batch * self.rows * self.heads * self.width * self.dtype.itemsize
        return -(-size // HEADER_BYTES) * HEADER_BYTES


def area_bytes(size: int, shares: Sequence[Share]) -> int:
    """Return the bytes of an area that holds these shares for each of `size` ranks."""
    return HEADER_BYTES + size * sum(share.num_bytes for share in shares)


class HeadExchange:
    """All-to-alls of heads in one pass of a call: of its inputs to the host, and of its results to the ranks.

    Args:
        areas: memory areas of the ranks of the host.
        members: ranks of the host, as ranks in the group.
        transport: transport under which the watchdog counts this call.
        layout: layout of the rows.
        pass_name: "forward" or "backward".
        number: number of the call; it travels with the first tensors.
    """

    def __init__(
        self, areas: GroupAreas, members: tuple[int, ...], transport: Transport, layout: str, pass_name: str,
        number: CallNumber,
    ) -> None:  # fmt: skip
        self.areas, self.members, self.transport = areas, members, transport
        self.pass_name, self.number = pass_name, number
        self.num_chunks = chunks_of_rank(layout)

    def to_host(self, first: Sequence[Tensor], rest: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Marker]:
        """Exchange tensors for the host's rows of this rank's share of the heads.

        Args:
            first, rest: (batch, rows, all heads, any) each; the current stream waits only for `first`.
        Returns:
            first, rest: (batch, rows of the host, heads / ranks, any) each, contiguous, rows ordered by position. They
                are overwritten by the next exchange.
            arrived: marker that readers of `rest` must wait for.
        """
        size, areas, device = len(self.members), self.areas, first[0].device
        shares = [Share(x.shape[0], x.shape[1], x.shape[2] // size, x.shape[3], x.dtype) for x in (*first, *rest)]
        all_to_all = self._all_to_all("heads", shares, len(first), device)
        words = all_to_all.words
        words.write(self.number)
        all_to_all.fill(*first, *rest)
        with watching(self.transport, self.pass_name, device) as watched, waiting(device):
            self._move(all_to_all, watched)
            arrived = areas.run_on_stream("pull", all_to_all.transfers[1], [], urgent=True)
            on_host = words.for_host(self.number)
            if on_host is not None:
                words.send_to_host(on_host)
                words.compare_later(areas.group, self.members, self.number, areas.mark(), on_host)
        tensors = all_to_all.received_tensors()
        return tensors[: len(first)], tensors[len(first) :], arrived

    def to_ranks(self, *tensors: Tensor) -> list[Tensor]:
        """Return this rank's rows of all heads, new and contiguous: the inverse of `to_host`."""
        size, device = len(self.members), tensors[0].device
        shares = [Share(x.shape[0], x.shape[1] // size, x.shape[2], x.shape[3], x.dtype) for x in tensors]
        all_to_all = self._all_to_all("rows", shares, len(shares), device)
        all_to_all.fill(*tensors)
        with watching(self.transport, self.pass_name, device) as watched, waiting(device):
            self._move(all_to_all, watched)
        return all_to_all.received_tensors()

    def _move(self, all_to_all: AllToAll, watched: CallInFlight | Unwatched) -> None:
        """Run the barrier and the first transfer on another stream, as batched copies need, and wait for them."""

        def move() -> None:
            self.areas.barrier(BEGIN)
            all_to_all.transfers[0]()

        moved = self.areas.run_on_stream("pull", move, [self.areas.mark()], urgent=True)
        watched.reach(moved, "for {} of the ranks {} of its host", all_to_all.area, self.members)
        self.areas.wait(moved)

    def _all_to_all(self, area: str, shares: list[Share], num_first: int, device: torch.device) -> AllToAll:
        arguments = len(self.members), area, self.num_chunks, tuple(shares), num_first, device
        return self.areas.cached(arguments, (area,), lambda: AllToAll(self.areas, *arguments))


class AllToAll:
    """One all-to-all between the ranks of a host, whose copies are listed once and repeated for later calls.

    Tensors are stored *by rank*, (ranks, batch, chunks, rows, heads, width), in an area "heads", and after they arrive
    from areas "rows". They are stored *by position*, (batch, chunks, ranks, rows, heads, width), in an area "rows", and
    after they arrive from areas "heads". The chunks of a host's ranks are contiguous runs; in every second run they
    are in descending order of ranks.

    Args:
        areas: memory areas of the ranks of the host.
        size: number of ranks of the host.
        area: "heads" or "rows".
        num_chunks: chunks of a rank.
        shares: share of each tensor.
        num_first: number of tensors that travel with the first of two transfers.
    """

    def __init__(
        self, areas: GroupAreas, size: int, area: str, num_chunks: int, shares: tuple[Share, ...], num_first: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.size, self.num_chunks, self.shares = size, num_chunks, shares
        self.area, self.to_host = area, area == "heads"
        num_bytes = area_bytes(size, shares)
        areas.reserve(area, num_bytes)
        mapped = {peer: areas.view(area, peer, (num_bytes,), torch.uint8) for peer in range(size)}
        own = mapped[areas.rank]
        assert own is not None
        self.received = self._tensors(buffer("heads", (num_bytes,), torch.uint8, device), not self.to_host)
        self.own = self._tensors(own, self.to_host)
        self.words = CallWords(call_word_of(own), [peer for peer in mapped if peer != areas.rank], device)
        self.transfers = self._list_transfers(areas, mapped, num_first)

    def _list_transfers(
        self, areas: GroupAreas, mapped: dict[int, Tensor | None], num_first: int
    ) -> list[Callable[[], None]]:
        """List the two transfers: the first tensors with the call numbers, then the other tensors."""
        rank, size = areas.rank, self.size
        peers = [*range(rank + 1, size), *range(rank), rank]  # from the next rank on; own copies need SMs, so last
        pulls: tuple[list[Incoming], list[Incoming]] = [], []
        sends: tuple[list[Outgoing], list[Outgoing]] = [], []
        for peer in peers:
            theirs = mapped[peer]
            sources = None if theirs is None else self._tensors(theirs, self.to_host)
            for index, target in enumerate(self.received):
                later, targets = index >= num_first, self._chunks_of(target, peer, not self.to_host)
                mine: Sequence[Tensor | None] = [None] * len(targets)
                if sources is not None:
                    mine = self._chunks_of(sources[index], rank, self.to_host)
                pulls[later].extend(Incoming(x, peer, source) for x, source in zip(targets, mine, strict=True))
                if peer != rank:
                    chunks = self._chunks_of(self.own[index], peer, self.to_host)
                    sends[later].extend(Outgoing(x, peer) for x in chunks)
            if peer != rank and self.to_host:
                number = None if theirs is None else call_word_of(theirs)
                pulls[0].append(Incoming(self.words.arrival_of(peer), peer, number))
                sends[0].append(Outgoing(self.words.own, peer))
        return [areas.make_transfer(*both, f"exchanged {self.area}") for both in zip(pulls, sends, strict=True)]

    def fill(self, *tensors: Tensor) -> None:
        """Write this rank's tensors to its area."""
        for own, x in zip(self.own, tensors, strict=True):
            if self.to_host:
                own.copy_(x.unflatten(2, (self.size, -1)).unflatten(1, (self.num_chunks, -1)).movedim(3, 0))
            else:
                own.copy_(x.unflatten(1, own.shape[1:4]))

    def received_tensors(self) -> list[Tensor]:
        """Return the received tensors, (batch, rows, heads, width): views of a buffer if by position, else new ones."""
        if self.to_host:
            return [x.flatten(1, 3) for x in self.received]
        rows = (x.movedim(0, 3).clone(memory_format=torch.contiguous_format) for x in self.received)
        return [x.flatten(3, 4).flatten(1, 2) for x in rows]

    def _tensors(self, area: Tensor, by_rank: bool) -> list[Tensor]:
        """Return a view of an area for each tensor."""
        starts = accumulate((self.size * share.num_bytes for share in self.shares), initial=HEADER_BYTES)
        views = []
        for start, share in zip(starts, self.shares, strict=False):
            batch, size, num_chunks = share.batch, self.size, self.num_chunks
            leading = (size, batch, num_chunks) if by_rank else (batch, num_chunks, size)
            shape = (*leading, share.rows // self.num_chunks, *share[2:4])
            flat = area[start : start + math.prod(shape) * share.dtype.itemsize].view(share.dtype)
            views.append(flat.view(shape))
        return views

    def _chunks_of(self, x: Tensor, rank: int, by_rank: bool) -> list[Tensor]:
        """Return the chunks of one rank, ordered by sequence of the batch and by chunk."""
        if by_rank:
            return [chunk for sequence in x[rank] for chunk in sequence]
        last = self.size - 1
        return [chunk[last - rank if index % 2 else rank] for sequence in x for index, chunk in enumerate(sequence)]
