"""Stand-in for Transformer Engine, which needs CUDA: the classes of which Megatron derives its own, in plain torch.

For one rank of tensor parallelism. With it on PYTHONPATH, Megatron builds and trains the layers of
`--transformer-impl transformer_engine`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__version__ = "1.0.0"  # Megatron asks newer releases for more classes


class Linear(nn.Module):
    """Linear layer without a bias."""

    def __init__(self, in_features: int, out_features: int, init_method: Callable[[Tensor], Any], **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        init_method(self.weight)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return functional.linear(x, self.weight)


class LayerNormLinear(Linear):
    """RMS norm and linear layer."""

    def __init__(self, in_features: int, out_features: int, eps: float, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.layer_norm_weight, self.eps = nn.Parameter(torch.ones(in_features)), eps

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return super().forward(functional.rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps))


class RMSNorm(nn.RMSNorm):
    def __init__(self, normalized_shape: int, eps: float, **_: Any) -> None:
        super().__init__(normalized_shape, eps)


class DotProductAttention(nn.Module):
    """Causal attention over the tokens of a rank."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend; (seqlen, batch, heads, head_dim)."""
        heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(f"{__name__}.{name}")
    module.__dict__.update(members, __path__=[])
    sys.modules[module.__name__] = module
    return module


common = _module("common", recipe=SimpleNamespace(DelayedScaling=object))
pytorch = _module(
    "pytorch", Linear=Linear, LayerNormLinear=LayerNormLinear, RMSNorm=RMSNorm, LayerNorm=nn.LayerNorm,
    DotProductAttention=DotProductAttention, distributed=SimpleNamespace(CudaRNGStatesTracker=object),
)  # fmt: skip
_module("pytorch.fp8", FP8GlobalStateManager=None, fp8_autocast=None, fp8_model_init=None)
_module("pytorch.float8_tensor", Float8Tensor=type("Float8Tensor", (), {}))
_module("pytorch.cpp_extensions", cast_to_fp8=None)
