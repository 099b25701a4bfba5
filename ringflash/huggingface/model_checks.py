"""Checks of a model that `set_group` makes: models that are wrong on a shard even if every attention is right."""

from __future__ import annotations

from inspect import signature

from torch import nn

from ringflash.huggingface.global_length import LENGTH_DEPENDENT, depends_on_length
from ringflash.huggingface.validation import (
    check_adapters,
    check_direction,
    check_layer_type,
    recurrent_modules,
    rope_types,
    takes_spans,
)

# Ends of the names of classes whose heads pick tokens, such as the last one, or compare all of them.
_POOLING_HEADS = (
    "ForSequenceClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction",
    "DoubleHeadsModel",
)  # fmt: skip


def check_on_ring(model: nn.Module, base: nn.Module, attentions: list[nn.Module]) -> None:
    """Reject a model that would compute something else on a shard than on the sequence.

    Args:
        base: as `find_base` returns it.
        attentions: its attention modules.
    Raises:
        NotImplementedError: adapters, heads, layers or positions that follow the shard.
    """
    check_adapters(model)
    _check_pooling(model, base)
    _check_layers(base)
    check_rope(base)
    spans = takes_spans(model)  # transformers' own masks follow these; each call checks them
    for module in attentions:
        _check_attention_class(module)
        check_layer_type(module)
        if not spans:
            check_direction(module)


def _check_layers(base: nn.Module) -> None:
    """Reject layers that mix tokens or are left out at random, and positions that the model counts itself."""
    for layer in recurrent_modules(base):
        if not any(p.kind is p.VAR_KEYWORD for p in signature(type(layer).forward).parameters.values()):
            raise NotImplementedError(
                f"{type(layer).__name__} must pass keywords on to its convolution, got a forward without **kwargs; use "
                "a later version of transformers."
            )
    ordered = {part for layer in recurrent_modules(base) for part in layer.modules()}
    for name, module in base.named_modules():
        mixes = isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))
        if mixes and module not in ordered:
            raise NotImplementedError(
                f"{name} must treat tokens one by one, got {type(module).__name__}, which would not see tokens of "
                "other shards; use a model with attention, Mamba-2 layers, gated delta rules or LFM2's convolutions "
                "(docs/huggingface.md)."
            )
        if rate := getattr(module, "layerdrop", 0):
            raise NotImplementedError(
                f"layerdrop must be 0, got {rate}: each rank would leave out different layers; set "
                "config.layerdrop = 0 before the model is built."
            )
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise NotImplementedError(
                f"{name} must count positions from 0, got {type(module).__name__}, which starts after padding_idx; "
                "use another model."
            )
    if "position_ids" not in signature(type(base).forward).parameters:
        raise NotImplementedError(
            f"model must take position_ids, got {type(base).__name__}, which counts the tokens of the shard; use "
            "another model."
        )


def _check_pooling(model: nn.Module, base: nn.Module) -> None:
    """Reject a head that picks tokens of a sequence: it would pick them from each shard."""
    heads = [module for module in model.modules() if type(module).__name__.endswith(_POOLING_HEADS)]
    poolers = [module for name, module in base.named_children() if name == "pooler" and module is not None]
    for module in heads + poolers:
        raise NotImplementedError(
            f"model must return a result for each token, got {type(module).__name__}, which would pick tokens of each "
            "shard; give set_group the model without it, and gather the tokens that it needs "
            "(ringflash.unshard_sequence)."
        )


def _check_attention_class(module: nn.Module) -> None:
    """Reject attention that calls flash-attention itself, on the shard only.

    Falcon and GPT-J have a class for each implementation. If their code was loaded before `register`, they take that of
    flash-attention for every name with "flash" in it.
    """
    if type(module).__name__.endswith("FlashAttention2"):
        raise NotImplementedError(
            f"attention must follow attn_implementation, got {type(module).__name__}, which would attend to each shard "
            "by itself; use another model."
        )


def check_rope(base: nn.Module) -> None:
    """Reject rotary angles that depend on the length, if no layer can be given that length."""
    for kind in rope_types(base):
        if kind in LENGTH_DEPENDENT and not any(depends_on_length(module) for module in base.modules()):
            raise NotImplementedError(
                f"rope_type must be one whose angles do not depend on the input's length, got {kind!r} and no rotary "
                "layer that says so; use yarn, llama3 or linear."
            )
