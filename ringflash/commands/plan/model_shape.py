"""Sizes of a transformers model that determine memory and time, read from the model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringflash import huggingface
from ringflash.commands.plan.trace import Layers, trace_layers, with_liger
from ringflash.huggingface.flops import ChunkedAttention, layer_windows, matmul_sizes
from ringflash.memory.tiles import modules_to_tile

_WITH_LIGER = ("llama", "mistral", "qwen2", "qwen3")  # families that `trace.with_liger` imitates


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, whose layers may differ.

    Args:
        head_dim: head_dim of queries and keys.
        value_dim: head_dim of values as they travel: the head_dim of keys, unless kernels take narrower values.
        parameters: of the whole model, including all experts.
        layer_parameters: of the largest layer.
        expert_parameters: parameters of stacked experts, in the layer with most of them.
        tiled_parameters: parameters of modules that tiles recompute, in the layer with most of them.
        tiled_share: part of matmul_parameters in modules that tiles recompute.
        embedding_parameters: of the output embedding.
        root_parameters: of the model outside its layers.
        matmul_parameters: parameters that multiply a token; of experts, only those that the token is routed to.
        computed_parameters: parameters that the code multiplies; more if it computes experts for tokens of others.
        mean_size: features of all query heads as FLOPs count them, averaged over the layers.
        plain: layers as in transformers.
        liger: layers with Liger; None for a model that cannot be planned with it.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    vocab_size: int
    parameters: int
    layer_parameters: int
    expert_parameters: int
    tiled_parameters: int
    tiled_share: float
    embedding_parameters: int
    root_parameters: int
    matmul_parameters: float
    computed_parameters: float
    mean_size: float
    plain: Layers
    liger: Layers | None

    @property
    def q_size(self) -> int:
        """Number of features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def out_size(self) -> int:
        """Number of features of attention's output."""
        return self.num_heads * self.value_dim

    @property
    def kv_dim(self) -> int:
        """Half the columns of K and V of a head."""
        return (self.head_dim + self.value_dim) // 2

    @property
    def kv_size(self) -> int:
        """Half the number of features of all keys and values."""
        return self.num_kv_heads * self.kv_dim


def model_of(config: Mapping[str, Any]) -> tuple[ModelShape, list[int | ChunkedAttention | None]]:
    """Build a model on the meta device; return its sizes and the window of every layer.

    Raises:
        NotImplementedError: a ring cannot run the model, or the kind of some parameters is unknown.
        ValueError: transformers rejects the configuration.
    """
    model = _empty(config)
    return read_shape(model), layer_windows(model.config)


def read_shape(model: Any) -> ModelShape:
    """Read the sizes of a causal language model on the meta device."""
    config, layers = model.config, list(model.model.layers)
    if (counted := matmul_sizes(model)) is None:
        raise NotImplementedError(
            f"model_type must be one whose parameters can be placed, got {config.model_type!r}, whose attention layers "
            "differ in width or hold parameters that are no matrices; no plan counts them."
        )
    try:
        plain, executed, (kv_heads, head_dim, value_dim) = trace_layers(model)
        fused = None
        if config.model_type in _WITH_LIGER:
            with with_liger(model):
                fused = trace_layers(model).layers
    except NotImplementedError:  # ringflash's refusal of the model
        raise
    except Exception as error:  # the model is transformers' code
        shown = " ".join(str(error).split())[:200]
        raise NotImplementedError(
            f"model_type must be one whose layers run on torch's meta device, got {config.model_type!r}, which raised "
            f"{type(error).__name__}: {shown}; no plan counts what its layers keep."
        ) from error
    largest = max(layers, key=_size)
    tiled = [sum(map(_size, modules_to_tile(layer))) for layer in layers]
    head, matmul = model.get_output_embeddings().weight.numel(), counted.matmul_parameters
    unused = sum(map(_size, layers)) + head - matmul  # parameters of experts that a token is not sent to; and norms
    return ModelShape(
        family=config.model_type,
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        vocab_size=config.vocab_size,
        parameters=_size(model),
        layer_parameters=_size(largest),
        expert_parameters=max(sum(p.numel() for p in layer.parameters() if p.dim() == 3) for layer in layers),
        tiled_parameters=max(tiled),
        tiled_share=max(0.0, sum(tiled) - unused) / matmul,
        embedding_parameters=head,
        root_parameters=_size(model) - sum(map(_size, layers)),
        matmul_parameters=matmul,
        computed_parameters=max(matmul, executed + head),
        mean_size=counted.q_size,
        plain=plain,
        liger=fused,
    )


def _empty(config: Mapping[str, Any]) -> Any:
    """Build the model on the meta device, with the refusals of the ring and of the loss."""
    huggingface.register()
    from transformers import AutoConfig, AutoModelForCausalLM

    keywords = {key: value for key, value in config.items() if key != "quantization_config"}  # only for checkpoints
    try:
        made = AutoConfig.for_model(**keywords)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made, attn_implementation="ringflash", dtype=torch.bfloat16)
    except Exception as error:  # transformers raises many types
        shown = " ".join(str(error).split())[:200]
        raise ValueError(
            f"config must be one that transformers builds a causal model from, got {type(error).__name__} for "
            f"{config.get('model_type')!r}: {shown}; correct it, or name a text-only model."
        ) from error
    if not isinstance(getattr(getattr(model, "model", None), "layers", None), nn.ModuleList):
        raise NotImplementedError(
            f"model_type must be one of a text model with model.layers, got {config['model_type']!r}; for a multimodal "
            "model, give its text_config."
        )
    huggingface.set_group(model, None)
    huggingface.CausalLMWithLoss(model, None)
    return model


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
