"""Layers in which a token sees its own chunk of its document (Llama 4): packed documents, bounded by every chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.attention.custom_op import host_values
from ringflash.huggingface.layers import layer_type
from ringflash.sequence.mask import check_cu_seqlens, cut_into_chunks


def chunk_size(module: nn.Module) -> int | None:
    """Tokens of a chunk in the layer of this attention; None is a layer without chunks."""
    if layer_type(module) != "chunked_attention":
        return None
    config: Any = module.config
    return config.attention_chunk_size


def attend_in_chunks(
    attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, size: int, seqlen: int
) -> Any:
    """What `attend` returns under the chunks of documents, or of the whole sequence.

    Args:
        attend: `ring_attention` with its options; row by row where there are several, since documents want one.
        size: tokens of a chunk, counted from the start of each document.
        seqlen: of the whole sequence.
    """
    bounds = _bounds(cu_seqlens, size, seqlen, q)
    if cu_seqlens is not None or bounds is None or q.shape[0] == 1:
        return attend(q, k, v, cu_seqlens=bounds)
    rows = [attend(*row, cu_seqlens=bounds) for row in zip(*(x.split(1) for x in (q, k, v)), strict=True)]
    return torch.cat(rows) if isinstance(rows[0], Tensor) else tuple(map(torch.cat, zip(*rows, strict=True)))


@torch.compiler.disable(reason="the number of bounds depends on their values")
def _bounds(cu_seqlens: Tensor | None, size: int, seqlen: int, q: Tensor) -> Tensor | None:
    """On the CPU, where reading them costs no synchronisation; as given where the operator will refuse them."""
    if cu_seqlens is None:
        return None if seqlen <= size else torch.tensor(cut_into_chunks((0, seqlen), size), dtype=torch.int32)
    try:
        documents = host_values(cu_seqlens, q)
        check_cu_seqlens(documents, seqlen)
    except ValueError:
        return cu_seqlens
    return torch.tensor(cut_into_chunks(documents, size), dtype=torch.int32)
