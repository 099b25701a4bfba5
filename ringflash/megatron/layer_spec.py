"""Layer specs with the ring as their core attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset
from megatron.core.utils import get_pg_rank

from ringflash.megatron.core_attention import RingCoreAttention

_REPLACED: list[type] = [DotProductAttention]
if HAVE_TE:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    _REPLACED.append(TEDotProductAttention)


def with_ring(spec: Any) -> Any:
    """Return a spec of a layer, a block or a hybrid stack, in which every core attention is the ring.

    A layer whose attention is neither Megatron's own nor Transformer Engine's raises NotImplementedError when it is
    built: a hybrid stack has specs of layers that a model may not use.

    Raises:
        ValueError: the spec has no core attention.
    """
    replaced = _with_ring(spec)
    if replaced == spec:
        raise ValueError(f"spec must have a core_attention, got none in {spec!r}; give the spec of a layer or a block.")
    return replaced


def _with_ring(spec: Any) -> Any:
    """Return a spec in which the ring's attention replaces every `core_attention`, at any depth."""
    if isinstance(spec, list):
        return [_with_ring(inner) for inner in spec]
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    changed = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        changed[field.name] = _attention(value) if field.name == "core_attention" else _with_ring(value)
    return dataclasses.replace(spec, **changed)


def _attention(own: Any) -> type:
    return RingCoreAttention if own in _REPLACED else type("OtherAttention", (_OtherAttention,), {"own": own})


class _OtherAttention:
    """Core attention that the ring does not replace; building it is refused."""

    own: Any

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            f"core_attention must be one of {[x.__name__ for x in _REPLACED]}, got {self.own}; use Megatron's own "
            "context parallelism for this model."
        )


# Options for a model without experts, which Megatron's function for layers of several kinds does not follow.
_OF_DENSE_MODELS = ("use_transformer_engine_op_fuser", "use_grouped_gemm_for_dense_mlp")


class RingLayer(BaseTransformerLayer):
    """Layer that Megatron would build for its configuration, with the ring as its core attention.

    A plain spec would not see options such as --num-experts or --qk-layernorm; a class is given the configuration.
    """

    def __new__(  # type: ignore[misc]
        cls,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        **options: Any,
    ) -> Any:
        """Return a layer of Megatron's own class.

        Args: as Megatron's `TransformerLayer`.
        """
        by_engine = config.transformer_impl == "transformer_engine"
        if config.transformer_impl not in ("local", "transformer_engine") or by_engine and not HAVE_TE:
            raise NotImplementedError(
                "transformer_impl must be 'local', or 'transformer_engine' if that is installed, got "
                f"{config.transformer_impl!r}; pass --transformer-impl local."
            )
        for name in _OF_DENSE_MODELS:
            if config.num_moe_experts is None and getattr(config, name, False):
                raise NotImplementedError(
                    f"{name} must be False with layer_spec in a model without experts, got True; give with_ring() a "
                    "spec from get_gpt_layer_with_transformer_engine_spec that has this option."
                )
        specs = get_gpt_decoder_layer_specs(config, by_engine, config.normalization, config.qk_l2_norm)
        number = layer_number - 1 + get_transformer_layer_offset(config, vp_stage, get_pg_rank(pg_collection.pp))
        return build_module(
            with_ring(specs[number]), config=config, layer_number=layer_number, pg_collection=pg_collection,
            vp_stage=vp_stage, **options,
        )  # fmt: skip


layer_spec = ModuleSpec(module=RingLayer)
