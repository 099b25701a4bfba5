"""The mode inside which a wrapped layer's forward runs: it answers attention, and refuses what it cannot answer.

A mode sees each torch function that Python calls, under any name it was imported by, and torch.compile traces
through it. Each layer enters its own, so that one whose forward is run again for activation checkpointing, in the
backward and outside of the model's forward, is intercepted as in the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ringflash.attention.api import ring_attention
from ringflash.attention.autocast import autocast
from ringflash.attention.freezing import differentiate_alike
from ringflash.comm.agreement import agree
from ringflash.huggingface.generation import is_generating
from ringflash.huggingface.options import Options

_RING = "ring_attention.default"  # torch.ops.ringflash's, which RingAttention and the plug for transformers call
_ATTENTION = ("attention", "flash_attn", "flash_fwd")  # in the name of any operator that attends


class Call(NamedTuple):
    """What one attention was given: its layer's name; q, k, v as (batch, seqlen, heads, head_dim); mask and scale."""

    layer: str
    tensors: tuple[Tensor, ...]
    causal: bool
    scale: float | None


@dataclass(eq=False)
class Calls:
    """What the attention calls of one wrapped module share.

    Args:
        root: what errors call the module.
        whole: attend within this process, as the module did before it was wrapped.
        generated: a transformers model within the module generated tokens off the ring in the last forward.
        trace: where calls are kept, if they are.
        key: of `_known`; text, since torch.compile takes a number that has changed for a variable one.
    """

    options: Options
    root: str
    called: bool = False
    generated: bool = False
    whole: bool = False
    trace: list[Call] | None = None
    key: str = field(default_factory=map(str, count()).__next__, init=False)

    def __post_init__(self) -> None:
        _known[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return Calls(self.options, self.root)

    def check_called(self) -> None:
        """Raise RuntimeError at the end of the first forward if nothing was intercepted in it."""
        if self.generated:
            self.generated = False
        elif not self.called:
            raise RuntimeError(
                f"{self.root} must call scaled_dot_product_attention, RingAttention or a transformers model, got no "
                "such call in its forward; its attention cannot be seen, and would stay within each rank's shard."
            )

    def note(self, layer: nn.Module, *tensors: Tensor, causal: bool, scale: float | None) -> None:
        """A layer attends."""
        _mark_called(self.key)
        if self.trace is not None:
            self.trace.append(Call(self.name_of(layer), tuple(x.detach() for x in tensors), causal, scale))

    def name_of(self, layer: nn.Module) -> str:
        """Read only where it is needed: torch.compile compiles code anew for each name that it reads."""
        return str(layer._ringflash_name) or self.root


_known: WeakValueDictionary[str, Calls] = WeakValueDictionary()


@torch.compiler.assume_constant_result
def _mark_called(key: str) -> None:
    """Note that a module attends; while compiling at once, since a compiled checkpoint may not change an object."""
    _known[key].called = True


class Interception(TorchFunctionMode):
    """Attention calls of one layer's forward; those of layers within it are theirs."""

    def __init__(self, calls: Calls, layer: nn.Module) -> None:
        super().__init__()
        self.calls, self.layer = calls, layer
        self.recomputation = _recomputation()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The function's result; inside an attention nothing is intercepted again."""
        kwargs = kwargs or {}
        if is_generating():
            self.calls.generated = True
            return func(*args, **kwargs)
        kind = _kind(func)
        if func is F.scaled_dot_product_attention:
            alone = self.recomputation is not None and torch.compiler.is_compiling()  # a function that the layer calls
            return (_uncompiled if alone else _in_place_of_torch)(self._attend, *args, **kwargs)
        if kind == "ring":
            with torch._C.DisableTorchFunction():
                self.calls.note(self.layer, *args[:3], causal=args[5], scale=args[6])
                return func(*args, **kwargs)
        if kind is not None:
            self._refuse(f"attend by scaled_dot_product_attention, got {kind}; call torch.nn.functional's")
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
        """torch.nn.functional.scaled_dot_product_attention, over the whole sequence."""
        self._check(query, key, value, attn_mask, dropout_p, enable_gqa)
        query, key, value = (autocast(x) for x in (query, key, value))
        q, k, v = (x.transpose(1, 2) for x in differentiate_alike(query, key, value))
        self.calls.note(self.layer, q, k, v, causal=is_causal, scale=scale)
        if self.calls.whole:
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        options = self.calls.options
        out = ring_attention(
            q, k, v, group=options.group, causal=is_causal, softmax_scale=scale, layout=options.layout,
            impl=options.impl, transport=options.transport, deterministic=options.deterministic,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, enable_gqa: bool
    ) -> None:
        """Refuse what is no causal or full attention over the sequence that the ranks share."""
        shapes = tuple(tuple(x.shape) for x in (query, key, value))
        if mask is not None:
            self._refuse(f"attend without attn_mask, got one {tuple(mask.shape)}; use is_causal, or RingAttention")
        if dropout > 0:
            self._refuse(f"attend with dropout_p 0, got {dropout}; set the dropout of its attention to 0")
        if not all(x.is_floating_point() for x in (query, key, value)):
            self._refuse(f"attend in floating point, got {query.dtype}, {key.dtype}, {value.dtype}; cast them")
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
            self._refuse(f"attend on (batch, heads, seqlen, head_dim), got {shapes}; add the missing dimensions")
        if query.shape[2] != key.shape[2]:
            self._refuse(
                f"attend to itself, got seqlen_q {query.shape[2]}, seqlen_k {key.shape[2]}; no cross-attention"
            )
        if query.shape[1] != key.shape[1] and not enable_gqa:
            self._refuse(f"attend with as many heads in k as in q, got {shapes}; pass enable_gqa=True")
        if self.recomputation != _recomputation():
            self._refuse(
                "attend in a forward that is checkpointed as a whole, got a checkpoint or no_grad around the call "
                "alone; checkpoint the module, not a function in it"
            )

    def _refuse(self, rest: str) -> None:
        """Raise, naming the layer."""
        with torch._C.DisableTorchFunction():
            _raise_together(self.calls.key, f"{self.calls.name_of(self.layer)} must {rest}.")


def _in_place_of_torch(attend: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The attention, inside which nothing is intercepted again."""
    with torch._C.DisableTorchFunction():
        return attend(*args, **kwargs)


_uncompiled = torch.compiler.disable(  # what a checkpoint changes is seen outside of the compiler alone
    _in_place_of_torch, reason="attention is compiled with the layer that calls it; compile the module"
)


@torch.compiler.assume_constant_result
def _raise_together(key: str, text: str) -> NoReturn:
    """Raise on this rank, and on those that go on to the ring without an error; while compiling at once."""
    error = NotImplementedError(text)
    agree(_known[key].options.group, {}, error)
    raise error


@torch.compiler.assume_constant_result
def _kind(func: Any) -> str | None:
    """ "ring" for our operator, the name of any other that attends, None for one that does not."""
    name = getattr(func, "__name__", "")
    if name == _RING:
        return "ring"
    return name if any(part in name for part in _ATTENTION) else None


def _recomputation() -> tuple[bool, Callable[..., Any] | None] | None:
    """What activation checkpointing changes around the function that it will run again; None while compiling.

    A reentrant checkpoint runs it without gradients, another one with hooks on what is saved.
    """
    if torch.compiler.is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = hooks[0] if hooks else None
    within = getattr(pack, "__module__", None) == "torch.utils.checkpoint"
    return torch.is_grad_enabled(), pack if within else None
