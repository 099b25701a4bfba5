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
        self._known: tuple[ref[Tensor], int, T] | None = None

    def __call__(self, x: Tensor) -> T:
        """Return the result for a tensor."""
        if x.is_inference():
            return self._compute(x)
        known = self._known
        if known is None or known[0]() is not x or known[1] != x._version:
            known = self._known = ref(x), x._version, self._compute(x)
        return known[2]
