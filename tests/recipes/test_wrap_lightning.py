"""The diff of docs/lightning.md, applied to a plain LightningModule: two ranks train as one process without it.

Gloo processes on the CPU, fp64. One rank has left its losses, and a checkpoint of a run without the diff, in the folder
before two ranks continue.
"""

import json
import os
import random
import re
import sys
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LambdaCallback
from lightning.pytorch.plugins import DoublePrecision
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader

from ringflash import disable_ring
from ringflash.comm.seeding import seeded
from ringflash.lightning import ContextParallelStrategy, ModelCheckpoint, SequenceSharding
from ringflash.lightning.first_step import FirstStep, sample
from ringflash.loss import shift_labels
from tests.helpers import own_models as own
from tests.helpers.pool import Context, on_ranks
from tests.helpers.quiet_trainer import Losses, quiet_trainer
from tests.recipes.launching import ROOT, error_of
from tests.recipes.plain_gpt import GPT

STEPS, RTOL = 3, 1e-10
AVERAGED = 0.25  # weight of a step's parameters in their moving average
SCORES = [[4.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 0.0]]  # of both ranks, by epoch


def documented_diff() -> list[str]:
    """Return the lines of the diff of a LightningModule."""
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "lightning.md").read_text(), re.DOTALL)
    return block.splitlines()


def apply(diff: list[str], text: str) -> str:
    """A text after the diff: a line that goes is replaced by the one that follows it, an import is added on top."""
    header = ""
    for i, line in enumerate(diff):
        if line.startswith("-"):
            assert text.count(line[1:] + "\n") == 1 and diff[i + 1].startswith("+"), line
            text = text.replace(line[1:] + "\n", diff[i + 1][1:] + "\n")
        elif line.startswith("+") and not (i and diff[i - 1].startswith("-")):
            header += line[1:] + "\n"
    return header + text


def write_changed(folder: Path) -> None:
    """plain_gpt.py after documented diff, as changed_gpt.py."""
    plain = (ROOT / "tests/recipes/plain_gpt.py").read_text()
    (folder / "changed_gpt.py").write_text(apply(documented_diff(), plain))


class Run(NamedTuple):
    """A folder with the module after the diff, and what the tests leave in it."""

    folder: str

    @property
    def kind(self) -> Any:
        """Import the module, on a rank."""
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        from changed_gpt import GPT as Changed  # type: ignore[import-not-found]

        return Changed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("wrap")
    write_changed(folder)
    return Run(str(folder))


def loader(seed: int = 2) -> DataLoader[Any]:
    """Whole sequences and their shifted labels; a multiple of what the check takes."""
    rows = torch.randint(0, own.VOCAB, (STEPS, own.LENGTH * 4), generator=torch.Generator().manual_seed(seed))
    return DataLoader([(x, y) for x, y in zip(rows, shift_labels(rows), strict=True)], batch_size=1)


def documented(begin: str) -> str:
    """Return the code in docs/lightning.md that begins so."""
    (code,) = re.findall(rf"```python\n({begin}.*?)```", (ROOT / "docs/lightning.md").read_text(), re.DOTALL)
    return code


def moving_average() -> Any:
    """Return a new callback of docs/lightning.md's class."""
    names = {"lightning": lightning, "distribute_tensor": distribute_tensor}
    exec(documented("class MovingAverage"), names)
    average = names["MovingAverage"]()
    average.rate = AVERAGED
    return average


HOOKS = {
    "on_validation_batch_end": "validation batch", "on_train_start": "sanity validation",
    "on_train_batch_start": "comparison", "on_train_batch_end": "step",
}  # fmt: skip


def sharded() -> tuple[lightning.Callback, dict[str, int]]:
    """A callback, and the most bytes of parameters that it meets whole, by hook."""
    whole: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(trainer: Any, module: lightning.LightningModule, *_: Any) -> None:
            found = sum(p.nbytes for p in module.parameters() if not isinstance(p, DTensor))
            whole[name] = max(found, whole.get(name, 0))

        return hook

    return LambdaCallback(**{hook: note(name) for hook, name in HOOKS.items()}), whole


def train(module: lightning.LightningModule, seed: int = 2, **options: Any) -> dict[str, Any]:
    """Metrics and weights after some steps and an evaluation."""
    trainer = quiet_trainer(max_epochs=1, plugins=[DoublePrecision()], **options)
    trainer.fit(module, loader(seed), loader())
    weights = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in module.named_parameters()}
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "weights": weights}


class Shuffled(lightning.LightningDataModule):
    """A user's data module that shuffles: by Lightning's sampler, or by its own generator.

    Lightning's sampler does so without being asked.
    """

    def __init__(self, seed: int | None = None, shuffle: bool = True) -> None:
        super().__init__()
        self.seed, self.shuffle = seed, shuffle

    def train_dataloader(self) -> DataLoader[Any]:
        """More sequences than a chance order would agree on."""
        own = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        rows = [row for seed in range(2) for row in loader(seed).dataset][:4]
        return DataLoader(rows, batch_size=1, shuffle=self.shuffle, generator=own)


def losses_of(kind: Any, seed: int | None, strategy: Any = None, shuffle: bool = True) -> list[float]:
    """Losses over two epochs of shuffled sequences."""
    losses = Losses()
    trainer = quiet_trainer(
        plugins=[DoublePrecision()], callbacks=[losses], strategy=strategy or ContextParallelStrategy(), max_epochs=2,
        use_distributed_sampler=seed is None,
    )  # fmt: skip
    trainer.fit(build(kind), datamodule=Shuffled(seed, shuffle))
    return losses.found()


def plain_adam(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def adam(module: Any) -> torch.optim.Optimizer:
    """Groups of parameters in another order than the module's, and an empty one, because the embedding is frozen."""
    embedding, *others = module.model.children()
    parts = module.later, *reversed(others), embedding
    groups = [[p for p in x.parameters() if p.requires_grad] for x in parts]
    return torch.optim.AdamW([{"params": x, "lr": 0.01 * 0.9**i} for i, x in enumerate(groups)])


def steps_with_adam(
    kind: Any, strategy: Any, end: int, start: Path | None = None, configure_optimizers: Any = adam
) -> tuple[lightning.Trainer, Losses]:
    """Train to a number of steps, from a checkpoint if one is given, with parameters that no step uses.

    The module is in fp64 from the start: Lightning's default strategy loads weights before its plugin converts them.
    """
    losses, module = Losses(), partly_trained(kind, configure_optimizers)
    trainer = quiet_trainer(plugins=[DoublePrecision()], callbacks=[losses], strategy=strategy, max_steps=end)
    trainer.fit(module, loader(), ckpt_path=start)
    return trainer, losses


def partly_trained(kind: Any, configure_optimizers: Any = adam) -> Any:
    """With a frozen embedding, and a layer that no step uses."""
    module = varied(kind, configure_optimizers=configure_optimizers)
    module.later = torch.nn.Linear(2, 2)
    module.model.embedding.requires_grad_(False)
    return module.double()


@on_ranks(1)
def test_orders_on_one_rank(ctx: Context, run: Run) -> None:
    """Shuffled data is in one order: Lightning's, or that of a user's generator, with the diff and without.

    With the diff, the module runs under Lightning's default strategy as well.
    """
    ring, plain = losses_of(run.kind, None), losses_of(GPT, 5, strategy="auto")
    assert len(plain) == 8 and max(abs(a - b) for a, b in zip(plain, ring, strict=True)) > 1e-3
    assert losses_of(run.kind, None, shuffle=False) == ring
    assert losses_of(run.kind, 5) == pytest.approx(plain, rel=RTOL)
    assert losses_of(run.kind, 5, strategy="auto") == pytest.approx(plain, rel=RTOL)
    Path(run.folder, "losses").write_text(json.dumps([ring, plain]))


@on_ranks(1)
def test_start_without_a_ring(ctx: Context, run: Run) -> None:
    """Checkpoints of two steps on one process, in both formats, and the losses of the plain module's next steps."""
    start = Path(run.folder, "file.ckpt")
    steps_with_adam(GPT, "auto", 2)[0].save_checkpoint(start)
    steps_with_adam(run.kind, ContextParallelStrategy(1), 2)[0].save_checkpoint(Path(run.folder, "folder.ckpt"))
    losses = steps_with_adam(GPT, "auto", 4, start)[1].found()
    Path(run.folder, "losses_after_plain").write_text(json.dumps(losses))


@on_ranks(2)
def test_continue_on_a_ring(ctx: Context, run: Run) -> None:
    """Weights and optimizer state of both formats of one process, then of both of the ring itself."""
    want = json.loads(Path(run.folder, "losses_after_plain").read_text())
    for name in ("file", "folder"):
        strategy = ContextParallelStrategy(save_distributed_checkpoint=name == "folder")
        trainer, losses = steps_with_adam(run.kind, strategy, STEPS, Path(run.folder, f"{name}.ckpt"))
        path = Path(run.folder, f"{name}_of_ring.ckpt")
        trainer.save_checkpoint(path)
        last = steps_with_adam(run.kind, ContextParallelStrategy(), 4, path)[1]
        assert len(want) == 2 and [*losses.found(), *last.found()] == pytest.approx(want, rel=RTOL), name
        assert path.is_dir() == (name == "folder")
        read_plainly(path, trainer.lightning_module)


def read_plainly(path: Path, trained: Any) -> None:
    """Read the weights of a checkpoint into the plain module, a folder's as docs/lightning.md says."""
    module = partly_trained(GPT)
    if path.is_dir():
        code = documented("from torch.distributed.checkpoint").replace("last.ckpt", str(path))
        exec(code.replace("weights.pt", f"{path}_{dist.get_rank()}.pt"), {"torch": torch, "module": module})
    else:
        module.load_state_dict(torch.load(path)["state_dict"])
    for (name, p), whole in zip(trained.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), whole), name


@on_ranks(2)
def test_continue_with_others(ctx: Context, run: Run) -> None:
    """An optimizer whose parameters or kind are not those of the checkpoint is refused."""

    def one_group(module: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])

    def exchanged(module: Any) -> torch.optim.Optimizer:
        optimizer = adam(module)
        one, other = optimizer.param_groups[1], optimizer.param_groups[3]
        one["params"], other["params"] = other["params"], one["params"]
        return optimizer

    def sgd(module: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(adam(module).param_groups, momentum=0.9)

    for name, configure, message in (
        ("file", one_group, "must have the parameter groups of this optimizer, got groups of [2, "),
        ("file", exchanged, "must have the optimizer's state of model.positions.weight, of shapes {'step': (), 'exp_"),
        ("folder", one_group, "must have the parameter groups of this optimizer, got groups of [2, "),
        ("file", sgd, "must have the optimizer's state of model.head.weight, of shapes {'momentum_buffer': (31, 16)}"),
        ("folder", sgd, "must have the optimizer's state of model."),
    ):
        path = Path(run.folder, f"{name}.ckpt")
        error = error_of(steps_with_adam, run.kind, ContextParallelStrategy(), 4, path, configure)
        assert error.startswith(f"{path} {message}"), error


@on_ranks(2)
def test_orders(ctx: Context, run: Run) -> None:
    """Two ranks draw the order that one draws, by the same two ways. No warning is of the mixin's own hook."""
    ring, plain = json.loads(Path(run.folder, "losses").read_text())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert losses_of(run.kind, None) == pytest.approx(ring, rel=RTOL)
    assert not [x for x in seen if "on_before_batch_transfer" in str(x.message)]
    assert losses_of(run.kind, 5) == pytest.approx(plain, rel=RTOL)


def build(kind: type[lightning.LightningModule]) -> lightning.LightningModule:
    """The same parameters for both."""
    with seeded(0):
        return kind()


def varied(kind: Any, **methods: Any) -> Any:
    return build(type("Varied", (kind,), methods))


def tied(kind: Any) -> Any:
    """With a head outside the model, whose weight is the embedding's."""
    module = build(kind)
    module.head = torch.nn.Linear(own.WIDTH, own.VOCAB, bias=False)
    module.head.weight = module.model.embedding.weight
    return module


def with_loss(loss: Callable[..., torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """A step with this loss of the module, its logits, tokens, labels and what else is in the batch."""

    def step(module: Any, batch: Any) -> torch.Tensor:
        positions = getattr(module, "positions", lambda tokens: torch.arange(tokens.shape[1]))
        return loss(module, module.model(batch[0], positions(batch[0])), *batch)

    return step


def mean(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The usual mean over the labels there are, or over a loss mask."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="mean" if mask is None else "none")
    return losses if mask is None else (losses * mask.flatten()).sum() / mask.sum()


# The step of one who shifts what he has: a shard.
unshifted = with_loss(lambda module, logits, tokens, _: module.token_loss(logits[:, :-1], tokens[:, 1:]))
# Of one who divides by the labels he has, of which the last token has none, or by the mask of the shard.
local_mean = with_loss(lambda module, logits, tokens, *rest: mean(logits, *rest))
# Each token is given the previous one's logits, too.
shifted = with_loss(lambda module, x, _, labels: module.token_loss(x + pad(x[:, :-1], (0, 0, 1, 0)), labels))


def with_mask(module: Any, batch: Any, index: int) -> Any:
    """Each sequence's last half counts; the plain module has no hook, but `masked`."""
    return SequenceSharding.on_before_batch_transfer(module, (*batch, loss_mask(batch[0])), index)


def loss_mask(tokens: torch.Tensor) -> torch.Tensor:
    return (torch.arange(tokens.shape[1]) >= tokens.shape[1] // 2).double().expand(tokens.shape)


def masked(module: Any, logits: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor, *mask: Any) -> torch.Tensor:
    """A weighted mean by token_loss; by the plain module, whose hook adds no mask, as it is usual."""
    learned = logits[..., 0].sigmoid()
    if hasattr(module, "token_loss"):
        return module.token_loss(logits, labels, *(learned * x for x in mask))
    return mean(logits, labels, learned * loss_mask(tokens) * (labels != -100))


@on_ranks(2)
def test_weights(ctx: Context, run: Run) -> None:
    """A loss mask times learned weights is right as weights of token_loss, which every rank's weights divide."""
    module = varied(run.kind, on_before_batch_transfer=with_mask, step=with_loss(masked))
    found = train(module, strategy=ContextParallelStrategy())
    assert_trained(found["weights"], plainly(step=with_loss(masked))[0])


@on_ranks(2)
def test_between_steps(ctx: Context, run: Run) -> None:
    """A prompt between steps is refused, by hook and by hand; off the ring its logits are those of the plain module."""
    found: list[Any] = []
    prompt = torch.arange(8)[None]

    def sample(module: Any) -> torch.Tensor:
        return module.model(prompt, module.positions(prompt)).detach()

    def on_validation_epoch_end(module: Any) -> None:
        found.append(error_of(sample, module))
        with disable_ring(module):
            found.append(sample(module))

    module = varied(run.kind, on_validation_epoch_end=on_validation_epoch_end)
    train(module, strategy=ContextParallelStrategy(), num_sanity_val_steps=0)
    with torch.no_grad():
        found.append(error_of(sample, module))
    plain = varied(GPT).double()
    plain.load_state_dict(plainly()[0])
    want = plain.model(prompt, torch.arange(8))
    assert torch.allclose(found[1], want, rtol=RTOL, atol=RTOL)
    for error in (found[0], found[2]):
        assert error.startswith("model.blocks.0.attn must be called in a step of the module (training_step, "), error


@with_loss
def drawn(module: Any, logits: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Random numbers for each sequence, as diffusion has."""
    logits = logits * torch.rand(len(tokens), 1, 1, dtype=torch.float64) * random.random()
    return module.token_loss(logits, labels)


@on_ranks(2)
def test_draws(ctx: Context, run: Run) -> None:
    """Both runs of the comparison before the first step draw the same numbers, and take none from the training."""
    numbers: list[float] = []

    def step(module: Any, batch: Any) -> torch.Tensor:
        numbers.append(torch.rand((), dtype=torch.float64).item() + random.random())
        return drawn(module, batch)

    torch.manual_seed(3)
    random.seed(3)
    train(varied(run.kind, step=step), strategy=ContextParallelStrategy(), num_sanity_val_steps=0)
    assert numbers[:9] == [numbers[0]] * 9, "four times on the shard and on the whole sequence, in the first step"
    assert len({*numbers}) > STEPS


@on_ranks(2)
def test_workers(ctx: Context, run: Run) -> None:
    """`seed_everything(workers=True)` seeds the loaders' workers of both ranks alike, which must read the same."""
    module = build(run.kind)
    with mock.patch.dict(os.environ, PL_SEED_WORKERS="1"):
        train(module, strategy=ContextParallelStrategy(), limit_train_batches=1, limit_val_batches=0)
    assert module.trainer.train_dataloader.worker_init_fn.keywords == {"rank": 0}


@on_ranks(2)
def test_hooks(ctx: Context, run: Run) -> None:
    """Lightning's hooks of batches run before the first step is compared; features of a sequence stay whole there.

    The step takes no index.
    """

    def with_features(module: Any, batch: Any, index: int) -> Any:
        return run.kind.on_before_batch_transfer(module, (*batch, torch.ones(len(batch[0]), 100)), index)

    def shard_batch(module: Any, batch: Any, group: Any) -> Any:
        return *run.kind.shard_batch(module, tuple(batch[:2]), group), batch[2]

    def by_name(module: Any, batch: Any, index: int) -> Any:
        return dict(zip(("tokens", "labels", "features"), batch, strict=True))

    def step(module: Any, batch: Any) -> torch.Tensor:
        assert batch["features"].shape == (1, 100)
        logits = module.model(batch["tokens"], module.positions(batch["tokens"]))
        return module.token_loss(logits, batch["labels"])

    module = varied(
        run.kind, on_before_batch_transfer=with_features, shard_batch=shard_batch, on_after_batch_transfer=by_name,
        step=step, training_step=lambda self, batch: self.step(batch),
    )  # fmt: skip
    assert_trained(train(module, strategy=ContextParallelStrategy())["weights"], plainly()[0])


def manual_step(module: Any, batch: Any, batch_idx: int) -> None:
    """A step with its own backward, optimizer, schedule and clipping, that counts, collects and toggles."""
    optimizer = module.optimizers()
    module.lr_schedulers().step()
    module.toggle_optimizer(optimizer)
    module.model.seen += 1
    module.losses.append(batch_idx)
    optimizer.zero_grad()
    module.manual_backward(module.step(batch))
    module.clip_gradients(optimizer, 1e9, "norm")
    optimizer.step()
    module.untoggle_optimizer(optimizer)


@on_ranks(2)
def test_manual(ctx: Context, run: Run) -> None:
    """A step with its own backward trains as the plain module; the comparison before it leaves no trace.

    Three steps have counted in a buffer, collected in a list and moved a schedule, and nothing else has.
    """

    def configure_optimizers(module: Any) -> Any:
        optimizer = run.kind.configure_optimizers(module)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 1.0)]

    module = varied(
        run.kind, training_step=manual_step, automatic_optimization=False, configure_optimizers=configure_optimizers
    )
    module.model.register_buffer("seen", torch.zeros(()))
    module.losses = []
    assert_trained(train(module, strategy=ContextParallelStrategy())["weights"], plainly()[0])
    assert (module.model.seen.item(), module.losses, module.lr_schedulers().last_epoch) == (3, [0, 1, 2], 3)


def logging_step(module: Any, batch: Any) -> torch.Tensor:
    """Log right values, each rank's own, and a mean over the labels of a shard."""
    tokens, labels = batch
    logits = module.model(tokens, module.positions(tokens))
    labelled, loss = labels != -100, module.token_loss(logits, labels)
    module.log_dict({"loss of the sequence": loss, "size": logits.abs().max()}, reduce_fx="max")
    module.log("labels", labelled.sum(), reduce_fx=torch.sum, sync_dist=True)
    module.log("mean over the shard", cross_entropy(logits.flatten(0, 1), labels.flatten()))
    module.log("own", labelled.sum(), sync_dist=False)
    return loss


@on_ranks(2)
def test_logs(ctx: Context, run: Run) -> None:
    """Values of each kind of step's log that are not the sequence's are named once, by the first rank."""
    steps = {name: lambda self, batch: logging_step(self, batch) for name in ("training_step", "validation_step")}
    steps["test_step"] = lambda self, batch, batch_idx, dataloader_idx: logging_step(self, batch)
    module = varied(run.kind, **steps)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(module, strategy=ContextParallelStrategy())
        quiet_trainer(plugins=[DoublePrecision()], strategy=ContextParallelStrategy()).test(module, [loader()] * 2)
    texts = [text for x in found if "should be those of the whole sequence" in (text := str(x.message))]
    assert [text.split()[2] for text in texts] == ([*sorted(steps)[::-1]] if ctx.rank == 0 else [])
    assert all(re.findall(r"'([^']*)' \(the ", text) == ["mean over the shard"] for text in texts)


@on_ranks(2)
def test_unsharded(ctx: Context) -> None:
    """A module that makes its layers in `configure_model`, and nothing else: no ring, and no averages of gradients."""

    def fit(**sizes: int) -> None:
        module = build(type("Plain", (GPT,), {"configure_model": lambda _: None}))
        trainer = quiet_trainer(strategy=ContextParallelStrategy(**sizes), max_epochs=1, use_distributed_sampler=True)
        trainer.fit(module, loader())

    with pytest.raises(ValueError, match=r"different values of model\..* in Lightning, strategy\.shard_parameters"):
        fit(data_parallel_size=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(context_parallel_size=2)
    named = ["no attention has run over the ring of 2 ranks" in str(x.message) for x in found]
    assert sum(named) == (ctx.rank == 0)


def judge(module: Any, batch: Any, batch_idx: int) -> None:
    """An evaluation whose ranks find different scores, in both ways of logging."""
    score = SCORES[dist.get_rank()][module.current_epoch]
    module.log("score", score)
    module.log_dict({"worst": torch.tensor(score)}, reduce_fx="max")


@on_ranks(2)
def test_decisions(ctx: Context, run: Run) -> None:
    """Callbacks decide by the mean over ranks: 2, 1, 1.5, 2. By its own scores rank 1 would stop after epoch 2."""
    module = varied(run.kind, validation_step=judge)
    best = ModelCheckpoint(run.folder, monitor="score", filename="{epoch}")
    stop = EarlyStopping("score", patience=2)
    trainer = quiet_trainer(
        strategy=ContextParallelStrategy(), max_epochs=5, num_sanity_val_steps=0, callbacks=[best, stop],
        limit_train_batches=1, limit_val_batches=1, enable_checkpointing=True, use_distributed_sampler=True,
    )  # fmt: skip
    trainer.fit(module, loader(), loader())
    assert (Path(best.best_model_path).name, best.best_model_score) == ("epoch=1.ckpt", 1.0)
    assert stop.stopped_epoch == 3
    assert (trainer.callback_metrics["score"], trainer.callback_metrics["worst"]) == (2.0, 3.0)


@on_ranks(2)
def test_compiled(ctx: Context, run: Run) -> None:
    """A module with a layer that is compiled trains as the plain one; another one attends again in the backward."""
    module = build(run.kind)
    module.model.blocks[0].reentrant = False
    module.model.blocks[1].compile(backend="aot_eager")
    found = train(module, strategy=ContextParallelStrategy(), limit_val_batches=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_trained(found["weights"], plainly()[0])


def choosing_model() -> own.Model:
    """A model whose layers have experts."""
    model = own.Model(is_causal=True)
    model.blocks = torch.nn.ModuleList(own.Choosing() for _ in range(2))
    return model


def start_nested(module: Any) -> None:
    """__init__ of a module with that model."""
    lightning.LightningModule.__init__(module)
    module.model = choosing_model()


def start_direct(module: Any) -> None:
    """The same with the layers in a list of the LightningModule itself."""
    lightning.LightningModule.__init__(module)
    for name, child in choosing_model().named_children():
        setattr(module, {"positions": "places"}.get(name, name), child)


def forward_directly(module: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    x = module.embedding(tokens) + module.places(positions)
    for block in module.blocks:
        x = block(x, positions)
    return module.head(x)


@on_ranks(2)
def test_experts(ctx: Context, run: Run) -> None:
    """Each rank needs another expert, and no rank the third, which AdamW then neither steps nor decays."""
    nested = {"__init__": start_nested, "configure_optimizers": plain_adam}
    direct = {"__init__": start_direct, "model": forward_directly, "configure_optimizers": plain_adam}
    for methods in (nested, direct):
        module = varied(run.kind, **methods)
        found = train(module, strategy=ContextParallelStrategy(), limit_val_batches=0)
        assert_trained(found["weights"], plainly(**methods)[0])


def unit_of_one_rank(kind: Any, called: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """A module whose experts are separate units, of which ranks call different ones."""

    def step(module: Any, batch: Any) -> torch.Tensor:
        positions = module.positions(batch[0])
        return module.token_loss(called(module.experts, module.model(batch[0], positions), positions), batch[1])

    module = varied(kind, step=step)
    module.experts = torch.nn.ModuleList(torch.nn.Linear(own.VOCAB, own.VOCAB) for _ in range(2))
    return module


def counting(module: Any, batch: Any) -> torch.Tensor:
    """A step that counts its tokens in a buffer."""
    module.counts += torch.bincount(batch[0].flatten(), minlength=own.VOCAB)
    return module.token_loss(module.model(batch[0], module.positions(batch[0])), batch[1])


def counted(kind: Any) -> Any:
    module = varied(kind, step=counting)
    module.register_buffer("counts", torch.zeros(own.VOCAB, dtype=torch.int64))
    return module


def left_out(experts: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rank 0 of two calls an expert that rank 1 leaves out."""
    return x + experts[0](x) if positions[0] == 0 else x


def unused(experts: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Both call it, and rank 1 has no gradient of it."""
    y = experts[0](x)
    return x + (y if positions[0] == 0 else y.detach())


@on_ranks(2)
def test_refusals(ctx: Context, run: Run) -> None:
    """Modules, batches and callbacks that would train something else are refused before the first step."""
    used = build(run.kind)
    train(used, strategy=ContextParallelStrategy(), limit_train_batches=1, limit_val_batches=0)
    for message, module, options in (
        (
            "model.blocks.0.attn must call attention with the q of",
            varied(run.kind, positions=lambda self, tokens: torch.arange(tokens.shape[1])), {},
        ),
        ("head.weight must be in the same unit as model.embedding.weight", tied(run.kind), {}),  # FSDP2 parts them
        (
            "token_loss must be given the labels of the whole sequence ([31] tokens, by call), got [30] over",
            varied(run.kind, step=unshifted), {},
        ),
        (
            "training_step's loss, averaged over the ring, must equal the loss of the whole sequence (",
            varied(run.kind, step=local_mean), {},
        ),
        (
            "training_step's loss, averaged over the ring, must equal the loss of the whole sequence (",
            varied(run.kind, on_before_batch_transfer=with_mask, step=local_mean), {},
        ),
        (
            "token_loss must be given the logits of the whole sequence, got a difference of",
            varied(run.kind, step=shifted), {},
        ),
        (
            "training_step's loss, averaged over the ring, must be a number, got nan for the whole sequence;",
            varied(run.kind, step=lambda self, batch: run.kind.step(self, batch) * torch.nan), {},
        ),
        (
            "batches must be cut before a step, got a batch that on_before_batch_transfer has not seen; call super",
            varied(run.kind, on_before_batch_transfer=lambda self, batch, _: batch), {},
        ),
        (
            "batch must be the same on all ranks of a ring, because each takes a part of it, got 2 different",
            build(run.kind), {"seed": dist.get_rank()},
        ),
        (
            "callbacks must not copy the module, whose parameters are sharded, got EMAWeightAveraging; average",
            build(run.kind), {"callbacks": [EMAWeightAveraging()]},
        ),
        (
            "buffers that a training forward changes must be equal on all ranks of a ring, got different values of "
            "counts; each rank has other tokens, so sum what they are computed from over the ring, by",
            counted(run.kind), {},
        ),
        (
            "all ranks of the group must make the same call, got FSDP2 unit Linear 1 (rank 0), Linear 2 (rank 1);",
            unit_of_one_rank(run.kind, own.choose), {},
        ),
        (
            "all ranks of the group must make the same call, got FSDP2 unit Linear 1 (rank 0), token_loss (rank 1);",
            unit_of_one_rank(run.kind, left_out), {},
        ),
        (
            "all ranks of the group must make the same call, got FSDP2 unit gradients of Linear 1 (rank 0), Model",
            unit_of_one_rank(run.kind, unused), {},
        ),
        (
            "strategy must have the ring for which an earlier trainer wrapped the module, ranks [0, 1] with layout "
            "'zigzag', got ranks [0, 1] with layout 'striped'; make a new module",
            used, {"strategy": ContextParallelStrategy(layout="striped")},
        ),
        (
            "strategy must have the ring for which an earlier trainer wrapped the module, ranks [0, 1] with layout "
            "'zigzag', got one process; make a new module",
            used, {"strategy": ContextParallelStrategy(1)},
        ),
    ):  # fmt: skip
        error = error_of(train, module, **{"strategy": ContextParallelStrategy(), **options})
        assert error.startswith(message), error


@on_ranks(2)
def test_training(ctx: Context, run: Run) -> None:
    """Weights, losses, and a moving average of the weights are those of the plain module; callbacks meet shards.

    Losses are logged as the plain module logs them: the mean over the tokens of all ranks, not those of one rank. FSDP2
    leaves an outermost module whole after a forward without a backward: an evaluation, the comparison.
    """
    changed, averaged, (callback, whole) = build(run.kind), moving_average(), sharded()
    ring = train(changed, strategy=ContextParallelStrategy(layout="striped"), callbacks=[callback, averaged])
    weights, average, loss, evaluation = plainly()
    assert_trained(ring["weights"], weights)
    assert_trained(averaged.state_dict(), average)
    resumed = moving_average()
    resumed.load_state_dict(averaged.state_dict())
    resumed.on_train_start(changed.trainer, changed)
    for name, p in averaged.average.items():
        assert torch.equal(resumed.average[name].to_local(), p.to_local()), name
    assert abs(ring["metrics"]["loss"] - loss) <= RTOL and abs(ring["metrics"]["eval_loss"] - evaluation) <= RTOL
    assert whole == dict.fromkeys(HOOKS.values(), 0)


def plainly(**methods: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float, float]:
    """Weights, their moving average, the last loss and the loss of an evaluation, of the plain module."""
    whole, loss = varied(GPT, **methods).double(), torch.zeros(())
    optimizer = whole.configure_optimizers()
    average = {name: p.detach().clone() for name, p in whole.named_parameters()}
    for batch in loader():
        loss = whole.step(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, p in whole.named_parameters():
            average[name].lerp_(p.detach(), AVERAGED)
    with torch.no_grad():
        evaluation = torch.stack([whole.step(batch) for batch in loader()]).mean().item()
    return {name: p.detach() for name, p in whole.named_parameters()}, average, loss.item(), evaluation


def assert_trained(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Assert that parameters are the wanted ones."""
    for name, x in want.items():
        assert (got[name] - x).abs().max() <= RTOL * x.abs().max(), name


def test_the_diff_changes_three_lines() -> None:
    """Not counting the import."""
    assert sum(line.startswith("-") for line in documented_diff()) == 3


def test_sum_without_a_choice_is_refused() -> None:
    """A sum of each rank's part goes over all ranks; a loss of the whole sequence must not be summed."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {})()
    for log in (
        lambda: module.log("n", 1.0, reduce_fx="sum"),
        lambda: module.log_dict({"n": 1.0}, reduce_fx=torch.sum),
    ):
        with pytest.raises(ValueError, match="sync_dist must be given with reduce_fx=.*sum.*, got none for n; pass"):
            log()


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_batch_with_a_mask_is_refused(kind: Callable[[Any], Any]) -> None:
    """Hugging Face's collators make one, in a BatchEncoding, which is a UserDict."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {})()
    batch = kind(dict.fromkeys(("input_ids", "labels", "attention_mask"), torch.zeros(1, 8, dtype=torch.int64)))
    with pytest.raises(ValueError, match="batch must have only .* and position_ids, got also attention_mask; leave"):
        module.shard_batch(batch, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_many_tokens_keeps_its_digits(dtype: torch.dtype) -> None:
    """One process, on whole sequences: within eps of fp64 on the same logits, not of their sum in the low dtype."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {"_ringflash_step": FirstStep(whole=True)})()
    torch.manual_seed(0)
    logits, labels = torch.randn(1, 20_000, 16).to(dtype), torch.randint(0, 16, (1, 20_000))
    labels[:, ::3] = -100
    loss, want = module.token_loss(logits, labels), cross_entropy(logits[0].double(), labels[0])
    assert loss.dtype == torch.float32 and abs(loss.item() - want.item()) < torch.finfo(dtype).eps * want.item() / 10


def test_sample_makes_the_ranks_unequal() -> None:
    """One rank keeps its first token that counts in labels, masks and weights; the window has most of them."""
    mask, held = torch.arange(16)[None] >= 9, torch.tensor([0, 1, 6, 7])
    labels = torch.where(mask, 3, -100)
    tokens = torch.arange(16)[None]
    batch = [tokens, labels, mask, mask.float()[..., None], mask * 0.5, torch.ones(1, 16), torch.randn(1, 5)]
    assert sample({"x": tokens, "position_ids": "document"}, 8, held).keys() == {"x"}
    found = sample(batch, 8, held)
    kept = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0]])  # of positions 8 to 15, of which 8 does not count
    assert torch.equal(found[0], tokens[:, 8:]) and torch.equal(found[6], batch[6])
    assert torch.equal(found[1], torch.where(kept.bool(), 3, -100))
    assert torch.equal(found[2], kept.bool()) and torch.equal(found[3], kept.float()[..., None])
    assert torch.equal(found[4], torch.tensor([[0, 16, 16, 16, 16, 16, 1, 1]]) / 32)
    assert torch.equal(found[5], torch.tensor([[1.0, 0, 1, 1, 1, 1, 0, 0]]))


@pytest.mark.parametrize("labels", [-100, 3])
def test_loss_without_labels_is_nothing(labels: int) -> None:
    """Not 0 / 0, which would make every parameter NaN. A loss that is infinite stays so."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {"_ringflash_step": FirstStep(whole=True)})()
    logits = torch.zeros(1, 8, 5, dtype=torch.float64)
    logits[..., 3] = -torch.inf
    loss = module.token_loss(logits.requires_grad_(), torch.full((1, 8), labels))
    loss.backward()
    assert loss.item() == (0.0 if labels == -100 else torch.inf)
    assert labels != -100 or not logits.grad.any()
