"""Tiny transformers models and inputs of the Hugging Face tests, alike in every call."""

import torch

from ringflash import huggingface
from ringflash.comm.seeding import seeded

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_window": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "sinks": (
        "gpt_oss",
        {"head_dim": 8, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    ),
}
CHUNKS: tuple[str, dict] = (
    "llama4_text",
    {
        "head_dim": 8, "attention_chunk_size": 5, "floor_scale": 4, "no_rope_layers": [1, 0], "moe_layers": [],
        "intermediate_size_mlp": 48,
    },
)  # fmt: skip
EXPERTS: dict[str, tuple[str, dict]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_experts": (
        "qwen3_moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}  # fmt: skip
# Angles that grow with the length of a sequence, and those that have two sets.
ROTATIONS: dict[str, dict] = {
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 16,
    },
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 21,
        },
    },
}  # fmt: skip
LENGTH = 24
BOUNDS = (0, 7, 8, 24)


def build(name: str = "llama", impl: str = "ringflash", **changes: object) -> torch.nn.Module:
    """The model of a name; "sdpa" is its eager attention where it has no other."""
    from transformers import AutoConfig, AutoModelForCausalLM

    huggingface.register()
    kind, extra = (MODELS | EXPERTS | {"chunks": CHUNKS})[name]
    impl = "eager" if (name, impl) == ("sinks", "sdpa") else impl
    config = AutoConfig.for_model(kind, **{**TINY, **extra, **changes})
    with seeded(0):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=impl, experts_implementation="eager", dtype=torch.float64
        )


def tokens(batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def documents() -> torch.Tensor:
    return torch.tensor(BOUNDS, dtype=torch.int32)
