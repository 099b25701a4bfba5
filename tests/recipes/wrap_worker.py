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
from lightning.pytorch.plugins import DoublePrecision
from torch.utils.data import DataLoader

from ringflash.lightning import ContextParallelStrategy
from ringflash.loss import shift_labels
from tests.helpers import own_models as own
from tests.recipes.plain_gpt import GPT

STEPS = 3


def loader() -> DataLoader[Any]:
    """Whole sequences and their shifted labels; a multiple of what the check takes."""
    rows = torch.randint(0, own.VOCAB, (STEPS, own.LENGTH * 4), generator=torch.Generator().manual_seed(2))
    return DataLoader([(x, y) for x, y in zip(rows, shift_labels(rows), strict=True)], batch_size=1)


def train(module: lightning.LightningModule, **options: Any) -> dict[str, Any]:
    """Metrics and weights after some steps and an evaluation."""
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, log_every_n_steps=1, plugins=[DoublePrecision()],
        **options,
    )  # fmt: skip
    trainer.fit(module, loader(), loader())
    weights = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in module.named_parameters()}
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "weights": weights}


def build(kind: type[lightning.LightningModule]) -> lightning.LightningModule:
    """The same parameters for both."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind()


def misplaced(kind: Any) -> Any:
    """With positions that are counted from the shard."""
    return build(type("Misplaced", (kind,), {"positions": lambda self, tokens: torch.arange(tokens.shape[1])}))


def tied(kind: Any) -> Any:
    """With a head beside the model, whose weight is the embedding's."""
    module = build(kind)
    module.head = torch.nn.Linear(own.WIDTH, own.VOCAB, bias=False)
    module.head.weight = module.model.embedding.weight
    return module


def planted(module: lightning.LightningModule) -> str:
    """What is said of it before the first step."""
    try:
        train(module, devices=2, strategy=ContextParallelStrategy())
    except ValueError as error:
        return str(error)
    return "accepted"


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
    errors = [((ring["weights"][n] - p).abs().max() / p.abs().max()).item() for n, p in whole.named_parameters()]
    found = {
        "weights": max(errors), "loss": abs(ring["metrics"]["loss"] - losses[-1].item()),
        "eval_loss": abs(ring["metrics"]["eval_loss"] - evaluation), "planted": planted(misplaced(Changed)),
        "tied": planted(tied(Changed)),
    }  # fmt: skip
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
