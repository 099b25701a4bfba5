"""DeepSpeed's ZeRO 0 to 3 on data x context ranks against one process: gradients, weights, clipping, refusals.

Two (1 x 2) and four (2 x 2) gloo processes on the CPU, with a new folder for what DeepSpeed compiles: nothing. Two
ranks share a sequence. The reference is plain torch in one process in fp64; what fp32 loses there is the budget.
"""

import math
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("deepspeed")

from deepspeed.utils import safe_get_full_grad
from torch import nn

import ringflash
from recipes.deepspeed.strategy import DeepSpeedContextParallelStrategy
from recipes.lightning.text import PackedSequence, PackedText, TextData, is_held_out, text_files
from ringflash import deepspeed, huggingface
from ringflash.comm.mesh import CONTEXT_AXIS, DATA_AXIS
from ringflash.comm.seeding import seeded
from ringflash.data.order import SampleOrder
from ringflash.deepspeed.parameter_use import ParameterUse
from ringflash.lightning import CausalLM
from ringflash.memory import Memory
from tests.helpers import own_models as own
from tests.helpers.one_step import Step, Tensors, one_process, worst
from tests.helpers.pool import Context, Launches, on_ranks
from tests.helpers.quiet_trainer import quiet_trainer
from tests.helpers.recipe_model import build_model
from tests.recipes.launching import error_of
from tests.recipes.test_deepspeed_steps import CONFIGS, CP_SIZE, FP32_EPS, config_of, mesh, weights
from tests.recipes.test_strategy import CONFIG

SEQLEN, STEPS, ACCUMULATED, CLIPPING, LEARNING_RATE = 48, 2, 2, 0.05, 1.0


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what DeepSpeed compiles."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def pool(compiled: Path) -> Iterator[Launches]:
    with closing(Launches(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(compiled))) as launches:
        yield launches


def samples(folder: str, dp_rank: int, dp_size: int) -> Iterator[PackedSequence]:
    """The sequences of one data rank, in the order in which TextData gives them."""
    text = PackedText((path.read_bytes() for name, path in text_files(folder, ".txt") if not is_held_out(name)), SEQLEN)
    return (text[i] for i in SampleOrder(len(text), seed=0, dp_rank=dp_rank, dp_size=dp_size, first=0))


def batches(folder: str) -> Iterator[dict[str, Any]]:
    """This rank's shards of the sequences."""
    group, data = mesh()[CONTEXT_AXIS].get_group(), mesh()[DATA_AXIS]
    for sample in samples(folder, data.get_local_rank(), data.size()):
        yield huggingface.prepare_batch(sample["input_ids"], group=group, cu_seqlens=sample["cu_seqlens"])


def gradients(module: nn.Module) -> Tensors:
    """Whole, on every rank, after the backward and before the step."""
    return {name: safe_get_full_grad(p).detach().clone() for name, p in module.named_parameters()}


@cache
def reference(folder: str, dp_size: int, dtype: torch.dtype) -> Step:
    """Gradients and, after a clipped step of SGD, weights of the mean over the data ranks' first sequences."""
    batches = (
        huggingface.prepare_batch(sample["input_ids"], group=None, cu_seqlens=sample["cu_seqlens"])
        for sample in islice(samples(folder, 0, 1), dp_size)
    )
    step = one_process(
        build_model(CONFIG, None), lambda model, batch: model(**batch), list(batches), dtype,
        clipping=CLIPPING, learning_rate=LEARNING_RATE,
    )  # fmt: skip
    weight = {name.removeprefix("model."): x for name, x in step["weight"].items()}
    return {"gradient": step["gradient"], "weight": weight}


def one_step(name: str, folder: str, loss_scale: float = 1.0) -> Step:
    """The same through DeepSpeed, on data x context ranks."""
    model = build_model(CONFIG, mesh()[CONTEXT_AXIS].get_group())
    return engine_step(model, config_of(name), next(batches(folder)), loss_scale)


def engine_of(model: nn.Module, config: dict[str, Any]) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]


def engine_step(model: nn.Module, config: dict[str, Any], batch: dict[str, Any], loss_scale: float = 1.0) -> Step:
    """Gradients and weights of a clipped step of SGD on an engine of `ringflash.deepspeed`."""
    engine = engine_of(model, {**config, "gradient_clipping": CLIPPING})
    batch = {key: x.to(engine.device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
    engine.backward(engine(**batch) * loss_scale)
    found = {"gradient": gradients(engine.module)}
    engine.step()
    return {**found, "weight": weights(engine.module)}


def spent(texts: str, name: str, loss_scale: float = 1.0) -> dict[str, float]:
    """Largest part of its budget that a parameter spends in a step, at the maximum or in the mean.

    The budget is twice what one fp32 process loses to fp64, and one eps.
    """
    dp_size = mesh()[DATA_AXIS].size()
    want, baseline = (reference(texts, dp_size, dtype) for dtype in (torch.float64, torch.float32))
    got = one_step(name, texts, loss_scale)
    return {key: part for key, (part, _) in worst(got, want, baseline).items()}


@on_ranks(2, 4)
def test_equals_one_process(ctx: Context, texts: str) -> None:
    """Gradients and weights keep within the budget; every second config on two ranks, the others on four.

    Weights are those after a step of SGD clipped to a norm of 0.05, far below the gradient's: the update has the
    scale of the weights, and an error of it is not hidden.
    """
    for name in CONFIGS[mesh()[DATA_AXIS].size() - 1 :: 2]:
        found = spent(texts, name)
        assert found.keys() == {"gradient", "weight"} and max(found.values()) <= 1.0, (name, found)


class WithLoss(nn.Module):
    """A model with a list of experts, whose forward computes the loss, as DeepSpeed wants."""

    def __init__(self) -> None:
        super().__init__()
        self.model = own.Model(is_causal=True)
        self.model.blocks = nn.ModuleList([own.Choosing()])

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, positions).square().sum()


@on_ranks(2)
def test_experts(ctx: Context) -> None:
    """Each rank needs another expert, in the first of two batches: zeros if gradients wait for the backward's end.

    If they are reduced as they arrive, at stages 2 and 3 and with overlap_comm, that is an error on every rank.
    """
    group, length = mesh()[CONTEXT_AXIS].get_group(), 4 * own.LENGTH
    tokens = torch.randint(0, own.VOCAB, (1, length), generator=torch.Generator().manual_seed(1))

    def leave_out(model: nn.Module) -> None:
        """Let a model not use the second expert any more."""
        model.get_submodule("model.blocks.0.experts.1").forward = torch.zeros_like  # type: ignore[method-assign]

    with seeded(0):
        whole = WithLoss()
    for _ in range(2):
        (whole.double()(tokens, torch.arange(length)) / 2).backward()
        leave_out(whole)
    for stage, overlap in ((0, False), (1, False), (1, True), (2, True), (3, True)):
        with seeded(0):
            model = ringflash.wrap_attention(WithLoss(), group)
        config = config_of(f"zero{stage}") | {"gradient_accumulation_steps": 2}
        config["zero_optimization"].update(overlap_comm=overlap, stage3_param_persistence_threshold=0)
        engine = engine_of(model, config)

        def backward(engine: Any = engine) -> None:
            positions = ringflash.local_positions(length, group.size(), group.rank())
            engine.backward(engine(ringflash.shard_sequence(tokens, group), positions))

        if not overlap:
            backward()
            engine.step()
            leave_out(engine.module)
            backward()
            for name, p in whole.named_parameters():
                want = torch.zeros_like(p) if p.grad is None else p.grad
                got = CP_SIZE * safe_get_full_grad(engine.module.get_parameter(name))
                assert (got - want).abs().max() <= 1e-4 * want.abs().max(), (stage, name)
        else:
            error = error_of(backward)
            named = "layer model.blocks.0.experts.0 (rank 0), " if stage == 3 else "no gradient of model.blocks.0.exp"
            assert error.startswith(f"all ranks of the group must make the same call, got {named}"), error


@on_ranks(4)
def test_loss_without_cp_size(ctx: Context, texts: str) -> None:
    """The negative control: gradients too small by cp_size are far outside the budget."""
    assert spent(texts, "zero1", 1 / CP_SIZE)["gradient"] > 1e3


class Recorder(lightning.Callback):
    """Weights after the last step, and what was logged."""

    def on_train_end(self, trainer: lightning.Trainer, module: CausalLM) -> None:
        self.weights = weights(module.model)
        self.metrics = {name: x.item() for name, x in trainer.callback_metrics.items()}


def through_lightning(name: str, folder: str) -> tuple[Tensors, dict[str, float]]:
    """Weights after a few clipped steps of AdamW, each of a few batches, and the last one's metrics.

    Layers are checkpointed except for their attention, which changes no bit: stage 3 prefetches parameters for them in
    some forwards, and gathers them in recomputations.
    """
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=DeepSpeedContextParallelStrategy(CP_SIZE, config=config_of(name)), gradient_clip_val=CLIPPING,
        max_steps=STEPS, limit_val_batches=0, callbacks=[recorder], accumulate_grad_batches=ACCUMULATED,
    )  # fmt: skip
    module = CausalLM(CONFIG, memory=Memory("attention_kept", offload_checkpoints=True))
    trainer.fit(module, datamodule=TextData(SEQLEN, folder, ".txt", num_eval_sequences=4))
    return recorder.weights, recorder.metrics


def plainly(name: str, folder: str) -> tuple[Tensors, float]:
    """The same without Lightning, and the norm of the last gradient where DeepSpeed tells it."""
    module = CausalLM(CONFIG)
    module.model = build_model(CONFIG, mesh()[CONTEXT_AXIS].get_group(), module.seed)
    optimization = module.configure_optimizers()
    engine, *_ = deepspeed.initialize(
        model=module.model,
        config={**config_of(name), "gradient_clipping": CLIPPING, "gradient_accumulation_steps": ACCUMULATED},
        optimizer=optimization["optimizer"], lr_scheduler=optimization["lr_scheduler"]["scheduler"],
    )  # fmt: skip
    for batch in islice(batches(folder), STEPS * ACCUMULATED):
        engine.backward(engine(**batch))
        if engine.is_gradient_accumulation_boundary():
            norm = torch.stack([g.double().square().sum() for g in gradients(engine.module).values()]).sum().sqrt()
        engine.step()
    return weights(engine.module), norm.item()


@on_ranks(2, 4)
def test_lightning_equals_plain(ctx: Context, texts: str) -> None:
    """Two clipped steps of AdamW over two batches each, to the bit; the logged norm is that before clipping.

    Stages 0 and 2 on two ranks, 1 and 3 on four.

    The norm: DeepSpeed sums n = 32,000 squares in fp32, each addition with a relative error below eps. Errors of
    either sign add up to sqrt(n) eps (all of one sign: n eps), before the root halves them.
    """
    for name in CONFIGS[mesh()[DATA_AXIS].size() - 1 : 4 : 2]:
        ours, metrics = through_lightning(name, texts)
        theirs, norm = plainly(name, texts)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs), name
        assert norm > CLIPPING and abs(metrics["grad_norm"] - norm) <= math.sqrt(32_000) * FP32_EPS * norm
        losses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(losses, metrics["loss"])
        assert len(set(losses)) == 1, losses


@on_ranks(2)
def test_two_backwards(ctx: Context) -> None:
    """A second backward in a step is refused at stages 1 and 2, by both ways, and then in the next step is not."""
    mesh()
    for name in ("zero1", "zero2"):
        engine = engine_of(nn.Linear(2, 2), {**config_of(name), "gradient_accumulation_steps": 2})
        assert engine.gradient_clipping() == 0.0, "no norm is clipped unless the config says so"
        ways = (engine.backward, lambda loss: loss.backward())
        for way in ways:
            for _ in range(2):  # the first batch of the step
                way(engine(torch.ones(1, 2)).sum())
            engine.step()
            way(engine(torch.ones(1, 2)).sum())
            for other in ways:
                error = error_of(other, engine(torch.ones(1, 2)).sum())
                assert error.startswith("at ZeRO stages 1 and 2 the last batch of a step must have one backward"), error
            engine.step()


@on_ranks(4)
def test_wrong_calls(ctx: Context) -> None:
    """Refused on every rank, also if ranks differ, or only one rank is wrong."""
    mesh()
    model, config = nn.Linear(2, 2), config_of("zero1")
    first = dist.get_rank() == 0
    calls: list[tuple[str, dict[str, Any]]] = [
        ("mpu must be None, got object", {"mpu": object()}),
        ("mesh_param must be None, got tuple", {"mesh_param": (2, 2)}),
        ("sequence_parallel_size must not be in the", {"config": {**config, "sequence_parallel_size": 2}}),
        ("train_batch_size must not be in the config, got 8", {"config": {**config, "train_batch_size": 8}}),
        (
            "all ranks of the group must make the same call, got steps_per_print 1 (rank 0)",
            {"config": {**config, "steps_per_print": 1 if first else 2}},
        ),
        ("mpu must be None, got object", {"mpu": object() if first else None}),
    ]
    for message, call in calls:
        error = error_of(deepspeed.initialize, **{"model": model, "config": config, **call})
        assert error.startswith(message), error


def test_nothing_is_compiled(compiled: Path) -> None:
    """DeepSpeed without ringflash compiles an operator when processes join, and needs g++ for it."""
    assert list(compiled.iterdir()) == []


def test_a_backward_after_one_that_failed_is_completed() -> None:
    """The failed one ends past the gradients of its layer, before zeros are filled in for the other."""
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    ParameterUse(layers, in_order=False)
    x = torch.ones(1, 2, requires_grad=True).clone()
    x.register_hook(mock.Mock(side_effect=OSError))
    with pytest.raises(OSError):
        layers[0](x).sum().backward()
    layers[0](x.detach()).sum().backward()
    got = [[None if p.grad is None else bool(p.grad.any()) for p in layer.parameters()] for layer in layers]
    assert got == [[True, True], [False, False]]
