"""Preparation of q, k and v by the public calls and the operator: dtype, requires_grad, strides, width of v."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringflash.sequence.layout import read_bounds


def autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype that autocast gives torch's own attention. fp64 stays, as does x without autocast."""
    device = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def differentiate_alike(*tensors: Tensor) -> tuple[Tensor, ...]:
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
    if (k.shape[-1:], v.shape[-1:]) == _UNPADDED:
        return v
    missing = k.shape[-1] - v.shape[-1] if k.dim() == v.dim() == 4 and v.shape[-1] else 0
    return pad(v, (0, missing)) if missing > 0 else v


def with_mean_head_dim(k: Tensor, v: Tensor) -> Tensor:
    """Return k cut to the mean head_dim of k and v, so that buffers are planned for the size of both."""
    return k if k.shape == v.shape else k[..., : (k.shape[-1] + v.shape[-1]) // 2]


def make_addressable(x: Tensor) -> Tensor:
    """Return x if kernels can read it: unit stride along head_dim, others multiples of 16 bytes. Otherwise copy it."""
    if x.dim() != 4:
        return x  # `check_inputs` raises later
    if x.data_ptr() % 16 == 0 and _are_addressable(x.shape, x.stride(), x.dtype.itemsize):
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() does not copy a contiguous view


@lru_cache(maxsize=256)
def _are_addressable(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return True if kernels can read a tensor with these strides."""
    outer = zip(strides[:3], shape, strict=False)
    return strides[3] == 1 and all(size <= 1 or (stride > 0 and stride * itemsize % 16 == 0) for stride, size in outer)


def document_bounds(cu_seqlens: Tensor, q: Tensor) -> tuple[int, ...]:
    """Read cu_seqlens as integers, after checking its form.

    Raises:
        ValueError: not 1-D int32, or a batch.
    """
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens must be 1-D int32, got {cu_seqlens.dim()}-D {cu_seqlens.dtype}; "
            "pass torch.tensor([0, ...], dtype=torch.int32)."
        )
    if q.shape[0] != 1:
        raise ValueError(f"batch must be 1 with cu_seqlens, got {q.shape[0]}; pack the documents into one sequence.")
    return read_bounds(cu_seqlens)
