"""The numbers of a model that decide memory and time, from a transformers configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "qwen3", "mistral", "qwen2")
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # where a configuration does not say; else as many as heads


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder: attention with grouped heads and a gated MLP in every layer.

    Args:
        tied: input and output embedding are one matrix.
        qk_norm: an RMSNorm on every head's q and k.
        qkv_bias, out_bias, mlp_bias: biases on the projections to q, k and v, from their heads, and of the MLP.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    family = "a dense decoder"
    takes_liger = takes_tiles = True
    expert_parameters = 0
    passed = None  # between the products: the rate of linear includes it

    @property
    def tiled_parameters(self) -> int:
        """Of a layer's MLP."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def assumptions(self) -> list[str]:
        """Nothing beside the machine's rates."""
        return []

    @property
    def q_size(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def mean_size(self) -> float:
        """Features that FLOPs count, where values may be narrower than keys."""
        return self.q_size

    @property
    def kv_size(self) -> int:
        """Features of all key heads; as many of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matrix_parameters(self) -> int:
        """Of the matrices of one layer, each of which multiplies every token."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Of one layer, vectors included."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        biases += self.hidden_size if self.out_bias else 0
        biases += 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        return self.layer_matrix_parameters + norms + biases

    @property
    def embedding_parameters(self) -> int:
        """Of one embedding: a row for every token of the vocabulary."""
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Of what is in no layer: embeddings and the last norm."""
        return self.embedding_parameters * (1 if self.tied else 2) + self.hidden_size

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.num_layers * self.layer_parameters + self.root_parameters

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply every token: all matrices but the input embedding, which is looked up."""
        return self.num_layers * self.layer_matrix_parameters + self.embedding_parameters

    @property
    def computed_parameters(self) -> int:
        """Parameters that the model's code multiplies."""
        return self.matmul_parameters


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that the keywords of a transformers configuration describe.

    Raises:
        NotImplementedError: a family whose layers are not counted here.
        ValueError: a size that is missing, or does not fit another.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise NotImplementedError(
            f"model_type must be one of {', '.join(FAMILIES)}, got {family!r}; give the sizes of a dense model like it."
        )
    sizes = {name: _size(config, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
    heads = sizes["num_attention_heads"]
    given = {"num_key_value_heads": _KV_HEADS.get(family, heads), **config}
    kv_heads = heads if given["num_key_value_heads"] is None else _size(given, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads must divide num_attention_heads ({heads}), got {kv_heads}; correct it.")
    biased = family in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    head_dim = 128 if family == "qwen3" else sizes["hidden_size"] // heads
    return ModelShape(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim if config.get("head_dim") is None else _size(config, "head_dim"),
        intermediate_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2" or biased,
        out_bias=biased,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
    )


def windows_of(config: Mapping[str, Any]) -> list[int | None]:
    """Keys to the left of itself that a query sees, in every layer; None is all. As transformers reads the keywords."""
    family, layers = config.get("model_type"), config["num_hidden_layers"]
    first = 0 if family == "mistral" else config.get("max_window_layers", 28)
    size = config.get("sliding_window", 4096) if family == "mistral" or config.get("use_sliding_window") else None
    window = None if size is None else _size({"sliding_window": size}, "sliding_window") - 1
    types = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in types[:layers]]


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}; complete the configuration.")
    return value
