"""Result of a function of a tensor, kept for as long as the tensor has its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

from torch import Tensor

T = TypeVar("T")


class LastResult(Generic[T]):
    """A function of one tensor that is computed again only for another tensor, or once the tensor was written to.

    Layers of a model are given one tensor in turn, and to read one on a GPU takes a wait for the device.

    Args:
        compute: the function. Tensors of inference mode do not count writes: for those it is always called.
    """

    def __init__(self, compute: Callable[[Tensor], T]) -> None:
        self._compute = compute
        self._cached: tuple[ref[Tensor], int, T] | None = None

    def __call__(self, x: Tensor) -> T:
        """Return the result for a tensor."""
        if x.is_inference():
            return self._compute(x)
        cached = self._cached
        if cached is None or cached[0]() is not x or cached[1] != x._version:
            cached = self._cached = ref(x), x._version, self._compute(x)
        return cached[2]
