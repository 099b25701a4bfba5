"""A wrapped module on the ring against itself on the whole sequence, to find what wrapping cannot see.

Positions counted from the shard's start, a convolution along the sequence, an attention in a library's own binding:
each changes what some attention is given, from one layer on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.attention.api import RingAttention
from ringflash.comm.agreement import agree
from ringflash.comm.group import Group
from ringflash.huggingface.options import Options
from ringflash.sequence.layout import shard_sequence
from ringflash.wrap.interception import Call, Calls
from ringflash.wrap.wrapper import calls_of


def check_wrapped(module: nn.Module, run: Callable[[Group], Any]) -> None:
    """Compare what every attention is given on the ring with what it is given on the whole sequence.

    A few tokens for each rank are enough: `2 * cp_size * 8`. Without gradients, in evaluation mode, and not compiled.

    Args:
        module: from `wrap_attention`.
        run: run(group) calls the module on a batch sharded over `group`; run(None) on the whole one, with
            attention as before wrapping. Equal on every rank.
    Raises:
        ValueError: they differ by more than sqrt(eps) of the largest value; names the first layer, on every rank.
    """
    calls = calls_of(module)
    local = _traced(module, calls, run, calls.options.group)
    with _whole(module, calls):
        whole = _traced(module, calls, run, None)
    agree(calls.options.group, {"check_wrapped": len(local)}, _difference(local, whole, calls.options))


def _traced(module: nn.Module, calls: Calls, run: Callable[[Group], Any], group: Group) -> list[Call]:
    """The attention calls of one run, which leaves the module as it was."""
    trace: list[Call] = []
    with _as_before(module), torch.no_grad(), _not_compiled():
        module.eval()
        calls.trace = trace
        try:
            run(group)
        finally:
            calls.trace = None
    return trace


def _not_compiled() -> AbstractContextManager[Any]:
    """Run what torch.compile was given as it is written.

    Compiled attention of the whole sequence is an operator that wrapping refuses, and a graph for these few tokens
    would make torch take later lengths for variable ones.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Modes and buffers of its layers, and what they count or collect in attributes, are put back: metrics, say."""
    holders: list[dict[str, Any]] = [x for layer in module.modules() for x in (vars(layer), layer._buffers)]
    before = [(holder, name, value, _copy(value)) for holder in holders for name, value in holder.items()
              if _is_state(name, value)]  # fmt: skip
    try:
        yield
    finally:
        with torch.no_grad():
            for holder, name, value, contents in before:
                holder[name] = _put_back(value, contents)


def _is_state(name: str, value: Any) -> bool:
    """Not torch's own tables, whose names begin with an underscore; an inference tensor is not written to."""
    if isinstance(value, Tensor):
        return not value.is_inference()
    return value is None or isinstance(value, int | float) or (type(value) in (list, dict) and name[0] != "_")


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy(value)


def _put_back(value: Any, before: Any) -> Any:
    """The same object with its contents of before, where it has any."""
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
def _whole(module: nn.Module, calls: Calls) -> Iterator[None]:
    """Attention within this process, for every kind of layer."""
    group, calls.whole = calls.options.group, True
    lone = Options(None, calls.options.layout)
    switched = [layer for layer in module.modules() if isinstance(getattr(layer, "_ringflash", None), Options)]
    bound = [layer for layer in module.modules() if isinstance(layer, RingAttention)]
    for layer in switched:
        layer._ringflash = lone  # type: ignore[assignment]
    for ring in bound:
        ring.group = None
    try:
        yield
    finally:
        calls.whole = False
        for layer in switched:
            layer._ringflash = calls.options  # type: ignore[assignment]
        for ring in bound:
            ring.group = group


def _difference(local: list[Call], whole: list[Call], options: Options) -> ValueError | None:
    if len(local) != len(whole):
        return ValueError(
            f"attention must be called as often on a shard as on the whole sequence ({len(whole)} times), got "
            f"{len(local)}; run must call the module once, on shards of the same batch."
        )
    for mine, all_of_it in zip(local, whole, strict=True):
        for name, got, full in zip("qkv", mine.tensors, all_of_it.tensors, strict=True):
            error = _compare(mine.layer, name, got, shard_sequence(full, options.group, 1, options.layout))
            if error is not None:
                return error
        if (mine.causal, mine.scale) != (all_of_it.causal, all_of_it.scale):
            return ValueError(
                f"{mine.layer} must be given the is_causal and scale that it has in the whole sequence "
                f"({all_of_it.causal}, {all_of_it.scale}), got {mine.causal}, {mine.scale}; "
                "they must not depend on the length of the shard."
            )
    return None


def _compare(layer: str, name: str, got: Tensor, want: Tensor) -> ValueError | None:
    if got.shape != want.shape:
        text = f"shape {tuple(got.shape)} for {tuple(want.shape)}"
    else:
        scale = want.abs().max().clamp(min=torch.finfo(want.dtype).tiny)
        worst = ((got - want).abs().max() / scale).item()
        if worst <= torch.finfo(got.dtype).eps ** 0.5:
            return None
        text = f"a difference of {worst:.1e} of the largest value"
    return ValueError(
        f"{layer} must be given the {name} that it has in the whole sequence, got {text}; positions must be global "
        "(ringflash.local_positions), and no other layer may mix tokens."
    )
