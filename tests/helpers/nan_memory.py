"""Memory that is NaN until it is written: what a test reads too early shows in its result.

Covers tensors that Python code allocates (`torch.empty`, `empty_like`, `new_empty`), in floating point.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_NAMES = (
    (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"),
    (torch._C._dynamo.guards, "_empty_strided_cuda"),  # of repeated calls
)  # fmt: skip
_LARGEST = 1 << 24  # elements; DeepSpeed allocates gigabytes, of which a test touches a page


def fill_new_memory() -> None:
    """Fill tensors with NaN when they are allocated, in this process from now on."""
    _device_constructors()  # remembered: `with torch.device("meta")` must still know torch's own functions
    for owner, name in _NAMES:
        allocate = getattr(owner, name)
        if not hasattr(allocate, "__wrapped__"):
            setattr(owner, name, _filled(allocate))


def _filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = allocate(*args, **kwargs)
        if x.is_floating_point() and x.numel() <= _LARGEST and not x.is_meta and not torch.compiler.is_compiling():
            with torch.no_grad():
                x.fill_(torch.nan)
        return x

    return wrapper
