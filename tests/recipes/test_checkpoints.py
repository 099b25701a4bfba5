"""Checkpoints written during training: overlap, failed writes, the same name twice, the last two kept, no pickles.

Two gloo processes on the CPU. Accidents are planted in the class of torch that writes a rank's part. Crashes and
resuming are in test_launch_recovery.py and test_lightning_recipes.py.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch.distributed.checkpoint import FileSystemWriter

from recipes.lightning.resume import SameCheckpoint, complete_checkpoints, is_complete, leftovers, newest_checkpoint
from recipes.lightning.text import TextData
from ringflash.lightning import CausalLM, ContextParallelStrategy, StopOnSignal
from ringflash.lightning.checkpoint_loading import Folder, SingleFile, check_fits
from ringflash.lightning.checkpoints import COMPLETE, WRITTEN_AT
from ringflash.lightning.module import empty_model
from tests.helpers.pool import Context, on_ranks
from tests.helpers.quiet_trainer import quiet_trainer
from tests.recipes.launching import Run, write_text
from tests.recipes.test_strategy import CONFIG

STEPS = 5


@cache
def first_training(run: Run) -> lightning.Trainer:
    """Train five steps with a checkpoint of every step, of which two are kept, and one afterwards."""
    keep = ModelCheckpoint(run.out / "kept", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    trainer = fit(run, [keep])
    trainer.save_checkpoint(run.out / "afterwards.ckpt")
    return trainer


class Hostile:
    """Pickled, a call of os.system that makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.file}'",)


class Saves(lightning.Callback):
    """Saves to the given names after the given steps, and then asks for the removal of others, as ModelCheckpoint does.

    Notes what is whole at the end of each step.
    """

    def __init__(
        self, saves: dict[int, list[Path]], after: threading.Event | None = None, removes: dict[int, Path] | None = None
    ) -> None:
        self.saves, self.after, self.removes = saves, after, removes or {}
        self.whole: list[list[bool]] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """A write that waits for `after` goes on once the step past the save has ended."""
        self.whole.append([is_complete(path) for paths in self.saves.values() for path in paths])
        if self.after is not None and trainer.global_step > min(self.saves):
            dist.barrier()  # rank 0 has looked before rank 1 lets the write go on
            self.after.set()
        for path in self.saves.get(trainer.global_step, []):
            trainer.save_checkpoint(path)
        if (older := self.removes.get(trainer.global_step)) is not None:
            trainer.strategy.remove_checkpoint(older)


def fit(
    run: Run,
    callbacks: list[lightning.Callback],
    steps: int = STEPS,
    strategy: Any = None,
    data: type[TextData] = TextData,
    min_steps: int | None = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> lightning.Trainer:
    """Train the tiny model on sequences cut over all ranks."""
    trainer = quiet_trainer(
        max_steps=steps, callbacks=callbacks, limit_val_batches=0, min_steps=min_steps,
        strategy=strategy or ContextParallelStrategy(**options), default_root_dir=run.out,
        enable_checkpointing=any(isinstance(x, ModelCheckpoint) for x in callbacks),
    )  # fmt: skip
    trainer.fit(CausalLM(CONFIG), datamodule=data(48, run.texts, ".txt", num_eval_sequences=4), ckpt_path=ckpt_path)
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
    return "no error"


@on_ranks(2)
def test_overlap(ctx: Context, run: Run) -> None:
    """Rank 1 begins to write only once the next step has ended: until then there is no checkpoint, at the end one."""
    after = threading.Event()
    saves = Saves({1: [run.out / "overlap.ckpt"]}, after)
    in_time: list[bool] = []
    with before_writing(lambda _: in_time.append(dist.get_rank() != 1 or after.wait(60))):
        fit(run, [saves], steps=3)
    assert in_time == [True] and saves.whole[:2] == [[False], [False]], (in_time, saves.whole)
    assert is_complete(run.out / "overlap.ckpt")


@on_ranks(2)
def test_kept(ctx: Context, run: Run) -> None:
    """The last two of five are there, with nothing else in the folder."""
    first_training(run)
    assert {path.name for path in (run.out / "kept").iterdir()} == {"epoch=0-step=4.ckpt", "epoch=0-step=5.ckpt"}


@on_ranks(2)
def test_other_files_on_a_rank(ctx: Context, run: Run, tmp_path: Path) -> None:
    """One rank does not see the checkpoint, has other text, or none: both fail, and none is left to wait."""
    first_training(run)
    folders = [write_text(tmp_path / f"{ctx.rank} {rank}", 60 + rank) for rank in range(2)]
    mine, same = folders[ctx.rank], "^all ranks of the group must make the same call, got "
    SameCheckpoint("a.ckpt").setup(None, None, "fit")
    with pytest.raises(ValueError, match=same + r"ckpt_path a.ckpt \(rank 0\), "):
        SameCheckpoint(None if ctx.rank else "a.ckpt").setup(None, None, "fit")
    TextData(16, str(folders[0]), ".txt").read()
    with pytest.raises(ValueError, match=same + r"fingerprints of the text \['"):
        TextData(16, str(mine), ".txt").read()
    with pytest.raises(ValueError, match="^folder must hold files that end in '.no', got none in .*0"):
        TextData(16, str(folders[0]), ".no" if ctx.rank else ".txt").read()


@on_ranks(2)
def test_another_model(ctx: Context, run: Run) -> None:
    """A checkpoint is refused to models of other sizes, and one of parameters only to a training.

    torch would leave a layer too many in it unread.
    """
    path, weights = run.out / "afterwards.ckpt", run.out / "weights.ckpt"
    first_training(run).save_checkpoint(weights, weights_only=True)
    saved, only_weights = Folder(path), Folder(weights)
    for name, value, problem in (
        ("num_hidden_layers", 2, "no error"),
        ("num_hidden_layers", 1, "input_layernorm.weight of shape (32,) in it and none here, and 8 more"),
        ("intermediate_size", 64, "down_proj.weight of shape (32, 48) in it and (32, 64) here, and 5 more"),
    ):
        module = CausalLM(CONFIG)
        module.model = empty_model({**CONFIG, name: value}, None, module.memory)
        found = message(lambda module=module: check_fits(saved, module, 1))
        assert problem in found, found
    found = message(lambda: check_fits(only_weights, None, 1))
    assert "must have the optimizer's state to be continued, got only parameters" in found, found
    assert "must have the state of 2 optimizers, got 1" in message(lambda: check_fits(saved, None, 2))


@on_ranks(2)
def test_damaged(ctx: Context, run: Run) -> None:
    """A flipped bit is refused by both ranks; on automatic resume the checkpoint before takes its place.

    If all are damaged, the run ends with the error of the oldest.
    """
    first_training(run)
    newest, previous = complete_checkpoints(run.out / "kept")
    flip_bit(newest / "__1_0.distcp", -1000)
    started = Started()
    resume = [started, SameCheckpoint(newest, run.out / "kept")]
    error = message(lambda: fit(run, [], ckpt_path=newest))
    assert "step=5.ckpt/__1_0.distcp must hold the bytes that were written, got" in error, error
    fit(run, resume, ckpt_path=newest, steps=STEPS + 1)
    assert (started.step, Path(started.path).name) == (4, "epoch=0-step=4.ckpt")
    flip_bit(previous / "__0_0.distcp", -1000)
    error = message(lambda: fit(run, resume, ckpt_path=newest))
    assert "step=4.ckpt/__0_0.distcp must hold the bytes that were written, got" in error, error


@on_ranks(2)
def test_other_options(ctx: Context, run: Run) -> None:
    """A checkpoint's options are loaded into an optimizer that has one more, which it keeps, and no state yet.

    A scheduler adds one to its optimizer: torch would not load a checkpoint from before. The state of a parameter that
    is frozen by now is loaded, too. Before its first step an optimizer has none.
    """
    (optimizer,) = first_training(run).optimizers
    frozen = optimizer.param_groups[0]["params"][0].requires_grad_(False)
    average = optimizer.state[frozen]["exp_avg"].to_local().clone()
    saved, options = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]
    optimizer.state.clear()
    optimizer.zero_grad()
    assert not first_training(run).strategy.optimizer_state(optimizer)["state"] and not optimizer.state
    options |= {"lr": 7.0, "added": 5.0}
    first_training(run).strategy.load_checkpoint(run.out / "afterwards.ckpt")
    options = optimizer.param_groups[0]
    assert (options["lr"], options["added"]) == (saved, 5)
    assert torch.equal(optimizer.state[frozen.requires_grad_()]["exp_avg"].to_local(), average)


@on_ranks(2)
def test_synchronous(ctx: Context, run: Run) -> None:
    """A checkpoint is whole when saving returns: on request while training, and always after it."""
    first_training(run)
    saves = Saves({1: [run.out / "synchronous.ckpt"]})
    fit(run, [saves], steps=2, async_checkpoint=False)
    assert saves.whole == [[False], [True]] and is_complete(run.out / "afterwards.ckpt")


@on_ranks(2)
def test_full_disk(ctx: Context, run: Run) -> None:
    """Both ranks fail at the next save, or at the end; the checkpoint before is there, the one after not begun.

    `ModelCheckpoint` has asked for the removal of the one before when it could not know.
    """
    good = run.out / "good.ckpt"
    runs = {
        "next": {1: [good], 2: [run.out / "full.ckpt"], 4: [run.out / "later.ckpt"]},
        "end": {2: [run.out / "full_end.ckpt"]},
    }
    with before_writing(disk_full_on_rank_1):
        for saves in runs.values():
            callback = Saves(saves, removes={2: good})
            error = message(lambda callback=callback: fit(run, [callback], steps=4))
            assert error.startswith("RuntimeError: a checkpoint was not written: OSError on rank 1: "), error
            assert "No space left on device" in error and "(seen on ranks [0, 1])" in error, error
            assert len(callback.whole) == 4
    assert [is_complete(path) for (path,) in runs["next"].values()] == [True, False, False]


@on_ranks(2)
def test_folder_that_is_a_file(ctx: Context, run: Run) -> None:
    """Both ranks fail."""
    (run.out / "file").touch()
    error = message(lambda: fit(run, [Saves({2: [run.out / "file" / "x.ckpt"]})], steps=4))
    assert "was not written: NotADirectoryError on rank 0" in error, error


class Fails(lightning.Callback):
    """An error of the training."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        raise ValueError("planted")


@on_ranks(2)
def test_error_while_writing(ctx: Context, run: Run) -> None:
    """The parts are written only after the training has failed, whose error is the one that is raised."""
    failed = threading.Event()
    teardown = ContextParallelStrategy.teardown
    path = run.out / "error.ckpt"

    class Late(ContextParallelStrategy):
        def teardown(self) -> None:
            failed.set()
            teardown(self)

    with before_writing(lambda _: failed.wait(60)):
        error = message(lambda: fit(run, [Saves({1: [path]}), Fails()], strategy=Late()))
    dist.barrier()
    assert error == "ValueError: planted" and is_complete(path), error


@on_ranks(2)
def test_twice(ctx: Context, run: Run) -> None:
    """The same name in quick succession, and another right after; a crash has left the one replaced before."""
    names = [run.out / "a.ckpt", run.out / "a.ckpt", run.out / "b.ckpt"]
    for name in ("a.ckpt", "a.ckpt.replaced"):
        (run.out / name / "part").mkdir(parents=True, exist_ok=True)
    fit(run, [Saves({1: names, 2: names[:1]})], steps=2)
    assert [torch.load(path / "meta.pt")["global_step"] for path in names[1:]] == [2, 1]
    assert not [path for path in run.out.iterdir() if path.name.startswith(("a.ckpt.", "b.ckpt."))]


class Signalled(TextData):
    """Rank 1 is told to stop while the ranks are on their way to the first step."""

    def train_dataloader(self) -> Any:
        """Asked for once Lightning has taken the signal."""
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().train_dataloader()


class Counter(lightning.Callback):
    """Counts batches, as an average of weights does in its state."""

    batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}


class Holds(lightning.Callback):
    """Has any state."""

    state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.state}


@on_ranks(2)
def test_unequal_state(ctx: Context, run: Run) -> None:
    """State that ranks would lose is refused on every rank, in both formats and also if rank 0 has none of it.

    The times of Lightning's own callback pass.
    """
    holds, timer, rank = Holds(), Timer(), dist.get_rank()
    timer._offset = float(rank)
    first_training(run).callbacks += [holds, timer]
    weight = next(first_training(run).lightning_module.parameters()).detach()
    path = run.out / "unequal.ckpt"
    for state, problem in (
        ({"average": torch.full((2,), rank)}, "callbacks.Holds.held.average must be the same on all ranks to be saved"),
        ([weight], "callbacks.Holds.held.0 must be the same on all ranks to be saved"),
        (rank, "got another value on rank 1; in state_dict gather shards"),
        ([1] * rank, "callbacks.Holds.held.0 must be the same on all ranks to be saved"),
        ([1] * (1 - rank), "no error"),
        ({"average": weight.full_tensor()}, "no error"),
    ):
        holds.state = state
        error = message(lambda: first_training(run).save_checkpoint(path))
        assert problem in error and is_complete(path) == (problem == "no error"), error
    first_training(run).callbacks.remove(holds)
    first_training(run).callbacks.remove(timer)


@on_ranks(2)
def test_early_signal(ctx: Context, run: Run) -> None:
    """One rank had it, once Lightning's own handler was set: that one sends, and the ranks wait for one another.

    Though the trainer's min_steps, 4, are not reached: Lightning would train on, and save after each step.
    """
    counter = Counter()
    trainer = fit(run, [StopOnSignal(), counter], data=Signalled, min_steps=STEPS - 1)
    assert (trainer.global_step, trainer.min_steps) == (2, 4)
    (saved,) = Path(trainer.log_dir or trainer.default_root_dir).glob("interrupted-step=2.ckpt")
    assert torch.load(saved / "meta.pt")["callbacks"]["Counter"] == {"batches": 2}


class Started(lightning.Callback):
    """The step at which a training begins, and the checkpoint that it begins from."""

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.step, self.path = trainer.global_step, str(trainer.ckpt_path)


def flip_bit(path: Path, offset: int) -> None:
    """Change the file on one rank, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)
    dist.barrier()


@on_ranks(2)
def test_hostile(ctx: Context, run: Run) -> None:
    """A pickle is refused with the name of what it would call; nothing is called."""
    called = run.out / "called"
    dist.barrier()
    torch.save(Hostile(called), run.out / "a.ckpt" / "meta.pt")
    dist.barrier()
    error = message(lambda: first_training(run).strategy.load_checkpoint(run.out / "a.ckpt"))
    assert error.startswith("ValueError") and "posix.system" in error and not called.exists(), error


def test_replaced_checkpoint_has_its_name_back(tmp_path: Path) -> None:
    """After a crash between the two renames; what is not whole stays out of the search."""
    for name in ("a.ckpt.replaced", "a.ckpt.partial", "b.ckpt", "b.ckpt.replaced"):
        (tmp_path / "version_0" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) is None
    assert (tmp_path / "version_0" / "a.ckpt").is_dir()
    assert {path.name for path in leftovers(tmp_path)} == {"a.ckpt.partial", "b.ckpt.replaced"}


def test_the_newest_has_the_latest_time_in_it(tmp_path: Path) -> None:
    """Copies were made one by one, the oldest last. Without such times those of files count (test_launch.py)."""
    for name, noted, copied in (("step=9", 30, 1), ("step=2", 40, 2), ("step=7", 10, 3)):
        checkpoint = tmp_path / f"{name}.ckpt"
        checkpoint.mkdir()
        (checkpoint / WRITTEN_AT).write_text(str(noted))
        (checkpoint / COMPLETE).touch()
        os.utime(checkpoint / COMPLETE, ns=(copied, copied))
    assert newest_checkpoint(tmp_path) == tmp_path / "step=2.ckpt"


def test_file_with_groups_of_other_names_is_refused(tmp_path: Path) -> None:
    """The groups have equal shapes, so that only the names tell."""
    module, path = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), tmp_path / "file.ckpt"
    named = list(module.named_parameters())
    content = {"state_dict": module.state_dict(), "optimizer_states": [torch.optim.AdamW(named).state_dict()]}
    torch.save(content, path)
    file = SingleFile(path, weights_only=True)
    file.load_optimizer(0, module, torch.optim.AdamW(named))
    with pytest.raises(ValueError, match="must have the parameter groups of this optimizer, .* the parameters differ"):
        file.load_optimizer(0, module, torch.optim.AdamW([*named[2:], *named[:2]]))


def test_one_file_is_not_written_during_training() -> None:
    """Refused before anything starts; left out, the argument follows the other one."""
    with pytest.raises(ValueError, match="async_checkpoint must be False if save_distributed_checkpoint is False"):
        ContextParallelStrategy(save_distributed_checkpoint=False, async_checkpoint=True)
    ContextParallelStrategy(save_distributed_checkpoint=False)
