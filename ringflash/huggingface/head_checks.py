"""Checks that a model has no forward, hook or loss function of the user's that a ring would not call."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ringflash.huggingface.shard_loss import ShardLoss


def forward_of_object(module: nn.Module) -> Any:
    """Return a forward that was set on a module, without accelerate's hooks; None if it gives what its class does."""
    forward: Any = vars(module).get("forward")
    while isinstance(forward, partial):
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    function = getattr(forward, "__func__", forward)
    of_liger = getattr(function, "__module__", "").startswith("liger_kernel")
    return None if of_liger or function is type(module).forward else forward


def find_loss_error(causal: Any) -> Exception | None:
    """Return the error for a loss function that was given to the model, or is configured; None for transformers'."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    known = [LOSS_MAPPING[name] for name in ("ForCausalLM", "ForConditionalGeneration")]
    compute = getattr(causal, "loss_function", known[0])
    compute = compute.compute if isinstance(compute, ShardLoss) else compute
    if compute in known:
        return None
    return NotImplementedError(
        "loss_function must be transformers' own of causal models, which the ring computes without it, got "
        f"{getattr(compute, '__qualname__', compute)!r}; leave it out, or compute the loss from ringflash.log_probs."
    )


def find_bypassed(causal: nn.Module) -> Exception | None:
    """Return the error for a forward or hooks of a model whose decoder is called without it, or None."""
    set_forward = forward_of_object(causal) is not None
    found = "a forward that was set on the object" if set_forward else hook_of(causal)
    if found is None:
        return None
    return NotImplementedError(
        f"{type(causal).__name__} must have no forward or forward hooks of its own in CausalLMWithLoss, which calls "
        f"the decoder only, got {found}, which would not be called; leave it out, or put it on the CausalLMWithLoss."
    )


# Origins of hooks that gather parameters, which `CausalLMWithLoss` does as well, or that observe a forward.
_KNOWN_HOOKS = ("torch.distributed.", "deepspeed.", "ringflash.", "lightning.")


def hook_of(module: nn.Module) -> str | None:
    """Return the name of a forward hook, or None."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        function = getattr(hook, "func", hook)  # of a partial
        if not (origin := f"{function.__module__}.").startswith(_KNOWN_HOOKS):
            return f"a forward hook, {origin}{getattr(function, '__qualname__', type(function).__name__)}"
    return None
