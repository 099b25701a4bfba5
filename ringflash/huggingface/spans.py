"""Spans of tokens that see one another, such as images and prefixes, as transformers describes them to a layer.

A model makes mask functions from `token_type_ids`. On a ring it gets only the types of its shard, which may cut a span.
So the documents in cu_seqlens say which keys a query sees. The mask function says how a layer uses spans, and the span
numbers in it are compared with the documents (`consistency`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ringflash.sequence.layout import read_documents
from ringflash.sequence.mask import Documents
from ringflash.sequence.tensor_cache import once_per_tensor


class Use(Enum):
    """Keys that a query of a layer with spans sees."""

    WITHIN_WINDOW = "causal or in the same span, and in the window"
    BEYOND_WINDOW = "causal and in the window, or in the same span"
    NONE = "causal"


class LayerSpans(Tensor):
    """Attention mask that layers get if the model's mask function has spans: numbers of spans, (batch, 1, 1, seqlen).

    It is a tensor of four dimensions, because models hand masks of other types or dimensions to transformers again.

    Attributes:
        use: their meaning in the layer.
        mask: (batch, seqlen_local), of padding, or None.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    use: Use
    mask: Tensor | None

    @classmethod
    def of(cls, ids: Tensor, use: Use, mask: Tensor | None) -> LayerSpans:
        """Return the mask of numbers (batch, seqlen_local), -1 for text, as the model has them for its shard."""
        spans = ids[:, None, None].as_subclass(cls)
        spans.use, spans.mask = use, mask
        return spans

    @property
    def ids(self) -> Tensor:
        """Numbers of spans, (batch, seqlen_local)."""
        return self.as_subclass(Tensor)[:, 0, 0]

    def find_error(
        self, cu_seqlens: Tensor | None, window: int | None, layout: str = "zigzag"
    ) -> NotImplementedError | None:
        """Return the error for spans beyond the window of a layer, or a layout that depends on them, or None."""
        if self.use is Use.NONE and layout == "balanced":
            return NotImplementedError(
                "layout must not be 'balanced' for a model in which only some layers see spans (Gemma 4), because this "
                "layout depends on the spans; use 'zigzag'."
            )
        if self.use is not Use.BEYOND_WINDOW or window is None or cu_seqlens is None:
            return None
        documents = read_documents(cu_seqlens)
        spans = zip(pairwise(documents.bounds), documents.bidirectional or (), strict=False)
        longest = max((stop - start for (start, stop), both in spans if both), default=0)
        if longest <= window:
            return None
        return NotImplementedError(
            f"spans must fit into the window ({window} tokens) of a layer that lets a token see its whole span, got "
            f"{longest} tokens; use a longer window, or a model that limits spans to the window (Gemma 3)."
        )


@torch.compiler.disable(reason="the parts of a function are read")
def read_spans(mask_function: Callable[..., Any], use_vmap: bool, mask: Tensor | None) -> LayerSpans | None:
    """Return the spans in a mask function of transformers; None if it is causal, windowed or full.

    Args:
        use_vmap: the model has added parts to the function.
        mask: padding mask, which the result carries along.
    Raises:
        NotImplementedError: the function has parts other than causality, a window and spans.
    """
    ids: list[Tensor] = []
    form = _mask_form(mask_function, ids)
    if not use_vmap and not ids and getattr(mask_function, "__name__", "") in _PLAIN:
        return None
    use = _USES.get(form)
    if use is None:
        raise NotImplementedError(
            "mask_function must be a causal, sliding-window or full mask, with or without spans, got "
            f"{_describe_form(form)!r} from the model; leave token_type_ids out if it takes them, or use another "
            "attn_implementation for this model."
        )
    return LayerSpans.of(ids[0], use, mask)


_PLAIN = ("causal_mask_function", "bidirectional_mask_function", "and_mask")
_OVERLAYS = {
    "causal_mask_function": "causal",
    "sliding_window_overlay.<locals>.inner_mask": "window",
    "packed_sequence_mask_function.<locals>.inner_mask": "packed",
    "blockwise_overlay.<locals>.inner_mask": "spans",
}
_USES = {
    ("or", "causal", "spans"): Use.WITHIN_WINDOW,
    ("and", ("or", "causal", "spans"), "window"): Use.WITHIN_WINDOW,
    ("or", ("and", "causal", "window"), "spans"): Use.BEYOND_WINDOW,
}


def _mask_form(function: Callable[..., Any], ids: list[Tensor]) -> Any:
    """Return the form of a mask function: its name, or ("and" or "or", forms of its parts).

    Parts for packed documents are left out: transformers finds documents by jumps of positions, which every shard has.

    Args:
        ids: list to which the function's numbers of spans are appended.
    """
    name, code = getattr(function, "__qualname__", ""), getattr(function, "__code__", None)
    closure = {} if code is None else dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    if name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        return _mask_form(closure["mask_function"].cell_contents, ids)
    if name in ("and_masks.<locals>.and_mask", "or_masks.<locals>.or_mask"):
        parts = [_mask_form(part, ids) for part in closure["mask_functions"].cell_contents]
        parts = [part for part in parts if part != "packed"]
        if len(parts) == 1:
            return parts[0]
        operation = "and" if name.startswith("and") else "or"
        return (operation, *(sorted(parts) if all(isinstance(part, str) for part in parts) else parts))
    if name == "blockwise_overlay.<locals>.inner_mask":
        ids.append(closure["block_sequence_ids"].cell_contents)
    return _OVERLAYS.get(name, name)


def _describe_form(form: Any) -> str:
    """Return a form as text, such as "causal or (window and spans)"."""
    if isinstance(form, str):
        return form.replace(".<locals>", "")
    parts = ((part, _describe_form(part)) for part in form[1:])
    return f" {form[0]} ".join(text if isinstance(part, str) else f"({text})" for part, text in parts)


def number_spans(model: Any, name: str, types: Tensor) -> Tensor | None:
    """Return the numbers of the spans that a model makes of token types, -1 for text; None if it makes no spans.

    Args:
        model: with attn_implementation="ringflash".
        name: argument of the model, "token_type_ids" or "mm_token_type_ids".
        types: (batch, seqlen), of whole rows.
    Raises:
        NotImplementedError: the model does not say how its mask depends on them; it makes another mask of them.
    """
    make_masks = getattr(model, "create_masks_for_generate", None)
    if make_masks is None or name not in signature(make_masks).parameters:
        raise NotImplementedError(
            f"{name} must be given only to a model whose mask for generation depends on them, got a tensor for "
            f"{type(model).__name__}; leave them out for text."
        )
    given = {"attention_mask": None, "cache": None, "position_ids": None, "is_first_iteration": True, name: types}
    masks = make_masks(config=model.config, inputs_embeds=torch.empty(*types.shape, 0, device=types.device), **given)
    all_masks = masks.values() if isinstance(masks, dict) else (masks,)
    return next((mask.ids for mask in all_masks if isinstance(mask, LayerSpans)), None)


def mark_layers_without_spans(masks: Any) -> Any:
    """Return a model's masks by type of layer, with `Use.NONE` for layers without spans if other layers have spans.

    An unmarked layer would follow the documents, in which spans are bidirectional.
    """
    if not isinstance(masks, dict):
        return masks
    spans = next((mask for mask in masks.values() if isinstance(mask, LayerSpans)), None)
    if spans is None:
        return masks
    return {
        kind: mask if isinstance(mask, LayerSpans) else LayerSpans.of(spans.ids, Use.NONE, mask)
        for kind, mask in masks.items()
    }


def spans_fit(ids: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return a bool scalar: the spans of a shard are the bidirectional documents of cu_seqlens. The host reads no ids.

    A model numbers the spans of its shard, or gives all the number 0 if a tree of documents has at most one. It takes
    neighbouring spans for one, so a bidirectional document that continues another one does not fit.

    Args:
        ids: (1, seqlen_local), as `LayerSpans`.
        positions: (seqlen_local,), global.
    """
    documents = None if cu_seqlens is None else read_documents(cu_seqlens)
    if documents is None or documents.bidirectional is None:
        return (ids < 0).all()
    both = documents.bidirectional
    if any(both[i] and i and both[i - 1] and parent == i - 1 for i, parent in enumerate(documents.parents or ())):
        return ids.new_zeros((), dtype=torch.bool)
    bounds = torch.tensor(documents.bounds, device=positions.device)
    document = torch.searchsorted(bounds, positions, right=True) - 1
    inside = torch.tensor(documents.bidirectional, device=positions.device)[document]
    begins = inside.clone()
    begins[1:] &= ~inside[:-1]
    fit = (ids == torch.where(inside, begins.cumsum(0) - 1, -1)).all()
    return fit | (ids == torch.where(inside, 0, -1)).all() if _have_one_span(documents) else fit


def _have_one_span(documents: Documents) -> bool:
    """Return True if no path has two bidirectional documents."""
    counts: list[int] = []
    for i, both in enumerate(documents.bidirectional or ()):
        parent = -1 if documents.parents is None else documents.parents[i]
        counts.append(int(both) + (counts[parent] if parent >= 0 else 0))
    return max(counts, default=0) <= 1


def without_directions(cu_seqlens: Tensor | None) -> Tensor | None:
    """Return a table without bidirectional documents, made once for the layers of a forward."""
    return cu_seqlens if cu_seqlens is None or cu_seqlens.dim() == 1 else _causal(cu_seqlens)


@once_per_tensor
def _causal(table: Tensor) -> Tensor:
    causal = table.clone()
    causal[2] = 0
    return causal
