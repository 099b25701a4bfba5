"""K/V on their way to the next hop, and gradients on their way home, as messages between ranks.

On each hop the caller asks for this hop's K/V; the messages of the next hop are then posted, and run while the
kernel works:

    forward    arrive(t):  wait K/V(t)            post K/V(t + 1)
    backward   arrive(t):  wait K/V(t), add dK/dV(t - 2)     post K/V(t + 1), dK/dV(t - 1)

Two K/V buffers take turns in receiving, two gradient buffers in being computed and sent. A buffer is written
again two hops later; what read it lies before that message on the stream.
"""

from __future__ import annotations

import torch

from ringflash.attention.schedule import Hop
from ringflash.comm import call_numbers
from ringflash.comm.call_numbers import NO_NUMBER, CallNumber, Words
from ringflash.comm.transport import Message, Pending, PointToPoint, buffer
from ringflash_kernels.api import state_dtype

KeyValue = tuple[torch.Tensor, torch.Tensor]


class Exchange:
    """K/V of the next hop under way while the caller works on this one.

    Args:
        transport: None where there is one process; every hop is then on its own K/V.
        hops: this rank's, in order; `arrive` is called for each of them, also where nothing is to be computed.
        k, v: (batch, seqlen_local, num_kv_heads, head_dim), this rank's; packed into one message.
        call: sent beside K/V over NCCL. Over gloo the ranks have compared it.
    """

    def __init__(
        self,
        transport: PointToPoint | None,
        hops: tuple[Hop, ...],
        k: torch.Tensor,
        v: torch.Tensor,
        call: CallNumber = NO_NUMBER,
    ) -> None:
        self.transport, self.hops, self.k, self.v, self.call = transport, hops, k, v, call
        self.pending = Pending([])
        self.words: Words | None = None
        if transport is not None:
            self.own = self._buffer("kv.own", k.dtype)
            torch.stack((k, v), out=self.own)
            if _numbered(transport):
                self.words = self._words()
                self.words.write(call)

    def arrive(self, index: int) -> KeyValue:
        """K and V of hop number `index`, once they are here; the next hop's messages are then on their way."""
        if self.transport is None:
            return self.k, self.v
        self._advance(index)
        if self.hops[index].step == 0:
            return self.k, self.v
        kv = self._incoming(index)
        return kv[0], kv[1]

    def _advance(self, index: int) -> None:
        """Wait for what hop number `index` needs, then post what runs beside it."""
        assert self.transport is not None
        self.pending.wait()
        self.pending = self.transport.post(*self._messages_beside(index))

    def finish(self) -> None:
        """Order the stream after the last message, so that the buffers may be used again."""
        self.pending.wait()
        if self.transport is None or self.words is None:
            return
        on_host = self.words.for_host(self.call)
        if on_host is not None:
            on_host.copy_(self.words.arrived, non_blocking=True)
            arrival = torch.cuda.current_stream().record_event()
            call_numbers.expect(self.transport.group, arrival, self.call, on_host, self.words.senders)

    def _messages_beside(self, index: int) -> tuple[list[Message], list[Message]]:
        """What is sent and received while hop number `index` computes: the K/V of the next hop."""
        if index + 1 >= len(self.hops):
            return [], []
        hop = self.hops[index + 1]
        what = f"K/V of step {hop.step}"
        sends, recvs = [Message(self.own, hop.reader, what)], [Message(self._incoming(index + 1), hop.source, what)]
        if self.words is not None:
            what = f"the call's number at step {hop.step}"
            sends.append(Message(self.words.own, hop.reader, what))
            if hop.source is not None:
                recvs.append(Message(self.words.of(hop.source), hop.source, what))
        return sends, recvs

    def _incoming(self, index: int) -> torch.Tensor:
        """Receives the K/V of a hop: (2, batch, seqlen_local, num_kv_heads, head_dim)."""
        return self._buffer(f"kv.{index % 2}", self.k.dtype)

    def _words(self) -> Words:
        senders = sorted({hop.source for hop in self.hops if hop.source is not None and hop.step != 0})
        return Words(torch.empty(1, dtype=torch.int64, device=self.k.device), senders, self.k.device)

    def _buffer(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return buffer(name, (2, *self.k.shape), dtype, self.k.device)


def _numbered(transport: PointToPoint) -> bool:
    """True if calls are sent that the ranks have not compared."""
    return transport.name == "nccl"


class GradientExchange(Exchange):
    """K/V as in the forward; the gradients of a hop go home to the owner of its K/V while the next hop works.

    The owner adds them up in the order of the steps, in fp32 (fp64 for fp64): the same sum on every run.
    """

    def __init__(
        self,
        transport: PointToPoint,
        hops: tuple[Hop, ...],
        k: torch.Tensor,
        v: torch.Tensor,
        call: CallNumber = NO_NUMBER,
    ) -> None:
        super().__init__(transport, hops, k, v, call)
        self.total = self._buffer("dkv.own", state_dtype(k.dtype)).zero_()

    def gradients_of(self, index: int) -> KeyValue:
        """dk, dv to which the kernel adds those of hop number `index`: this rank's own sum, or a message home."""
        gradients = self.total if self.hops[index].step == 0 else self._outgoing(index).zero_()
        return gradients[0], gradients[1]

    def finish_gradients(self) -> KeyValue:
        """dk, dv of this rank's own keys, from every rank that read them."""
        self._advance(len(self.hops))
        self._advance(len(self.hops) + 1)
        self.finish()
        return self.total[0], self.total[1]

    def _advance(self, index: int) -> None:
        """As in the forward; adds the gradients that came home beside the last hop before others may come."""
        self.pending.wait()
        self._add_returned(index - 2)
        super()._advance(index)

    def _messages_beside(self, index: int) -> tuple[list[Message], list[Message]]:
        """The K/V of the next hop, and the gradients of the last one."""
        sends, recvs = super()._messages_beside(index)
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
        """Whether there is such a hop, and its gradients belong to another rank."""
        return 0 <= index < len(self.hops) and self.hops[index].step != 0

    def _outgoing(self, index: int) -> torch.Tensor:
        return self._buffer(f"dkv.out.{index % 2}", self.total.dtype)

    def _returned(self) -> torch.Tensor:
        return self._buffer("dkv.in", self.total.dtype)
