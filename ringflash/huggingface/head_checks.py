"""Checks that a causal model's logits and loss are those that its decoder and output embedding give."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.huggingface.shard_loss import ShardLoss

_MEAN_LOSS = torch.tensor(0.5, device="cpu")  # in place of a mean over tokens
_PROBE = tuple(sign * 2.0**power for power in (0, 20, 8, 3, -3, -8) for sign in (1, -1))  # exact in every dtype


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
    found = "a forward that was set on the object" if set_forward else _hook_of(causal)
    if found is None:
        return None
    return NotImplementedError(
        f"{type(causal).__name__} must have no forward or forward hooks of its own in CausalLMWithLoss, which calls "
        f"the decoder only, got {found}, which would not be called; leave it out, or put it on the CausalLMWithLoss."
    )


# Origins of hooks that gather parameters, which `CausalLMWithLoss` does as well, or that observe a forward.
_KNOWN_HOOKS = ("torch.distributed.", "deepspeed.", "ringflash.", "lightning.")


def _hook_of(module: nn.Module) -> str | None:
    """Return the name of a forward hook, or None."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        function = getattr(hook, "func", hook)  # of a partial
        if not (origin := f"{function.__module__}.").startswith(_KNOWN_HOOKS):
            return f"a forward hook, {origin}{getattr(function, '__qualname__', type(function).__name__)}"
    return None


def weight_of(head: Any) -> Tensor:
    """Return the weight that maps hidden states to logits; for a layer in PEFT's modules_to_save, that of its copy."""
    layer = getattr(head, "original_module", head)
    own_forward = forward_of_object(layer) is not None or type(layer).forward is not nn.Linear.forward
    hook = _hook_of(head) or _hook_of(layer)
    if not isinstance(layer, nn.Linear) or layer.bias is not None or own_forward or hook is not None:
        found = f"{type(layer).__module__}.{type(layer).__name__}"
        if getattr(layer, "bias", None) is not None:
            found += " with a bias"
        elif isinstance(layer, nn.Linear):
            found += f" with {hook or 'a forward of its own'}"
        raise NotImplementedError(
            f"lm_head must be a linear layer without bias, got {found}; call ringflash.loss.cross_entropy on the "
            "hidden states, or, with PEFT, leave lm_head out of target_modules."
        )
    weight: Tensor = head.weight
    return weight


@torch.no_grad()
def logit_scale(model: Any, labelled: bool) -> float:
    """Run the model's own forward on known hidden states, without decoder and head, and return logits / hidden states.

    Args:
        labelled: check that its loss is the mean over tokens, too, if it takes labels.
    Raises:
        NotImplementedError: logits that are not proportional to the hidden states, as with softcapping, or fewer than
            lm_head computes.
    """
    hidden = torch.tensor(_PROBE, dtype=torch.float64, device="cpu").expand(1, 2, -1)
    width = getattr(model.lm_head, "original_module", model.lm_head).out_features
    copies = -(-width // len(_PROBE))
    probe: Any = object.__new__(type(model))  # copy() would call the constructor of a model that FSDP2 shards
    probe.__dict__.update(vars(model), _loss_function=lambda *_, **__: _MEAN_LOSS)
    probe._modules = {
        **model._modules,
        "model": _Stub(model.model, lambda *args, **kwargs: _HiddenStates(hidden)),
        "lm_head": _Stub(model.lm_head, lambda x: x.repeat(1, 1, copies)[..., :width]),
    }
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
        labelled &= "labels" in signature(type(model).forward).parameters
        outputs = type(model).forward(probe, input_ids=ids, **({"labels": ids} if labelled else {}))
        logits = outputs.logits[:, :1]
    except Exception as error:  # the forward is the model's own code
        raise _head_error(model, f"{type(error).__name__} without its decoder: {error}") from error
    if logits.shape[-1] != width:
        raise _head_error(model, f"{logits.shape[-1]} of {width}")
    scales = logits.double() / hidden.repeat(1, 1, copies)[..., :width]
    scale = float(scales[0, 0, 0])
    if not all(abs(x.item() - scale) <= 1e-6 * abs(scale) for x in scales.aminmax()):
        raise _head_error(model, "others (as by final_logit_softcapping)")
    if labelled:
        _check_loss(model, outputs.loss, logits)
    return scale


def _check_loss(model: nn.Module, loss: Tensor, logits: Tensor) -> None:
    """Reject a model whose loss of two tokens 0 has other terms than the mean over tokens.

    Args:
        loss: _MEAN_LOSS, unless the model has other terms, or its own code for the mean.
        logits: (1, 1, vocab_size), of the first token.
    """
    if loss == _MEAN_LOSS:
        return
    mean = nn.functional.cross_entropy(logits[0].double(), torch.zeros(1, dtype=torch.int64, device="cpu"))
    if not abs(loss - mean) <= 1e-6 * mean:
        raise NotImplementedError(
            f"the loss of {type(model).__name__} must be the cross-entropy of its logits, got other terms (as by "
            "Bamba's z_loss_coefficient), which a ring would leave out; set their coefficients to 0, or compute the "
            "loss from the model's logits."
        )


def _head_error(model: nn.Module, got: str) -> NotImplementedError:
    return NotImplementedError(
        f"logits of {type(model).__name__} must be those of lm_head times a number, got {got}; compute the loss from "
        "the model's logits."
    )


class _Stub:
    """A callable in place of a module and of every module in it, with the attributes of the module."""

    def __init__(self, module: Any, call: Any) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _Stub(value, self._call) if isinstance(value, nn.Module) else value


class _HiddenStates:
    """A decoder's output in which everything but the last hidden state is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None
