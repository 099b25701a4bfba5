"""Checks for forwards, hooks and loss functions that a user has set on a model, and that a ring would not call."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from ringflash.huggingface.shard_loss import ShardLoss


def forward_of_object(module: nn.Module) -> Any:
    """Return a forward that was set on a module, without accelerate's wrappers; None for its class's or Liger's.

    Of a head, None also for TRL's forward in fp32, which TRL's fused head does not call: it casts by itself.
    """
    forward: Any = vars(module).get("forward")
    while isinstance(forward, partial):
        forward = forward.__wrapped__  # type: ignore[attr-defined]
    function = getattr(forward, "__func__", forward)
    of_liger = getattr(function, "__module__", "").startswith("liger_kernel")
    of_trl = _name_of(function).endswith("_cast_lm_head_to_fp32.<locals>.cast_forward_to_fp32")
    return None if of_liger or of_trl or function is type(module).forward else forward


def find_loss_error(causal: Any) -> Exception | None:
    """Return the error for a loss function that was given to the model, or is configured; None for transformers'."""
    from transformers.loss import loss_utils

    known = [loss_utils.LOSS_MAPPING[name] for name in ("ForCausalLM", "ForConditionalGeneration")]
    compute = getattr(causal, "loss_function", known[0])
    compute = compute.compute if isinstance(compute, ShardLoss) else compute
    part = loss_utils.fixed_cross_entropy
    pairs = ((compute, "ForCausalLMLoss"), (part, "fixed_cross_entropy"))
    replaced = [x for x, name in pairs if _name_of(x) != f"{loss_utils.__name__}.{name}"]
    if compute in known and (not replaced or _is_cross_entropy(compute, part)):
        return None
    return NotImplementedError(
        "loss_function must be transformers' own for causal models, because a ring computes the loss without it, got "
        f"{_name_of(replaced[0] if replaced else compute)}; remove it, or compute the loss from ringflash.log_probs."
    )


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"


@lru_cache(maxsize=8)
@torch.no_grad()
def _is_cross_entropy(compute: Any, part: Any) -> bool:
    """Return True if a replaced loss function of transformers gives the cross-entropy of five tokens.

    Args:
        part: function that `compute` calls; only a key of the cache.
    """
    logits = torch.linspace(-3, 3, 35, device="cpu").sin().view(1, 5, 7)
    labels = torch.tensor([[1, 2, -100, 3, 6]], device="cpu")
    losses = -logits.log_softmax(-1)[0, [0, 2, 3], [2, 3, 6]]
    try:
        for count, wanted in ((None, losses.mean()), (torch.tensor(5, device="cpu"), losses.sum() / 5)):
            if not abs(compute(logits, labels, 7, num_items_in_batch=count) - wanted) <= 1e-5:
                return False
    except Exception:  # the user's own code
        return False
    return True


def find_bypassed_error(causal: nn.Module) -> Exception | None:
    """Return the error for a forward or hooks of the model, which `CausalLMWithLoss` does not call; None without."""
    set_forward = forward_of_object(causal) is not None
    found = "a forward that was set on the object" if set_forward else hook_of(causal)
    if found is None:
        return None
    return NotImplementedError(
        f"{type(causal).__name__} must have no forward or hook of its own in a CausalLMWithLoss, got {found}: only the "
        "decoder in it is called. Remove it, or put it on the CausalLMWithLoss."
    )


# Origins of hooks that gather parameters, which `CausalLMWithLoss` does as well, or that observe a forward.
_KNOWN_HOOKS = ("torch.distributed.", "deepspeed.", "ringflash.", "lightning.")


def hook_of(module: nn.Module) -> str | None:
    """Return the name of a hook of the forward or the backward, or None."""
    for kind in ("forward", "backward"):
        hooks = (x for name in ("pre_hooks", "hooks") for x in vars(module)[f"_{kind}_{name}"].values())
        for function in (getattr(hook, "func", hook) for hook in hooks):  # of a partial
            if not (origin := f"{function.__module__}.").startswith(_KNOWN_HOOKS):
                return f"a {kind} hook, {origin}{getattr(function, '__qualname__', type(function).__name__)}"
    return None
