"""Plan of a call: its mask, kernel implementation, algorithm and transport, chosen before anything is sent.

plan_of         the plan of an equal call, or a new one by `plan_call`, which checks and chooses
CallPlan.open   once the ranks have agreed on the call: open the transport, and return the algorithm over it
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.attention import schedule
from ringflash.attention.gather_by_heads import GatherAttention
from ringflash.attention.inputs import CallInputs, CallShape, align_for_kernels, check_call
from ringflash.attention.local_attention import LocalAttention
from ringflash.attention.options import ULYSSES_ALGORITHMS, Algorithm, CallOptions
from ringflash.attention.schedule import KeyBlock
from ringflash.attention.sections import GatherSizes, choose_blocks
from ringflash.attention.ulysses import Ulysses, check_heads, kv_heads_by_rank
from ringflash.comm import cuda_graphs
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.group import HostSplit, known_split, store_of
from ringflash.comm.hosts import find_split, refusal_of
from ringflash.comm.transport import (
    TRANSPORTS,
    UNDECIDED,
    PointToPoint,
    Transport,
    Undecided,
    choose_transport,
    group_transport,
    message_transport,
    open_exchange_areas,
    open_gather_areas,
    open_transport,
    transport_name,
)
from ringflash.sequence.layout import DOCUMENT_LAYOUTS
from ringflash.sequence.mask import SequenceMask
from ringflash.sequence.paths import MASKS_KEPT
from ringflash_kernels.api import (
    IMPLS,
    KEYS_OF_RECORD,
    check_backward,
    choose_impl,
    implementation,
    rounds,
)

plan_cache: dict[tuple[Hashable, ...], CallPlan] = {}  # plans of calls on GPUs, by all that they depend on
_MAX_PLANS = 32  # of calls without documents; of those with documents, MASKS_KEPT


def plan_of(call: CallInputs) -> tuple[CallPlan, CallInputs]:
    """Return the plan of a call, and the call with copies of the tensors that kernels cannot read as they are.

    Equal calls on GPUs over several ranks share a plan. Plans are cached for tensors that kernels can read.
    """
    plan = _cached_plan(call)
    if plan is None:
        q, k, v = (align_for_kernels(x) for x in (call.q, call.k, call.v))
        call = call._replace(q=q, k=k, v=v)
        plan = _cached_plan(call)
    if plan is None:
        plan = plan_call(call)
        if UNDECIDED not in (plan.algorithm, plan.transport):
            _cache(call, plan)
    return plan, call


def _cached_plan(call: CallInputs) -> CallPlan | None:
    key = _cache_key(call)
    return None if key is None else plan_cache.get(key)


def _cache(call: CallInputs, plan: CallPlan) -> None:
    """Keep the plan of a call; drop plans of groups that have been destroyed, and the oldest one of too many."""
    key = _cache_key(call)
    if key is None:
        return
    for old in [old for old, cached in plan_cache.items() if store_of(cached.options.group) is None]:
        del plan_cache[old]
    alike = [old for old in plan_cache if (old[1] is None) == (call.cu_seqlens is None)]
    if len(alike) == (_MAX_PLANS if call.cu_seqlens is None else MASKS_KEPT):
        del plan_cache[alike[0]]
    plan_cache[key] = plan


def _cache_key(call: CallInputs) -> tuple[Hashable, ...] | None:
    """Return all that the plan of a call depends on, as a key of `plan_cache`; None if the call is always planned."""
    q, k, v, cu_seqlens, options, grad_flags = call
    group = options.group
    if q.device.type != "cuda" or group is None or isinstance(cu_seqlens, Tensor):
        return None
    if cu_seqlens is not None and cuda_graphs.capturing(q.device):  # `plan_call` refuses it
        return None
    forms = tuple([(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in (q, k, v)])
    return forms, cu_seqlens, options, grad_flags, known_split(group)


def plan_call(call: CallInputs) -> CallPlan:
    """Check a call without communicating.

    Raises:
        ValueError, NotImplementedError: the rule, the value found, and the remedy.
    """
    q, k, v, cu_seqlens, options, _ = call
    if cu_seqlens is not None and cuda_graphs.capturing(q.device):
        raise NotImplementedError(
            "cu_seqlens must be None while a CUDA graph is captured, got documents: every replay would use the bounds "
            "of the capture, whatever the batch; capture without attention, or call steps with documents eagerly."
        )
    mask = check_call(call)
    impl, reason = _choose_impl(options.impl, q, k, v)
    check_backward(impl, q.shape[-1], options.deterministic)
    algorithm, transport, why = _choose_algorithm(options, CallShape.of(q, k, v))
    return CallPlan(mask, impl, reason, algorithm, transport, options, transport_reason=why)


def _choose_impl(impl: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, str]:
    """Return the implementation and the reason for it, after checking that it can take the inputs."""
    if impl == "auto":
        return choose_impl(q, k, v)
    if impl not in IMPLS:
        raise ValueError(f"impl must be 'auto' or one of {IMPLS}, got {impl!r}; 'auto' chooses by device and dtype.")
    implementation(impl, q, k, v)
    return impl, "asked for"


def _choose_algorithm(
    options: CallOptions, shape: CallShape
) -> tuple[Algorithm | Undecided, str | Undecided | None, str]:
    """Return the algorithm and the transport that the argument `transport` selects, and why.

    Raises:
        ValueError: unknown name, or heads that cannot be divided.
        NotImplementedError: the group, the device or the layout does not support it.
    """
    name, group = options.transport, options.group
    if name not in ("auto", *TRANSPORTS, *ULYSSES_ALGORITHMS):
        raise ValueError(
            f"transport must be 'auto' or one of {(*TRANSPORTS, *map(str, ULYSSES_ALGORITHMS))}, got {name!r}; "
            "'auto' takes what the GPUs' links allow."
        )
    exchanges = name in ULYSSES_ALGORITHMS
    messages = message_transport(shape.device)
    transport = choose_transport(messages if exchanges else name, group, shape.device)
    if exchanges and group is not None:
        exchange = Algorithm(name)
        _check_exchange(exchange, split_of(exchange, group), options.layout, shape.num_heads)
        return exchange, UNDECIDED if (exchange, messages) == (Algorithm.ULYSSES, "nccl") else transport, "asked for"
    if name == "auto":
        algorithm, reason = _algorithm_of_auto(transport, options, shape)
        return algorithm, transport, reason
    return Algorithm.LOCAL if group is None else Algorithm.GATHER, transport, "asked for"


def _algorithm_of_auto(
    transport: str | Undecided | None, options: CallOptions, shape: CallShape
) -> tuple[Algorithm | Undecided, str]:
    """Return the algorithm of "auto" over a transport, and why: BY_HOST over messages if hosts and heads allow it."""
    group = options.group
    if group is None:
        return Algorithm.LOCAL, "one process"
    if transport is UNDECIDED:
        return UNDECIDED, "decided by the first call"
    if transport == "copy_engine":
        return Algorithm.GATHER, "all GPUs have peer access"
    if options.layout in DOCUMENT_LAYOUTS:
        return Algorithm.GATHER, f"layout {options.layout!r}, whose chunks differ in size"
    split = known_split(group)
    if split is None:
        return Algorithm.GATHER, refusal_of(group) or "hosts are not known"
    if split.num_hosts == 1 or split.num_gpus == 1:
        return Algorithm.GATHER, f"{split}: heads are exchanged only between several GPUs on each of several hosts"
    if shape.num_heads % split.num_gpus:
        return Algorithm.GATHER, f"{split}: {shape.num_heads} query heads cannot be divided by {split.num_gpus}"
    return Algorithm.BY_HOST, str(split)


def _check_exchange(algorithm: Algorithm, split: HostSplit | None, layout: str, num_heads: int) -> None:
    """Raise if heads cannot be exchanged; `CallPlan.open` checks them if the hosts are not known yet."""
    if layout in DOCUMENT_LAYOUTS:
        raise NotImplementedError(
            f"layout must be 'zigzag', 'striped' or 'contiguous' with transport '{algorithm}', got {layout!r}, whose "
            "chunks differ in size; use transport='auto', or layout='zigzag'."
        )
    if split is not None:
        check_heads(num_heads, split.num_gpus, algorithm)


def split_of(algorithm: Algorithm | Undecided, group: dist.ProcessGroup | None) -> HostSplit | None:
    """Return the hosts within which an algorithm exchanges heads; None if it exchanges none or they are unknown."""
    if group is None or algorithm not in ULYSSES_ALGORITHMS:
        return None
    return HostSplit(1, group.size()) if algorithm is Algorithm.ULYSSES else known_split(group)


@dataclass(frozen=True)
class CallPlan:
    """A call that passed its checks, and how it will be carried out.

    Args:
        algorithm: UNDECIDED before the first call of a group on GPUs.
        transport: transport of K/V between the ranks that share the sequence; for BY_HOST, between hosts. None if
            nothing is sent. UNDECIDED in two cases: before the first call of a group with transport="auto" on GPUs,
            and for ULYSSES on GPUs, where `open_exchange_areas` tries the copy engine and otherwise takes NCCL.
        members: ranks of the group that the sequence is divided among; empty: all.
    """

    mask: SequenceMask
    impl: str
    impl_reason: str
    algorithm: Algorithm | Undecided
    transport: str | Undecided | None
    options: CallOptions
    members: tuple[int, ...] = ()
    transport_reason: str = ""
    _blocks: dict[CallShape, tuple[KeyBlock, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    signatures: dict[tuple[int, ...], dict[str, object]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def size_and_rank(self) -> tuple[int, int]:
        """Number of ranks that share the sequence, and the index of this rank among them."""
        size, rank = self.options.size_and_rank
        return (len(self.members), self.members.index(rank)) if self.members else (size, rank)

    @cached_property
    def all_keys(self) -> KeyBlock:
        """Keys that this rank gathers by heads, as a single block."""
        return schedule.plan_single_block(self.mask, *self.size_and_rank, self.options.layout, self.keys_per_line)

    @cached_property
    def keys_per_line(self) -> int:
        """Keys of a line of K/V (`KVFormat`): 128 if an FP8 call sends records, otherwise 1.

        If chunks do not consist of whole records, K/V travel in their own dtype, and each rank rounds what it gathers.
        """
        layout, cp_size = self.options.layout, self.size_and_rank[0]
        fits = rounds(self.impl) and schedule.chunks_are_multiples(self.mask, cp_size, layout, KEYS_OF_RECORD)
        return KEYS_OF_RECORD if fits else 1

    def travelling_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which K and V of this dtype travel."""
        return torch.uint8 if self.keys_per_line > 1 else dtype

    def key_blocks(self, shape: CallShape) -> tuple[KeyBlock, ...]:
        """Return the blocks of keys to all-gather. Block i covers the same ring distances on every rank."""
        if shape not in self._blocks:
            self._blocks[shape] = self._plan_blocks(shape)
        return self._blocks[shape]

    def _plan_blocks(self, shape: CallShape) -> tuple[KeyBlock, ...]:
        layout, dtype = self.options.layout, self.travelling_dtype(shape.dtype)
        num_distances = len(schedule.active_distances(self.mask, self.size_and_rank[0], layout))
        sizes = GatherSizes.of([self.all_keys], shape.kv, shape.num_heads, dtype)
        of_blocks = choose_blocks(sizes, num_distances, self.transport)
        return schedule.plan_blocks(self.mask, *self.size_and_rank, layout, of_blocks, self.keys_per_line)

    def open(self, shape: CallShape, call: CallNumber) -> LocalAttention | GatherAttention | Ulysses:
        """Open the transport, a collective call, and return the algorithm that runs the call."""
        plan = self._decide(shape) if self.algorithm is UNDECIDED else self
        if plan.algorithm in ULYSSES_ALGORITHMS:
            return plan._open_ulysses(shape, call)
        return plan._open_ring(plan._open_transport(), shape, call)

    def between_hosts(self, shape: CallShape) -> tuple[CallPlan, CallShape] | None:
        """Return the plan and the shape of attention between hosts.

        None if the call exchanges no heads, or its hosts are not known yet.
        """
        split = split_of(self.algorithm, self.options.group)
        return None if split is None else self._between(split, shape)

    def _between(self, split: HostSplit, shape: CallShape) -> tuple[CallPlan, CallShape]:
        """Return plan and shape of attention between hosts: over all rows of a host, for a share of the heads."""
        transport = message_transport(shape.device) if split.num_hosts > 1 else None
        members = split.rail_of(self.options.size_and_rank[1])
        ring = Algorithm.LOCAL if transport is None else Algorithm.GATHER
        rail = replace(self, algorithm=ring, transport=transport, members=members)
        kv_heads = kv_heads_by_rank(split.num_gpus, shape.num_heads, shape.kv.heads)
        return rail, shape.on_host(split.num_gpus, len(kv_heads))

    def _decide(self, shape: CallShape) -> CallPlan:
        """Return the plan after the ranks of the group have compared their hosts, a collective call."""
        group = self.options.group
        assert group is not None
        name = transport_name(open_transport(UNDECIDED, group))
        if name == "nccl":
            with suppress(NotImplementedError):
                find_split(group)
        algorithm, reason = _algorithm_of_auto(name, self.options, shape)
        return replace(self, algorithm=algorithm, transport=name, transport_reason=reason)

    def _open_ulysses(self, shape: CallShape, call: CallNumber) -> LocalAttention | GatherAttention | Ulysses:
        """Open the areas of this rank's host and the transport of its rail, and return the algorithm over both.

        Raises:
            ValueError: the GPUs of a host cannot divide the query heads.
            NotImplementedError: the hosts differ in their numbers of ranks, or are not numbered host by host.
        """
        group = self.options.group
        assert group is not None and isinstance(self.algorithm, Algorithm)
        split = split_of(self.algorithm, group) or find_split(group)
        check_heads(shape.num_heads, split.num_gpus, self.algorithm)  # `plan_call` cannot check them without the hosts
        rail, shape = self._between(split, shape)
        if split.num_gpus == 1:
            return rail._open_ring(rail._open_transport(), shape, call)
        areas = open_exchange_areas(group, split, shape.device)
        transport, members = rail._open_transport(), split.host_of(group.rank())
        counted = group_transport(areas if transport is None else transport)
        attention = rail._open_ring(transport, shape, call)
        return Ulysses(attention, areas, members, counted, self.options.layout, call)

    def _open_transport(self) -> Transport | None:
        """Open the transport of the ring, once per call: its messages are counted for `TrackedCall`."""
        group = self.options.group
        return None if group is None or self.transport is None else open_transport(self.transport, group)

    def _open_ring(
        self, transport: Transport | None, shape: CallShape, call: CallNumber
    ) -> LocalAttention | GatherAttention:
        """Return the algorithm over an open transport, between `members` only; None for a single process."""
        if isinstance(transport, PointToPoint) and self.members:
            transport = transport.among(self.members)
        options = self.options
        kernel_options = self.impl, options.scale, options.deterministic
        if transport is not None:
            areas = open_gather_areas(transport, shape.device) if isinstance(transport, PointToPoint) else transport
            fp8 = self.keys_per_line > 1
            return GatherAttention(self.key_blocks(shape), areas, *kernel_options, call, fp8)
        own = schedule.plan_own_keys(self.mask, options.layout)
        cuda_graphs.keep_if_captured(own, shape.device)
        return LocalAttention(own, *kernel_options)


def signature(q: Tensor, k: Tensor, plan: CallPlan, **others: int) -> dict[str, object]:
    """Return `_signature` and others; equal calls of a plan share one dictionary."""
    key = tuple(others.values())
    if key not in plan.signatures:
        plan.signatures[key] = {**_signature(q, k, plan), **others}
    return plan.signatures[key]


def _signature(q: Tensor, k: Tensor, plan: CallPlan) -> dict[str, object]:
    """Return the values of a call that must be equal on all ranks, in types that JSON can write."""
    mask, options = plan.mask, plan.options
    return {
        "q": list(q.shape),
        "k": list(k.shape),
        "dtype": str(q.dtype),
        "device": q.device.type,
        "causal": mask.causal,
        "window_size": list(mask.window_size),
        "softmax_scale": options.softmax_scale,
        "cu_seqlens": None if mask.documents is None else mask.documents.summary,
        "layout": options.layout,
        "impl": options.impl,
        "kernel": plan.impl,  # "auto" chooses by the packages of a rank
        "transport": options.transport,
        "deterministic": options.deterministic,
        "hosts": str(split_of(plan.algorithm, options.group)),
    }
