"""Training on GPUs: what the README offers, a step at a time, against the same step on one GPU. Two GPUs or more.

Lightning, a module of one's own, DeepSpeed and Liger, and what saves memory. DeepSpeed and Liger have ranks of their
own, since process groups and patched libraries stay.

In fp64 a step equals that of one process to 1e-11. In bf16 the budget is the house's (ringflash/testing/tolerance.py):
twice what one process loses to fp64 by plain eager attention in the same precision, and one eps of the largest value,
for every parameter, at the maximum and in the mean; DeepSpeed has no fp64, and is compared in fp32 too. On the CPU
(`--backend gloo --impl reference`) a smaller model shows that the tests themselves are right.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn

from recipes.lightning.exposed_communication import ExposedCommunication
from recipes.lightning.text import PackedText, TextData
from ringflash import huggingface
from ringflash.comm.mesh import CONTEXT_AXIS
from ringflash.data.order import SampleOrder
from ringflash.lightning import CausalLM, ContextParallelStrategy
from ringflash.memory import Memory
from ringflash.testing.dense import visible
from ringflash.testing.tolerance import Ratio
from ringflash_kernels import api
from tests.helpers import own_models as own
from tests.helpers.one_step import Found, Step, judged, one_process
from tests.helpers.pool import Context, Pool
from tests.helpers.recipe_model import build_model
from tests.helpers.shared_gpu import is_shared, num_gpus, use_gpu
from tests.helpers.shared_gpu import visible as visible_gpus
from tests.multi_gpu.conftest import Setup, Table
from tests.recipes.plain_gpt import GPT
from tests.recipes.test_strategy import Recorder, trainer_with
from tests.recipes.test_wrap_lightning import Run, build, loader, write_changed

pytestmark = pytest.mark.multi_gpu

CLIPPING, LEARNING_RATE, SEED = 0.05, 1.0, 3
DTYPES = {"64-true": torch.float64, "bf16-mixed": torch.bfloat16}
NEEDED = {"deepspeed": "deepspeed", "liger": "liger_kernel"}


class Task(NamedTuple):
    """The ranks' instructions.

    Args:
        folder: of the module after the documented diff.
        impl: kernel of attention in low precision; in fp32 it is what "auto" takes.
        index: of this rank's GPU.
    """

    folder: str
    on_gpus: bool
    impl: str
    index: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index) if self.on_gpus else torch.device("cpu")

    @property
    def seqlen(self) -> int:
        return 4096 if self.on_gpus else 64

    @property
    def config(self) -> dict[str, Any]:
        """A Llama; with heads of 64 on GPUs."""
        width, layers = (256, 4) if self.on_gpus else (32, 2)
        return {
            "model_type": "llama", "vocab_size": 257, "hidden_size": width, "intermediate_size": 2 * width,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 4096, "tie_word_embeddings": False,
        }  # fmt: skip


class RandomText(TextData):
    """Documents of random bytes, of lengths that cut anywhere."""

    def read(self) -> tuple[PackedText, PackedText]:
        return texts(self.seqlen), texts(self.seqlen)


def texts(seqlen: int) -> PackedText:
    """Eight sequences, alike on every rank."""
    draw = torch.Generator().manual_seed(2)
    lengths = [seqlen * part // 16 + 5 for part in (3, 9, 1, 17, 5, 7, 2, 23)] * 3
    return PackedText((bytes(torch.randint(0, 256, (n,), generator=draw).tolist()) for n in lengths), seqlen)


class Stepping(CausalLM):
    """One step of SGD, clipped."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Eager, in the dtype of q: the reference of a transformers model."""
    position = torch.arange(query.shape[2], device=query.device)
    seen = visible(position, position, causal=True, cu_seqlens=cu_seqlens.tolist())
    k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ k.transpose(2, 3) * scaling).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2), None


@cache
def reference(
    task: Task, dtype: torch.dtype, dp_size: int, *, drawn_in: torch.dtype = torch.float32, plain: bool = True
) -> Step:
    """Results of the first step of data ranks, in one process."""
    from transformers import AttentionInterface

    AttentionInterface.register("plain", plain_attention)
    model = drawn_alone(task, drawn_in)
    if plain:
        model.model.config._attn_implementation = "plain"  # type: ignore[union-attr]
    sequences = texts(task.seqlen)
    order = islice(SampleOrder(len(sequences), seed=0, dp_rank=0, dp_size=1, first=0), dp_size)
    batches = [huggingface.prepare_batch(**sequences[i], group=None) for i in order]
    batches = [{key: moved(x, task) if key != "cu_seqlens" else x for key, x in batch.items()} for batch in batches]
    return one_process(
        model, lambda model, batch: model(**batch), batches, dtype, clipping=CLIPPING, learning_rate=LEARNING_RATE
    )


def references(task: Task, dtype: torch.dtype, dp_size: int) -> tuple[Step, Step | None]:
    """The truth, and what gives the budget: in fp32 our own attention, whose exp(score - lse) is of a rounded lse."""
    if dtype == torch.float64:
        return reference(task, dtype, dp_size, drawn_in=dtype), None
    return reference(task, torch.float64, dp_size), reference(task, dtype, dp_size, plain=dtype != torch.float32)


def drawn_alone(task: Task, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model as one process draws it."""
    return build_model(task.config, None, SEED, dtype=dtype).to(task.device)


def moved(x: Any, task: Task) -> Any:
    """Move it to the device, if it is a tensor."""
    return x.to(task.device) if isinstance(x, Tensor) else x


class Unclipped(Recorder):
    """Whole gradients before they are clipped, and what the optimizer used."""

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: Any, optimizer: Any) -> None:
        named = ((name.removeprefix("model."), p) for name, p in module.named_parameters())
        self.unclipped = {name: p.grad.full_tensor().clone() for name, p in named}


def trained(ctx: Context, task: Task, module: Any, precision: str, data: Any = None, **options: Any) -> Unclipped:
    """A few steps on data x context ranks, of a ring of all ranks by default, without evaluations."""
    how = {"plugins": [DoublePrecision()]} if precision == "64-true" else {"precision": precision}
    recorder = Unclipped()
    options = {"strategy": ContextParallelStrategy(ctx.size), **how, **options}
    trainer = trainer_with(
        accelerator="cuda" if task.on_gpus else "cpu", num_sanity_val_steps=0, limit_val_batches=0,
        **{**options, "callbacks": [*options.get("callbacks", []), recorder]},
    )  # fmt: skip
    if data is None:
        trainer.fit(module, datamodule=RandomText(task.seqlen, num_eval_sequences=ctx.size))
    else:
        trainer.fit(module, data)
    return recorder


def one_step(*args: Any, **options: Any) -> tuple[Step, float]:
    """Gradients before clipping, weights after it, and the loss."""
    recorder = trained(*args, max_steps=1, gradient_clip_val=CLIPPING, **options)
    _, weights = recorder.steps[0]
    return {"gradient": recorder.unclipped, "weight": weights}, recorder.metrics[0]["loss"]


@contextmanager
def exact_norms() -> Iterator[None]:
    """RMSNorm in the dtype of its input. That of transformers rounds fp64 to fp32 on the way.

    Two attentions that differ by an eps of fp64 then differ, in one of some 10^7 values, by an eps of fp32.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)

    with mock.patch.object(LlamaRMSNorm, "forward", forward):
        yield


# Steps, each compared with one process.


def by_lightning(
    ctx: Context,
    task: Task,
    precision: str,
    dp_size: int = 1,
    memory: Memory = Memory(),  # noqa: B008
) -> Found:
    """A transformers model through `CausalLM`."""
    dtype, strategy = DTYPES[precision], ContextParallelStrategy(ctx.size // dp_size)
    with exact_norms() if dtype == torch.float64 else nullcontext():
        want, baseline = references(task, dtype, dp_size)
        module = Stepping(task.config, seed=SEED, memory=memory)
        got, loss = one_step(ctx, task, module, precision, strategy=strategy)
    return judged(got, want, baseline, loss, dtype, ctx.size)


def over_nccl(ctx: Context, task: Task) -> Found:
    """The same with the transport that "auto" takes between hosts."""
    with mock.patch("ringflash.attention.plan.choose_transport", lambda *_: "nccl"):
        return by_lightning(ctx, task, "bf16-mixed")


def saving(ctx: Context, task: Task, precision: str) -> Found:
    memory = Memory("attention_kept", offload_checkpoints=True, mlp_tile_tokens=192 if task.on_gpus else 7)
    return by_lightning(ctx, task, precision, memory=memory)


def with_liger(ctx: Context, task: Task) -> Found:
    return by_lightning(ctx, task, "bf16-mixed", memory=Memory(liger=True))


def own_module(ctx: Context, task: Task, precision: str) -> Found:
    """The documented diff on a LightningModule that knows nothing of rings."""
    sizes = {"WIDTH": 256, "LENGTH": task.seqlen // 4, "VOCAB": 257} if task.on_gpus else {"VOCAB": own.VOCAB}
    with mock.patch.multiple(own, **sizes):
        data, dtype = loader(), DTYPES[precision]
        batch = [x.to(task.device) for x in next(iter(data))]
        plain = build(GPT).to(task.device)
        steps = (
            one_process(plain, lambda model, batch: model.step(batch), [batch], x, clipping=CLIPPING, learning_rate=0.1)
            for x in (torch.float64, dtype)
        )
        want, baseline = (
            {key: {name.removeprefix("model."): x for name, x in part.items()} for key, part in step.items()}
            for step in steps
        )
        got, loss = one_step(ctx, task, build(Run(task.folder).kind), precision, data)
    return judged(got, want, None if dtype == torch.float64 else baseline, loss, dtype, ctx.size)


def with_deepspeed(ctx: Context, task: Task, name: str, dtype: torch.dtype) -> Found:
    """A stage of ZeRO: two ranks share a sequence."""
    from ringflash import deepspeed
    from tests.recipes import test_deepspeed as worker

    mesh = deepspeed.context_mesh(2)
    if task.on_gpus:
        assert torch.cuda.current_device() == task.index, "DeepSpeed must have chosen this rank's GPU"
    dp_size, dp_rank = mesh.size() // 2, mesh["data_parallel"].get_local_rank()
    want, baseline = references(task, dtype, dp_size)
    sequences, group = texts(task.seqlen), mesh[CONTEXT_AXIS].get_group()
    order = SampleOrder(len(sequences), seed=0, dp_rank=dp_rank, dp_size=dp_size, first=0)
    batch = huggingface.prepare_batch(**sequences[next(iter(order))], group=group)
    config = worker.config_of(name) | ({} if dtype == torch.float32 else {"bf16": {"enabled": True}})
    got = worker.engine_step(build_model(task.config, group, SEED), config, batch)
    weight = {f"model.{key}": x for key, x in got.pop("weight").items()}
    if dtype == torch.float32:  # a bf16 engine rounds the first weights, which is more than its step
        got["weight"] = weight
    return judged(got, want, baseline, None, dtype, ctx.size)


class WholeStep(lightning.Callback):
    """DeepSpeed's one step: whole gradients before it and whole weights after it, on every rank."""

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: CausalLM, optimizer: Any) -> None:
        from tests.recipes.test_deepspeed import gradients

        self.gradients = {name.removeprefix("model."): x for name, x in gradients(module).items()}

    def on_train_end(self, trainer: lightning.Trainer, module: CausalLM) -> None:
        from tests.recipes.test_deepspeed import weights

        self.weights = {f"model.{name}": x for name, x in weights(module.model).items()}
        self.loss = trainer.callback_metrics["loss"].item()


def with_deepspeed_through_lightning(ctx: Context, task: Task, name: str, dtype: torch.dtype) -> Found:
    """The same stage by Lightning's strategy, which makes the engine, clips and steps."""
    from recipes.deepspeed.strategy import DeepSpeedContextParallelStrategy
    from tests.recipes.test_deepspeed import config_of

    want, baseline = references(task, dtype, ctx.size // 2)
    step = WholeStep()
    trainer = trainer_with(
        accelerator="cuda" if task.on_gpus else "cpu", max_steps=1, gradient_clip_val=CLIPPING,
        strategy=DeepSpeedContextParallelStrategy(2, config=config_of(name)), callbacks=[step],
        precision="32-true" if dtype == torch.float32 else "bf16-mixed", num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    data = RandomText(task.seqlen, num_eval_sequences=ctx.size)
    trainer.fit(Stepping(task.config, seed=SEED), datamodule=data)
    got = {"gradient": step.gradients} | ({"weight": step.weights} if dtype == torch.float32 else {})
    return judged(got, want, baseline, step.loss, dtype, ctx.size)


PRECISE = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS: dict[str, tuple[Callable[..., Found], Any]] = {  # by library and name: part, arguments
    **{f"lightning {precision} cp": (by_lightning, [precision]) for precision in DTYPES},
    **{f"lightning {precision} dp x cp": (by_lightning, [precision, 2]) for precision in DTYPES},
    "lightning bf16-mixed cp over nccl": (over_nccl, []),
    **{f"own {precision} cp": (own_module, [precision]) for precision in DTYPES},
    **{f"memory {precision} saving": (saving, [precision]) for precision in DTYPES},
    "liger bf16-mixed liger": (with_liger, []),
    **{
        f"deepspeed {label} {name}": (with_deepspeed, [name, dtype])
        for label, dtype in PRECISE.items()
        for name in ("zero0", "zero1", "zero2", "zero3", *["zero2_offload", "zero3_offload"] * (label == "fp32"))
    },
    **{
        f"deepspeed {label} {name} through lightning": (with_deepspeed_through_lightning, [name, dtype])
        for label, dtype in PRECISE.items()
        for name in ("zero2", "zero3")
    },
}


# The ranks.


@contextmanager
def kernels(task: Task) -> Iterator[set[str]]:
    """The kernel that is asked for, where "auto" would choose; the names of those that ran."""
    used: set[str] = set()

    def choose(q: Tensor, k: Tensor, v: Tensor) -> api.Choice:
        asked = not task.on_gpus or q.dtype.itemsize < 4
        choice = api.Choice(task.impl, "asked for") if asked else api.choose_impl(q, k, v)
        used.add(f"{choice.impl} {q.dtype} {q.shape[-1]}")
        return choice

    with (
        mock.patch("ringflash.attention.plan.choose_impl", choose),
        mock.patch.dict("ringflash.attention.plan.plan_cache", clear=True),
    ):
        yield used


def run(ctx: Context, task: Task, library: str, part: Callable[..., Found], args: list[Any]) -> Found:
    """Return what a part finds on this rank, and the kernels that ran."""
    if task.on_gpus:
        task = task._replace(index=ctx.rank % num_gpus(ctx.size))
        if library != "deepspeed" or is_shared(ctx.size):  # which is to choose by itself
            use_gpu(ctx.rank, ctx.size)
    with kernels(task) as used:
        return {**part(ctx, task, *args), "kernels": sorted(used)}


class Trainings:
    """Ranks for each library, without a group, started when a part first asks for them."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.pools = setup, dict[str, Pool]()
        write_changed(folder)
        self.task = Task(str(folder), setup.backend == "nccl", setup.impl)

    def found(self, library: str, part: Callable[..., Found], args: Any = ()) -> list[Found]:
        """Return what each rank finds in a part."""
        if library in NEEDED and importlib.util.find_spec(NEEDED[library]) is None:
            pytest.skip(f"{NEEDED[library]} is not installed")
        own_ranks = library if library in NEEDED else ""
        if own_ranks not in self.pools:
            size, environment = self.setup.ranks, {"DS_ACCELERATOR": "cpu"}
            if self.task.on_gpus:
                environment = {"CUDA_VISIBLE_DEVICES": visible_gpus(size), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            self.pools[own_ranks] = Pool(
                size, backend=None, timeout_s=60.0, patience=self.setup.patience, on_gpus=self.task.on_gpus,
                **environment,
            )  # fmt: skip
        return self.pools[own_ranks].run(run, self.task, library, part, args)


@pytest.fixture(scope="module")
def trainings(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    trainings = Trainings(setup, tmp_path_factory.mktemp("training"))
    yield trainings
    for pool in trainings.pools.values():
        pool.close()


@pytest.mark.parametrize("name", STEPS, ids=lambda name: name.replace(" ", "-"))
def test_a_step_equals_one_process(trainings: Trainings, setup: Setup, table: Table, name: str) -> None:
    """Gradients before clipping, weights after a clipped step of SGD, the loss; half of a gradient would be seen."""
    library, (part, args) = name.split()[0], STEPS[name]
    if "dp x cp" in name and setup.ranks != 4:
        pytest.skip("two data ranks of two context ranks are four")
    if part in (over_nccl, with_liger) and setup.backend != "nccl":
        pytest.skip(f"{name} needs GPUs")
    ranks = trainings.found(library, part, args)
    table.add(f"training {name}", [[Ratio(key, 0, x, x) for key, (x, _) in rank["spent"].items()] for rank in ranks])
    shown = "\n".join(map(str, ranks))
    assert all(x <= 1 for rank in ranks for x, _ in rank["spent"].values()), shown
    assert all(rank["half_a_gradient"] > 1 for rank in ranks), shown
    if "bf16" in name:
        assert all(kernel.startswith(setup.impl) for rank in ranks for kernel in rank["kernels"]), shown


# Runs that change nothing.


@contextmanager
def deterministic() -> Iterator[None]:
    """Attention whose gradients have the same bits each time."""
    with mock.patch.object(huggingface, "set_group", partial(huggingface.set_group, deterministic=True)):
        yield


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of the tensors that have not the same bits."""
    assert got.keys() == want.keys(), f"{sorted(got)} {sorted(want)}"
    return {name: (got[name] - x).abs().max().item() for name, x in want.items() if not torch.equal(got[name], x)}


def offloaded(ctx: Context, task: Task) -> Found:
    memories = [Memory("attention_kept", offload_checkpoints=offload) for offload in (False, True)]
    with deterministic():
        kept, away = (
            trained(ctx, task, CausalLM(task.config, seed=SEED, memory=memory), "bf16-mixed", max_steps=1).unclipped
            for memory in memories
        )
    return {"differences": differences(away, kept)}


def test_offloading_changes_no_bit(trainings: Trainings) -> None:
    """Layers that are computed again from inputs that were on the host, and from inputs that stayed."""
    ranks = trainings.found("memory", offloaded)
    assert all(rank["differences"] == {} for rank in ranks), ranks


def drawn(ctx: Context, task: Task) -> Found:
    module = CausalLM(task.config, seed=SEED)
    trained(ctx, task, module, "32-true", limit_train_batches=0)
    together = {name.removeprefix("model."): p.full_tensor() for name, p in module.named_parameters()}
    sums = {name: p.double().abs().sum().item() for name, p in together.items()}
    return {"differences": differences(together, dict(drawn_alone(task).named_parameters())), "sums": sums}


def test_drawn_parameters_are_those_of_one_process(trainings: Trainings) -> None:
    """Equal to the bit, on every rank."""
    ranks = trainings.found("memory", drawn)
    assert all(rank["differences"] == {} for rank in ranks), ranks
    assert all(rank["sums"] == ranks[0]["sums"] for rank in ranks), ranks


def exposed(ctx: Context, task: Task) -> Found:
    """Losses of a run whose waits are measured, and of one that is not watched."""

    def metrics(*callbacks: lightning.Callback) -> list[dict[str, float]]:
        module = CausalLM(task.config, seed=SEED)
        return trained(ctx, task, module, "bf16-mixed", callbacks=list(callbacks), max_steps=3).metrics

    with deterministic():
        plain, measured = metrics(), metrics(ExposedCommunication(every_n_steps=1))
    return {"plain": plain, "measured": measured}


def test_exposed_communication_changes_nothing(trainings: Trainings) -> None:
    for rank in trainings.found("memory", exposed):
        waits = [step["exposed_communication_ms"] for step in rank["measured"]]
        assert len(waits) == 3 and all(math.isfinite(x) and x >= 0 for x in waits), rank
        assert [step["loss"] for step in rank["measured"]] == [step["loss"] for step in rank["plain"]], rank
