"""A module with the README's diff, trained on two ranks, and without it in one process; prints what went wrong.

torchrun --nproc_per_node 2 -m tests.recipes.wrap_worker <folder with changed_gpt.py> <folder of results>
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import DoublePrecision
from torch.utils.data import DataLoader

from ringflash.lightning import ContextParallelStrategy
from ringflash.loss import shift_labels
from ringflash.training.seeding import seeded
from tests.helpers import own_models as own
from tests.recipes.plain_gpt import GPT

STEPS = 3


def loader(seed: int = 2) -> DataLoader[Any]:
    """Whole sequences and their shifted labels; a multiple of what the check takes."""
    rows = torch.randint(0, own.VOCAB, (STEPS, own.LENGTH * 4), generator=torch.Generator().manual_seed(seed))
    return DataLoader([(x, y) for x, y in zip(rows, shift_labels(rows), strict=True)], batch_size=1)


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
    """What it has trained, counted and collected."""
    module = varied(kind, training_step=manual_step, automatic_optimization=False)
    module.model.register_buffer("seen", torch.zeros(()))
    module.losses = []
    found = train(module, devices=2, strategy=ContextParallelStrategy())
    return found["weights"], [module.model.seen.item(), module.losses]


def refused(module: lightning.LightningModule, **options: Any) -> str:
    """What is said of it before the first step."""
    try:
        train(module, devices=2, strategy=ContextParallelStrategy(), **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


def refusals(kind: Any) -> dict[str, str]:
    """Of modules, batches and callbacks that would train something else."""
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

    ring = train(build(Changed), devices=2, strategy=ContextParallelStrategy(layout="striped"))
    whole = build(GPT).double()
    optimizer, losses = whole.configure_optimizers(), []
    for batch in loader():
        losses.append(whole.step(batch))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    with torch.no_grad():
        evaluation = torch.stack([whole.step(batch) for batch in loader()]).mean().item()
    by_hand, counted = manual(Changed)
    errors = [
        [((weights[n] - p).abs().max() / p.abs().max()).item() for n, p in whole.named_parameters()]
        for weights in (ring["weights"], by_hand)
    ]
    found = {
        "weights": max(errors[0]), "loss": abs(ring["metrics"]["loss"] - losses[-1].item()),
        "eval_loss": abs(ring["metrics"]["eval_loss"] - evaluation), "manual": max(errors[1]), "counted": counted,
        "refusals": refusals(Changed),
    }  # fmt: skip
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
