"""Search for the longest sequence that fits, and for the cheapest change to a job that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from ringflash.commands.plan.job import Machine, TrainingJob
from ringflash.commands.plan.memory import host_bytes, worst_moment
from ringflash.commands.plan.timing import step_time

CHANGES: dict[str, dict[str, object]] = {
    "use Liger's norms and SwiGLU": {"liger": True},
    "tile the MLP by 8192 tokens": {"mlp_tile_tokens": 8192},
    "keep only attention's (out, lse) of each layer": {"checkpointing": "attention_kept"},
    "keep only each layer's input": {"checkpointing": "full"},
    "offload the checkpoints to the host": {"offload_checkpoints": True},
    "leave the checkpoints on the GPU": {"offload_checkpoints": False},
    "train in bf16-true": {"precision": "bf16-true"},
}
_MOST_CHANGES = 3


def total_bytes(job: TrainingJob, machine: Machine) -> int:
    """Return the bytes that a GPU needs."""
    return sum(worst_moment(job, machine)[1].values())


def bytes_of_a_host(job: TrainingJob, machine: Machine) -> int:
    """Return the bytes that the GPUs of a full host keep in its memory."""
    return host_bytes(job) * min(machine.num_gpus, machine.gpus_per_host)


def fits(job: TrainingJob, machine: Machine) -> bool:
    """Return True if the job fits into the memory of a GPU, and of a host if that is known."""
    limit = machine.host_memory_bytes
    in_host = limit is None or bytes_of_a_host(job, machine) <= limit
    return in_host and total_bytes(job, machine) <= machine.gpu.memory_bytes


def longest_sequence(job: TrainingJob, machine: Machine) -> int:
    """Return the length of the longest sequence that fits, a multiple of 2 * cp_size * 128; 0 if none does."""
    unit = 2 * job.cp_size * 128
    low, high = 0, 1
    while fits(replace(job, seqlen=high * unit), machine):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(replace(job, seqlen=middle * unit), machine):
            low = middle
        else:
            high = middle
    return low * unit


def cheapest_change(job: TrainingJob, machine: Machine) -> tuple[tuple[str, ...], TrainingJob] | None:
    """Return the changes that make the job fit in the fastest step (fewest changes if equal), None if none do.

    The precision, which affects the result of the training, is only changed if nothing else helps.
    """
    fitting = [(names, changed) for names, changed in _changed(job) if fits(changed, machine)]

    def cost(change: tuple[tuple[str, ...], TrainingJob]) -> tuple[bool, float, int]:
        names, changed = change
        return changed.precision != job.precision, step_time(changed, machine).step, len(names)

    return min(fitting, key=cost, default=None)


def fewest_gpus(job: TrainingJob, machine: Machine, most: int = 1024) -> int | None:
    """Double cp_size until the same sequence fits; return the number of GPUs, None if above `most`."""
    while not fits(job, machine):
        if 2 * job.world_size > most or job.seqlen % (4 * job.cp_size):
            return None
        job = replace(job, cp_size=2 * job.cp_size)
        machine = replace(machine, num_gpus=job.world_size)
    return job.world_size


def _changed(job: TrainingJob) -> Iterator[tuple[tuple[str, ...], TrainingJob]]:
    useful = {name: change for name, change in CHANGES.items() if _saves(job, change)}
    for count in range(1, _MOST_CHANGES + 1):
        for names in combinations(useful, count):
            change = {key: value for name in names for key, value in useful[name].items()}
            if change.get("offload_checkpoints") and change.get("checkpointing", job.checkpointing) == "none":
                continue  # there are no checkpoints to offload
            if len(change) == count:  # otherwise two changes set the same option
                yield names, replace(job, **change)  # type: ignore[arg-type]


def _saves(job: TrainingJob, change: dict[str, object]) -> bool:
    if change.get("checkpointing") == "attention_kept" and job.checkpointing == "full":
        return False
    if "mlp_tile_tokens" in change and job.mlp_tile_tokens:
        return False
    if ("mlp_tile_tokens" in change and not job.model.tiled_parameters) or ("liger" in change and not job.model.liger):
        return False
    return any(getattr(job, key) != value for key, value in change.items())
