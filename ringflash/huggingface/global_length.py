"""What a model takes from the tokens it holds though it means the sequence: its length, and positions it counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.huggingface.options import NAME, Options
from ringflash.huggingface.positions import positions_on

LENGTH_DEPENDENT = ("dynamic", "longrope")


def tell_of_the_sequence(model: nn.Module, options: Options) -> None:
    """Have rotary angles that depend on the length, and positions that an attention counts, those of the sequence."""
    for module in model.modules():
        if depends_on_length(module):
            module._ringflash = options  # type: ignore[assignment]
            if _give_longest not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_give_longest, with_kwargs=True)
                module.register_forward_hook(_drop_longest)
        if _counts_tokens(module) and _give_offsets not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_give_offsets, with_kwargs=True)


def depends_on_length(module: nn.Module) -> bool:
    """Whether a rotary layer's angles change with the length of the sequence."""
    kinds: Any = getattr(module, "rope_type", None)
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    scaled = kinds is not None and "long_mscale" in parameters  # PhiMoE's, beside any kind
    return scaled or any(kind in LENGTH_DEPENDENT for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,)))


def _counts_tokens(module: nn.Module) -> bool:
    """Llama 4's layers without rotation scale their queries by positions that they count themselves."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def _runs_on_ring(module: nn.Module) -> bool:
    return getattr(module.config, "_attn_implementation", None) == NAME  # type: ignore[union-attr]


@torch.compiler.disable(reason="transformers reads the largest position")
def _give_longest(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """transformers takes the largest position it is given for the length: append that of all ranks."""
    group = module._ringflash.group  # type: ignore[union-attr]
    if group is None:
        return None
    position_ids: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    if position_ids.dim() != 2:
        raise NotImplementedError(
            f"position_ids must be (batch, seqlen) where the rotation depends on the length, got "
            f"{tuple(position_ids.shape)}; use yarn, llama3 or linear."
        )
    longest = position_ids.amax(-1, keepdim=True)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    longer = torch.cat([position_ids, longest], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def _drop_longest(module: nn.Module, args: tuple[Any, ...], angles: Any) -> Any:
    if module._ringflash.group is None:  # type: ignore[union-attr]
        return None
    return angles[:, :-1] if isinstance(angles, Tensor) else tuple(x[:, :-1] for x in angles)


def _give_offsets(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Its positions are the numbers of its tokens plus those in its cache: a cache that says how far each is off."""
    if not _runs_on_ring(module):
        return None
    if kwargs.get("past_key_values") is not None:
        raise NotImplementedError("past_key_values must be None, got a cache; pass use_cache=False.")
    hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    options: Options = module._ringflash  # type: ignore[assignment]
    offsets = _offsets(options, hidden.shape[1], hidden.device)
    return args, {**kwargs, "past_key_values": _Offsets(offsets)}


@torch.compiler.disable(reason="positions are kept from call to call")
def _offsets(options: Options, length: int, device: torch.device) -> Tensor:
    return positions_on(options, length, device) - torch.arange(length, device=device)


class _Offsets:
    """The part of transformers' cache that such an attention asks."""

    def __init__(self, offsets: Tensor) -> None:
        self._offsets = offsets

    def get_seq_length(self, layer_idx: int) -> Tensor:
        """What to add to the number of each token."""
        return self._offsets

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Nothing is kept."""
        return key, value
