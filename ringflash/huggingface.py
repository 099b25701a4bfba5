"""transformers models over a ring: `attn_implementation="ringflash"`, batches, and a loss without logits.

    register()  ->  from_pretrained(..., attn_implementation="ringflash")  ->  set_group(model, group)
    batch = prepare_batch(input_ids, group=group)  ->  loss = CausalLMWithLoss(model, group)(**batch)

Needs the extra: pip install ringflash[huggingface].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash import agreement
from ringflash import loss as token_loss
from ringflash.api import ring_attention
from ringflash.group import Group, resolve
from ringflash.layout import granularity, local_positions, shard_sequence
from ringflash.padding import IGNORE_INDEX

NAME = "ringflash"

# What models hand to every attention call and no attention reads.
_HARMLESS = {
    "position_ids", "cache_position", "num_items_in_batch", "shift_labels", "output_hidden_states", "return_dict",
}  # fmt: skip

_REFUSED = {
    "softcap": "use a model without attention softcapping",
    "s_aux": "use a model without attention sinks",
    "head_mask": "prune the heads instead",
    "cu_seq_lens_q": "pass the bounds of the whole packed sequence as cu_seqlens",
    "cu_seq_lens_k": "pass the bounds of the whole packed sequence as cu_seqlens",
    "max_length_q": "pass the bounds of the whole packed sequence as cu_seqlens",
    "max_length_k": "pass the bounds of the whole packed sequence as cu_seqlens",
    "seq_idx": "pass the bounds of the whole packed sequence as cu_seqlens",
    "use_cache": "pass use_cache=False; the ring trains and scores, it does not generate",
    "past_key_values": "pass use_cache=False; the ring trains and scores, it does not generate",
    "output_attentions": "pass output_attentions=False; the weights never exist",
}


@dataclass(frozen=True)
class Options:
    """Where and how the attention of a model runs; arguments as `ring_attention`."""

    group: dist.ProcessGroup | None
    layout: str = "zigzag"
    impl: str = "auto"
    transport: str = "auto"
    deterministic: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self  # a process group cannot be copied

    @property
    def place(self) -> tuple[int, int]:
        """(cp_size, cp_rank)."""
        return (1, 0) if self.group is None else (self.group.size(), self.group.rank())


_default: Options | None = None


def register(
    group: Group = None,
    *,
    layout: str = "zigzag",
    impl: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
) -> None:
    """Make attn_implementation="ringflash" known to transformers. May be called again.

    Args:
        group: of models that `set_group` says nothing about; None leaves it to `set_group`, or is one process
            where there is only one.
        layout, impl, transport, deterministic: as `ring_attention`.
    Raises:
        RuntimeError: transformers 5 is not installed.
    """
    global _default
    try:
        from transformers import AttentionInterface, modeling_utils
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as cause:
        raise RuntimeError(
            f"transformers must be version 5.17 or later, got {cause}; pip install ringflash[huggingface]."
        ) from cause
    granularity(1, layout)
    _default = None if group is None else Options(resolve(group), layout, impl, transport, deterministic)
    if group is None and (layout, impl, transport, deterministic) != ("zigzag", "auto", "auto", False):
        _default = Options(_only_process(), layout, impl, transport, deterministic)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _pass_padding_mask)
    _is_no_flash_attention_package(modeling_utils)


def set_group(
    model: nn.Module,
    group: Group,
    *,
    layout: str = "zigzag",
    impl: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
) -> None:
    """Give one model its group and options; they stay on its attention modules and win over `register`'s.

    Args: as `ring_attention`.
    Raises:
        ValueError: the model does not use attn_implementation="ringflash".
        NotImplementedError: its layers attend in a way that is no causal, windowed or full attention.
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
    modules = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    if not modules:
        raise ValueError(f"model must have attention layers, got none in {type(model).__name__}; pass the whole model.")
    for module in modules:
        _check_layer_type(module)
    for module in modules:
        module._ringflash = options  # type: ignore[assignment]


def _is_no_flash_attention_package(modeling_utils: Any) -> None:
    """Names with "flash" in them send transformers to look for a package or hub kernel; ours has neither."""
    original = modeling_utils.is_flash_attention_requested
    if getattr(original, "_ringflash", False):
        return

    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
    ) -> bool:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name != NAME and original(config, requested_attention_implementation, version)

    is_flash_attention_requested._ringflash = True  # type: ignore[attr-defined]
    modeling_utils.is_flash_attention_requested = is_flash_attention_requested


def _pass_padding_mask(
    *, attention_mask: Tensor | None = None, use_vmap: bool = False, **geometry: Any
) -> Tensor | None:
    """No mask is built: hand a 2-D one to the attention, which knows the group and refuses on every rank.

    `geometry` (lengths, offsets, the mask's formula) is what the attention derives from positions itself.
    """
    if use_vmap:
        raise NotImplementedError(
            "mask_function must be causal, sliding window or full, got one with an overlay of the model; "
            "use another attn_implementation for this model."
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
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention call; q, k, v are (batch, heads, seqlen_local, head_dim), out as `ring_attention`."""
    options = _options(module)
    causal = _is_causal(module) if is_causal is None else is_causal
    error = _find_static_error(module, query, key, dropout, sliding_window, causal, kwargs)
    if getattr(module, "layer_idx", 0) == 0:
        _check_together(options, query, attention_mask, kwargs.get("position_ids"), cu_seqlens, error)
    elif error is not None:
        raise error
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = ring_attention(
        q, k, v, group=options.group, causal=causal, softmax_scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, -1), cu_seqlens=cu_seqlens,
        layout=options.layout, impl=options.impl, transport=options.transport, deterministic=options.deterministic,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out, None


def _options(module: nn.Module) -> Options:
    options = getattr(module, "_ringflash", _default)
    return options if isinstance(options, Options) else Options(_only_process())


def _only_process() -> None:
    """None, the group of a lone process; several processes must say which of them share a sequence."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"group must be given where there are several processes, got none of {dist.get_world_size()}; "
            "call ringflash.huggingface.set_group(model, group)."
        )


def _is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", True)) and getattr(getattr(module, "config", None), "is_causal", True)


def _find_static_error(
    module: nn.Module, query: Tensor, key: Tensor, dropout: float, window: int | None, causal: bool, kwargs: dict
) -> Exception | None:
    """What the arguments ask for that the ring does not do; it needs no tensor's values."""
    try:
        _check_kwargs(kwargs)
        _check_layer_type(module)
    except NotImplementedError as error:
        return error
    if dropout > 0:
        return NotImplementedError(f"dropout must be 0, got {dropout}; set config.attention_dropout = 0.")
    if key.shape[2] != query.shape[2]:
        return NotImplementedError(
            f"key must have the length of query ({query.shape[2]}), got {key.shape[2]}; pass use_cache=False."
        )
    windowed = getattr(module, "layer_type", None) == "sliding_attention"
    if windowed and window is None:
        return NotImplementedError("sliding_window must reach the attention of a sliding layer, got None; set it.")
    if window is not None and (window < 1 or not causal):
        return NotImplementedError(
            f"sliding_window must be 1 or more on a causal layer, got {window}, causal={causal}; use full attention."
        )
    return None


def _check_kwargs(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in _HARMLESS or value is None or value is False:
            continue
        remedy = _REFUSED.get(name, "drop it; attention would have to ignore it")
        shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise NotImplementedError(f"{name} must not be given to ringflash attention, got {shown}; {remedy}.")


def _check_layer_type(module: nn.Module) -> None:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    kind = types[module.layer_idx] if types and hasattr(module, "layer_idx") else "full_attention"  # type: ignore[index]
    if kind not in ("full_attention", "sliding_attention"):
        raise NotImplementedError(
            f"layer_types must be full_attention or sliding_attention, got {kind!r}; use another attn_implementation."
        )


@torch.compiler.disable
def _check_together(
    options: Options,
    query: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    error: Exception | None,
) -> None:
    """Once a forward, in layer 0: raise on every rank if any rank has an error. One scalar is reduced and read."""
    error = error or _find_shape_error(query, mask, position_ids)
    flags = torch.zeros(2, dtype=torch.int32, device=query.device)  # a wrong argument, wrong positions
    if error is None:
        assert position_ids is not None
        if mask is not None:
            flags[0] = ~mask.all()
        try:
            flags[1] = ~_positions_fit(options, query.shape[2], position_ids, cu_seqlens)
        except ValueError as problem:
            error = problem
    mine = flags.clone()
    mine[0] |= int(error is not None)
    total = mine.clone()
    if options.group is not None:
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=options.group)
    if total.any():
        _raise_on_every_rank(options.group, error or _tensor_error(mine.tolist(), options))


def _find_shape_error(query: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Exception | None:
    if mask is not None and mask.dim() != 2:
        return NotImplementedError(
            f"attention_mask must be None, got {mask.dim()} dimensions; describe the mask by cu_seqlens, "
            "sliding_window and is_causal."
        )
    rows, length = query.shape[0], query.shape[2]
    got = None if position_ids is None else tuple(position_ids.shape)
    if got not in ((1, length), (rows, length)):
        return ValueError(
            f"position_ids must be (1 or batch, {length}), got {got}; pass ringflash.local_positions(...)[None]."
        )
    return None


def _positions_fit(options: Options, length: int, position_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Whether positions are the shard's global ones, or with documents those within each document."""
    cp_size, cp_rank = options.place
    positions = _positions_on(length * cp_size, cp_size, cp_rank, options.layout, position_ids.device)
    fit = (position_ids == positions).all()
    if cu_seqlens is not None:
        fit = fit | (position_ids == _within_documents(positions, cu_seqlens)).all()
    return fit


@lru_cache(maxsize=8)
def _positions_on(seqlen: int, cp_size: int, cp_rank: int, layout: str, device: torch.device) -> Tensor:
    return local_positions(seqlen, cp_size, cp_rank, layout).to(device)


def _within_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    bounds = cu_seqlens.to(positions.device, positions.dtype)
    document = torch.searchsorted(bounds, positions, right=True) - 1
    return positions - bounds[document.clamp(min=0)]


def _tensor_error(flags: list[int], options: Options) -> Exception | None:
    if flags[0]:
        return ValueError(
            "attention_mask must be None or all ones, got zeros; pack documents with cu_seqlens, or pad with "
            "ringflash.pad_sequence."
        )
    if flags[1]:
        return ValueError(
            f"position_ids must be the shard's global positions (layout {options.layout!r}, rank {options.place[1]} of "
            f"{options.place[0]}) or, with cu_seqlens, those within each document, got others; use "
            "ringflash.huggingface.prepare_batch or ringflash.local_positions."
        )
    return None


def _raise_on_every_rank(group: dist.ProcessGroup | None, error: Exception | None) -> NoReturn:
    agreement.agree(group, {"huggingface": "refused on a rank"}, error)
    raise error or ValueError("inputs must be right on every rank of the group, got an error on another; see its log.")


def prepare_batch(
    input_ids: Tensor,
    *,
    group: Group,
    cu_seqlens: Tensor | None = None,
    labels: Tensor | None = None,
    layout: str = "zigzag",
    position_ids: str = "global",
) -> dict[str, Any]:
    """This rank's part of a batch that every rank holds whole: keyword arguments for model(**batch).

    `CausalLMWithLoss` turns it into the loss scaled as `ringflash.loss` says. transformers' own loss,
    model(**batch, labels=batch["shift_labels"]).loss, is the rank's sum over the labelled tokens of the whole
    sequence: multiply it by cp_size for backends that average over all ranks.

    Args:
        input_ids: (batch, seqlen), int64, whole sequence.
        cu_seqlens: (num_documents + 1,), int32, document bounds in the whole sequence; batch must then be 1.
        labels: (batch, seqlen), already shifted (`ringflash.loss.shift_labels`, `pad_sequence`), -100 is none;
            default the successor of each token within its document.
        position_ids: "global", or "document" to count from 0 in each document (needs cu_seqlens).
    Returns:
        batch: input_ids, position_ids, shift_labels (shards), num_items_in_batch (scalar), cu_seqlens (whole),
            use_cache (False).
    Raises:
        ValueError: a length the layout cannot cut; labels that are not shifted.
    """
    successors = token_loss.shift_labels(input_ids, cu_seqlens)
    labels = successors if labels is None else _check_shifted(labels, input_ids, successors)
    options = Options(resolve(group), layout)
    positions = local_positions(input_ids.shape[1], *options.place, layout).to(input_ids.device)
    if position_ids == "document" and cu_seqlens is not None:
        positions = _within_documents(positions, cu_seqlens)
    elif position_ids != "global":
        raise ValueError(
            f"position_ids must be 'global', or 'document' with cu_seqlens, got {position_ids!r}; leave it out."
        )
    return {
        "input_ids": shard_sequence(input_ids, group, 1, layout),
        "position_ids": positions[None],
        "shift_labels": shard_sequence(labels, group, 1, layout),
        "num_items_in_batch": (labels != IGNORE_INDEX).sum().clamp(min=1),
        "cu_seqlens": cu_seqlens,
        "use_cache": False,
    }


def _check_shifted(labels: Tensor, input_ids: Tensor, successors: Tensor) -> Tensor:
    if labels.shape != input_ids.shape:
        raise ValueError(
            f"labels must have the shape of input_ids {tuple(input_ids.shape)}, got {tuple(labels.shape)}; "
            "give both whole."
        )
    labelled = labels != IGNORE_INDEX
    if labelled.any() and (labels == input_ids)[labelled].all() and not (labels == successors)[labelled].all():
        raise ValueError(
            "labels must be shifted by one token, got input_ids themselves; pass ringflash.loss.shift_labels(labels)."
        )
    return labels


class CausalLMWithLoss(nn.Module):
    """A causal language model whose forward returns `ringflash.loss.cross_entropy`; logits are never whole.

    Shard this module, not the model in it, with FSDP2: the output embedding is then gathered where it is read.

    Args:
        model: a transformers model with .model and .lm_head, such as LlamaForCausalLM.
        group: as `set_group`'s.
        chunk_tokens: as `cross_entropy`.
    Raises:
        NotImplementedError: logits that are more than hidden @ lm_head.weight.T.
    """

    def __init__(self, model: nn.Module, group: Group, *, chunk_tokens: int | None = None) -> None:
        super().__init__()
        _check_head(model)
        self.model, self.group, self.chunk_tokens = model, resolve(group), chunk_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> CausalLMWithLoss:
        from copy import deepcopy

        return CausalLMWithLoss(deepcopy(self.model, memo), self.group, chunk_tokens=self.chunk_tokens)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool = False,
    ) -> Tensor:
        """Scalar loss of this rank; arguments as `prepare_batch` returns them."""
        base: Callable[..., Any] = self.model.model  # type: ignore[assignment]
        hidden = base(
            input_ids=input_ids, position_ids=position_ids, cu_seqlens=cu_seqlens, use_cache=use_cache
        ).last_hidden_state
        weight: Tensor = self.model.lm_head.weight  # type: ignore[union-attr,assignment]
        return token_loss.cross_entropy(
            hidden, weight, shift_labels, group=self.group, num_tokens=num_items_in_batch,
            chunk_tokens=self.chunk_tokens,
        )  # fmt: skip


def _check_head(model: nn.Module) -> None:
    head = getattr(model, "lm_head", None)
    if not hasattr(model, "model") or not isinstance(head, nn.Linear) or head.bias is not None:
        raise NotImplementedError(
            f"model must have .model and a linear .lm_head without bias, got {type(model).__name__}; "
            "call ringflash.loss.cross_entropy on its hidden states."
        )
    config = getattr(model, "config", None)
    for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1)):
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise NotImplementedError(f"{name} must be unset, got {value}; compute the loss from the model's logits.")
    if getattr(config, "output_router_logits", False):
        raise NotImplementedError(
            "output_router_logits must be False, got True; add the router's loss from the model's own outputs."
        )
