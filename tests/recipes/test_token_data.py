"""Lightning on token files: every batch against `prepare_batch`, resume on another mesh, refusals on every rank.

Gloo processes on the CPU. Two ranks write a checkpoint after three steps with a sequence each, and continue it sharing
one; one rank continues the same checkpoint. The reference for every batch is `prepare_batch` on plain lists.
"""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from ringflash import huggingface, loss
from ringflash.data import SampleOrder
from ringflash.data.order import mix_lengths
from ringflash.data.sequences import split
from ringflash.lightning import CausalLM, ContextParallelStrategy, TokenData
from ringflash.lightning.strategy import strategy_of
from ringflash.sequence.padding import IGNORE_INDEX
from tests.helpers.pool import Context, on_ranks
from tests.helpers.quiet_trainer import quiet_trainer
from tests.helpers.tokens import read_all, whole_sequence, write_tokens
from tests.recipes.test_strategy import CONFIG

DOCUMENTS = [[256, *((i * 31 + j * 7) % 256 for j in range(5 + i * 13 % 60))] for i in range(40)]
SEQLEN, SEED, HELD_OUT_PERCENT, STEPS = 48, 3, 20.0, 3
RATES = {"learning_rate": 1e-5, "weight_decay": 0.5, "betas": (0.8, 0.9)}


class Run(NamedTuple):
    """The folder of token files, and the checkpoint that two ranks write."""

    folder: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("data") / "tokens"
    write_tokens(folder, DOCUMENTS, 15)
    write_tokens(folder.with_name("tokens-other"), [*DOCUMENTS[:-1], [1]], 15)
    corrupt = Path(shutil.copytree(folder, folder.with_name("tokens-corrupt"))) / "00001.bin"
    corrupt.write_bytes(b"\xff" + corrupt.read_bytes()[1:])
    return Run(folder, folder.with_name("saved.ckpt"))


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
    trainer = quiet_trainer(
        strategy=ContextParallelStrategy(context_parallel_size=cp_size), max_steps=steps or STEPS,
        callbacks=callbacks, check_val_every_n_epoch=None, val_check_interval=STEPS, **options,
    )  # fmt: skip
    module = CausalLM(config, **rates)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if save is not None:
        trainer.save_checkpoint(save)
    found = {"indices": recorder.indices, "wrong": recorder.wrong, "num_consumed": data.num_consumed}
    groups = [[x["lr"], x["weight_decay"], *x["betas"]] for x in trainer.optimizers[0].param_groups]
    return {**found, "eval_losses": module.eval_losses, "num_sequences": len(data.train), "groups": groups}


def token_data(folder: Path, **options: Any) -> TokenData:
    options = {"seqlen": SEQLEN, "held_out_percent": HELD_OUT_PERCENT, "num_eval_sequences": 2, "seed": SEED, **options}
    return TokenData(str(folder), **options)


def in_order(found: dict[str, Any]) -> list[int]:
    """The sequences that one rank would draw first."""
    assert found["num_sequences"] > 9
    order = iter(SampleOrder(found["num_sequences"], seed=SEED, dp_rank=0, dp_size=1, first=0))
    return [next(order) for _ in range(9)]


@on_ranks(2)
def test_data_ranks(ctx: Context, run: Run) -> None:
    """Two ranks draw what one would; every batch is that of `prepare_batch`: each key, dtype and value, no more."""
    found = fit(token_data(run.folder), run.folder, 1, save=run.checkpoint)
    assert found["wrong"] == [] and found["indices"] == in_order(found)[ctx.rank : 6 : 2], found


@on_ranks(2, 1)
def test_ring(ctx: Context, run: Run) -> None:
    """Training continues in the middle of an epoch, on a ring of two ranks or on one.

    Losses for the trained and the held-out sequences are the same on both ranks.
    """
    found = fit(token_data(run.folder), run.folder, ctx.size, checkpoint=run.checkpoint, steps=2 * STEPS)
    assert found["wrong"] == [] and found["indices"] == in_order(found)[6:] and found["num_consumed"] == 9, found
    losses, everyone = found["eval_losses"], [None] * ctx.size
    assert losses.keys() == {"train", "held_out"} and all(math.isfinite(x) for x in losses.values())
    dist.all_gather_object(everyone, losses)
    assert everyone == [losses] * ctx.size


@on_ranks(2)
def test_corrupt_file(ctx: Context, run: Run) -> None:
    """Both ranks name the file that one of them has, and who has it; neither waits for the other."""
    where = run.folder.with_name("tokens-corrupt") if ctx.rank else run.folder
    with pytest.raises(ValueError, match="^shards in .*got others in 00001.bin") as error:
        fit(token_data(where), run.folder, 2)
    assert error.type.__name__ == ("TokenFileError" if ctx.rank else "ValueError")
    assert ctx.rank or str(error.value).endswith("(raised on ranks [1])")


@on_ranks(2)
def test_wrong_data(ctx: Context, run: Run) -> None:
    """Other files on another rank, and a model without some of the tokens, are refused on both."""
    where = run.folder.with_name("tokens-other") if ctx.rank else run.folder
    with pytest.raises(ValueError, match="must hold the same token files on every rank"):
        fit(token_data(where), run.folder, 2)
    with pytest.raises(ValueError, match="vocab_size of the model must be 257 or more"):
        fit(token_data(run.folder), run.folder, 2, config={**CONFIG, "vocab_size": 100})


@on_ranks(2, 1)
def test_another_split(ctx: Context, run: Run) -> None:
    with pytest.raises(ValueError, match="must be that of the checkpoint"):
        data = token_data(run.folder, held_out_percent=30.0)
        fit(data, run.folder, ctx.size, checkpoint=run.checkpoint, steps=2 * STEPS)


@pytest.mark.parametrize("scheduled", [False, True])
@on_ranks(1)
def test_mid_step(ctx: Context, run: Run, scheduled: bool) -> None:
    """A checkpoint in the middle of a step goes on with the whole step, to the same bits.

    Two of the step's four sequences had gradients, which no checkpoint holds: all four are drawn again.

    Args:
        scheduled: a callback sets the number of sequences, which Lightning calls at the beginning of an epoch only.
    """
    path = run.checkpoint.with_name("mid_step.ckpt")
    whole, resumed = Norms(6, path), Norms()
    for callback, checkpoint in ((whole, None), (resumed, path)):
        data, accumulated = token_data(run.folder), {"accumulate_grad_batches": 1 if scheduled else 4}
        callbacks = [callback, *([GradientAccumulationScheduler({0: 4})] if scheduled else [])]
        fit(data, run.folder, 1, checkpoint=checkpoint, callbacks=callbacks, **accumulated)
        assert data.num_consumed == 4 * STEPS
    assert sorted(whole.norms) == [1, 2, 3] and sorted(resumed.norms) == [2, 3]
    assert resumed.norms.items() <= whole.norms.items()


@on_ranks(1)
def test_epochs(ctx: Context, run: Run) -> None:
    """Epochs of the trainer go on in the data: three of three steps each, and no sequence is read twice."""
    found = fit(token_data(run.folder), run.folder, 1, steps=3 * STEPS, limit_train_batches=STEPS, max_epochs=3)
    assert found["wrong"] == [] and found["num_consumed"] == 9 and len(set(found["indices"])) == 9, found


@on_ranks(1)
def test_completed_epoch(ctx: Context, run: Run) -> None:
    """A checkpoint from the end of an epoch goes on with the next one, whose steps have all their batches."""
    path, options = run.checkpoint.with_name("epoch.ckpt"), {"limit_train_batches": 4, "accumulate_grad_batches": 2}
    whole, resumed = Norms(), Norms()
    fit(token_data(run.folder), run.folder, 1, steps=2, save=path, **options)
    for callback, checkpoint in ((whole, None), (resumed, path)):
        found = fit(
            token_data(run.folder), run.folder, 1, steps=4, checkpoint=checkpoint, callbacks=[callback],
            limit_val_batches=0, **options,
        )  # fmt: skip
        assert found["num_consumed"] == 8, found
    assert sorted(resumed.norms) == [3, 4] and resumed.norms.items() <= whole.norms.items()


@on_ranks(1)
def test_other_options(ctx: Context, run: Run) -> None:
    """Continuing with more batches a step begins with a whole step, and with other rates has those.

    Six sequences in three steps, then a step of two: with the count of batches as it was it would have one. Decay and
    betas are other ones, too; the rate is that after four steps of the warm-up.
    """
    options = {"checkpoint": run.checkpoint, "steps": STEPS + 1, "rates": RATES, "accumulate_grad_batches": 2}
    found = fit(token_data(run.folder), run.folder, 1, **options)
    assert found["num_consumed"] == 8 and found["wrong"] == [], found
    rate = 1e-5 * CausalLM({}).rate_factor(4)
    assert found["groups"] == [[rate, 0.5, 0.8, 0.9], [rate, 0.0, 0.8, 0.9]], found


@pytest.mark.parametrize("percent", [0.0, 100.0, -1.0])
def test_held_out_part_that_is_none_or_all_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match=f"held_out_percent must be between 0 and 100, got {percent}"):
        TokenData("tokens", 48, held_out_percent=percent)


def test_checkpoint_of_another_order_is_refused() -> None:
    """Its place names other documents. Before documents were mixed by length, checkpoints did not name their order."""
    data: Any = TokenData("tokens", 48)
    data.files, data.train = SimpleNamespace(header=SimpleNamespace(fingerprint="f")), range(5)
    state = data.state_dict()
    data.load_state_dict(state)
    for older in ({**state, "order": 1}, {name: x for name, x in state.items() if name != "order"}):
        with pytest.raises(ValueError, match=r"order must be that of the checkpoint \((1|None)\), got 2; resume with"):
            data.load_state_dict(older)
