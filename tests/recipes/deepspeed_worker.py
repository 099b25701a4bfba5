"""Engines of a tiny model on every rank of one launch; what each rank found goes to <out>/<rank>.json.

    torchrun --nproc_per_node 4 -m tests.recipes.deepspeed_worker <folder of texts> <out> <context_parallel_size>

The reference is plain torch in one process in fp64; what fp32 loses there is the budget.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from recipes.deepspeed.strategy import DeepSpeedContextParallelStrategy
from recipes.lightning.text import PackedSequence, PackedText, TextData, is_held_out, text_files
from ringflash import deepspeed, huggingface
from ringflash.data.order import SampleOrder
from ringflash.lightning import CausalLM
from ringflash.lightning.module import build_model
from ringflash.training.mesh import CONTEXT_AXIS, DATA_AXIS
from tests.helpers.one_step import Step, Tensors, one_process, worst
from tests.recipes.deepspeed_steps import (
    config_of,
    other_stage,
    resuming,
    scheduled_rates,
    stepping,
    unequal_batches,
    weights,
)
from tests.recipes.strategy_worker import CONFIG

SEQLEN, STEPS, ACCUMULATED, CLIPPING, LEARNING_RATE = 48, 2, 2, 0.05, 1.0
CONFIGS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def samples(folder: str, dp_rank: int, dp_size: int) -> Iterator[PackedSequence]:
    """The sequences of one data rank, in the order in which TextData gives them."""
    texts = PackedText(
        (path.read_bytes() for name, path in text_files(folder, ".txt") if not is_held_out(name)), SEQLEN
    )
    order = SampleOrder(len(texts), seed=0, dp_rank=dp_rank, dp_size=dp_size, first=0)
    return (texts[i] for i in order)


def batches(folder: str, mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    """This rank's shards of the sequences."""
    group = mesh[CONTEXT_AXIS].get_group()
    for sample in samples(folder, mesh[DATA_AXIS].get_local_rank(), mesh[DATA_AXIS].size()):
        yield huggingface.prepare_batch(sample["input_ids"], group=group, cu_seqlens=sample["cu_seqlens"])


def gradients(module: nn.Module) -> Tensors:
    """Whole, on every rank, after the backward and before the step."""
    return {name: safe_get_full_grad(p).detach().clone() for name, p in module.named_parameters()}


def reference(folder: str, dp_size: int, dtype: torch.dtype) -> Step:
    """Gradients and, after a clipped step of SGD, weights of the mean over the data ranks' first sequences."""
    batches = (
        huggingface.prepare_batch(sample["input_ids"], group=None, cu_seqlens=sample["cu_seqlens"])
        for sample in islice(samples(folder, 0, 1), dp_size)
    )
    step = one_process(
        build_model(CONFIG, None, 0), lambda model, batch: model(**batch), list(batches), dtype,
        clipping=CLIPPING, learning_rate=LEARNING_RATE,
    )  # fmt: skip
    weight = {name.removeprefix("model."): x for name, x in step["weight"].items()}
    return {"gradient": step["gradient"], "weight": weight}


def one_step(name: str, folder: str, mesh: DeviceMesh, loss_scale: float = 1.0) -> Step:
    """The same through DeepSpeed, on data x context ranks."""
    model = build_model(CONFIG, mesh[CONTEXT_AXIS].get_group(), 0)
    return engine_step(model, config_of(name), next(batches(folder, mesh)), loss_scale)


def engine_step(model: nn.Module, config: dict[str, Any], batch: dict[str, Any], loss_scale: float = 1.0) -> Step:
    """Gradients and weights of a clipped step of SGD on an engine of `ringflash.deepspeed`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    config = {**config, "gradient_clipping": CLIPPING}
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    batch = {key: x.to(engine.device) if isinstance(x, torch.Tensor) else x for key, x in batch.items()}
    engine.backward(engine(**batch) * loss_scale)
    found = {"gradient": gradients(engine.module)}
    engine.step()
    return {**found, "weight": weights(engine.module)}


def spent(got: Step, want: Step, baseline: Step) -> dict[str, float]:
    """Largest part of its budget that a parameter spends, at the maximum or in the mean."""
    return {key: part for key, (part, _) in worst(got, want, baseline).items()}


class Recorder(lightning.Callback):
    """Weights after the last step, and what was logged."""

    def on_train_end(self, trainer: lightning.Trainer, module: CausalLM) -> None:
        self.weights = weights(module.model)
        self.metrics = {name: x.item() for name, x in trainer.callback_metrics.items()}


def through_lightning(name: str, folder: str, cp_size: int) -> tuple[Tensors, dict[str, float]]:
    """Weights after a few clipped steps of AdamW, each of a few batches, and the last one's metrics."""
    recorder = Recorder()
    trainer = lightning.Trainer(
        strategy=DeepSpeedContextParallelStrategy(cp_size, config=config_of(name)), gradient_clip_val=CLIPPING,
        accelerator="cpu", devices=dist.get_world_size(), max_steps=STEPS, logger=False, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        use_distributed_sampler=False, callbacks=[recorder], accumulate_grad_batches=ACCUMULATED,
    )  # fmt: skip
    trainer.fit(CausalLM(CONFIG), datamodule=TextData(SEQLEN, folder, ".txt", num_eval_sequences=4))
    return recorder.weights, recorder.metrics


def plainly(name: str, folder: str, mesh: DeviceMesh) -> tuple[Tensors, float]:
    """The same without Lightning, and the norm of the last gradient where DeepSpeed tells it."""
    module = CausalLM(CONFIG)
    module.model = build_model(CONFIG, mesh[CONTEXT_AXIS].get_group(), module.seed)
    optimization = module.configure_optimizers()
    engine, *_ = deepspeed.initialize(
        model=module.model,
        config={**config_of(name), "gradient_clipping": CLIPPING, "gradient_accumulation_steps": ACCUMULATED},
        optimizer=optimization["optimizer"], lr_scheduler=optimization["lr_scheduler"]["scheduler"],
    )  # fmt: skip
    for batch in islice(batches(folder, mesh), STEPS * ACCUMULATED):
        engine.backward(engine(**batch))
        if engine.is_gradient_accumulation_boundary():
            norm = torch.stack([g.double().square().sum() for g in gradients(engine.module).values()]).sum().sqrt()
        engine.step()
    return weights(engine.module), norm.item()


def lightning_equals_plain(name: str, folder: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Return whether the bits are the same, and how far the logged norm is from that of the gradient."""
    ours, metrics = through_lightning(name, folder, mesh[CONTEXT_AXIS].size())
    theirs, norm = plainly(name, folder, mesh)
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in theirs)
    return {"equal": equal, "norm_error": abs(metrics["grad_norm"] - norm) / norm, "norm": norm, **metrics}


def default_clipping() -> float:
    """The largest norm where the config names none."""
    model = nn.Linear(2, 2)
    engine, *_ = deepspeed.initialize(
        model=model, config=config_of("zero1"), optimizer=torch.optim.SGD(model.parameters())
    )
    return engine.gradient_clipping()


def refusals() -> dict[str, str]:
    """Return the error of each wrong call; in the last, rank 0 alone is wrong, and in the one before, ranks differ."""
    model, config = nn.Linear(2, 2), config_of("zero1")
    first = dist.get_rank() == 0
    calls: dict[str, dict[str, Any]] = {
        "mpu": {"mpu": object()},
        "mesh_param": {"mesh_param": (2, 2)},
        "sequence_parallel_size": {"config": {**config, "sequence_parallel_size": 2}},
        "train_batch_size": {"config": {**config, "train_batch_size": 8}},
        "ranks_differ": {"config": {**config, "steps_per_print": 1 if first else 2}},
        "one_rank": {"mpu": object() if first else None},
    }
    return {name: _message({"model": model, "config": config, **call}) for name, call in calls.items()}


def _message(call: dict[str, Any]) -> str:
    try:
        deepspeed.initialize(**call)
    except ValueError as error:
        return str(error)
    return "not refused"


def main() -> None:
    """All of it, one after the other."""
    folder, out, cp_size = sys.argv[1:]
    mesh = deepspeed.context_mesh(int(cp_size))
    dp_size = mesh[DATA_AXIS].size()
    want, baseline = (reference(folder, dp_size, dtype) for dtype in (torch.float64, torch.float32))
    found: dict[str, Any] = {"refusals": refusals(), "default_clipping": default_clipping()}
    for name in CONFIGS:
        found[name] = spent(one_step(name, folder, mesh), want, baseline)
    found["negative_control"] = spent(one_step("zero1", folder, mesh, 1 / int(cp_size)), want, baseline)
    if dp_size > 1:
        found["lightning"] = {name: lightning_equals_plain(name, folder, mesh) for name in CONFIGS[:4]}
        found["rates"] = scheduled_rates(int(cp_size))
        found["unequal_batches"] = unequal_batches(int(cp_size))
    else:
        found["stepping"] = {name: stepping(name) for name in CONFIGS}
        found["resuming"] = {
            name: resuming(name, Path(out, f"{name}.ckpt"), average=name == "zero1") for name in ("zero1", "zero3")
        }
        found["other_stage"] = [
            other_stage(*x) for x in (("zero0", Path(out, "zero1.ckpt")), ("zero2", Path(out, "zero3.ckpt")))
        ]
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
