"""Functions of the package ring-flash-attention (`import ring_flash_attn`), computed by ringflash.

    sys.modules["ring_flash_attn"] = ringflash.compat.ring_flash_attn    # before the first import of it

Arguments, layouts of the shards and results are that package's; its kernels are not needed. Differences:

- `group=None` is the default process group of torch.distributed, as there, not one process as in `ring_attention`.
- `window_size` is that of flash-attention over the whole sequence or document, in every function.
- The log-sum-exp that `return_attn_probs` returns is differentiable.
- Functions whose shards ringflash has no layout for, and arguments that it cannot follow, raise NotImplementedError.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.attention.api import attend
from ringflash.attention.options import RingOptions
from ringflash.comm.agreement import agree
from ringflash.comm.group import Group, resolve

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

DATA_PARAMS: dict[str, Any] = {}  # of the present batch, as `update_ring_flash_attn_params` left them


def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of this rank's queries over the whole sequence; rank r holds the r-th of cp_size equal parts.

    Args:
        q: (batch, seqlen_local, num_heads, head_dim).
        k, v: (batch, seqlen_local, num_kv_heads, head_dim).
        dropout_p: 0.
        alibi_slopes: None.
        return_attn_probs: also return the log-sum-exp, (batch, num_heads, seqlen_local), and None.
    Returns:
        out: as q.
    Raises:
        NotImplementedError, ValueError: on every rank.
    """
    return _attend(
        "contiguous", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs, group,
    )  # fmt: skip


def zigzag_ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Causal attention; rank r holds the chunks r and 2 * cp_size - 1 - r of 2 * cp_size, as in our layout "zigzag".

    Args: as `ring_flash_attn_func`; `causal` must be True, as there.
    """
    error = None if causal else ValueError("causal must be True with zigzag shards, got False; pass causal=True.")
    return _attend(
        "zigzag", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs, group, error=error,
    )  # fmt: skip


def llama3_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention within packed documents; rank r holds the r-th of cp_size equal parts of the packed sequence.

    Args:
        q: (total_tokens_local, num_heads, head_dim).
        k, v: (total_tokens_local, num_kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: results of
            `llama3_flash_attn_prepare_cu_seqlens`, the tensors themselves: cu_seqlens_q carries the bounds of the whole
            sequence, which a copy does not.
        heads_k_stride: a divisor of num_kv_heads, as there. ringflash chooses itself how many KV heads arrive at a
            time.
        return_attn_probs: also return the log-sum-exp, (num_heads, total_tokens_local), and None.
    Returns:
        out: as q.
    Raises:
        NotImplementedError, ValueError: on every rank.
    """
    prepared = getattr(cu_seqlens_q, "_ringflash", None)
    ranges = (max_seqlen_q, max_seqlen_k, local_k_slice)
    error = _find_problem(prepared, cu_seqlens_q, cu_seqlens_k, ranges, causal, group)
    error = error or _check_stride(heads_k_stride, k)
    result = _attend(
        "contiguous", q[None], k[None], v[None], dropout_p, softmax_scale, causal, window_size, alibi_slopes,
        deterministic, return_attn_probs, group, prepared and prepared.bounds, error,
    )  # fmt: skip
    return result[0] if isinstance(result, Tensor) else (result[0][0], result[1][0], None)


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """Return this rank's part of the bounds of packed documents, for `llama3_flash_attn_varlen_func`.

    With documents [0, 3, 8] on two ranks under a causal mask, rank 0 gets q [0, 3, 4], k [0, 3, 4] and slice(0, 4),
    rank 1 gets q [0, 4], k [0, 5] and slice(3, 8). The host reads cu_seqlens once, here.

    Args:
        cu_seqlens: (num_documents + 1,), int32, bounds in the whole sequence, the same on all ranks.
    Returns:
        cu_seqlens_q, cu_seqlens_k: int32, bounds of the queries of this rank, and of the keys that they see.
        max_seqlen_q, max_seqlen_k: longest document among them.
        local_k_slice: keys that they see, as positions in the whole sequence.
    Raises:
        ValueError: a sequence that world_size does not divide.
    """
    bounds = cu_seqlens.tolist()
    length, rest = divmod(bounds[-1], world_size)
    if rest:
        raise ValueError(
            f"cu_seqlens must end at a multiple of world_size ({world_size}), got {bounds[-1]}; pad the sequence."
        )
    start, stop = rank * length, (rank + 1) * length
    left, right = bisect_left(bounds, start), bisect_left(bounds, stop)
    left -= bounds[left] != start
    inner = bounds[left + 1 : right]
    first, last = bounds[left], stop if causal else bounds[right]
    bounds_q = [0, *(bound - start for bound in inner), length]
    bounds_k = [0, *(bound - first for bound in inner), last - first]
    cu_seqlens_q, cu_seqlens_k = (cu_seqlens.new_tensor(x) for x in (bounds_q, bounds_k))
    ranges = (_longest(bounds_q), _longest(bounds_k), slice(first, last))
    whole = torch.tensor(bounds, dtype=torch.int32)
    versions = (cu_seqlens_q._version, cu_seqlens_k._version)
    cu_seqlens_q._ringflash = _Prepared(whole, causal, (rank, world_size), cu_seqlens_k, versions, ranges)  # type: ignore[attr-defined]
    return cu_seqlens_q, cu_seqlens_k, *ranges


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group) -> None:
    """Set DATA_PARAMS, the arguments of `llama3_flash_attn_varlen_func`, to those of a batch under a causal mask.

    Args:
        cu_seqlens: (num_documents + 1,), int32, bounds in the whole sequence, the same on all ranks.
    """
    size, rank = RingOptions(_resolve(process_group)).place
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    DATA_PARAMS.update(zip(names, llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, size), strict=True))


def ring_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """Call `ring_flash_attn_func` with kv, (batch, seqlen_local, 2, num_kv_heads, head_dim)."""
    return ring_flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *options, **named)


def ring_flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    """Call `ring_flash_attn_func` with qkv, (batch, seqlen_local, 3, num_heads, head_dim)."""
    return ring_flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *options, **named)


def zigzag_ring_flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """Call `zigzag_ring_flash_attn_func` with kv, (batch, seqlen_local, 2, num_kv_heads, head_dim)."""
    return zigzag_ring_flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *options, **named)


def zigzag_ring_flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    """Call `zigzag_ring_flash_attn_func` with qkv, (batch, seqlen_local, 3, num_heads, head_dim)."""
    return zigzag_ring_flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *options, **named)


def llama3_flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """Call `llama3_flash_attn_varlen_func` with kv, (total_tokens_local, 2, num_kv_heads, head_dim)."""
    return llama3_flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *options, **named)


def llama3_flash_attn_varlen_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    """Call `llama3_flash_attn_varlen_func` with qkv, (total_tokens_local, 3, num_heads, head_dim)."""
    return llama3_flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *options, **named)


def _refused(name: str, reason: str) -> Any:
    """Return a function that raises NotImplementedError, which every rank that calls it does."""

    def refuse(*args: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{name} must {reason}")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


_PER_DOCUMENT = (
    "get shards cut across the packed sequence, got shards cut within each document; use "
    "llama3_flash_attn_varlen_func, or ringflash.ring_attention with cu_seqlens."
)
_STRIPES = (
    "get shards of one of ringflash's layouts, got single tokens in turn; use zigzag_ring_flash_attn_func, or "
    "ringflash.ring_attention with layout='striped'."
)
ring_flash_attn_varlen_func = _refused("ring_flash_attn_varlen_func", _PER_DOCUMENT)
ring_flash_attn_varlen_kvpacked_func = _refused("ring_flash_attn_varlen_kvpacked_func", _PER_DOCUMENT)
ring_flash_attn_varlen_qkvpacked_func = _refused("ring_flash_attn_varlen_qkvpacked_func", _PER_DOCUMENT)
zigzag_ring_flash_attn_varlen_func = _refused("zigzag_ring_flash_attn_varlen_func", _PER_DOCUMENT)
zigzag_ring_flash_attn_varlen_kvpacked_func = _refused("zigzag_ring_flash_attn_varlen_kvpacked_func", _PER_DOCUMENT)
zigzag_ring_flash_attn_varlen_qkvpacked_func = _refused("zigzag_ring_flash_attn_varlen_qkvpacked_func", _PER_DOCUMENT)
stripe_flash_attn_func = _refused("stripe_flash_attn_func", _STRIPES)
stripe_flash_attn_kvpacked_func = _refused("stripe_flash_attn_kvpacked_func", _STRIPES)
stripe_flash_attn_qkvpacked_func = _refused("stripe_flash_attn_qkvpacked_func", _STRIPES)
substitute_hf_flash_attn = _refused(
    "substitute_hf_flash_attn",
    "get the model whose attention it replaces, got only a group; build the model with attn_implementation='ringflash' "
    "and call ringflash.huggingface.set_group on it.",
)


class _Prepared(NamedTuple):
    """Arguments of `llama3_flash_attn_varlen_func` as they were prepared, and the bounds of the whole sequence."""

    bounds: Tensor
    causal: bool
    place: tuple[int, int]
    cu_seqlens_k: Tensor
    versions: tuple[int, int]
    ranges: tuple[int, int, slice]


def _attend(
    layout: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    alibi_slopes: object,
    deterministic: bool,
    return_lse: bool,
    group: Group,
    cu_seqlens: Tensor | None = None,
    error: Exception | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Call `attend`, or raise on every rank."""
    options = RingOptions(_resolve(group), layout, deterministic=deterministic)
    if dropout_p:
        error = NotImplementedError(f"dropout_p must be 0, got {dropout_p}; ringflash has no dropout in attention.")
    if alibi_slopes is not None:
        error = NotImplementedError("alibi_slopes must be None, got slopes; ringflash has no attention biases.")
    if error is not None:
        agree(options.group, {}, error)  # other ranks may have gone on
        raise error
    result = attend(
        q, k, v, options, causal=causal, softmax_scale=softmax_scale, window_size=window_size, cu_seqlens=cu_seqlens,
        return_lse=return_lse,
    )  # fmt: skip
    return result if isinstance(result, Tensor) else (*result, None)


def _resolve(group: Group) -> dist.ProcessGroup | None:
    """Return the group, for None the default one."""
    if group is None and not dist.is_initialized():
        raise RuntimeError(
            "group must be a process group, or None for the default one, got None without a default one; call "
            "torch.distributed.init_process_group first."
        )
    return resolve(dist.group.WORLD if group is None else group)


def _find_problem(
    prepared: _Prepared | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    ranges: tuple[int, int, slice],
    causal: bool,
    group: Group,
) -> Exception | None:
    """Return the error of arguments that are not those that were prepared for this rank and mask, if any."""
    if prepared is None or prepared.versions != (cu_seqlens_q._version, cu_seqlens_k._version):
        return ValueError(
            "cu_seqlens_q must be the tensor that llama3_flash_attn_prepare_cu_seqlens of ringflash returned, got a "
            "copy, one that was written to, or another; pass it on as it is."
        )
    if cu_seqlens_k is not prepared.cu_seqlens_k or ranges != prepared.ranges:
        return ValueError(
            "cu_seqlens_k, max_seqlen_q, max_seqlen_k and local_k_slice must be those prepared with cu_seqlens_q, got "
            f"others ({ranges}, not {prepared.ranges}); pass on what llama3_flash_attn_prepare_cu_seqlens returned."
        )
    size, rank = RingOptions(_resolve(group)).place
    if (causal, rank, size) != (prepared.causal, *prepared.place):
        return ValueError(
            f"causal, rank and world_size must be those of the preparation {(prepared.causal, *prepared.place)}, got "
            f"{(causal, rank, size)}; pass the same to llama3_flash_attn_prepare_cu_seqlens."
        )
    return None


def _check_stride(heads_k_stride: int, k: Tensor) -> Exception | None:
    """Return the error of a number of heads that does not divide those of k, if any."""
    if k.dim() == 3 and heads_k_stride > 0 and k.shape[1] % heads_k_stride == 0:
        return None
    return ValueError(
        f"heads_k_stride must divide num_kv_heads of k (total_tokens, num_kv_heads, head_dim), got {heads_k_stride} "
        f"for {tuple(k.shape)}; 1 always does."
    )


def _longest(bounds: list[int]) -> int:
    return max(stop - start for start, stop in pairwise(bounds))
