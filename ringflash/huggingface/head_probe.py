"""Probe of a model's head: its logits and loss if the decoder's output is replaced by known hidden states."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.huggingface.head_checks import forward_of_object, hook_of
from ringflash.huggingface.router_loss import check_routers, has_router_loss

_MEAN_LOSS = torch.tensor(0.5, device="cpu")  # in place of a mean over tokens
_PROBE = tuple(sign * 2.0**power for power in (0, 20, 8, 3, -3, -8) for sign in (1, -1))  # exact in every dtype


@torch.compiler.disable(reason="the model's forward is run on known values")
def check_head(model: nn.Module) -> float:
    """Return the number by which the model multiplies its logits, or raise if its head is not one we can compute."""
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise NotImplementedError(
            f"model must have .model and .lm_head, got {type(model).__name__}; call ringflash.loss.cross_entropy on "
            "its hidden states."
        )
    weight_of(model.lm_head)
    if has_router_loss(model):
        check_routers(model)
    return _logit_scale(model)


def weight_of(head: Any) -> Tensor:
    """Return the weight that maps hidden states to logits; for a layer in PEFT's modules_to_save, that of its copy."""
    layer = getattr(head, "original_module", head)
    own_forward = forward_of_object(layer) is not None or type(layer).forward is not nn.Linear.forward
    hook = hook_of(head) or hook_of(layer)
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
def _logit_scale(model: Any) -> float:
    """Run the model's own forward on known hidden states, without decoder and head, and return logits / hidden states.

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
        labelled = "labels" in signature(type(model).forward).parameters and not has_router_loss(model)
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
    """Reject a model whose loss has other terms than the mean over tokens.

    Args:
        loss: the model's loss for two labels 0: _MEAN_LOSS, unless it has other terms or its own code for the mean.
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
