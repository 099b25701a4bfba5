"""Global lengths and positions for models that would derive them from the local shard.

Rotary angles of some kinds depend on the length of the sequence, and Llama 4 scales queries by positions that its
attention counts. Hooks on these modules give them the values of the whole sequence.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.huggingface.options import NAME, ModelRing, give_inputs, inputs_of

LENGTH_DEPENDENT = ("dynamic", "longrope")
_CACHE_NAMES = ("cache", "past_key_values")  # name of a layer's argument: from transformers 5.24 on, and before


def use_global_length(model: nn.Module, inputs: Any) -> None:
    """Hook the modules of a model that depend on the sequence's length or count positions. May be called again.

    Args:
        inputs: the model's `ForwardInputs`.
    Raises:
        NotImplementedError: a layer that counts positions takes no cache by a known name.
    """
    for module in model.modules():
        if depends_on_length(module):
            give_inputs(module, inputs)
            if _append_longest not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_append_longest, with_kwargs=True)
                module.register_forward_hook(_drop_longest)
        # Llama 4's layers without rotation scale queries by positions that they count.
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            inputs.counts_positions = True
            module._ringflash_cache = _name_of_cache(module)  # type: ignore[assignment]
            if _add_offsets not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_add_offsets, with_kwargs=True)


def depends_on_length(module: nn.Module) -> bool:
    """Return True for a rotary layer whose angles change with the length of the sequence."""
    kinds: Any = getattr(module, "rope_type", None)
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    scaled = kinds is not None and "long_mscale" in parameters  # PhiMoE's, with any rope_type
    return scaled or any(kind in LENGTH_DEPENDENT for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,)))


def _name_of_cache(module: nn.Module) -> str:
    """Return the argument by which a layer takes a cache. Given another one, transformers warns and ignores it."""
    parameters = signature(type(module).forward).parameters
    if known := [name for name in _CACHE_NAMES if name in parameters]:
        return known[0]
    raise NotImplementedError(
        f"{type(module).__name__} must take a cache as one of {_CACHE_NAMES}, got {list(parameters)}; use a version of "
        "transformers that ringflash was tested with."
    )


@torch.compiler.disable(reason="transformers reads the largest position")
def _append_longest(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Append the largest position of all ranks, because transformers takes the largest one for the length."""
    inputs = inputs_of(module)
    group, length = inputs.options.group, inputs.length
    if group is None and length is None:
        return None
    position_ids: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    if position_ids.dim() != 2:
        raise NotImplementedError(
            f"position_ids must be (batch, seqlen) where the rotation depends on the length, got "
            f"{tuple(position_ids.shape)}; use yarn, llama3 or linear."
        )
    if length is not None:  # without the padding that the layout needs
        position_ids = torch.clamp(position_ids, max=length - 1)
    longest = position_ids.amax(-1, keepdim=True)
    if length is not None:  # of padding in the user's batch, too, which may be left out of position_ids
        longest = torch.full_like(longest, length - 1)
    if group is not None:
        grown = longest.new_full(longest.shape, _grown_to(module, *args[2:], **kwargs) - 1)
        maxima = torch.stack([longest, grown])
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        longest, grown = maxima
        from_growth = longest + 1 >= getattr(module, "original_max_seq_len", 0)
        longest = torch.where(from_growth, longest.maximum(grown), longest)
    position_ids = torch.cat([position_ids, longest], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": position_ids}
    return (args[0], position_ids, *args[2:]), kwargs


def _grown_to(module: Any, layer_type: str | None = None, **_: Any) -> int:
    """Return the length to which the angles of a "dynamic" rotation have grown, and at which they stay; otherwise 0.

    Lengths from the original one on do not shrink them. A rank that generates by itself grows only its own.
    """
    kinds = module.rope_type
    if (kinds if layer_type is None else kinds[layer_type]) != "dynamic":
        return 0
    grown = module.max_seq_len_cached
    return int(grown if layer_type is None else getattr(module, f"{layer_type}_max_seq_len_cached", grown))


def _drop_longest(module: nn.Module, args: tuple[Any, ...], angles: Any) -> Any:
    inputs = inputs_of(module)
    if inputs.options.group is None and inputs.length is None:
        return None
    return angles[:, :-1] if isinstance(angles, Tensor) else tuple(x[:, :-1] for x in angles)


def _add_offsets(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Pass a cache whose length is the offset of each token, because the layer adds that length to local indices.

    The keyword `columns` has the positions, if they are not those in the padded sequence.
    """
    if getattr(module.config, "_attn_implementation", None) != NAME:  # type: ignore[union-attr]
        return None
    name: str = module._ringflash_cache  # type: ignore[assignment]
    if kwargs.get(name) is not None:
        raise NotImplementedError(f"{name} must be None, got a cache; pass use_cache=False.")
    hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    options: ModelRing = inputs_of(module).options
    columns = kwargs.pop("columns", None)
    if columns is None:
        offsets = _offsets(options, hidden.shape[1], hidden.device)
    else:
        offsets = columns - torch.arange(hidden.shape[1], device=hidden.device)
    return args, {**kwargs, name: _OffsetCache(offsets)}


@torch.compiler.disable(reason="positions are cached from call to call")
def _offsets(options: ModelRing, length: int, device: torch.device) -> Tensor:
    return options.positions(length, device) - torch.arange(length, device=device)


class _OffsetCache:
    """A transformers cache that stores nothing, and whose length is a tensor of offsets."""

    def __init__(self, offsets: Tensor) -> None:
        self._offsets = offsets

    def get_seq_length(self, layer_idx: int) -> Tensor:
        """Return the number to add to each token's local index."""
        return self._offsets

    def update(self, key: Tensor, value: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Return the arguments; nothing is stored."""
        return key, value
