"""transformers' Trainer in a worker of the pool, on one process or on a ring: what its training was."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

from tests.helpers import models
from tests.helpers.pool import Context


def sequences(count: int, length: int = 21) -> list[dict[str, list[int]]]:
    """Prompts of 3 tokens with answers to learn, of several lengths."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(1, 61, (length - 4 * (i % 4),), generator=generator).tolist() for i in range(count)]
    return [{"input_ids": row, "labels": [-100] * 3 + row[3:]} for row in rows]


def right_padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch of rows, padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    pads = {"input_ids": 0, "labels": -100}
    batch = {name: [row[name] + [pad] * (longest - len(row[name])) for row in rows] for name, pad in pads.items()}
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {name: torch.tensor(x) for name, x in (batch | {"attention_mask": mask}).items()}


@cache
def register() -> None:
    """Register the backend once in this process."""
    from ringflash import accelerate

    accelerate.register()


def join(ctx: Context) -> None:
    """Let accelerate find this worker's place; forget what an earlier case configured."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    place = {"RANK": ctx.rank, "LOCAL_RANK": ctx.rank, "WORLD_SIZE": ctx.size, "LOCAL_WORLD_SIZE": ctx.size}
    os.environ.update({name: str(x) for name, x in place.items()} | {"ACCELERATE_USE_CPU": "true"})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # never dialled: the workers have joined
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def loss_in_fp64(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Return transformers' loss of causal models, which it computes in fp32 whatever the dtype of the logits."""
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum" if num_items_in_batch else "mean"
    )
    return losses / num_items_in_batch if num_items_in_batch else losses


def build(ctx: Context, name: str, sizes: dict[str, int]) -> tuple[Any, Any]:
    """The model of a name, and the configuration of its rings; one process has none, and a loss in fp64."""
    model: Any = models.build(name, "sdpa")
    if ctx.size == 1:
        model.loss_function = loss_in_fp64
        return model, None
    from accelerate import ParallelismConfig

    register()
    return model, ParallelismConfig(cp_backend="ringflash", **sizes)


def train(
    ctx: Context,
    folder: str,
    name: str,
    packed: bool,
    sizes: dict[str, int],
    options: dict[str, Any],
    resume: bool = False,
) -> dict[str, Any]:
    """Train a few steps and evaluate; return what Trainer logged, and the parameters at the end.

    Args:
        packed: concatenate the rows of a batch, with position_ids; otherwise pad them on the right.
        sizes: of the `ParallelismConfig`, for several workers.
        resume: begin at the checkpoint that an earlier training left in the folder.
    """
    from accelerate import DistributedType, PartialState
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    join(ctx)
    model, config = build(ctx, name, sizes)
    rings = ctx.size // sizes["cp_size"] if config else 1
    arguments = TrainingArguments(
        folder, parallelism_config=config, **{
            "max_steps": 3, "per_device_train_batch_size": 4 // rings, "per_device_eval_batch_size": 4 // rings,
            "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "linear",
            "max_grad_norm": 0.9, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
            "use_cpu": True, "seed": 1,
        } | options,
    )  # fmt: skip
    if arguments.fsdp:  # accelerate leaves it out on CPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    collate = DataCollatorWithFlattening() if packed else right_padded
    trainer = Trainer(model, arguments, collate, train_dataset=sequences(24), eval_dataset=sequences(8))
    trainer.train(f"{folder}/checkpoint-1" if resume else None)
    trainer.evaluate()
    logged = [{k: x[k] for k in ("loss", "grad_norm", "eval_loss") if k in x} for x in trainer.state.log_history]
    saved = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {"logged": [x for x in logged if x], "parameters": {k: x.clone() for k, x in saved.items()}}
