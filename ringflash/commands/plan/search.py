"""Search for the longest sequence that fits, and for the cheapest change to a job that does not fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from ringflash.commands.plan.job import Machine, TrainingJob
from ringflash.commands.plan.memory import worst_moment
from ringflash.commands.plan.timing import step_time

CHANGES: dict[str, dict[str, object]] = {
    "use Liger's norms and SwiGLU": {"liger": True},
    "tile the MLP by 8192 tokens": {"mlp_tile_tokens": 8192},
    "keep only attention's (out, lse) of each layer": {"checkpointing": "attention_kept"},
    "keep only each layer's input": {"checkpointing": "full"},
    "offload the checkpoints to the host": {"offload_checkpoints": True},
    "train in bf16-true": {"precision": "bf16-true"},
}
_MOST_CHANGES = 3
_MOST_TOKENS = 1 << 40
_MOST_GPUS = 1024


def fits(job: TrainingJob, machine: Machine) -> bool:
    """Return True if the job fits into the memory of a GPU."""
    return sum(worst_moment(job, machine)[1].values()) <= machine.gpu.memory_bytes


def longest_sequence(job: TrainingJob, machine: Machine) -> int:
    """Return the length of the longest sequence that fits, a multiple of 2 * cp_size * 128; 0 if none does."""
    unit = 2 * job.cp_size * 128
    lengths = range(unit, _MOST_TOKENS, unit)
    return unit * bisect_left(lengths, True, key=lambda seqlen: not fits(replace(job, seqlen=seqlen), machine))


def cheapest_change(job: TrainingJob, machine: Machine) -> tuple[tuple[str, ...], TrainingJob] | None:
    """Return the changes that make the job fit in the fastest step (fewest changes if equal), None if none do.

    The precision, which affects the result of the training, is only changed if nothing else helps.
    """
    fitting = [(names, changed) for names, changed in _changed(job) if fits(changed, machine)]

    def cost(change: tuple[tuple[str, ...], TrainingJob]) -> tuple[bool, float, int]:
        names, changed = change
        return changed.precision != job.precision, step_time(changed, machine).step, len(names)

    return min(fitting, key=cost, default=None)


def fastest_split(job: TrainingJob, machine: Machine) -> TrainingJob | None:
    """Return the job with the cp_size that trains most tokens a second among those that fit, None if none does.

    All other GPUs take further sequences, so a smaller cp_size also means more sequences in a step.
    """
    sizes = (size for size in range(1, machine.num_gpus + 1) if machine.num_gpus % size == 0)
    jobs = [replace(job, cp_size=n, dp_size=machine.num_gpus // n) for n in sizes if job.seqlen % (2 * n) == 0]
    fitting = [x for x in jobs if fits(x, machine)]
    return max(fitting, key=lambda x: x.dp_size / step_time(x, machine).step, default=None)


def fewest_gpus(job: TrainingJob, machine: Machine) -> int | None:
    """Double cp_size until the same sequence fits; return the number of GPUs, None if it is above 1024."""
    while not fits(job, machine):
        if 2 * job.world_size > _MOST_GPUS or job.seqlen % (4 * job.cp_size):
            return None
        job = replace(job, cp_size=2 * job.cp_size)
        machine = replace(machine, num_gpus=job.world_size)
    return job.world_size


def _changed(job: TrainingJob) -> Iterator[tuple[tuple[str, ...], TrainingJob]]:
    """Yield the names of up to three changes, and the changed job, unless it would be refused."""
    for count in range(1, _MOST_CHANGES + 1):
        for names in combinations(CHANGES, count):
            change = {key: value for name in names for key, value in CHANGES[name].items()}
            if len(change) == count:  # otherwise two changes set the same option
                with suppress(ValueError, NotImplementedError):
                    yield names, replace(job, **change)  # type: ignore[arg-type]
