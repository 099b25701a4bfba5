"""Form in which K and V travel and kernels read them: as they are, or rounded to e4m3 by an FP8 `impl`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ringflash_kernels.api import KEYS_OF_RECORD, BackwardPass, record_bytes


@dataclass(frozen=True)
class Operands:
    """Form in which K and V are stored and sent in one pass.

    The unit of storage is a *line*: K and V of one head, for one key (bf16, fp16) or for 128 keys (a record in FP8).
    Owners make the records of their keys, so other ranks receive half the bytes, and all ranks the same bits.

    Args:
        rounded: lines are records.
        for_backward: records are those of a backward, which hold V in another order.
        keys: keys per line.
        shape: shape of a line.
        dtype: dtype of a line.
        widths: head_dim of k and of v.
    """

    rounded: bool
    for_backward: bool
    keys: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    widths: tuple[int, int]

    @classmethod
    def of(cls, k: Tensor, v: Tensor, *, rounded: bool, for_backward: bool) -> Operands:
        """Return the form of these k and v: (batch, seqlen, num_kv_heads, head_dim)."""
        widths = k.shape[3], v.shape[3]
        if rounded:
            return cls(True, for_backward, KEYS_OF_RECORD, (record_bytes(k.shape[3]),), torch.uint8, widths)
        return cls(False, for_backward, 1, (sum(widths),), k.dtype, widths)

    def lines_of(self, k: Tensor) -> tuple[int, ...]:
        """Return the shape of the lines of k: (batch, lines, num_kv_heads, *shape); the last line may be padded."""
        return k.shape[0], -(-k.shape[1] // self.keys), k.shape[2], *self.shape

    @property
    def elements(self) -> int:
        """Elements of a line."""
        return math.prod(self.shape)

    def lines(self, first: int, size: int) -> slice:
        """Return the lines of the keys [first, first + size), which must be whole lines."""
        return slice(first // self.keys, (first + size) // self.keys)

    def pack(self, k: Tensor, v: Tensor, kernel: ModuleType, out: Tensor) -> None:
        """Write the lines of k and v to `out`."""
        if self.rounded:
            kernel.quantise_kv(k, v, for_backward=self.for_backward, out=out)
        else:
            torch.cat((k, v), dim=3, out=out)

    def unpack(self, lines: Tensor) -> tuple[Tensor, ...]:
        """Return what kernels take: K and V, or the records."""
        return (lines,) if self.rounded else lines.split(self.widths, 3)

    def queries(self, q: Tensor, kernel: ModuleType) -> object:
        """Return q in the form that `forward` takes."""
        return kernel.quantise_q(q) if self.rounded else q

    def forward(self, kernel: ModuleType) -> Callable[..., None]:
        """Return the kernel's forward, which takes what `queries` and `unpack` return."""
        return kernel.forward_rows if self.rounded else kernel.forward

    def add(self, gradients: BackwardPass) -> Callable[..., None]:
        """Return the method that adds the gradients of what `unpack` returns."""
        return gradients.add_records if self.rounded else gradients.add
