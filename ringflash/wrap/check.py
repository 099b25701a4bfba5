"""Comparison of a wrapped module on the ring with itself on the whole sequence, for errors that wrapping cannot see.

check_runs
  ring, whole    a run on shards, and one on the whole sequence. Compared by position: the inputs of every attention,
                 what other layers are given, what the outermost modules return. Compared once: the loss
  both, 3 times  with a random number for each position in place of what the last layers return. (A new model has nearly
                 the same loss for every token, so a wrong mean would pass.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ringflash.comm.agreement import agree, gather
from ringflash.comm.comparison import gather_values
from ringflash.comm.group import Group
from ringflash.huggingface.options import ModelRing
from ringflash.sequence.layout import shard_sequence
from ringflash.wrap.interception import AttentionCall, WrappedState
from ringflash.wrap.wrapper import disable_ring, not_compiled, wrapped_state

# Largest size of the random numbers, for each pair of runs with them: one pair finds 4 of 5 wrong means in bf16. Losses
# with an exponential overflow at the larger ones, and are then not compared.
RANDOM_SIZES = (16, 256, 256)
RANDOM_BOUND = 2.0**-6  # largest relative difference of losses whose logits have equal bits: sqrt(eps) of bf16 is 0.09

_MIXING = (
    "only scaled_dot_product_attention may mix tokens, not a shift, convolution, pooling or norm along the sequence"
)
# By the kind of a tensor: the rule, after the name of a layer and "must".
_RULES = {
    "inputs": f"be given the same values as in a run on the whole sequence, got {{}}; before it {_MIXING}.",
    "outputs": f"return the same values as in a run on the whole sequence, got {{}}; in it {_MIXING}.",
    "results": "return on every rank the result for the whole sequence, or a part, so that the sum, mean, maximum or "
    "minimum of all parts is that result, got {}; gather the tokens that it picks or pools "
    "(ringflash.unshard_sequence).",
    "logits": f"be given the logits of the whole sequence, got {{}}; before it {_MIXING}.",
    "labels": "be given the labels of the whole sequence, got {}; shift labels before the batch is sharded "
    "(ringflash.loss.shift_labels).",
    "weights": "be given the weights of the whole sequence, got {}; do not divide them by their sum over a shard.",
}


def check_wrapped(module: nn.Module, run: Callable[[Group], Any]) -> None:
    """Compare a module on the ring with itself on the whole sequence: by position, and by the loss if `run` returns it.

    A few tokens are enough: `16 * cp_size`. Runs without gradients, in evaluation mode, and not compiled.

    Args:
        module: from `wrap_attention`.
        run: run(group) calls the module on a batch sharded over `group`, run(None) on the whole batch, with attention
            as before wrapping. The batch must be equal on every rank. It may return tensors (batch, seqlen, ...), or
            the loss: averaged over the ranks, it must equal the loss of the whole sequence, or 1 / cp_size of it.
    Raises:
        ValueError: tensors that differ by more than sqrt(eps) of the largest value, or losses; on every rank, with the
            first layer. The inputs of every attention, the inputs of the module's layers and what the module returns
            are compared. A layer's wrong input is not an error if the input of a later layer is right.
    """
    check_runs(module, run, "the loss of run, averaged over the ranks,", "sum over the tokens of all ranks")


def check_runs(module: nn.Module, run: Callable[[Group], Any], loss: str, remedy: str) -> None:
    """Compare as `check_wrapped`; `loss` and `remedy` are the words of the error for losses that differ."""
    state = wrapped_state(module)
    group = state.options.group
    ring, whole = _trace_both(module, state, run, _Trace(state), _Trace(state))
    error = _difference(ring.calls, whole.calls, state.options) or _tensor_difference(ring, whole)
    agree(group, {"check_wrapped": len(ring.calls), "results": len(whole.results)}, error)
    agree(group, {}, _result_difference(ring, whole))
    if group is None:
        return
    dtypes = {x.dtype for call in ring.calls for x in call.tensors} or {torch.float32}
    bound = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
    losses = _Losses(loss, remedy, (1.0, 1 / group.size()))
    losses.compare(gather(group, ring.loss), whole.loss, bound, group)
    if whole.loss is None:
        return
    losses.name += " with random numbers in place of the logits,"
    for draw in range(len(RANDOM_SIZES)):
        traces = (_Trace(state, random_after=plain, draw=draw) for plain in (ring, whole))
        ring_drawn, whole_drawn = _trace_both(module, state, run, *traces)
        drawn_losses = gather(group, ring_drawn.loss)
        if whole_drawn.loss is not None and math.isfinite(whole_drawn.loss):
            losses.compare(drawn_losses, whole_drawn.loss, min(bound, RANDOM_BOUND), group)


@dataclass
class _Losses:
    """Comparison of the losses of runs.

    Args:
        shares: allowed values of (mean over the ranks) / (loss of the whole sequence). A run that multiplies its loss
            by cp_size itself does so on the whole sequence too, and has 1 / cp_size.
    """

    name: str
    remedy: str
    shares: tuple[float, ...]

    def compare(self, losses: list[float | None], whole: float | None, bound: float, group: Group) -> None:
        """Raise ValueError on every rank for another loss; later runs must have one of the shares that fit now."""
        present, error = [x for x in losses if x is not None], None
        if whole is None or len(present) < len(losses):
            return
        mean = sum(present) / len(present)
        fitting = [x for x in self.shares if mean == x * whole or abs(mean - x * whole) <= bound * abs(x * whole)]
        if math.isnan(whole):
            error = ValueError(f"{self.name} must be a number, got nan for the whole sequence; check labels and mask.")
        elif not fitting:
            error = ValueError(
                f"{self.name} must equal the loss of the whole sequence ({whole:.6g}), got {mean:.6g}; {self.remedy}."
            )
        agree(group, {}, error)
        self.shares = tuple(fitting)


@dataclass(eq=False)
class _Trace:
    """Observations of one run.

    Args:
        random_after: an earlier run of the same kind. After its last attention call, and from outermost modules, layers
            return random numbers.
        draw: index of the random numbers.
        tensors: this rank's shard of each tensor, by name, kind and number, in the order of the run.
        results: outputs of the run on the whole sequence that are as large on the ring.
        lengths: (batch, seqlen) of the tokens that attention was given.
        ring: the run on the ring, for the run on the whole sequence: its tensors are the ones to compare.
        loss: what the run returned, if it is a number.
    """

    state: WrappedState
    random_after: _Trace | None = None
    draw: int = 0
    calls: list[AttentionCall] = field(default_factory=list)
    tensors: dict[tuple[str, str, int], Tensor] = field(default_factory=dict)
    results: dict[tuple[str, str, int], Tensor] = field(default_factory=dict)
    ring: _Trace | None = None
    loss: float | None = None
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_running: int = 0  # modules whose forward runs
    num_random: int = 0

    @property
    def lengths(self) -> set[tuple[int, ...]]:
        return {tuple(call.tensors[0].shape[:2]) for call in self.calls}

    def note(self, name: str, kind: str, value: Any) -> None:
        """Keep the tensors of a value that may have a sequence dim."""
        for x in tree_leaves(value):
            if not isinstance(x, Tensor) or x.dim() < 2 or not (x.is_floating_point() or kind == "labels"):
                continue
            key = name, kind, self.counts[name, kind]
            self.counts[name, kind] += 1
            shard = x if self.ring is None else self._shard(x, self.ring.tensors.get(key), kind)
            if shard is not None:
                self.tensors[key] = shard.detach().clone()  # the next layer may change it in place
            elif kind == "outputs" and self.ring is not None and (got := self.ring.tensors.get(key)) is not None:
                if got.shape == x.shape:
                    self.results[key] = x.detach().clone()

    def _shard(self, x: Tensor, got: Tensor | None, kind: str) -> Tensor | None:
        """Return this rank's part of a tensor of the whole sequence; None if the ring's has no sequence dim."""
        assert self.ring is not None
        size = self.state.options.size_and_rank[0]
        if got is None or [*x.shape] != [got.shape[0], got.shape[1] * size, *got.shape[2:]]:
            return None
        if kind == "inputs" and tuple(got.shape[:2]) not in self.ring.lengths:  # for example, experts with a capacity
            return None
        return self._cut(x, self.ring)

    def _cut(self, x: Tensor, ring: _Trace) -> Tensor:
        options = self.state.options
        return shard_sequence(x, options.group, 1, options.layout, ring.calls[0].cu_seqlens if ring.calls else None)

    def enter(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what a module is given; a forward pre-hook."""
        self.num_running += 1
        if self.random_after is None:
            self.note(name, "inputs", (args, kwargs))

    def leave(self, name: str, layer: nn.Module, args: Any, output: Any) -> Any:
        """Note what an outermost module returns, or return random numbers for it; a forward hook."""
        self.num_running -= 1
        before = self.random_after
        if before is None:
            if self.num_running == 0:
                self.note(name, "outputs", output)
            return output
        if self.num_running == 0 or len(self.calls) >= len(before.calls):
            return tree_map_only(Tensor, lambda x: self._random(x, before), output)
        return output

    def _random(self, x: Tensor, before: _Trace) -> Tensor:
        """Return waves of random phases along the features, of a random phase and size for each position.

        Sizes are from 1 to an entry of `RANDOM_SIZES`, so that the losses of tokens differ more than any rounding.
        """
        if not x.is_floating_point() or x.dim() < 2 or tuple(x.shape[:2]) not in before.lengths:
            return x
        generator = torch.Generator("cpu").manual_seed(self.num_random * len(RANDOM_SIZES) + self.draw)
        self.num_random += 1
        size = 1 if self.state.whole else self.state.options.size_and_rank[0]
        features = torch.rand(x.shape[2:].numel(), generator=generator, device="cpu")
        tokens = torch.rand(x.shape[0], x.shape[1] * size, 2, generator=generator, device="cpu")
        if not self.state.whole:
            tokens = self._cut(tokens, before)
        features, tokens = (y.to(x.device) for y in (features, tokens))
        phase, height = tokens[..., :1], RANDOM_SIZES[self.draw] ** tokens[..., 1:]
        return (height * torch.sin(2 * math.pi * (phase + features))).view(x.shape).to(x.dtype)


def _trace_both(
    module: nn.Module, state: WrappedState, run: Callable[[Group], Any], ring: _Trace, whole: _Trace
) -> tuple[_Trace, _Trace]:
    """Trace a run on the ring and one on the whole sequence."""
    with not_compiled():
        _trace(module, run, state.options.group, ring)
    whole.ring = ring
    with disable_ring(module):
        _trace(module, run, None, whole)
    return ring, whole


def _trace(module: nn.Module, run: Callable[[Group], Any], group: Group, trace: _Trace) -> None:
    """Trace one run, which leaves the module unchanged."""
    state, handles = trace.state, []
    for name, layer in module.named_modules():
        enter, leave = (partial(hook, name or state.root) for hook in (trace.enter, trace.leave))
        handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(layer.register_forward_hook(leave))
    state.trace, state.watch = trace.calls, trace.note
    try:
        with _restored(module), torch.no_grad():
            module.eval()
            result = run(group)
    finally:
        state.trace = state.watch = None
        for handle in handles:
            handle.remove()
    if isinstance(result, int | float) or (isinstance(result, Tensor) and result.numel() == 1):
        trace.loss = float(result)
    else:
        trace.note("run", "outputs", result)


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore train/eval modes, buffers, and counters or collections in attributes (such as metrics) on exit."""
    holders: list[dict[str, Any]] = [x for layer in module.modules() for x in (vars(layer), layer._buffers)]
    states = [(holder, *item) for holder in holders for item in holder.items() if _is_state(*item)]
    before = [(*x, x[2].detach().clone() if isinstance(x[2], Tensor) else copy(x[2])) for x in states]
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


def _difference(local: list[AttentionCall], whole: list[AttentionCall], options: ModelRing) -> ValueError | None:
    """Return the error of the first attention whose q, k, v, causality or scale differ on a shard, or None."""
    if len(local) != len(whole):
        return ValueError(
            f"the module must call attention as often for a shard as for the whole sequence ({len(whole)} times), got "
            f"{len(local)} calls; run must call the module once, on shards of the same batch."
        )
    for got, want in zip(local, whole, strict=True):
        for name, shard, full in zip("qkv", got.tensors, want.tensors, strict=True):
            mine = shard_sequence(full, options.group, 1, options.layout, want.cu_seqlens)
            error = _compare(got.layer, name, shard, mine)
            if error is not None:
                return error
        if (got.causal, got.scale) != (want.causal, want.scale):
            return ValueError(
                f"{got.layer} must call attention with the is_causal ({want.causal}) and scale ({want.scale}) of a run "
                f"on the whole sequence, got {got.causal} and {got.scale}; do not compute them from the length of the "
                "shard."
            )
    return None


def _tensor_difference(ring: _Trace, whole: _Trace) -> ValueError | None:
    """Return the error for the first tensor that differs, unless a later tensor is right.

    A layer may be given tokens in another order, or get a neighbour's tokens later: a right tensor after it shows that
    the result is right. One that is the same for all tokens, such as the logits of a head of zeros, shows nothing.
    """
    pending: ValueError | None = None
    for key, got in ring.tensors.items():
        if (want := whole.tensors.get(key)) is None:
            continue
        name, kind, _ = key
        difference = _differs(got, want)
        if difference is None:
            if kind in ("inputs", "outputs", "logits") and (want != want[:, :1]).any():
                pending = None
        elif kind == "inputs":
            pending = pending or ValueError(f"{name} must {_RULES[kind].format(difference)}")
        else:
            return pending or ValueError(f"{name} must {_RULES[kind].format(difference)}")
    return pending


def _result_difference(ring: _Trace, whole: _Trace) -> ValueError | None:
    """Return the error for the first result without a sequence dim that is another one over the ranks."""
    group = ring.state.options.group
    for key, want in whole.results.items():
        difference = _differs(ring.tensors[key], want)
        if group is None or not any(gather(group, difference is not None)):
            continue
        parts = gather_values(group, ring.tensors[key].cpu())
        stacked = torch.stack(parts)
        reduced = stacked.sum(0), stacked.mean(0), stacked.amax(0), stacked.amin(0)
        if all(_differs(x, want.cpu()) is not None for x in reduced):
            return ValueError(f"{key[0]} must {_RULES['results'].format(difference or 'a difference on another rank')}")
    return None


def _differs(got: Tensor, want: Tensor) -> str | None:
    """Describe the difference of two tensors, None if it is at most sqrt(eps) of the largest value; integers are fp64.

    Infinities and the dtype's least value, by which models mask logits, are no largest value: they would hide the rest.
    """
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)} for {tuple(want.shape)}"
    if not got.is_floating_point():
        got, want = got.double(), want.double()
    size, finfo = want.abs(), torch.finfo(want.dtype)
    scale = size.where(size < finfo.max / 2, 0).max().clamp(min=finfo.tiny)
    worst = ((got - want).where(got != want, 0).abs().max() / scale).item()  # inf - inf would be NaN
    return None if worst <= torch.finfo(got.dtype).eps ** 0.5 else f"a difference of {worst:.1e} of the largest value"


def _compare(layer: str, name: str, got: Tensor, want: Tensor) -> ValueError | None:
    """Return the error if a tensor of an attention differs on a shard; None if it does not."""
    if (text := _differs(got, want)) is None:
        return None
    return ValueError(
        f"{layer} must call attention with the {name} of a run on the whole sequence, got {text}; positions must be "
        "global (ringflash.local_positions, or SequenceSharding's self.positions(tokens)), and no other layer may mix "
        "tokens."
    )
