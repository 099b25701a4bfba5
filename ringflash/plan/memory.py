"""Bytes of one GPU at the worst moment of a step, by part.

That moment is the backward of the last layer: all checkpoints still exist, and beside them one layer's activations,
gradients and transients, and the gradient that the loss left; or, where it takes more, the loss's own backward.
"""

from __future__ import annotations

import torch

from ringflash.headwise import Sections, buffer_bytes, gathered_whole, sections_of, shared_turns, taking_turns
from ringflash.loss import CHUNK_LOGITS
from ringflash.ops import MOST_BUFFER_BYTES
from ringflash.plan.job import Job
from ringflash.plan.machine import Machine
from ringflash.transport import MessageMemory, SymmetricMemory

BF16, FP32 = 2, 4


def memory_bytes(job: Job, machine: Machine) -> dict[str, int]:
    """Bytes by part, what is lost to fragmentation included; their sum is to be at most the GPU's."""
    one_host = job.cp_size <= machine.gpus_per_host
    layer = layer_bytes(job, one_host=one_host)
    parts = {
        "weights": job.model.parameters * _weight_bytes(job) // job.world_size,
        "gradients": job.model.parameters * _weight_bytes(job) // job.world_size,
        "optimizer": job.model.parameters * 2 * _weight_bytes(job) // job.world_size,
        "gathered parameters": _gathered(job),
        "checkpoints": _checkpoints(job),
        "one layer at work": layer,
        "loss": job.local_tokens * job.model.hidden_size * BF16 + max(0, _loss(job) - layer),
        "transport buffers": transport_bytes(job, one_host=one_host),
    }
    if job.offload_optimizer:
        parts["optimizer"] = 0
    parts["fragmentation"] = int(sum(parts.values()) * machine.rates.fragmentation)
    parts["CUDA and libraries"] = machine.rates.reserved_bytes
    return parts


def checkpoint_bytes(job: Job) -> int:
    """What the backward of one layer needs of its forward."""
    if job.checkpointing == "none":
        return activation_bytes(job)
    model = job.model
    attention = job.local_tokens * (model.q_size * BF16 + model.num_heads * FP32)
    return layer_input_bytes(job) + (attention if job.checkpointing == "attention_kept" else 0)


def layer_input_bytes(job: Job) -> int:
    """The hidden states of one rank's tokens: what offloading moves to the host."""
    return job.local_tokens * job.model.hidden_size * BF16


def activation_bytes(job: Job) -> int:
    """What autograd keeps of one layer of a transformers model without checkpointing.

    Each norm its input in fp32 and its result twice (before and after the weight), those of q and k once, attention
    q, k, v, out and lse, the MLP four tensors of its width; a tile's MLP is computed again and keeps its input alone.
    Not counted: the rotary angles, which all layers share, and one number for each norm and token.
    """
    model, tokens = job.model, job.local_tokens
    norms = 2 * tokens * model.hidden_size * (FP32 + 2 * BF16)
    if model.qk_norm:
        norms += tokens * (model.q_size + model.kv_size) * (FP32 + BF16)
    attention = tokens * ((2 * model.q_size + 2 * model.kv_size) * BF16 + model.num_heads * FP32)
    mlp = 0 if job.mlp_tile_tokens else 4 * tokens * model.intermediate_size * BF16
    return norms + attention + mlp


def layer_bytes(job: Job, *, one_host: bool = False) -> int:
    """One layer's activations made again, and what its backward holds beside them: attention's or the MLP's.

    `one_host`: as `transport_bytes`. Where keys are gathered by heads dQ is in fp32 for two sections, else for all.
    """
    model, tokens = job.model, job.local_tokens
    kept = 0 if job.checkpointing == "none" else activation_bytes(job)
    summed = model.q_size
    if job.cp_size > 1 and (one_host or _by_heads(job)):
        summed = sum(taking_turns(_sections(job).backward)) * model.q_size // model.num_kv_heads
    attention = tokens * (summed * FP32 + 2 * model.q_size * BF16 + 2 * model.kv_size * BF16)  # dq twice, dout, dk, dv
    tile = min(job.mlp_tile_tokens or tokens, tokens)
    mlp = tile * model.intermediate_size * BF16 * (3 + (4 if job.mlp_tile_tokens else 0))
    return kept + max(attention, mlp) + 2 * layer_input_bytes(job)


def transport_bytes(job: Job, *, one_host: bool = False) -> int:
    """The buffers that all layers share; nothing on one rank.

    By heads, over the copy engine (`one_host`) or NCCL: K/V of the whole sequence where they are small, or else a
    rank's own and those of two sections of heads (NCCL: three); the gradients of two sections, and those of one that
    come home. By hops: own K/V and two that arrive; own gradients, two that leave and one that arrives; and the state
    that a rank's hops hand on.
    """
    if job.cp_size == 1:
        return 0
    model, rows = job.model, job.local_tokens
    shard = 2 * rows * model.kv_size
    if not one_host and not _by_heads(job):
        return shard * (3 * BF16 + 4 * FP32) + rows * model.q_size * FP32
    turns = (SymmetricMemory if one_host else MessageMemory).turns
    return max(_gathered_keys(job, rank, turns) for rank in (0, job.cp_size - 1))


def _by_heads(job: Job) -> bool:
    """Whether NCCL gathers by heads."""
    arriving = job.seqlen - job.local_tokens
    return buffer_bytes(_shape(job), job.model.num_heads, job.seqlen, arriving, torch.bfloat16) <= MOST_BUFFER_BYTES


def _gathered_keys(job: Job, rank: int, buffers: int) -> int:
    """The buffers of a rank of a zigzag layout: the first sees most keys, to the last most return."""
    chunks, seen, returning = 2 * job.cp_size, 2 * job.cp_size - rank, job.cp_size - 1 + rank
    head = 2 * job.seqlen * job.model.head_dim
    sections, keys = _sections(job), head * job.model.num_kv_heads
    if not gathered_whole(_shape(job), job.seqlen, torch.bfloat16):
        keys = keys // job.cp_size + sum(shared_turns(sections, buffers)) * head * seen // chunks
    gradients = sum(taking_turns(sections.backward)) * head + max(sections.backward) * head * returning // chunks
    return keys * BF16 + gradients * FP32


def _sections(job: Job) -> Sections:
    """KV heads that are gathered at a time."""
    return sections_of(_shape(job), job.model.num_heads, job.seqlen, torch.bfloat16)


def _shape(job: Job) -> tuple[int, ...]:
    """Of a rank's K."""
    return 1, job.local_tokens, job.model.num_kv_heads, job.model.head_dim


def _checkpoints(job: Job) -> int:
    kept = checkpoint_bytes(job)
    if not job.offload_checkpoints:
        return job.model.num_layers * kept
    return job.model.num_layers * (kept - layer_input_bytes(job)) + layer_input_bytes(job)


def _weight_bytes(job: Job) -> int:
    return FP32 if job.precision == "bf16-mixed" else BF16


def _gathered(job: Job) -> int:
    """In bf16 two layers (one ahead) and what is in no layer."""
    model = job.model
    return 0 if job.world_size == 1 else (2 * model.layer_parameters + model.root_parameters) * BF16


def _loss(job: Job) -> int:
    """Logits of a chunk in bf16 and fp32 with the gradient in bf16, and the weight's gradient, reduced in fp32."""
    model = job.model
    chunk = min(job.local_tokens * model.vocab_size, CHUNK_LOGITS) * (2 * BF16 + FP32)
    return chunk + model.embedding_parameters * (BF16 + FP32)
