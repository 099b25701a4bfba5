"""The torch-function mode in which a wrapped layer's forward runs: it replaces attention, or rejects the call.

    wrapped layer's forward
      Interception(WrappedState, layer)                     one mode per layer and call
        |
        |  any torch function  -> _function_kind
        |
        +- scaled_dot_product_attention -> _attend -> attend                      checked, then recorded
        +- ringflash::ring_attention    -> as it is (RingAttention, transformers) recorded
        +- any other attention operator -> NotImplementedError on every rank
        +- dropout, rrelu, Gumbel noise -> with numbers of this rank's own
        +- any other function           -> as it is

    root module's forward ends -> WrappedState.check_called: RuntimeError if no attention was seen

A mode sees every torch function that Python calls, under any imported name, and torch.compile traces through it. Each
layer enters its own mode, because activation checkpointing runs a layer again in the backward, outside of the model's
forward, and its attention must also be intercepted there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ringflash.attention.api import attend
from ringflash.attention.inputs import autocast, require_grad_together
from ringflash.comm.agreement import agree
from ringflash.comm.call_numbers import in_layer, is_eager
from ringflash.comm.seeding import seeded_by_rank
from ringflash.huggingface.generation import is_generating
from ringflash.huggingface.options import ModelRing

_RING = "ring_attention.default"  # of torch.ops.ringflash; RingAttention and transformers models on a ring call it
_ATTENTION = ("attention", "flash_attn", "flash_fwd")  # parts of the names of attention operators


class AttentionCall(NamedTuple):
    """Arguments of one attention call: the layer's name; q, k, v as (batch, seqlen, heads, head_dim); masks; scale."""

    layer: str
    tensors: tuple[Tensor, ...]
    causal: bool
    scale: float | None
    cu_seqlens: Tensor | None = None


@dataclass(eq=False)
class WrappedState:
    """State shared by the layers of one wrapped module.

    Args:
        root: name of the module in errors.
        called: True once an attention call was intercepted.
        generated: a transformers model in the module generated tokens off the ring in the last forward.
        whole: attend within this process, as the module did before it was wrapped.
        outside: True between the steps of a LightningModule, where tokens may be whole or a shard.
        trace: list to which calls are appended; None records none.
        watch: function of a comparison that is given a name, a kind ("logits") and a tensor; None compares nothing.
        key: key in `_states`; a string, since torch.compile would treat a changing number as a dynamic one.
    """

    options: ModelRing
    root: str
    called: bool = False
    generated: bool = False
    whole: bool = False
    outside: bool = False
    trace: list[AttentionCall] | None = None
    watch: Callable[[str, str, Any], None] | None = None
    key: str = field(default_factory=map(str, count()).__next__, init=False)

    def __post_init__(self) -> None:
        _states[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedState:
        return WrappedState(self.options, self.root, outside=self.outside)

    def check_in_step(self, layer: nn.Module, _: Any = None) -> None:
        """Raise RuntimeError on every rank for attention between the steps, unless off the ring; also a pre-hook."""
        if self.outside and not self.whole and self.options.group is not None and not is_generating():
            _raise_on_every_rank(
                self.key,
                f"{self.name_of(layer)} must be called in a step of the module (training_step, validation_step, ...), "
                "got a call between steps, where its tokens may be whole or a shard; for whole sequences call it "
                "inside `with ringflash.disable_ring(module):`, on all ranks alike.",
                RuntimeError,
            )

    def check_called(self) -> None:
        """Raise RuntimeError on every rank if no attention was intercepted; called at the end of a forward."""
        if self.generated:
            self.generated = False
        elif not self.called:
            _raise_on_every_rank(
                self.key,
                f"{self.root} must call scaled_dot_product_attention, RingAttention or a transformers model, got no "
                "such call in its forward; its attention cannot be seen, and would stay within each rank's shard.",
                RuntimeError,
            )

    def record(
        self, layer: nn.Module, *tensors: Tensor, causal: bool, scale: float | None, cu_seqlens: Tensor | None = None
    ) -> None:
        """Record an attention call of a layer."""
        _mark_called(self.key)
        if self.trace is not None:
            inputs = tuple(x.detach() for x in tensors)
            self.trace.append(AttentionCall(self.name_of(layer), inputs, causal, scale, cu_seqlens))

    def name_of(self, layer: nn.Module) -> str:
        """Return the name of a layer; for rare use, since torch.compile recompiles for each name that it reads."""
        return str(getattr(layer, "_ringflash_name", type(layer).__name__)) or self.root


_states: WeakValueDictionary[str, WrappedState] = WeakValueDictionary()


@torch.compiler.assume_constant_result
def _mark_called(key: str) -> None:
    """Note that attention was called; at trace time if compiled, since compiled checkpoints cannot mutate objects."""
    _states[key].called = True


class Interception(TorchFunctionMode):
    """A mode that intercepts the attention calls of one layer's forward; layers inside it enter their own modes."""

    def __init__(self, state: WrappedState, layer: nn.Module) -> None:
        super().__init__()
        self.state, self.layer = state, layer
        self.checkpoint = _checkpoint_state()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call the function or its replacement; nothing is intercepted inside a replacement."""
        kwargs = kwargs or {}
        if is_generating():
            self.state.generated = True
            return func(*args, **kwargs)
        kind = _function_kind(func)
        if func is F.scaled_dot_product_attention:
            # True if only a function that the layer calls is compiled; the layer itself was entered eagerly.
            inner_compile = self.checkpoint is not None and torch.compiler.is_compiling()
            return (_replace_uncompiled if inner_compile else _replace)(self._attend, *args, **kwargs)
        if kind == "ring":
            with torch._C.DisableTorchFunction(), self._naming():
                self.state.check_in_step(self.layer)
                self.state.record(self.layer, *args[:3], causal=args[5], scale=args[6], cu_seqlens=args[3])
                return func(*args, **kwargs)
        if kind is not None and kind in _DRAWS:
            if self.state.options.group is not None and _DRAWS[kind](*args, **kwargs):
                return _uncompiled_draw(self._draw, func, args, kwargs)
        elif kind is not None:
            self._refuse(f"attend by torch.nn.functional.scaled_dot_product_attention, got {kind}; call that function")
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute torch.nn.functional.scaled_dot_product_attention over the whole sequence."""
        self.state.check_in_step(self.layer)
        self._check(query, key, value, attn_mask, dropout_p, enable_gqa)
        query, key, value = (autocast(x) for x in (query, key, value))
        q, k, v = (x.transpose(1, 2) for x in require_grad_together(query, key, value))
        self.state.record(self.layer, q, k, v, causal=is_causal, scale=scale)
        if self.state.whole:
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        with self._naming():
            out = attend(q, k, v, self.state.options, causal=is_causal, softmax_scale=scale)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    def _naming(self) -> AbstractContextManager[None]:
        """Let ranks that leave out different layers, or run one in another mode, find out at their next call."""
        return in_layer(self.state.name_of(self.layer), self.layer.training) if is_eager() else nullcontext()

    def _draw(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Call a function that draws a number for each element; they then differ between ranks, as their tokens do."""
        if self.checkpoint not in (None, _checkpoint_state()):
            self._refuse(
                event=f"{func.__name__} runs inside a checkpoint (or no_grad) that covers only a part of this layer, "
                "so the backward would draw other numbers; checkpoint a whole module of your own class instead"
            )
        x: Tensor = args[0] if args else kwargs["logits" if "logits" in kwargs else "input"]
        with torch._C.DisableTorchFunction(), seeded_by_rank(self.state.options.group, x.device):
            return func(*args, **kwargs)

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, enable_gqa: bool
    ) -> None:
        """Reject anything but causal or full self-attention over the sequence that the ranks share."""
        shapes = tuple(tuple(x.shape) for x in (query, key, value))
        if mask is not None:
            self._refuse(f"attend without attn_mask, got a mask {tuple(mask.shape)}; use is_causal, or RingAttention")
        if dropout > 0:
            self._refuse(f"attend with a dropout_p of 0, got {dropout}; set the dropout of its attention to 0")
        if not all(x.is_floating_point() for x in (query, key, value)):
            self._refuse(f"attend in floating point, got {query.dtype}, {key.dtype}, {value.dtype}; cast them")
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
            self._refuse(f"attend on (batch, heads, seqlen, head_dim), got {shapes}; add the missing dimensions")
        if query.shape[2] != key.shape[2]:
            self._refuse(
                f"attend to its own sequence, got {query.shape[2]} queries and {key.shape[2]} keys; cross-attention "
                "cannot run on a ring"
            )
        if query.shape[1] != key.shape[1] and not enable_gqa:
            self._refuse(f"attend with as many heads in k as in q, got {shapes}; pass enable_gqa=True")
        if self.checkpoint != _checkpoint_state():
            self._refuse(
                event="attention runs inside a checkpoint (or no_grad) that covers only the call; checkpoint the "
                "module, not a function in it"
            )

    def _refuse(self, rule: str = "", *, event: str = "") -> None:
        """Raise NotImplementedError on every rank, naming the layer and the rule that it breaks, or what happened."""
        said = f": {event}" if event else f" must {rule}"
        with torch._C.DisableTorchFunction():
            _raise_on_every_rank(self.state.key, f"{self.state.name_of(self.layer)}{said}.", NotImplementedError)


def _replace(attend: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Attend in place of torch's function; nothing is intercepted inside."""
    with torch._C.DisableTorchFunction():
        return attend(*args, **kwargs)


_replace_uncompiled = torch.compiler.disable(  # the state of a checkpoint can only be read outside of the compiler
    _replace, reason="attention is compiled with the layer that calls it; compile the module"
)


@torch.compiler.assume_constant_result
def _raise_on_every_rank(key: str, text: str, kind: type[Exception]) -> NoReturn:
    """Raise on this rank and on ranks that reach the ring without an error; at trace time if compiled."""
    error = kind(text)
    agree(_states[key].options.group, {}, error)
    raise error


@torch.compiler.disable(
    reason="fullgraph must be False for a wrapped layer with dropout, whose mask is another one on each rank; leave "
    "fullgraph out, or set the dropout to 0"
)
def _uncompiled_draw(draw: Callable[..., Tensor], *call: Any) -> Tensor:
    return draw(*call)


def _drops(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> bool:
    return p > 0 and training and train


def _leaks(
    input: Tensor, lower: float = 0.0, upper: float = 0.0, training: bool = False, inplace: bool = False
) -> bool:
    return training


def _samples(logits: Tensor, *args: Any, **kwargs: Any) -> bool:
    return True


# Functions that draw a number for each element, whatever the tensor means: if they draw with these arguments.
_DRAWS: dict[str, Callable[..., bool]] = {"dropout": _drops, "rrelu": _leaks, "gumbel_softmax": _samples}


@torch.compiler.assume_constant_result
def _function_kind(func: Any) -> str | None:
    """Return "ring" for our operator, the name of any other attention operator, a key of `_DRAWS`, or None.

    Operators of libraries may be named by their namespace only (flash_attn_3.fwd).
    """
    name = getattr(func, "__name__", "")
    if name == _RING:
        return "ring"
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = str(func)
    if any(part in name for part in _ATTENTION):
        return name
    return next((kind for kind in _DRAWS if kind in name), None)


def _checkpoint_state() -> tuple[bool, Callable[..., Any] | None] | None:
    """Return the state that activation checkpointing changes around its function; None while compiling.

    A reentrant checkpoint runs its function without gradients, a non-reentrant one with saved-tensor hooks.
    """
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = hooks[0] if hooks else None
    within = getattr(pack, "__module__", None) == "torch.utils.checkpoint"
    return torch.is_grad_enabled(), pack if within else None
