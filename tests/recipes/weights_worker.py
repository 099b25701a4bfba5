"""Checkpoints in and out on two ranks, for test_weights.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from lightning import Callback
from lightning.pytorch.plugins import DoublePrecision
from torch.distributed.tensor import DTensor

from ringflash.lightning import CausalLM, ContextParallelStrategy
from ringflash.memory import Memory
from tests.helpers.pool import Context
from tests.recipes.launching import error_of
from tests.recipes.test_strategy import CONFIG, Recorder, data, trainer_with


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The number of values of every read from a safetensors file."""
    reads: list[int] = []
    opened = safetensors.safe_open

    class Slice:
        def __init__(self, of: Any) -> None:
            self.get_shape, self.of = of.get_shape, of

        def __getitem__(self, index: Any) -> torch.Tensor:
            part = self.of[index]
            reads.append(part.numel())
            return part

    class File:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = opened(*args, **options)

        def __enter__(self) -> File:
            entered = self.file.__enter__()
            self.keys, self.get_slice = entered.keys, lambda name: Slice(entered.get_slice(name))
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

    safetensors.safe_open = File
    try:
        yield reads
    finally:
        safetensors.safe_open = opened


def started(folder: Path, name: str, save: Path | None = None) -> dict[str, Any]:
    """Loss of the first step from a checkpoint, and how much of the model this rank holds and reads."""
    options = {"attention_dropout": 0.0, "experts_implementation": "eager"}  # the default has no fp64
    recorder, module = Recorder(), CausalLM(options, pretrained=str(folder / name))
    trainer = trainer_with(
        plugins=[DoublePrecision()], max_steps=1, limit_val_batches=0, callbacks=[recorder],
        strategy=ContextParallelStrategy(),
    )  # fmt: skip
    with counted_reads() as reads:
        trainer.fit(module, datamodule=data(str(folder / "texts")))
    if save is not None:
        trainer.save_checkpoint(save)
    parameters = list(module.parameters())
    return {
        "loss": recorder.metrics[0]["loss"],
        "held": sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor)),
        "all": sum(p.numel() for p in parameters),
        "largest": max(p.to_local().numel() for p in parameters if isinstance(p, DTensor)),
        "reads": reads,
    }


def in_bf16(folder: Path) -> dict[str, Any]:
    """A step under bf16-true: what each parameter was before it, its dtype, and its norm."""
    options, found = {"attention_dropout": 0.0, "experts_implementation": "eager"}, {}

    class Before(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            named = ((name.removeprefix("model.model."), p.full_tensor()) for name, p in module.named_parameters())
            found.update({name: (str(p.dtype), p.double().norm().item()) for name, p in named})

    module = CausalLM(options, pretrained=str(folder), memory=Memory("attention_kept"))
    trainer = trainer_with(
        precision="bf16-true", max_steps=1, gradient_clip_val=1.0, limit_val_batches=0, callbacks=[Before()],
        strategy=ContextParallelStrategy(),
    )  # fmt: skip
    trainer.fit(module, datamodule=data(str(folder.parent / "texts")))
    return {"before": found, "loss": trainer.callback_metrics["loss"].item()}


def drawn(folder: Path, seed: int) -> dict[str, float]:
    """Norms of parameters drawn from a seed, shards of both ranks together."""
    module = CausalLM(CONFIG, seed=seed)
    trainer = trainer_with(
        plugins=[DoublePrecision()], limit_train_batches=0, limit_val_batches=0, strategy=ContextParallelStrategy()
    )
    trainer.fit(module, datamodule=data(str(folder / "texts")))
    return {name: p.full_tensor().norm().item() for name, p in module.named_parameters()}


def found(ctx: Context, folder: Path, out: Path) -> dict[str, Any]:
    """Return what a rank finds; the folder holds checkpoint directories of transformers, and texts."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"untied": started(folder, "untied", save=out / "saved.ckpt")}
    found["tied"] = started(folder, "tied")
    for name in ("experts", "uneven"):
        found[name] = started(folder, name, save=out / f"{name}.ckpt")
    found["in_bf16"] = in_bf16(folder / "fp32 routers")
    found["drawn"] = drawn(folder, seed=5)
    found["error"] = error_of(started, folder, "wrong" if ctx.rank == 1 else "untied")
    return found
