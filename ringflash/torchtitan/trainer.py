"""Functions of torchtitan that ring attention replaces: those that make masks, cut inputs and check a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan import trainer
from torchtitan.components import validate
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from ringflash.torchtitan.inner_attention import RingInnerAttention
from ringflash.torchtitan.ring_mask import RingMask, read_mask

LAYOUTS = {"headtail": "zigzag", None: "contiguous"}  # torchtitan's names of the same order of tokens


def install() -> None:
    """Replace torchtitan's functions by those below, which call them if the model has no ring attention."""
    Decoder._create_flex_attention_mask = _create_mask
    trainer.prepare_context_parallel_input = validate.prepare_context_parallel_input = _cut_inputs
    trainer.Trainer.Config._validate_cuda_graphs = _validate


_titan_create_mask = Decoder._create_flex_attention_mask
_titan_cut_inputs = trainer.prepare_context_parallel_input
_titan_validate = trainer.Trainer.Config._validate_cuda_graphs


def _create_mask(decoder: Decoder, positions: Any, attn_config: Any, mask_mods: Any) -> Any:
    """Read the mask of a microbatch; no BlockMask is computed."""
    if isinstance(attn_config.inner_attention, RingInnerAttention.Config):
        return read_mask(mask_mods, positions)
    return _titan_create_mask(decoder, positions, attn_config, mask_mods)


def _cut_inputs(
    inputs: Any, labels: Any, extra_kwargs: dict[str, Any], cp_mesh: Any, device: Any,
    load_balancer_type: str | None = "headtail", *rest: Any,
) -> Any:  # fmt: skip
    """Cut tokens, labels and positions as torchtitan does; masks describe the whole sequence and stay as they are."""
    masks: Any = extra_kwargs.get("attention_masks")
    if not any(isinstance(mask, RingMask) for mask in (masks.values() if isinstance(masks, dict) else [masks])):
        return _titan_cut_inputs(inputs, labels, extra_kwargs, cp_mesh, device, load_balancer_type, *rest)
    layout = LAYOUTS[load_balancer_type]
    others = {name: x for name, x in extra_kwargs.items() if name != "attention_masks"}
    inputs, labels, others = _titan_cut_inputs(inputs, labels, others, cp_mesh, device, load_balancer_type, *rest)
    if isinstance(masks, dict):
        others["attention_masks"] = {name: replace(mask, layout=layout) for name, mask in masks.items()}
    else:
        assert isinstance(masks, RingMask)  # as found above
        others["attention_masks"] = replace(masks, layout=layout)
    return inputs, labels, others


def _validate(config: trainer.Trainer.Config) -> None:
    """Refuse what ring attention cannot do. torchtitan calls this again after overrides, before it builds anything."""
    _titan_validate(config)
    if config.model_spec is None:
        return
    if not any(config.model_spec.model.traverse(RingInnerAttention.Config)):
        _check_replaceable(config.model_spec.model, config.override.imports)
        return
    balancer = config.parallelism.context_parallel_load_balancer
    if balancer not in LAYOUTS:
        raise NotImplementedError(
            f"context_parallel_load_balancer must be 'headtail' or None with ring attention, got {balancer!r}; "
            "pass --parallelism.context_parallel_load_balancer headtail."
        )
    if config.parallelism.spmd_backend == "partial_dtensor":
        raise NotImplementedError(
            "spmd_backend must be 'spmd_types' (in torchtitan 0.3 also 'full_dtensor') with ring attention, got "
            "'partial_dtensor', which does not parallelize attention; pass --parallelism.spmd_backend spmd_types."
        )
    if not config.training.disable_cuda_graphs:
        raise NotImplementedError(
            "disable_cuda_graphs must be True with ring attention, got False: a graph would repeat the documents of "
            "one step; pass --training.disable_cuda_graphs."
        )
    if type(config.activation_checkpoint) is SelectiveAC.Config:
        logger.warning(
            "Selective activation checkpointing computes ring attention again in the backward; add "
            "ringflash.torchtitan.keep_attention to --override.imports."
        )


def _check_replaceable(model: Any, imports: list[Any]) -> None:
    """Refuse a model in which ring attention would replace nothing, which torchtitan does not always notice."""
    names = [name if isinstance(name, str) else name[0] for name in imports]  # or a name and its options
    if "ringflash.torchtitan.ring_attention" in names and not any(model.traverse(FlexAttention.Config)):
        raise NotImplementedError(
            "the model must have flex attention, which ringflash.torchtitan.ring_attention replaces, got none; choose "
            "a configuration with attn_backend='flex'."
        )
