"""The group and options that `set_group` gives a model, and the positions of the tokens that a rank then holds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ringflash.attention.options import CallOptions
from ringflash.sequence.layout import DOCUMENT_LAYOUTS, local_positions

NAME = "ringflash"  # the attn_implementation


class ModelRing(CallOptions):
    """Group and options of one model's attention; arguments as `ring_attention`."""

    __slots__ = ()

    def positions(self, length: int, device: torch.device, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the global positions of the `length` tokens that this rank holds; cu_seqlens as `local_positions`."""
        cp_size, cp_rank = self.size_and_rank
        if self.layout in DOCUMENT_LAYOUTS:  # read, and decided upon, once per step
            return local_positions(length * cp_size, cp_size, cp_rank, self.layout, cu_seqlens).to(device)
        positions = _positions(length * cp_size, cp_size, cp_rank, self.layout, device)
        if isinstance(positions, FakeTensor):  # without values, for a tracer: later calls must not get it
            _positions.cache_clear()
        return positions


@lru_cache(maxsize=8)
def _positions(seqlen: int, cp_size: int, cp_rank: int, layout: str, device: torch.device) -> Tensor:
    return local_positions(seqlen, cp_size, cp_rank, layout).to(device)


def give_inputs(module: nn.Module, inputs: Any) -> None:
    """Attach a model's `ForwardInputs` to one of its modules."""
    module._ringflash_inputs = inputs


def inputs_of(module: nn.Module) -> Any:
    """Return the `ForwardInputs` that `give_inputs` has attached to a module; None without."""
    return getattr(module, "_ringflash_inputs", None)


def check_single_process() -> None:
    """Raise ValueError if there are several processes: a model without a group does not say which share a sequence."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"group must be given if there are several processes, got none with {dist.get_world_size()} processes; "
            "call ringflash.huggingface.set_group(model, group), and give a tower of images another implementation "
            "(attn_implementation={'': 'ringflash', 'text_config': 'ringflash', 'vision_config': 'sdpa'})."
        )
