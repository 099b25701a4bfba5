"""Bytes of one GPU at the worst moment of a step, by part.

    forward of all layers | loss | backward, last layer first           | optimizer
                            A      B                                 C    D

A has all checkpoints, the loss's own gradients, and those of the step before, which Lightning clears after the
forward; B all checkpoints and one layer at work; C the last gradients before they are spread over the ranks; D what
AdamW makes beside its moments.
"""

from __future__ import annotations

import torch

from ringflash.attention.custom_op import MOST_BUFFER_BYTES
from ringflash.attention.gather_by_heads import (
    NUMBER_BYTES,
    Sections,
    buffer_bytes,
    gathered_whole,
    sections_of,
    shared_turns,
    stages_of,
    taking_turns,
)
from ringflash.comm.transport import MessageMemory, SymmetricMemory
from ringflash.commands.plan.job import Job
from ringflash.commands.plan.kept import Kept
from ringflash.commands.plan.machine import Machine
from ringflash.loss import CHUNK_LOGITS

BF16, FP32 = 2, 4


def memory_bytes(job: Job, machine: Machine) -> dict[str, int]:
    """Bytes by part at the worst moment, fragmentation included; their sum is to be at most the GPU's."""
    return worst_moment(job, machine)[1]


def worst_moment(job: Job, machine: Machine) -> tuple[str, dict[str, int]]:
    """Its name, and `memory_bytes`."""
    one_host = machine.keeps_on_a_host(job.cp_size)
    moments = _moments(job, one_host)
    name = max(moments, key=lambda x: sum(moments[x].values()))
    parts = moments[name] | {"transport buffers": transport_bytes(job, one_host=one_host)}
    parts["fragmentation"] = int(sum(parts.values()) * machine.rates.fragmentation)
    parts["CUDA and libraries"] = machine.rates.reserved_bytes
    return name, parts


def _moments(job: Job, one_host: bool) -> dict[str, dict[str, int]]:
    """What differs between moments, by their names."""
    model, alone = job.model, job.world_size == 1
    weights = model.parameters * _weight_bytes(job) // job.world_size
    states = 0 if job.offload_optimizer else 2 * weights  # AdamW's two
    root, layer = (0 if alone else x * BF16 for x in (model.root_parameters, model.layer_parameters))
    leaving = 0 if alone else model.expert_parameters * (BF16 + FP32)  # gradients of a layer's experts, to be spread
    summed = weights if job.accumulates else 0  # over the sequences before
    others = summed or weights - model.layer_parameters * _weight_bytes(job) // job.world_size
    at_work = layer_bytes(job, one_host=one_host)
    moving = layer_input_bytes(job) if job.offload_checkpoints else 0  # the last one that left; the next that comes
    head = model.embedding_parameters * (_weight_bytes(job) if alone else BF16)  # its gradient, whole until C
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


def checkpoint_bytes(job: Job) -> int:
    """What the backward of one layer needs of its forward, the mean of all layers."""
    if job.checkpointing == "none":
        return _kept_bytes(job, job.layers.kept_mean)
    return layer_input_bytes(job) + (_attention_kept(job) if job.checkpointing == "attention_kept" else 0)


def layer_input_bytes(job: Job) -> int:
    """The hidden states of one rank's tokens: what offloading moves to the host."""
    return job.local_tokens * job.model.hidden_size * BF16


def activation_bytes(job: Job) -> int:
    """What autograd keeps of the layer that keeps most, without checkpointing; rotary angles, shared, not counted.

    A tile's MLP is computed again and keeps only its input.
    """
    return _kept_bytes(job, job.layers.kept)


def layer_bytes(job: Job, *, one_host: bool = False) -> int:
    """One layer's activations made again, and the most that its backward holds beside them.

    First the MLP's, then its norm's, which without Liger makes three tensors in fp32; then attention's, whose own
    are left by then. `one_host`: as `transport_bytes`.
    """
    model, tokens, layers = job.model, job.local_tokens, job.layers
    kept = 0 if job.checkpointing == "none" else activation_bytes(job) - int(tokens * layers.kept.input)
    if job.checkpointing == "attention_kept":
        kept -= _attention_kept(job)
    mlp = _mlp_bytes(job)
    if job.tile_tokens:  # a tile's own, sums over tiles, and of experts a tile's gradients
        mlp += int(2 * min(job.tile_tokens, tokens) * layers.kept.tiled)
        mlp += model.tiled_parameters * FP32 + min(model.tiled_parameters, model.expert_parameters) * BF16
    norm = tokens * model.hidden_size * (BF16 if job.liger else 3 * FP32) - _mlp_bytes(job)
    attention = attention_work_bytes(job, one_host=one_host) - _mlp_bytes(job) - _norm_bytes(job)
    return kept + max(mlp, norm, attention) + 2 * layer_input_bytes(job)


def attention_work_bytes(job: Job, *, one_host: bool = False) -> int:
    """Gradients in attention's backward: dQ in fp32 and bf16, dO, dK and dV.

    `one_host`: as `transport_bytes`. Where keys are gathered by heads dQ is in fp32 for two sections, else for all.
    """
    model, summed = job.model, job.model.q_size
    if job.cp_size > 1 and (one_host or by_heads(job)):
        summed = sum(taking_turns(sections_at_a_time(job).backward)) * model.q_size // model.num_kv_heads
    return job.local_tokens * (summed * FP32 + 2 * model.q_size * BF16 + 2 * model.kv_size * BF16)


def transport_bytes(job: Job, *, one_host: bool = False) -> int:
    """The buffers that all layers share; nothing on one rank.

    By heads, over the copy engine (`one_host`) or NCCL: K/V of the whole sequence where they are small, or else a
    rank's own and those of two sections of heads (NCCL: three); the gradients of two sections, or of more where links
    are to sleep, and those of one that come home. By hops: own K/V and two that arrive; own gradients, two that leave
    and one that arrives; and the state that a rank's hops hand on.
    """
    if job.cp_size == 1:
        return 0
    model, rows = job.model, job.local_tokens
    shard = 2 * rows * model.kv_size
    if not one_host and not by_heads(job):
        return shard * (3 * BF16 + 4 * FP32) + rows * model.q_size * FP32
    turns = (SymmetricMemory if one_host else MessageMemory).turns
    return max(_gathered_keys(job, rank, turns) for rank in (0, job.cp_size - 1))


def host_bytes(job: Job) -> int:
    """What one GPU's process keeps in its host's memory.

    Offloaded checkpoints are pinned, and torch rounds what it pins up to a power of two. Of an offloaded optimizer the
    fp32 weights and moments are counted, not what DeepSpeed has beside them.
    """
    pinned = 1 << (layer_input_bytes(job) - 1).bit_length()
    checkpoints = job.model.num_layers * pinned if job.offload_checkpoints else 0
    return checkpoints + (3 * FP32 * job.model.parameters // job.world_size if job.offload_optimizer else 0)


def by_heads(job: Job) -> bool:
    """Whether NCCL gathers by heads."""
    arriving = job.seqlen - job.local_tokens
    held = buffer_bytes(_shape(job), job.model.num_heads, job.seqlen, arriving, _pairs(job), torch.bfloat16)
    return held <= MOST_BUFFER_BYTES


def _gathered_keys(job: Job, rank: int, buffers: int) -> int:
    """The buffers of a rank of a zigzag layout: the first sees most keys, to the last most return."""
    chunks, seen, returning = 2 * job.cp_size, 2 * job.cp_size - rank, job.cp_size - 1 + rank
    head = 2 * job.seqlen * job.model.head_dim
    sections, keys = sections_at_a_time(job), head * job.model.num_kv_heads
    if not gathered_whole(_shape(job), job.seqlen, torch.bfloat16):
        keys = keys // job.cp_size + sum(shared_turns(sections, buffers)) * head * seen // chunks
    turns = stages_of(_shape(job), job.model.num_heads, job.seqlen, _pairs(job), torch.bfloat16, sections.backward)
    stages = sum(taking_turns(sections.backward, turns))
    gradients = stages * head + max(sections.backward) * head * returning // chunks
    return NUMBER_BYTES + keys * BF16 + gradients * FP32


def sections_at_a_time(job: Job) -> Sections:
    """KV heads that are gathered at a time."""
    return sections_of(_shape(job), job.model.num_heads, job.seqlen, torch.bfloat16)


def _pairs(job: Job) -> int:
    """Visible ones, a rank's part of them."""
    return int(job.visible_pairs / job.cp_size)


def _shape(job: Job) -> tuple[int, ...]:
    """Of a rank's K."""
    return 1, job.local_tokens, job.model.num_kv_heads, job.model.head_dim


def _checkpoints(job: Job) -> int:
    kept = checkpoint_bytes(job)
    if not job.offload_checkpoints:
        return job.model.num_layers * kept
    return job.model.num_layers * (kept - layer_input_bytes(job)) + layer_input_bytes(job)  # of the layer at work


def _weight_bytes(job: Job) -> int:
    return FP32 if job.precision == "bf16-mixed" else BF16


def _attention_kept(job: Job) -> int:
    """Of one layer's attention: out and lse."""
    return job.local_tokens * (job.model.q_size * BF16 + job.model.num_heads * FP32)


def _norm_bytes(job: Job) -> int:
    """Of one norm of the hidden states."""
    return job.local_tokens * job.model.hidden_size * (2 * BF16 if job.liger else FP32 + 2 * BF16)


def _mlp_bytes(job: Job) -> int:
    """Of one MLP, its input not counted."""
    kept = job.layers.kept
    return int(job.local_tokens * (kept.mlp - (kept.tiled if job.tile_tokens else 0)))


def _kept_bytes(job: Job, kept: Kept) -> int:
    """Of a layer, without what tiles leave out."""
    return int(job.local_tokens * (kept.layer - (kept.tiled if job.tile_tokens else 0)))


def _loss(job: Job) -> int:
    """The last norm, the gradients of what it puts out and, in fp32, of the head's weight; a chunk's logits.

    These are in bf16, in fp32, and again in fp32 as logarithms of probabilities.
    """
    model = job.model
    chunk = min(job.local_tokens * model.vocab_size, CHUNK_LOGITS) * (BF16 + 2 * FP32)
    input_and_gradient = (1 if job.liger else 2) * layer_input_bytes(job)  # Liger's norm keeps its input
    return _norm_bytes(job) + input_and_gradient + model.embedding_parameters * FP32 + chunk
