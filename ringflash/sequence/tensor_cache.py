"""Results of a function of a tensor, kept for as long as the tensor lives and has its values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


def once_per_tensor(compute: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
    """Decorate a function of one tensor: it is computed again only after torch has seen a write to the tensor.

    The layers of a model are given the same few tensors in turn, and reading one on a GPU waits for the device. Tensors
    of inference mode do not count writes, so their results are not kept.
    """
    results = WeakTensorKeyDictionary()  # tensor: (its version, result)

    @functools.wraps(compute)
    def result_of(x: Tensor) -> T:
        if x.is_inference():
            return compute(x)
        version, result = results.get(x, (None, None))
        if version != x._version:
            result = compute(x)
            results[x] = x._version, result
        return result

    return result_of
