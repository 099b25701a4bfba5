"""Time of a training step, by part.

If work and messages overlap, the longer of the two counts; the time by which a message exceeds the work is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringflash.commands.plan.job import BF16, FP32, Machine, Rates, TrainingJob
from ringflash.commands.plan.memory import layer_input_bytes
from ringflash.commands.plan.ring import exposed_seconds, ring_of
from ringflash_kernels.api import rounds

_LOGIT_BYTES = 14  # traffic of the loss per logit: bf16, fp32 logarithm and gradient, read and written


@dataclass(frozen=True)
class StepTime:
    """Seconds of each part of a step, and the model FLOP/s of a GPU, which do not include recomputation."""

    parts: dict[str, float]
    model_flops: float

    @property
    def step(self) -> float:
        """Seconds for the whole step."""
        return sum(self.parts.values())


def step_time(job: TrainingJob, machine: Machine) -> StepTime:
    """Return the time of a step at the rates of the machine."""
    model, rates, peak = job.model, machine.rates, machine.gpu.peak_tflops * 1e12
    forward_rate, backward_rate = _attention_rates(job, rates)
    # on one GPU: 6 FLOPs per parameter and token; 4 in the forward per visible pair and feature of a head
    products = 6.0 * model.matmul_parameters * job.local_tokens
    attention = 4.0 * model.mean_size * job.visible_pairs / job.cp_size * model.num_layers
    padded = (model.q_size + model.out_size) / 2 / model.mean_size
    forward = padded * attention / (peak * forward_rate)
    backward = 2.5 * padded * attention / (peak * backward_rate)  # MFU counts the backward as twice the forward
    computed = model.computed_parameters / model.matmul_parameters * products / peak
    in_layers = 1 - model.embedding_parameters / model.matmul_parameters
    layers = in_layers * computed / (rates.products if job.float8 is None else rates.float8_products)
    linear = layers + (1 - in_layers) * computed / rates.products
    again = 1.0 if job.checkpointing != "none" else model.tiled_share / in_layers if job.tile_tokens else 0.0
    passes = rates.expert_passes if model.expert_parameters else rates.passes
    work = forward + backward + linear
    # AdamW reads weights, gradients and two moments, and writes all but the gradients.
    optimizer_bytes = 7 * job.weight_bytes * model.parameters / job.world_size
    exposed = exposed_seconds(ring_of(job, machine), machine, forward / model.num_layers, backward / model.num_layers)
    parts = {
        "attention forward": forward,
        "attention backward": backward,
        "attention again": forward if job.checkpointing == "full" else 0.0,
        "linear": linear,
        "linear again": again * layers / 3,
        "between products": _passed_bytes(job) / (machine.gpu.memory_gbytes * passes * 1e9),
        "ring exposed": model.num_layers * exposed,
        "parameters exposed": _parameters_exposed(job, machine, work),
        "checkpoints exposed": max(0.0, _checkpoints_copied(job, rates) - work),
        "optimizer": optimizer_bytes / (machine.gpu.memory_gbytes * rates.optimizer * 1e9),
    }
    parts["waiting for the host"] = max(0.0, model.num_layers * rates.host_seconds - sum(parts.values()))
    return StepTime(parts, (products + 3 * attention) / sum(parts.values()))


def _attention_rates(job: TrainingJob, rates: Rates) -> tuple[float, float]:
    """Return the fractions of the bf16 peak in the forward and backward of attention."""
    if not rounds(job.impl):
        return rates.attention_forward, rates.attention_backward
    exact, scores, everything = rates.fp8_bf16_backward, rates.fp8_scores_backward, rates.fp8_attention_backward
    of_backward = {"fp8": exact, "fp8_scores": scores, "fp8_all": everything}
    return rates.fp8_attention_forward, of_backward[job.impl.partition("_")[2]]


def _passed_bytes(job: TrainingJob) -> float:
    """Return the bytes that operators between the matmuls read and write on one GPU."""
    model, tokens, layers = job.model, job.local_tokens, job.layers
    layer, sums = layers.forward + layers.backward, 0.0
    if job.checkpointing != "none":
        layer += layers.forward
    elif job.tile_tokens:
        layer += layers.mlp
    if job.tile_tokens:
        sums = -(-tokens // job.tile_tokens) * model.tiled_parameters * (BF16 + 2 * FP32)
    return model.num_layers * (tokens * layer + sums) + tokens * model.vocab_size * _LOGIT_BYTES + _sharded_bytes(job)


def _sharded_bytes(job: TrainingJob) -> float:
    """Return the traffic of FSDP2: copies of gathered parameters (twice, bf16), packed fp32 gradients, cast shards."""
    if job.world_size == 1:
        return 0.0
    whole = 2 * 2 * BF16 + BF16 + FP32
    shard = 2 * (FP32 + BF16) + 2 * FP32
    return job.model.parameters * (whole + shard / job.world_size)


def _parameters_exposed(job: TrainingJob, machine: Machine, work: float) -> float:
    """Return the exposed seconds of FSDP2: two gathers in bf16 and a scatter of fp32 gradients, overlapping `work`."""
    if job.world_size == 1:
        return 0.0
    near, far = machine.gpu.nvlink_gbytes * machine.rates.nvlink, machine.rates.network_gbytes
    num_bytes = job.model.parameters * (2 * BF16 + FP32) * (job.world_size - 1) / job.world_size
    seconds = num_bytes / ((near if machine.num_gpus <= machine.gpus_per_host else far) * 1e9)
    first_and_last = seconds / job.model.num_layers  # the first gather and last scatter overlap with nothing
    return first_and_last + max(0.0, seconds - work)


def _checkpoints_copied(job: TrainingJob, rates: Rates) -> float:
    """Return the seconds to copy checkpoints to the host and back, before any overlap."""
    if not job.offload_checkpoints:
        return 0.0
    return 2 * job.model.num_layers * layer_input_bytes(job) / (rates.host_gbytes * 1e9)
