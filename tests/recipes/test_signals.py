"""SIGTERM to one rank of a training as docs/lightning.md has it, wherever it arrives: all ranks save and stop.

Two CPU processes with Lightning, and with DeepSpeed. The last rank gets the signal. Lightning's own handler broadcasts
from inside the collective that it has interrupted, and hangs.
"""

import os
import signal
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch.distributed as dist

from recipes.lightning.resume import is_complete
from recipes.lightning.text import TextData
from ringflash.lightning import CausalLM, ContextParallelStrategy
from tests.helpers.pool import Context, Launches
from tests.helpers.quiet_trainer import quiet_trainer
from tests.recipes.test_strategy import CONFIG

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


def interrupted(ctx: Context, place: str, kind: str, texts: str, out: Path) -> dict[str, Any]:
    """Stop a training; return its last step and the checkpoint that it leaves."""
    folder = out / place
    own = lightning.pytorch.callbacks.ModelCheckpoint(folder / "own", every_n_train_steps=1)
    callbacks = [Told(place), own] if place == "checkpointing" else [Told(place)]
    trainer = quiet_trainer(
        strategy=strategy(kind), max_steps=STEPS, gradient_clip_val=1.0, val_check_interval=1, limit_val_batches=1,
        num_sanity_val_steps=0, callbacks=callbacks, enable_checkpointing=place == "checkpointing",
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(CausalLM(CONFIG), datamodule=TextData(48, texts, ".txt", num_eval_sequences=4))
    dist.barrier()
    saved = [path.name for path in folder.glob("interrupted-*") if is_complete(path)]
    return {"step": trainer.global_step, "saved": saved}


def evaluation(ctx: Context, kind: str, texts: str, out: Path) -> list[bool]:
    """Return whether SIGTERM would end the process, at each batch of a separate evaluation and after it."""
    seen: list[Any] = []

    class Look(lightning.Callback):
        def on_validation_batch_start(self, *_: Any) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    trainer = quiet_trainer(strategy=strategy(kind), limit_val_batches=1, callbacks=[Look()], default_root_dir=out)
    trainer.validate(CausalLM(CONFIG), datamodule=TextData(48, texts, ".txt", num_eval_sequences=4), verbose=False)
    return [handler == signal.SIG_DFL for handler in (*seen, signal.getsignal(signal.SIGTERM))]


KINDS = pytest.mark.parametrize("kind", ["lightning", "deepspeed"])


@pytest.mark.parametrize("place", PLACES)
@KINDS
def test_all_ranks_save_and_stop(pool: Launches, kind: str, place: str, texts: str, tmp_path: Path) -> None:
    """Within two steps: notes are compared at the end of a batch, and the answer is read at the end of the next."""
    ranks = pool.run(interrupted, place, kind, texts, tmp_path, size=2)
    step = ranks[0]["step"]
    assert SIGNALLED < step <= SIGNALLED + 2
    assert ranks == [{"step": step, "saved": [f"interrupted-step={step}.ckpt"]}] * 2


@KINDS
def test_an_evaluation_by_itself_ends_at_once(pool: Launches, kind: str, texts: str, tmp_path: Path) -> None:
    """It has nothing to save."""
    assert pool.run(evaluation, kind, texts, tmp_path, size=2) == [[True] * 3] * 2
