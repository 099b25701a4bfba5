"""The attention function behind attn_implementation="ringflash", its registration, and the group it runs over.

register      names `_attend` (attention) and `_pass_padding_mask` (masks) to transformers
set_group     checks a model, hooks it, and attaches its `ForwardInputs` (group, options) to its attention modules
_attend       one layer's call: checks, then `ring_attention`, with chunks (Llama 4) and sinks (GPT-OSS)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.attention.api import attend
from ringflash.attention.inputs import autocast, documents_of, require_grad_together
from ringflash.attention.sinks import apply_sinks
from ringflash.comm.call_numbers import in_layer, is_eager
from ringflash.comm.group import Group, resolve
from ringflash.huggingface.consistency import ShardInputs, check_consistency
from ringflash.huggingface.forward_inputs import ForwardInputs, refuse_media
from ringflash.huggingface.generation import generate_locally
from ringflash.huggingface.global_length import use_global_length
from ringflash.huggingface.model_checks import check_on_ring
from ringflash.huggingface.options import NAME, ModelRing, check_single_process, give_inputs, inputs_of
from ringflash.huggingface.reached_layers import mark_reached
from ringflash.huggingface.recurrent_layers import use_sequence_order
from ringflash.huggingface.shard_loss import guard_losses
from ringflash.huggingface.spans import LayerSpans, Use, read_spans, without_directions
from ringflash.huggingface.validation import (
    attention_modules,
    chunk_size,
    find_base,
    find_decoder,
    find_static_error,
    name_of_layer,
)
from ringflash.sequence.layout import DOCUMENT_LAYOUTS, granularity
from ringflash.sequence.mask import check_cu_seqlens, cut_into_chunks


def register() -> None:
    """Make attn_implementation="ringflash" known to transformers. May be called again.

    `set_group` gives each model its group. A model without a group runs only if there is a single process.

    Raises:
        RuntimeError: transformers 5 is not installed.
    """
    try:
        from transformers import AttentionInterface, masking_utils, modeling_utils
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.utils import generic
    except ImportError as cause:
        raise RuntimeError(
            f"transformers must be version 5.17 or later, got {cause}; pip install ringflash[huggingface]."
        ) from cause
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _pass_padding_mask)
    for module in (generic, modeling_utils, masking_utils):
        _exempt_from_flash_attention(module)


def set_group(
    model: nn.Module,
    group: Group,
    *,
    layout: str = "zigzag",
    impl: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
) -> None:
    """Give one model its group and options, which are stored on its attention modules.

    Every later forward of a model with a group rejects changes that would take it off the ring: another
    attn_implementation, also through a configuration that it shares, and labels without shift_labels. `generate`
    attends to whole prompts within the process that calls it. set_group(model, None) takes the model off the ring.

    Args: as `ring_attention`.
    Raises:
        ValueError: the model does not use attn_implementation="ringflash".
        NotImplementedError: attention that is not causal, windowed or full; other layers that mix tokens; positions
            that the model counts itself; layers that are left out at random; heads that pick tokens of the sequence;
            PEFT adapters that do more than change layers.
    """
    config = getattr(model, "config", None)
    used = getattr(config, "_attn_implementation", None)
    if used != NAME:
        can_follow: Any = getattr(model, "_can_set_attn_implementation", lambda: True)
        remedy = "call register() and then from_pretrained or from_config with it"
        if not can_follow():
            remedy = f"{type(model).__name__} has only implementations of its own: use another model"
        raise ValueError(f"model must be built with attn_implementation={NAME!r}, got {used!r}; {remedy}.")
    granularity(1, layout)
    options = ModelRing(resolve(group), layout=layout, impl=impl, transport=transport, deterministic=deterministic)
    modules = attention_modules(find_decoder(model))
    if not modules:
        raise ValueError(
            f"model must have attention layers that follow attn_implementation, got none in {type(model).__name__}; "
            "pass the whole model, or use another one; for recurrent layers only, build a model on ringflash.recurrent."
        )
    base = find_base(model, modules[0])
    check_on_ring(model, base, modules)
    _check_layout(modules, layout)
    inputs = ForwardInputs.watch(base, modules, options)
    use_global_length(base, inputs)
    use_sequence_order(model, inputs)
    guard_losses(model, inputs)
    refuse_media(model, base, inputs)
    generate_locally(model, inputs)
    for module in modules:
        give_inputs(module, inputs)


def _check_layout(modules: list[nn.Module], layout: str) -> None:
    """Refuse layouts that depend on documents for layers that attend in chunks, which have other bounds."""
    for module in modules:
        if layout in DOCUMENT_LAYOUTS and chunk_size(module) is not None:
            raise NotImplementedError(
                f"layout must not be {layout!r} for layers that attend in chunks ({type(module).__name__}); use "
                "'zigzag'."
            )


def _exempt_from_flash_attention(module: Any) -> None:
    """Make transformers not treat our name as flash-attention, whose package it would load, and drop chunk masks."""
    original = module.is_flash_attention_requested
    if getattr(original, "_ringflash", False):
        return

    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name != NAME and original(config, requested_attention_implementation, version)

    is_flash_attention_requested._ringflash = True  # type: ignore[attr-defined]
    module.is_flash_attention_requested = is_flash_attention_requested


def _pass_padding_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **geometry: Any,
) -> Tensor | LayerSpans | None:
    """Return a 2-D padding mask as it is, or `LayerSpans` if the mask function has spans; no mask is built.

    The attention knows the group, and rejects zeros on every rank.

    Args:
        mask_function: rejected if it is anything but causal, windowed or full, with spans (`read_spans`).
        geometry: lengths and offsets, which the attention derives from positions.
    """
    if not use_vmap and getattr(mask_function, "__name__", "") in (
        "causal_mask_function",
        "bidirectional_mask_function",
    ):
        return attention_mask  # without the graph break of `read_spans`
    spans = read_spans(mask_function, use_vmap, attention_mask)
    if spans is not None and getattr(config, "model_type", "").startswith("molmo2"):
        raise NotImplementedError(
            "mm_token_type_ids must be None for Molmo 2 on a ring, got a tensor: its images all see one another, which "
            "a ring's masks cannot express; leave them out for text, or use another model."
        )
    return attention_mask if spans is None else spans


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | LayerSpans | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checksum: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over the ring, with the signature of transformers' attention functions.

    Args:
        query, key, value: (batch, heads, seqlen_local, head_dim).
        s_aux: (num_heads,), sinks, as in `ringflash.apply_sinks`.
        checksum: scalar, of the whole sequence, as `prepare_batch` returns it.
    Returns:
        out: (batch, seqlen_local, heads, head_dim).  weights: None.
    """
    inputs: ForwardInputs | None = inputs_of(module)
    if inputs is None:
        check_single_process()
    else:
        mark_reached(inputs.reached, module)
    options = ModelRing(None) if inputs is None else inputs.options
    spans = attention_mask if isinstance(attention_mask, LayerSpans) else None
    mask = attention_mask.mask if isinstance(attention_mask, LayerSpans) else attention_mask
    causal = spans is not None or (_is_causal(module) if is_causal is None else is_causal)
    error = find_static_error(
        module, query, key, dropout, sliding_window, causal, kwargs, s_aux, cu_seqlens, spans, options.layout
    )
    if getattr(module, "layer_idx", 0) == 0 and (inputs is None or inputs.first_layer is None):
        given = ShardInputs(mask, kwargs.get("position_ids"), cu_seqlens, checksum, spans)
        check_consistency(options, query, given, inputs, error)
    elif error is not None:
        raise error
    if spans is not None and spans.use is Use.NONE:
        cu_seqlens = without_directions(cu_seqlens)
    # Under autocast, rotary embeddings return q and k in fp32, but v is in the low dtype.
    query, key, value = (autocast(x) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in require_grad_together(query, key, value))
    attend_to = partial(
        attend, options=options, causal=causal, softmax_scale=scaling, return_lse=s_aux is not None,
        window_size=(-1 if sliding_window is None else sliding_window - 1, -1),
    )  # fmt: skip
    # Ranks that leave out different layers, or run one in another mode, find out at their next call.
    with in_layer(name_of_layer(module), module.training) if is_eager() else nullcontext():
        if (size := chunk_size(module)) is None:
            result: Any = attend_to(q, k, v, cu_seqlens=cu_seqlens)
        else:
            result = attend_in_chunks(attend_to, q, k, v, cu_seqlens, size, q.shape[1] * options.size_and_rank[0])
    if s_aux is None:
        return result, None
    out, lse = result
    return apply_sinks(out, lse, s_aux), None


def _is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", True)) and getattr(getattr(module, "config", None), "is_causal", True)


def attend_in_chunks(
    attend_to: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, size: int, seqlen: int
) -> Any:
    """Attend within fixed-size chunks of each document (Llama 4), as packed documents with a bound at every chunk.

    Args:
        attend_to: `attend` with its options.
        size: tokens of a chunk, counted from the start of each document.
        seqlen: length of the whole sequence.
    Returns:
        result: as `attend` returns it.
    """
    bounds = _chunk_bounds(cu_seqlens, size, seqlen, q)
    several = cu_seqlens is None and bounds is not None and q.shape[0] > 1
    return attend_to(q, k, v, cu_seqlens=[bounds] * q.shape[0] if several else bounds)


@torch.compiler.disable(reason="the number of bounds depends on their values")
def _chunk_bounds(cu_seqlens: Tensor | None, size: int, seqlen: int, q: Tensor) -> Tensor | None:
    """Return the bounds of all chunks on the CPU, where reading them needs no synchronisation.

    Wrong bounds are returned unchanged: the operator rejects them on every rank.
    """
    if cu_seqlens is None:
        return None if seqlen <= size else torch.tensor(cut_into_chunks((0, seqlen), size), dtype=torch.int32)
    try:
        documents = documents_of(cu_seqlens, q).bounds  # plain ones: `find_static_error`
        check_cu_seqlens(documents, seqlen)
    except ValueError:
        return cu_seqlens
    return torch.tensor(cut_into_chunks(documents, size), dtype=torch.int32)
