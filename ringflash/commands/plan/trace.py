"""Bytes that the layers of a transformers model save for autograd and move in memory, from a step on the meta device.

Operators other than matmuls are limited by memory traffic on a GPU, so the bytes that they move say how long they take.

No values are computed. Attention is replaced by a stand-in that saves the same tensors as ring attention (q, k, v, out
and lse) and counts no memory traffic.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ringflash.attention.inputs import pad_values
from ringflash.huggingface.attention_function import apply_sinks
from ringflash.huggingface.validation import find_static_error
from ringflash.memory.tiles import modules_to_tile

TOKENS = 512  # length of the forward; saved bytes are proportional to it
_NAME = "saved_bytes"  # a name with "flash" would make transformers look for a package
_PRODUCTS = {operator.__name__ for operator in flop_registry} | {"_grouped_mm", "_scaled_grouped_mm"}
_NOTHING_MOVED = {"_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_LOOKED_UP = {"embedding", "embedding_dense_backward"}  # only one row per token
_NOTHING_READ = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "zero_", "fill_"}


class SavedBytes(NamedTuple):
    """Bytes that one layer saves per token.

    layer: everything.  mlp: by the MLP, without its input.  tiled: by the modules that tiles recompute, without their
    inputs.  input: the layer's own input; 0 if its first norm saves a copy instead.
    """

    layer: float
    mlp: float
    tiled: float
    input: float


class Traffic(NamedTuple):
    """Bytes moved per token and layer, averaged over the layers.

    forward: in the forward.  tiled: the part of it in modules that tiles recompute.  backward: in the backward.
    """

    forward: float
    tiled: float
    backward: float


class ModelTrace(NamedTuple):
    """Results of a traced step.

    layers: saved bytes of each layer.  multiplied: parameters that multiply a token in plain (ungrouped) matmuls.
    keys: the largest (KV heads, head_dim, that of values) of an attention.  passed: memory traffic between matmuls.
    """

    layers: list[SavedBytes]
    multiplied: float
    keys: tuple[int, int, int]
    passed: Traffic


class TrafficCounter(TorchDispatchMode):
    """Sum the bytes that operators read and write, except matmuls, whose time depends on their FLOPs.

    Every operator counts as one kernel, which reads its tensors once and writes its results once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count its bytes."""
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if not (func.is_view or name in _PRODUCTS | _NOTHING_MOVED | _LOOKED_UP):
            read = {} if name in _NOTHING_READ else {id(x): x for x in _tensors((args, kwargs))}
            self.num_bytes += sum(map(_num_bytes, (*read.values(), *_tensors(out))))
        return out


def _num_bytes(x: Tensor) -> int:
    """Return the size of a tensor in bytes; elements that an expanded dim repeats are counted once."""
    total = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        total *= size if stride else 1
    return total


def trace_layers(model: nn.Module) -> ModelTrace:
    """Trace a step without checkpointing or tiles; rotary angles, which all layers share, are not counted.

    Args:
        model: a causal language model on the meta device, in bf16.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    keys: list[tuple[int, int, int]] = []
    AttentionInterface.register(_NAME, partial(_attention, keys))
    AttentionMaskInterface.register(_NAME, lambda **_: None)
    body: Any = model.get_submodule("model")
    passes = TrafficCounter()
    counts = [_LayerCounter(layer, passes) for layer in body.layers]
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation(_NAME)  # type: ignore[operator]
    try:
        ids, positions = (torch.zeros(1, TOKENS, dtype=torch.long, device="meta") for _ in range(2))
        with passes, FlopCounterMode(display=False) as counter:
            out = body(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)[0]
        forward = passes.num_bytes
        with passes:
            _backward(body, out)
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
        for count in counts:
            count.remove()
    moved = (forward, sum(count.tiled_passes for count in counts), passes.num_bytes - forward)
    passed = Traffic(*(num_bytes / (TOKENS * len(counts)) for num_bytes in moved))
    return ModelTrace([count.kept for count in counts], counter.get_total_flops() / (2 * TOKENS), max(keys), passed)


@contextmanager
def with_liger(model: nn.Module) -> Iterator[None]:
    """Make modules save and move the same bytes as with Liger: fused norms and MLPs, rotary embedding in place."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    gated = [module for module in model.modules() if hasattr(module, "gate_proj") and hasattr(module, "act_fn")]
    family = vars(sys.modules[type(model).__module__])
    rotate = family["apply_rotary_pos_emb"]
    for norm in norms:
        norm.forward = partial(_Fused.apply, norm.weight)
    for mlp in gated:
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(_Fused.apply(mlp.gate_proj(x), mlp.up_proj(x)))
    family["apply_rotary_pos_emb"] = lambda q, k, *_, **__: (q.neg(), k.neg())
    try:
        yield
    finally:
        family["apply_rotary_pos_emb"] = rotate
        for module in (*norms, *gated):
            vars(module).pop("forward", None)  # counting may already have removed it


class _Fused(torch.autograd.Function):
    """Stand-in for a kernel that reads two tensors, writes one like the second, and saves both for its backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.add(b, a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        of_a = torch.add(grad, b) if a.shape == b.shape else torch.zeros_like(a)
        return of_a, torch.add(grad, a if a.shape == b.shape else b)


def _backward(body: nn.Module, out: Tensor) -> None:
    """Run the backward to every trainable parameter."""
    trained = [parameter for parameter in body.parameters() if parameter.requires_grad]
    try:
        torch.autograd.grad(out, trained, torch.empty_like(out), allow_unused=True)
    except NotImplementedError as error:  # torch's, for the meta device; only ringflash's may pass as such
        raise RuntimeError(str(error)) from error


def _mlp_of(layer: nn.Module) -> nn.Module:
    """Return the largest child of a layer without attention: its MLP or experts."""
    others = [child for child in layer.children() if not any(hasattr(m, "is_causal") for m in child.modules())]
    return max(others, key=lambda child: sum(p.numel() for p in child.parameters()))


@dataclass
class _ModuleGroup:
    """Counters of a group of modules: bytes saved for backward, and bytes moved between matmuls."""

    num_bytes: int = 0
    passes: int = 0


class _LayerCounter:
    """Count the storages that the forward of a layer saves, and the memory traffic of its groups of modules."""

    def __init__(self, layer: nn.Module, passes: TrafficCounter) -> None:
        self._passes = passes
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._inputs = set[int]()
        self._shared = {p.untyped_storage()._cdata for p in layer.parameters()}
        self._mlp, self._tiled = _ModuleGroup(), _ModuleGroup()
        self._running: list[tuple[_ModuleGroup, set[int]]] = []  # with the storages of the inputs
        self._layer, self._parts = layer, {_mlp_of(layer): [self._mlp]}
        for module in modules_to_tile(layer):
            self._parts.setdefault(module, []).append(self._tiled)
        layer.forward = self._counted(layer.forward)  # type: ignore[method-assign]
        for module, parts in self._parts.items():
            module.forward = self._marked(module.forward, parts)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the forwards of the modules."""
        for module in (self._layer, *self._parts):
            vars(module).pop("forward")

    @property
    def tiled_passes(self) -> int:
        """Bytes moved by the modules that tiles recompute."""
        return self._tiled.passes

    @property
    def kept(self) -> SavedBytes:
        """Saved bytes per token."""
        whole = sum(storage.nbytes() for storage in self.storages.values())
        own = sum(self.storages[key].nbytes() for key in self._inputs & self.storages.keys())
        counts = (whole, self._mlp.num_bytes, self._tiled.num_bytes, own)
        return SavedBytes(*(num_bytes // TOKENS for num_bytes in counts))

    def _counted(self, forward: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._shared |= {x.untyped_storage()._cdata for x in _tensors(kwargs.get("position_embeddings"))}
            self._inputs = {x.untyped_storage()._cdata for x in _tensors(args[:1])}
            with saved_tensors_hooks(self._keep, lambda x: x):
                return forward(*args, **kwargs)

        return counted

    def _marked(self, forward: Any, parts: list[_ModuleGroup]) -> Any:
        def marked(*args: Any, **kwargs: Any) -> Any:
            inputs = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
            self._running += [(part, inputs) for part in parts]
            before = self._passes.num_bytes
            out = forward(*args, **kwargs)
            for part in parts:
                part.passes += self._passes.num_bytes - before
            del self._running[-len(parts) :]
            return out

        return marked

    def _keep(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._shared and key not in self.storages:
            self.storages[key] = storage
            for part, inputs in self._running:
                if key not in inputs:
                    part.num_bytes += storage.nbytes()
        return x


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


class _StandIn(torch.autograd.Function):
    """Attention that saves the same tensors as ring attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = (
            q.new_empty(*q.shape[:3], v.shape[3]),
            q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32),
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def _attention(
    keys: list[tuple[int, int, int]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand-in for the attention function of `ringflash.huggingface`, with the same refusals and padding of values."""
    error = find_static_error(module, query, key, dropout, sliding_window, True, kwargs, s_aux)
    if error is not None:
        raise error
    width, value = value.shape[-1], pad_values(key, value)
    keys.append((key.shape[1], key.shape[3], value.shape[3]))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = _StandIn.apply(q, k, v)
    out = out if s_aux is None else apply_sinks((out, lse), s_aux)
    return out[..., :width], None
