"""Checkpoints in and out on every rank of one launch; what each rank found goes to <out>/<rank>.json.

    torchrun --nproc_per_node 2 -m tests.recipes.weights_worker <folder> <out>

<folder> holds untied, tied and wrong, checkpoint directories of transformers, and texts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from torch.distributed.tensor import DTensor

from ringflash.lightning import CausalLM
from tests.recipes.strategy_worker import CONFIG, Recorder, data, trainer_with


def started(folder: Path, name: str, save: Path | None = None) -> dict[str, Any]:
    """Loss of the first step from a checkpoint, and how much of the model this rank holds."""
    recorder, module = Recorder(), CausalLM({"attention_dropout": 0.0}, pretrained=str(folder / name))
    trainer = trainer_with(plugins=[DoublePrecision()], limit_val_batches=0, callbacks=[recorder], strategy=strategy())
    trainer.fit(module, datamodule=data(str(folder / "texts")))
    if save is not None:
        trainer.save_checkpoint(save)
    parameters = list(module.parameters())
    return {
        "loss": recorder.metrics[0]["loss"],
        "held": sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor)),
        "all": sum(p.numel() for p in parameters),
    }


def strategy() -> Any:
    """One sequence over both ranks."""
    from ringflash.lightning import ContextParallelStrategy

    return ContextParallelStrategy()


def drawn(seed: int) -> dict[str, float]:
    """Norms of parameters drawn from a seed, shards of both ranks together."""
    module = CausalLM(CONFIG, seed=seed)
    trainer = trainer_with(plugins=[DoublePrecision()], limit_train_batches=0, limit_val_batches=0, strategy=strategy())
    trainer.fit(module, datamodule=data(sys.argv[1] + "/texts"))
    return {name: p.full_tensor().norm().item() for name, p in module.named_parameters()}


def main() -> None:
    """All of it, one after the other."""
    folder, out = map(Path, sys.argv[1:])
    found: dict[str, Any] = {"untied": started(folder, "untied", save=out / "saved.ckpt")}
    found["tied"] = started(folder, "tied")
    found["drawn"] = drawn(seed=5)
    try:
        wrong = folder / ("wrong" if dist.get_rank() == 1 else "untied")
        started(wrong.parent, wrong.name)
    except ValueError as error:
        found["error"] = str(error)
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
