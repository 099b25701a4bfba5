"""Comparison of a wrapped module on the ring with itself on the whole sequence, for errors that wrapping cannot see.

Examples: positions counted from the shard's start, a convolution along the sequence, attention in a library's own
binding. Each changes the inputs of some attention, from one layer on, or the module's output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ringflash.attention.api import RingAttention
from ringflash.comm.agreement import agree
from ringflash.comm.group import Group
from ringflash.huggingface.options import ModelRing
from ringflash.sequence.layout import shard_sequence
from ringflash.wrap.interception import AttentionCall, WrappedState
from ringflash.wrap.wrapper import wrapped_state


def check_wrapped(module: nn.Module, run: Callable[[Group], Any]) -> None:
    """Compare the inputs of every attention on the ring, and the module's output, with those on the whole sequence.

    A few tokens are enough: `16 * cp_size`. Runs without gradients, in evaluation mode, and not compiled.

    Args:
        module: from `wrap_attention`.
        run: run(group) calls the module on a batch sharded over `group`, run(None) on the whole batch, with attention
            as before wrapping. The batch must be equal on every rank.
    Raises:
        ValueError: inputs that differ by more than sqrt(eps) of the largest value; on every rank, with the first layer.
            Or an output (batch, seqlen, ...) that does.
    """
    state = wrapped_state(module)
    group = state.options.group
    local = _trace(module, state, run, group)
    with _whole_attention(module, state):
        whole = _trace(module, state, run, None)
    error = _difference(local.calls, whole.calls, state.options) or _output_difference(local, whole, state)
    agree(group, {"check_wrapped": len(local.calls)}, error)


class _Trace(NamedTuple):
    """Attention calls of one run, and tensors that the module's forwards returned."""

    calls: list[AttentionCall]
    outputs: list[Tensor]


def _trace(module: nn.Module, state: WrappedState, run: Callable[[Group], Any], group: Group) -> _Trace:
    """Return the trace of one run, which leaves the module unchanged."""
    trace = _Trace([], [])

    def note(module: nn.Module, args: Any, output: Any) -> None:
        trace.outputs.extend(x for x in tree_leaves(output) if isinstance(x, Tensor))

    with _restored(module), torch.no_grad(), _not_compiled():
        module.eval()
        state.trace = trace.calls
        handle = module.register_forward_hook(note)
        try:
            run(group)
        finally:
            handle.remove()
            state.trace = None
    return trace


def _not_compiled() -> AbstractContextManager[Any]:
    """Run compiled code eagerly.

    Compiled attention over the whole sequence is an operator that wrapping rejects, and a graph for these few tokens
    would make torch treat later lengths as dynamic.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore train/eval modes, buffers, and counters or collections in attributes (metrics, say) on exit."""
    holders: list[dict[str, Any]] = [x for layer in module.modules() for x in (vars(layer), layer._buffers)]
    before = [(holder, name, value, _copy(value)) for holder in holders for name, value in holder.items()
              if _is_state(name, value)]  # fmt: skip
    try:
        yield
    finally:
        with torch.no_grad():
            for holder, name, value, contents in before:
                holder[name] = _restore(value, contents)


def _is_state(name: str, value: Any) -> bool:
    """Exclude torch's own tables, whose names begin with an underscore, and inference tensors, which are read-only."""
    if isinstance(value, Tensor):
        return not value.is_inference()
    return value is None or isinstance(value, int | float) or (type(value) in (list, dict) and name[0] != "_")


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy(value)


def _restore(value: Any, before: Any) -> Any:
    """Return the same object with its earlier contents, if it is a container or a tensor."""
    if isinstance(value, Tensor):
        if not torch.equal(value, before):
            value.copy_(before)
    elif isinstance(value, list):
        value[:] = before
    elif isinstance(value, dict):
        value.clear()
        value.update(before)
    return value


@contextmanager
def _whole_attention(module: nn.Module, state: WrappedState) -> Iterator[None]:
    """Make every kind of layer attend within this process."""
    group, state.whole = state.options.group, True
    local = ModelRing(None, state.options.layout)
    switched = [layer for layer in module.modules() if isinstance(getattr(layer, "_ringflash", None), ModelRing)]
    bound = [layer for layer in module.modules() if isinstance(layer, RingAttention)]
    for layer in switched:
        layer._ringflash = local  # type: ignore[assignment]
    for ring in bound:
        ring.group = None
    try:
        yield
    finally:
        state.whole = False
        for layer in switched:
            layer._ringflash = state.options  # type: ignore[assignment]
        for ring in bound:
            ring.group = group


def _difference(local: list[AttentionCall], whole: list[AttentionCall], options: ModelRing) -> ValueError | None:
    if len(local) != len(whole):
        return ValueError(
            f"attention must be called as often on a shard as on the whole sequence ({len(whole)} times), got "
            f"{len(local)}; run must call the module once, on shards of the same batch."
        )
    for got, want in zip(local, whole, strict=True):
        for name, shard, full in zip("qkv", got.tensors, want.tensors, strict=True):
            mine = shard_sequence(full, options.group, 1, options.layout, want.cu_seqlens)
            error = _compare(got.layer, name, shard, mine)
            if error is not None:
                return error
        if (got.causal, got.scale) != (want.causal, want.scale):
            return ValueError(
                f"{got.layer} must be given the is_causal and scale that it has in the whole sequence "
                f"({want.causal}, {want.scale}), got {got.causal}, {got.scale}; "
                "they must not depend on the length of the shard."
            )
    return None


def _output_difference(local: _Trace, whole: _Trace, state: WrappedState) -> ValueError | None:
    """Compare the outputs that have a sequence dim; a loss, say, may be that of the shard."""
    if len(local.outputs) != len(whole.outputs):
        return None
    options, size = state.options, state.options.size_and_rank[0]
    bounds = whole.calls[0].cu_seqlens if whole.calls else None
    for got, full in zip(local.outputs, whole.outputs, strict=True):
        shape = list(got.shape)
        if got.dim() < 2 or not got.is_floating_point() or [shape[0], shape[1] * size, *shape[2:]] != list(full.shape):
            continue
        difference = _differs(got, shard_sequence(full, options.group, 1, options.layout, bounds))
        if difference is not None:
            return ValueError(
                f"{state.root} must return what it returns for the whole sequence, got {difference}; no layer after "
                "the last attention may mix tokens, and every attention must call scaled_dot_product_attention."
            )
    return None


def _differs(got: Tensor, want: Tensor) -> str | None:
    """Describe the difference of two tensors, None if it is at most sqrt(eps) of the largest value.

    Infinities and the dtype's least value, by which models mask logits, are no largest value: they would hide the rest.
    """
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} for {tuple(want.shape)}"
    size, finfo = want.abs(), torch.finfo(want.dtype)
    scale = size.where(size < finfo.max / 2, 0).max().clamp(min=finfo.tiny)
    worst = ((got - want).where(got != want, 0).abs().max() / scale).item()  # inf - inf would be NaN
    return None if worst <= torch.finfo(got.dtype).eps ** 0.5 else f"a difference of {worst:.1e} of the largest value"


def _compare(layer: str, name: str, got: Tensor, want: Tensor) -> ValueError | None:
    if (text := _differs(got, want)) is None:
        return None
    return ValueError(
        f"{layer} must be given the {name} that it has in the whole sequence, got {text}; positions must be global "
        "(ringflash.local_positions), and no other layer may mix tokens."
    )
