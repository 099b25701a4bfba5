"""Inputs of a call and of a backward: preparation of q, k and v (dtype, requires_grad, strides, width of v), checks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringflash.attention.options import CallOptions
from ringflash.sequence.layout import check_layout, read_documents
from ringflash.sequence.mask import Documents, SequenceMask
from ringflash_kernels.api import check_inputs, check_scale


def autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype that autocast gives torch's own attention; keep fp64, and any dtype if autocast is off."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def require_grad_together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make all tensors require grad if one of them does, for partly frozen models such as LoRA on q and v only.

    The ring differentiates with respect to q, k and v together or not at all. Gradients of a tensor that did not
    require grad are dropped.

    Returns:
        alike: tensors of the same values and storage that all require grad, or none does.
    """
    wanted = [x for x in tensors if x.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return tensors
    return tuple(x if x.requires_grad else _WithoutGradient.apply(x, wanted[0]) for x in tensors)


class _WithoutGradient(torch.autograd.Function):
    """Identity of x that requires grad because `like` does, and drops the gradient.

    x.detach().requires_grad_() would be a leaf that keeps its gradient until the graph is freed, and would break the
    graph of torch.compile.
    """

    @staticmethod
    def forward(x: Tensor, like: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


_UNPADDED = (192,), (128,)  # columns of k and v that every kernel takes: DeepSeek's latent attention


def pad_values(k: Tensor, v: Tensor) -> Tensor:
    """Pad v with zeros to the head_dim of k, unless kernels take both as they are. The operator refuses a wider v."""
    if k.shape == v.shape or (k.shape[-1:], v.shape[-1:]) == _UNPADDED:
        return v
    missing = k.shape[-1] - v.shape[-1] if k.dim() == v.dim() == 4 and v.shape[-1] else 0
    return pad(v, (0, missing)) if missing > 0 else v


class CallInputs(NamedTuple):
    """Arguments of a call on this rank, by which it is checked and planned.

    Args:
        cu_seqlens: as `ring_attention`; in a backward the documents that the forward read.
        grad_flags: bit 0, 1, 2: q, k, v requires grad.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | Documents | None
    options: CallOptions
    grad_flags: int = 0


class BackwardInputs(NamedTuple):
    """Tensors of one backward on this rank.

    Args:
        dout: as out.
        dlse: as lse, or None.
        q, k, v, out, lse: of the forward.
        row_max: as lse, an upper bound on the scores of each row; only FP8 needs it.
    """

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    row_max: Tensor | None = None


class KVShape(NamedTuple):
    """Shape of a rank's k and v, from which buffers are planned.

    `head_dim` is the mean of the head_dim of k and of v, so that 2 * head_dim elements are a row of K and V.
    """

    batch: int
    rows: int
    heads: int
    head_dim: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> KVShape:
        """Return the shape of k and v: (batch, rows, heads, head_dim of each)."""
        batch, rows, heads, head_dim = k.shape
        return cls(batch, rows, heads, (head_dim + v.shape[3]) // 2)


class CallShape(NamedTuple):
    """Sizes of a rank's tensors in one call, by which its launches, transfers and buffers are planned.

    Args:
        num_heads: heads of q.
        kv: shape of k and v.
        dtype: of q, k and v.
    """

    num_heads: int
    kv: KVShape
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> CallShape:
        """Return the sizes of these tensors."""
        return cls(q.shape[2], KVShape.of(k, v), k.dtype, q.device)

    def on_host(self, num_gpus: int, num_kv_heads: int) -> CallShape:
        """Return the sizes after an all-to-all of heads between the GPUs of a host.

        Args:
            num_kv_heads: KV heads of all GPUs of the host together, after the exchange. A head on two GPUs is two.
        """
        kv = self.kv._replace(rows=self.kv.rows * num_gpus, heads=num_kv_heads // num_gpus)
        return self._replace(num_heads=self.num_heads // num_gpus, kv=kv)


def align_for_kernels(x: Tensor) -> Tensor:
    """Return x if kernels can read it: unit stride along head_dim, others multiples of 16 bytes. Otherwise copy it."""
    if x.dim() != 4:
        return x  # `check_inputs` raises later
    if x.data_ptr() % 16 == 0 and _are_aligned(x.shape, x.stride(), x.dtype.itemsize):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() does not copy a contiguous view


@lru_cache(maxsize=256)
def _are_aligned(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return True if kernels can read a tensor with these strides."""
    outer = zip(strides[:3], shape, strict=False)
    return strides[3] == 1 and all(size <= 1 or (stride > 0 and stride * itemsize % 16 == 0) for stride, size in outer)


def check_call(call: CallInputs) -> SequenceMask:
    """Check everything that does not depend on the kernel or the transport, and return the mask.

    Raises:
        ValueError, NotImplementedError: the rule, the value found, and the remedy.
    """
    q, k, v, cu_seqlens, options, grad_flags = call
    check_inputs(q, k, v)
    _check_pair(q, k, grad_flags)
    check_scale(options.scale)
    cp_size, _ = options.size_and_rank
    documents = documents_of(cu_seqlens, q) if isinstance(cu_seqlens, Tensor) else cu_seqlens
    window = options.window_left, options.window_right
    mask = SequenceMask(q.shape[1] * cp_size, options.causal, window, *(documents or ()))
    check_layout(mask.seqlen, cp_size, options.layout, documents)
    return mask


def _check_pair(q: Tensor, k: Tensor, grad_flags: int) -> None:
    """Raise ValueError unless q and k are sharded alike, and q, k and v require grad alike."""
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"k must have the local sequence length of q ({q.shape[1]}), got {k.shape[1]}; "
            "shard all three alike (key/value caches are not supported)."
        )
    if grad_flags not in (0, 7):
        wanted = [name for bit, name in enumerate("qkv") if grad_flags >> bit & 1]
        raise ValueError(
            f"q, k and v must all require grad or none of them, got only {' and '.join(wanted)}; "
            "call requires_grad_() on the others or detach these."
        )


def documents_of(cu_seqlens: Tensor, q: Tensor) -> Documents:
    """Read cu_seqlens as integers, after checking its form.

    Raises:
        ValueError: cu_seqlens is neither 1-D int32 nor a table of `document_table`, or batch is not 1.
    """
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens must be 1-D int32, or an int32 table of ringflash.document_table, got {cu_seqlens.dim()}-D "
            f"{cu_seqlens.dtype}; pass cu_seqlens.int()."
        )
    if q.shape[0] != 1:
        raise ValueError(f"batch must be 1 with cu_seqlens, got {q.shape[0]}; pack the documents into one sequence.")
    return read_documents(cu_seqlens)
