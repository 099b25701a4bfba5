"""All-to-all of heads inside a host (Ulysses), around attention between hosts.

    rank                   its own rows, all heads               q, k, v
    all-to-all in a host   the rows of the host, a share of the heads
    ring over a rail       attention over the keys of all hosts  (existing algorithms; none for one host)
    all-to-all in a host   its own rows, all heads               out, lse

A *rail* is the ranks that have the same place on their hosts. K/V and gradients cross between hosts on one rail each,
so that every key enters a host once. Layouts nest: the rows of a host's ranks, chunk by chunk, are the shard of that
host in the same layout over hosts. If there are fewer KV heads than GPUs, each GPU gets the KV heads that its query
heads need, and gradients of a shared head are summed. Source of the idea: Jacobs et al. 2023, arXiv:2309.14509, and
its combination with a ring, Fang and Zhao 2024, arXiv:2405.07719; docs/decisions/0013-by-host.md says what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ringflash.attention.inputs import evened
from ringflash.comm.call_numbers import CallNumber, Words
from ringflash.comm.transport import Message, PointToPoint
from ringflash.comm.wait_timer import waiting
from ringflash.comm.watchdog import watching
from ringflash.sequence.layout import chunks_of_rank
from ringflash_kernels.api import state_dtype


class Attention(Protocol):
    """Attention over a rail, as `RingOfHops` and `HeadGather` compute it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, row_max: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        row_max: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def shared_kv_heads(num_ranks: int, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return the KV heads of every rank of a host, one rank after another, equally many each.

    Eight query heads and two KV heads over four ranks: (0, 0, 1, 1). A rank has a KV head twice if its query heads
    would otherwise not be divided equally among its KV heads.

    Args:
        num_heads: query heads, a multiple of num_ranks; each rank takes an equal, contiguous share.
    """
    group = num_heads // num_kv_heads
    return tuple(head // group for head in range(0, num_heads, math.gcd(num_heads // num_ranks, group)))


def check_heads(num_heads: int, num_ranks: int, name: str) -> None:
    """Raise ValueError unless query heads can be divided among the ranks of a host."""
    if num_heads % num_ranks:
        raise ValueError(
            f"num_heads must be divisible by the {num_ranks} ranks that exchange heads, got {num_heads} with transport "
            f"{name!r}; use 'auto', or a group or mesh with {math.gcd(num_heads, num_ranks)} ranks on a host."
        )


@dataclass(frozen=True)
class Ulysses:
    """One attention call with an all-to-all of heads in each host, apart from its tensors.

    Args:
        attention: opens attention over this rank's rail for q and `evened` k with the rows of the host.
        channel: messages between the ranks of this host.
        layout: layout of the rows.
        call: number of the call in the group.
    """

    attention: Callable[[Tensor, Tensor], Attention]
    channel: PointToPoint
    layout: str
    call: CallNumber

    def forward(self, q: Tensor, k: Tensor, v: Tensor, row_max: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute attention as `RingOfHops.forward` does."""
        shared = self._shared(q, k)
        exchange = self._exchange("forward", q)
        q, k, v = exchange.to_host(q, _spread(k, shared), _spread(v, shared))
        largest = None if row_max is None else row_max.new_empty(q.shape[0], q.shape[2], q.shape[1])
        out, lse = self.attention(q, evened(k, v)).forward(q, k, v, largest)
        statistics = [_with_rows_first(x) for x in (lse, largest) if x is not None]
        out, *statistics = exchange.to_ranks(out, *statistics)
        lse, *rest = map(_with_heads_first, statistics)
        if row_max is not None:
            row_max.copy_(rest[0])
        return out, lse

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        row_max: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gradients as `RingOfHops.backward` does; those of a shared KV head are summed by rank of the host."""
        shared = self._shared(q, k)
        exchange = self._exchange("backward", q)
        given = [x is not None for x in (dlse, row_max)]
        statistics = [_with_rows_first(x) for x in (lse, dlse, row_max) if x is not None]
        kv = [_spread(x, shared) for x in (k, v)]
        dout, q, keys, values, out, *statistics = exchange.to_host(dout, q, *kv, out, *statistics)
        arrived = map(_with_heads_first, statistics)
        lse = next(arrived)
        dlse, row_max = (next(arrived) if present else None for present in given)
        grads = self.attention(q, evened(keys, values)).backward(dout, dlse, q, keys, values, out, lse, row_max)
        dq, dk, dv = exchange.to_ranks(*grads)
        return dq, _sum_shared(dk, shared, k.shape[2]), _sum_shared(dv, shared, k.shape[2])

    def num_posted(self) -> int:
        """Batches of messages that this rank has posted, of all kinds."""
        return self.channel.whole.num_posted

    def _shared(self, q: Tensor, k: Tensor) -> tuple[int, ...]:
        return shared_kv_heads(len(self.channel.members), q.shape[2], k.shape[2])

    def _exchange(self, way: str, q: Tensor) -> HeadExchange:
        return HeadExchange(self.channel, self.layout, way, self.call, q.device)


class HeadExchange:
    """All-to-all between the ranks of a host, from all heads of a rank's rows to a share of the heads of all rows.

    Args:
        channel: messages between these ranks.
        layout: layout of the rows.
        way: "forward" or "backward".
        call: number of the call; over NCCL it travels with the first exchange.
    """

    def __init__(self, channel: PointToPoint, layout: str, way: str, call: CallNumber, device: torch.device) -> None:
        self.channel, self.way, self.call, self.device = channel, way, call, device
        self.size, self.num_chunks = len(channel.members), chunks_of_rank(layout)
        self.peers = [rank for rank in range(self.size) if rank != channel.rank]
        self.words: Words | None = None
        if channel.name == "nccl":
            self.words = Words(torch.empty(1, dtype=torch.int64, device=device), self.peers, device)

    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        """Return the host's rows of this rank's share of the heads.

        Args:
            tensors: (batch, rows, all heads, any), each.
        Returns:
            tensors: (batch, rows of the host, heads / ranks, any), each, contiguous; by position.
        """
        return [self._join(x) for x in self._swap([x.unflatten(2, (self.size, -1)).movedim(2, 0) for x in tensors])]

    def to_ranks(self, *tensors: Tensor) -> list[Tensor]:
        """Return this rank's rows of all heads, contiguous: the inverse of `to_host`."""
        return [x.movedim(0, 2).flatten(2, 3).contiguous() for x in self._swap([self._cut(x) for x in tensors])]

    def _join(self, parts: Tensor) -> Tensor:
        """Order the rows of all ranks by position: (ranks, batch, rows, ...) -> (batch, ranks * rows, ...).

        The chunks of a host's ranks are contiguous runs. In every second run they descend with the rank.
        """
        parts = parts.unflatten(2, (self.num_chunks, -1))
        size, batch, num_chunks, *rest = parts.shape
        rows = parts.new_empty(batch, num_chunks, size, *rest)
        rows[:, 0::2] = parts[:, :, 0::2].movedim(0, 2)
        rows[:, 1::2] = parts[:, :, 1::2].flip(0).movedim(0, 2)
        return rows.flatten(1, 3)

    def _cut(self, rows: Tensor) -> Tensor:
        """Return the rows of each rank: the inverse of `_join`."""
        rows = rows.unflatten(1, (self.num_chunks, self.size, -1))
        batch, num_chunks, size, *rest = rows.shape
        parts = rows.new_empty(size, batch, num_chunks, *rest)
        parts[:, :, 0::2] = rows[:, 0::2].movedim(2, 0)
        parts[:, :, 1::2] = rows[:, 1::2].flip(2).movedim(2, 0)
        return parts.flatten(2, 3)

    def _swap(self, parts: list[Tensor]) -> list[Tensor]:
        """Send parts[i][rank] to each rank of the host, and return what they sent: same shapes.

        Tensors of one dtype travel as one message.
        """
        received: list[Tensor] = [x for x in parts]
        sends: list[Message] = []
        receives: list[Message] = []
        kept = []
        for dtype in dict.fromkeys(x.dtype for x in parts):
            places = [place for place, x in enumerate(parts) if x.dtype == dtype]
            sizes = [parts[place][0].numel() for place in places]
            outgoing = torch.empty(self.size, sum(sizes), dtype=dtype, device=self.device)
            incoming = torch.empty_like(outgoing)
            for place, source, target in zip(places, outgoing.split(sizes, 1), incoming.split(sizes, 1), strict=True):
                shape = parts[place].shape[1:]
                source.unflatten(1, shape).copy_(parts[place])
                received[place] = target.unflatten(1, shape)
            sends += [Message(outgoing[peer], peer, f"heads of the {self.way}") for peer in self.peers]
            receives += [Message(incoming[peer], peer, f"heads of the {self.way}") for peer in self.peers]
            kept.append((outgoing, incoming))
        words, self.words = self.words, None
        if words is not None:
            words.write(self.call)
            sends += [Message(words.own, peer, "the call's number") for peer in self.peers]
            receives += [Message(words.slot_of(peer), peer, "the call's number") for peer in self.peers]
        with watching(self.channel, self.way, self.device) as watched, waiting(self.device):
            pending = self.channel.post(sends, receives)
            for outgoing, incoming in kept:
                incoming[self.channel.rank].copy_(outgoing[self.channel.rank])
            pending.wait()
            watched.mark("for heads of the ranks {} of its host", self.channel.members)
        if words is not None:
            words.compare_later(self.channel.group, self.call, [self.channel.rank_in_group(x) for x in self.peers])
        return received


def _spread(x: Tensor, shared: tuple[int, ...]) -> Tensor:
    """Return K or V with the KV heads of every rank."""
    return x if shared == tuple(range(x.shape[2])) else torch.stack([x[:, :, head] for head in shared], 2)


def _sum_shared(grad: Tensor, shared: tuple[int, ...], num_kv_heads: int) -> Tensor:
    """Sum the gradients of each KV head over the ranks that share it, in fp32 (fp64 for fp64), in their order."""
    if shared == tuple(range(num_kv_heads)):
        return grad
    batch, rows, _, head_dim = grad.shape
    total = torch.zeros(batch, rows, num_kv_heads, head_dim, dtype=state_dtype(grad.dtype), device=grad.device)
    for slot, head in enumerate(shared):
        total[:, :, head] += grad[:, :, slot]
    return total.to(grad.dtype)


def _with_rows_first(lse: Tensor) -> Tensor:
    """(batch, heads, rows) -> (batch, rows, heads, 1)."""
    return lse.transpose(1, 2).unsqueeze(3)


def _with_heads_first(lse: Tensor) -> Tensor:
    """(batch, rows, heads, 1) -> (batch, heads, rows), contiguous."""
    return lse.squeeze(3).transpose(1, 2).contiguous()
