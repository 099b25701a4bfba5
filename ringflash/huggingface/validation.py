"""Parts of a model, and checks of its adapters and attention calls that need no tensor's values.

`model_checks` checks the model as a whole. An attention call has find_static_error and, in layer 0, find_shape_error,
which `consistency` raises on every rank.
"""

from __future__ import annotations

import sys
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.huggingface.global_length import LENGTH_DEPENDENT
from ringflash.huggingface.spans import LayerSpans
from ringflash.sequence.layout import read_documents

# Arguments that models pass to every attention call and no attention reads.
_HARMLESS = {
    "position_ids", "cache_position", "num_items_in_batch", "labels", "shift_labels", "is_token", "logits_to_keep",
    "output_hidden_states", "return_dict", "columns",
}  # fmt: skip

_REMEDIES = {
    "softcap": "use a model without attention softcapping",
    "head_mask": "prune the heads instead",
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        "pass the bounds of the whole packed sequence as cu_seqlens",
    ),
    **dict.fromkeys(
        ("use_cache", "past_key_values", "cache"),
        "pass use_cache=False; to generate, call generate of the model that set_group was given",
    ),
    "output_attentions": "pass output_attentions=False; the weights never exist",
    "output_router_logits": "set it in the configuration and call CausalLMWithLoss; this loss would be the shard's",
}


# Classes of layers in which tokens interact outside attention, and which `recurrent_layers` runs in sequence order.
RECURRENT_LAYERS = {
    "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet",
    "KimiLinearDeltaAttention", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "FalconH1Mixer",
    "Lfm2ShortConv", "Zamba2MambaMixer",
}  # fmt: skip
_KINDS = ("full_attention", "sliding_attention", "attention")
_RECURRENT_KINDS = ("linear_attention", "hybrid", "conv", "mlp", "moe")  # also known in models with such layers


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """Return the layers that `recurrent_layers` runs in sequence order, in the order of the layers."""
    return [module for module in model.modules() if type(module).__name__ in RECURRENT_LAYERS]


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that follow `attn_implementation`, in the order of the layers."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]


def name_of_layer(module: nn.Module) -> str:
    """Return the class of a layer, and its index in the model if it has one."""
    return f"{type(module).__name__} {getattr(module, 'layer_idx', '')}"


def find_decoder(model: nn.Module) -> nn.Module:
    """Return the part of a model that reads the sequence, without towers for images or sound."""
    get_decoder: Any = getattr(model, "get_decoder", None)
    decoder = None if get_decoder is None else get_decoder()
    return decoder if decoder is not None and attention_modules(decoder) else model


def takes_spans(model: nn.Module) -> bool:
    """Return True if a model's forward takes token types and makes spans of them, whose tokens see one another."""
    names = {"token_type_ids", "mm_token_type_ids"}
    return any(
        hasattr(module, "get_decoder") and not names.isdisjoint(signature(type(module).forward).parameters)
        for module in model.modules()
    )


def layer_type(module: nn.Module) -> str | None:
    """Return the entry of `layer_types` for the layer of an attention module, or None if there is none."""
    config: Any = getattr(module, "config", None)
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return types[index] if types and index is not None else None


def chunk_size(module: nn.Module) -> int | None:
    """Return the tokens of a chunk in a layer with chunked attention (Llama 4), or None for other layers."""
    if layer_type(module) != "chunked_attention":
        return None
    config: Any = module.config
    return config.attention_chunk_size


def without_peft(model: nn.Module) -> nn.Module:
    """Return the transformers model inside PEFT's wrappers, after `check_adapters`, or the model itself."""
    if getattr(model, "peft_config", None) is None:
        return model
    check_adapters(model)
    return next((module for module in model.modules() if "lm_head" in module._modules), model)


def check_adapters(model: nn.Module) -> None:
    """Raise NotImplementedError for PEFT adapters that do more than change what a layer computes for each token.

    Those that prepend tokens, add to the loss, or search the input for tokens would act on the shard.
    """
    configs: Any = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if _changes_forward(config.peft_type) or getattr(config, "alora_invocation_tokens", None):
            kind = "LORA with alora_invocation_tokens" if config.peft_type == "LORA" else str(config.peft_type.value)
            raise NotImplementedError(
                f"peft_type must be one that only changes layers, such as LORA, got {kind}, which also changes the "
                "model's inputs or its loss; those of a shard are not those of the sequence."
            )


def _changes_forward(peft_type: Any) -> bool:
    from peft import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    return PEFT_TYPE_TO_TUNER_MAPPING[peft_type].forward not in (BaseTuner.forward, nn.Module.forward)


def find_static_error(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    dropout: float,
    window: int | None,
    causal: bool,
    kwargs: dict,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    spans: LayerSpans | None = None,
    layout: str = "zigzag",
) -> Exception | None:
    """Return the error for arguments that ring attention does not support, or None."""
    try:
        check_kwargs(kwargs)
        check_layer_type(module)
        if spans is None:
            check_direction(module)
        elif (problem := spans.find_error(cu_seqlens, window, layout)) is not None:
            raise problem
        if dropout > 0:
            raise NotImplementedError(f"dropout must be 0, got {dropout}; set config.attention_dropout = 0.")
        _check_length(query, key)
        _check_window(module, window, causal)
        _check_sinks(query, sinks)
        _check_padding(kwargs.get("is_token"), causal)
        _check_documents(module, cu_seqlens)
    except (NotImplementedError, ValueError) as error:
        return error
    return None


def check_kwargs(kwargs: dict[str, Any]) -> None:
    """Raise NotImplementedError for an argument that ring attention would have to ignore."""
    for name, value in kwargs.items():
        if name in _HARMLESS or value is None or value is False:
            continue
        remedy = _REMEDIES.get(name, "drop it; attention would have to ignore it")
        shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise NotImplementedError(f"{name} must not be given to ringflash attention, got {shown}; {remedy}.")


def find_base(model: nn.Module, attention: nn.Module) -> nn.Module:
    """Return the innermost model that holds the attention layer: the decoder without its head and other towers."""
    holders = [m for m in model.modules() if hasattr(m, "set_attn_implementation") and attention in set(m.modules())]
    return holders[-1] if holders else model


def check_layer_type(module: nn.Module) -> None:
    """Raise NotImplementedError for a model with a layer in which a token sees anything but an interval of keys.

    Every layer of the model is checked, because convolutions and recurrences never call attention themselves.
    """
    config = getattr(module, "config", None)
    kinds = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
    known = _KINDS + (_RECURRENT_KINDS if _has_recurrent_layers(type(module).__module__) else ())
    for kind in kinds:
        if kind not in known and not _is_chunked(module, kind):
            raise NotImplementedError(
                f"layer_types must be full_attention, sliding_attention or Llama 4's chunked_attention, got {kind!r}; "
                "use another attn_implementation."
            )


def _is_chunked(module: nn.Module, kind: str) -> bool:
    """Return True if the model's code builds chunked masks; the configuration's word is not enough."""
    if kind != "chunked_attention" or not getattr(module.config, "attention_chunk_size", None):
        return False
    return hasattr(sys.modules[type(module).__module__], "create_chunked_causal_mask")


@torch.compiler.assume_constant_result  # or all of sys.modules would be traced
def _has_recurrent_layers(name: str) -> bool:
    """Return True if a model's code has recurrent layers of `RECURRENT_LAYERS`; `model_checks` refuses all others."""
    return not RECURRENT_LAYERS.isdisjoint(vars(sys.modules[name]))


def rope_types(module: nn.Module) -> list[str | None]:
    """Return the rope_types of a module's configuration: one, or one per layer type."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    return [x.get("rope_type") for x in (parameters, *parameters.values()) if isinstance(x, dict)]


def check_without_hooks(module: nn.Module) -> None:
    """Raise NotImplementedError for a model in which replacing the attention is not enough: it needs `set_group`."""
    found = "recurrent layers" if _has_recurrent_layers(type(module).__module__) else None
    if any(kind in LENGTH_DEPENDENT for kind in rope_types(module)):
        found = "rotary angles that depend on the length"
    if found is not None:
        raise NotImplementedError(
            f"{type(module).__name__} must belong to a model in which only attention depends on other tokens, got a "
            f"model with {found}, which would be those of each shard; call ringflash.huggingface.set_group."
        )


def check_direction(module: nn.Module) -> None:
    """Raise NotImplementedError for a bidirectional layer whose later tokens transformers' own masks may hide.

    Gemma passes the setting to flash attention only; PaliGemma sets it for the prompt, not for the answer.
    """
    asked = getattr(getattr(module, "config", None), "use_bidirectional_attention", None)
    if asked and not getattr(module, "is_causal", True):
        raise NotImplementedError(
            f"use_bidirectional_attention must be unset, got {asked!r}, which some attn_implementations of "
            "transformers follow and others do not; set config.is_causal=False for full attention."
        )


def find_noise_error(model: Any) -> Exception | None:
    """Return the error for NEFTune, whose noise is divided by the root of the length, or None."""
    if not getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        return None
    return NotImplementedError(
        "neftune_noise_alpha must be None, got noise whose size depends on the length of the shard; leave it out."
    )


def _check_length(query: Tensor, key: Tensor) -> None:
    if key.shape[2] != query.shape[2]:
        raise NotImplementedError(
            f"key must have the length of query ({query.shape[2]}), got {key.shape[2]}; pass use_cache=False."
        )


def _check_window(module: nn.Module, window: int | None, causal: bool) -> None:
    """Raise NotImplementedError unless a layer passes on the window or chunks that its configuration declares."""
    if window is None and _is_windowed(module):
        raise NotImplementedError(
            "sliding_window must reach the attention of a sliding layer, got None; make the configuration's None, too."
        )
    if window is not None and window != (declared := _declared_window(module, window)):
        raise NotImplementedError(
            f"sliding_window must be what the configuration says of the layer ({declared}), got {window} from the "
            "layer; change the configuration before the model is built from it."
        )
    if window is not None and (window < 1 or not causal):
        raise NotImplementedError(
            f"sliding_window must be 1 or more on a causal layer, got {window}, causal={causal}; use full attention."
        )
    if not causal and chunk_size(module) is not None:
        raise NotImplementedError(
            "chunked_attention must be causal, got causal=False, which transformers follows in the other layers only; "
            "use full attention."
        )


def _check_sinks(query: Tensor, sinks: Tensor | None) -> None:
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise NotImplementedError(
            f"s_aux must have a logit for each head ({query.shape[1]},), got {tuple(sinks.shape)}; use another model."
        )


def _check_padding(is_token: Tensor | None, causal: bool) -> None:
    if is_token is not None and not causal:
        raise NotImplementedError(
            "attention_mask must be None in prepare_batch for full attention, got a mask: queries would see the "
            "padding; make padding a separate document (ringflash.pad_sequence with cu_seqlens)."
        )


def _check_documents(module: nn.Module, cu_seqlens: Tensor | None) -> None:
    """Raise NotImplementedError unless documents are plain in a model with chunks, which count from their starts."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    if cu_seqlens is not None and cu_seqlens.dim() == 2 and "chunked_attention" in kinds:
        read_documents(cu_seqlens).plain_bounds("layers that attend in chunks")


def _is_windowed(module: nn.Module) -> bool:
    """Return True if transformers' own mask of the layer has a window; some models set it only in the mask."""
    if (kind := layer_type(module)) is not None:
        return kind == "sliding_attention"
    return bool(getattr(getattr(module, "config", None), "sliding_window", None))


def _declared_window(module: nn.Module, given: int) -> int | None:
    """Return the window of transformers' own mask, or the given one if the configuration has no `sliding_window`."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "sliding_window"):
        return given
    return config.sliding_window if _is_windowed(module) else None


def find_shape_error(query: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Exception | None:
    """Return the error for a mask or positions of the wrong shape, or None.

    Args:
        query: (batch, num_heads, seqlen_local, head_dim).
    """
    if mask is not None and mask.dim() != 2:
        return NotImplementedError(
            f"attention_mask must be None, got a mask of {mask.dim()} dimensions; describe the mask by cu_seqlens, "
            "sliding_window and is_causal."
        )
    rows, length = query.shape[0], query.shape[2]
    got = None if position_ids is None else tuple(position_ids.shape)
    if got is not None and len(got) == 3 and got[0] in (3, 4):
        got = got[1:]  # parts of M-RoPE, the text's before them or not
    if got not in ((1, length), (rows, length)):
        remedy = "pass ringflash.local_positions(...)[None]"
        if position_ids is None:
            remedy += " to the model, and the model to set_group, which looks for them where its attention has none"
        return ValueError(
            f"position_ids must be (1 or batch, {length}), also in 3 or 4 parts (M-RoPE), got {got}; {remedy}."
        )
    return None
