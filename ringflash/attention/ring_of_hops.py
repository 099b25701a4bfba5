"""Attention over a ring of hops, over gloo; and attention of a single process, whose only hop has its own K/V.

    forward    wait K/V(t)                   post K/V(t + 1)                kernel(t): (out, lse) carried in fp32
    backward   wait K/V(t), add dK/dV(t - 2) post K/V(t + 1), dK/dV(t - 1)  kernel(t): dQ stays, dK/dV in fp32

On each hop a rank receives the K/V of one other rank from their owner, while the kernel computes the previous hop. In
the backward it sends the fp32 gradients of the hop back to the owner, who adds them up in the order of the steps
(docs/decisions/0002). K/V are double-buffered, and so are outgoing gradients: a buffer is written again two hops
later, by a message that is posted after its last reader. Source of the idea: Liu et al. 2023,
arXiv:2310.01889; zigzag order as in Zhu's ring-flash-attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ringflash.attention.inputs import BackwardInputs
from ringflash.attention.kv_format import KVFormat
from ringflash.attention.schedule import Hop, Schedule
from ringflash.comm.profiling import profiler_range
from ringflash.comm.transport import Message, Pending, PointToPoint, buffer
from ringflash.comm.wait_timer import waiting
from ringflash_kernels.api import begin_checked_backward, implementation, out_shape, rounds, state_dtype

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RingOfHops:
    """One attention call over a ring of hops, without its tensors.

    Args:
        schedule: this rank's hops.
        transport: None for a single process.
        impl: kernel implementation, chosen and checked.
    """

    schedule: Schedule
    transport: PointToPoint | None
    impl: str
    softmax_scale: float
    deterministic: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, row_max: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute attention of this rank's queries over the whole sequence.

        Args:
            q: (batch, seqlen_local, num_heads, head_dim).  k, v: (batch, seqlen_local, num_kv_heads, head_dim).
            row_max: as lse; the largest score of each row, or a little more, is written to it.
        Returns:
            out: as q, as wide as v.  lse: (batch, num_heads, seqlen_local), natural log.
        Numerics: (out, lse) are carried in fp32 (fp64 for fp64) and cast once, on the last hop.
        """
        kernel, kv_format = implementation(self.impl, q, k, v), self._kv_format(k, v, for_backward=False)
        forward, queries = kv_format.forward_kernel(kernel), kv_format.pack_queries(q, kernel)
        state = state_dtype(q.dtype)
        out = q.new_empty(out_shape(q, v))
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=state, device=q.device)
        computed = [hop.step for hop in self.schedule.hops if hop.source is not None]
        single = len(computed) == 1 or out.dtype == state
        carried = out if single else buffer("out", tuple(out.shape), state, out.device)
        hops = self.schedule.hops
        with_row_max = {} if row_max is None else {"row_max": row_max}
        with waiting(q.device):
            exchange = HopExchange(self.transport, hops, k, v, kv_format, kernel)
        for _, hop, arrived in self._arrivals(exchange, q.device):
            target = out if hop.step == computed[-1] else carried
            acc = None if hop.step == computed[0] else carried
            with profiler_range(f"ringflash::forward_step{hop.step}"):
                forward(queries, *arrived, hop.mask, self.softmax_scale, out=target, lse=lse, acc=acc, **with_row_max)
        with waiting(q.device):
            exchange.finish()
        return out, lse

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of `forward` for this rank's q, k and v, from all ranks.

        Returns:
            dq: as q.  dk, dv: as k, v.
        Numerics: dq, dk and dv are summed in fp32 (fp64 for fp64), always in the order of the steps, and cast once;
            with products of the backward in FP8, dq of up to 131,072 keys in fp16.
        """
        dout, dlse, q, k, v, out, lse, row_max = inputs
        dq = _empty(q)
        num_keys = sum(hop.mask.seqlen_k for hop in self.schedule.hops if hop.source is not None)
        gradients = begin_checked_backward(
            dout, q, out, lse, impl=self.impl, num_kv_heads=k.shape[2], softmax_scale=self.softmax_scale, dlse=dlse,
            deterministic=self.deterministic, row_max=row_max, num_keys=num_keys,
            only_dq=dq if self.transport is None else None,
        )  # fmt: skip
        if self.transport is None:
            dk, dv = _empty(k), _empty(v)
            gradients.add(k, v, self.schedule.hops[0].mask, dk, dv, accumulate=False)
            return gradients.finish(dq), dk, dv
        hops, kv_format = self.schedule.hops, self._kv_format(k, v, for_backward=True)
        kernel, add = implementation(self.impl, q, k, v), kv_format.backward_kernel(gradients)
        with waiting(q.device):
            exchange = GradientExchange(self.transport, hops, k, v, kv_format, kernel)
        for index, hop, arrived in self._arrivals(exchange, q.device):
            with profiler_range(f"ringflash::backward_step{hop.step}"):
                add(*arrived, hop.mask, *exchange.gradients_of(index), accumulate=True)
        with waiting(q.device):
            dk, dv = exchange.finish_gradients()
        return gradients.finish(dq), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)

    def num_posted(self) -> int:
        """Batches of messages that this rank has posted."""
        return 0 if self.transport is None else self.transport.whole.num_posted

    def _arrivals(self, exchange: HopExchange, device: torch.device) -> Iterator[tuple[int, Hop, tuple[Tensor, ...]]]:
        """Yield each hop with visible keys, after its K and V have arrived: index, hop, arguments of the kernel."""
        for index, hop in enumerate(self.schedule.hops):
            with profiler_range(f"ringflash::arrive_step{hop.step}"), waiting(device):
                arrived = exchange.arrive(index)
            if hop.source is not None:
                yield index, hop, arrived

    def _kv_format(self, k: Tensor, v: Tensor, *, for_backward: bool) -> KVFormat:
        """Return the format in which K and V travel; a single process leaves the rounding to its kernel."""
        rounded = self.transport is not None and rounds(self.impl)
        return KVFormat.of(k, v, rounded=rounded, for_backward=for_backward)


def _empty(x: Tensor) -> Tensor:
    """Return a contiguous empty tensor like x. Compiled code relies on the strides that the operators' fakes return."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class HopExchange:
    """Messages of K/V between ranks: those of the next hop travel while the caller computes the current one.

    Args:
        transport: None for a single process, whose only hop uses its own K/V.
        hops: this rank's hops, in order. `arrive` must be called for each of them, even if no keys are visible.
        k, v: (batch, seqlen_local, num_kv_heads, head_dim) of this rank; sent in one message.
        kv_format: format in which they travel.
        kernel: implementation that packs them.
    """

    def __init__(
        self,
        transport: PointToPoint | None,
        hops: tuple[Hop, ...],
        k: Tensor,
        v: Tensor,
        kv_format: KVFormat,
        kernel: ModuleType,
    ) -> None:
        self.transport, self.hops, self.k, self.v, self.kv_format = transport, hops, k, v, kv_format
        self.pending = Pending([])
        if transport is not None:
            self.own = self._lines("kv.own")
            kv_format.pack(k, v, kernel, self.own)

    def arrive(self, index: int) -> tuple[Tensor, ...]:
        """Wait for K and V of hop number `index`, post the next hop's messages, and return what kernels take."""
        if self.transport is None:
            return self.k, self.v
        self._advance(index)
        return self.kv_format.unpack(self.own if self.hops[index].step == 0 else self._incoming(index))

    def _advance(self, index: int) -> None:
        """Wait for the messages of hop number `index`, then post those of the next hop."""
        assert self.transport is not None
        self.pending.wait()
        self.pending = self.transport.post(*self._messages_during(index))

    def finish(self) -> None:
        """Wait for the last message. The buffers can then be reused."""
        self.pending.wait()

    def _messages_during(self, index: int) -> tuple[list[Message], list[Message]]:
        """Return the messages that travel while hop number `index` computes: the K/V of the next hop."""
        if index + 1 >= len(self.hops):
            return [], []
        hop = self.hops[index + 1]
        what = f"K/V of step {hop.step}"
        return [Message(self.own, hop.reader, what)], [Message(self._incoming(index + 1), hop.source, what)]

    def _incoming(self, index: int) -> Tensor:
        """Return the buffer that receives the K/V of a hop."""
        return self._lines(f"kv.{index % 2}")

    def _lines(self, name: str) -> Tensor:
        return buffer(name, self.kv_format.packed_shape(self.k), self.kv_format.dtype, self.k.device)


class GradientExchange(HopExchange):
    """K/V as in the forward; the gradients of a hop return to the owner of its K/V while the next hop computes.

    The owner adds them up in the order of the steps, in fp32 (fp64 for fp64): the same sum on every run.
    """

    def __init__(
        self,
        transport: PointToPoint,
        hops: tuple[Hop, ...],
        k: Tensor,
        v: Tensor,
        kv_format: KVFormat,
        kernel: ModuleType,
    ) -> None:
        super().__init__(transport, hops, k, v, kv_format, kernel)
        self.total = self._buffer("dkv.own", state_dtype(k.dtype)).zero_()

    def gradients_of(self, index: int) -> KeyValue:
        """Return the dk, dv to which the kernel adds hop number `index`: this rank's sum, or a message to the owner."""
        gradients = self.total if self.hops[index].step == 0 else self._outgoing(index).zero_()
        return self._parts(gradients)

    def finish_gradients(self) -> KeyValue:
        """Return dk, dv of this rank's own keys, summed over every rank that read them."""
        self._advance(len(self.hops))
        self._advance(len(self.hops) + 1)
        self.finish()
        return self._parts(self.total)

    def _advance(self, index: int) -> None:
        """Advance as in the forward, and add the gradients that returned during the previous hop before more arrive."""
        self.pending.wait()
        self._add_returned(index - 2)
        super()._advance(index)

    def _messages_during(self, index: int) -> tuple[list[Message], list[Message]]:
        """Return the messages during hop number `index`: the next hop's K/V, and the previous hop's gradients."""
        sends, recvs = super()._messages_during(index)
        if self._travels(index - 1):
            last = self.hops[index - 1]
            what = f"dK/dV of step {last.step}"
            sends.append(Message(self._outgoing(index - 1), last.source, what))
            recvs.append(Message(self._returned(), last.reader, what))
        return sends, recvs

    def _add_returned(self, index: int) -> None:
        if self._travels(index) and self.hops[index].reader is not None:
            self.total.add_(self._returned())

    def _travels(self, index: int) -> bool:
        """True if there is a hop of this number whose gradients belong to another rank."""
        return 0 <= index < len(self.hops) and self.hops[index].step != 0

    def _outgoing(self, index: int) -> Tensor:
        return self._buffer(f"dkv.out.{index % 2}", self.total.dtype)

    def _returned(self) -> Tensor:
        return self._buffer("dkv.in", self.total.dtype)

    def _buffer(self, name: str, dtype: torch.dtype) -> Tensor:
        return buffer(name, (self.k.numel() + self.v.numel(),), dtype, self.k.device)

    def _parts(self, flat: Tensor) -> KeyValue:
        """Return views of dK and dV in a buffer."""
        dk, dv = flat.split((self.k.numel(), self.v.numel()))
        return dk.view(self.k.shape), dv.view(self.v.shape)
