"""Training on a 2 x 2 mesh of data and context against one process: gradients, clipping, weights, losses.

Four gloo processes on the CPU. The reference is plain torch in one process: no mesh, no shards, no Lightning.
"""

import math
import os
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import DoublePrecision
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from recipes.lightning import progress as progress_module
from recipes.lightning.passkey import Passkey, encoder, passkey_sequence
from recipes.lightning.progress import Progress
from recipes.lightning.text import TextData
from ringflash import huggingface
from ringflash.data.order import SampleOrder
from ringflash.lightning import CausalLM, ContextParallelStrategy
from ringflash.memory import Memory
from tests.helpers.models import TINY
from tests.helpers.pool import Context, on_ranks
from tests.helpers.quiet_trainer import Losses, quiet_trainer
from tests.helpers.recipe_model import build_model
from tests.recipes.launching import Run, error_of

CONFIG = TINY | {
    "model_type": "llama", "vocab_size": 257, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SEQLEN, DP_SIZE, CP_SIZE, STEPS, NUM_EVAL = 48, 2, 2, 2, 4
SAVING = Memory("attention_kept", offload_checkpoints=True, mlp_tile_tokens=7)
CLIPPING = {"norm": 0.05, "value": 1e-3}  # both far below what the gradients are

RTOL_FP64 = 1e-11

Tensors = dict[str, torch.Tensor]


class LightningClipping(CausalLM):
    """The model with Lightning's own clipping, as a user's module would have it."""

    configure_gradient_clipping = lightning.LightningModule.configure_gradient_clipping


class Recorder(lightning.Callback):
    """Whole gradients, as the optimizer used them, and whole weights after each step; the loss and its norm."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensors, Tensors]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, module: CausalLM, *_: Any) -> None:
        named = [(name.removeprefix("model."), p) for name, p in module.named_parameters()]
        grads = {name: p.grad.full_tensor() for name, p in named}
        self.steps.append((grads, {name: p.detach().full_tensor().clone() for name, p in named}))
        self.metrics.append({k: v.item() for k, v in trainer.callback_metrics.items()})


def fit(module: CausalLM, folder: str, **options: Any) -> tuple[Recorder, lightning.Trainer]:
    """Train for a few steps on data x context ranks."""
    recorder = Recorder()
    trainer = trainer_with(limit_val_batches=0, callbacks=[recorder], **options)
    trainer.fit(module, datamodule=data(folder))
    return recorder, trainer


def trainer_with(**options: Any) -> lightning.Trainer:
    """A trainer on data x context ranks."""
    defaults: dict[str, Any] = {"strategy": ContextParallelStrategy(context_parallel_size=CP_SIZE), "max_steps": STEPS}
    return quiet_trainer(**(defaults | options))


def data(folder: str) -> TextData:
    """Sequences of a few documents each."""
    return TextData(SEQLEN, folder, ".txt", num_eval_sequences=NUM_EVAL)


def reference(module: CausalLM, texts: Any, algorithm: str) -> Iterator[tuple[Tensors, Tensors, float, float]]:
    """Gradients after clipping, weights, loss and norm of each step, by one process over both data ranks' samples."""
    module.model = model = build_model(CONFIG, None, module.seed, dtype=torch.float64)
    optimization = module.configure_optimizers()
    optimizer, scheduler = optimization["optimizer"], optimization["lr_scheduler"]["scheduler"]
    samples = iter(SampleOrder(len(texts), seed=0, dp_rank=0, dp_size=1, first=0))
    for _ in range(STEPS):
        optimizer.zero_grad()
        batches = [texts[next(samples)] for _ in range(DP_SIZE)]
        prepared = (huggingface.prepare_batch(b["input_ids"], group=None, cu_seqlens=b["cu_seqlens"]) for b in batches)
        loss = sum(model(**batch) for batch in prepared) / DP_SIZE
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
        clip(model.parameters(), CLIPPING[algorithm])
        optimizer.step()
        scheduler.step()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        yield grads, weights, loss.item(), norm.item()


def assert_close(got: float, want: float) -> None:
    """Assert that a number is that of one process, in fp64."""
    assert abs(got - want) <= RTOL_FP64 * abs(want), (got, want)


@on_ranks(4)
def test_wrong_sizes(ctx: Context, run: Run) -> None:
    """Three does not divide four: every rank says so, and no process group was made. The first test of these ranks."""
    error = error_of(fit, CausalLM(CONFIG), run.texts, strategy=ContextParallelStrategy(3, 1))
    assert "must be the number of ranks (4), got 1 * 3; start 3 ranks" in error, error
    error = error_of(fit, CausalLM(CONFIG), run.texts, strategy=ContextParallelStrategy(replicate_size=3))
    assert error.startswith("replicate_size must divide the number of ranks (4), got 3; 1"), error
    assert not dist.is_initialized()


@on_ranks(4)
def test_evaluation(ctx: Context, run: Run) -> None:
    """Losses over fixed sequences, whole and by position, are those of one process's own sums: means over tokens.

    Sequences with more documents have fewer labels: the mean of the sequences' means is another number.
    """
    module, strategy = CausalLM(CONFIG), ContextParallelStrategy(context_parallel_size=CP_SIZE, layout="balanced")
    trainer = trainer_with(plugins=[DoublePrecision()], strategy=strategy)
    trainer.validate(module, datamodule=data(run.texts), verbose=False)
    model = build_model(CONFIG, None, module.seed, dtype=torch.float64)
    for name, text in (("train", trainer.datamodule.train), ("held_out", trainer.datamodule.held_out)):
        sums: dict[int, list[float]] = {}
        for i in range(NUM_EVAL):
            for bucket, loss in token_losses(model, text[i * len(text) // NUM_EVAL]):
                sums.setdefault(bucket, []).append(loss)
        want = {bucket: sum(losses) / len(losses) for bucket, losses in sums.items()}
        got = module.eval_losses_by_position[name]
        assert got.keys() == want.keys() and len(want) > 2, (got, want)
        for bucket, loss in want.items():
            assert_close(got[bucket], loss)
        every = [loss for losses in sums.values() for loss in losses]
        assert_close(module.eval_losses[name], sum(every) / len(every))


@on_ranks(4)
def test_passkey(ctx: Context, run: Run) -> None:
    """The keys' losses over the ring, in stripes, are as one process computes them from whole logits.

    A model that knows nothing finds no key, and is as surprised by the right digits.
    """
    seqlen, callback = 256, Passkey(depths=(0.1, 0.9), num_keys=2, num_digits=3, seed=1)
    module, texts = CausalLM(CONFIG), TextData(seqlen, run.texts, ".txt", num_eval_sequences=1)
    strategy = ContextParallelStrategy(layout="striped")
    trainer = trainer_with(plugins=[DoublePrecision()], callbacks=[callback], strategy=strategy)
    trainer.validate(module, datamodule=texts, verbose=False)
    model, draw = build_model(CONFIG, None, module.seed, dtype=torch.float64), random.Random(1)
    for depth in callback.depths:
        losses = []
        for _ in range(2):
            key = "".join(draw.choices("0123456789", k=3))
            ids, _ = passkey_sequence(key, depth, seqlen, encoder("bytes"))
            hidden = model.model.model(input_ids=ids, position_ids=torch.arange(seqlen)[None], use_cache=False)
            logits = model.model.lm_head(hidden.last_hidden_state)[0, -4:-1]
            losses.append(nn.functional.cross_entropy(logits, ids[0, -3:]).item())
        assert_close(callback.found[depth].loss, sum(losses) / len(losses))
        assert callback.found[depth].keys == 0.0


def token_losses(model: Any, sample: Any) -> Iterator[tuple[int, float]]:
    """(bucket, loss) of each token with a successor in its document, from whole logits."""
    ids, bounds = sample["input_ids"], sample["cu_seqlens"]
    positions = torch.arange(ids.shape[1])[None]
    hidden = model.model.model(input_ids=ids, position_ids=positions, cu_seqlens=bounds, use_cache=False)
    logits = model.model.lm_head(hidden.last_hidden_state)[0]
    for start, stop in zip(bounds.tolist(), bounds[1:].tolist(), strict=False):
        for i in range(start, stop - 1):
            bucket = sum((i - start) * 2**power >= SEQLEN for power in range(1, 8))
            yield bucket, nn.functional.cross_entropy(logits[i], ids[0, i + 1]).item()


def equals_one_process(
    run: Run,
    algorithm: str,
    module_class: Callable[..., CausalLM] = CausalLM,
    strategy: ContextParallelStrategy | None = None,
) -> lightning.Trainer:
    """Gradients, weights, losses and logged norms of two clipped steps of AdamW are those of one process, in fp64.

    The norm is that of the whole gradient before clipping, which is large enough to be clipped.
    """
    recorder, trainer = fit(
        module_class(CONFIG), run.texts, plugins=[DoublePrecision()],
        gradient_clip_val=CLIPPING[algorithm], gradient_clip_algorithm=algorithm,
        strategy=strategy or ContextParallelStrategy(CP_SIZE),
    )  # fmt: skip
    expected = reference(CausalLM(CONFIG), trainer.datamodule.train, algorithm)
    for step, metrics, (grads, weights, loss, norm) in zip(recorder.steps, recorder.metrics, expected, strict=True):
        for ours, theirs in zip(step, (grads, weights), strict=True):
            assert ours.keys() == theirs.keys()
            for name, want in theirs.items():
                assert (ours[name] - want).abs().max() <= RTOL_FP64 * want.abs().max(), name
        assert_close(metrics["loss"], loss)
        assert norm > CLIPPING[algorithm]
        if module_class is not LightningClipping:
            assert_close(metrics["grad_norm"], norm)
    return trainer


@on_ranks(4)
def test_clipped_by_norm(ctx: Context, run: Run) -> None:
    """Gradients are clipped by our norm.

    Ranks 0 and 1 share a sequence, 2 and 3 another; all four share the parameters; samplers split by data. All groups
    have the timeout asked for.
    """
    limit = timedelta(seconds=1234)
    trainer = equals_one_process(run, "norm", strategy=ContextParallelStrategy(CP_SIZE, timeout=limit))
    strategy, first = trainer.strategy, dist.get_rank() // 2
    assert strategy.device_mesh.mesh_dim_names == ("data_parallel", "context_parallel")
    assert (strategy.dp_size, strategy.cp_size, strategy.shard_mesh.size()) == (2, 2, 4)
    assert dist.get_process_group_ranks(strategy.cp_group) == [2 * first, 2 * first + 1]
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": first}
    assert trainer.datamodule.num_consumed == STEPS * DP_SIZE
    for group in (*strategy.device_mesh.get_all_groups(), strategy.shard_mesh.get_group()):
        assert group._get_backend(torch.device("cpu")).options._timeout == limit


@on_ranks(4)
def test_clipped_by_value(ctx: Context, run: Run) -> None:
    """Gradients are clipped by value, and activations are saved on."""
    equals_one_process(run, "value", partial(CausalLM, memory=SAVING))


@on_ranks(4)
def test_clipped_by_lightning(ctx: Context, run: Run) -> None:
    """Gradients are clipped by Lightning's own hook, which logs no norm."""
    equals_one_process(run, "norm", LightningClipping)


@on_ranks(4)
def test_replicated(ctx: Context, run: Run) -> None:
    """Two copies of parameters, each sharded over two ranks, are written once, as if sharded over all.

    A run without copies reads the checkpoint.
    """
    path = run.out / "replicated.ckpt"
    strategy = ContextParallelStrategy(CP_SIZE, replicate_size=2, layout="balanced")
    equals_one_process(run, "norm", strategy=strategy)
    module, trainer = strategy.lightning_module, strategy._trainer
    trainer.save_checkpoint(path)
    assert {str(p.placements) for p in module.parameters()} == {"(Replicate(), Shard(dim=0))"}
    other = CausalLM(CONFIG)
    trainer_with(plugins=[DoublePrecision()]).validate(other, datamodule=data(run.texts), ckpt_path=path, verbose=False)
    assert {str(p.placements) for p in other.parameters()} == {"(Shard(dim=0),)"}
    for read, p in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(read.detach().full_tensor(), p.detach().full_tensor())
    pieces = FileSystemReader(path).read_metadata().storage_data.values()
    assert sum(part.stat().st_size for part in path.glob("*.distcp")) == sum(piece.length for piece in pieces)


@on_ranks(4)
def test_precisions(ctx: Context, run: Run) -> None:
    """Parameters have the dtype that is asked for, frequencies are exact, and metrics the same on every rank."""
    for name, dtype in (("32-true", "float32"), ("bf16-mixed", "float32"), ("bf16-true", "bfloat16")):
        module = CausalLM(CONFIG)
        recorder, _ = fit(module, run.texts, precision=name, gradient_clip_val=1.0, max_steps=1)
        assert {str(p.dtype) for p in module.parameters()} == {f"torch.{dtype}"}, name
        assert {str(x.dtype) for x in module.buffers()} == {"torch.float32"}, name
        assert all(math.isfinite(x) for step in recorder.metrics for x in step.values()), recorder.metrics
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, recorder.metrics)
        assert everyone == [recorder.metrics] * len(everyone)


class Clock(lightning.Callback):
    """A second for each batch."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds += 1.0


class Probe(lightning.Callback):
    """A callback whose work at the end of each evaluation takes a hundred seconds, such as `Passkey`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_validation_end(self, *_: Any) -> None:
        self.clock.seconds += 100.0


class Curve(Logger):
    """A logger that says where its results are as W&B's does, by save_dir only; it keeps none."""

    name, version, save_dir = "curve", 0, "curve"  # type: ignore[assignment]

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """Lightning wants it overridden."""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Likewise."""


@on_ranks(4)
def test_progress(ctx: Context, run: Run) -> None:
    """Tokens are counted with the time they took, and a loss is that of both batches of a step.

    An evaluation is in the middle of the second step: the time is counted anew. The sanity check takes half of the
    sequences, whose losses are not shown with those of all.
    """
    clock, recorder, losses, lines = Clock(), Recorder(), Losses(), Progress(every_n_steps=1)
    progress_module.time = clock  # type: ignore[assignment]
    trainer = trainer_with(
        callbacks=[clock, lines, Probe(clock), recorder, losses], logger=Curve(), accumulate_grad_batches=2,
        check_val_every_n_epoch=None, val_check_interval=3, num_sanity_val_steps=1, max_steps=3,
    )  # fmt: skip
    trainer.fit(LightningClipping(CONFIG), datamodule=data(run.texts))  # logs no norm
    assert {x["tokens_per_second"] for x in recorder.metrics if "tokens_per_second" in x} == {DP_SIZE * float(SEQLEN)}
    shown = [x for x in recorder.metrics if "tokens_per_second" in x]
    assert {x["seconds_per_step"] for x in shown} == {2.0}  # a second a batch
    assert sorted({x["tokens_seen"] for x in shown}) == [2 * DP_SIZE * SEQLEN * step for step in (1, 2, 3)]
    assert [step for step, _ in lines.evaluations] == [1, 3]
    wanted = torch.stack(losses.parts).reshape(3, 2).sum(1)
    dist.all_reduce(wanted)
    logged = torch.tensor([batch["loss"] for batch in recorder.metrics[1::2]])
    torch.testing.assert_close(logged, wanted / dist.get_world_size(), rtol=1e-6, atol=0)


@on_ranks(4)
def test_second_share(ctx: Context, run: Run) -> None:
    """Lightning's default would judge by half of each data rank's sequences, and say nothing."""
    trainer = trainer_with(use_distributed_sampler=True)
    error = error_of(trainer.validate, CausalLM(CONFIG), datamodule=data(run.texts), verbose=False)
    assert "use_distributed_sampler must be False" in error, error


class Idle(lightning.LightningModule):
    """It would hang: nothing must reach its steps."""

    def configure_model(self) -> None:
        """Shard nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("a batch arrived")

    validation_step = test_step = predict_step = training_step

    def configure_optimizers(self) -> None:
        """None."""


@on_ranks(4)
def test_uneven(ctx: Context, run: Run) -> None:
    """A data rank with a batch more than the other would wait for it half an hour, whatever the trainer does."""
    for name in ("fit", "validate", "test", "predict"):
        batches = torch.utils.data.DataLoader(range(1 + int(os.environ["RANK"]) // CP_SIZE))
        trainer = trainer_with(limit_val_batches=0 if name == "fit" else None)
        assert error_of(getattr(trainer, name), Idle(), batches) == (
            "data loaders must have the same number of batches on every rank, got [1] and [2]; drop or repeat "
            "sequences until the numbers are equal."
        )
