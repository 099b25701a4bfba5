"""Floating-point operations of a training step and peak rates of devices, for model FLOPs utilisation (MFU).

    6 * parameters that multiply a token * tokens  +  12 * query features * visible pairs, over all layers

Query features count all heads; if values are narrower than keys, the mean of both widths counts.

The forward contributes factors of 2 and 4, the backward twice that. Only the model's own products count, not
recomputation: neither that of checkpointing nor the scores that FlashAttention's backward computes again.
Source: the convention of Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B, with only the visible pairs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from ringflash.huggingface.validation import attention_modules
from ringflash.sequence.mask import Documents, SequenceMask, cut_into_chunks

# Dense bf16 rates from NVIDIA's data sheets. The first entry whose name is part of the device's name applies.
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
FP8_PER_BF16 = 2.0  # peak of e4m3 products over the peak of bf16 products, on every GPU that has both


class MatmulSizes(NamedTuple):
    """Parameters that multiply a token, and query features of a layer (see the module docstring)."""

    matmul_parameters: float
    q_size: float


class ChunkedAttention(NamedTuple):
    """A layer that attends within chunks of `size` tokens of each document (Llama 4)."""

    size: int


def peak_tflops(device_name: str) -> float | None:
    """Return the TFLOP/s of a GPU by torch's name for it; None if it is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS if re.search(rf"{name}(?!\d)", device_name)), None)


def visible_pairs(length: int, window: int | None = None) -> int:
    """Return the number of visible query-key pairs of a causal document.

    Args:
        window: keys to the left that a query sees in addition to itself; None means all.
    """
    hidden = 0 if window is None else max(0, length - window)
    return (length * (length + 1) - hidden * (hidden - 1)) // 2


def layer_windows(config: Any) -> list[int | ChunkedAttention | None]:
    """Return the window of every layer of a transformers configuration, for `visible_pairs`, or its chunks."""
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if size else "full_attention"]
    if len(kinds) == 1:
        kinds = kinds * config.num_hidden_layers
    known = {
        "sliding_attention": size - 1 if size else None,
        "chunked_attention": ChunkedAttention(getattr(config, "attention_chunk_size", None) or 0),
    }
    return [known.get(kind) for kind in kinds]


def matmul_sizes(model: nn.Module) -> MatmulSizes | None:
    """Return the sizes of the products of a transformers model; None if its modules do not reveal them.

    Weights of linear layers and routers multiply every token. Stacked experts count as the number of experts that a
    token is sent to. Embeddings do not count, since they are looked up.
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
        if stacked and experts_per_token:  # their biases are 2-D parameters of the same module
            total += experts_per_token * sum(p.numel() / p.shape[0] for p in stacked)
        elif list(own) == ["weight"] and not stacked:
            total += own["weight"].numel()
        else:
            return None
    return MatmulSizes(total, *sizes) if len(sizes) == 1 else None


def training_flops(
    sizes: MatmulSizes, windows: Sequence[int | ChunkedAttention | None], bounds: Sequence[int] | Documents
) -> float:
    """Return the FLOPs of forward and backward over one sequence.

    Args:
        windows: window or chunks of every layer (`layer_windows`).
        bounds: document bounds of the sequence, from 0 to its length, or documents of a table (`read_documents`).
    """
    seqlen = (bounds.bounds if isinstance(bounds, Documents) else bounds)[-1]
    return 6.0 * sizes.matmul_parameters * seqlen + 12.0 * sizes.q_size * count_visible_pairs(windows, bounds)


def count_visible_pairs(windows: Sequence[int | ChunkedAttention | None], bounds: Sequence[int] | Documents) -> int:
    """Return the number of visible query-key pairs over all layers; for the arguments see `training_flops`."""
    documents = bounds if isinstance(bounds, Documents) else Documents(tuple(bounds))
    pairs = {window: _visible_pairs(window, documents) for window in set(windows)}
    return sum(pairs[window] for window in windows)


def _visible_pairs(window: int | ChunkedAttention | None, documents: Documents) -> int:
    """Return the visible pairs of query and key under these documents and a layer's window or chunks."""
    if isinstance(window, ChunkedAttention):
        bounds = documents.plain_bounds("layers that attend in chunks")
        documents = Documents(cut_into_chunks(bounds, window.size))
        window = None
    left = -1 if window is None else window
    return SequenceMask(documents.bounds[-1], True, (left, -1), *documents).num_visible
