"""Launch of compiled kernels without triton's inspection of every argument, in a quarter of the host time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


class Launcher:
    """Callable that launches one kernel and keeps its compiled variants.

    Args:
        kernel: a Gluon or Triton function.
        specialised: let triton specialise on the values of integers and pointers (equal to 1, multiples of 16).
        num_warps: warps of a program.
    """

    def __init__(self, kernel: Any, *, specialised: bool = False, num_warps: int = 4) -> None:
        self._kernel, self._specialised, self._num_warps = kernel, specialised, num_warps
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, variant: Hashable, num_programs: int, *args: Any, **constants: Any) -> None:
        """Launch.

        Args:
            variant: key that differs whenever triton would compile differently: dtypes, boxes of descriptors, which
                arguments are None, constants. Integers beyond 32 bits are distinguished here, and the dtypes of
                tensors too if the kernel is specialised.
            args: the kernel's arguments without its constants, which are its last parameters.
        """
        integers = [x for x in args if type(x) is int]
        wide = not -(1 << 31) <= min(integers) <= max(integers) < 1 << 31
        found = tuple(map(_found_in, args)) if self._specialised else None
        key = (torch.cuda.current_device() if torch.cuda.is_initialized() else None, wide, variant, found)
        compiled = self._compiled.get(key)
        if compiled is not None:
            launch, names = compiled
            launch[num_programs, 1, 1](*args, *(constants[name] for name in names))
            return
        compiled = self._kernel[num_programs,](*args, **constants, num_warps=self._num_warps)
        if hasattr(compiled, "packed_metadata"):  # false for the recorder and the emulator of the tests
            names = [parameter.name for parameter in self._kernel.params][len(args) :]
            self._compiled[key] = compiled, names


def _found_in(x: Any) -> Hashable:
    """Return the properties of an argument on which triton specialises. A 1 becomes a constant."""
    if type(x) is int:
        return "one" if x == 1 else x % 16 == 0, not -(1 << 31) <= x < 1 << 31
    return (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else type(x)
