"""ms-swift's `swift sft` and `swift pt` on a ring: copy this file (docs/other-trainers.md).

    export ACCELERATE_USE_PARALLELISM_CONFIG=true PARALLELISM_CONFIG_CP_BACKEND=ringflash PARALLELISM_CONFIG_CP_SIZE=8
    NPROC_PER_NODE=8 swift sft --external_plugins swift_ring.py --use_logits_to_keep false --attn_impl eager ...

`ringflash.accelerate` does the work. ms-swift's own loader, and the factor of its loss, count processes where they must
count rings.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from swift.dataloader import BatchSamplerShard
from swift.trainers import Seq2SeqTrainer

import ringflash.accelerate

SIZE = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", 1))
_own_loader, _own_loss = Seq2SeqTrainer.get_train_dataloader, Seq2SeqTrainer.compute_loss


class _CountingRings:
    """An accelerator whose number of processes is that of its rings."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.num_processes = accelerator.num_processes // SIZE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def compute_loss(self: Any, *args: Any, **options: Any) -> Any:
    """Return ms-swift's loss, which it multiplies by the number of processes."""
    accelerator = self.accelerator
    self.accelerator = _CountingRings(accelerator)
    try:
        return _own_loss(self, *args, **options)
    finally:
        self.accelerator = accelerator


def get_train_dataloader(self: Any, *args: Any, **options: Any) -> Any:
    """Seed the workers of a ring's loaders alike."""
    loader = _own_loader(self, *args, **options)
    seed = getattr(loader, "worker_init_fn", None)
    if seed is None:
        raise NotImplementedError(
            "streaming must be False on a ring, got a loader that sends each rank other rows; leave --streaming out."
        )
    loader.worker_init_fn = partial(seed, rank=self.args.process_index // SIZE)
    return loader


if not version("ms-swift").startswith("4.6."):
    raise RuntimeError(f"ms-swift must be 4.6, got {version('ms-swift')}; this file changes functions of that release.")
if SIZE < 2:
    raise RuntimeError(
        "PARALLELISM_CONFIG_CP_SIZE must be 2 or more, with ACCELERATE_USE_PARALLELISM_CONFIG=true and "
        f"PARALLELISM_CONFIG_CP_BACKEND=ringflash, got {SIZE}; leave swift_ring.py out without a ring."
    )
ringflash.accelerate.register()
BatchSamplerShard.rank = property(lambda self: dist.get_rank() // SIZE)
BatchSamplerShard.world_size = property(lambda self: dist.get_world_size() // SIZE)
Seq2SeqTrainer.compute_loss = compute_loss
Seq2SeqTrainer.get_train_dataloader = get_train_dataloader
