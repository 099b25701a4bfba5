"""NeMo Automodel's fine-tuning of transformers models on a ring: copy this file next to your YAML.

    recipe: automodel_ring.RingRecipe          # in place of TrainFinetuneRecipeForNextTokenPrediction
    distributed: {cp_size: 8}

Automodel asks a model how it cuts a batch. Here it is cut by zigzags, Automodel's own round-robin order; documents are
those that positions tell. Loss and gradients stay the recipe's. docs/other-trainers.md has the rest.
"""

from __future__ import annotations

import contextlib
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from nemo_automodel.components.distributed.context_parallel.sharder import (
    ContextParallelSharder,
    ShardLayout,
    round_robin_local_indices,
)
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from torch import Tensor, nn

from ringflash import cu_seqlens_from_positions, huggingface, pad_sequence

_READ = {"input_ids", "labels", "position_ids", "attention_mask"}
_REDUNDANT = {"padding_mask"}  # for experts of Automodel's own models

if not version("nemo-automodel").startswith("0.7."):
    raise RuntimeError(f"nemo-automodel must be 0.7, got {version('nemo-automodel')}; this file uses its sharder.")


class RingRecipe(TrainFinetuneRecipeForNextTokenPrediction):
    """Automodel's recipe, whose model attends over the axis "cp" of its mesh."""

    def setup(self) -> None:
        """Build the model, then put it on the ring."""
        super().setup()
        if self.pp_enabled:
            raise NotImplementedError("distributed.pp_size must be 1 on a ring, got pipeline stages; leave it out.")
        put_on_ring(self.model_parts[0], self.device_mesh["cp"])


def put_on_ring(model: nn.Module, cp_mesh: Any) -> nn.Module:
    """Give a transformers model its ring, and Automodel the model's way to cut a batch.

    Raises:
        NotImplementedError: a model of Automodel's own, or one that `ringflash.huggingface` refuses.
    """
    if hasattr(model, "backend"):
        raise NotImplementedError(
            f"model must be transformers' own on a ring, got Automodel's {type(model).__name__}; add force_hf: true to "
            "its section."
        )
    huggingface.register()
    model.set_attn_implementation("ringflash")
    huggingface.set_group(model, cp_mesh.get_group())
    sharder = ContextParallelSharder(shard_batch=shard_batch, local_token_global_indices=round_robin_local_indices)
    model.prepare_model_inputs_for_cp = lambda batch, num_chunks=1: {"cp_sharder": sharder}
    return model


def shard_batch(
    cp_mesh: Any, tp_mesh: Any, batch: dict[str, Any], *, loss_mask: Tensor | None = None, padding_token_id: int = 0
) -> tuple[Any, dict[str, Any], ShardLayout]:
    """Cut a batch whose labels Automodel has shifted.

    Raises:
        NotImplementedError: anything but tokens, labels, positions and padding; several rows with documents.
        ValueError: as `ringflash.huggingface.prepare_batch`.
    """
    given = {name: x for name, x in batch.items() if x is not None}
    unknown = sorted(set(given) - _READ - _REDUNDANT)
    if unknown or loss_mask is not None or not {"input_ids", "labels"} <= set(given):
        raise NotImplementedError(
            f"a batch must have input_ids and labels, and may have position_ids and attention_mask, got {sorted(given)}"
            f"{' and a loss_mask' if loss_mask is not None else ''}; set packed_sequence_size: 0, and pack documents "
            "into one row with position_ids that restart."
        )
    ids, mask = given["input_ids"], given.get("attention_mask")
    bounds = None if "position_ids" not in given else _documents(given["position_ids"], ids)
    pad = partial(pad_sequence, cp_size=cp_mesh.size())
    padded = pad(ids, given["labels"], bounds, pad_token_id=padding_token_id or 0)
    extra = padded.tokens.shape[1] - ids.shape[1]
    if mask is None and extra:
        mask = torch.ones_like(ids)
    shard = huggingface.prepare_batch(
        padded.tokens, group=cp_mesh.get_group(), cu_seqlens=padded.cu_seqlens, labels=padded.labels,
        attention_mask=None if mask is None else pad(mask).tokens,
        position_ids="global" if bounds is None else "document",
    )  # fmt: skip
    names = "input_ids", "position_ids", "cu_seqlens", "use_cache", "checksum"
    local = {name: shard[name] for name in names if shard[name] is not None} | {"labels": shard["shift_labels"]}
    return (
        contextlib.nullcontext,
        local,
        ShardLayout(original_seq_len=ids.shape[1], padded_seq_len=padded.tokens.shape[1]),
    )


def _documents(position_ids: Tensor, ids: Tensor) -> Tensor | None:
    """Return the bounds of packed documents; None if each row is one."""
    positions = position_ids.expand(ids.shape)
    bounds = cu_seqlens_from_positions(positions)
    if len(bounds) == len(ids) + 1:
        return None
    if len(ids) > 1:
        raise NotImplementedError(
            f"packed documents must be one row on a ring, got {len(ids)}; set local_batch_size: 1."
        )
    return bounds
