"""FLOPs and peaks for MFU: against hand counts, torch's own counter, and the schedule. One process, no GPU."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ringflash.attention.schedule import plan_own_keys
from ringflash.huggingface.flops import (
    ChunkedAttention,
    MatmulSizes,
    layer_windows,
    matmul_sizes,
    peak_tflops,
    training_flops,
    visible_pairs,
)
from ringflash.sequence.mask import SequenceMask

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize("window", [None, 0, 1, 5, 30, 31, 32, 1000])
def test_visible_pairs_are_those_of_the_schedule(window: int | None) -> None:
    mask = SequenceMask(32, window_size=(-1 if window is None else window, -1))
    assert visible_pairs(32, window) == plan_own_keys(mask, "zigzag").num_visible


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("gemma3_text", {}),
        ("phi3", {"pad_token_id": 0}),
        ("granite", {}),
        ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
                                            "original_max_position_embeddings": 8}}),
        ("llama4_text", {"moe_layers": [], "intermediate_size_mlp": 80}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
        ("gpt_oss", {**EXPERTS, "rope_parameters": None}),
        ("granitemoe", EXPERTS),
        ("deepseek_v3", {**LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 3, "head_dim": 4}),
    ],
)  # fmt: skip
def test_flops_are_those_torch_counts(family: str, options: dict[str, Any]) -> None:
    """Full attention in eager transformers, whose square is twice the causal triangle without its diagonal's half."""
    from transformers import AutoConfig, AutoModelForCausalLM

    length, config = 48, AutoConfig.for_model(**{**CONFIG, "model_type": family, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()
    counted = matmul_sizes(model)
    assert counted is not None and len(layer_windows(config)) == 3
    square = 12 * counted.q_size * 3 * (length**2 - visible_pairs(length))
    rotary = 2 * 6 * 4 * length  # torch counts outer products of positions and frequencies, forward and not backward
    ours = training_flops(counted, [None] * 3, [0, length])
    assert counter.get_total_flops() == pytest.approx(ours + square, abs=rotary)


def test_parameters_without_a_place_are_not_counted() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    model.model.layers[0].register_parameter("mixing", torch.nn.Parameter(torch.ones(2, 2)))
    assert matmul_sizes(model) is None


def test_documents_and_windows_shrink_attention() -> None:
    counted = MatmulSizes(1000, 32)
    linear = 6 * 1000 * 100
    whole, packed = (training_flops(counted, [None] * 3, bounds) for bounds in ([0, 100], [0, 1, 40, 100]))
    assert whole - linear == 12 * 32 * 3 * 5050
    assert packed - linear == 12 * 32 * 3 * (1 + 39 * 40 // 2 + 60 * 61 // 2)
    chunked = training_flops(counted, [ChunkedAttention(32)] * 3, [0, 1, 40, 100])
    assert chunked - linear == 12 * 32 * 3 * sum(visible_pairs(length) for length in (1, 32, 7, 32, 28))
    windowed = training_flops(counted, [None, 9, 9], [0, 100])
    assert windowed - linear == 12 * 32 * (5050 + 2 * (10 * 100 - 45))


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        ("llama", {}, [None] * 4),
        (
            "llama4_text",
            {"attention_chunk_size": 16, "no_rope_layers": [1, 1, 1, 0]},
            [*[ChunkedAttention(16)] * 3, None],
        ),
        ("mistral", {"sliding_window": 16}, [15] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": False}, [None] * 4),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, [None, None, 15, 15]),
    ],
)
def test_windows_are_those_of_the_configuration(family: str, options: dict[str, Any], windows: list[Any]) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**{**CONFIG, "model_type": family, "num_hidden_layers": 4, **options})
    assert layer_windows(config) == windows


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2250.0),
        ("CPU, 1 thread(s) each", None),
    ],
)
def test_peaks_are_found_by_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak
