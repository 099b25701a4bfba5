"""All-to-all of heads inside a host (Ulysses), around attention between hosts.

    rank                   its own rows, all heads               q, k, v
    all-to-all in a host   the rows of the host, a share of the heads
    ring over a rail       attention over the keys of all hosts  (`GatherAttention`; `LocalAttention` for one host)
    all-to-all in a host   its own rows, all heads               out, lse

A *rail* is the ranks that have the same index on their hosts. K/V of a head cross between hosts on one rail only, so
that every key enters a host once. Layouts nest: the rows of a host's ranks, chunk by chunk, are the shard of that
host in the same layout over hosts. If there are fewer KV heads than GPUs, each GPU gets the KV heads that its query
heads need, and gradients of a shared head are summed. Source of the idea: Jacobs et al. 2023, arXiv:2309.14509, and
its combination with a ring, Fang and Zhao 2024, arXiv:2405.07719; docs/decisions/0013-by-host.md says what differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ringflash.attention.gather_by_heads import GatherAttention
from ringflash.attention.head_exchange import HeadExchange
from ringflash.attention.inputs import BackwardInputs
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.transport import GroupAreas, Transport, group_transport
from ringflash.comm.transport.areas import JoinAfterError
from ringflash.comm.transport.gpu_areas import Marker
from ringflash.comm.wait_timer import waiting
from ringflash_kernels.api import state_dtype


class Attention(Protocol):
    """Attention over a rail, as `LocalAttention` and `GatherAttention` compute it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, row_max: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]: ...


def kv_heads_by_rank(num_ranks: int, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return the KV heads of all ranks of a host, concatenated in rank order; each rank has equally many.

    Eight query heads and two KV heads over four ranks: (0, 0, 1, 1). Kernels divide the query heads of a rank equally
    among its KV heads, so a rank may list a KV head twice: of twelve query heads and three KV heads over two ranks, the
    first rank has six query heads, and lists (0, 0, 1).

    Args:
        num_heads: query heads, a multiple of num_ranks; each rank takes an equal, contiguous share.
    """
    sharing = num_heads // num_kv_heads  # query heads that share a KV head
    return tuple(head // sharing for head in range(0, num_heads, math.gcd(num_heads // num_ranks, sharing)))


def check_heads(num_heads: int, num_ranks: int, name: str) -> None:
    """Raise ValueError unless query heads can be divided among the ranks of a host."""
    if num_heads % num_ranks:
        raise ValueError(
            f"num_heads must be divisible by the {num_ranks} ranks that exchange heads, got {num_heads} with transport "
            f"'{name}'; use 'auto', or a group or mesh with {math.gcd(num_heads, num_ranks)} ranks on a host."
        )


@dataclass(frozen=True)
class Ulysses:
    """One attention call with an all-to-all of heads in each host, without its tensors.

    Args:
        attention: attention over this rank's rail, of the rows of the host and a share of the heads.
        areas: memory areas of the ranks of this host.
        members: ranks of this host, as ranks in the group.
        transport: transport of the rail, or of the host if there is only one.
        layout: layout of the rows.
        number: number of the call in the group.
    """

    attention: Attention
    areas: GroupAreas
    members: tuple[int, ...]
    transport: Transport
    layout: str
    number: CallNumber

    def forward(self, q: Tensor, k: Tensor, v: Tensor, row_max: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute attention as `LocalAttention.forward` does."""
        shared = self._shared(q, k)
        exchange = self._exchange("forward")
        with JoinAfterError(self.areas):
            (k, v), (q,), arrived = exchange.to_host([_spread(x, shared) for x in (k, v)], [q])
            largest = None if row_max is None else row_max.new_empty(q.shape[0], q.shape[2], q.shape[1])
            out, lse = self._attention(q.device, arrived).forward(q, k, v, largest)
            statistics = [_with_rows_first(x) for x in (lse, largest) if x is not None]
            out, *statistics = exchange.to_ranks(out, *statistics)
        lse, *rest = map(_with_heads_first, statistics)
        if row_max is not None:
            row_max.copy_(rest[0])
        return out, lse

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gradients as `LocalAttention.backward` does; sum the gradients of a shared KV head in rank order."""
        dout, dlse, q, k, v, out, lse, row_max = inputs
        shared = self._shared(q, k)
        exchange, num_kv_heads = self._exchange("backward"), k.shape[2]
        given = [x is not None for x in (dlse, row_max)]
        statistics = [_with_rows_first(x) for x in (lse, dlse, row_max) if x is not None]
        first = [*(_spread(x, shared) for x in (k, v)), *statistics]
        with JoinAfterError(self.areas):
            (k, v, *statistics), (q, dout, out), arrived = exchange.to_host(first, [q, dout, out])
            rest = map(_with_heads_first, statistics)
            lse = next(rest)
            dlse, row_max = (next(rest) if present else None for present in given)
            on_host = BackwardInputs(dout, dlse, q, k, v, out, lse, row_max)
            grads = self._attention(q.device, arrived).backward(on_host)
            dq, dk, dv = exchange.to_ranks(*grads)
        return dq, _sum_shared(dk, shared, num_kv_heads), _sum_shared(dv, shared, num_kv_heads)

    def num_posted(self) -> int:
        """Barriers and batches of messages that this rank has posted, of all kinds."""
        return sum(x.num_posted for x in {group_transport(self.areas), self.transport})

    def _shared(self, q: Tensor, k: Tensor) -> tuple[int, ...]:
        return kv_heads_by_rank(len(self.members), q.shape[2], k.shape[2])

    def _exchange(self, pass_name: str) -> HeadExchange:
        return HeadExchange(self.areas, self.members, self.transport, self.layout, pass_name, self.number)

    def _attention(self, device: torch.device, arrived: Marker) -> Attention:
        """Return attention over the rail. Only kernels of an all-gather by heads wait for queries by themselves."""
        if isinstance(self.attention, GatherAttention):
            return replace(self.attention, queries_arrived=(arrived,))
        with waiting(device):
            self.areas.wait(arrived)
        return self.attention


def _spread(x: Tensor, shared: tuple[int, ...]) -> Tensor:
    """Return K or V with the KV heads that `shared` lists."""
    return x if shared == tuple(range(x.shape[2])) else torch.stack([x[:, :, head] for head in shared], 2)


def _sum_shared(grad: Tensor, shared: tuple[int, ...], num_kv_heads: int) -> Tensor:
    """Sum the gradients of each KV head over the ranks that share it, in fp32 (fp64 for fp64), in their order."""
    if shared == tuple(range(num_kv_heads)):
        return grad
    batch, rows, _, head_dim = grad.shape
    total = torch.zeros(batch, rows, num_kv_heads, head_dim, dtype=state_dtype(grad.dtype), device=grad.device)
    for index, head in enumerate(shared):
        total[:, :, head] += grad[:, :, index]
    return total.to(grad.dtype)


def _with_rows_first(lse: Tensor) -> Tensor:
    """Reshape lse: (batch, heads, rows) -> (batch, rows, heads, 1)."""
    return lse.transpose(1, 2).unsqueeze(3)


def _with_heads_first(lse: Tensor) -> Tensor:
    """Reshape lse: (batch, rows, heads, 1) -> (batch, heads, rows), contiguous."""
    return lse.squeeze(3).transpose(1, 2).contiguous()
