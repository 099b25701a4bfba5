"""Seconds of a training step, by part.

Work and messages that run side by side count as the longer of the two; what a message takes beyond the work it runs
beside is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringflash.commands.plan.job import Job
from ringflash.commands.plan.machine import Machine
from ringflash.commands.plan.memory import BF16, FP32, layer_input_bytes
from ringflash.loss import CHUNK_LOGITS


@dataclass(frozen=True)
class StepTime:
    """Seconds of each part; the step is their sum.

    Args:
        mfu: model FLOP/s over the peak; what is computed again does not count.
        model_tflops: per GPU and second.
    """

    parts: dict[str, float]
    model_tflops: float
    mfu: float

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())


def step_time(job: Job, machine: Machine) -> StepTime:
    """Time of a step by the machine's rates."""
    peak, rates = machine.gpu.peak_tflops * 1e12, machine.rates
    padded = job.model.q_size / job.model.mean_size
    forward = padded * attention_flops(job) / (peak * rates.attention_forward)
    backward = 2.5 * padded * attention_flops(job) / (peak * rates.attention_backward)
    dense = rates.linear_with_liger if job.liger else rates.linear
    products = dense if job.model.passed is None else rates.products
    linear = job.model.computed_parameters / job.model.matmul_parameters * linear_flops(job) / (peak * products)
    parts = {
        "attention forward": forward,
        "attention backward": backward,
        "attention again": forward if job.checkpointing == "full" else 0.0,
        "linear": linear,
        "linear again": 0.0 if job.checkpointing == "none" else _layer_share(job) * linear / 3,
        "between products": _passed_bytes(job) / (machine.gpu.memory_gbytes * rates.passes * 1e9),
        "ring exposed": _ring_exposed(job, machine, forward, backward),
        "parameters exposed": _parameters_exposed(job, machine, forward + backward + linear),
        "checkpoints exposed": max(0.0, _checkpoints_copied(job, machine) - forward - backward - linear),
        "optimizer": _optimizer(job, machine),
    }
    parts["waiting for the host"] = max(0.0, job.model.num_layers * rates.host_seconds - sum(parts.values()))
    # 2.5 times the forward are computed backward, but the model's own products are twice the forward's.
    useful = (linear_flops(job) + 3 * attention_flops(job)) / sum(parts.values())
    return StepTime(parts, useful / 1e12, useful / peak)


def linear_flops(job: Job) -> float:
    """Of one GPU's matrix products, forward and backward: 6 for each parameter and token."""
    return 6.0 * job.model.matmul_parameters * job.local_tokens


def attention_flops(job: Job) -> float:
    """Of one GPU's attention, forward: 4 for each visible pair and feature of a head."""
    return 4.0 * job.model.mean_size * job.visible_pairs / job.cp_size * job.model.num_layers


def _layer_share(job: Job) -> float:
    """Part of the matrix products that lies in layers, and is computed again."""
    return job.model.num_layers * job.model.layer_matrix_parameters / job.model.matmul_parameters


def _passed_bytes(job: Job) -> float:
    """What operators between the products read and write on one GPU, where the rate of those does not include it."""
    model, tokens = job.model, job.local_tokens
    if model.passed is None:
        return 0.0
    times = 1 if job.checkpointing == "none" else 2
    layer = times * model.passed.forward + model.passed.backward
    sums = 0.0
    if job.tile_tokens:
        layer += model.passed.tiled if job.checkpointing == "none" else 0.0
        sums = -(-tokens // job.tile_tokens) * model.tiled_parameters * (BF16 + 2 * FP32)
    loss = tokens * model.vocab_size * 14 + -(-tokens * model.vocab_size // CHUNK_LOGITS) * _head_sums(job)
    return model.num_layers * (tokens * layer + sums) + loss + _sharded_bytes(job)


def _head_sums(job: Job) -> int:
    """Of a chunk of the loss: gradients of the head's weight, read and written in fp32."""
    return job.model.embedding_parameters * 2 * FP32


def _sharded_bytes(job: Job) -> float:
    """FSDP2's own: parameters of two gathers put in place in bf16, gradients packed in fp32; shards cast."""
    if job.world_size == 1:
        return 0.0
    whole = 2 * 2 * BF16 + BF16 + FP32
    shard = 2 * (FP32 + BF16) + 2 * FP32
    return job.model.parameters * (whole + shard / job.world_size)


def _ring_exposed(job: Job, machine: Machine, forward: float, backward: float) -> float:
    """What a hop's messages take beyond the hop's kernel, over all hops of all layers."""
    hops = job.cp_size - 1
    if hops == 0:
        return 0.0
    shard = 2 * job.local_tokens * job.model.kv_size
    far = _far_hops(job, machine)
    exposed = 0.0
    for kernel, num_bytes in ((forward, shard * BF16), (backward, shard * (BF16 + FP32))):
        kernel /= job.model.num_layers * job.cp_size
        near = num_bytes / (machine.gpu.nvlink_gbytes * machine.rates.nvlink * 1e9)
        away = num_bytes / (machine.network_gbytes * machine.rates.nvlink * 1e9)
        if job.ring == "double":  # a host's hops hide one message from the next host
            inside = min(job.cp_size, machine.gpus_per_host)
            exposed += hops * max(0.0, near - kernel) + far / inside * max(0.0, away - inside * kernel)
        else:
            exposed += (hops - far) * max(0.0, near - kernel) + far * max(0.0, away - kernel)
    return exposed * job.model.num_layers


def _far_hops(job: Job, machine: Machine) -> int:
    """Hops on which some rank reads from another host, whom the others wait for."""
    return 0 if machine.keeps_on_a_host(job.cp_size) else job.cp_size - 1


def _parameters_exposed(job: Job, machine: Machine, work: float) -> float:
    """Layers gathered twice in bf16 and their gradients scattered in fp32, beside the layers' work."""
    if job.world_size == 1:
        return 0.0
    bandwidth = machine.gpu.nvlink_gbytes if machine.num_hosts == 1 else machine.network_gbytes
    num_bytes = job.model.parameters * (2 * BF16 + FP32) * (job.world_size - 1) / job.world_size
    seconds = num_bytes / (bandwidth * machine.rates.nvlink * 1e9)
    first_and_last = seconds / job.model.num_layers  # nothing runs beside the first gather and the last scatter
    return first_and_last + max(0.0, seconds - work)


def _checkpoints_copied(job: Job, machine: Machine) -> float:
    """To the host and back, beside the layers' work."""
    if not job.offload_checkpoints:
        return 0.0
    return 2 * job.model.num_layers * layer_input_bytes(job) / (machine.host_gbytes * 1e9)


def _optimizer(job: Job, machine: Machine) -> float:
    """AdamW reads weights, gradients and moments and writes all but the gradients; on the host, over its link."""
    width = FP32 if job.precision == "bf16-mixed" else BF16
    shard = job.model.parameters / job.world_size
    if job.offload_optimizer:
        return shard * 2 * width / (machine.host_gbytes * 1e9)
    return shard * 7 * width / (machine.gpu.memory_gbytes * machine.rates.optimizer * 1e9)
