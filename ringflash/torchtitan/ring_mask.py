"""Masks of torchtitan, in the terms of ring attention: document bounds, and a window."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common import attention

from ringflash.sequence.documents import cu_seqlens_of

# Factories of mask_mods that divide a row into consecutive documents.
_DOCUMENTS = ("get_document_mask_mod", "get_efficient_causal_mask_mod_for_packed_document", "get_fixed_block_mask_mod")


@dataclass(frozen=True)
class RingMask:
    """Causal mask of a microbatch, which takes the place of a BlockMask.

    torch moves the tensors of tuples and dicts to the GPU, but not those of a dataclass: bounds stay on the CPU, where
    reading them costs no synchronisation.

    Args:
        cu_seqlens: bounds of each row in the whole sequence, int32, on the CPU; None if each row is one document.
        window: tokens that a query sees, itself included; None for all.
        layout: how the sequence was cut; None if it was not.
    """

    cu_seqlens: list[Tensor] | None
    window: int | None
    layout: str | None = None


def read_mask(mask_mods: Sequence[Callable], positions: Tensor) -> RingMask:
    """Return the mask that torchtitan's mask_mods describe together.

    Args:
        positions: (batch, seqlen), or (seqlen,) where torchtitan folds rows into one; only their shape is used.
    Raises:
        NotImplementedError: a mask_mod that torchtitan did not make, or a mask that is not causal.
    """
    seqlen = positions.shape[-1]
    begins = torch.zeros(positions.numel() // seqlen, seqlen, dtype=torch.bool, device=positions.device)
    begins[:, 0] = True
    row = torch.arange(len(begins), device=positions.device)[:, None]
    query = torch.arange(1, seqlen, device=positions.device)[None]
    windows, causal = [], False
    for mod in mask_mods:
        factory = _factory(mod)
        if factory == "get_causal_mask_mod":
            causal = True
        elif factory == "get_sliding_window_mask_mod":  # masks of this factory are causal
            windows.append(inspect.getclosurevars(mod).nonlocals["window_size"])
        elif factory in _DOCUMENTS:  # a token that does not see the previous one begins a document
            begins[:, 1:] |= ~mod(row, torch.zeros_like(row), query, query - 1)
        else:
            raise NotImplementedError(
                "mask_mods must be torchtitan's own for causal, packed-document, fixed-block and sliding-window masks, "
                f"got {factory or mod!r}; leave ringflash.torchtitan.ring_attention out for this model."
            )
    if not causal and not windows:
        raise NotImplementedError(
            "mask_mods must contain a causal mask or a sliding window, got neither; leave "
            "ringflash.torchtitan.ring_attention out for this model."
        )
    begins = begins.cpu()
    documents = bool(begins[:, 1:].any())
    return RingMask([cu_seqlens_of(row) for row in begins] if documents else None, min(windows, default=None))


def _factory(mod: Callable) -> str | None:
    """Return the name of the function of torchtitan that made a mask_mod."""
    if getattr(mod, "__module__", None) != attention.__name__:
        return None
    return mod.__qualname__.partition(".<locals>")[0]
