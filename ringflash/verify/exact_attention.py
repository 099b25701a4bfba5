"""Models that attend in FP8, and their exact attention, which the fp64 run takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from ringflash.attention.options import RingOptions
from ringflash.wrap.interception import WrappedState


def attends_in_fp8(module: nn.Module) -> bool:
    """Return True if any attention of a module rounds to e4m3."""
    return any(_is_fp8(value) for part in module.modules() for value in vars(part).values())


def attend_exactly(module: nn.Module) -> None:
    """Replace the FP8 kernels of a module's attention by exact ones, chosen automatically."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if not _is_fp8(value):
                continue
            if isinstance(value, WrappedState):
                value.options = _exact(value.options)
            else:
                setattr(part, name, _exact(value) if isinstance(value, RingOptions) else "auto")
                if isinstance(value, str):  # of a LightningModule that will build its model by its `impl`
                    part.fp8_backward = "bf16"  # type: ignore[assignment]


def _is_fp8(value: object) -> bool:
    options: object = value.options if isinstance(value, WrappedState) else value
    impl = options.impl if isinstance(options, RingOptions) else options
    return isinstance(impl, str) and impl in ("hopper_fp8", "reference_fp8")


def _exact(options: Any) -> Any:
    return options._replace(impl="auto", fp8_backward="bf16")
