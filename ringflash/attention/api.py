"""Public calls: attention over a sequence whose tokens are sharded over a group of ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad

from ringflash.attention import operators
from ringflash.attention.inputs import CallInputs, CallShape, align_for_kernels, pad_values
from ringflash.attention.options import ULYSSES_ALGORITHMS, Algorithm, CallOptions
from ringflash.attention.plan import CallPlan, plan_call
from ringflash.attention.sections import GatherSizes, choose_sections
from ringflash.comm.agreement import agree
from ringflash.comm.call_numbers import in_batch_row, is_eager
from ringflash.comm.group import Group, resolve
from ringflash.comm.transport import UNDECIDED, buffer_bytes
from ringflash_kernels.mask import check_window_size


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    cu_seqlens: Tensor | Sequence[Tensor] | None = None,
    layout: str = "zigzag",
    impl: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's queries over the whole sequence.

    All ranks of the group call it together, each with the tokens that `local_positions` names. Masks use global
    positions and combine: a query sees the keys that are causal, and in the window, and in its own document.

    Args:
        q: (batch, seqlen_local, num_heads, head_dim), any floating dtype; kernels of GPUs take bf16 and fp16.
        k: (batch, seqlen_local, num_kv_heads, head_dim), as q; num_heads a multiple of num_kv_heads.
        v: as k, or with a smaller head_dim (latent attention): v is padded with zeros, except for 192 and 128.
        group: ProcessGroup or 1-D DeviceMesh of the ranks that share the sequence, or a 2-D DeviceMesh with the axes
            ("host", "gpu"); None for one process.
        softmax_scale: default head_dim ** -0.5.
        window_size: (left, right) around the query, inclusive, in tokens; -1 is unlimited.
        cu_seqlens: (num_documents + 1,), int32: bounds of packed documents in the whole sequence, from 0 to
            its length, equal on all ranks; batch must then be 1. Or a table from `document_table`, for documents that
            share a prefix (trees), are bidirectional, or have global tokens. A table needs causal=True, and
            window_size then counts the tokens of the query's own path: its document's ancestors and the document
            itself, not positions in the packed sequence. For a larger batch give a list with the bounds of each
            sequence; the sequences are then computed one after another. A tensor on the CPU costs no synchronisation.
            One on a GPU is read again only after torch has seen a write to it: give a new tensor if the values change
            through `.data` or a kernel. The backward uses the values that the forward read. Refused while a CUDA graph
            is captured.
        layout: "zigzag" (balanced under a causal mask), "balanced" (also under packed documents: needs cu_seqlens),
            "documents" (a zigzag of each), "striped" or "contiguous"; docs/masks.md.
        impl: kernel, "auto" or one of `ringflash_kernels.IMPLS`; `explain` says what auto chooses, which is always
            exact. "hopper_fp8" rounds to e4m3, "hopper_fp8_scores" and "hopper_fp8_all" in the backward as well
            (docs/fp8.md).
        transport: "auto", "gloo" (CPU tensors), "nccl", or "copy_engine" (GPUs of one host with peer access; "auto"
            chooses it for them). "ulysses" exchanges heads between all ranks; "by_host" does so inside each host, and
            sends K/V between hosts once instead of once per GPU. Both need num_heads divisible by the number of ranks
            that exchange heads. Hosts are those of the mesh, or those that the ranks of a 1-D group run on. "auto"
            chooses "by_host" if there are several hosts, several GPUs on each, and enough heads.
        deterministic: repeated calls give bitwise equal gradients, with slower kernels. True also if
            `torch.use_deterministic_algorithms` is on.
        return_lse: also return the log-sum-exp, differentiable.
    Returns:
        out: as q, as wide as v.  lse, if asked for: (batch, num_heads, seqlen_local), natural log, fp32 (fp64 for
            fp64).
    Raises:
        ValueError: bad input, or ranks that disagree. NotImplementedError: not possible with the implementation.
            Either is raised on every rank, before anything is sent.
    Source: Liu et al. 2023, arXiv:2310.01889; what we changed is in docs/decisions/0002-owner-to-reader.md.
    Numerics: state and gradients travel and accumulate in fp32 (fp64 for fp64); docs/numerics.md.
    """
    options = CallOptions(resolve(group), layout=layout, impl=impl, transport=transport, deterministic=deterministic)
    return attend(
        q, k, v, options, causal=causal, softmax_scale=softmax_scale, window_size=window_size, cu_seqlens=cu_seqlens,
        return_lse=return_lse,
    )  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: CallOptions,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    cu_seqlens: Tensor | Sequence[Tensor] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Call `ring_attention`, with the options that all calls of a module share as one value."""
    try:
        left, right = _window_sides(window_size)
        scale = _scale(q, softmax_scale)
        _check_batch_rows(cu_seqlens, q, k, v)
    except (ValueError, TypeError) as error:
        agree(options.group, {}, error)  # other ranks may be in the call: let them raise, too
        raise
    if cu_seqlens is not None and isinstance(cu_seqlens, Sequence):
        arguments = {"causal": causal, "softmax_scale": scale, "window_size": (left, right), "return_lse": return_lse}
        return _attend_batch_rows(q, k, v, options, cu_seqlens, arguments)
    if torch.compiler.is_compiling():
        _check_compiled_differentiation()
    else:
        _check_differentiation(q, k, v)
        operators.check_group(options.group)
    deterministic = True if torch.are_deterministic_algorithms_enabled() else options.deterministic
    width, v = v.shape[-1] if v.dim() else 0, pad_values(k, v)
    grad_flags = q.requires_grad | k.requires_grad << 1 | v.requires_grad << 2 if torch.is_grad_enabled() else 0
    out, lse = operators.call_operator(
        q, k, v, cu_seqlens, options.group_name, causal, scale, left, right, options.layout, options.impl,
        options.transport, deterministic, grad_flags, return_lse, width,
    )  # fmt: skip
    if v.dim() and v.shape[-1] > width:
        out = out[..., :width]
    return (out, lse) if return_lse else out


def _attend_batch_rows(
    q: Tensor, k: Tensor, v: Tensor, options: CallOptions, bounds: Sequence[Tensor], arguments: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """Run one call for each sequence of a batch, with that sequence's documents.

    The batch row is part of the name of the call that ranks compare. Without it, a rank with fewer rows would match the
    call of its next layer with the call of another rank's remaining row.
    """
    rows, named = [], is_eager()
    if not named and not torch.compiler.is_compiling():
        agree(options.group, {"rows of cu_seqlens": len(bounds)}, device=q.device)
    for index, (a, b, c, cu_seqlens) in enumerate(zip(q.split(1), k.split(1), v.split(1), bounds, strict=True)):
        with in_batch_row(index, len(bounds)) if named else nullcontext():
            rows.append(attend(a, b, c, options, cu_seqlens=cu_seqlens, **arguments))
    if not arguments["return_lse"]:
        return torch.cat(rows)  # type: ignore[arg-type]
    out, lse = map(torch.cat, zip(*rows, strict=True))
    return out, lse


@dataclass(frozen=True)
class Explanation:
    """Plan of one call on this rank, as `explain` returns it.

    Args:
        algorithm: "gather" (all-gather of K/V by heads), "ulysses", "by_host", or "local" for one process.
        transport: transport of K/V, for "by_host" the transport between hosts; None for one process.
        steps: lines of text: one for each block of keys, then one for the sections of each pass.
        num_visible: number of query-key pairs that this rank computes.
        buffer_bytes: size of the communication buffers that this process holds already.
    """

    impl: str
    impl_reason: str
    algorithm: str
    transport: str | None
    cp_size: int
    cp_rank: int
    steps: tuple[str, ...]
    num_visible: int
    buffer_bytes: int
    transport_reason: str = ""

    def __str__(self) -> str:
        lines = [
            f"impl {self.impl} ({self.impl_reason}), algorithm {self.algorithm}, transport {self.transport} "
            f"({self.transport_reason}), rank {self.cp_rank} of {self.cp_size}",
            *self.steps,
            f"{self.num_visible} visible pairs on this rank",
            f"{self.buffer_bytes} bytes of buffers held by now",
        ]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    cu_seqlens: Tensor | None = None,
    layout: str = "zigzag",
    impl: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
) -> Explanation:
    """Say which kernel, algorithm, transport, and sections `ring_attention` would use; nothing is run or sent.

    On GPUs the transport "auto" is shown as "copy_engine or nccl", and the algorithm as "gather or by_host", until the
    first call of the group decides.

    Args: as `ring_attention`, for a single batch row: a list of cu_seqlens is refused.
    """
    if isinstance(cu_seqlens, Sequence):
        raise ValueError(
            f"cu_seqlens must be a tensor, got a list of {len(cu_seqlens)} tensors, each of which is a separate call; "
            "explain one row at a time."
        )
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    sides = _window_sides(window_size)
    options = CallOptions(resolve(group), causal, 1.0, *sides, layout, impl, transport, deterministic)
    q, k, v = (align_for_kernels(x) for x in (q, k, pad_values(k, v)))  # as in a call: the kernel depends on strides
    plan = plan_call(CallInputs(q, k, v, cu_seqlens, options))
    algorithm = "gather or by_host" if plan.algorithm is UNDECIDED else str(plan.algorithm)
    chosen = UNDECIDED.value if plan.transport is UNDECIDED else plan.transport
    return Explanation(
        plan.impl, plan.impl_reason, algorithm, chosen, *options.size_and_rank,
        _describe_launches(plan, CallShape.of(q, k, v)), plan.all_keys.mask.num_visible, buffer_bytes(),
        plan.transport_reason,
    )  # fmt: skip


def _describe_launches(plan: CallPlan, shape: CallShape) -> tuple[str, ...]:
    """Describe the blocks of keys, the sections of each pass and the exchanges of heads, a line for each, in order."""
    if plan.algorithm in ULYSSES_ALGORITHMS:
        inner = plan.between_hosts(shape)
        if inner is None:
            return ("heads are exchanged inside hosts; the first call finds out which ranks share one",)
        rail, on_rail = inner
        return (
            f"all-to-all of heads: {on_rail.num_heads} of {shape.num_heads} query heads of {on_rail.kv.rows} rows of "
            f"the host, {on_rail.kv.heads} of {shape.kv.heads} KV heads",
            f"attention between ranks {rail.members}, numbered from 0:",
            *_describe_launches(rail, on_rail),
            "all-to-all of heads, back",
        )
    if plan.algorithm is Algorithm.LOCAL:
        return ("one launch",)
    blocks = plan.key_blocks(shape)
    sizes = GatherSizes.of(blocks, shape.kv, shape.num_heads, plan.travelling_dtype(shape.dtype))
    sections = choose_sections(sizes, len(blocks), plan.transport)
    return (
        *(
            f"{block.num_rows} keys of ranks {sorted({segment.owner for segment in block.segments})}, "
            f"{block.mask.num_visible} pairs"
            for block in blocks
        ),
        *(
            f"{pass_name}: sections of {' + '.join(map(str, heads))} KV heads"
            for pass_name, heads in sections._asdict().items()
        ),
    )


def _scale(q: Tensor, given: float | None) -> float:
    """Return the scale, default head_dim ** -0.5. If q has no head_dim, `plan_call` raises on all ranks together."""
    if isinstance(given, Tensor) and given.requires_grad:
        raise ValueError(
            "softmax_scale must be a number, got a tensor that requires grad, whose gradient would be lost; "
            "multiply q by it, and pass softmax_scale=1.0."
        )
    if given is None:
        return q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0
    return float(given)


def _check_batch_rows(cu_seqlens: object, *tensors: Tensor) -> None:
    """Raise ValueError unless a list of bounds has a tensor for each sequence of the batch."""
    if cu_seqlens is None or not isinstance(cu_seqlens, Sequence):
        return
    one_each = all(x.dim() and x.shape[0] == len(cu_seqlens) for x in tensors)
    if not (cu_seqlens and one_each and all(isinstance(bounds, Tensor) for bounds in cu_seqlens)):
        raise ValueError(
            "cu_seqlens must be a tensor, or a list with a tensor for each row of q, k and v, got "
            f"{[type(x).__name__ for x in cu_seqlens][:8]} for {[x.shape[0] if x.dim() else 0 for x in tensors]} rows; "
            "cu_seqlens_from_positions makes such a tensor from a row's positions."
        )


def _check_differentiation(*tensors: Tensor) -> None:
    """Raise NotImplementedError under forward-mode differentiation of these tensors, and transforms of torch.func.

    While torch.compile traces, no tensors are given, because tangents cannot be seen; then any forward-mode level that
    is open is an error.
    """
    if forward_ad._current_level >= 0 and (
        not tensors or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    ):
        raise NotImplementedError(  # a custom operator would drop the tangents, and the derivative be 0
            "q, k and v must carry no tangents, got forward-mode differentiation; use torch.autograd.grad."
        )
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "ring_attention must be called outside of torch.func's transforms, got a call inside one (grad, vjp, vmap, "
            "...); use torch.autograd.grad, and the batch dimension."
        )


def _check_compiled_differentiation() -> None:
    """Run `_check_differentiation` while torch.compile traces, which takes the result as a constant."""
    _check_differentiation()


# This is what torch.compiler.assume_constant_result sets. Calling it would import torch._dynamo, which takes as long as
# importing torch itself.
_check_compiled_differentiation._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _window_sides(window_size: Sequence[int]) -> tuple[int, int]:
    """Return (left, right) after checking that they are two integers. `plan_call` checks their values."""
    if type(window_size) is tuple and len(window_size) == 2 and type(window_size[0]) is type(window_size[1]) is int:
        return window_size
    sides = tuple(window_size) if isinstance(window_size, Sequence) else (window_size,)
    if len(sides) != 2 or not all(hasattr(side, "__index__") for side in sides):
        check_window_size(sides)
    return operator.index(sides[0]), operator.index(sides[1])


class RingAttention(nn.Module):
    """Module form of `ring_attention`, with its options bound once: `attention(q, k, v)`.

    Args: as `ring_attention`.
    """

    def __init__(
        self,
        group: Group,
        *,
        causal: bool = True,
        softmax_scale: float | None = None,
        window_size: Sequence[int] = (-1, -1),
        layout: str = "zigzag",
        impl: str = "auto",
        transport: str = "auto",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.options = CallOptions(
            resolve(group), layout=layout, impl=impl, transport=transport, deterministic=deterministic
        )
        self.causal, self.softmax_scale, self.window_size = causal, softmax_scale, _window_sides(window_size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """Return out, as q; arguments as `ring_attention`."""
        out = attend(
            q, k, v, self.options, causal=self.causal, softmax_scale=self.softmax_scale, window_size=self.window_size,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Group of ranks that share the sequence; can be set, as in the constructor."""
        return self.options.group

    @group.setter
    def group(self, group: Group) -> None:
        self.options = self.options._replace(group=resolve(group))

    @property
    def layout(self) -> str:
        """Layout of the shards."""
        return self.options.layout

    def extra_repr(self) -> str:
        """Options for print(model)."""
        cp_size, layout = self.options.size_and_rank[0], self.options.layout
        return f"cp_size={cp_size}, causal={self.causal}, window_size={self.window_size}, layout={layout!r}"
