"""Trainings as in docs/lightning.md whose last rank is sent SIGTERM, one for each place; on every rank of one launch.

    torchrun --nproc_per_node 2 -m tests.recipes.signal_worker <folder of texts> <out> <lightning or deepspeed>

What each rank found, by place, goes to <out>/<rank>.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist

from recipes.lightning.resume import is_complete
from recipes.lightning.text import TextData
from ringflash.lightning import CausalLM, ContextParallelStrategy
from tests.recipes.strategy_worker import CONFIG

PLACES = ("forward", "backward", "optimizer", "validation", "checkpointing")
STEPS, SIGNALLED = 8, 2  # the steps of a run, and the one in which the signal arrives


class Told(lightning.Callback):
    """Sends this process SIGTERM inside of one part of a step, before what that part sends to the other ranks."""

    def __init__(self, place: str) -> None:
        self.place, self.step = place, 0

    def on_train_start(self, trainer: lightning.Trainer, module: CausalLM) -> None:
        """Hook the model, whose layers gather their parameters."""
        layer = module.get_submodule("model.model.model.layers")[1]  # type: ignore[index]
        layer.register_forward_pre_hook(lambda *_: self._meet("forward"), prepend=True)
        layer.register_full_backward_pre_hook(lambda *_: self._meet("backward"), prepend=True)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.step = trainer.global_step + 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Before the norm of the gradient is summed over the ranks."""
        self._meet("optimizer")

    def on_validation_batch_start(self, *_: Any) -> None:
        """In the evaluation that follows the step."""
        self._meet("validation")

    def on_save_checkpoint(self, *_: Any) -> None:
        """In the save that follows the step."""
        self._meet("checkpointing")

    def _meet(self, place: str) -> None:
        if place == self.place and self.step == SIGNALLED and dist.get_rank() == dist.get_world_size() - 1:
            self.step = 0
            os.kill(os.getpid(), signal.SIGTERM)


def strategy(kind: str) -> Any:
    if kind == "lightning":
        return ContextParallelStrategy()
    from recipes.deepspeed.strategy import DeepSpeedContextParallelStrategy

    return DeepSpeedContextParallelStrategy(stage=2)


def interrupted(place: str, kind: str, texts: str, out: Path) -> dict[str, Any]:
    """Stop a training; return its last step and the checkpoint that it leaves."""
    folder = out / place
    own = lightning.pytorch.callbacks.ModelCheckpoint(folder / "own", every_n_train_steps=1)
    callbacks = [Told(place), own] if place == "checkpointing" else [Told(place)]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy(kind), max_steps=STEPS,
        gradient_clip_val=1.0, val_check_interval=1, limit_val_batches=1, num_sanity_val_steps=0, logger=False,
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks, enable_checkpointing=place == "checkpointing", default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(CausalLM(CONFIG), datamodule=TextData(48, texts, ".txt", num_eval_sequences=4))
    dist.barrier()
    saved = [path.name for path in folder.glob("interrupted-*") if is_complete(path)]
    return {"step": trainer.global_step, "saved": saved}


def evaluation(kind: str, texts: str, out: Path) -> list[bool]:
    """Return whether SIGTERM would end the process, at each batch of a separate evaluation and after it."""
    seen: list[Any] = []

    class Look(lightning.Callback):
        def on_validation_batch_start(self, *_: Any) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy(kind), logger=False,
        limit_val_batches=1, use_distributed_sampler=False, enable_progress_bar=False, callbacks=[Look()],
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=out,
    )  # fmt: skip
    trainer.validate(CausalLM(CONFIG), datamodule=TextData(48, texts, ".txt", num_eval_sequences=4), verbose=False)
    return [handler == signal.SIG_DFL for handler in (*seen, signal.getsignal(signal.SIGTERM))]


def main(texts: str, out: Path, kind: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {place: interrupted(place, kind, texts, out) for place in PLACES}
    found["evaluation"] = evaluation(kind, texts, out)
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
