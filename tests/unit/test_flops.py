"""FLOPs and peaks for MFU: against hand counts, torch's own counter, and the schedule. One process, no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ringflash.flops import layer_windows, peak_tflops, training_flops, visible_pairs
from ringflash.mask import SequenceMask
from ringflash.plan.shape import shape_of
from ringflash.schedule import build

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize("window", [None, 0, 1, 5, 30, 31, 32, 1000])
def test_visible_pairs_are_those_of_the_schedule(window: int | None) -> None:
    mask = SequenceMask(32, window_size=(-1 if window is None else window, -1))
    assert visible_pairs(32, window) == build(mask, 1, 0, "zigzag").num_visible


def test_flops_are_those_torch_counts() -> None:
    """Full attention in eager transformers, whose square is twice the causal triangle without its diagonal's half."""
    from transformers import AutoConfig, AutoModelForCausalLM

    length = 48
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()
    ours = training_flops(shape_of(CONFIG), [None] * 3, [0, length])
    square = 12 * 32 * 3 * (length**2 - visible_pairs(length))
    rotary = 6 * 4 * length  # torch counts the outer product of positions and 4 frequencies, forward and not backward
    assert counter.get_total_flops() == pytest.approx(ours + square, abs=rotary)


def test_documents_and_windows_shrink_attention() -> None:
    shape = shape_of(CONFIG)
    linear = 6 * shape.matmul_parameters * 100
    whole, packed = (training_flops(shape, [None] * 3, bounds) for bounds in ([0, 100], [0, 1, 40, 100]))
    assert whole - linear == 12 * 32 * 3 * 5050
    assert packed - linear == 12 * 32 * 3 * (1 + 39 * 40 // 2 + 60 * 61 // 2)
    windowed = training_flops(shape, [None, 9, 9], [0, 100])
    assert windowed - linear == 12 * 32 * (5050 + 2 * (10 * 100 - 45))


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        ("llama", {}, [None] * 4),
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
