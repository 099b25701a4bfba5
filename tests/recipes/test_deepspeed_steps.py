"""Trainings of a module without a ring through Lightning's DeepSpeed: when it steps, clips, saves and averages.

Two and four gloo processes on the CPU. Every rank has the same batches, so that one process in fp64 says what is right.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.utils import safe_get_full_fp32_param
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader

from recipes.deepspeed.strategy import DeepSpeedContextParallelStrategy
from ringflash import deepspeed
from ringflash.comm.seeding import seeded
from tests.helpers.one_step import Tensors
from tests.helpers.pool import Context, on_ranks
from tests.helpers.quiet_trainer import quiet_trainer
from tests.recipes.launching import ROOT, error_of

CLIPPING, OTHER_CLIPPING, DECAY = 0.05, 0.2, 0.5
CONFIGS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
CP_SIZE = 2
FP32_EPS = 2.0**-23


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@cache
def mesh() -> DeviceMesh:
    """Join these ranks, of which two share a sequence."""
    return deepspeed.context_mesh(CP_SIZE)


def config_of(name: str) -> dict[str, Any]:
    """A recipe's; stage 0 is stage 1's with another number."""
    content = json.loads((ROOT / "recipes" / "deepspeed" / f"{name.replace('zero0', 'zero1')}.json").read_text())
    content["zero_optimization"]["stage"] = int(name[4])
    return content


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters by the names of the transformers model."""
    return [(name.removeprefix("model."), p) for name, p in module.named_parameters()]


def weights(module: nn.Module) -> Tensors:
    """Whole, on every rank; stage 0 in fp32 keeps them where torch does."""
    return {name: _whole(p).detach().clone() for name, p in named(module)}


def _whole(p: nn.Parameter) -> torch.Tensor:
    found = safe_get_full_fp32_param(p)
    return p if found is None else found


class Line(lightning.LightningModule):
    """A step of it takes no time; it makes an optimizer and no scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rates = nn.Linear(2, 2), list[float]()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("eval_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def short_trainer(strategy: DeepSpeedContextParallelStrategy, **options: Any) -> lightning.Trainer:
    """A trainer, of four steps unless the options say otherwise."""
    return quiet_trainer(strategy=strategy, **({"max_steps": 4} | options))


@on_ranks(4)
def test_unequal_batches(ctx: Context) -> None:
    """A data rank with a batch more than the other is refused: it would wait for gradients that the other lacks."""
    mesh()
    strategy = DeepSpeedContextParallelStrategy(CP_SIZE, config=config_of("zero1"))
    module = Line()
    module.train_dataloader = lambda: torch.utils.data.DataLoader(torch.randn(1 + strategy.dp_rank, 2))  # type: ignore
    error = error_of(short_trainer(strategy).fit, module)
    assert error.startswith("data loaders must have the same number of batches on every rank, got [1] and [2]"), error


@on_ranks(4)
def test_scheduled_rates(ctx: Context) -> None:
    """The scheduler of the config is followed if the module makes none: a linear warm-up over four steps."""
    mesh()
    warm_up = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}
    config = {**config_of("zero1"), "scheduler": {"type": "WarmupLR", "params": warm_up}}
    module = Line()
    trainer = short_trainer(DeepSpeedContextParallelStrategy(CP_SIZE, config=config))
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(4, 2)))
    assert module.rates == pytest.approx([0.0, 0.025, 0.05, 0.075])


class ByHand(Line):
    """Its own steps, each of two batches with two backwards after one forward, and clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx) / 4)
        if batch_idx % 2:
            self.clip_gradients(optimizer, CLIPPING, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Keeper(lightning.Callback):
    """Whole weights at the end of training; a checkpoint after the first epoch on request."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self.path is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: lightning.Trainer, module: Line) -> None:
        self.weights = weights(module)


def made(kind: type[Line], seed: int = 0) -> Line:
    """The same weights for the same seed."""
    with seeded(seed):
        return kind()


def batches_of(count: int) -> torch.Tensor:
    """Return so many batches of one vector."""
    return torch.randn(count, 1, 2, generator=torch.Generator().manual_seed(1))


def trained(module: Line, steps: list[list[int]], clipping: list[float], *, parts: int) -> AveragedModel:
    """The module in fp64 after steps of such batches, each a part of the step, and its average over them."""
    module.double()
    optimizer, data = module.configure_optimizers(), batches_of(4).double()
    average = AveragedModel(module, avg_fn=get_ema_avg_fn(DECAY))
    for step, norm in zip(steps, clipping, strict=True):
        for i in step:
            (Line.training_step(module, data[i], i) / parts).backward()
        nn.utils.clip_grad_norm_(module.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(module)
    return average


def furthest(got: Tensors, want: nn.Module) -> float:
    """Largest error of a parameter, relative to its largest value."""
    wanted = dict(want.named_parameters())
    assert got.keys() == wanted.keys()
    return max(((got[n].double() - p).abs().max() / p.abs().max()).item() for n, p in wanted.items())


@on_ranks(2)
def test_steps(ctx: Context) -> None:
    """Steps by hand, clipped, each after four backwards; and accumulated ones in epochs that end in the middle of one.

    Each of up to four steps of fp32 rounds some ten times: gradients, their norm, the clipping, the update.
    """
    mesh()
    for name in CONFIGS:
        epochs = [[0, 1], [2], [0, 1], [2]]
        for kind, batches, count, options in (
            (ByHand, [[0, 1], [2, 3]], 4, {"max_epochs": 1}),
            (Line, epochs, 3, {"max_epochs": 2, "gradient_clip_val": CLIPPING, "accumulate_grad_batches": 2}),
        ):
            keeper, module = Keeper(), made(kind)
            config = config_of(name)
            del config["train_micro_batch_size_per_gpu"]  # which Lightning asks of the loader
            strategy = DeepSpeedContextParallelStrategy(config=config)
            trainer = short_trainer(strategy, callbacks=[keeper], max_steps=-1, **options)
            trainer.fit(module, DataLoader(batches_of(4)[:count], batch_size=None))
            assert trainer.global_step == len(batches)
            want = made(kind)
            trained(want, batches, [CLIPPING] * len(batches), parts=2)
            assert furthest(keeper.weights, want) <= 40 * FP32_EPS, (name, kind)


@on_ranks(2)
def test_checkpoints(ctx: Context, out: Path) -> None:
    """Checkpoints are evaluated and continued, at stage 1 with an average of the weights, which is kept in them."""
    mesh()
    for name in ("zero1", "zero3"):
        found = resuming(name, out / f"{name}.ckpt", average=name == "zero1")
        assert max(found.values()) <= 80 * FP32_EPS, (name, found)


@on_ranks(2)
def test_other_stages(ctx: Context, out: Path) -> None:
    """A run at another stage than the checkpoint's is refused: DeepSpeed fails without a word."""
    mesh()
    loader = DataLoader(batches_of(4), batch_size=None)
    for name, other, stage in (("zero0", "zero1", "1 or 2"), ("zero2", "zero3", "3")):
        trainer = short_trainer(DeepSpeedContextParallelStrategy(config=config_of(name)))
        error = error_of(trainer.fit, Line(), loader, ckpt_path=out / f"{other}.ckpt")
        assert error.startswith("ckpt_path must be a checkpoint of this run's ZeRO stage, got "), error
        assert f"the parts of stage {stage}; train at that stage" in error, error


def resuming(name: str, path: Path, average: bool) -> dict[str, float]:
    """Errors of a run that goes on from another's checkpoint, clipped otherwise, and of the checkpoint's evaluation."""
    loader = DataLoader(batches_of(4), batch_size=None)

    def trainer(clipping: float, **options: Any) -> lightning.Trainer:
        callbacks = [*options.pop("callbacks", []), *([EMAWeightAveraging(decay=DECAY)] if average else [])]
        strategy = DeepSpeedContextParallelStrategy(config=config_of(name))
        return short_trainer(strategy, callbacks=callbacks, gradient_clip_val=clipping, max_steps=-1, **options)

    trainer(CLIPPING, callbacks=[Keeper(path)], max_epochs=1).fit(made(Line), loader)
    (evaluated,) = trainer(CLIPPING).validate(made(Line, seed=1), loader, ckpt_path=path, verbose=False)
    keeper, module, want = Keeper(), made(Line, seed=2), made(Line)
    trainer(OTHER_CLIPPING, callbacks=[keeper], max_epochs=2).fit(module, loader, ckpt_path=path)
    steps = [[i] for i in range(4)]
    first = trained(want, steps, [CLIPPING] * 4, parts=1)
    judged = first.module if average else want
    loss = torch.stack([judged.training_step(x, 0) for x in batches_of(4).double()]).mean().item()
    got = keeper.weights
    if average:
        whole = trained(made(Line), steps * 2, [CLIPPING] * 4 + [OTHER_CLIPPING] * 4, parts=1)
        got, want = {n: p.detach() for n, p in module.named_parameters()}, whole.module  # type: ignore[assignment]
    else:
        trained(want, steps, [OTHER_CLIPPING] * 4, parts=1)
    return {"evaluation": abs(evaluated["eval_loss"] / loss - 1), "weights": furthest(got, want)}
