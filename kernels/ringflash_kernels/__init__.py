"""Exact attention on one device: forward and backward with log-sum-exp, resumable, over interval masks.

`api` is the contract and `reference` its specification. `flash2`, `flash4` and `hopper` are faster implementations,
which never import one another.
"""

from ringflash_kernels.api import (
    IMPLS,
    BackwardPass,
    Choice,
    attention_backward,
    attention_forward,
    begin_backward,
    choose_impl,
)
from ringflash_kernels.fp8_reference import measure_rounding as measure_fp8_rounding
from ringflash_kernels.mask import Mask, Region
from ringflash_kernels.merge import merge_

__all__ = [
    "IMPLS",
    "BackwardPass",
    "Choice",
    "Mask",
    "Region",
    "attention_backward",
    "attention_forward",
    "begin_backward",
    "choose_impl",
    "measure_fp8_rounding",
    "merge_",
]
