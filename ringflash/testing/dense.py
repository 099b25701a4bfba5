"""Plain attention over a whole sequence on one device: the oracle in fp64, the baseline in a low dtype.

It shares no code with the rest of the package: global positions decide the visibility of each pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROWS = 1024  # query rows per block, so that an oracle of 32k tokens fits into memory


def visible(
    query: Tensor,
    key: Tensor,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return the mask of visible pairs from global positions: (queries, keys), bool.

    Args:
        cu_seqlens: bounds of documents, or the rows of `ringflash.document_table`.
    """
    bounds, parents, bidirectional, global_tokens = _rows(cu_seqlens)
    shift = own = on_path = None
    if bounds:
        stops = torch.tensor(bounds[1:], device=query.device)
        documents = [torch.bucketize(x, stops, right=True) for x in (query, key)]
        own = documents[0][:, None] == documents[1][None]
        ancestors, begins = _paths(bounds, parents, query.device)
        on_path = own | ancestors[documents[0]][:, documents[1]]
        shift = begins - torch.tensor(bounds[:-1], device=query.device)
        query, key = (x + shift[document] for x, document in zip((query, key), documents, strict=True))
    distance = key[None, :] - query[:, None]
    left, right = window_size
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
        if own is not None:
            seen |= own & torch.tensor(bidirectional, dtype=torch.bool, device=query.device)[documents[0]][:, None]
    if left >= 0:
        near = distance >= -left
        if global_tokens:
            near |= key[None, :] < torch.tensor(global_tokens, device=query.device)[documents[0]][:, None]
        seen &= near
    if right >= 0 and not causal:
        seen &= distance <= right
    return seen if on_path is None else seen & on_path


def _rows(
    cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | None,
) -> tuple[list[int], list[int], list[bool], list[int]]:
    """Return bounds, parents, directions and global tokens of documents."""
    if cu_seqlens is None:
        return [], [], [], []
    if isinstance(cu_seqlens[0], Sequence):
        bounds, parents, both, counts = (list(row) for row in cu_seqlens)  # type: ignore[arg-type]
        return bounds, parents[:-1], [bool(x) for x in both[:-1]], counts[:-1]
    count = len(cu_seqlens) - 1
    return list(cu_seqlens), [-1] * count, [False] * count, [0] * count  # type: ignore[arg-type]


def _paths(bounds: list[int], parents: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which documents each document continues, directly or not, and the tokens of these before it."""
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool, device=device)
    lengths = torch.tensor(bounds, device=device).diff()
    for document, parent in enumerate(parents):
        if parent >= 0:
            ancestors[document] = ancestors[parent]
            ancestors[document, parent] = True
    return ancestors, (ancestors * lengths).sum(1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | None = None,
    softmax_scale: float | None = None,
) -> dict[str, Tensor]:
    """Compute out, lse, dq, dk and dv in the dtype of q (lse: at least fp32), by eager torch and autograd.

    Args:
        q, dout: (batch, seqlen, num_heads, head_dim).  k, v: (batch, seqlen, num_kv_heads, head_dim).
        dlse: (batch, num_heads, seqlen), or None if the loss does not depend on lse.
    Numerics: eager in the dtype of q; dk and dv of the row blocks are summed in at least fp32, as in a single matmul.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    state = torch.promote_types(q.dtype, torch.float32)
    position = torch.arange(q.shape[1], device=q.device)
    k, v = (x.detach().requires_grad_() for x in (k, v))
    dk, dv = (torch.zeros_like(x, dtype=state) for x in (k, v))
    blocks: list[tuple[Tensor, ...]] = []
    for start in range(0, q.shape[1], _ROWS):
        rows = slice(start, start + _ROWS)
        part = q[:, rows].detach().requires_grad_()
        seen = visible(position[rows], position, causal=causal, window_size=window_size, cu_seqlens=cu_seqlens)
        out, lse = _forward(part, k, v, seen, scale)
        objective = (out * dout[:, rows]).sum()
        if dlse is not None:
            objective = objective + (lse * dlse[..., rows]).sum()
        dq, part_k, part_v = torch.autograd.grad(objective, (part, k, v))
        dk += part_k
        dv += part_v
        blocks.append((out.detach(), lse.detach(), dq))
    outs, lses, dqs = zip(*blocks, strict=True)
    return {
        "out": torch.cat(outs, 1), "lse": torch.cat(lses, 2), "dq": torch.cat(dqs, 1),
        "dk": dk.to(k.dtype), "dv": dv.to(v.dtype),
    }  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention under a mask of visible pairs; lse from scores in fp32, out in the dtype of q."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = (q.transpose(1, 2) @ k.transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))
    state = torch.promote_types(q.dtype, torch.float32)
    exact = scores if state == q.dtype else (q.to(state).transpose(1, 2) @ k.to(state).transpose(2, 3) * scale)
    lse = exact.masked_fill(~seen, float("-inf")).logsumexp(-1)
    return (scores.softmax(-1) @ v).transpose(1, 2), lse
