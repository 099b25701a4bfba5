"""Attention on one device: the contract, its checks, and dispatch to an implementation named by the caller.

`impl`  "reference"      eager, any device and dtype: the specification
        "flash2"         torch's FlashAttention-2 operators, CUDA, fp16 and bf16
        "fa4"            flash-attn-4 if it is installed, compute capability 9.x and 10.x, fp16 and bf16
        "hopper"         our kernels for compute capability 9.0, fp16 and bf16
        "hopper_fp8"     our kernels on operands rounded to e4m3: faster, not exact, only on request. The backward
                         multiplies in bf16; in e4m3 dout v^T with "hopper_fp8_scores", all with "hopper_fp8_all"
        "reference_fp8"  eager, any device: the specification of hopper_fp8; also with "_scores" and "_all"
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringflash_kernels.fp8_reference import BLOCK_K, check_products
from ringflash_kernels.fp8_reference import record_bytes as record_bytes
from ringflash_kernels.hopper.environment import TRITON_RELEASES as TRITON_RELEASES
from ringflash_kernels.hopper.environment import check_environment
from ringflash_kernels.mask import Mask
from ringflash_kernels.reference import keys_in_pieces as keys_in_pieces
from ringflash_kernels.reference import state_dtype

_MODULES = {
    "hopper": "ringflash_kernels.hopper.implementation",
    "flash2": "ringflash_kernels.flash2",
    "reference": "ringflash_kernels.reference",
    "fa4": "ringflash_kernels.flash4",
    "hopper_fp8": "ringflash_kernels.hopper.fp8.implementation",
    "hopper_fp8_scores": "ringflash_kernels.hopper.fp8.implementation",
    "hopper_fp8_all": "ringflash_kernels.hopper.fp8.implementation",
    "reference_fp8": "ringflash_kernels.fp8_reference",
    "reference_fp8_scores": "ringflash_kernels.fp8_reference",
    "reference_fp8_all": "ringflash_kernels.fp8_reference",
}

IMPLS = tuple(_MODULES)
KEYS_OF_RECORD = BLOCK_K  # keys of a head whose K and V are rounded to e4m3 together; `record_bytes` is their size
_AUTOMATIC = ("hopper", "flash2", "reference")  # the choices of "auto", fastest first
_ROUNDED = {  # products of the backward in e4m3, by implementation; not exact: never proposed in place of another
    f"{name}_fp8{suffix}": products
    for name in ("hopper", "reference")
    for suffix, products in (("", "bf16"), ("_scores", "fp8_scores"), ("_all", "fp8"))
}


def hopper_environment_error() -> str:
    """Return the reason why this environment cannot launch the Hopper kernels, "" if it can."""
    try:
        check_environment()
    except RuntimeError as error:
        return str(error)
    return ""


class BackwardPass(Protocol):
    """Gradients of one attention call, over one or several sets of keys."""

    def add(self, k: Tensor, v: Tensor, mask: Mask, dk: Tensor, dv: Tensor, *, accumulate: bool = True) -> None:
        """Compute the gradients of the visible pairs of (q, k).

        Args:
            k, v: (batch, seqlen_k, num_kv_heads, head_dim), v possibly narrower.
            dk, dv: shape of k, v; unit last stride, the others any multiples of 16 bytes (TMA needs that).
            accumulate: add to dk and dv, which are fp32 (fp64 for fp64). Otherwise overwrite them; they may then
                have the dtype of k as well.
        """

    def add_records(self, records: Tensor, mask: Mask, dk: Tensor, dv: Tensor, *, accumulate: bool = True) -> None:
        """Compute `add` of quantised keys. Only implementations for which `rounds` is true have it.

        Args:
            records: result of `quantise_kv` for the mask's keys, made for the backward.
        """

    def finish(self, out: Tensor | None = None) -> Tensor:
        """Return dq: (batch, seqlen_q, num_heads, head_dim), dtype of q, summed over all calls of `add`.

        Args:
            out: tensor to write dq to, with unit last stride, for example a slice of heads. Default: a new one.
        """


class Choice(NamedTuple):
    """An implementation and the reason it was chosen."""

    impl: str
    reason: str


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: str,
    mask: Mask | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    acc: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    row_max: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(softmax_scale * q k^T) v over the visible pairs, and the log-sum-exp of the scores.

    With `acc` and `lse` the call resumes: they hold the attention over other keys, and the result covers
    both sets of keys. A ring of two hops:

        acc, lse = attention_forward(q, k0, v0, impl=impl, out=torch.empty_like(q, dtype=torch.float32))
        out, lse = attention_forward(q, k1, v1, impl=impl, acc=acc, lse=lse)

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), in a dtype that `impl` takes (see the module).
        k: (batch, seqlen_k, num_kv_heads, head_dim), as q; num_heads a multiple of num_kv_heads.
        v: as k, or with a smaller head_dim.
        impl: one of IMPLS.
        mask: visible pairs; replaces `causal` and `window_size`.
        causal, window_size: aligned at the bottom right; the window is (left, right), inclusive, -1 unlimited.
        softmax_scale: default head_dim ** -0.5.
        acc: as out, fp32 (fp64 for fp64): output of the earlier calls; needs `lse`.
        out: tensor to write the result to, in the dtype of q or of acc; may be acc itself. Default: a new one.
        lse: (batch, num_heads, seqlen_q), fp32 (fp64 for fp64): updated in place with `acc`, overwritten without.
        row_max: as lse; receives an upper bound of each row's scores, close to the largest, for `begin_backward`;
            updated in place with `acc`. Only for an impl that `rounds`.
    Returns:
        out: as q, as wide as v.  lse: (batch, num_heads, seqlen_q), natural log. A row that sees no key is 0 and -inf.
    Raises:
        ValueError: shapes, dtypes or devices do not fit together; tensors that require grad, which would get none.
        NotImplementedError: the implementation cannot take the inputs; the message names one that can.
    """
    check_inputs(q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError(
            "q, k and v must not require grad, got tensors that do, whose gradients would be lost; call "
            "ringflash.ring_attention with group=None, or use torch.no_grad and attention_backward."
        )
    mask = _mask_of(q, k, mask, causal, window_size)
    if acc is not None and lse is None:
        raise ValueError("lse must be given with acc, got None; pass the lse that earlier calls returned.")
    out = q.new_empty(out_shape(q, v)) if out is None else out
    if lse is None:
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=state_dtype(q.dtype), device=q.device)
    _check_state(q, v, out, lse, acc)
    if any(map(out.is_set_to, (q, k, v))):
        raise ValueError("out must not be q, k or v, got one of them, whose values are still read; leave it out.")
    state = {} if row_max is None else {"row_max": _checked_row_max(impl, lse, row_max)}
    implementation(impl, q, k, v).forward(q, k, v, mask, _scale(q, softmax_scale), out=out, lse=lse, acc=acc, **state)
    return out, lse


def begin_backward(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    impl: str,
    num_kv_heads: int | None = None,
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    row_max: Tensor | None = None,
    num_keys: int | None = None,
    only_dq: Tensor | None = None,
) -> BackwardPass:
    """Start a backward pass: compute delta = rowsum(dout * out) - dlse, and make an fp32 dq of zeros.

    Each call of `add` then adds the gradients for one set of keys. delta is the same for all of them.

    Args:
        dout: as q, as wide as v. out: as dout, or fp32 (fp64 for fp64). lse, dlse: (batch, num_heads, seqlen_q), fp32
            (fp64 for fp64). out and lse are the results over all keys of all calls of `add`.
        num_kv_heads: heads of the keys to come. Needed in FP8, whose buffers are allocated here.
        deterministic: repeated calls give bitwise equal gradients.
        row_max: the tensor that `attention_forward` wrote, for an impl that `needs_row_max`.
        num_keys: keys of all calls of `add` together, if known: then FP8 can add up dQ of up to 131,072 keys in fp16.
        only_dq: tensor for the final dq. Whoever gives it must call `add` exactly once, and then `finish(only_dq)`;
            `add` may write dq to it directly, without a sum in fp32.
    Raises:
        ValueError, NotImplementedError: as `attention_backward`.
    """
    implementation(impl, q, q, q)
    _check_gradients(dout, q, out, out, lse, dlse)
    if num_kv_heads is None and rounds(impl):
        raise ValueError(f"num_kv_heads must be given with impl {impl!r}, got None; pass k.shape[2].")
    num_kv_heads = num_kv_heads or q.shape[2]
    _check_groups(q, num_kv_heads)
    check_backward(impl, q.shape[-1], deterministic)
    if row_max is not None:
        _checked_row_max(impl, lse, row_max)
    return begin_checked_backward(
        dout, q, out, lse, impl=impl, num_kv_heads=num_kv_heads, softmax_scale=_scale(q, softmax_scale), dlse=dlse,
        deterministic=deterministic, row_max=row_max, num_keys=num_keys, only_dq=only_dq,
    )  # fmt: skip


def begin_checked_backward(
    dout: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    impl: str,
    num_kv_heads: int,
    softmax_scale: float,
    dlse: Tensor | None,
    deterministic: bool,
    row_max: Tensor | None,
    num_keys: int | None = None,
    only_dq: Tensor | None = None,
) -> BackwardPass:
    """Start a backward pass as `begin_backward` does, with inputs that the caller has checked.

    All that the pass keeps is allocated here, on the current stream. Its `add` and `finish` may run on others, if this
    stream waits for them before the pass is dropped.
    """
    options: dict[str, Any] = {}
    if impl in _ROUNDED:
        options = {"num_kv_heads": num_kv_heads, "products": _ROUNDED[impl], "row_max": row_max}
        if impl.startswith("hopper"):
            options["num_keys"] = num_keys
    elif impl == "hopper":
        options = {"only_dq": only_dq}
    begin = kernels_of(impl).begin_backward
    return begin(dout, q, out, lse, softmax_scale=softmax_scale, dlse=dlse, deterministic=deterministic, **options)


def rounds(impl: str) -> bool:
    """Return True if an implementation rounds to e4m3.

    Its module then has `quantise_kv`, which makes records of K and V: half the bytes, (batch, blocks of KEYS_OF_RECORD
    keys, num_kv_heads, record_bytes), uint8. `forward_rows` and `BackwardPass.add_records` take them in place of K and
    V. `forward_rows` also takes the result of `quantise_q` in place of q.
    """
    return impl in _ROUNDED


def needs_row_max(impl: str) -> bool:
    """Return True if the backward needs the row maxima, or probabilities of long rows would round to 0."""
    return _ROUNDED.get(impl) == "fp8"


def check_backward(impl: str, head_dim: int, deterministic: bool) -> None:
    """Raise NotImplementedError for `deterministic`, or head_dim 256 with "_scores", with e4m3 in the backward."""
    if impl in _ROUNDED:
        check_products(_ROUNDED[impl], head_dim, deterministic)


def _checked_row_max(impl: str, lse: Tensor, row_max: Tensor) -> Tensor:
    """Return row_max after checking that the implementation uses it, and that it has the form of lse."""
    if impl not in _ROUNDED:
        raise ValueError(f"row_max must be left out with impl={impl!r}, got one; use impl='hopper_fp8'.")
    if (row_max.shape, row_max.dtype, row_max.stride()) != (lse.shape, lse.dtype, lse.stride()):
        raise ValueError(
            f"row_max must be {tuple(lse.shape)} in {lse.dtype} with the strides of lse, got {tuple(row_max.shape)} in "
            f"{row_max.dtype} with strides {row_max.stride()}; make it with torch.empty_like(lse)."
        )
    return row_max


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    impl: str,
    mask: Mask | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    dlse: Tensor | None = None,
    deterministic: bool = False,
    row_max: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `attention_forward` in one call.

    Args: as for `attention_forward` and `begin_backward`.
    Returns:
        dq: as q.  dk, dv: as k, v.
    Raises:
        ValueError, NotImplementedError: as `attention_forward`.
    """
    check_inputs(q, k, v)
    _check_gradients(dout, q, v, out, lse, dlse)
    mask = _mask_of(q, k, mask, causal, window_size)
    implementation(impl, q, k, v)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    backward = begin_backward(
        dout, q, out, lse, impl=impl, num_kv_heads=k.shape[2], softmax_scale=softmax_scale, dlse=dlse,
        deterministic=deterministic, row_max=row_max, num_keys=k.shape[1], only_dq=dq,
    )  # fmt: skip
    backward.add(k, v, mask, dk, dv, accumulate=False)
    return backward.finish(dq), dk, dv


def publish(
    impl: str, k: Tensor, v: Tensor, area: Tensor, head_offsets: Tensor, row_map: Tensor, area_rows: int
) -> None:
    """Copy k and v, interleaved by row, into `area`, the memory from which other ranks pull them.

    Args:
        k, v: (batch, rows, num_kv_heads, head_dim), v possibly narrower. K and V of a row and head are a *line*.
        area: flat, dtype of k.
        head_offsets: (num_kv_heads, 2), int64: element of the area at which each head begins, and the distance of
            its rows; multiples of a line.
        row_map: (rows,), int32: the row of the area that each row is copied to.
        area_rows: rows of the area for one sequence of the batch.
    """
    fused = getattr(kernels_of(impl), "publish", None)
    if fused is not None and k.stride(-1) == v.stride(-1) == 1:
        fused(k, v, area, head_offsets, row_map, area_rows)
        return
    batch, line = k.shape[0], k.shape[3] + v.shape[3]
    rows = torch.arange(batch, device=k.device)[:, None] * area_rows + row_map
    lines = (head_offsets[:, 0] + rows[..., None] * head_offsets[:, 1]) // line
    area.view(-1, line)[lines] = torch.cat([k, v], dim=3)


def publish_records(impl: str, k: Tensor, v: Tensor, area: Tensor, numbers: Tensor, *, for_backward: bool) -> None:
    """Write the records of k and v into `area`, the memory from which other ranks pull them.

    Args:
        impl: one that `rounds`.
        k, v: (batch, rows, num_kv_heads, head_dim).
        area: flat, uint8, an array of records.
        numbers: (batch, blocks of KEYS_OF_RECORD rows, num_kv_heads), int64: number of each record in the area.
    """
    records = area.view(-1, record_bytes(k.shape[3]))
    kernels_of(impl).quantise_kv(k, v, for_backward=for_backward, out=records, numbers=numbers)


def collect(impl: str, own: Tensor, others: Tensor, sources: Tensor, max_count: int, dk: Tensor, dv: Tensor) -> None:
    """Sum gradients over ranks: dk, dv = own + those of the first other rank + the second + ..., cast once at the end.

    Args:
        own: (batch, any rows, heads, line), fp32 (fp64 for fp64): dk and dv side by side, possibly as (2, head_dim).
        others: (any rows, heads, line), as own. The rows of a segment are (other ranks, batch, segment size).
        sources: (4, rows), int32. For each row: its row in own; its row in others, for the first sequence and the
            first other rank; the size of its segment; the number of other ranks that have gradients of it.
        max_count: largest of these numbers.
        dk, dv: (batch, rows, heads, head_dim), any dtype; dv possibly narrower.
    """
    own, others = own.flatten(3), others.flatten(2)
    fused = getattr(kernels_of(impl), "collect", None)
    if fused is not None:
        fused(own, others, sources, dk, dv)
        return
    row, first, size, count = sources
    batch, total = own.shape[0], own[:, row]
    sequence = torch.arange(batch, device=own.device)[:, None]
    for index in range(max_count):
        has = index < count
        partial = others[torch.where(has, first + (index * batch + sequence) * size, 0)]
        total = torch.where(has[:, None, None], total + partial, total)
    dk.copy_(total[..., : dk.shape[3]])
    dv.copy_(total[..., dk.shape[3] :])


@contextmanager
def observed_launches(tell: Callable[[Any], None]) -> Iterator[None]:
    """Call `tell` for each launch of "hopper" and "hopper_fp8" by this thread in the context; see `launcher.Launch`."""
    from ringflash_kernels.hopper import launcher

    launcher.observer.tell = tell
    try:
        yield
    finally:
        launcher.observer.tell = None


def launches_are_traced() -> bool:
    """Return True if a profiler of triton observes launches."""
    import ringflash_kernels.hopper.launcher as launcher  # `from` takes 1 µs

    return launcher.is_traced()


_NO_GUARD = nullcontext()


def device_guard(device: torch.device) -> AbstractContextManager:
    """Make `device` the current GPU inside the context: launches, streams and events go to the current one.

    Do nothing for a CPU or if `device` is current already, which is cheaper than `torch.cuda.device`.
    """
    if device.index is None or device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(device)


def choose_impl(q: Tensor, k: Tensor, v: Tensor) -> Choice:
    """Choose the implementation for "auto": the fastest that can take these inputs."""
    refused: list[str] = []
    for impl in _AUTOMATIC:
        problem = kernels_of(impl).unsupported(q, k, v)
        if problem is None:
            return Choice(impl, "; ".join(refused) or f"{q.device.type}, {q.dtype}, head_dim {q.shape[-1]}")
        refused.append(f"{impl} cannot take {problem}")
    raise NotImplementedError(f"inputs must suit one of {_AUTOMATIC}, got {'; '.join(refused)}; cast them.")


def implementation(impl: str, q: Tensor, k: Tensor, v: Tensor) -> ModuleType:
    """Return the module of `impl` after checking that it can take these inputs."""
    if impl not in _MODULES:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}; use 'auto' in ring_attention to have one chosen.")
    problem = _unsupported(impl, q, k, v)
    if problem is not None:
        able = [name for name in IMPLS if name not in _ROUNDED and _is_able(name, q, k, v)]
        remedy = f"use one of {able}" if able else "cast them"
        raise NotImplementedError(f"impl={impl!r} must be able to take the inputs, got {problem}; {remedy}.")
    return kernels_of(impl)


def _unsupported(impl: str, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if impl in _ROUNDED and k.shape[-1] != v.shape[-1]:
        return f"values of {v.shape[-1]} columns for keys of {k.shape[-1]} (equally wide)"
    return kernels_of(impl).unsupported(q, k, v)


def out_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the shape of the output: that of q, as wide as v."""
    return (*q.shape[:3], v.shape[3])


def _is_able(impl: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if `impl` can take these inputs; an error in its environment counts as False."""
    try:
        return _unsupported(impl, q, k, v) is None
    except (RuntimeError, ImportError):
        return False


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k and v fit together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, seqlen, num_heads, head_dim), got {tuple(x.shape)}; "
                "add the missing dimension or transpose heads behind the sequence."
            )
        if 0 in x.shape:
            raise ValueError(f"{name} must not be empty, got {tuple(x.shape)}; every rank needs at least one token.")
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating point, got {x.dtype}; cast it.")
    if k.shape[:3] != v.shape[:3] or v.shape[3] > k.shape[3]:
        raise ValueError(
            f"v must have the shape of k {tuple(k.shape)}, or fewer columns, got {tuple(v.shape)}; slice or pad it."
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"k must have batch and head_dim of q {(q.shape[0], q.shape[3])}, got {(k.shape[0], k.shape[3])}; "
            "expand or project it."
        )
    _check_groups(q, k.shape[2])
    for attribute in ("dtype", "device"):
        values = tuple(getattr(x, attribute) for x in (q, k, v))
        if len(set(values)) > 1:
            raise ValueError(f"q, k and v must share one {attribute}, got {values}; move or cast them.")


def _check_groups(q: Tensor, num_kv_heads: int) -> None:
    if q.shape[2] % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads ({num_kv_heads}), got {q.shape[2]}; repeat heads of k and v."
        )


def _check_state(q: Tensor, v: Tensor, out: Tensor, lse: Tensor, acc: Tensor | None) -> None:
    """Raise ValueError unless out, lse and acc have the shapes and dtypes that `attention_forward` names."""
    state, shape = state_dtype(q.dtype), out_shape(q, v)
    if out.shape != shape or out.dtype not in (q.dtype, state):
        raise ValueError(
            f"out must be {shape} in {q.dtype} or {state}, got {tuple(out.shape)} in {out.dtype}; omit it."
        )
    if lse.shape != (q.shape[0], q.shape[2], q.shape[1]) or lse.dtype != state:
        raise ValueError(
            f"lse must be (batch, num_heads, seqlen_q) {(q.shape[0], q.shape[2], q.shape[1])} in {state}, "
            f"got {tuple(lse.shape)} in {lse.dtype}; leave it out."
        )
    if acc is not None and (acc.shape != shape or acc.dtype != state):
        raise ValueError(
            f"acc must be {shape} in {state}, got {tuple(acc.shape)} in {acc.dtype}; "
            "make the earlier calls write to such an `out`."
        )


def _check_gradients(dout: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
    """Raise ValueError for a shape or dtype that would be broadcast, or misread by a kernel compiled for another."""
    state = state_dtype(q.dtype)
    of_rows = (q.shape[0], q.shape[2], q.shape[1])
    for name, x, shape, dtypes in (
        ("dout", dout, out_shape(q, v), (q.dtype,)),
        ("out", out, out_shape(q, v), (q.dtype, state)),
        ("lse", lse, of_rows, (state,)),
        ("dlse", dlse, of_rows, (state,)),
    ):
        if x is not None and (x.shape != shape or x.dtype not in dtypes):
            raise ValueError(
                f"{name} must be {tuple(shape)} in {' or '.join(map(str, dtypes))}, got {tuple(x.shape)} in {x.dtype}; "
                "pass what the forward returned, and gradients of it, in full shape."
            )


def _mask_of(q: Tensor, k: Tensor, mask: Mask | None, causal: bool, window_size: tuple[int, int]) -> Mask:
    """Return the mask that was given, or that of `causal` and `window_size`; raise ValueError if both were given."""
    if mask is None:
        return Mask.band(q.shape[1], k.shape[1], causal=causal, window_size=window_size)
    if causal or tuple(window_size) != (-1, -1):
        raise ValueError("mask must come without causal and window_size, got both; put them into the mask.")
    if (mask.seqlen_q, mask.seqlen_k) != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"mask must be made for seqlen_q, seqlen_k {(q.shape[1], k.shape[1])}, "
            f"got {(mask.seqlen_q, mask.seqlen_k)}; build it for these lengths."
        )
    return mask


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    check_scale(scale)
    return scale


def check_scale(scale: float) -> None:
    """Raise ValueError unless a scale is positive and finite."""
    if not 0 < scale < float("inf"):
        raise ValueError(
            f"softmax_scale must be positive and finite, got {scale}; leave it out for head_dim ** -0.5, or negate q "
            "for a negative scale."
        )


@functools.cache
def kernels_of(impl: str) -> ModuleType:
    """Return the module of an implementation, whatever it can take; `implementation` checks that."""
    return importlib.import_module(_MODULES[impl])
