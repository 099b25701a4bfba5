"""Training on token files, on every rank of one launch; what each rank found goes to <out>/<rank>-of-<ranks>.json.

    torchrun --nproc_per_node 2 -m tests.recipes.tokens_worker <folder> <out>

Two ranks write a checkpoint after three steps with a sequence each, and continue it sharing one; a later run on one
rank continues the same checkpoint. The reference for every batch is `prepare_batch` on plain lists.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist

from ringflash import huggingface, loss
from ringflash.data import SampleOrder
from ringflash.data.order import mix_lengths
from ringflash.data.sequences import split
from ringflash.lightning import CausalLM, ContextParallelStrategy, TokenData
from ringflash.lightning.strategy import strategy_of
from ringflash.sequence.padding import IGNORE_INDEX
from tests.helpers.tokens import read_all, whole_sequence
from tests.recipes.strategy_worker import CONFIG

WORLD_SIZE = int(os.environ["WORLD_SIZE"])
SEQLEN, SEED, HELD_OUT_PERCENT, STEPS = 48, 3, 20.0, 3
RATES = {"learning_rate": 1e-5, "weight_decay": 0.5, "betas": (0.8, 0.9)}


class Recorder(lightning.Callback):
    """The numbers of the sequences of each step, and what of a batch differs from the reference."""

    def __init__(self, folder: Path) -> None:
        documents = read_all(folder)
        order, _ = split(len(documents), HELD_OUT_PERCENT, SEED)
        order = mix_lengths(order, torch.tensor([len(documents[i]) for i in order]))
        self.documents = [documents[i] for i in order]
        self.indices: list[int] = []
        self.wrong: list[str] = []

    def on_train_batch_start(self, trainer: lightning.Trainer, module: CausalLM, batch: Any, batch_idx: int) -> None:
        strategy, data = strategy_of(trainer), trainer.datamodule
        sample = data.num_consumed + strategy.dp_rank
        order = SampleOrder(len(data.train), seed=SEED, dp_rank=0, dp_size=1, first=sample)
        self.indices.append(next(iter(order)))
        whole, bounds, num_tokens = whole_sequence(self.documents, SEQLEN, self.indices[-1])
        labels = loss.shift_labels(whole, bounds)
        labels[:, num_tokens:] = IGNORE_INDEX
        want = huggingface.prepare_batch(whole, group=strategy.cp_group, cu_seqlens=bounds, labels=labels)
        want.pop("checksum", None)  # of the whole sequence, which no rank has read
        self.wrong += [name for name in want.keys() | batch.keys() if not same(batch.get(name), want.get(name))]


class Norms(lightning.Callback):
    """The norm of each step's gradient; saves at the end of a batch, by its number from 1, if it is to."""

    def __init__(self, batch: int | None = None, path: Path | None = None) -> None:
        self.batch, self.path = batch, path
        self.norms: dict[int, float] = {}

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if "grad_norm" in trainer.callback_metrics:
            self.norms[trainer.global_step] = trainer.callback_metrics["grad_norm"].item()
        if trainer.fit_loop.batch_idx + 1 == self.batch:
            trainer.save_checkpoint(self.path)


def same(got: Any, want: Any) -> bool:
    """Equal in dtype and value."""
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == want.dtype and torch.equal(got, want)
    return bool(got == want)


def fit(data: TokenData, folder: Path, cp_size: int, **options: Any) -> dict[str, Any]:
    """Train on a mesh; the trainer saves nothing by itself."""
    recorder, config = Recorder(folder), options.pop("config", CONFIG)
    steps, checkpoint, save = (options.pop(name, None) for name in ("steps", "checkpoint", "save"))
    rates = options.pop("rates", {})
    callbacks = [recorder, *options.pop("callbacks", [])]
    trainer = lightning.Trainer(
        strategy=ContextParallelStrategy(context_parallel_size=cp_size), accelerator="cpu", logger=False,
        devices=WORLD_SIZE, max_steps=steps or STEPS, callbacks=callbacks, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        check_val_every_n_epoch=None, val_check_interval=STEPS, **options,
    )  # fmt: skip
    module = CausalLM(config, **rates)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if save is not None:
        trainer.save_checkpoint(save)
    found = {"indices": recorder.indices, "wrong": recorder.wrong, "num_consumed": data.num_consumed}
    groups = [[group[name] for name in ("lr", "weight_decay", "betas")] for group in trainer.optimizers[0].param_groups]
    return {**found, "eval_losses": module.eval_losses, "num_sequences": len(data.train), "groups": groups}


def token_data(folder: Path, **options: Any) -> TokenData:
    """The data module under test."""
    options = {"seqlen": SEQLEN, "held_out_percent": HELD_OUT_PERCENT, "num_eval_sequences": 2, "seed": SEED, **options}
    return TokenData(str(folder), **options)


def error_of(call: Callable[[], Any]) -> str:
    """Type and message of the error of a call."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def mid_step(folder: Path, path: Path) -> list[dict[int, float]]:
    """Norms of three steps of four sequences; and of those after a checkpoint in the middle of the second."""
    whole, resumed = Norms(6, path), Norms()
    for callback, checkpoint in ((whole, None), (resumed, str(path))):
        data = token_data(folder)
        fit(data, folder, 1, checkpoint=checkpoint, callbacks=[callback], accumulate_grad_batches=4)
        assert data.num_consumed == 4 * STEPS
    return [whole.norms, resumed.norms]


def main() -> None:
    """Continue on one rank; or train on two, continue there, and be refused."""
    folder, out = map(Path, sys.argv[1:])
    found: dict[str, Any] = {}
    checkpoint = {"checkpoint": str(out / "saved.ckpt"), "steps": 2 * STEPS}
    if WORLD_SIZE == 2:
        found["data"] = fit(token_data(folder), folder, 1, save=out / "saved.ckpt")
        rank = dist.get_rank()
        for name in ("corrupt", "other"):
            where = folder.with_name(f"{folder.name}-{name}") if rank == 1 else folder
            found[name] = error_of(lambda where=where: fit(token_data(where), folder, 2))
        small = {**CONFIG, "vocab_size": 100}
        found["vocabulary"] = error_of(lambda: fit(token_data(folder), folder, 2, config=small))
    else:
        found["mid_step"] = mid_step(folder, out / "mid_step.ckpt")
        found["epochs"] = fit(token_data(folder), folder, 1, steps=3 * STEPS, limit_train_batches=STEPS, max_epochs=3)
    found["context"] = fit(token_data(folder), folder, WORLD_SIZE, **checkpoint)
    if WORLD_SIZE == 1:
        options = {**checkpoint, "steps": STEPS + 1, "rates": RATES, "accumulate_grad_batches": 2}
        found["changed"] = fit(token_data(folder), folder, 1, **options)
    found["resumed_with_other"] = error_of(
        lambda: fit(token_data(folder, held_out_percent=30.0), folder, WORLD_SIZE, **checkpoint)
    )
    (out / f"{dist.get_rank()}-of-{WORLD_SIZE}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
