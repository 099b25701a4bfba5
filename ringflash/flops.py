"""Floating-point operations of a training step, and what a device could do: for MFU.

    6 * parameters that multiply a token * tokens  +  12 * query features * visible pairs, over all layers

Query features: of all heads; where values are narrower than keys the mean of both widths.

Forward 2 and 4, backward twice that (the model's own products; FlashAttention's backward computes 2.5 times its
forward, because it makes the scores again). What checkpointing computes again is not counted either.
Source: the convention of Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B, with pairs that the mask shows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from ringflash.huggingface.layers import attention_modules
from ringflash.sequence.mask import cut_into_chunks

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


class Multiplied(NamedTuple):
    """Parameters that multiply a token, and features of a layer's queries; the mean of both if values are narrower."""

    matmul_parameters: float
    q_size: float


class Chunk(NamedTuple):
    """A layer whose queries see their own chunk of a document (Llama 4)."""

    size: int


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


def layer_windows(config: Any) -> list[int | Chunk | None]:
    """`visible_pairs`' window of every layer of a transformers configuration, or its chunks."""
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if size else "full_attention"]
    if len(kinds) == 1:
        kinds = kinds * config.num_hidden_layers
    known = {
        "sliding_attention": size - 1 if size else None,
        "chunked_attention": Chunk(getattr(config, "attention_chunk_size", None) or 0),
    }
    return [known.get(kind) for kind in kinds]


def multiplied(model: nn.Module) -> Multiplied | None:
    """What multiplies a token of a transformers model; None where its modules do not tell.

    Weights of linear layers and routers do, of experts, one matrix behind another, those that a token is sent to.
    Embeddings are looked up.
    """
    config: Any = model.config
    heads, experts_per_token = config.num_attention_heads, getattr(config, "num_experts_per_tok", None)
    total, sizes = 0.0, set[float]()
    attentions = set(attention_modules(model))
    for module in model.modules():
        if module in attentions:
            head_dim = getattr(module, "head_dim", 0)
            widths = getattr(module, "qk_head_dim", head_dim), getattr(module, "v_head_dim", head_dim)
            if getattr(getattr(module, "o_proj", None), "in_features", None) != heads * widths[1]:
                return None
            sizes.add(heads * sum(widths) / 2)
        own = {name: p for name, p in module._parameters.items() if p is not None and p.dim() > 1}
        stacked = [p for p in own.values() if p.dim() == 3]
        if isinstance(module, nn.Embedding) or not own:
            continue
        if stacked and experts_per_token:  # beside them lie their biases
            total += experts_per_token * sum(p.numel() / p.shape[0] for p in stacked)
        elif list(own) == ["weight"] and not stacked:
            total += own["weight"].numel()
        else:
            return None
    return Multiplied(total, *sizes) if len(sizes) == 1 else None


def training_flops(counted: Multiplied, windows: Sequence[int | Chunk | None], bounds: Sequence[int]) -> float:
    """Of forward and backward over one sequence.

    Args:
        windows: as `layer_windows`.
        bounds: of the documents in the sequence, from 0 to its length.
    """
    return 6.0 * counted.matmul_parameters * bounds[-1] + 12.0 * counted.q_size * seen_pairs(windows, bounds)


def seen_pairs(windows: Sequence[int | Chunk | None], bounds: Sequence[int]) -> int:
    """Pairs of a query and a key it sees, over all layers; arguments as `training_flops`."""
    pairs = {window: _pairs(window, tuple(bounds)) for window in set(windows)}
    return sum(pairs[window] for window in windows)


def _pairs(window: int | Chunk | None, bounds: tuple[int, ...]) -> int:
    if isinstance(window, Chunk):
        return _pairs(None, cut_into_chunks(bounds, window.size))
    return sum(visible_pairs(stop - start, window) for start, stop in pairwise(bounds))
