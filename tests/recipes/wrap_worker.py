"""A module with the README's diff, trained on two ranks, and without it in one process; prints what went wrong.

torchrun --nproc_per_node 2 -m tests.recipes.wrap_worker <folder with changed_gpt.py> <folder of results>
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch._inductor.config
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from lightning.pytorch.plugins import DoublePrecision
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ringflash.lightning import ContextParallelStrategy, ModelCheckpoint
from ringflash.loss import shift_labels
from ringflash.training.seeding import seeded
from tests.helpers import own_models as own
from tests.recipes.plain_gpt import GPT

STEPS = 3
AVERAGED = 0.25  # weight of a step's parameters in their moving average
SCORES = [[4.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 0.0]]  # of both ranks, by epoch


def loader(seed: int = 2) -> DataLoader[Any]:
    """Whole sequences and their shifted labels; a multiple of what the check takes."""
    rows = torch.randint(0, own.VOCAB, (STEPS, own.LENGTH * 4), generator=torch.Generator().manual_seed(seed))
    return DataLoader([(x, y) for x, y in zip(rows, shift_labels(rows), strict=True)], batch_size=1)


class Sharded(lightning.Callback):
    """Bytes of parameters that callbacks meet whole, by hook; a moving average of shards, as the refusal advises."""

    def __init__(self) -> None:
        self.whole: dict[str, int] = {}
        self.average: dict[str, torch.Tensor] = {}

    def note(self, hook: str, module: torch.nn.Module) -> None:
        found = sum(p.nbytes for p in module.parameters() if not isinstance(p, DTensor))
        self.whole[hook] = max(found, self.whole.get(hook, 0))

    def on_validation_batch_end(self, trainer: Any, module: lightning.LightningModule, *_: Any) -> None:
        self.note("validation batch", module)

    def on_train_start(self, trainer: Any, module: lightning.LightningModule) -> None:
        self.note("sanity validation", module)
        self.average = {name: p.detach().to_local().clone() for name, p in module.named_parameters()}

    def on_train_batch_start(self, trainer: Any, module: lightning.LightningModule, *_: Any) -> None:
        self.note("comparison", module)

    def on_train_batch_end(self, trainer: Any, module: lightning.LightningModule, *_: Any) -> None:
        self.note("step", module)
        for name, p in module.named_parameters():
            self.average[name].lerp_(p.detach().to_local(), AVERAGED)

    def full_average(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: DTensor.from_local(
                self.average[name], p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            ).full_tensor()
            for name, p in module.named_parameters()
        }  # fmt: skip


def train(module: lightning.LightningModule, seed: int = 2, **options: Any) -> dict[str, Any]:
    """Metrics and weights after some steps and an evaluation."""
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, log_every_n_steps=1, plugins=[DoublePrecision()],
        **options,
    )  # fmt: skip
    trainer.fit(module, loader(seed), loader())
    weights = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in module.named_parameters()}
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "weights": weights}


class Shuffled(lightning.LightningDataModule):
    """A data module of one's own that shuffles: by Lightning's sampler, or by a generator of its own."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.seed = seed

    def train_dataloader(self) -> DataLoader[Any]:
        """More sequences than a chance order would agree on."""
        own = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        rows = [row for seed in range(2) for row in loader(seed).dataset]
        return DataLoader(rows, batch_size=1, shuffle=True, generator=own)


class Losses(lightning.Callback):
    """Each step's loss, as the step returned it."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(outputs["loss"].item())


def losses_of(module: lightning.LightningModule, seed: int | None, **options: Any) -> list[float]:
    """Losses over two epochs of shuffled sequences."""
    losses = Losses()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=seed is None, plugins=[DoublePrecision()],
        devices=int(os.environ["WORLD_SIZE"]), callbacks=[losses], **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=Shuffled(seed))
    return losses.found


def orders(kind: Any) -> dict[str, Any]:
    """Losses over shuffled data, by the two ways in which any number of ranks draws the same order."""
    found = {
        "lightning": losses_of(build(kind), None, strategy=ContextParallelStrategy()),
        "own": losses_of(build(kind), 5, strategy=ContextParallelStrategy()),
    }
    if dist.get_world_size() == 1:
        found |= {"plain": losses_of(build(GPT), 5), "default strategy": losses_of(build(kind), 5)}
    return found


def build(kind: type[lightning.LightningModule]) -> lightning.LightningModule:
    """The same parameters for both."""
    with seeded(0):
        return kind()


def varied(kind: Any, **methods: Any) -> Any:
    """With other methods."""
    return build(type("Varied", (kind,), methods))


def tied(kind: Any) -> Any:
    """With a head beside the model, whose weight is the embedding's."""
    module = build(kind)
    module.head = torch.nn.Linear(own.WIDTH, own.VOCAB, bias=False)
    module.head.weight = module.model.embedding.weight
    return module


def unshifted(module: Any, batch: Any) -> torch.Tensor:
    """The step of one who shifts what he has: a shard."""
    logits = module.model(batch[0], module.positions(batch[0]))
    return module.token_loss(logits[:, :-1], batch[0][:, 1:])


def local_mean(module: Any, batch: Any) -> torch.Tensor:
    """The step of one who divides by the labels he has: here those of the lower half of the vocabulary."""
    logits = module.model(batch[0], module.positions(batch[0]))
    labels = batch[1].masked_fill(batch[1] > own.VOCAB // 2, -100)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def manual_step(module: Any, batch: Any, batch_idx: int) -> None:
    """A step with its own backward, optimizer and clipping, that counts, collects and toggles."""
    optimizer = module.optimizers()
    module.toggle_optimizer(optimizer)
    module.model.seen += 1
    module.losses.append(batch_idx)
    optimizer.zero_grad()
    module.manual_backward(module.step(batch))
    module.clip_gradients(optimizer, 1e9, "norm")
    optimizer.step()
    module.untoggle_optimizer(optimizer)


def manual(kind: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return what it has trained, counted and collected."""
    module = varied(kind, training_step=manual_step, automatic_optimization=False)
    module.model.register_buffer("seen", torch.zeros(()))
    module.losses = []
    found = train(module, devices=2, strategy=ContextParallelStrategy())
    return found["weights"], [module.model.seen.item(), module.losses]


def judge(module: Any, batch: Any, batch_idx: int) -> None:
    """An evaluation whose ranks find different scores, in both ways of logging."""
    score = SCORES[dist.get_rank()][module.current_epoch]
    module.log("score", score)
    module.log_dict({"worst": torch.tensor(score)}, reduce_fx="max")


def decisions(kind: Any, folder: str) -> dict[str, Any]:
    """Return a rank's best epoch and its score, the epoch after which it stops, and its last logged values."""
    module = varied(kind, validation_step=judge)
    best = ModelCheckpoint(folder, monitor="score", filename="{epoch}")
    stop = EarlyStopping("score", patience=2)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ContextParallelStrategy(), max_epochs=5, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=[best, stop],
    )  # fmt: skip
    trainer.fit(module, loader(), loader())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if name != "loss"}
    score = best.best_model_score
    return {
        "best": [Path(best.best_model_path).name, None if score is None else score.item()],
        "stopped": stop.stopped_epoch, **metrics,
    }  # fmt: skip


def compiled(kind: Any) -> dict[str, Any]:
    """The weights it has trained with a layer that inductor compiles."""
    torch._inductor.config.compile_threads = 1  # starting others takes longer than this layer
    module = build(kind)
    module.model.blocks[1].compile()
    found = train(module, devices=2, strategy=ContextParallelStrategy(), limit_val_batches=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    weights: dict[str, Any] = found["weights"]
    return weights


def refused(module: lightning.LightningModule, **options: Any) -> str:
    """Return the error before the first step."""
    try:
        train(module, devices=2, strategy=ContextParallelStrategy(), **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


def refusals(kind: Any) -> dict[str, str]:
    """Errors of modules, batches and callbacks that would train something else."""
    return {
        "misplaced": refused(varied(kind, positions=lambda self, tokens: torch.arange(tokens.shape[1]))),
        "tied": refused(tied(kind)), "unshifted": refused(varied(kind, step=unshifted)),
        "local_mean": refused(varied(kind, step=local_mean)),
        "uncut": refused(varied(kind, on_before_batch_transfer=lambda self, batch, _: batch)),
        "batches": refused(build(kind), seed=dist.get_rank()),
        "averaged": refused(build(kind), callbacks=[EMAWeightAveraging()]),
    }  # fmt: skip


def main() -> None:
    """All of it."""
    folder, out = sys.argv[1:]
    sys.path.insert(0, folder)
    from changed_gpt import GPT as Changed  # type: ignore[import-not-found]

    found = {"orders": orders(Changed)}
    if dist.get_world_size() == 2:
        found |= everything(Changed, out)
    Path(out, f"{dist.get_rank()}of{dist.get_world_size()}.json").write_text(json.dumps(found))


def everything(kind: Any, out: str) -> dict[str, Any]:
    """Results of two ranks that train, average, decide and refuse."""
    changed, sharded = build(kind), Sharded()
    ring = train(changed, devices=2, strategy=ContextParallelStrategy(layout="striped"), callbacks=[sharded])
    whole = build(GPT).double()
    optimizer, losses = whole.configure_optimizers(), []
    average = {name: p.detach().clone() for name, p in whole.named_parameters()}
    for batch in loader():
        losses.append(whole.step(batch))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
        for name, p in whole.named_parameters():
            average[name].lerp_(p.detach(), AVERAGED)
    with torch.no_grad():
        evaluation = torch.stack([whole.step(batch) for batch in loader()]).mean().item()
    by_hand, counted = manual(kind)
    averaged = sharded.full_average(changed)
    in_graphs = compiled(kind)
    errors = [
        [((weights[n] - p).abs().max() / p.abs().max()).item() for n, p in whole.named_parameters()]
        for weights in (ring["weights"], by_hand, in_graphs)
    ]
    off = [((averaged[name] - x).abs().max() / x.abs().max()).item() for name, x in average.items()]
    return {
        "weights": max(errors[0]), "loss": abs(ring["metrics"]["loss"] - losses[-1].item()),
        "eval_loss": abs(ring["metrics"]["eval_loss"] - evaluation), "manual": max(errors[1]), "counted": counted,
        "average": max(off), "whole": sharded.whole, "decisions": decisions(kind, out),
        "compiled": max(errors[2]), "refusals": refusals(kind),
    }  # fmt: skip


if __name__ == "__main__":
    main()
