"""The attention function behind attn_implementation="ringflash", its registration, and the group it runs over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ringflash.attention.api import ring_attention
from ringflash.attention.autocast import autocast
from ringflash.attention.freezing import differentiate_alike
from ringflash.comm.group import Group, resolve
from ringflash.huggingface.adapters import check_adapters
from ringflash.huggingface.chunks import attend_in_chunks, chunk_size
from ringflash.huggingface.consistency import check_together
from ringflash.huggingface.forward_inputs import Given
from ringflash.huggingface.generation import generate_locally
from ringflash.huggingface.global_length import tell_of_the_sequence
from ringflash.huggingface.layers import attention_modules
from ringflash.huggingface.options import NAME, Options, check_lone_process
from ringflash.huggingface.shard_loss import guard_losses
from ringflash.huggingface.sinks import beside_sinks
from ringflash.huggingface.validation import (
    check_direction,
    check_layer_type,
    check_model,
    check_rope,
    find_base,
    find_static_error,
)
from ringflash.sequence.layout import granularity


def register() -> None:
    """Make attn_implementation="ringflash" known to transformers. May be called again.

    A model's group is `set_group`'s, which looks at the model; without, it runs where there is one process alone.

    Raises:
        RuntimeError: transformers 5 is not installed.
    """
    try:
        from transformers import AttentionInterface, masking_utils, modeling_utils
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as cause:
        raise RuntimeError(
            f"transformers must be version 5.17 or later, got {cause}; pip install ringflash[huggingface]."
        ) from cause
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _pass_padding_mask)
    for module in (modeling_utils, masking_utils):
        _is_no_flash_attention_package(module)


def set_group(
    model: nn.Module,
    group: Group,
    *,
    layout: str = "zigzag",
    impl: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
) -> None:
    """Give one model its group and options; they stay on its attention modules.

    Every forward of a model with a group then refuses what would take it off the ring: another attn_implementation,
    also through a configuration that it shares; labels without shift_labels. `generate` attends to whole prompts within
    the process that calls it. set_group(model, None) takes the model off the ring.

    Args: as `ring_attention`.
    Raises:
        ValueError: the model does not use attn_implementation="ringflash".
        NotImplementedError: its layers attend in a way that is no causal, windowed or full attention; its tokens meet
            in other layers; it counts positions itself; adapters of PEFT that do more than change layers.
    """
    config = getattr(model, "config", None)
    used = getattr(config, "_attn_implementation", None)
    if used != NAME:
        raise ValueError(
            f"model must be built with attn_implementation={NAME!r}, got {used!r}; call register() and then "
            "from_pretrained or from_config with it."
        )
    granularity(1, layout)
    options = Options(resolve(group), layout, impl, transport, deterministic)
    modules = attention_modules(model)
    if not modules:
        raise ValueError(
            f"model must have attention layers that follow attn_implementation, got none in {type(model).__name__}; "
            "pass the whole model, or use one that has."
        )
    check_adapters(model)
    base = find_base(model, modules[0])
    check_model(base)
    check_rope(base)
    for module in modules:
        check_layer_type(module)
        check_direction(module)
    given = Given.watch(base, modules, options)
    tell_of_the_sequence(base, options)
    guard_losses(model, given)
    generate_locally(model, given)
    for module in modules:
        module._ringflash = options  # type: ignore[assignment]
        module._ringflash_given = given  # type: ignore[assignment]


def _is_no_flash_attention_package(module: Any) -> None:
    """Names with "flash" in them send transformers to look for a package or hub kernel, and away from chunks."""
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
    **geometry: Any,
) -> Tensor | None:
    """No mask is built: hand a 2-D one to the attention, which knows the group and refuses on every rank.

    `geometry` (lengths, offsets) is what the attention derives from positions itself. Overlays that a model gives as
    functions set use_vmap, blocks of tokens that see one another (PaliGemma's prefix) do not: they are the last `or`.
    """
    plain = ("causal_mask_function", "bidirectional_mask_function", "and_mask")
    if use_vmap or getattr(mask_function, "__name__", "") not in plain:
        raise NotImplementedError(
            "mask_function must be causal, sliding window or full, got one with an overlay of the model; "
            "leave token_type_ids out where it takes them, or use another attn_implementation for this model."
        )
    return attention_mask


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checksum: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention call; q, k, v are (batch, heads, seqlen_local, head_dim), out as `ring_attention`.

    Args:
        s_aux: (num_heads,), the sinks: a logit more in each row's softmax, of a key whose value is 0.
        checksum: scalar, of the whole sequence, as `prepare_batch` returns it.
    """
    options = _options(module)
    causal = _is_causal(module) if is_causal is None else is_causal
    error = find_static_error(module, query, key, dropout, sliding_window, causal, kwargs, s_aux)
    if getattr(module, "layer_idx", 0) == 0:
        given = getattr(module, "_ringflash_given", None)
        check_together(options, query, attention_mask, kwargs.get("position_ids"), cu_seqlens, checksum, given, error)
    elif error is not None:
        raise error
    # Under autocast rotary embeddings leave q and k in fp32 beside v.
    query, key, value = (autocast(x) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in differentiate_alike(query, key, value))
    attend = partial(
        ring_attention, group=options.group, causal=causal, softmax_scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, -1),
        layout=options.layout, impl=options.impl, transport=options.transport, deterministic=options.deterministic,
        return_lse=s_aux is not None,
    )  # fmt: skip
    if (size := chunk_size(module)) is None:
        result: Any = attend(q, k, v, cu_seqlens=cu_seqlens)
    else:
        result = attend_in_chunks(attend, q, k, v, cu_seqlens, size, q.shape[1] * options.place[0])
    return (result if s_aux is None else beside_sinks(result, s_aux)), None


def _options(module: nn.Module) -> Options:
    options: Options | None = getattr(module, "_ringflash", None)
    if options is None:
        check_lone_process()
    return options or Options(None)


def _is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", True)) and getattr(getattr(module, "config", None), "is_causal", True)
