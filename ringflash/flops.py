"""Floating-point operations of a training step, and what a device could do: for MFU.

    6 * parameters that multiply a token * tokens  +  12 * query features * visible pairs, over all layers

Forward 2 and 4, backward twice that (the model's own products; FlashAttention's backward computes 2.5 times its
forward, because it makes the scores again). What checkpointing computes again is not counted either.
Source: the convention of Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B, with pairs that the mask shows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ringflash.plan.shape import ModelShape

# Dense bf16 without sparsity, of NVIDIA's data sheets; the first name that a device's name contains.
PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
)


def peak_tflops(device_name: str) -> float | None:
    """TFLOP/s of a GPU as torch names it; None for one that is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS if re.search(rf"{name}(?!\d)", device_name)), None)


def visible_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key it sees in a causal document.

    Args:
        window: keys to the left of itself that a query sees; None is all.
    """
    hidden = 0 if window is None else max(0, length - window)
    return (length * (length + 1) - hidden * (hidden - 1)) // 2


def layer_windows(config: Any) -> list[int | None]:
    """`visible_pairs`' window of every layer of a transformers configuration."""
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if size else "full_attention"]
    if len(kinds) == 1:
        kinds = kinds * config.num_hidden_layers
    return [size - 1 if size and kind == "sliding_attention" else None for kind in kinds]


def training_flops(shape: ModelShape, windows: Sequence[int | None], bounds: Sequence[int]) -> float:
    """Of forward and backward over one sequence.

    Args:
        windows: as `layer_windows`.
        bounds: of the documents in the sequence, from 0 to its length.
    """
    lengths = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    pairs = {window: sum(visible_pairs(length, window) for length in lengths) for window in set(windows)}
    attention = 12.0 * shape.q_size * sum(pairs[window] for window in windows)
    return 6.0 * shape.matmul_parameters * bounds[-1] + attention
