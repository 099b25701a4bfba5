"""Format in which K and V are stored and sent: unchanged, or rounded to e4m3 by an FP8 `impl`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ringflash_kernels.api import KEYS_OF_RECORD, BackwardPass, record_bytes


@dataclass(frozen=True)
class KVFormat:
    """Format of K and V in one pass.

    The unit of storage is a *line*: K and V of one head, for one key (bf16, fp16) or for 128 keys (a record in FP8).
    Owners make the records of their keys. So other ranks receive half the bytes, and all ranks read the same bits.

    Args:
        fp8: lines are records.
        for_backward: records are for a backward, which needs V in another order.
        keys_per_line: 1 or 128.
        line_shape: (head_dim of k + head_dim of v,), or (bytes of a record,).
        dtype: dtype of the elements of a line: that of k, or uint8 for records.
        head_dims: head_dim of k and of v.
    """

    fp8: bool
    for_backward: bool
    keys_per_line: int
    line_shape: tuple[int, ...]
    dtype: torch.dtype
    head_dims: tuple[int, int]

    @classmethod
    def of(cls, k: Tensor, v: Tensor, *, fp8: bool, for_backward: bool) -> KVFormat:
        """Return the format of these k and v: (batch, seqlen, num_kv_heads, head_dim)."""
        head_dims = k.shape[3], v.shape[3]
        if fp8:
            return cls(True, for_backward, KEYS_OF_RECORD, (record_bytes(k.shape[3]),), torch.uint8, head_dims)
        return cls(False, for_backward, 1, (sum(head_dims),), k.dtype, head_dims)

    @property
    def line_elements(self) -> int:
        """Elements of a line."""
        return math.prod(self.line_shape)

    def line_slice(self, first_key: int, num_keys: int) -> slice:
        """Return the lines of the keys [first_key, first_key + num_keys), which must be whole lines."""
        return slice(first_key // self.keys_per_line, (first_key + num_keys) // self.keys_per_line)

    def unpack(self, lines: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments that kernels take for these lines: views as k and v, or the records."""
        return (lines,) if self.fp8 else lines.split(self.head_dims, 3)

    def pack_queries(self, q: Tensor, kernel: ModuleType) -> object:
        """Return q as `forward_kernel` takes it: itself, or rounded."""
        return kernel.quantise_q(q) if self.fp8 else q

    def forward_kernel(self, kernel: ModuleType) -> Callable[..., None]:
        """Return the forward of an implementation that takes the results of `pack_queries` and `unpack`."""
        return kernel.forward_rows if self.fp8 else kernel.forward

    def backward_kernel(self, gradients: BackwardPass) -> Callable[..., None]:
        """Return the method of a backward pass that takes the results of `unpack`."""
        return gradients.add_records if self.fp8 else gradients.add
