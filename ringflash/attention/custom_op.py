"""The registered operators: what autograd, torch.compile and activation checkpointing see.

    ringflash::ring_attention            -> out, lse, record
    ringflash::ring_attention_backward   -> dq, dk, dv

A selective-checkpoint policy that keeps the outputs of `ringflash::ring_attention` never recomputes
attention, and never runs the forward ring again.

`record` tells the backward what its forward was: the number of the call in its group, then the document bounds that
the forward validated. It is a tensor of its own on the CPU, so that whoever writes to `cu_seqlens` in between, such as
a loader that refills its buffer, does not change the mask of the backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any, TypeVar, get_type_hints
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ringflash.attention import schedule
from ringflash.attention.gather_by_heads import Headwise, buffer_bytes
from ringflash.attention.ring_of_hops import Ring
from ringflash.attention.schedule import Gathering
from ringflash.comm import agreement, call_numbers, cuda_graphs
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.transport import PointToPoint, choose_transport, message_memory, open_transport
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.api import IMPLS, check_inputs, choose_impl, device_guard, implementation, state_dtype

_Result = TypeVar("_Result")

MOST_BUFFER_BYTES = 12 << 30  # over NCCL by heads; beyond, a ring of hops, whose buffers grow with a rank's keys alone


@dataclass(frozen=True)
class Options:
    """The arguments of one call that are not tensors, as they pass through the operator's schema."""

    group_name: str  # "" for a single process
    causal: bool
    softmax_scale: float
    window_left: int
    window_right: int
    layout: str
    impl: str
    transport: str
    deterministic: bool


def _on_their_device(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """`function` with its tensors' GPU as the current one: streams, events and NCCL go by that."""

    @wraps(function)
    def on_device(*inputs: Any) -> _Result:
        with device_guard(inputs[0].device):
            return function(*inputs)

    return on_device


_turns: defaultdict[torch.device, Lock] = defaultdict(Lock)


@contextmanager
def _one_thread(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[RuntimeError | None]:
    """A call that sends: such calls share their buffers, and are in one order on all ranks.

    Yields:
        error: what to raise where another thread is in such a call.
    """
    if group is None:
        yield None
    elif _turns[device].acquire(blocking=False):
        try:
            yield None
        finally:
            _turns[device].release()
    else:
        yield RuntimeError(
            "ring attention must be called by one thread of a process at a time, got a call while another thread is in "
            "one; leave all of them to one thread."
        )


_last_stream: dict[torch.device, torch.cuda.Stream] = {}  # of the last call that sent


@contextmanager
def _in_stream_order(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Order a call after the previous one if that was issued on another stream: both use the same buffers.

    Calls that a CUDA graph captures are ordered by the graph, and by whoever replays it.
    """
    if group is not None and device.type == "cuda" and not cuda_graphs.capturing(device):
        stream = torch.cuda.current_stream(device.index)
        last = _last_stream.get(device)
        if last is not None and last != stream:
            stream.wait_stream(last)
        _last_stream[device] = stream
    yield


@_on_their_device
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    group_name: str,
    causal: bool,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    layout: str,
    impl: str,
    transport: str,
    deterministic: bool,
    grad_flags: int,
    return_lse: bool,
    v_head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of the local queries over the global sequence.

    Args:
        grad_flags: a bit for each of q, k, v.
        v_head_dim: of the caller's v, before it was padded to the head_dim of k.
    """
    options = Options(
        group_name, causal, softmax_scale, window_left, window_right, layout, impl, transport, deterministic
    )
    group = _group(group_name)
    with _one_thread(group, q.device) as busy:
        call_numbers.check(group, q.device)
        call = call_numbers.next_number(group)
        (q, k, v), plan, error = _prepared((q, k, v), cu_seqlens, options, grad_flags, busy)
        rest = {"requires_grad": grad_flags, "return_lse": return_lse, "v_head_dim": v_head_dim}
        signature = {} if plan is None else {**_signature(q, k, plan), **rest}
        agreement.agree(group, signature, error, q.device, call=call)
        assert plan is not None
        with _carried_out(plan, group, q, k, call) as work:
            out, lse = work.forward(q, k, v)
            return out, lse, _record(call, plan.mask.cu_seqlens)


def _record(call: CallNumber, bounds: tuple[int, ...] | None) -> Tensor:
    return torch.tensor((call.number, *(bounds or ())), dtype=torch.int64)


ring_attention = torch.library.custom_op("ringflash::ring_attention", _forward, mutates_args=())


@ring_attention.register_fake
def _(q, k, v, cu_seqlens, group_name, *options):  # type: ignore[no-untyped-def]
    check_inputs(q, k, v)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=state_dtype(q.dtype))
    num_bounds = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    return q.new_empty(q.shape), lse, torch.empty(1 + num_bounds, dtype=torch.int64, device="cpu")


@_on_their_device
def _gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    record: Tensor,
    group_name: str,
    causal: bool,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    layout: str,
    impl: str,
    transport: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the call of `ring_attention` that returned this `record`, under the mask that it had."""
    options = Options(
        group_name, causal, softmax_scale, window_left, window_right, layout, impl, transport, deterministic
    )
    group = _group(group_name)
    number, *bounds = record.tolist()
    with _one_thread(group, q.device) as busy:
        call_numbers.check(group, q.device)
        call = call_numbers.next_number(group, number)
        (q, k, v, dout), plan, error = _prepared((q, k, v, dout), tuple(bounds) or None, options, 0, busy)
        agreement.agree_on_backward(group, call, error, q.device)
        assert plan is not None
        with _carried_out(plan, group, q, k, call) as work:
            return work.backward(dout, dlse, q, k, v, out, lse)


ring_attention_backward = torch.library.custom_op("ringflash::ring_attention_backward", _gradients, mutates_args=())


@ring_attention_backward.register_fake
def _(dout, dlse, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _prepared(
    tensors: tuple[Tensor, ...],
    cu_seqlens: Tensor | tuple[int, ...] | None,
    options: Options,
    grad_flags: int,
    busy: RuntimeError | None,
) -> tuple[tuple[Tensor, ...], Plan | None, Exception | None]:
    """q, k, v and any other tensors as kernels can read them, with a plan; or an error to be shared with all ranks."""
    if busy is not None:
        return tensors, None, busy
    try:
        addressable = tuple(_addressable(x) for x in tensors)
        q, k, v, *_ = addressable
        return addressable, _plan(q, k, v, cu_seqlens, options, grad_flags), None
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return tensors, None, error


@contextmanager
def _carried_out(
    plan: Plan, group: dist.ProcessGroup | None, q: Tensor, k: Tensor, call: CallNumber
) -> Iterator[Ring | Headwise]:
    """A call that all ranks agreed on: opened, and remembered if it ends with an error."""
    with agreement.under_way(group) as posted, _no_autocast(q.device.type), _in_stream_order(group, q.device):
        work = plan.open(group, q, k, call)
        posted.count_by(work.num_posted)
        yield work


def _no_autocast(device_type: str) -> AbstractContextManager[None]:
    """Eager products of an implementation are in the dtype that it chose."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, _, *options, _, return_lse, _ = inputs
    out, lse, record = output
    ctx.save_for_backward(q, k, v, out, lse, record)
    ctx.options, ctx.return_lse = options, return_lse
    ctx.mark_non_differentiable(*((record,) if return_lse else (lse, record)))


def _backward(ctx, dout, dlse, _):  # type: ignore[no-untyped-def]
    q, k, v, out, lse, record = ctx.saved_tensors
    dlse = dlse if ctx.return_lse else None
    plain = _unobserved(dout, q, k, v) and _as_declared(None, *ctx.options)
    differentiate = _gradients if plain else ring_attention_backward
    grads = differentiate(dout, dlse, q, k, v, out, lse, record, *ctx.options)
    return *grads, *[None] * (len(ctx.options) + 4)


ring_attention.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The operator and its gradient, as `register_autograd` has them."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        plain = _unobserved(*inputs[:3]) and _as_declared(*inputs[3:])
        output = (_forward if plain else ring_attention)(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`ring_attention`, at less cost to the host: torch takes some 200 µs to get from an operator to its gradient."""
    out, lse, _ = ring_attention(*inputs) if torch.compiler.is_compiling() else _Attention.apply(*inputs)
    return out, lse


def _unobserved(*tensors: Tensor) -> bool:
    """Whether nobody would see the operator pass by, which torch takes 60 µs to dispatch.

    Seen by: modes (wrapped layers, selective checkpoints, counters of FLOPs, fake tensors), profilers, subclasses of
    Tensor, tensors without data (meta), torch.compile, which would else compile what is in it, batches of gradients,
    and autograd where gradients are to have gradients, which it refuses.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
        and torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        and not torch.autograd._profiler_enabled()
        and not torch.is_grad_enabled()
        and all(type(x) in (Tensor, torch.nn.Parameter) and torch._C._has_storage(x) for x in tensors)
        and not all(x.is_meta for x in tensors)
    )


def _as_declared(cu_seqlens: object, *options: object) -> bool:
    """Whether options are neither to be converted, as numpy's integers, nor to be refused: the operator does both."""
    return (cu_seqlens is None or isinstance(cu_seqlens, Tensor)) and all(
        type(x) is kind for x, kind in zip(options, _KINDS, strict=False)
    )


_TENSORS = ("q", "k", "v", "cu_seqlens", "return")
_KINDS = [kind for name, kind in get_type_hints(_forward).items() if name not in _TENSORS]


@dataclass(frozen=True)
class Plan:
    """A call that passed its checks, and how it will be carried out."""

    mask: SequenceMask
    cp_size: int
    cp_rank: int
    impl: str
    impl_reason: str
    transport: str | None
    options: Options

    @property
    def schedule(self) -> schedule.Schedule:
        """This rank's hops."""
        return schedule.build(self.mask, self.cp_size, self.cp_rank, self.options.layout)

    @property
    def gathering(self) -> Gathering:
        """The keys that this rank gathers by heads."""
        return schedule.gather(self.mask, self.cp_size, self.cp_rank, self.options.layout)

    def by_heads(self, q: Tensor, k: Tensor, transport: str | None) -> bool:
        """Whether keys are gathered by heads; over NCCL as far as memory goes. The same on every rank."""
        if transport in (None, "gloo", "copy_engine"):
            return transport == "copy_engine"
        keys, arriving, pairs = self.gathering.capacity, self.gathering.arriving, self.gathering.pairs
        return buffer_bytes(k.shape, q.shape[2], keys, arriving, pairs, k.dtype) <= MOST_BUFFER_BYTES

    def open(self, group: dist.ProcessGroup | None, q: Tensor, k: Tensor, call: CallNumber) -> Ring | Headwise:
        """What carries the call out; opens the transport, on all ranks together."""
        channel = None if group is None or self.transport is None else open_transport(self.transport, group)
        rest = self.impl, self.options.softmax_scale, self.options.deterministic, call
        if isinstance(channel, PointToPoint) and self.by_heads(q, k, channel.name):
            channel = message_memory(channel, q.device)
        if channel is None or isinstance(channel, PointToPoint):
            cuda_graphs.hold(self.schedule, q.device)
            return Ring(self.schedule, channel, *rest)
        return Headwise(self.gathering, channel, *rest)


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | tuple[int, ...] | None,
    options: Options,
    grad_flags: int,
) -> Plan:
    """Check a call without communicating.

    Args:
        cu_seqlens: a tuple in the backward, as the forward read it.
    Raises:
        ValueError, NotImplementedError: what must hold, what was got, what to do.
    """
    check_inputs(q, k, v)
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
    if not 0 < options.softmax_scale < float("inf"):
        raise ValueError(
            f"softmax_scale must be positive and finite, got {options.softmax_scale}; leave it out for "
            "head_dim ** -0.5, or give q the sign."
        )
    group = _group(options.group_name)
    cp_size, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
    mask = SequenceMask(
        q.shape[1] * cp_size,
        options.causal,
        (options.window_left, options.window_right),
        host_values(cu_seqlens, q) if isinstance(cu_seqlens, Tensor) else cu_seqlens,
    )
    schedule.active_steps(mask, cp_size, options.layout)  # raises where the layout cannot cut the sequence
    impl, reason = choose_impl(q, k, v) if options.impl == "auto" else (options.impl, "asked for")
    if impl not in IMPLS:
        raise ValueError(f"impl must be 'auto' or one of {IMPLS}, got {impl!r}; 'auto' chooses by device and dtype.")
    implementation(impl, q, k, v)
    transport = choose_transport(options.transport, group, q.device)
    return Plan(mask, cp_size, cp_rank, impl, reason, transport, options)


def _signature(q: Tensor, k: Tensor, plan: Plan) -> dict[str, object]:
    """What all ranks must agree on."""
    options, bounds = plan.options, plan.mask.cu_seqlens
    return {
        "q": list(q.shape),
        "k": list(k.shape),
        "dtype": str(q.dtype),
        "causal": options.causal,
        "window_size": [options.window_left, options.window_right],
        "softmax_scale": options.softmax_scale,
        "cu_seqlens": None if bounds is None else _digest(bounds),
        "layout": options.layout,
        "impl": options.impl,
        "transport": options.transport,
        "deterministic": options.deterministic,
    }


def _digest(values: tuple[int, ...]) -> str:
    """The bounds themselves where they are few, else their number and a checksum."""
    return str(values) if len(values) <= 8 else f"{len(values)} bounds, checksum {hash(values) & 0xFFFFFFFF:08x}"


def host_values(cu_seqlens: Tensor, q: Tensor) -> tuple[int, ...]:
    """cu_seqlens as integers, once its form is right."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens must be 1-D int32, got {cu_seqlens.dim()}-D {cu_seqlens.dtype}; "
            "pass torch.tensor([0, ...], dtype=torch.int32)."
        )
    if q.shape[0] != 1:
        raise ValueError(f"batch must be 1 with cu_seqlens, got {q.shape[0]}; pack the documents into one sequence.")
    return _values(cu_seqlens)


_read: dict[int, tuple[ref[Tensor], int, tuple[int, ...]]] = {}  # id: the tensor, its version, its values


def _values(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Values of a tensor; a device tensor is read once, not once a layer, so that layers do not synchronise."""
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():  # which does not say when it is written to
        return tuple(cu_seqlens.tolist())
    known = _read.get(id(cu_seqlens))
    if known is None or known[0]() is not cu_seqlens or known[1] != cu_seqlens._version:
        _read.clear()
        known = _read[id(cu_seqlens)] = (ref(cu_seqlens), cu_seqlens._version, tuple(cu_seqlens.tolist()))
    return known[2]


def _group(name: str) -> dist.ProcessGroup | None:
    return _resolve_process_group(name) if name else None  # type: ignore[arg-type]


def _addressable(x: Tensor) -> Tensor:
    """x itself where kernels can read it in place: unit stride along head_dim, others multiples of 16 bytes."""
    if x.dim() != 4:
        return x  # refused later
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    aligned = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)
    in_place = x.stride(-1) == 1 and aligned and x.data_ptr() % 16 == 0
    return x if in_place else x.clone(memory_format=torch.contiguous_format)  # contiguous() moves no contiguous view
