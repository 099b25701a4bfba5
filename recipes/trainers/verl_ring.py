"""verl's FSDP engines on a ring, in place of Ulysses: copy this file (docs/other-trainers.md).

    export PYTHONPATH=$PWD VERL_USE_EXTERNAL_MODULES=verl_ring
    python -m verl.trainer.main_ppo actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 ...

verl's own functions still pad, slice and gather the packed tokens, now by zigzags, and attention is a ring over verl's
"sp" group. Heads need not be divisible by its size. Loss, gradients and their scale are verl's.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from verl.models.transformers import monkey_patch
from verl.utils import ulysses

import ringflash
from ringflash.huggingface.global_length import depends_on_length

_own_forward = monkey_patch._ulysses_flash_attention_forward
_own_patch = monkey_patch.apply_monkey_patch
_own_pad_and_slice = ulysses.ulysses_pad_and_slice_inputs
_read: list[Any] = [None, None]  # weak reference to the positions of a micro-batch, and its bounds
_rings: list[str] = []  # classes of models that attend over the ring


def ring_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    query_length: int,
    *args: Any,
    position_ids: Tensor | None = None,
    is_causal: bool = True,
    dropout: float = 0.0,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    target_dtype: torch.dtype | None = None,
    **named: Any,
) -> Tensor:
    """Attention of this rank's tokens, (1, tokens, heads, head_dim), each within its document."""
    group = ulysses.get_ulysses_sequence_parallel_group()
    if group is None or dist.get_world_size(group) == 1:
        return _own_forward(
            query, key, value, attention_mask, query_length, *args, position_ids=position_ids, is_causal=is_causal,
            dropout=dropout, softmax_scale=softmax_scale, sliding_window=sliding_window, softcap=softcap, s_aux=s_aux,
            target_dtype=target_dtype, **named,
        )  # fmt: skip
    given = (name for name, x in named.items() if x is not None)
    unknown = sorted(name for name in given if name.startswith(("cu_seq_lens", "max_length")))
    wrong = {
        "a batch": query.shape[0] != 1,
        "no position_ids of one row": position_ids is None or position_ids.dim() != 2,
        "dropout": bool(dropout),
        "softcap": softcap is not None,
        "a mask": attention_mask is not None,
        "attention in both directions": not is_causal,
        f"{[*args, *unknown]}": bool(args or unknown),
    }
    if any(wrong.values()):
        raise NotImplementedError(
            "attention must be causal and of one packed row with its position_ids on a ring, got "
            f"{', '.join(name for name, found in wrong.items() if found)}; set attention_dropout=0 and "
            "use_remove_padding=True, or ulysses_sequence_parallel_size=1."
        )
    assert position_ids is not None
    if target_dtype is not None:
        query, key, value = (x.to(target_dtype) for x in (query, key, value))
    result = ringflash.ring_attention(
        query, key, value, group=group, softmax_scale=softmax_scale, cu_seqlens=_bounds(position_ids, group),
        window_size=(-1 if sliding_window is None else sliding_window - 1, -1), return_lse=s_aux is not None,
    )  # fmt: skip
    return result if s_aux is None else ringflash.apply_sinks(*result, s_aux)


def _bounds(position_ids: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the bounds of the documents of all ranks' tokens, gathered once for all layers of a micro-batch."""
    if _read[0] is None or _read[0]() is not position_ids:
        whole = ringflash.unshard_sequence(position_ids, group)
        _read[:] = ref(position_ids), ringflash.cu_seqlens_from_positions(whole)
    return _read[1]


def slice_input_tensor(x: Tensor, dim: int, padding: bool = True, group: Any = None) -> Tensor:
    """Return this rank's zigzag of a tensor, padded with zeros first."""
    group = ulysses.get_ulysses_sequence_parallel_group() if group is None else group
    _check_ring()
    missing = -x.shape[dim] % ringflash.granularity(dist.get_world_size(group)) if padding else 0
    if missing:
        x = torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1)).expand(_with(x.shape, dim, missing))], dim)
    return ringflash.shard_sequence(x, group, dim).contiguous()


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    sizes = list(shape)
    sizes[dim] = size
    return sizes


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1, pad_value: float = 0
) -> tuple[Tensor, Tensor | None, int]:
    """Pad tokens and positions to what zigzags can divide; the padding is a document of its own, as verl's is."""
    if sp_size <= 1:
        return input_ids_rmpad, position_ids_rmpad, 0
    if position_ids_rmpad is not None and position_ids_rmpad.dim() != 2:
        raise NotImplementedError(
            f"position_ids must be (1, tokens) on a ring, got {tuple(position_ids_rmpad.shape)}: positions of images "
            "have several axes; train models of text, or set ulysses_sequence_parallel_size=1."
        )
    bounds = None if position_ids_rmpad is None else ringflash.cu_seqlens_from_positions(position_ids_rmpad)
    padded = ringflash.pad_sequence(
        input_ids_rmpad, None, bounds, cp_size=sp_size, pad_token_id=pad_value, position_ids=position_ids_rmpad
    )
    return padded.tokens, padded.position_ids, padded.tokens.shape[1] - input_ids_rmpad.shape[1]


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor,
    position_ids_rmpad: Tensor | None = None,
    sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
    pad_value: float = 0,
) -> tuple[Tensor, Tensor | None, int]:
    """Pad and cut a packed row, by the functions above."""
    if skip_position_ids_rmpad:
        raise NotImplementedError(
            "the engine must be fsdp or fsdp2 on a ring, got one that slices positions itself (VeOmni); leave "
            "VERL_USE_EXTERNAL_MODULES out."
        )
    return _own_pad_and_slice(input_ids_rmpad, position_ids_rmpad, sp_size, pad_value=pad_value)


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: Any = None,
) -> Tensor:
    """Gather the ranks' zigzags into the order of the sequence, without its padding.

    Every rank computes the same loss from the result, and FSDP averages gradients over the ranks: so each rank's
    gradient is that of its own tokens, times the number of ranks if `grad_scaler`, as in verl's function.
    """
    group = ulysses.get_ulysses_sequence_parallel_group() if group is None else group
    if group is None:
        return x
    _check_ring()
    whole = ringflash.unshard_sequence(x, group, gather_dim, gradient="own")
    if grad_scaler and whole.requires_grad:
        whole.register_hook(lambda gradient: gradient * dist.get_world_size(group))
    return whole if unpad_dim is None else whole.narrow(unpad_dim, 0, whole.shape[unpad_dim] - padding_size)


def apply_monkey_patch(
    model: Any, ulysses_sp_size: int = 1, use_remove_padding: bool = True, *args: Any, **options: Any
) -> None:
    """Let verl patch the model as for one rank, whose heads always divide; its attention finds the group itself.

    Raises:
        NotImplementedError: a model that would not attend over the ring only.
    """
    if ulysses_sp_size > 1:
        config = model.config
        wrong = {
            "images or other modalities": hasattr(config, "vision_config") or hasattr(config, "audio_config"),
            f"attn_implementation={config._attn_implementation!r}": config._attn_implementation
            not in ("flash_attention_2", "flash_attention_3"),
            "recurrent layers": any(isinstance(x, torch.nn.Conv1d) or hasattr(x, "A_log") for x in model.modules()),
            "attention in chunks": "chunked_attention" in (getattr(config, "layer_types", None) or ()),
            "rotary angles that depend on the length": any(map(depends_on_length, model.modules())),
        }
        if any(wrong.values()):
            raise NotImplementedError(
                f"{type(model).__name__} must be a model of text whose layers all attend by flash_attention_2, got "
                f"{', '.join(name for name, found in wrong.items() if found)}; set ulysses_sequence_parallel_size=1, "
                "or leave VERL_USE_EXTERNAL_MODULES out."
            )
        _rings.append(type(model).__name__)
    _own_patch(model, 1, use_remove_padding or ulysses_sp_size > 1, *args, **options)


def _check_ring() -> None:
    if not _rings:
        raise NotImplementedError(
            "the engine must be fsdp or fsdp2 on a ring, got one whose model was not patched; leave "
            "VERL_USE_EXTERNAL_MODULES out."
        )


def _install() -> None:
    """Replace verl's functions, before an engine imports them.

    Raises:
        RuntimeError: another release of verl, or engines that have been imported.
    """
    if not version("verl").startswith("0.9."):
        raise RuntimeError(f"verl must be 0.9, got {version('verl')}; this file replaces functions of that release.")
    users = "verl.workers.engine", "verl.trainer.distillation"
    engines = sorted(name for name in sys.modules if name.startswith(users))
    if engines:
        raise RuntimeError(
            f"verl_ring must be imported before verl's engines, got {engines[0]} imported; name it in "
            "VERL_USE_EXTERNAL_MODULES, not in external_lib."
        )
    monkey_patch._ulysses_flash_attention_forward = ring_forward
    monkey_patch.apply_monkey_patch = apply_monkey_patch
    ulysses.slice_input_tensor = monkey_patch.slice_input_tensor = slice_input_tensor
    ulysses.ulysses_pad = ulysses_pad
    ulysses.ulysses_pad_and_slice_inputs = ulysses_pad_and_slice_inputs
    ulysses.gather_outputs_and_unpad = gather_outputs_and_unpad


_install()
