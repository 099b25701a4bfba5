"""A checked call: its mask, kernel implementation, transport and algorithm, chosen before anything is sent."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.attention import schedule
from ringflash.attention.gather_by_heads import HeadGather
from ringflash.attention.inputs import document_bounds
from ringflash.attention.options import RingOptions
from ringflash.attention.ring_of_hops import RingOfHops
from ringflash.attention.schedule import Gathering, Schedule
from ringflash.attention.sections import choose_blocks
from ringflash.attention.ulysses import Ulysses, check_heads, shared_kv_heads
from ringflash.comm import cuda_graphs
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.group import HostSplit, known_split
from ringflash.comm.hosts import find_split, refusal_of
from ringflash.comm.transport import (
    HEAD_EXCHANGES,
    UNDECIDED,
    PointToPoint,
    Transport,
    choose_transport,
    exchange_memory,
    message_memory,
    message_transport,
    open_transport,
    transport_name,
    whole_transport,
)
from ringflash.sequence.layout import check_layout
from ringflash.sequence.mask import SequenceMask, digest
from ringflash_kernels.api import (
    IMPLS,
    KEYS_OF_RECORD,
    check_fp8_backward,
    check_inputs,
    choose_impl,
    implementation,
    rounds,
)


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
    members: tuple[int, ...] = ()  # ranks of the group that the sequence is divided among; empty: all
    transport_reason: str = ""

    @cached_property
    def size_and_rank(self) -> tuple[int, int]:
        """Number of ranks that share the sequence, and the index of this rank among them."""
        size, rank = self.options.size_and_rank
        return (len(self.members), self.members.index(rank)) if self.members else (size, rank)

    @property
    def schedule(self) -> Schedule:
        """Hops of this rank."""
        return schedule.build(self.mask, *self.size_and_rank, self.options.layout)

    @cached_property
    def gathering(self) -> Gathering:
        """Keys that this rank gathers by heads."""
        return schedule.plan_gather(self.mask, *self.size_and_rank, self.options.layout, self.keys_of_line)

    @cached_property
    def keys_of_line(self) -> int:
        """Keys of a line: 128 if an FP8 call sends records, otherwise 1.

        If chunks do not consist of whole records, K/V travel in their own dtype, and each rank rounds what it gathers.
        """
        layout, cp_size = self.options.layout, self.size_and_rank[0]
        fits = rounds(self.impl) and schedule.chunks_are_multiples(self.mask, cp_size, layout, KEYS_OF_RECORD)
        return KEYS_OF_RECORD if fits else 1

    def travelling_dtype(self, k: Tensor) -> torch.dtype:
        """Dtype in which K and V travel."""
        return torch.uint8 if self.keys_of_line > 1 else k.dtype

    def key_blocks(self, q: Tensor, k: Tensor, transport: str | None) -> tuple[Gathering, ...]:
        """Return the blocks of keys that this rank gathers by heads, of equal distances on all ranks; () for hops."""
        if not self.gathers_by_heads(transport):
            return ()
        whole, layout, dtype = self.gathering, self.options.layout, self.travelling_dtype(k)
        steps = len(schedule.active_steps(self.mask, self.size_and_rank[0], layout))
        limits = whole.capacity, whole.returned_rows, whole.pairs
        sizes = choose_blocks(k.shape, q.shape[2], *limits, steps, dtype, transport)
        return schedule.plan_blocks(self.mask, *self.size_and_rank, layout, sizes, self.keys_of_line)

    def gathers_by_heads(self, transport: str | None) -> bool:
        """True on GPUs, False on CPUs and for a single process."""
        return transport not in (None, "gloo")

    def open(self, q: Tensor, k: Tensor, call: CallNumber) -> RingOfHops | HeadGather | Ulysses:
        """Open the transport, a collective call, and return the algorithm that runs the call."""
        group: dist.ProcessGroup | None = self.options.group
        plan = self
        if group is not None and self.transport == UNDECIDED:
            name = transport_name(open_transport(UNDECIDED, group))
            if name == "nccl":
                with suppress(NotImplementedError):
                    find_split(group)
            name, reason = _prefer_hosts(name, self.options, q)
            plan = replace(self, transport=name, transport_reason=reason)
        if group is not None and plan.transport in HEAD_EXCHANGES:
            return plan._open_ulysses(group, q, k, call)
        return plan._open_ring(plan._channel(group), q, k, call)

    def between_hosts(self, q: Tensor, k: Tensor) -> tuple[CallPlan, Tensor, Tensor] | None:
        """Return the plan of attention between hosts, and its q and k on the meta device.

        None if the call exchanges no heads, or its hosts are not known yet.
        """
        split = split_of(self.transport, self.options.group)
        if split is None:
            return None
        rail = self.rail(split, message_transport(q.device))
        kv_heads = shared_kv_heads(split.num_gpus, q.shape[2], k.shape[2])
        q, k = (
            x.new_empty(x.shape[0], x.shape[1] * split.num_gpus, heads // split.num_gpus, x.shape[3], device="meta")
            for x, heads in ((q, q.shape[2]), (k, len(kv_heads)))
        )
        return rail, q, k

    def rail(self, split: HostSplit, transport: str) -> CallPlan:
        """Return the plan of attention between hosts, whose tensors have all rows of a host."""
        members = split.rail_of(self.options.size_and_rank[1])
        return replace(self, transport=transport if split.num_hosts > 1 else None, members=members)

    def _open_ulysses(
        self, group: dist.ProcessGroup, q: Tensor, k: Tensor, call: CallNumber
    ) -> RingOfHops | HeadGather | Ulysses:
        assert self.transport is not None
        split = split_of(self.transport, group) or find_split(group)
        check_heads(q.shape[2], split.num_gpus, self.transport)  # `plan_call` cannot if the split is found only here
        rail = self.rail(split, message_transport(q.device))
        if split.num_gpus == 1:
            return rail._open_ring(rail._channel(group), q, k, call)
        memory = exchange_memory(group, split, q.device)
        channel, members = rail._channel(group), split.host_of(group.rank())
        counted = whole_transport(memory if channel is None else channel)
        return Ulysses(
            lambda q, k: rail._open_ring(channel, q, k, call), memory, members, counted, self.options.layout, call
        )

    def _channel(self, group: dist.ProcessGroup | None) -> Transport | None:
        """Open the transport of the ring, once per call: its messages are counted for `Posted`."""
        return None if group is None or self.transport is None else open_transport(self.transport, group)

    def _open_ring(self, channel: Transport | None, q: Tensor, k: Tensor, call: CallNumber) -> RingOfHops | HeadGather:
        if isinstance(channel, PointToPoint) and self.members:
            channel = channel.among(self.members)
        blocks = self.key_blocks(q, k, transport_name(channel))
        how = self.impl, self.softmax_scale, self.options.deterministic
        if channel is not None and blocks:
            memory = message_memory(channel, q.device) if isinstance(channel, PointToPoint) else channel
            return HeadGather(blocks, memory, *how, call, self.options.fp8_backward, self.keys_of_line > 1)
        assert channel is None or isinstance(channel, PointToPoint)
        hops = self.schedule
        cuda_graphs.keep_if_captured(hops, q.device)
        return RingOfHops(hops, channel, *how, self.options.fp8_backward)


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
            "head_dim ** -0.5, or negate q for a negative scale."
        )
    cp_size, _ = options.size_and_rank
    bounds = document_bounds(cu_seqlens, q) if isinstance(cu_seqlens, Tensor) else cu_seqlens
    mask = SequenceMask(q.shape[1] * cp_size, causal, (left, right), bounds)
    check_layout(mask.seqlen, cp_size, options.layout, bounds)
    impl, reason = _choose_impl(options.impl, q, k, v)
    check_fp8_backward(impl, options.fp8_backward, q.shape[-1], options.deterministic)
    transport, why = choose_transport(options.transport, options.group, q.device), "asked for"
    if options.transport == "auto":
        transport, why = _prefer_hosts(transport, options, q)
    if transport in HEAD_EXCHANGES:
        _check_exchange(transport, split_of(transport, options.group), options.layout, q)
    return CallPlan(mask, impl, reason, transport, softmax_scale, options, transport_reason=why)


def signature(q: Tensor, k: Tensor, plan: CallPlan) -> dict[str, object]:
    """Values of a call that all ranks must agree on."""
    mask, options = plan.mask, plan.options
    return {
        "q": list(q.shape),
        "k": list(k.shape),
        "dtype": str(q.dtype),
        "device": q.device.type,
        "causal": mask.causal,
        "window_size": list(mask.window_size),
        "softmax_scale": plan.softmax_scale,
        "cu_seqlens": None if mask.cu_seqlens is None else digest(mask.cu_seqlens),
        "layout": options.layout,
        "impl": options.impl,
        "transport": options.transport,
        "deterministic": options.deterministic,
        "fp8_backward": options.fp8_backward,
        "hosts": str(split_of(plan.transport, options.group)),
    }


def split_of(transport: str | None, group: dist.ProcessGroup | None) -> HostSplit | None:
    """Return the hosts within which a transport exchanges heads; None if it does not, or they are not known yet."""
    if group is None or transport not in HEAD_EXCHANGES:
        return None
    return HostSplit(1, group.size()) if transport == "ulysses" else known_split(group)


def _prefer_hosts(transport: str | None, options: RingOptions, q: Tensor) -> tuple[str | None, str]:
    """Return the transport of "auto", and why: "by_host" in place of messages if hosts and heads allow it."""
    group = options.group
    if group is None:
        return transport, "one process"
    if transport in ("copy_engine", UNDECIDED):
        return transport, "all GPUs have peer access" if transport == "copy_engine" else "decided by the first call"
    if options.layout == "balanced":
        return transport, "layout 'balanced' sends few keys between hosts anyway"
    split = known_split(group)
    if split is None:
        return transport, refusal_of(group) or "hosts are not known"
    if split.num_hosts == 1 or split.num_gpus == 1:
        return transport, f"{split}: heads are exchanged only between several GPUs on each of several hosts"
    if q.shape[2] % split.num_gpus:
        return transport, f"{split}: {q.shape[2]} query heads cannot be divided by {split.num_gpus}"
    return "by_host", str(split)


def _check_exchange(transport: str, split: HostSplit | None, layout: str, q: Tensor) -> None:
    """Raise if heads cannot be exchanged; `CallPlan.open` checks them if the hosts are not known yet."""
    if layout == "balanced":
        raise NotImplementedError(
            f"layout must be 'zigzag', 'striped' or 'contiguous' with transport {transport!r}, got 'balanced', which "
            "sends few keys between hosts anyway; use transport='auto', or layout='zigzag'."
        )
    if split is not None:
        check_heads(q.shape[2], split.num_gpus, transport)


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
            f"q, k and v must all require grad or none of them, got only {' and '.join(wanted)}; "
            "call requires_grad_() on the others or detach these."
        )


def _choose_impl(impl: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str]:
    """Return the implementation and the reason for it, after checking that it can take the inputs."""
    if impl == "auto":
        return choose_impl(q, k, v)
    if impl not in IMPLS:
        raise ValueError(f"impl must be 'auto' or one of {IMPLS}, got {impl!r}; 'auto' chooses by device and dtype.")
    implementation(impl, q, k, v)
    return impl, "asked for"
