"""Temporary seeding of torch's random number generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of the CPU and the current GPU with `seed`, and restore their states on exit."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        yield


@contextmanager
def seeded_by_rank(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of `device` by the CPU's state and the rank, as dropout on shards needs.

    Ranks that were seeded alike draw different numbers inside, and are in equal states again afterwards: those from
    before, or the CPU's next one if any number was drawn. From equal states the same numbers are drawn again, which
    activation checkpointing relies on.

    Args:
        group: ranks that share a sequence; None changes nothing.
    """
    if group is None:
        yield
        return
    generators = generators_of(device)
    before = [x.get_state() for x in generators]
    seed = int(torch.randint(1 << 62, (), device="cpu"))
    after = [torch.default_generator.get_state(), *before[1:]]
    for generator in generators:
        generator.manual_seed(seed + group.rank())
    fresh = [x.get_state() for x in generators]
    try:
        yield
    finally:
        drawn = any(not torch.equal(x.get_state(), y) for x, y in zip(generators, fresh, strict=True))
        for generator, state in zip(generators, after if drawn else before, strict=True):
            generator.set_state(state)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generators of random numbers for work on a device: those of the CPU and of the device."""
    on_gpu = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
    return [torch.default_generator, *on_gpu]
