"""Peak memory of one GPU in a step, by part.

    forward of all layers | loss | backward, last layer first           | optimizer
                            A      B                                 C    D

A holds all checkpoints, the gradients of the loss, and the gradients of the previous step, which Lightning clears after
the forward. B holds all checkpoints and the working memory of one layer. C holds the last gradients before they are
reduce-scattered. D holds AdamW's temporaries in addition to its moments.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from ringflash.attention.head_exchange import Share, area_bytes
from ringflash.attention.sections import (
    HEADER_BYTES,
    Sections,
    buffer_heads,
    choose_blocks,
    choose_num_gradient_buffers,
    choose_sections,
    fits_unbuffered,
    order_units,
    shared_buffer_heads,
)
from ringflash.comm.transport import MessageMemory, SymmetricMemory
from ringflash.commands.plan.job import Machine, TrainingJob
from ringflash.commands.plan.trace import SavedBytes
from ringflash.loss import CHUNK_LOGITS

BF16, FP32 = 2, 4


def worst_moment(job: TrainingJob, machine: Machine) -> tuple[str, dict[str, int]]:
    """Return the name of the moment with the most memory, and its bytes by part, including fragmentation."""
    job = job.on(machine)
    moments = _moments(job)
    name = max(moments, key=lambda x: sum(moments[x].values()))
    parts = moments[name] | {"transport buffers": transport_bytes(job)}
    parts["fragmentation"] = int(sum(parts.values()) * machine.rates.fragmentation)
    parts["CUDA and libraries"] = machine.rates.reserved_bytes
    return name, parts


def _moments(job: TrainingJob) -> dict[str, dict[str, int]]:
    """Return the bytes by part that differ between moments, by the name of the moment."""
    model, alone = job.model, job.world_size == 1
    weights = model.parameters * _weight_bytes(job) // job.world_size
    states = 2 * weights  # AdamW's two
    root, layer = (0 if alone else x * BF16 for x in (model.root_parameters, model.layer_parameters))
    # gradients of a layer's experts before the reduce-scatter
    leaving = 0 if alone else model.expert_parameters * (BF16 + FP32)
    summed = weights if job.accumulates else 0  # gradients of earlier sequences
    others = summed or weights - model.layer_parameters * _weight_bytes(job) // job.world_size
    at_work = layer_bytes(job)
    moving = layer_input_bytes(job) if job.offload_checkpoints else 0  # one checkpoint in transfer
    head = model.embedding_parameters * (_weight_bytes(job) if alone else BF16)  # its gradient, unsharded until C
    spread = 0 if alone else model.root_parameters * (BF16 + FP32)

    def parts(
        gradients: int, *, optimizer: int = states, gathered: int = 0, checkpoints: int = 0, layer: int = 0,
        loss: int = 0,
    ) -> dict[str, int]:  # fmt: skip
        return {
            "weights": weights, "gradients": gradients, "optimizer": optimizer, "gathered parameters": gathered,
            "checkpoints": checkpoints, "one layer at work": layer, "loss": loss,
        }  # fmt: skip

    return {
        "the loss": parts(weights, gathered=root, checkpoints=_checkpoints(job) + moving, loss=_loss(job)),
        "the last layer's backward": parts(
            summed if alone and summed else summed + head, gathered=root + 2 * layer + leaving,
            checkpoints=_checkpoints(job) + moving, layer=at_work, loss=layer_input_bytes(job),
        ),
        "the first layer's backward": parts(
            others, gathered=layer + leaving, checkpoints=checkpoint_bytes(job), layer=at_work,
        ),
        "the last gradients": parts(weights, gathered=spread),
        "the optimizer's step": parts(weights, optimizer=states * 3 // 2),
    }  # fmt: skip


def checkpoint_bytes(job: TrainingJob) -> int:
    """Return the bytes that one layer keeps for its backward, averaged over the layers."""
    if job.checkpointing == "none":
        return _kept_bytes(job, job.layers.kept_mean)
    return layer_input_bytes(job) + (_attention_kept(job) if job.checkpointing == "attention_kept" else 0)


def layer_input_bytes(job: TrainingJob) -> int:
    """Return the bytes of one rank's hidden states, which offloading moves to the host."""
    return job.local_tokens * job.model.hidden_size * BF16


def activation_bytes(job: TrainingJob) -> int:
    """Return the bytes that autograd saves in the largest layer without checkpointing, shared rotary angles excluded.

    The MLP of a tile is recomputed and keeps only its input.
    """
    return _kept_bytes(job, job.layers.kept)


def layer_bytes(job: TrainingJob) -> int:
    """Return the bytes of one layer's recomputed activations and the peak of its backward in addition.

    The peak is that of the MLP, of its norm (three fp32 tensors without Liger), or of attention; each starts when the
    activations of the previous one are freed.
    """
    model, tokens, layers = job.model, job.local_tokens, job.layers
    kept = 0 if job.checkpointing == "none" else activation_bytes(job) - int(tokens * layers.kept.input)
    if job.checkpointing == "attention_kept":
        kept -= _attention_kept(job)
    mlp = _mlp_bytes(job)
    if job.tile_tokens:  # a tile's activations, sums over tiles, a tile's gradients of experts
        mlp += int(2 * min(job.tile_tokens, tokens) * layers.kept.tiled)
        mlp += model.tiled_parameters * FP32 + min(model.tiled_parameters, model.expert_parameters) * BF16
    norm = tokens * model.hidden_size * (BF16 if job.liger else 3 * FP32) - _mlp_bytes(job)
    attention = attention_work_bytes(job) - _mlp_bytes(job) - _norm_bytes(job)
    return kept + max(mlp, norm, attention) + 2 * layer_input_bytes(job)


def attention_work_bytes(job: TrainingJob) -> int:
    """Return the bytes of gradients in attention's backward: dQ in fp32 and bf16, dO, dK and dV.

    On several ranks, dQ is in fp32 for two sections only.
    """
    rail = job.rail
    model, summed = rail.model, rail.model.q_size
    if rail.cp_size > 1:
        summed = sum(buffer_heads(sections_at_a_time(rail).backward)) * model.q_size // model.num_kv_heads
    return rail.local_tokens * (summed * FP32 + (model.q_size + model.out_size + 2 * model.kv_size) * BF16)


def transport_bytes(job: TrainingJob) -> int:
    """Return the bytes of the transport buffers, which all layers share; 0 on one rank.

    All-gather by heads, over the copy engine (on one host) or NCCL: K/V of the whole sequence if they are small, else
    the rank's own and those of two sections of heads (NCCL: three); gradients of two sections (more if returns are
    batched so that links can sleep), and those of one section returning to their owners. In blocks: the same for units
    in place of sections; sums of the rank's own gradients and the output in fp32, of two sections. An exchange of heads
    has areas and a buffer of its own.
    """
    exchanged, job = _exchange_bytes(job), job.rail
    if job.cp_size == 1:
        return exchanged
    turns = (SymmetricMemory if job.one_host else MessageMemory).num_buffers
    if len(block_sizes(job)) > 1:
        return exchanged + _keys_in_blocks(job, turns)
    return exchanged + max(_gathered_keys(job, rank, turns) for rank in (0, job.cp_size - 1))


def _exchange_bytes(job: TrainingJob) -> int:
    """Return the bytes of the areas and the buffer over which a host exchanges heads, in a backward."""
    if job.exchanging == 1:
        return 0
    model, ranks = job.rail.model, job.exchanging
    q, k = (
        Share(1, job.local_tokens, heads, model.head_dim, torch.bfloat16)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    out, v = (x._replace(width=model.value_dim) for x in (q, k))
    lse = q._replace(width=1, dtype=torch.float32)
    return 2 * area_bytes(ranks, (k, v, lse, q, out, out)) + area_bytes(ranks, (q, k, v))


def host_bytes(job: TrainingJob) -> int:
    """Return the bytes of offloaded checkpoints of one GPU; torch rounds what it pins up to a power of two."""
    pinned = 1 << (layer_input_bytes(job) - 1).bit_length()
    return job.model.num_layers * pinned if job.offload_checkpoints else 0


def block_sizes(job: TrainingJob) -> tuple[int, ...]:
    """Return the numbers of ranks whose keys are gathered at a time."""
    arriving, name = job.seqlen - job.local_tokens, "copy_engine" if job.one_host else "nccl"
    return choose_blocks(
        _shape(job), job.model.num_heads, job.seqlen, arriving, _pairs(job), job.cp_size, _travelling_dtype(job), name
    )


def _keys_in_blocks(job: TrainingJob, buffers: int) -> int:
    """Return the buffer bytes of the zigzag rank with most, in blocks."""
    sizes, heads = block_sizes(job), sections_at_a_time(job).backward
    model, line = job.model, 2 * job.local_tokens * job.model.kv_dim
    state = sum(buffer_heads(heads)) * (1 + model.num_heads / model.num_kv_heads * model.value_dim / model.kv_dim / 2)
    moving = _moving_lines(job.cp_size, sizes, heads, buffers, key_bytes(job))
    return HEADER_BYTES + int(line * (model.num_kv_heads * key_bytes(job) + state * FP32 + moving))


@lru_cache(maxsize=256)
def _moving_lines(cp_size: int, sizes: tuple[int, ...], heads: tuple[int, ...], buffers: int, width: float) -> float:
    """Return the bytes of the buffers of units for each key of a rank and number of a head, on the rank with most.

    A rank sees one of the two chunks of an earlier rank, and both chunks of a later rank. A later rank sees one of this
    rank's chunks, and an earlier rank sees both.
    """
    units = [unit for unit in order_units(len(heads), len(sizes)) if unit.stage is not None]
    ends = [0, *accumulate(sizes)]

    def buffer(halves: list[int], count: int) -> float:
        return sum(buffer_heads(tuple(halves[unit.block] * heads[unit.section] for unit in units), count)) / 2

    def seen(first: int) -> list[int]:
        """Halves of shards of each block, of which those from this distance on are whole."""
        return [stop - start + max(0, stop - max(start, first)) for start, stop in pairwise(ends)]

    return buffer(seen(0), 2) * FP32 + max(
        buffer(seen(rank + 1), buffers) * width + buffer(seen(cp_size - rank), 1) * FP32
        for rank in range(0, cp_size, max(1, cp_size // 64))
    )


def _gathered_keys(job: TrainingJob, rank: int, buffers: int) -> int:
    """Return the buffer bytes of a zigzag rank: rank 0 gathers most keys, the last rank receives most gradients."""
    chunks, seen, returning = 2 * job.cp_size, 2 * job.cp_size - rank, job.cp_size - 1 + rank
    head = 2 * job.seqlen * job.model.kv_dim
    sections, keys = sections_at_a_time(job), head * job.model.num_kv_heads
    if not fits_unbuffered(_shape(job), job.seqlen, _travelling_dtype(job)):
        keys = keys // job.cp_size + sum(shared_buffer_heads(sections, buffers)) * head * seen // chunks
    turns = choose_num_gradient_buffers(
        _shape(job), job.model.num_heads, job.seqlen, _pairs(job), _travelling_dtype(job), sections.backward
    )
    stages = sum(buffer_heads(sections.backward, turns))
    gradients = stages * head + max(sections.backward) * head * returning // chunks
    return HEADER_BYTES + int(keys * key_bytes(job)) + gradients * FP32


def sections_at_a_time(job: TrainingJob) -> Sections:
    """Return the numbers of KV heads that are gathered at a time."""
    return choose_sections(_shape(job), job.model.num_heads, job.seqlen, _travelling_dtype(job), len(block_sizes(job)))


def key_bytes(job: TrainingJob) -> float:
    """Return the bytes of a number of K or V on its way; in FP8 a key and its value have a byte of scales in common."""
    return BF16 if job.fp8_backward is None else 1 + 1 / (2 * job.model.kv_dim)


def _travelling_dtype(job: TrainingJob) -> torch.dtype:
    return torch.bfloat16 if job.fp8_backward is None else torch.uint8


def _pairs(job: TrainingJob) -> int:
    """Return one rank's share of the visible pairs."""
    return int(job.visible_pairs / job.cp_size)


def _shape(job: TrainingJob) -> tuple[int, ...]:
    """Return the shape of half of a rank's K and V."""
    return 1, job.local_tokens, job.model.num_kv_heads, job.model.kv_dim


def _checkpoints(job: TrainingJob) -> int:
    kept = checkpoint_bytes(job)
    if not job.offload_checkpoints:
        return job.model.num_layers * kept
    inputs = layer_input_bytes(job)  # only the current layer's is on the GPU
    return job.model.num_layers * (kept - inputs) + inputs


def _weight_bytes(job: TrainingJob) -> int:
    return FP32 if job.precision == "bf16-mixed" else BF16


def _attention_kept(job: TrainingJob) -> int:
    """Return the bytes of one layer's out and lse."""
    return job.local_tokens * (job.model.out_size * BF16 + job.model.num_heads * FP32)


def _norm_bytes(job: TrainingJob) -> int:
    """Return the bytes that one norm of the hidden states saves."""
    return job.local_tokens * job.model.hidden_size * (2 * BF16 if job.liger else FP32 + 2 * BF16)


def _mlp_bytes(job: TrainingJob) -> int:
    """Return the bytes that one MLP saves, without its input."""
    kept = job.layers.kept
    return int(job.local_tokens * (kept.mlp - (kept.tiled if job.tile_tokens else 0)))


def _kept_bytes(job: TrainingJob, kept: SavedBytes) -> int:
    """Return the bytes that a layer saves; tiles recompute some of them."""
    return int(job.local_tokens * (kept.layer - (kept.tiled if job.tile_tokens else 0)))


def _loss(job: TrainingJob) -> int:
    """Return the bytes of the last norm, its output's gradients, the head's fp32 weight gradient, and a logits chunk.

    Logits exist in bf16, in fp32, and again in fp32 as log-probabilities.
    """
    model = job.model
    chunk = min(job.local_tokens * model.vocab_size, CHUNK_LOGITS) * (BF16 + 2 * FP32)
    input_and_gradient = (1 if job.liger else 2) * layer_input_bytes(job)  # Liger's norm keeps its input
    return _norm_bytes(job) + input_and_gradient + model.embedding_parameters * FP32 + chunk
