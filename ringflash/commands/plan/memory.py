"""Peak memory of one GPU in a step, by part.

    forward of all layers | loss | backward, last layer first           | optimizer
                            A      B                                 C    D

A holds all checkpoints, the gradients of the loss, and the gradients of the previous step, which Lightning clears after
the forward. B holds all checkpoints and the working memory of one layer. C holds the last gradients before they are
reduce-scattered. D holds AdamW's temporaries in addition to its moments.
"""

from __future__ import annotations

from ringflash.attention.sections import buffer_sizes
from ringflash.commands.plan.job import BF16, FP32, Machine, TrainingJob
from ringflash.commands.plan.ring import Ring, buffer_bytes, ring_of
from ringflash.commands.plan.trace import SavedBytes
from ringflash.loss import CHUNK_LOGITS


def worst_moment(job: TrainingJob, machine: Machine) -> tuple[str, dict[str, int]]:
    """Return the name of the moment with the most memory, and its bytes by part, including fragmentation."""
    ring = ring_of(job, machine)
    moments = _moments(job, ring)
    name = max(moments, key=lambda x: sum(moments[x].values()))
    parts = moments[name] | {"transport buffers": buffer_bytes(ring)}
    parts["fragmentation"] = int(sum(parts.values()) * machine.rates.fragmentation)
    parts["CUDA and libraries"] = machine.rates.reserved_bytes
    return name, parts


def _moments(job: TrainingJob, ring: Ring) -> dict[str, dict[str, int]]:
    """Return, by the name of each moment, the bytes of the parts that differ between moments."""
    model, alone = job.model, job.world_size == 1
    weights = model.parameters * job.weight_bytes // job.world_size
    root, layer = (0 if alone else x * BF16 for x in (model.root_parameters, model.layer_parameters))
    # gradients of a layer's experts, and of the root, before the reduce-scatter
    leaving, spread = (0 if alone else x * (BF16 + FP32) for x in (model.expert_parameters, model.root_parameters))
    head = model.embedding_parameters * (job.weight_bytes if alone else BF16)  # the gradient, unsharded until C
    summed = weights if job.accumulates else 0  # gradients of earlier sequences
    others = summed or weights - model.layer_parameters * job.weight_bytes // job.world_size
    working = layer_bytes(job, ring)
    checkpoints = model.num_layers * checkpoint_bytes(job)
    if job.offload_checkpoints:  # the current layer's checkpoint is on the GPU, and another one is in transfer
        checkpoints -= (model.num_layers - 2) * layer_input_bytes(job)
    parts = {
        "weights": weights, "gradients": weights, "optimizer": 2 * weights, "gathered parameters": 0, "checkpoints": 0,
        "one layer at work": 0, "loss": 0,
    }  # fmt: skip
    return {
        "the loss": parts | {"gathered parameters": root, "checkpoints": checkpoints, "loss": _loss_bytes(job)},
        "the last layer's backward": parts | {
            "gradients": summed if alone and summed else summed + head,
            "gathered parameters": root + 2 * layer + leaving, "checkpoints": checkpoints,
            "one layer at work": working, "loss": layer_input_bytes(job),
        },
        "the first layer's backward": parts | {
            "gradients": others, "gathered parameters": layer + leaving, "checkpoints": checkpoint_bytes(job),
            "one layer at work": working,
        },
        "the last gradients": parts | {"gathered parameters": spread},
        "the optimizer's step": parts | {"optimizer": 3 * weights},
    }  # fmt: skip


def host_bytes(job: TrainingJob, machine: Machine) -> int:
    """Return the bytes of offloaded checkpoints on a full host. torch rounds pinned sizes up to a power of two."""
    pinned = 1 << (layer_input_bytes(job) - 1).bit_length()
    num_gpus = min(machine.num_gpus, machine.gpus_per_host)
    return num_gpus * job.model.num_layers * pinned if job.offload_checkpoints else 0


def checkpoint_bytes(job: TrainingJob) -> int:
    """Return the bytes that one layer keeps for its backward, averaged over the layers."""
    if job.checkpointing == "none":
        return activation_bytes(job, job.layers.kept_mean)
    return layer_input_bytes(job) + (_attention_kept(job) if job.checkpointing == "attention_kept" else 0)


def layer_input_bytes(job: TrainingJob) -> int:
    """Return the bytes of one rank's hidden states, which offloading moves to the host."""
    return job.local_tokens * job.model.hidden_size * BF16


def activation_bytes(job: TrainingJob, kept: SavedBytes) -> int:
    """Return the bytes that autograd saves in a layer without checkpointing, except shared rotary angles.

    A tiled MLP is recomputed and keeps only its input.
    """
    return int(job.local_tokens * (kept.layer - (kept.mlp if job.tile_tokens else 0)))


def layer_bytes(job: TrainingJob, ring: Ring) -> int:
    """Return the bytes of the largest layer's recomputed activations plus the peak of its backward.

    The peak is in the backward of the MLP, of its norm (three fp32 tensors without Liger), or of attention. Each of
    these starts when the activations of the previous one are freed.
    """
    model, tokens, kept = job.model, job.local_tokens, job.layers.kept
    recomputed = 0
    if job.checkpointing != "none":
        recomputed = activation_bytes(job, kept) - int(tokens * kept.input)
        recomputed -= _attention_kept(job) if job.checkpointing == "attention_kept" else 0
    mlp = gradients = 0 if job.tile_tokens else int(tokens * kept.mlp)  # as large as the activations that it saves
    if job.tile_tokens:  # a tile's activations, sums over tiles, a tile's gradients of experts
        mlp += int(2 * min(job.tile_tokens, tokens) * kept.mlp)
        mlp += model.tiled_parameters * FP32 + min(model.tiled_parameters, model.expert_parameters) * BF16
    norm = tokens * model.hidden_size * (BF16 if job.liger else 3 * FP32) - gradients
    attention = attention_work_bytes(ring) - gradients - _norm_bytes(job)
    return recomputed + max(mlp, norm, attention) + 2 * layer_input_bytes(job)


def attention_work_bytes(ring: Ring) -> int:
    """Return the bytes of gradients in attention's backward: dQ in fp32 and bf16, dO, dK and dV.

    On several ranks, dQ is in fp32 for two sections only.
    """
    model, summed = ring.model, ring.model.q_size
    if ring.cp_size > 1:
        summed = sum(buffer_sizes(ring.sections.backward)) * model.q_size // model.num_kv_heads
    return ring.rows * (summed * FP32 + (model.q_size + model.out_size + 2 * model.kv_size) * BF16)


def _attention_kept(job: TrainingJob) -> int:
    """Return the bytes of one layer's out and lse."""
    return job.local_tokens * (job.model.out_size * BF16 + job.model.num_heads * FP32)


def _norm_bytes(job: TrainingJob) -> int:
    """Return the bytes that one norm of the hidden states saves."""
    return job.local_tokens * job.model.hidden_size * (2 * BF16 if job.liger else FP32 + 2 * BF16)


def _loss_bytes(job: TrainingJob) -> int:
    """Return the bytes of the last norm, its output's gradients, the head's fp32 gradient, and a chunk of logits.

    Logits exist in bf16, in fp32, and again in fp32 as log-probabilities.
    """
    chunk = min(job.local_tokens * job.model.vocab_size, CHUNK_LOGITS) * (BF16 + 2 * FP32)
    input_and_gradient = (1 if job.liger else 2) * layer_input_bytes(job)  # Liger's norm keeps its input
    return _norm_bytes(job) + input_and_gradient + job.model.embedding_parameters * FP32 + chunk
