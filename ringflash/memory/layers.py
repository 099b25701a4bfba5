"""Layers that keep their input, and attention's results, and compute the rest again in the backward.

    forward    input -> [layer] -> output        kept: input, and (out, lse) of ringflash::ring_attention
    backward   input -> [layer again, attention's results taken as they were kept] -> gradients

transformers' own switch on its layers is used, so that FSDP2 and DeepSpeed see what they know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringflash.memory.offload import HostCopies


def checkpoint_layers(model: nn.Module, *, keep_attention: bool = True, offload: bool = False) -> None:
    """Checkpoint every layer of a transformers model, in training mode, in place.

    Args:
        keep_attention: attention is not computed again, nor its ring run again.
        offload: the inputs of the layers are copied to the host in the forward, pinned where they come from a GPU,
            and back in the backward. A GPU copies beside the layers' work, and holds one input more for it.
    Raises:
        NotImplementedError: a model without layers that transformers can checkpoint.
    """
    layers = checkpointable_layers(model)
    host = HostCopies() if offload else None
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_checkpointed, keep_attention, host)


def checkpointable_layers(model: nn.Module) -> Sequence[Any]:
    """The layers that transformers can checkpoint.

    Raises:
        NotImplementedError: there are none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise NotImplementedError(
            f"model must have layers of transformers' GradientCheckpointingLayer, got none in {type(model).__name__}; "
            "wrap its layers in torch.utils.checkpoint with ringflash.memory.layers.keep_attention as the policy."
        )
    return layers


def keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy for `create_selective_checkpoint_contexts`: ringflash's attention is kept, all else computed again."""
    kept = operator is torch.ops.ringflash.ring_attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(keep: bool, host: HostCopies | None, layer: Callable[..., Any], *args: Any) -> Any:
    contexts: dict[str, Any] = {}
    if keep:
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, keep_attention)
    with nullcontext() if host is None else _on_host(host, args):
        return checkpoint(layer, *args, use_reentrant=False, **contexts)


def _on_host(host: HostCopies, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """What is saved directly in it lies on the host: the checkpoint's inputs, not what the layer itself would save."""
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in args):
        return host.hooks()
    return save_on_cpu(pin_memory=False)
