"""torchtitan's own Trainer on CPU processes over gloo, in fp64. Import before anything of torchtitan.

torchtitan takes "cuda" if it finds no accelerator, and asks a device for what a CPU does not have. It casts to fp32 and
bf16 at places of its own choice; here these casts keep fp64, so that a run can be compared with another one to 1e-11.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"
_FAKE = types.SimpleNamespace(total_memory=1 << 30)
for _name, _value in {
    "get_device_name": lambda *_: "cpu", "get_device_properties": lambda *_: _FAKE, "device_count": lambda: 1,
    "reset_peak_memory_stats": lambda *_: None, "empty_cache": lambda: None, "memory_stats": lambda *_: {},
}.items():  # fmt: skip
    setattr(torch.cpu, _name, _value)

from torch.distributed._composable.fsdp import FSDPModule  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402
from torchtitan import config  # noqa: E402
from torchtitan.components import loss  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.models.common import attention, moe, token_dispatcher  # noqa: E402
from torchtitan.tools import utils  # noqa: E402

utils.get_local_device = lambda: torch.device("cpu")
config.TORCH_DTYPE_MAP["float64"] = torch.float64

# flex attention has no compiled backward on CPUs; eagerly it has one, which torch refuses without this.
flex._validate_device = lambda *_: None
attention._compiled_create_block_mask = flex.create_block_mask
attention.FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)


def _sum_without_a_factor(model: torch.nn.Module) -> None:
    """Sum gradients: gloo has no PREMUL_SUM, which a division factor of 1 would become."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = _sum_without_a_factor
torch.distributed.barrier = lambda *_, **__: None  # torchtitan's asks for the index of a CUDA device

_to, _float, _bfloat16 = torch.Tensor.to, torch.Tensor.float, torch.Tensor.bfloat16


def _keep(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if x.dtype == torch.float64 and args and args[0] in (torch.float32, torch.bfloat16):
        args = (torch.float64, *args[1:])
    return _to(x, *args, **kwargs)


class _GradAccumulator(loss.GradAccumulator):
    def __init__(self, reference: torch.Tensor, *, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(reference, dtype=torch.promote_types(dtype, reference.dtype), **options)


loss.GradAccumulator = _GradAccumulator
torch.Tensor.to = _keep  # type: ignore[method-assign, assignment]
torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else _float(x)  # type: ignore[method-assign]
torch.Tensor.bfloat16 = lambda x: x if x.dtype == torch.float64 else _bfloat16(x)  # type: ignore[method-assign]


def _multiply_by_expert(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert by its matrix; torch's grouped product has no fp64."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()
    return torch.cat([rows @ matrix for rows, matrix in zip(a.split(sizes), b, strict=True)])


torch._grouped_mm = _multiply_by_expert
for _module in (moe, token_dispatcher):
    _module.deterministic_scatter_add = lambda out, index, source: out.to(source.dtype).scatter_add(0, index, source)
