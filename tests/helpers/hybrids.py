"""Tiny hybrid models of transformers, of whose code every fp32 is replaced by fp64, so that parity can be exact."""

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ringflash import huggingface
from ringflash.comm.seeding import seeded

TINY = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
KINDS = ["linear_attention", "linear_attention", "full_attention"]
DELTA = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": KINDS,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 4,
    "mamba_expand": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # class, and changes of TINY
    "llama": ("LlamaForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", DELTA | EXPERTS),
    "qwen3_5": ("Qwen3_5ForCausalLM", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", DELTA | EXPERTS),
    "olmo_hybrid": ("OlmoHybridForCausalLM", DELTA),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        {
            "layer_types": KINDS, "linear_head_dim": 8, "linear_num_heads": 2, "num_local_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4,
        },
    ),
    "bamba": ("BambaForCausalLM", MAMBA | {"attn_layer_indices": [2]}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        MAMBA | {"layer_types": KINDS, "num_local_experts": 4, "shared_intermediate_size": 8},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mlp", "linear_attention", "moe", "full_attention", "linear_attention"],
            "ssm_state_size": 6, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 4,
            "n_routed_experts": 4, "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8,
        },
    ),
    "falcon_h1": ("FalconH1ForCausalLM", MAMBA | {"mamba_d_ssm": 32}),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 6,
            "mamba_headdim": 8, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 4, "num_mem_blocks": 1,
            "use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 4, "num_key_value_heads": 4,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "conv", "full_attention"], "block_multiple_of": 8}),
}  # fmt: skip


@cache
def in_fp64(kind: str) -> ModuleType:
    """The modeling file of a kind of model, with fp64 for fp32."""
    original = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    assert original.__file__ is not None
    source = Path(original.__file__).read_text()
    for fp32, fp64 in (
        ("torch.float32", "torch.float64"),
        (".float()", ".double()"),
        ("torch.float)", "torch.double)"),
        ("torch.float,", "torch.double,"),
    ):
        source = source.replace(fp32, fp64)
    copy = ModuleType(f"{original.__name__}_fp64")
    copy.__file__, copy.__package__ = original.__file__, original.__package__
    sys.modules[copy.__name__] = copy
    exec(compile(source, original.__file__, "exec", dont_inherit=True), copy.__dict__)
    return copy


def build(kind: str, impl: str = "ringflash", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model with values that forget little, so that states of previous ranks matter; fp32 is transformers' own."""
    huggingface.register()
    name, extra = MODELS[kind]
    own = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    model_class = getattr(in_fp64(kind) if dtype == torch.float64 else own, name)
    config = model_class.config_class(**TINY | extra | changes)
    with seeded(0):
        model = model_class._from_config(config, attn_implementation=impl, experts_implementation="eager", dtype=dtype)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=1.6 / config.hidden_size**0.5)
    return model
