"""K/V and gradients in memory that the ranks of one host share: no messages, nothing relayed.

    forward    own K/V -> area   barrier   { wait K/V(t)   pull K/V(t + 1)   kernel(t) } ...   barrier
    backward   likewise, and the gradients of hop t go home in one of two ways:
      pushed   the kernel reduce-adds them into the owner's area; the last barrier ends the sum
      staged   the kernel writes an area of its own; READY -> the owner adds it, in the order of the steps -> FREE

A pull is posted before kernel(t), behind kernel(t - 1) that read the same of two buffers. Own K/V stay until the
last barrier, which every rank joins after its last pull. Two staged areas take turns: FREE of hop t - 2 precedes
hop t. docs/decisions/0005-copy-engine.md says why.
"""

from __future__ import annotations

import torch

from ringflash.exchange import KeyValue
from ringflash.schedule import Hop
from ringflash.transport.buffers import buffer
from ringflash.transport.peer_memory import PeerMemory, Token
from ringflash_kernels.api import state_dtype

READY, FREE = 1, 2  # channels of signals; 0 is the barrier's


class PeerExchange:
    """K/V of the next hop pulled from their owner while the caller works on this one.

    Args:
        memory: areas of the group.
        hops: this rank's, in order; `arrive` is called for each of them.
        k, v: (batch, seqlen_local, num_kv_heads, head_dim), this rank's.
    """

    def __init__(self, memory: PeerMemory, hops: tuple[Hop, ...], k: torch.Tensor, v: torch.Tensor) -> None:
        self.memory, self.hops, self.k, self.v = memory, hops, k, v
        self.shape = (2, *k.shape)
        self.arriving: Token | None = None
        self._reserve("kv", k.dtype)
        torch.stack((k, v), out=memory.view("kv", memory.rank, self.shape, k.dtype))
        memory.barrier()

    def arrive(self, index: int) -> KeyValue:
        """K and V of hop number `index`, once they are here; the next hop's are then on their way."""
        if self.arriving is not None:
            self.arriving.wait()
        self.arriving = self._pull(index + 1)
        if self.hops[index].step == 0:
            return self.k, self.v
        kv = self._incoming(index)
        return kv[0], kv[1]

    def finish(self) -> None:
        """No rank reads another's area any more, nor writes it."""
        self.memory.barrier()

    def _pull(self, index: int) -> Token | None:
        """Begin the copy of a hop's K/V, if there is such a hop and it needs any."""
        if index >= len(self.hops) or self.hops[index].source is None:
            return None
        source, target = self.hops[index].source, self._incoming(index)
        assert source is not None
        theirs = self.memory.view("kv", source, self.shape, self.k.dtype)

        def copy() -> None:
            target.copy_(theirs)

        return self.memory.beside("pull", copy)

    def _incoming(self, index: int) -> torch.Tensor:
        """Receives the K/V of a hop."""
        return buffer(f"kv.{index % 2}", self.shape, self.k.dtype, self.k.device)

    def _reserve(self, name: str, dtype: torch.dtype, copies: int = 1) -> None:
        self.memory.reserve(name, copies * 2 * self.k.numel() * dtype.itemsize)


class PushedGradients(PeerExchange):
    """The kernel adds dK and dV of a hop to the owner's sum. Needs one that adds atomically, in any order."""

    def __init__(self, memory: PeerMemory, hops: tuple[Hop, ...], k: torch.Tensor, v: torch.Tensor) -> None:
        self.dtype = state_dtype(k.dtype)
        memory.reserve("dkv", 2 * k.numel() * self.dtype.itemsize)
        self.total = memory.view("dkv", memory.rank, (2, *k.shape), self.dtype).zero_()
        super().__init__(memory, hops, k, v)

    def gradients_of(self, index: int) -> KeyValue:
        """dk, dv to which the kernel adds those of hop number `index`: the owner's own sum."""
        owner = self.hops[index].source
        assert owner is not None
        gradients = self.memory.view("dkv", owner, self.shape, self.dtype)
        return gradients[0], gradients[1]

    def finish_gradients(self) -> KeyValue:
        """dk, dv of this rank's own keys, from every rank that read them."""
        self.finish()
        return self.total[0], self.total[1]


class StagedGradients(PeerExchange):
    """The owner adds what its readers staged, in the order of the steps: the same sum on every run, with any kernel."""

    def __init__(self, memory: PeerMemory, hops: tuple[Hop, ...], k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(memory, hops, k, v)
        self.dtype = state_dtype(k.dtype)
        self._reserve("stages", self.dtype, copies=2)
        self.total = buffer("dkv.own", self.shape, self.dtype, k.device).zero_()
        self.owners: dict[int, int] = {}  # stage: who has still to add it
        self.adding: Token | None = None

    def arrive(self, index: int) -> KeyValue:
        """As PeerExchange; the gradients of the last hop go home."""
        self._send_home(index - 1)
        return super().arrive(index)

    def gradients_of(self, index: int) -> KeyValue:
        """dk, dv to which the kernel adds those of hop number `index`: this rank's own sum, or a free stage."""
        if self.hops[index].step == 0:
            return self.total[0], self.total[1]
        self._await_free(index % 2)
        gradients = self._stage(index, self.memory.rank).zero_()
        return gradients[0], gradients[1]

    def finish_gradients(self) -> KeyValue:
        """dk, dv of this rank's own keys, from every rank that read them."""
        self._send_home(len(self.hops) - 1)
        if self.adding is not None:
            self.adding.wait()
        for stage in (0, 1):
            self._await_free(stage)
        self.finish()
        return self.total[0], self.total[1]

    def _send_home(self, index: int) -> None:
        """Tell the owner that this hop's stage is full, and begin to add that of this rank's reader."""
        if index < 0 or self.hops[index].step == 0:
            return
        owner, reader = self.hops[index].source, self.hops[index].reader
        if owner is not None:
            self.memory.signal(owner, READY)
            self.owners[index % 2] = owner
        if reader is not None:
            theirs = self._stage(index, reader)
            self.adding = self.memory.beside("add", lambda: self._add(theirs, reader))

    def _add(self, theirs: torch.Tensor, reader: int) -> None:
        """Pulled before it is added: the copy takes no SM, where an addition that reads a peer would hold them."""
        self.memory.wait_signal(reader, READY)
        arrived = buffer("dkv.in", self.shape, self.dtype, self.k.device)
        arrived.copy_(theirs)
        self.memory.signal(reader, FREE)
        self.total.add_(arrived)

    def _await_free(self, stage: int) -> None:
        owner = self.owners.pop(stage, None)
        if owner is not None:
            self.memory.wait_signal(owner, FREE)

    def _stage(self, index: int, rank: int) -> torch.Tensor:
        return self.memory.view("stages", rank, (2, *self.shape), self.dtype)[index % 2]
