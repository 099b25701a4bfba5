"""Time of a training step, by part.

If work and messages overlap, the longer of the two counts; the time by which a message exceeds the work is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ringflash.attention.sections import order_units
from ringflash.commands.plan.job import Machine, Rates, TrainingJob
from ringflash.commands.plan.memory import BF16, FP32, block_sizes, key_bytes, layer_input_bytes, sections_at_a_time

_LOGIT_BYTES = 14  # traffic of the loss per logit: bf16, fp32 logarithm and gradient, read and written


@dataclass(frozen=True)
class StepTime:
    """Seconds of each part; the step is their sum.

    Args:
        mfu: model FLOP/s over the peak; recomputation does not count.
        model_tflops: model TFLOP/s per GPU.
    """

    parts: dict[str, float]
    model_tflops: float
    mfu: float

    @property
    def step(self) -> float:
        """Seconds for the whole step."""
        return sum(self.parts.values())


def step_time(job: TrainingJob, machine: Machine) -> StepTime:
    """Return the time of a step at the rates of the machine."""
    peak, rates = machine.gpu.peak_tflops * 1e12, machine.rates
    padded = (job.model.q_size + job.model.out_size) / 2 / job.model.mean_size
    forward_rate, backward_rate = _attention_rates(job, rates)
    forward = padded * attention_flops(job) / (peak * forward_rate)
    backward = 2.5 * padded * attention_flops(job) / (peak * backward_rate)
    linear = job.model.computed_parameters / job.model.matmul_parameters * linear_flops(job) / (peak * rates.products)
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
    # The backward kernels compute 2.5 times the FLOPs of the forward, but MFU counts only twice.
    useful = (linear_flops(job) + 3 * attention_flops(job)) / sum(parts.values())
    return StepTime(parts, useful / 1e12, useful / peak)


def _attention_rates(job: TrainingJob, rates: Rates) -> tuple[float, float]:
    """Return the fractions of the bf16 peak in the forward and backward of attention."""
    if job.fp8_backward is None:
        return rates.attention_forward, rates.attention_backward
    of_backward = {
        "bf16": rates.fp8_bf16_backward,
        "fp8_scores": rates.fp8_scores_backward,
        "fp8": rates.fp8_attention_backward,
    }
    return rates.fp8_attention_forward, of_backward[job.fp8_backward]


def linear_flops(job: TrainingJob) -> float:
    """Return the FLOPs of one GPU's matmuls, forward and backward: 6 per parameter and token."""
    return 6.0 * job.model.matmul_parameters * job.local_tokens


def attention_flops(job: TrainingJob) -> float:
    """Return the FLOPs of one GPU's attention, forward: 4 per visible pair and feature of a head."""
    return 4.0 * job.model.mean_size * job.visible_pairs / job.cp_size * job.model.num_layers


def _layer_share(job: TrainingJob) -> float:
    """Return the fraction of the matmuls that is in layers, and is therefore recomputed."""
    return job.model.num_layers * job.model.layer_matrix_parameters / job.model.matmul_parameters


def _passed_bytes(job: TrainingJob) -> float:
    """Return the bytes that operators between the matmuls read and write on one GPU."""
    model, tokens, passed = job.model, job.local_tokens, job.layers.passed
    times = 1 if job.checkpointing == "none" else 2
    layer = times * passed.forward + passed.backward
    sums = 0.0
    if job.tile_tokens:
        layer += passed.tiled if job.checkpointing == "none" else 0.0
        sums = -(-tokens // job.tile_tokens) * model.tiled_parameters * (BF16 + 2 * FP32)
    return model.num_layers * (tokens * layer + sums) + tokens * model.vocab_size * _LOGIT_BYTES + _sharded_bytes(job)


def _sharded_bytes(job: TrainingJob) -> float:
    """Return the traffic of FSDP2: copies of gathered parameters (twice, bf16), packed fp32 gradients, cast shards."""
    if job.world_size == 1:
        return 0.0
    whole = 2 * 2 * BF16 + BF16 + FP32
    shard = 2 * (FP32 + BF16) + 2 * FP32
    return job.model.parameters * (whole + shard / job.world_size)


def _ring_exposed(job: TrainingJob, machine: Machine, forward: float, backward: float) -> float:
    """Return the seconds that attention kernels wait for messages, over all layers.

    Of an exchange of heads, only that of the queries is hidden, by the arrival of keys from other hosts.
    """
    if job.cp_size == 1:
        return 0.0
    layers, job = job.model.num_layers, job.on(machine)
    rail, flat = job.rail, job.exchanging == 1
    numbers = 2 * (rail.seqlen - rail.local_tokens) * rail.model.kv_size  # rank 0 sees those of all others
    keys, gradients = numbers * key_bytes(rail), numbers * FP32  # the last rank owns what all others see
    arrive, leave = (_seconds_moved(rail, machine, num_bytes, flat=flat) for num_bytes in (keys, gradients))
    sections, blocks = sections_at_a_time(rail), block_sizes(rail)
    q, out, k = (
        _exchange_seconds(job, machine, x) for x in (rail.model.q_size, rail.model.out_size, rail.model.kv_size)
    )
    exposed = 0.0
    for kernels, heads, returned, queries, results in (
        (forward / layers, sections.forward, 0.0, q, out),
        (backward / layers, sections.backward, leave, q + 2 * out, q + 2 * k),
    ):
        end = pipeline_seconds(heads, blocks, arrive, returned, kernels, queries)
        exposed += 2 * k + end - kernels + results
    return layers * exposed


def pipeline_seconds(
    heads: tuple[int, ...], blocks: tuple[int, ...], arrive: float, leave: float, kernels: float, queries: float = 0.0
) -> float:
    """Return the seconds of one pass of an all-gather by heads, whose kernels and messages overlap.

    Messages have one order: the keys of the next unit are ahead of the gradients of this one.

    Args:
        heads: KV heads of each section.
        blocks: distances of each block; of several, the first has the rank's own keys, which do not travel.
        arrive: seconds of all messages with keys.
        leave: seconds of all messages with gradients; 0 in a forward.
        kernels: seconds of all kernels.
        queries: seconds until the queries are there.
    """
    units, travelling = order_units(len(heads), len(blocks)), sum(blocks[1:]) or blocks[0]
    work = [heads[unit.section] * blocks[unit.block] / sum(heads) for unit in units]
    moved = [share / travelling for unit, share in zip(units, work, strict=True) if unit.stage is not None]
    link = arrived = moved[0] * arrive
    device = queries
    for unit, share in zip(units, work, strict=True):
        if unit.stage is not None:
            device = max(device, arrived)
        device += share / sum(blocks) * kernels
        if unit.stage is not None:
            link = arrived = link + (moved[unit.stage + 1] * arrive if unit.stage + 1 < len(moved) else 0.0)
            if leave:
                link = max(link, device) + moved[unit.stage] * leave
    return max(link, device)


def _exchange_seconds(job: TrainingJob, machine: Machine, size: int) -> float:
    """Return the seconds to exchange one tensor inside a host, `size` elements for each row of the host."""
    num_bytes = size * job.rail.local_tokens * BF16 * (1 - 1 / job.exchanging)
    return num_bytes / (machine.gpu.nvlink_gbytes * machine.rates.copies * 1e9)


def _seconds_moved(job: TrainingJob, machine: Machine, num_bytes: float, *, flat: bool) -> float:
    """Return the seconds to receive these bytes from all other ranks; NVLink and the network work in parallel.

    Args:
        flat: ranks of one host are among them.
    """
    rates, others = machine.rates, job.cp_size - 1
    if job.one_host:
        return num_bytes / (machine.gpu.nvlink_gbytes * rates.copies * 1e9)
    near = gcd(job.cp_size, machine.gpus_per_host) - 1 if flat else 0  # on the host with the fewest ranks of a ring
    return (
        num_bytes
        / others
        * max(
            near / (machine.gpu.nvlink_gbytes * rates.nvlink * 1e9),
            (others - near) / (rates.network_gbytes * 1e9),
        )
    )


def _parameters_exposed(job: TrainingJob, machine: Machine, work: float) -> float:
    """Return the exposed seconds of FSDP2: two gathers in bf16 and a scatter of fp32 gradients, overlapping `work`."""
    if job.world_size == 1:
        return 0.0
    near, far = machine.gpu.nvlink_gbytes * machine.rates.nvlink, machine.rates.network_gbytes
    num_bytes = job.model.parameters * (2 * BF16 + FP32) * (job.world_size - 1) / job.world_size
    seconds = num_bytes / ((near if machine.num_gpus <= machine.gpus_per_host else far) * 1e9)
    first_and_last = seconds / job.model.num_layers  # the first gather and last scatter overlap with nothing
    return first_and_last + max(0.0, seconds - work)


def _checkpoints_copied(job: TrainingJob, machine: Machine) -> float:
    """Return the seconds to copy checkpoints to the host and back, before any overlap."""
    if not job.offload_checkpoints:
        return 0.0
    return 2 * job.model.num_layers * layer_input_bytes(job) / (machine.rates.host_gbytes * 1e9)


def _optimizer(job: TrainingJob, machine: Machine) -> float:
    """Return the seconds in which AdamW reads weights, gradients and moments, and writes all but the gradients."""
    width = FP32 if job.precision == "bf16-mixed" else BF16
    moved = 7 * width * job.model.parameters / job.world_size
    return moved / (machine.gpu.memory_gbytes * machine.rates.optimizer * 1e9)
