"""Steps of training on every rank of one launch; what each rank found goes to <out>/<rank>.json, part by part.

    torchrun --nproc_per_node 2 -m tests.multi_gpu.training_worker '{"job": "lightning", "out": ..., ...}'

A part compares one clipped step of SGD with the same step in one process on one device (tests/helpers/one_step.py):
in fp64 for the truth, and by plain eager attention in the ranks' own precision for the budget. Ranks in fp64
are compared with it to 1e-11. A part that fails leaves its traceback and the next one begins.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn

from recipes.lightning.exposed_communication import ExposedCommunication
from recipes.lightning.text import PackedText, TextData
from ringflash import huggingface
from ringflash.comm import transport
from ringflash.comm.mesh import CONTEXT_AXIS
from ringflash.data.order import SampleOrder
from ringflash.lightning import CausalLM, ContextParallelStrategy
from ringflash.memory import Memory
from ringflash_kernels import api
from tests.helpers import own_models as own
from tests.helpers.dense import visible
from tests.helpers.one_step import Step, loss_part, one_process, parts, worst
from tests.helpers.recipe_model import build_model
from tests.helpers.shared_gpu import is_shared, use_gpu
from tests.recipes.test_strategy import Recorder, trainer_with

CLIPPING, LEARNING_RATE, SEED = 0.05, 1.0, 3
DTYPES = {"64-true": torch.float64, "bf16-mixed": torch.bfloat16}
GRACE_S = 8.0  # for the other ranks, after one has failed
STEPS = 3  # of the runs that are compared with each other

Found = dict[str, Any]


class Task(NamedTuple):
    """The ranks' instructions.

    Args:
        job: one of JOBS.
        impl: kernel of attention in low precision; in fp32 it is what "auto" takes.
        stacks_at: the time (of time.time()) at which a rank that is still at work prints where.
    """

    job: str
    out: str
    device_type: str
    impl: str
    stacks_at: float

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return torch.device(self.device_type, int(os.environ["LOCAL_RANK"])) if self.on_gpus else torch.device("cpu")

    @property
    def on_gpus(self) -> bool:
        return self.device_type == "cuda"

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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    scaling: float,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
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
    torch.set_default_dtype(dtype)
    try:
        return build_model(task.config, None, SEED).to(task.device)
    finally:
        torch.set_default_dtype(torch.float32)


def moved(x: Any, task: Task) -> Any:
    """Move it to the device, if it is a tensor."""
    return x.to(task.device) if isinstance(x, Tensor) else x


def judged(got: Step, want: Step, baseline: Step | None, loss: float | None, dtype: torch.dtype) -> Found:
    """Return what each quantity spends of its budget, and what the median gradient of half the size would."""
    if baseline is not None and dtype.itemsize < 4 and "weight" in got:  # an eps of a weight is more than its step
        start = want["start"]
        got, want, baseline = (
            x | {"weight": {name: p.double() - start[name] for name, p in x["weight"].items()}}
            for x in (got, want, baseline)
        )
        baseline["weight"] = {name: p.to(dtype) for name, p in baseline["weight"].items()}
    spent = worst(got, want, baseline)
    if loss is not None:
        spent["loss"] = loss_part(loss, want, baseline, dtype, dist.get_world_size()), "loss"
    half = {name: x / 2 for name, x in got["gradient"].items()}
    control = median(parts(half, want["gradient"], baseline and baseline["gradient"]).values())
    return {"spent": spent, "half_a_gradient": control, "loss": loss, "true_loss": want["loss"]["loss"].item()}


class Unclipped(Recorder):
    """Whole gradients before they are clipped, and what the optimizer used."""

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: Any, optimizer: Any) -> None:
        named = ((name.removeprefix("model."), p) for name, p in module.named_parameters())
        self.unclipped = {name: p.grad.full_tensor().clone() for name, p in named}


def trained(
    task: Task, module: lightning.LightningModule, precision: str, cp_size: int, data: Any = None, **options: Any
) -> Unclipped:
    """A few steps on data x context ranks, without evaluations."""
    how = {"plugins": [DoublePrecision()]} if precision == "64-true" else {"precision": precision}
    recorder = Unclipped()
    trainer = trainer_with(
        accelerator=task.device_type, strategy=ContextParallelStrategy(cp_size), num_sanity_val_steps=0,
        limit_val_batches=0, **how,
        **{**options, "callbacks": [*options.get("callbacks", []), recorder]},
    )  # fmt: skip
    if data is None:
        trainer.fit(module, datamodule=RandomText(task.seqlen, num_eval_sequences=dist_size()))
    else:
        trainer.fit(module, data)
    return recorder


def one_step(task: Task, module: Any, precision: str, cp_size: int, data: Any = None) -> tuple[Step, float]:
    """Gradients before clipping, weights after it, and the loss."""
    recorder = trained(task, module, precision, cp_size, data, max_steps=1, gradient_clip_val=CLIPPING)
    _, weights = recorder.steps[0]
    return {"gradient": recorder.unclipped, "weight": weights}, recorder.metrics[0]["loss"]


def compared(task: Task, precision: str, cp_size: int, memory: Memory = Memory()) -> Found:  # noqa: B008
    """A transformers model through `CausalLM`."""
    dtype, dp_size = DTYPES[precision], dist_size() // cp_size
    with exact_norms() if dtype == torch.float64 else nullcontext():
        want, baseline = references(task, dtype, dp_size)
        got, loss = one_step(task, Stepping(task.config, seed=SEED, memory=memory), precision, cp_size)
    return judged(got, want, baseline, loss, dtype)


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


def dist_size() -> int:
    """All ranks, joined yet or not."""
    return int(os.environ["WORLD_SIZE"])


def over_nccl(task: Task) -> Found:
    """The same with the transport that "auto" takes between hosts."""
    choice = mock.patch("ringflash.attention.plan.choose_transport", lambda *_: "nccl")
    with choice, mock.patch.dict("ringflash.attention.plan.planned", clear=True):
        return compared(task, "bf16-mixed", dist_size())


def own_module(task: Task, precision: str) -> Found:
    """The README's diff on a LightningModule that knows nothing of rings, which the launch has written to <out>."""
    from tests.recipes.plain_gpt import GPT
    from tests.recipes.test_wrap_lightning import build, loader

    changed = importlib.import_module("changed_gpt").GPT
    sizes = {"WIDTH": 256, "LENGTH": task.seqlen // 4, "VOCAB": 257} if task.on_gpus else {}
    with mock.patch.multiple(own, **sizes) if sizes else mock.patch.object(own, "VOCAB", own.VOCAB):
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
        got, loss = one_step(task, build(changed), precision, dist_size(), data)
    return judged(got, want, None if dtype == torch.float64 else baseline, loss, dtype)


@contextmanager
def deterministic() -> Iterator[None]:
    """Attention whose gradients have the same bits each time."""
    with mock.patch.object(huggingface, "set_group", partial(huggingface.set_group, deterministic=True)):
        yield


def offloading_changes_no_bit(task: Task) -> Found:
    """Layers that are computed again from inputs that were on the host, and from inputs that stayed."""
    with deterministic():
        kept, offloaded = (
            trained(
                task, CausalLM(task.config, seed=SEED, memory=Memory("attention_kept", offload_checkpoints=offload)),
                "bf16-mixed", dist_size(), max_steps=1,
            ).unclipped
            for offload in (False, True)
        )  # fmt: skip
    return {"differences": differences(offloaded, kept)}


def drawn(task: Task) -> Found:
    """Parameters drawn on the ranks of a ring, and whole by this rank only."""
    module = CausalLM(task.config, seed=SEED)
    trained(task, module, "32-true", dist_size(), limit_train_batches=0)
    together = {name.removeprefix("model."): p.full_tensor() for name, p in module.named_parameters()}
    by_itself = {name: p for name, p in drawn_alone(task).named_parameters()}
    sums = {name: p.double().abs().sum().item() for name, p in together.items()}
    return {"differences": differences(together, by_itself), "sums": sums}


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of the tensors that have not the same bits."""
    assert got.keys() == want.keys(), f"{sorted(got)} {sorted(want)}"
    return {name: (got[name] - x).abs().max().item() for name, x in want.items() if not torch.equal(got[name], x)}


def exposed(task: Task) -> Found:
    """Losses of a run whose waits are measured, and of one that is not watched."""

    def losses(*callbacks: lightning.Callback) -> list[dict[str, float]]:
        module = CausalLM(task.config, seed=SEED)
        run = trained(task, module, "bf16-mixed", dist_size(), callbacks=list(callbacks), max_steps=STEPS)
        return run.metrics

    with deterministic():
        plain, measured = losses(), losses(ExposedCommunication(every_n_steps=1))
    return {
        "plain": [step["loss"] for step in plain], "measured": [step["loss"] for step in measured],
        "milliseconds": [step["exposed_communication_ms"] for step in measured],
    }  # fmt: skip


def with_deepspeed(task: Task, name: str, dtype: torch.dtype) -> Found:
    """A stage of ZeRO: two ranks share a sequence."""
    from ringflash import deepspeed
    from tests.recipes import test_deepspeed as worker

    mesh = deepspeed.context_mesh(2)
    if task.on_gpus:
        assert torch.cuda.current_device() == task.device.index, "DeepSpeed must have chosen this rank's GPU"
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
    return judged(got, want, baseline, None, dtype)


class WholeStep(lightning.Callback):
    """DeepSpeed's one step: whole gradients before it and whole weights after it, on every rank."""

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: CausalLM, optimizer: Any) -> None:
        from tests.recipes.test_deepspeed import gradients

        self.gradients = {name.removeprefix("model."): x for name, x in gradients(module).items()}

    def on_train_end(self, trainer: lightning.Trainer, module: CausalLM) -> None:
        from tests.recipes.test_deepspeed import weights

        self.weights = {f"model.{name}": x for name, x in weights(module.model).items()}
        self.loss = trainer.callback_metrics["loss"].item()


def with_deepspeed_through_lightning(task: Task, name: str, dtype: torch.dtype) -> Found:
    """The same stage by Lightning's strategy, which makes the engine, clips and steps."""
    from recipes.deepspeed.strategy import DeepSpeedContextParallelStrategy
    from tests.recipes.test_deepspeed import config_of

    want, baseline = references(task, dtype, dist_size() // 2)
    step = WholeStep()
    trainer = trainer_with(
        accelerator=task.device_type, strategy=DeepSpeedContextParallelStrategy(2, config=config_of(name)),
        precision="32-true" if dtype == torch.float32 else "bf16-mixed", max_steps=1, gradient_clip_val=CLIPPING,
        num_sanity_val_steps=0, limit_val_batches=0, callbacks=[step],
    )  # fmt: skip
    data = RandomText(task.seqlen, num_eval_sequences=dist_size())
    trainer.fit(Stepping(task.config, seed=SEED), datamodule=data)
    got = {"gradient": step.gradients} | ({"weight": step.weights} if dtype == torch.float32 else {})
    return judged(got, want, baseline, step.loss, dtype)


def lightning_parts(task: Task) -> dict[str, Callable[[], Found]]:
    size = dist_size()
    steps = {f"{precision} cp": partial(compared, task, precision, size) for precision in DTYPES}
    if size == 4:
        steps |= {f"{precision} dp x cp": partial(compared, task, precision, 2) for precision in DTYPES}
    return steps | ({"bf16-mixed cp over nccl": partial(over_nccl, task)} if task.on_gpus else {})


def own_parts(task: Task) -> dict[str, Callable[[], Found]]:
    return {f"{precision} cp": partial(own_module, task, precision) for precision in DTYPES}


def memory_parts(task: Task) -> dict[str, Callable[[], Found]]:
    saving = Memory("attention_kept", offload_checkpoints=True, mlp_tile_tokens=192 if task.on_gpus else 7)
    steps = {f"{precision} saving": partial(compared, task, precision, dist_size(), saving) for precision in DTYPES}
    others = (offloading_changes_no_bit, drawn, exposed)
    return {**steps, **{part.__name__: partial(part, task) for part in others}}


def liger_parts(task: Task) -> dict[str, Callable[[], Found]]:
    """In new processes: Liger changes transformers for all later models."""
    return {"bf16-mixed liger": partial(compared, task, "bf16-mixed", dist_size(), Memory(liger=True))}


def deepspeed_parts(task: Task) -> dict[str, Callable[[], Found]]:
    names = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
    full = {f"fp32 {name}": partial(with_deepspeed, task, name, torch.float32) for name in names}
    bf16 = {f"bf16 {name}": partial(with_deepspeed, task, name, torch.bfloat16) for name in names[:4]}
    by_lightning = {
        f"{label} {name} through lightning": partial(with_deepspeed_through_lightning, task, name, dtype)
        for label, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        for name in ("zero2", "zero3")
    }
    return full | bf16 | by_lightning


JOBS: dict[str, Callable[[Task], dict[str, Callable[[], Found]]]] = {
    "lightning": lightning_parts, "own": own_parts, "memory": memory_parts, "liger": liger_parts,
    "deepspeed": deepspeed_parts,
}  # fmt: skip


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
        mock.patch.dict("ringflash.attention.plan.planned", clear=True),
    ):
        yield used


def attempt(task: Task, part: Callable[[], Found]) -> Found:
    """Return what a part finds, or its traceback."""
    start = time.monotonic()
    with kernels(task) as used:
        try:
            found = part()
        except Exception:
            found = {"error": traceback.format_exc()}
    opened = sorted({name for name, _ in transport._open})
    return {**found, "kernels": sorted(used), "transports": opened, "seconds": time.monotonic() - start}


def write(found: dict[str, Found], file: Path) -> None:
    """In one go, for those that read meanwhile."""
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(json.dumps(found))
    partial_file.replace(file)


def all_have_ended(task: Task, name: str) -> bool:
    """Return whether every rank reaches the end of a part soon."""
    files = [Path(task.out, f"{rank}.json") for rank in range(dist_size())]
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        if all(file.exists() and name in json.loads(file.read_text()) for file in files):
            return True
        time.sleep(0.2)
    return False


def main(task: Task) -> None:
    """All parts of the job, one after the other."""
    faulthandler.dump_traceback_later(max(1.0, task.stacks_at - time.time()))
    sys.path.insert(0, task.out)
    if task.on_gpus and (task.job != "deepspeed" or is_shared(dist_size())):  # which is to choose by itself
        use_gpu(int(os.environ["RANK"]), dist_size())
    found: dict[str, Found] = {}
    for name, part in JOBS[task.job](task).items():
        found[name] = attempt(task, part)
        seconds, error = found[name]["seconds"], found[name].get("error", "")
        print(f"rank {os.environ['RANK']} {task.job} {name}: {seconds:.1f} s {error}", flush=True)
        write(found, Path(task.out, f"{os.environ['RANK']}.json"))
        if error and not all_have_ended(task, name):
            sys.exit(f"rank {os.environ['RANK']} failed in {name}, and the others did not: they may wait for it")
    faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized() and not any("error" in part for part in found.values()):
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
