"""Checkpoints and what they survive, on every rank of one launch; what each rank found goes to <out>/<rank>.json.

    torchrun --nproc_per_node 2 -m tests.recipes.checkpoint_worker <folder of texts> <out>

Accidents are planted in the class of torch that writes a rank's part.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemWriter

from recipes.lightning.resume import SameCheckpoint, complete_checkpoints, is_complete
from recipes.lightning.text import TextData
from ringflash.lightning import CausalLM, ContextParallelStrategy, StopOnSignal
from ringflash.lightning.module import empty_model
from ringflash.lightning.strategy import check_fits, saved_entries
from tests.recipes.strategy_worker import CONFIG

STEPS = 5


class Hostile:
    """Pickled, a call of os.system."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("echo unpickled",)


class Saves(lightning.Callback):
    """Saves to the given names after the given steps; notes what is whole at the end of each step."""

    def __init__(self, saves: dict[int, list[Path]], after: threading.Event | None = None) -> None:
        self.saves, self.after = saves, after
        self.whole: list[list[bool]] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """A write that waits for `after` goes on once the step past the save has ended."""
        self.whole.append([is_complete(path) for paths in self.saves.values() for path in paths])
        if self.after is not None and trainer.global_step > min(self.saves):
            dist.barrier()  # rank 0 has looked before rank 1 lets the write go on
            self.after.set()
        for path in self.saves.get(trainer.global_step, []):
            trainer.save_checkpoint(path)


def fit(
    texts: str,
    callbacks: list[lightning.Callback],
    steps: int = STEPS,
    strategy: Any = None,
    data: type[TextData] = TextData,
    min_steps: int | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> lightning.Trainer:
    """Train the tiny model on sequences cut over all ranks."""
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_steps=steps, logger=False, callbacks=callbacks,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, limit_val_batches=0,
        min_steps=min_steps, strategy=strategy or ContextParallelStrategy(**options), default_root_dir=sys.argv[2],
        enable_checkpointing=any(isinstance(x, ModelCheckpoint) for x in callbacks),
    )  # fmt: skip
    trainer.fit(CausalLM(CONFIG), datamodule=data(48, texts, ".txt", num_eval_sequences=4), ckpt_path=ckpt_path)
    return trainer


@contextmanager
def before_writing(hook: Callable[[FileSystemWriter], None]) -> Iterator[None]:
    """Call `hook` on each rank before it writes its part."""
    write = FileSystemWriter.write_data

    def write_data(self: FileSystemWriter, *args: Any) -> Any:
        hook(self)
        return write(self, *args)

    FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystemWriter.write_data = write  # type: ignore[method-assign]


def disk_full_on_rank_1(writer: FileSystemWriter) -> None:
    """For the checkpoints named full."""
    if dist.get_rank() == 1 and "full" in str(writer.path):
        raise OSError(errno.ENOSPC, "No space left on device")


def message(call: Callable[[], object]) -> str:
    """Type and message of the error that the call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def overlap(texts: str, out: Path) -> dict[str, Any]:
    """Rank 1 begins to write only once the next step has ended."""
    after = threading.Event()
    saves = Saves({1: [out / "overlap.ckpt"]}, after)
    in_time: list[bool] = []
    with before_writing(lambda _: in_time.append(dist.get_rank() != 1 or after.wait(60))):
        fit(texts, [saves], steps=3)
    return {"in_time": in_time, "whole": saves.whole[:2], "end": is_complete(out / "overlap.ckpt")}


def failures(texts: str, out: Path) -> dict[str, Any]:
    """The second of three, or the last, cannot be written; the folder is a file."""
    (out / "file").touch()
    runs = {
        "next": {1: [out / "good.ckpt"], 2: [out / "full.ckpt"], 4: [out / "later.ckpt"]},
        "end": {2: [out / "full_end.ckpt"]},
        "folder": {2: [out / "file" / "x.ckpt"]},
    }
    found = {}
    with before_writing(disk_full_on_rank_1):
        for name, saves in runs.items():
            callback = Saves(saves)
            error = message(lambda callback=callback: fit(texts, [callback], steps=4))
            found[name] = {"error": error, "steps": len(callback.whole)}
    whole = sorted(path.name for path in out.glob("*.ckpt") if is_complete(path))
    return {**found, "whole": [name for name in whole if name in ("good.ckpt", "full.ckpt", "later.ckpt")]}


class Fails(lightning.Callback):
    """An error of the training."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """After the first step."""
        raise ValueError("planted")


def error_while_writing(texts: str, out: Path) -> dict[str, Any]:
    """The parts are written only after the training has failed."""
    failed = threading.Event()
    teardown = ContextParallelStrategy.teardown
    path = out / "error.ckpt"

    class Late(ContextParallelStrategy):
        def teardown(self) -> None:
            failed.set()
            teardown(self)

    with before_writing(lambda _: failed.wait(60)):
        error = message(lambda: fit(texts, [Saves({1: [path]}), Fails()], strategy=Late()))
    dist.barrier()
    return {"error": error, "whole": is_complete(path)}


def twice(texts: str, out: Path) -> dict[str, Any]:
    """The same name in quick succession, and another right after; a crash has left the one replaced before."""
    names = [out / "a.ckpt", out / "a.ckpt", out / "b.ckpt"]
    for name in ("a.ckpt", "a.ckpt.replaced"):
        (out / name / "part").mkdir(parents=True, exist_ok=True)
    fit(texts, [Saves({1: names, 2: names[:1]})], steps=2)
    steps = {path.name: torch.load(path / "meta.pt")["global_step"] for path in names}
    return {
        "steps": steps,
        "left": [path.name for path in out.iterdir() if path.name.startswith(("a.ckpt.", "b.ckpt."))],
    }


class Signalled(TextData):
    """Rank 1 is told to stop while the ranks are on their way to the first step."""

    def train_dataloader(self) -> Any:
        """Asked for once Lightning has taken the signal."""
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_dataloader()


def early_signal(texts: str) -> list[int]:
    """The step at which both ranks stop, of a run that was to make more in any case; what it leaves of that."""
    trainer = fit(texts, [StopOnSignal()], data=Signalled, min_steps=STEPS - 1)
    return [trainer.global_step, trainer.min_steps]


def fitting(trainer: lightning.Trainer, out: Path) -> dict[str, str]:
    """Return what is said of a checkpoint, of one of parameters alone, and to models of other sizes."""
    path, weights, found = out / "afterwards.ckpt", out / "weights.ckpt", {}
    trainer.save_checkpoint(weights, weights_only=True)
    saved = saved_entries(path)
    for name, value in (("num_hidden_layers", 2), ("num_hidden_layers", 1), ("intermediate_size", 64)):
        module = CausalLM(CONFIG)
        module.model = empty_model({**CONFIG, name: value}, None, module.memory)
        found[f"{name}={value}"] = message(lambda module=module: check_fits(path, saved, module, trainer.optimizers))
    found["weights"] = message(lambda: check_fits(weights, saved_entries(weights), None, trainer.optimizers))
    return found


def other_options(trainer: lightning.Trainer, path: Path) -> dict[str, float]:
    """A checkpoint's options, loaded into an optimizer that has one more and no state yet."""
    (optimizer,) = trainer.optimizers
    saved, options = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]
    optimizer.state.clear()
    optimizer.zero_grad()
    options |= {"lr": 7.0, "added": 5.0}
    trainer.strategy.load_checkpoint(path)
    options = optimizer.param_groups[0]
    return {"lr": options["lr"] - saved, "added": options["added"], "states": len(optimizer.state)}


class Started(lightning.Callback):
    """The step at which a training begins, and the checkpoint that it begins from."""

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """After the checkpoint was loaded."""
        self.step, self.path = trainer.global_step, str(trainer.ckpt_path)


def damaged(texts: str, folder: Path) -> dict[str, Any]:
    """A bit is flipped in the newest checkpoint's tensors; then in all of them. By name, and on automatic resume."""
    newest, previous = complete_checkpoints(folder)
    flip_bit(newest / "__1_0.distcp", -1000)
    started = Started()
    resume = [started, SameCheckpoint(newest, folder)]
    found = {"by name": message(lambda: fit(texts, [], ckpt_path=newest))}
    fit(texts, resume, ckpt_path=newest, steps=STEPS + 1)
    found |= {"step": started.step, "path": Path(started.path).name}
    flip_bit(previous / "__0_0.distcp", -1000)
    return {**found, "all": message(lambda: fit(texts, resume, ckpt_path=newest))}


def flip_bit(path: Path, offset: int) -> None:
    """Change the file on one rank, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)
    dist.barrier()


def main(texts: str, out: Path) -> None:
    """Do all runs."""
    found: dict[str, Any] = {"overlap": overlap(texts, out)}
    keep = ModelCheckpoint(out / "kept", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    trainer = fit(texts, [keep])
    found["kept"] = sorted(path.name for path in (out / "kept").iterdir())
    trainer.save_checkpoint(out / "afterwards.ckpt")
    found["afterwards"] = is_complete(out / "afterwards.ckpt")
    found["fitting"] = fitting(trainer, out)
    found["damaged"] = damaged(texts, out / "kept")
    found["other_options"] = other_options(trainer, out / "afterwards.ckpt")
    saves = Saves({1: [out / "synchronous.ckpt"]})
    fit(texts, [saves], steps=2, async_checkpoint=False)
    found["synchronous"] = saves.whole
    found["failures"] = failures(texts, out)
    found["error"] = error_while_writing(texts, out)
    found["early_signal"] = early_signal(texts)
    found["twice"] = twice(texts, out)
    dist.barrier()
    torch.save(Hostile(), out / "a.ckpt" / "meta.pt")
    dist.barrier()
    found["hostile"] = message(lambda: trainer.strategy.load_checkpoint(out / "a.ckpt"))
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
