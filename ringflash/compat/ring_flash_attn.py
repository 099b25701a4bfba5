"""Functions of the package ring-flash-attention (`import ring_flash_attn`), computed by ringflash.

    ringflash.compat.ring_flash_attn.install()    # before the first import of ring_flash_attn

Arguments, layouts of the shards and results are that package's; its kernels are not needed. Differences:

- `group=None` is the default process group of torch.distributed, as in that package, not a single process.
- `window_size` is that of flash-attention over the whole sequence or document, in every function.
- The log-sum-exp that `return_attn_probs` returns is differentiable.
- Functions whose shards ringflash has no layout for, and arguments that it cannot follow, raise NotImplementedError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.attention.api import attend
from ringflash.attention.inputs import autocast, require_grad_together
from ringflash.attention.options import CallOptions
from ringflash.comm.agreement import agree
from ringflash.comm.group import Group, resolve
from ringflash.compat.packed_bounds import llama3_flash_attn_prepare_cu_seqlens, scaled_bounds, whole_bounds
from ringflash.huggingface.validation import check_without_hooks, find_static_error

_STEMS = ("ring_flash_attn", "zigzag_ring_flash_attn", "zigzag_ring_flash_attn_varlen", "llama3_flash_attn_varlen")
_FORMS = ("", "_kvpacked", "_qkvpacked")
_PER_DOCUMENT = (
    "get shards of one of ringflash's layouts, got one part of each document; use zigzag_ring_flash_attn_varlen_func, "
    "which takes two, or llama3_flash_attn_varlen_func."
)
_STRIPES = (
    "get shards of one of ringflash's layouts, got single tokens dealt in rotation; use zigzag_ring_flash_attn_func, "
    "or ringflash.ring_attention with layout='striped'."
)
_REFUSED = {
    f"{stem}{form}_func": reason
    for stem, reason in (("ring_flash_attn_varlen", _PER_DOCUMENT), ("stripe_flash_attn", _STRIPES))
    for form in _FORMS
}
# Names that prime-rl and axolotl import, but need not call.
_REFUSED |= dict.fromkeys(
    ("AllGatherComm", "get_default_args", "check_params", "create_ring_flash_attention_forward"),
    "only be imported, got a call: it is part of that package's rings, which ringflash replaces; use "
    "llama3_flash_attn_varlen_func or substitute_hf_flash_attn.",
)
__all__ = [f"{stem}{form}_func" for stem in _STEMS for form in _FORMS]
__all__ += ["llama3_flash_attn_prepare_cu_seqlens", "substitute_hf_flash_attn", "update_ring_flash_attn_params"]
__all__ += ["use_ring_attn", *_REFUSED]
_MODULES = (  # submodules of the package, from which its users import
    "adapters", "adapters.hf_adapter", "llama3_flash_attn_varlen", "ring_flash_attn", "utils", "zigzag_ring_flash_attn",
    "zigzag_ring_flash_attn_varlen",
)  # fmt: skip

Result = Tensor | tuple[Tensor, Tensor, None]


class Options(NamedTuple):
    """Arguments after the tensors and bounds, in the order in which every function takes them.

    Args:
        dropout_p: 0.
        alibi_slopes: None.
        return_attn_probs: also return the log-sum-exp, and None.
        group: None for the default process group.
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Sequence[int] = (-1, -1)
    alibi_slopes: None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    group: Group = None


DATA_PARAMS: dict[str, Any] = {}  # bounds of the current batch, set by `update_ring_flash_attn_params`
_in_use = True  # set by `use_ring_attn`


def install() -> None:
    """Make `import ring_flash_attn`, and imports of the modules of that package, lead to this module.

    Raises:
        RuntimeError: the package itself has been imported before.
    """
    here = sys.modules[__name__]
    names = ("ring_flash_attn", *(f"ring_flash_attn.{name}" for name in _MODULES))
    if loaded := [name for name in names if sys.modules.get(name, here) is not here]:
        raise RuntimeError(
            f"install must be called before ring_flash_attn is imported, got {loaded} imported; call it first."
        )
    sys.modules.update(dict.fromkeys(names, here))


def ring_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Result:
    """Attention of this rank's queries over the whole sequence; rank r holds the r-th of cp_size equal parts.

    Args:
        q: (batch, seqlen_local, num_heads, head_dim).
        k, v: (batch, seqlen_local, num_kv_heads, head_dim).
        options, named: as `Options`.
    Returns:
        out: as q.  With return_attn_probs also the log-sum-exp, (batch, num_heads, seqlen_local), and None.
    Raises:
        NotImplementedError, ValueError: on every rank.
    """
    return _attend("contiguous", q, k, v, Options(*options, **named))


def zigzag_ring_flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Result:
    """Causal attention; rank r holds the chunks r and 2 * cp_size - 1 - r of 2 * cp_size, as in our layout "zigzag".

    Args: as `ring_flash_attn_func`; `causal` must be True, as in that package.
    """
    given = Options(*options, **named)
    return _attend("zigzag", q, k, v, given, error=_zigzag_error(given))


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *options: Any,
    **named: Any,
) -> Result:
    """Causal attention within packed documents; a rank holds a zigzag of each, as in our layout "documents".

    Args:
        q: (total_tokens_local, num_heads, head_dim).
        k, v: (total_tokens_local, num_kv_heads, head_dim).
        cu_seqlens: (num_documents + 1,), int32, bounds in the shard: those in the whole sequence, divided by cp_size.
        max_seqlen: at least the length of the longest document in the shard.
        options, named: as `Options`.
    Returns:
        out: as q.  With return_attn_probs also the log-sum-exp, (num_heads, total_tokens_local), and None.
    Raises:
        NotImplementedError, ValueError: on every rank.
    """
    given = Options(*options, **named)
    size, _ = CallOptions(_resolve(given.group)).size_and_rank
    bounds, error = scaled_bounds(cu_seqlens, size, max_seqlen)
    return _attend_packed("documents", q, k, v, given, bounds, _zigzag_error(given) or error)


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
    *options: Any,
    **named: Any,
) -> Result:
    """Attention within packed documents; rank r holds the r-th of cp_size equal parts of the packed sequence.

    Args:
        q: (total_tokens_local, num_heads, head_dim).
        k, v: (total_tokens_local, num_kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice: results of
            `llama3_flash_attn_prepare_cu_seqlens`, the tensors themselves: cu_seqlens_q carries the bounds of the whole
            sequence, which a copy does not.
        heads_k_stride: a divisor of num_kv_heads. It has no further effect: ringflash chooses the number of KV heads
            that it gathers at a time.
        options, named: as `Options`.
    Returns:
        out: as q.  With return_attn_probs also the log-sum-exp, (num_heads, total_tokens_local), and None.
    Raises:
        NotImplementedError, ValueError: on every rank.
    """
    given = Options(*options, **named)
    size, rank = CallOptions(_resolve(given.group)).size_and_rank
    of_rank = (cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice, given.causal, rank, size)
    bounds, error = whole_bounds(cu_seqlens_q, of_rank)
    return _attend_packed("contiguous", q, k, v, given, bounds, error or _stride_error(heads_k_stride, k))


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: Group) -> None:
    """Set DATA_PARAMS, arguments of `llama3_flash_attn_varlen_func`, for a batch under a causal mask.

    Args:
        cu_seqlens: (num_documents + 1,), int32, bounds in the whole sequence, the same on all ranks.
        process_group: ranks that share the sequence; None for the default process group.
    """
    size, rank = CallOptions(_resolve(process_group)).size_and_rank
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    DATA_PARAMS.update(zip(names, llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, size), strict=True))


def substitute_hf_flash_attn(process_group: Group, heads_k_stride: int) -> None:
    """Make all transformers models with attn_implementation="flash_attention_2" attend over the ring.

    Rank r holds the r-th of cp_size equal parts of packed documents under a causal mask, whose bounds
    `update_ring_flash_attn_params` was given last. `ringflash.huggingface` does this for one model, and checks more.

    Args:
        heads_k_stride: as for `llama3_flash_attn_varlen_func`.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    group = _resolve(process_group)
    current: Any = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    within = getattr(current, "_within", current)

    def attend_over_ring(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        s_aux: None = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        """Attend over the ring, or as before the substitution if that is off; arguments as transformers'."""
        if not _in_use:
            return within(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                sliding_window=sliding_window, is_causal=is_causal, s_aux=s_aux, **named,
            )  # fmt: skip
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        named |= {"attention_mask": attention_mask, "s_aux": s_aux}
        error = _find_layer_error(module, query, key, dropout, sliding_window, causal, named)
        if error is not None:
            agree(group, {}, error)  # other ranks may be in the call: let them raise, too
            raise error
        q, k, v = (x[0].transpose(0, 1) for x in require_grad_together(*map(autocast, (query, key, value))))
        out = llama3_flash_attn_varlen_func(
            q, k, v, **DATA_PARAMS, heads_k_stride=heads_k_stride, softmax_scale=scaling, causal=True,
            window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0), group=group,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out[None], None

    attend_over_ring._within = within  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = attend_over_ring


def _find_layer_error(
    module: nn.Module, query: Tensor, key: Tensor, dropout: float, window: int | None, causal: bool, named: dict
) -> Exception | None:
    """Return the error for a layer, or a call of a layer, that cannot attend over the ring; None if it can."""
    try:
        check_without_hooks(module)
    except NotImplementedError as found:
        return found
    error = find_static_error(module, query, key, dropout, window, causal, named)
    if error is None and (len(query) != 1 or not causal or not DATA_PARAMS):
        return ValueError(
            f"query must be one row of packed documents under a causal mask, got {len(query)} rows, causal={causal}, "
            f"and {'the' if DATA_PARAMS else 'no'} documents of update_ring_flash_attn_params; call this function with "
            "the cu_seqlens of each batch."
        )
    if error is None and getattr(module, "layer_idx", 0) == 0 and _restart(named.get("position_ids")):
        return ValueError(
            "position_ids must count from the start of the sequence or of its documents, got positions that begin at "
            "0 in the middle of a document, as a model counts a shard; pass this rank's part of the global positions."
        )
    return error


def _restart(position_ids: Tensor | None) -> bool:
    """Return True if a shard's positions begin at 0, but its first document on a previous rank."""
    if position_ids is None or torch.compiler.is_compiling():
        return False
    keys, length = DATA_PARAMS["local_k_slice"], position_ids.shape[-1]
    return keys.start < keys.stop - length and int(position_ids.flatten()[0]) == 0


def use_ring_attn(flag: bool) -> None:
    """Switch the attention of `substitute_hf_flash_attn` off, as for generation, or on again."""
    global _in_use
    _in_use = flag


def _packed_forms(function: Callable[..., Any], dim: int) -> list[Callable[..., Any]]:
    """Return the function for q and kv, and for qkv, which are stacked in dimension `dim`."""

    def kvpacked(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
        return function(q, *kv.unbind(dim), *options, **named)

    def qkvpacked(qkv: Tensor, *options: Any, **named: Any) -> Any:
        return function(*qkv.unbind(dim), *options, **named)

    return [kvpacked, qkvpacked]


ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _packed_forms(ring_flash_attn_func, 2)
zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _packed_forms(
    zigzag_ring_flash_attn_func, 2
)
zigzag_ring_flash_attn_varlen_kvpacked_func, zigzag_ring_flash_attn_varlen_qkvpacked_func = _packed_forms(
    zigzag_ring_flash_attn_varlen_func, 1
)
llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = _packed_forms(
    llama3_flash_attn_varlen_func, 1
)


def __getattr__(name: str) -> Any:
    """Return a function that raises NotImplementedError, or this module for the name of one of the package's."""
    if name in ("adapters", "hf_adapter", "utils"):
        return sys.modules[__name__]
    if name not in _REFUSED:
        raise AttributeError(f"ring_flash_attn has no {name!r} in ringflash.compat.")

    def refuse(*args: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{name} must {_REFUSED[name]}")

    return refuse


def _attend(
    layout: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Options,
    cu_seqlens: Tensor | None = None,
    error: Exception | None = None,
) -> Result:
    """Call `attend`, or raise on every rank."""
    options = CallOptions(_resolve(given.group), layout=layout, deterministic=given.deterministic)
    if given.dropout_p:
        error = NotImplementedError(
            f"dropout_p must be 0, got {given.dropout_p}; ringflash has no dropout in attention."
        )
    if given.alibi_slopes is not None:
        error = NotImplementedError("alibi_slopes must be None, got slopes; ringflash has no attention biases.")
    if error is not None:
        agree(options.group, {}, error)  # other ranks may be in the call: let them raise, too
        raise error
    result = attend(
        q, k, v, options, causal=given.causal, softmax_scale=given.softmax_scale, window_size=given.window_size,
        cu_seqlens=cu_seqlens, return_lse=given.return_attn_probs,
    )  # fmt: skip
    return result if isinstance(result, Tensor) else (*result, None)


def _attend_packed(layout: str, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Result:
    """Call `_attend` with tokens of packed documents, (total_tokens_local, heads, head_dim), as one row."""
    result = _attend(layout, q[None], k[None], v[None], *arguments)
    return result[0] if isinstance(result, Tensor) else (result[0][0], result[1][0], None)


def _resolve(group: Group) -> dist.ProcessGroup | None:
    """Return the group; the default one for None."""
    if group is None and not dist.is_initialized():
        raise RuntimeError(
            "group must be a process group, or None for the default one, got None without a default one; call "
            "torch.distributed.init_process_group first."
        )
    return resolve(dist.group.WORLD if group is None else group)


def _zigzag_error(given: Options) -> Exception | None:
    return None if given.causal else ValueError("causal must be True with zigzag shards, got False; pass causal=True.")


def _stride_error(heads_k_stride: int, k: Tensor) -> Exception | None:
    """Return the error for a heads_k_stride that does not divide the heads of k, or None."""
    if k.dim() == 3 and heads_k_stride > 0 and k.shape[1] % heads_k_stride == 0:
        return None
    return ValueError(
        f"heads_k_stride must divide num_kv_heads of k (total_tokens, num_kv_heads, head_dim), got {heads_k_stride} "
        f"for {tuple(k.shape)}; 1 divides every number."
    )
