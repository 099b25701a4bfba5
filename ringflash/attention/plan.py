"""A checked call: its mask, kernel implementation, transport and algorithm, chosen before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from ringflash.attention import schedule
from ringflash.attention.gather_by_heads import HeadGather
from ringflash.attention.inputs import document_bounds
from ringflash.attention.options import RingOptions
from ringflash.attention.ring_of_hops import RingOfHops
from ringflash.attention.schedule import Gathering, Schedule
from ringflash.attention.sections import GIB, gather_bytes
from ringflash.comm import cuda_graphs
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.transport import PointToPoint, choose_transport, message_memory, open_transport
from ringflash.sequence.layout import check_layout
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.api import IMPLS, check_inputs, choose_impl, implementation

MAX_GATHER_BYTES = 12 * GIB  # buffers of an all-gather over NCCL; beyond, a ring of hops needs less


class CallArguments(NamedTuple):
    """Arguments of one call other than tensors, in the order of the operator's schema."""

    causal: bool
    softmax_scale: float
    window_left: int
    window_right: int
    options: RingOptions


@dataclass(frozen=True)
class CallPlan:
    """A call that passed its checks, and how it will be carried out."""

    mask: SequenceMask
    impl: str
    impl_reason: str
    transport: str | None
    softmax_scale: float
    options: RingOptions

    @property
    def schedule(self) -> Schedule:
        """Hops of this rank."""
        return schedule.build(self.mask, *self.options.place, self.options.layout)

    @property
    def gathering(self) -> Gathering:
        """Keys that this rank gathers by heads."""
        return schedule.gather(self.mask, *self.options.place, self.options.layout)

    def gathers_by_heads(self, q: Tensor, k: Tensor, transport: str | None) -> bool:
        """True if K/V are gathered by heads; over NCCL if the buffers are not too large. The same on every rank."""
        if transport in (None, "gloo", "copy_engine"):
            return transport == "copy_engine"
        keys, arriving, pairs = self.gathering.capacity, self.gathering.arriving, self.gathering.pairs
        return gather_bytes(k.shape, q.shape[2], keys, arriving, pairs, k.dtype) <= MAX_GATHER_BYTES

    def open(self, q: Tensor, k: Tensor, call: CallNumber) -> RingOfHops | HeadGather:
        """Return the algorithm that carries the call out. Opens the transport, on all ranks together."""
        group: dist.ProcessGroup | None = self.options.group
        channel = None if group is None or self.transport is None else open_transport(self.transport, group)
        rest = self.impl, self.softmax_scale, self.options.deterministic, call
        if isinstance(channel, PointToPoint) and self.gathers_by_heads(q, k, channel.name):
            channel = message_memory(channel, q.device)
        if channel is None or isinstance(channel, PointToPoint):
            hops = self.schedule
            cuda_graphs.hold(hops, q.device)
            return RingOfHops(hops, channel, *rest)
        return HeadGather(self.gathering, channel, *rest)


def plan_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | tuple[int, ...] | None,
    arguments: CallArguments,
    grad_flags: int = 0,
) -> CallPlan:
    """Check a call without communicating.

    Args:
        cu_seqlens: a tuple in the backward, with the values that the forward read.
        grad_flags: bit 0, 1, 2: q, k, v requires grad.
    Raises:
        ValueError, NotImplementedError: the rule, the value found, and the remedy.
    """
    causal, softmax_scale, left, right, options = arguments
    check_inputs(q, k, v)
    _check_pair(q, k, grad_flags)
    if not 0 < softmax_scale < float("inf"):
        raise ValueError(
            f"softmax_scale must be positive and finite, got {softmax_scale}; leave it out for "
            "head_dim ** -0.5, or give q the sign."
        )
    cp_size, _ = options.place
    bounds = document_bounds(cu_seqlens, q) if isinstance(cu_seqlens, Tensor) else cu_seqlens
    mask = SequenceMask(q.shape[1] * cp_size, causal, (left, right), bounds)
    check_layout(mask.seqlen, cp_size, options.layout, bounds)
    impl, reason = _choose_impl(options.impl, q, k, v)
    transport = choose_transport(options.transport, options.group, q.device)
    return CallPlan(mask, impl, reason, transport, softmax_scale, options)


def signature(q: Tensor, k: Tensor, plan: CallPlan) -> dict[str, object]:
    """Values of a call that all ranks must agree on."""
    mask, options = plan.mask, plan.options
    return {
        "q": list(q.shape),
        "k": list(k.shape),
        "dtype": str(q.dtype),
        "causal": mask.causal,
        "window_size": list(mask.window_size),
        "softmax_scale": plan.softmax_scale,
        "cu_seqlens": None if mask.cu_seqlens is None else _digest(mask.cu_seqlens),
        "layout": options.layout,
        "impl": options.impl,
        "transport": options.transport,
        "deterministic": options.deterministic,
    }


def _check_pair(q: Tensor, k: Tensor, grad_flags: int) -> None:
    """Raise ValueError unless q and k are sharded alike, and q, k and v require grad alike."""
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"k must have the local sequence length of q ({q.shape[1]}), got {k.shape[1]}; "
            "shard all three alike (key/value caches are not supported)."
        )
    if grad_flags not in (0, 7):
        wanted = [name for bit, name in enumerate("qkv") if grad_flags >> bit & 1]
        raise ValueError(
            f"q, k and v must all require grad or none of them, got {' and '.join(wanted)} alone; "
            "call requires_grad_() on the others or detach these."
        )


def _choose_impl(impl: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str]:
    """The implementation and the reason for it, after checking that it can take the inputs."""
    if impl == "auto":
        return choose_impl(q, k, v)
    if impl not in IMPLS:
        raise ValueError(f"impl must be 'auto' or one of {IMPLS}, got {impl!r}; 'auto' chooses by device and dtype.")
    implementation(impl, q, k, v)
    return impl, "asked for"


def _digest(values: tuple[int, ...]) -> str:
    """The bounds themselves if there are few of them, else their number and a checksum."""
    return str(values) if len(values) <= 8 else f"{len(values)} bounds, checksum {hash(values) & 0xFFFFFFFF:08x}"
