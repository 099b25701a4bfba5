"""Registered operators: attention as autograd, torch.compile and activation checkpointing see it.

    ringflash::ring_attention            -> out, lse, row_max, record
    ringflash::ring_attention_backward   -> dq, dk, dv

A selective-checkpoint policy that keeps the outputs of `ringflash::ring_attention` never recomputes
attention, and never runs the forward ring again.

`row_max` is an upper bound on the scores of each row, which an FP8 backward needs; for other backwards it is empty.

`record` is an int64 tensor on the CPU that carries two things from the forward to its backward: the number of the
forward in its group, and the document bounds that the forward read. The backward does not read `cu_seqlens` again, so
a write to it in between, for example by a loader that refills its buffer, does not change the mask of the backward.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import chain
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ringflash.attention.inputs import BackwardInputs, CallInputs, CallShape
from ringflash.attention.options import CallOptions
from ringflash.attention.plan import signature
from ringflash.attention.ring_call import RingCall
from ringflash.comm import agreement
from ringflash.sequence.mask import Documents
from ringflash_kernels.api import check_inputs, device_guard, needs_row_max, out_shape, state_dtype


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of the local queries over the global sequence.

    Args:
        grad_flags: bit 0, 1, 2: q, k, v requires grad.
        v_head_dim: head_dim of the caller's v, before any padding to the head_dim of k.
    """
    options = CallOptions(
        _group(group_name), causal, softmax_scale, window_left, window_right, layout, impl, transport, deterministic
    )
    with device_guard(q.device), RingCall(options.group, q.device) as call:
        q, k, v = call.plan(CallInputs(q, k, v, cu_seqlens, options, grad_flags))
        if options.group is not None:
            content: dict[str, object] = {}
            if call.error is None:
                content = signature(
                    q, k, call.checked_plan, requires_grad=grad_flags, return_lse=return_lse, v_head_dim=v_head_dim
                )
            checksum = agreement.agree(options.group, content, call.error, q.device, call=call.number)
            call.number = call.number.with_arguments(checksum)
        work = call.start(CallShape.of(q, k, v))
        row_max = _empty_row_max(q, impl, grad_flags)
        out, lse = work.forward(q, k, v, row_max if row_max.numel() else None)
        if not grad_flags and cu_seqlens is None:  # no backward will read it
            return out, lse, row_max, torch.empty(2, dtype=torch.int64, device="cpu")
        record = _make_record(call.number.value, cu_seqlens, call.checked_plan.mask.documents)
        return out, lse, row_max, record


def _empty_row_max(q: Tensor, impl: str, grad_flags: int) -> Tensor:
    """Return an uninitialised tensor like lse if the backward needs `row_max`, otherwise a tensor without rows.

    Args: as `_forward`.
    """
    needed = grad_flags and needs_row_max(impl)
    shape = q.shape[0], q.shape[2], q.shape[1] if needed else 0
    return (torch.empty if needed else _without_rows)(shape, dtype=state_dtype(q.dtype), device=q.device)


_without_rows = lru_cache(maxsize=64)(torch.empty)  # one tensor for all calls: a new one takes 3 µs


# A CUDA graph of inductor (mode "reduce-overhead") would hold buffers that outlive it, and repeat the call's number.
_TAGS = (torch.Tag.cudagraph_unsafe,)
ring_attention = torch.library.custom_op("ringflash::ring_attention", _forward, mutates_args=(), tags=_TAGS)


@ring_attention.register_fake
def _(q, k, v, cu_seqlens, group_name, *options):  # type: ignore[no-untyped-def]
    *_, impl, _, _, grad_flags, _, _ = options
    check_inputs(q, k, v)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=state_dtype(q.dtype))
    record = torch.empty(2 + (0 if cu_seqlens is None else cu_seqlens.numel()), dtype=torch.int64, device="cpu")
    rows = lse.shape[2] if grad_flags and needs_row_max(impl) else 0
    return q.new_empty(out_shape(q, v)), lse, lse.new_empty((*lse.shape[:2], rows)), record


def _gradients(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    row_max: Tensor,
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
    """Gradients of the call of `ring_attention` that returned this `record`, under the same mask."""
    # The user may have called torch.use_deterministic_algorithms(True) after the forward.
    deterministic |= torch.are_deterministic_algorithms_enabled()
    options = CallOptions(
        _group(group_name), causal, softmax_scale, window_left, window_right, layout, impl, transport, deterministic
    )
    number, documents = _read_record(record)
    with device_guard(q.device), RingCall(options.group, q.device, number) as call:
        q, k, v, dout = call.plan(CallInputs(q, k, v, documents, options), dout)
        if options.group is not None:
            agreement.agree_on_backward(options.group, call.number, call.error, q.device)
        work = call.start(CallShape.of(q, k, v))
        largest = row_max if row_max.numel() else None
        return work.backward(BackwardInputs(dout, dlse, q, k, v, out, lse, largest))


def _make_record(number: int, cu_seqlens: Tensor | None, documents: Documents | None) -> Tensor:
    """Return what the backward reads of a forward: its number, the number of rows of cu_seqlens, and their values."""
    rows = documents.rows[: None if cu_seqlens.dim() == 2 else 1] if cu_seqlens is not None and documents else ()
    values = array("q", (number, len(rows), *chain(*rows)))
    return torch.frombuffer(values, dtype=torch.int64)  # torch.tensor takes 6 µs


def _read_record(record: Tensor) -> tuple[int, Documents | None]:
    """Return the number of a forward, and its documents."""
    number, num_rows, *values = record.tolist()
    if not num_rows:
        return number, None
    return number, Documents.from_rows(torch.tensor(values, device="cpu").view(num_rows, -1).tolist())


ring_attention_backward = torch.library.custom_op(
    "ringflash::ring_attention_backward", _gradients, mutates_args=(), tags=_TAGS
)


@ring_attention_backward.register_fake
def _(dout, dlse, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    """Save what the backward needs. row_max and record have no gradients; lse has one only if it was returned."""
    q, k, v, _, *options, _, return_lse, _ = inputs
    out, lse, row_max, record = output
    ctx.save_for_backward(q, k, v, out, lse, row_max, record)
    ctx.options, ctx.return_lse = options, return_lse
    ctx.set_materialize_grads(False)  # saves a kernel and three allocations a call
    ctx.mark_non_differentiable(*((row_max, record) if return_lse else (lse, row_max, record)))


def _backward(ctx, dout, dlse, *_):  # type: ignore[no-untyped-def]
    """Compute gradients of q, k and v, and None for every other argument of the operator."""
    q, k, v, out, lse, row_max, record = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    # Only this rank may have left lse unused. With zeros, every rank exchanges the same tensors.
    dlse = torch.zeros_like(lse) if ctx.return_lse and dlse is None else dlse
    direct = _is_unobserved(dout, q, k, v) and _has_declared_types(None, *ctx.options)
    differentiate = _gradients if direct else ring_attention_backward
    grads = differentiate(dout, dlse, q, k, v, out, lse, row_max, record, *ctx.options)
    return *grads, *[None] * (len(ctx.options) + 4)


ring_attention.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The operator and its gradient, as `register_autograd` joins them.

    The options are one argument, since torch takes 1 µs to look at each.
    """

    @staticmethod
    def forward(ctx, q, k, v, others):  # type: ignore[no-untyped-def]
        inputs = (q, k, v, *others)
        output = _call_without_gradient(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return _backward(ctx, *gradients)[:4]


def call_operator(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Call the operator. Eager calls use `_Attention`: torch takes 200 µs to get from an operator to its gradient."""
    if torch.compiler.is_compiling():
        out, lse, *_ = ring_attention(q, k, v, *others)
    elif torch.is_grad_enabled():
        out, lse, *_ = _Attention.apply(q, k, v, others)
    else:
        out, lse, *_ = _call_without_gradient(q, k, v, *others)
    return out, lse


def _call_without_gradient(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Call the operator without its gradient."""
    direct = _is_unobserved(q, k, v) and _has_declared_types(*others)
    return (_forward if direct else ring_attention)(q, k, v, *others)


def _is_unobserved(*tensors: Tensor) -> bool:
    """True if nothing is observing dispatch, so that the registered operator can be skipped, which saves 60 µs.

    Observers are dispatch modes (wrapped layers, selective checkpoints, FLOP counters, fake tensors), profilers,
    subclasses of Tensor, tensors without data (meta), torch.compile, which would otherwise compile the body, batched
    gradients, and second derivatives, which the operator refuses.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
        and torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        and not torch.autograd._profiler_enabled()
        and not torch.is_grad_enabled()
        and _PLAIN_TENSORS.issuperset(map(type, tensors))
        and all(map(torch._C._has_storage, tensors))
        and not all([x.is_meta for x in tensors])
    )


def _has_declared_types(cu_seqlens: object, *options: object) -> bool:
    """True if the operator would take every option unchanged: it converts numpy's integers, and refuses others."""
    types = [*map(type, options)]
    return (cu_seqlens is None or isinstance(cu_seqlens, Tensor)) and types == _OPTION_TYPES[: len(options)]


_PLAIN_TENSORS = {Tensor, torch.nn.Parameter}
_TENSOR_ARGUMENTS = ("q", "k", "v", "cu_seqlens", "return")
_OPTION_TYPES = [kind for name, kind in get_type_hints(_forward).items() if name not in _TENSOR_ARGUMENTS]


def check_group(group: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError if a group has been destroyed: the operator might find a newer group with its name."""
    if group is None:
        return
    try:
        present = _group(group.group_name)
    except RuntimeError:
        present = None
    if present is not group:
        raise RuntimeError(
            "the process group of this call has been destroyed; give the layer or model a group that still exists, for "
            "example one created after the new init_process_group."
        )


def _group(name: str) -> dist.ProcessGroup | None:
    return _resolve_process_group(name) if name else None  # type: ignore[arg-type]
