"""The ring: walk the hops of the schedule, move the next K/V while the kernel works on this one.

    forward    wait K/V(t)   post K/V(t + 1)            kernel(t): (out, lse) carried on in fp32
    backward   wait K/V(t)   post K/V(t + 1), dK/dV(t - 1)   kernel(t): dQ stays, dK/dV of the source in fp32

Every hop reads K/V from their owner, and in the backward sends the fp32 gradients of that hop back to the
owner, who adds them up in the order of the steps (docs/decisions/0002). Source of the idea: Liu et al. 2023,
arXiv:2310.01889; zigzag order as in Zhu's ring-flash-attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.profiler import record_function

from ringflash.schedule import Hop, Schedule
from ringflash.transport import Message, Pending, PointToPoint, buffer
from ringflash_kernels.api import begin_backward, implementation, state_dtype


@dataclass(frozen=True)
class Ring:
    """One attention call, apart from its tensors.

    Args:
        schedule: this rank's hops.
        transport: None for a single process.
        impl: kernel implementation, already chosen.
    """

    schedule: Schedule
    transport: PointToPoint | None
    impl: str
    softmax_scale: float
    deterministic: bool


def forward(ring: Ring, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the whole sequence.

    Args:
        q: (batch, seqlen_local, num_heads, head_dim).  k, v: (batch, seqlen_local, num_kv_heads, head_dim).
    Returns:
        out: as q.  lse: (batch, num_heads, seqlen_local), natural log.
    Numerics: (out, lse) are carried in fp32 (fp64 for fp64) and cast once, on the last hop.
    """
    kernel = implementation(ring.impl, q, k, v)
    state = state_dtype(q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=state, device=q.device)
    computed = [hop.step for hop in ring.schedule.hops if hop.source is not None]
    single = len(computed) == 1 or out.dtype == state
    carried = out if single else buffer("out", tuple(out.shape), state, out.device)
    exchange = _Exchange(ring, k, v)
    for hop in ring.schedule.hops:
        keys, values = exchange.arrive(hop)
        if hop.source is None:
            continue
        target = out if hop.step == computed[-1] else carried
        acc = None if hop.step == computed[0] else carried
        with record_function(f"ringflash::forward_step{hop.step}"):
            kernel.forward(q, keys, values, hop.mask, ring.softmax_scale, out=target, lse=lse, acc=acc)
    exchange.finish()
    return out, lse


def backward(
    ring: Ring,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `forward` for this rank's q, k and v, from all ranks.

    Args:
        dout: as out.  dlse: as lse, or None.
    Returns:
        dq: as q.  dk, dv: as k, v.
    Numerics: dq, dk and dv are summed in fp32 (fp64 for fp64), always in the order of the steps, and cast once.
    """
    gradients = begin_backward(
        dout, q, out, lse, impl=ring.impl, softmax_scale=ring.softmax_scale, dlse=dlse, deterministic=ring.deterministic
    )
    if ring.transport is None:
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        gradients.add(k, v, ring.schedule.hops[0].mask, dk, dv, accumulate=False)
        return gradients.finish(), dk, dv
    exchange = _GradientExchange(ring, k, v)
    for hop in ring.schedule.hops:
        keys, values = exchange.arrive(hop)
        if hop.source is None:
            continue
        with record_function(f"ringflash::backward_step{hop.step}"):
            gradients.add(keys, values, hop.mask, *exchange.gradients_of(hop), accumulate=True)
    dk, dv = exchange.finish_gradients()
    return gradients.finish(), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


class _Exchange:
    """K/V of the next hop under way while the caller works on this one.

    The rank's own K and V are packed into one message; two buffers take turns in receiving. A buffer is
    written again two hops later, and the kernel that read it lies before that message on the stream.
    """

    def __init__(self, ring: Ring, k: torch.Tensor, v: torch.Tensor) -> None:
        self.ring, self.hops = ring, ring.schedule.hops
        self.k, self.v = k, v
        self.next = 0  # index of the hop whose K/V are to be posted next
        self.pending = Pending([])
        if ring.transport is not None:
            self.own = self._buffer("kv.own", k.dtype)
            torch.stack((k, v), out=self.own)
            self.post_next()

    def arrive(self, hop: Hop) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of this hop's source, once they are here; the next hop's messages are then on their way."""
        if self.ring.transport is None:
            return self.k, self.v
        self.pending.wait()
        self.post_next()
        return self._keys_values(hop)

    def _keys_values(self, hop: Hop) -> tuple[torch.Tensor, torch.Tensor]:
        if hop.step == 0:
            return self.k, self.v
        kv = self.incoming(hop)
        return kv[0], kv[1]

    def finish(self) -> None:
        """Order the stream after the last message, so that buffers may be used again."""
        self.pending.wait()

    def post_next(self) -> None:
        """Post what the next hop needs; the first hop works on the rank's own K/V and needs nothing."""
        sends, recvs = self.next_messages()
        assert self.ring.transport is not None
        self.pending = self.ring.transport.post(sends, recvs)
        self.next += 1

    def next_messages(self) -> tuple[list[Message], list[Message]]:
        """Messages that must be through before the hop number `next` can start."""
        if self.next >= len(self.hops) or self.hops[self.next].step == 0:
            return [], []
        hop = self.hops[self.next]
        return [Message(self.own, hop.reader)], [Message(self.incoming(hop), hop.source)]

    def incoming(self, hop: Hop) -> torch.Tensor:
        """The buffer that receives the K/V of this hop: (2, batch, seqlen_local, num_kv_heads, head_dim)."""
        return self._buffer(f"kv.{self.hops.index(hop) % 2}", self.k.dtype)

    def _buffer(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return buffer(name, (2, *self.k.shape), dtype, self.k.device)


class _GradientExchange(_Exchange):
    """K/V as in the forward; the gradients of a hop go home to the owner of its K/V while the next hop works."""

    def __init__(self, ring: Ring, k: torch.Tensor, v: torch.Tensor) -> None:
        self.total = buffer("dkv.own", (2, *k.shape), state_dtype(k.dtype), k.device).zero_()
        self.returning: Hop | None = None
        super().__init__(ring, k, v)

    def arrive(self, hop: Hop) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the forward; adds the gradients that came home with the same messages."""
        self.pending.wait()
        self._add_returned()
        index = self.hops.index(hop)
        self.returning = self.hops[index - 1] if index > 0 else None
        self.post_next()
        return self._keys_values(hop)

    def next_messages(self) -> tuple[list[Message], list[Message]]:
        """K/V of the next hop, and the gradients of the last one on their way home."""
        sends, recvs = super().next_messages()
        if self.returning is not None and self.returning.step != 0:
            sends.append(Message(self._partial(self.returning), self.returning.source))
            recvs.append(Message(self._returned(), self.returning.reader))
        return sends, recvs

    def gradients_of(self, hop: Hop) -> tuple[torch.Tensor, torch.Tensor]:
        """Where this hop's dk and dv are to be added."""
        if hop.step == 0:
            return self.total[0], self.total[1]
        dk, dv = self._partial(hop).zero_().unbind(0)
        return dk, dv

    def finish_gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dk, dv of this rank's own keys, in fp32, from every rank that read them."""
        self.pending.wait()
        self._add_returned()
        self.returning = self.hops[-1]
        self.post_next()
        self.pending.wait()
        self._add_returned()
        dk, dv = self.total.unbind(0)
        return dk, dv

    def _add_returned(self) -> None:
        if self.returning is not None and self.returning.step != 0 and self.returning.reader is not None:
            self.total.add_(self._returned())

    def _partial(self, hop: Hop) -> torch.Tensor:
        return self._buffer(f"dkv.out.{self.hops.index(hop) % 2}", self.total.dtype)

    def _returned(self) -> torch.Tensor:
        return self._buffer("dkv.in", self.total.dtype)
