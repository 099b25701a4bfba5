"""Recurrent layers of transformers models on a ring: gated delta rules, Mamba-2 and short convolutions.

use_sequence_order   hooks on each recurrent layer, which bring its tokens into sequence order and back
_FUNCTIONS           functions of such a layer in which tokens interact, and their replacements

A layer's own forward runs on a contiguous shard. Its hook gives it a `ContiguousShard` as a keyword, which the
layers of transformers pass on to these functions of their file.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.attention.inputs import documents_of
from ringflash.comm.agreement import agree
from ringflash.comm.call_numbers import in_layer
from ringflash.huggingface.consistency import ShardInputs, check_consistency
from ringflash.huggingface.forward_inputs import ForwardInputs
from ringflash.huggingface.generation import is_generating
from ringflash.huggingface.options import ModelRing, give_inputs, inputs_of
from ringflash.huggingface.validation import check_kwargs, name_of_layer, recurrent_modules
from ringflash.recurrent import (
    ContiguousShard,
    causal_conv,
    delta_rule,
    from_sequence_order,
    mamba2_scan,
    to_sequence_order,
)
from ringflash.sequence.layout import DOCUMENT_LAYOUTS
from ringflash.sequence.mask import check_cu_seqlens

_KEYWORD = "ringflash"  # keyword argument that carries a ContiguousShard


def use_sequence_order(model: nn.Module, inputs: ForwardInputs) -> None:
    """Hook the recurrent layers of a model. May be called again.

    The first one checks the inputs of a forward: no layer exchanges tokens before it. Each one compares its call.
    """
    for index, module in enumerate(recurrent_modules(model)):
        give_inputs(module, inputs)
        if index == 0:
            inputs.first_layer = name_of_layer(module)
        if _into_sequence_order not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_into_sequence_order, with_kwargs=True)
            module.register_forward_hook(_back_into_layout, with_kwargs=True)
        file = sys.modules[type(module).__module__]
        for name, run in _FUNCTIONS.items():
            original = getattr(file, name, None)
            if original is not None and not hasattr(original, "_ringflash"):
                setattr(file, name, _redirected(original, run))


@torch.compiler.disable(reason="ranks exchange tokens")
def _into_sequence_order(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Check the call, as `_attend` does, and bring its tokens into sequence order; a pre-hook of a recurrent layer."""
    if is_generating():
        return None
    inputs: ForwardInputs = inputs_of(module)
    options = inputs.options
    call = dict(kwargs)
    hidden: Tensor = call.pop("hidden_states") if "hidden_states" in call else args[0]
    mask, cu_seqlens, checksum = (call.pop(name, None) for name in ("attention_mask", "cu_seqlens", "checksum"))
    cache, _ = call.pop("cache_params", None), call.pop("position_embeddings", None)  # Zamba2 passes the attention's
    error, bounds = _find_error({"past_key_values": cache, **call}, hidden, options, cu_seqlens)
    name = name_of_layer(module)
    if inputs.first_layer == name:
        given = ShardInputs(mask, call.get("position_ids"), cu_seqlens, checksum)
        check_consistency(options, hidden[:, None], given, inputs, error)
    signature: dict[str, object] = {"recurrent layer on": [*hidden.shape], "dtype": str(hidden.dtype)}
    if options.layout in DOCUMENT_LAYOUTS:  # in other models attention compares the bounds; no message depends on them
        signature["cu_seqlens"] = zlib.crc32(str(bounds).encode())
    with in_layer(name, module.training):
        agree(options.group, signature, error, hidden.device)
    if options.group is not None or bounds is not None:
        call[_KEYWORD] = ContiguousShard.of(hidden.shape[1], options.group, bounds)
        hidden = to_sequence_order(hidden, options.group, options.layout, bounds)
    return (), {**call, "hidden_states": hidden}


def _find_error(
    call: dict[str, Any], hidden: Tensor, options: ModelRing, cu_seqlens: Tensor | None
) -> tuple[Exception | None, tuple[int, ...] | None]:
    """Return the error for arguments that no recurrence supports, or None, and the document bounds."""
    bounds = None
    try:
        check_kwargs(call)
        if cu_seqlens is not None:
            bounds = documents_of(cu_seqlens, hidden).plain_bounds("layers with recurrences or convolutions")
            check_cu_seqlens(bounds, hidden.shape[1] * options.size_and_rank[0])
    except (NotImplementedError, ValueError) as error:
        return error, None
    return None, bounds


@torch.compiler.disable(reason="ranks exchange tokens")
def _back_into_layout(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor | None:
    """Bring the output of a recurrent layer back into the layout; a forward hook."""
    if _KEYWORD not in kwargs:
        return None
    options: ModelRing = inputs_of(module).options
    return from_sequence_order(output, options.group, options.layout, kwargs[_KEYWORD].bounds)


def _redirected(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `original`, or `run` with it if the layer was given a `ContiguousShard`."""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        shard = kwargs.pop(_KEYWORD, None)
        return original(*args, **kwargs) if shard is None else run(original, shard, *args, **kwargs)

    function._ringflash = True  # type: ignore[attr-defined]
    return function


@torch.compiler.disable(reason="ranks exchange tokens")
def _conv(
    original: Any, shard: ContiguousShard, x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None,
    **rest: Any,
) -> Tensor:  # fmt: skip
    return causal_conv(lambda t: original(t, weight, bias, activation=activation), x, weight.shape[-1], shard)


@torch.compiler.disable(reason="ranks exchange states")
def _delta_rule(
    original: Any, shard: ContiguousShard, query: Tensor, key: Tensor, value: Tensor, initial_state: None = None,
    output_final_state: bool = False, cu_seqlens: None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    return delta_rule(original, query, key, value, shard=shard, **options), None


@torch.compiler.disable(reason="ranks exchange states")
def _mamba2_scan(
    original: Any, shard: ContiguousShard, *tensors: Tensor, z: None = None, initial_states: None = None,
    return_final_states: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    return mamba2_scan(original, *tensors, shard=shard, **options)


def _decline(original: Any, shard: ContiguousShard, *args: Any, **kwargs: Any) -> None:
    """Return None, as mamba_ssm's function for a whole layer does if the layer's own code must run."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_split_conv1d_scan_combined": _decline,
}
