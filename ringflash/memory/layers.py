"""Activation checkpointing of layers that saves attention's results and recomputes the rest.

    forward    input -> [layer] -> output                           saved: input, and (out, lse) of ring_attention
    backward   input -> [layer again, with saved (out, lse)] -> gradients

It uses transformers' own switch on its layers, which FSDP2 and DeepSpeed support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringflash.memory.offload import HostCopies

# From torch 2.15 on: attention's saved results bypass hooks that send tensors to the host, as they do before it.
_BYPASS = "respect_saved_tensors_hooks"
_SELECTIVE = {_BYPASS: False} if _BYPASS in signature(checkpoint).parameters else {}


def checkpoint_layers(model: nn.Module, *, keep_attention: bool = True, offload: bool = False) -> None:
    """Checkpoint every layer of a transformers model, in training mode, in place.

    Args:
        keep_attention: save attention's results, so that neither attention nor its communication runs again.
        offload: copy the layers' inputs to the host in the forward (pinned memory, if they are on a GPU) and back in
            the backward. Copies overlap with the layers' work, for which the GPU holds one more input.
    Raises:
        NotImplementedError: a model without layers that transformers can checkpoint.
    """
    layers = checkpointable_layers(model)
    host = HostCopies() if offload else None
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_checkpointed, keep_attention, host)


def checkpointable_layers(model: nn.Module) -> Sequence[Any]:
    """Return the layers that transformers can checkpoint.

    Raises:
        NotImplementedError: there are none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise NotImplementedError(
            f"model must have layers of transformers' GradientCheckpointingLayer, got none in {type(model).__name__}; "
            "wrap its layers in torch.utils.checkpoint with context_fn=ringflash.memory.layers.attention_kept."
        )
    return layers


def attention_kept() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return contexts for `torch.utils.checkpoint`, which save the results of ringflash's attention only."""
    forward, recomputation = create_selective_checkpoint_contexts(_policy)
    return forward, _OnlyAttention(recomputation)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is _attention() else CheckpointPolicy.PREFER_RECOMPUTE


def _attention() -> Any:
    return torch.ops.ringflash.ring_attention.default


class _OnlyAttention(TorchDispatchMode):
    """Recomputation that takes only attention's results from the forward, and computes all else.

    torch's own also looks for the other operators in the forward, and fails if it did not call one: ZeRO-3 and FSDP2
    gather a layer's parameters within the layer unless they were prefetched, in the forward and in the backward.
    """

    def __init__(self, recomputation: Any) -> None:
        super().__init__()
        self._saved = recomputation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is _attention():
            return self._saved.__torch_dispatch__(operator, types, args, kwargs)
        return operator(*args, **(kwargs or {}))


def _checkpointed(keep: bool, host: HostCopies | None, layer: Callable[..., Any], *args: Any) -> Any:
    options: dict[str, Any] = {"context_fn": attention_kept, **_SELECTIVE} if keep else {}
    with nullcontext() if host is None else _on_host(host, args):
        return checkpoint(layer, *args, use_reentrant=False, **options)


def _on_host(host: HostCopies, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Return a context that saves the checkpoint's inputs on the host, but nothing that the layer itself saves."""
    if any(isinstance(x, Tensor) and x.is_cuda for x in args):
        return host.hooks()
    return save_on_cpu(pin_memory=False)
