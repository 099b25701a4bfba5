"""The ring of hops, over gloo, and over NCCL where keys are too many to gather: move the next K/V while a kernel works.

    forward    wait K/V(t)   post K/V(t + 1)            kernel(t): (out, lse) carried on in fp32
    backward   wait K/V(t)   post K/V(t + 1), dK/dV(t - 1)   kernel(t): dQ stays, dK/dV of the source in fp32

Every hop reads K/V from their owner, and in the backward sends the fp32 gradients of that hop back to the
owner, who adds them up in the order of the steps (docs/decisions/0002). Source of the idea: Liu et al. 2023,
arXiv:2310.01889; zigzag order as in Zhu's ring-flash-attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from ringflash.attention.exchange import Exchange, GradientExchange
from ringflash.attention.schedule import Hop, Schedule
from ringflash.comm.call_numbers import NO_NUMBER, CallNumber
from ringflash.comm.transport import PointToPoint, buffer, transport_name
from ringflash.comm.transport.sms import kernel_options
from ringflash.comm.wait_timer import waiting
from ringflash.comm.watchdog import Call, Unwatched, watching
from ringflash_kernels.api import begin_backward, implementation, state_dtype


@dataclass(frozen=True)
class Ring:
    """One attention call, apart from its tensors.

    Args:
        schedule: this rank's hops.
        transport: None for a single process.
        impl: kernel implementation, already chosen.
        call: its number in the group.
    """

    schedule: Schedule
    transport: PointToPoint | None
    impl: str
    softmax_scale: float
    deterministic: bool
    call: CallNumber = NO_NUMBER

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's queries over the whole sequence.

        Args:
            q: (batch, seqlen_local, num_heads, head_dim).  k, v: (batch, seqlen_local, num_kv_heads, head_dim).
        Returns:
            out: as q.  lse: (batch, num_heads, seqlen_local), natural log.
        Numerics: (out, lse) are carried in fp32 (fp64 for fp64) and cast once, on the last hop.
        """
        kernel = implementation(self.impl, q, k, v)
        state = state_dtype(q.dtype)
        out = _empty(q)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=state, device=q.device)
        computed = [hop.step for hop in self.schedule.hops if hop.source is not None]
        single = len(computed) == 1 or out.dtype == state
        carried = out if single else buffer("out", tuple(out.shape), state, out.device)
        hops = self.schedule.hops
        options = kernel_options(self.impl, transport_name(self.transport), q.device)
        with watching(self.transport, "forward", q.device) as call:
            with waiting(q.device):
                exchange = Exchange(self.transport, hops, k, v, self.call)
            for _, hop, keys, values in self._arrivals(exchange, call, q.device):
                target = out if hop.step == computed[-1] else carried
                acc = None if hop.step == computed[0] else carried
                with record_function(f"ringflash::forward_step{hop.step}"):
                    kernel.forward(
                        q, keys, values, hop.mask, self.softmax_scale, out=target, lse=lse, acc=acc, **options
                    )
            with waiting(q.device):
                exchange.finish()
            call.mark("for the last messages")
        return out, lse

    def backward(
        self,
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
            dout, q, out, lse, impl=self.impl, softmax_scale=self.softmax_scale, dlse=dlse,
            deterministic=self.deterministic,
        )  # fmt: skip
        if self.transport is None:
            dk, dv = _empty(k), _empty(v)
            gradients.add(k, v, self.schedule.hops[0].mask, dk, dv, accumulate=False)
            return gradients.finish(_empty(q)), dk, dv
        hops = self.schedule.hops
        with watching(self.transport, "backward", q.device) as call:
            with waiting(q.device):
                exchange = GradientExchange(self.transport, hops, k, v, self.call)
            for index, hop, keys, values in self._arrivals(exchange, call, q.device):
                with record_function(f"ringflash::backward_step{hop.step}"):
                    gradients.add(keys, values, hop.mask, *exchange.gradients_of(index), accumulate=True)
            with waiting(q.device):
                dk, dv = exchange.finish_gradients()
            call.mark("for the last gradients")
        return gradients.finish(_empty(q)), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)

    def num_posted(self) -> int:
        """Batches of messages of this rank, over NCCL of earlier calls too."""
        return 0 if self.transport is None else self.transport.num_posted

    def _arrivals(
        self, exchange: Exchange, call: Call | Unwatched, device: torch.device
    ) -> Iterator[tuple[int, Hop, torch.Tensor, torch.Tensor]]:
        """The hops with something to compute, by index, each when its K and V are there."""
        for index, hop in enumerate(self.schedule.hops):
            with record_function(f"ringflash::arrive_step{hop.step}"), waiting(device):
                keys, values = exchange.arrive(index)
            if hop.source is not None:
                _mark(call, hop)
                yield index, hop, keys, values


def _empty(x: torch.Tensor) -> torch.Tensor:
    """As x and contiguous, whatever x is: compiled code counts on the strides that the operators' fakes have."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _mark(call: Call | Unwatched, hop: Hop) -> None:
    """What the stream waits for before a hop. The messages of a hop end together, sent or received."""
    if hop.step == 0:
        call.mark("for its device to come to step 0")
    elif hop.reader is None:
        call.mark("for K/V of step {} from rank {}", hop.step, hop.source)
    else:
        call.mark("for K/V of step {} from rank {} and to rank {}", hop.step, hop.source, hop.reader)
