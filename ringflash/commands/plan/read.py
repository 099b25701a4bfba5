"""The numbers of any transformers model that decide memory and time, read off the model itself on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringflash import huggingface
from ringflash.commands.plan.kept import Kept, Seen, see_layers, with_liger
from ringflash.commands.plan.passes import Passed
from ringflash.flops import Chunk, layer_windows, multiplied
from ringflash.memory.tiles import modules_to_tile

_WITH_LIGER = ("llama", "mistral", "qwen2", "qwen3")  # whose layers `kept.with_liger` can stand for


@dataclass(frozen=True)
class Layers:
    """What the layers of a model keep and move, with Liger's kernels or without.

    Args:
        kept, kept_mean: bytes a token of the layer that keeps most, and of all layers the mean.
        passed: bytes a token of a layer that are read and written between the products.
    """

    kept: Kept
    kept_mean: Kept
    passed: Passed


@dataclass(frozen=True)
class ReadShape:
    """A decoder whose layers may differ.

    Args:
        parameters: of the whole model, all experts included.  layer_parameters: of the largest layer.
        expert_parameters: of all experts of the largest layer.  tiled_parameters: of what tiles compute there.
        embedding_parameters: of the output embedding.  root_parameters: of all that is in no layer.
        matmul_parameters: that multiply a token, of experts those it is sent to.
        computed_parameters: that the model's code multiplies; more where it computes experts for tokens of others.
        layer_matrix_parameters: of the first that lie in layers, the mean of a layer.
        head_dim: of keys, to which narrower values are padded.  mean_size: features that FLOPs count.
        plain, liger: the layers as transformers has them, and with Liger; None for a model that no plan has with it.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    parameters: int
    layer_parameters: int
    expert_parameters: int
    tiled_parameters: int
    embedding_parameters: int
    root_parameters: int
    matmul_parameters: float
    computed_parameters: float
    layer_matrix_parameters: float
    mean_size: float
    plain: Layers
    liger: Layers | None

    @property
    def q_size(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key heads; as many of the values, padded."""
        return self.num_kv_heads * self.head_dim

    @property
    def assumptions(self) -> list[str]:
        """What a plan takes for granted of such a model; docs/plan.md has the steps that were measured."""
        found = ["the MLP's gradients are as large as what it keeps for the backward"]
        if self.expert_parameters:
            found += [
                "products of experts run at the rate of all, and what sorts tokens by experts at that of passes",
                "experts are sharded as all else and gathered layer by layer, and the gradients of a layer's lie whole "
                "in bf16 and fp32 beside the next layer",
                "tokens are spread over experts by transformers' grouped products, none dropped or padded",
            ]
        if self.computed_parameters > self.matmul_parameters:
            ratio = self.computed_parameters / self.matmul_parameters
            found.append(f"its code computes experts for tokens of others, too: {ratio:.1f} times the products of MFU")
        return found


def model_of(config: Mapping[str, Any]) -> tuple[ReadShape, list[int | Chunk | None]]:
    """Build a model without memory and read it; with the window of every layer.

    Raises:
        NotImplementedError: a model that a ring cannot run, or whose parameters cannot be placed.
        ValueError: a configuration that transformers does not take.
    """
    model = _empty(config)
    return read_shape(model), layer_windows(model.config)


def read_shape(model: Any) -> ReadShape:
    """Read a causal language model on the meta device."""
    config, layers = model.config, list(model.model.layers)
    if (counted := multiplied(model)) is None:
        raise NotImplementedError(
            f"model_type must be one whose parameters can be placed, got {config.model_type!r}, whose attention layers "
            "differ in width or hold parameters that are no matrices; no plan counts them."
        )
    try:
        kept, executed, (kv_heads, head_dim), passed = see_layers(model)
        fused = _see_with_liger(model) if config.model_type in _WITH_LIGER else None
    except NotImplementedError:  # of the plug
        raise
    except Exception as error:  # the model is transformers' code
        shown = " ".join(str(error).split())[:200]
        raise NotImplementedError(
            f"model_type must be one whose layers can be seen without numbers, got {config.model_type!r}, which raised "
            f"{type(error).__name__}: {shown}; no plan counts what its layers keep."
        ) from error
    largest = max(layers, key=_size)
    head, inside = model.get_output_embeddings().weight.numel(), sum(map(_size, layers))
    matmul, total = counted.matmul_parameters, _size(model)
    return ReadShape(
        family=config.model_type,
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        parameters=total,
        layer_parameters=_size(largest),
        expert_parameters=max(_experts(layer) for layer in layers),
        tiled_parameters=max(sum(map(_size, modules_to_tile(layer))) for layer in layers),
        embedding_parameters=head,
        root_parameters=total - inside,
        matmul_parameters=matmul,
        computed_parameters=max(matmul, executed + head) if executed + head > 1.01 * matmul else matmul,
        layer_matrix_parameters=(matmul - head) / len(layers),
        mean_size=counted.q_size,
        plain=_layers(kept, passed),
        liger=None if fused is None else _layers(fused.layers, fused.passed),
    )


def _see_with_liger(model: Any) -> Seen:
    with with_liger(model):
        return see_layers(model)


def _layers(kept: list[Kept], passed: Passed) -> Layers:
    mean = Kept(*(sum(values) / len(kept) for values in zip(*kept, strict=True)))
    return Layers(max(kept, key=lambda x: x.layer), mean, passed)


def _empty(config: Mapping[str, Any]) -> Any:
    """The model without memory; refused where a ring or the loss would refuse it."""
    huggingface.register()
    from transformers import AutoConfig, AutoModelForCausalLM

    keywords = {key: value for key, value in config.items() if key != "quantization_config"}  # a checkpoint's
    try:
        made = AutoConfig.for_model(**keywords)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made, attn_implementation="ringflash", dtype=torch.bfloat16)
    except Exception as error:  # transformers has many
        shown = " ".join(str(error).split())[:200]
        raise ValueError(
            f"config must be one that transformers builds a causal model from, got {type(error).__name__} for "
            f"{config.get('model_type')!r}: {shown}; correct it, or name a model with text alone."
        ) from error
    if not isinstance(getattr(getattr(model, "model", None), "layers", None), nn.ModuleList):
        raise NotImplementedError(
            f"model_type must be one of a text model with model.layers, got {config['model_type']!r}; of a model with "
            "other towers give the text_config."
        )
    huggingface.set_group(model, None)
    huggingface.CausalLMWithLoss(model, None)
    return model


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _experts(layer: nn.Module) -> int:
    """Parameters of a layer's stacked experts."""
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() == 3)
