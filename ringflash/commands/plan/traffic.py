"""Memory traffic of a model's operators other than matmuls: on a GPU, it determines the time between matmuls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_PRODUCTS = {operator.__name__ for operator in flop_registry} | {"_grouped_mm", "_scaled_grouped_mm"}
_NOTHING_MOVED = {"_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_LOOKED_UP = {"embedding", "embedding_dense_backward"}  # only one row per token
_NOTHING_READ = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "zero_", "fill_"}


class Traffic(NamedTuple):
    """Bytes moved per token and layer, averaged over the layers.

    forward: in the forward.  tiled: the part of it in modules that tiles recompute.  backward: in the backward.
    """

    forward: float
    tiled: float
    backward: float


class TrafficCounter(TorchDispatchMode):
    """Sum the bytes that operators read and write, except matmuls, whose time depends on their FLOPs.

    Every operator counts as one kernel, which reads its tensors once and writes its results once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count its bytes."""
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if not (func.is_view or name in _PRODUCTS | _NOTHING_MOVED | _LOOKED_UP):
            read = {} if name in _NOTHING_READ else {id(x): x for x in _tensors((args, kwargs))}
            self.num_bytes += sum(map(_num_bytes, (*read.values(), *_tensors(out))))
        return out


def _num_bytes(x: Tensor) -> int:
    """Return the size of a tensor in bytes; elements that an expanded dim repeats are counted once."""
    total = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        total *= size if stride else 1
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
