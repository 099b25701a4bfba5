"""Bytes that the layers of a transformers model save for autograd and move in memory, from a step on the meta device.

Operators other than matmuls are limited by memory traffic on a GPU, so the bytes that they move say how long they take.
No values are computed: ring attention has a form without numbers, which saves the same tensors.
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

from ringflash.memory.tiles import modules_to_tile

TOKENS = 512  # length of the forward; saved bytes are proportional to it
_PRODUCTS = {operator.__name__ for operator in flop_registry} | {"_grouped_mm", "_scaled_grouped_mm"}
_ATTENTION = {"ring_attention", "ring_attention_backward"}  # has rates of its own
_NOTHING_MOVED = {"_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_LOOKED_UP = {"embedding", "embedding_dense_backward"}  # only one row per token
_NOT_COUNTED = _PRODUCTS | _ATTENTION | _NOTHING_MOVED | _LOOKED_UP
_NOTHING_READ = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "zero_", "fill_"}


class SavedBytes(NamedTuple):
    """Bytes that one layer saves per token.

    Args:
        layer: everything that the layer saves.
        mlp: the part saved by modules that tiles recompute (without such modules, by the MLP), without their inputs.
        input: the part that is the layer's own input; 0 if its first norm saves a copy instead.
    """

    layer: float
    mlp: float
    input: float


@dataclass(frozen=True)
class Layers:
    """Bytes per token that the layers of a model save and move, with Liger's kernels or without.

    Args:
        kept: saved by the layer that saves most.
        kept_mean: saved by a layer on average.
        forward: moved between matmuls in the forward of a layer on average; `backward` likewise.
        mlp: the part of `forward` in the modules of `SavedBytes.mlp`.
    """

    kept: SavedBytes
    kept_mean: SavedBytes
    forward: float
    mlp: float
    backward: float


class ModelTrace(NamedTuple):
    """Results of a traced step.

    Args:
        layers: what the layers save and move.
        multiplied: parameters that multiply a token in plain (ungrouped) matmuls.
        keys: the largest (KV heads, head_dim of keys, head_dim of values) of an attention.
    """

    layers: Layers
    multiplied: float
    keys: tuple[int, int, int]


class TrafficCounter(TorchDispatchMode):
    """Sum the bytes that operators read and write, except matmuls, whose time depends on their FLOPs.

    Every operator counts as one kernel, which reads its tensors once and writes its results once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.keys: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count its bytes."""
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name == "ring_attention":
            self.keys.append((*args[1].shape[2:], args[2].shape[3]))
        if not (func.is_view or name in _NOT_COUNTED):
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
    """Trace a step without checkpointing or tiles; tensors that all layers share, as rotary angles, are not counted.

    Args:
        model: a causal language model on the meta device, in bf16, set up for a ring of one process.
    """
    body: Any = model.get_submodule("model")
    passes = TrafficCounter()
    saves = _Saves(body, passes)
    try:
        ids, positions = (torch.zeros(1, TOKENS, dtype=torch.long, device="meta") for _ in range(2))
        with passes, FlopCounterMode(display=False) as counter, saved_tensors_hooks(saves.keep, lambda x: x):
            out = body(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)[0]
        forward = passes.num_bytes
        with passes:
            _backward(body, out)
    finally:
        saves.remove()
    kept = saves.by_layer()
    mean = SavedBytes(*(sum(values) / len(kept) for values in zip(*kept, strict=True)))
    moved = (x / (TOKENS * len(kept)) for x in (forward, saves.mlp_bytes, passes.num_bytes - forward))
    layers = Layers(max(kept, key=lambda x: x.layer), mean, *moved)
    return ModelTrace(layers, counter.get_total_flops() / (2 * TOKENS), max(passes.keys))


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
            del module.forward


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


class _Group:
    """Modules of a layer: the storages that they save and are given, and the bytes that their forwards move."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.saved: dict[int, torch.UntypedStorage] = {}  # kept, so that no other storage gets the same key
        self.inputs = set[int]()
        self.moved = 0

    def saved_bytes(self, *, of_inputs: bool) -> int:
        """Return the bytes saved for a token: the modules' inputs, or everything else."""
        return sum(x.nbytes() for key, x in self.saved.items() if (key in self.inputs) == of_inputs) // TOKENS


class _Saves:
    """Hooks that note what autograd saves of a layer, and of its MLP."""

    def __init__(self, body: Any, passes: TrafficCounter) -> None:
        self._passes, self._running = passes, list[_Group]()
        self._shared = set(map(_key, body.parameters()))
        self._layers = [(_Group([x]), _Group(modules_to_tile(x) or [_mlp_of(x)])) for x in body.layers]
        self._hooks = [layer.register_forward_pre_hook(self._share, with_kwargs=True) for layer in body.layers]
        for group in (group for groups in self._layers for group in groups):
            for module in group.modules:
                self._hooks.append(module.register_forward_pre_hook(partial(self._enter, group), with_kwargs=True))
                self._hooks.append(module.register_forward_hook(partial(self._leave, group)))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def keep(self, x: Tensor) -> Tensor:
        """Note a tensor that autograd saves."""
        if x.is_meta and (key := _key(x)) not in self._shared:
            for group in self._running:
                group.saved[key] = x.untyped_storage()
        return x

    def by_layer(self) -> list[SavedBytes]:
        """Return the saved bytes of each layer."""
        saved = []
        for layer, mlp in self._layers:
            of_input, others = (layer.saved_bytes(of_inputs=x) for x in (True, False))
            saved.append(SavedBytes(of_input + others, mlp.saved_bytes(of_inputs=False), of_input))
        return saved

    @property
    def mlp_bytes(self) -> int:
        """Bytes moved by the MLPs of all layers."""
        return sum(mlp.moved for _, mlp in self._layers)

    def _share(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._shared |= set(map(_key, _tensors(kwargs)))  # all but the hidden states

    def _enter(self, group: _Group, module: nn.Module, args: Any, kwargs: Any) -> None:
        group.inputs |= set(map(_key, _tensors((args, kwargs))))
        group.moved -= self._passes.num_bytes
        self._running.append(group)

    def _leave(self, group: _Group, *_: Any) -> None:
        group.moved += self._passes.num_bytes
        self._running.remove(group)


def _mlp_of(layer: nn.Module) -> nn.Module:
    """Return the largest child of a layer without attention: its MLP or experts."""
    others = [child for child in layer.children() if not any(hasattr(m, "is_causal") for m in child.modules())]
    return max(others, key=lambda child: sum(p.numel() for p in child.parameters()))


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
