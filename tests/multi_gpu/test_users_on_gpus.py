"""A step of transformers' Trainer over a ring against the same step on one GPU: Llama, and two hybrid models.

accelerate shards the model by FSDP2. Recurrences are those that transformers finds: its torch code, if no kernels are
installed. In fp64 a step equals transformers' own code to 1e-11; in bf16 the budget is the house's
(ringflash/testing/tolerance.py), as in test_training_on_gpus.py. Two GPUs or more; `--backend gloo --impl reference`
shows on the CPU, with a smaller model, that the tests themselves are right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ringflash.testing.tolerance import Ratio
from ringflash_kernels import api
from tests.helpers import hybrids
from tests.helpers.one_step import Found, Step, judged, one_process
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup, Table
from tests.multi_gpu.test_training_on_gpus import CLIPPING, LEARNING_RATE

pytest.importorskip("accelerate")

from tests.helpers import trainer

pytestmark = pytest.mark.multi_gpu

LAYERS = {
    "llama": "LlamaDecoderLayer",
    "qwen3_5": "Qwen3_5DecoderLayer",  # gated delta rule
    "granitemoehybrid": "GraniteMoeHybridDecoderLayer",  # Mamba-2
}
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 257, "max_position_embeddings": 4096,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {  # without experts, whose choice is not continuous
    "llama": {},
    "qwen3_5": {"linear_num_key_heads": 8, "linear_num_value_heads": 16},
    "granitemoehybrid": {"num_local_experts": 0, "shared_intermediate_size": 64, "mamba_n_heads": 16},
}
WIDER: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_5": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "granitemoehybrid": {"mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 64, "mamba_n_groups": 1},
}


class Case(NamedTuple):
    """A model and a precision."""

    kind: str
    dtype: torch.dtype
    impl: str


def documents(device: torch.device) -> list[Tensor]:
    """Three documents, whose tokens together are not a multiple of the chunks of a ring."""
    lengths = (1500, 2300, 251) if device.type == "cuda" else (11, 29, 7)
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, hybrids.TINY["vocab_size"], (1, n), generator=draw).to(device) for n in lengths]


def mean_loss(model: nn.Module, rows: list[Tensor]) -> Tensor:
    """Loss of all documents, each computed by itself."""
    losses = [
        cross_entropy(model(row, use_cache=False).logits[0, :-1].double(), row[0, 1:], reduction="sum") for row in rows
    ]
    return torch.stack(losses).sum() / sum(row.shape[1] - 1 for row in rows)


def step(ctx: Context, case: Case, folder: str) -> Found:
    """The step on this rank, judged by that of one process."""
    wide = {**WIDE, **WIDER[case.kind]} if ctx.device.type == "cuda" else {}
    shape = {**CHANGES[case.kind], **wide}
    if case.kind == "granitemoehybrid" and not wide:
        shape["mamba_d_head"] = 2
    kept_in = torch.promote_types(case.dtype, torch.float32)
    model = hybrids.build(case.kind, "eager", kept_in, **shape).to(ctx.device)
    rows = documents(ctx.device)
    options = {"clipping": CLIPPING, "learning_rate": LEARNING_RATE}
    want = one_process(model, mean_loss, [rows], torch.float64, **options)
    low = None if case.dtype == torch.float64 else one_process(model, mean_loss, [rows], case.dtype, **options)
    used: set[str] = set()

    def choose(q: Tensor, k: Tensor, v: Tensor) -> api.Choice:
        used.add(case.impl)
        return api.Choice(case.impl, "asked for")

    with (
        mock.patch("ringflash.attention.plan.choose_impl", choose),
        mock.patch.dict("ringflash.attention.plan.plan_cache", clear=True),
    ):
        got, loss = step_of_trainer(ctx, model, [row[0].tolist() for row in rows], case, folder)
    return {**judged(got, want, low, loss, case.dtype, ctx.size), "kernels": sorted(used)}


def step_of_trainer(ctx: Context, model: Any, rows: list[list[int]], case: Case, folder: str) -> tuple[Step, float]:
    """Gradients before clipping, weights after it, and the loss, of a training of one step."""
    from accelerate import Accelerator, DistributedType, ParallelismConfig, PartialState
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    trainer.join(ctx)
    trainer.register()
    arguments = TrainingArguments(
        folder, parallelism_config=ParallelismConfig(cp_backend="ringflash", cp_size=ctx.size),
        bf16=case.dtype == torch.bfloat16, use_cpu=ctx.device.type == "cpu", max_steps=1, optim="sgd",
        fsdp=True, fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": [LAYERS[case.kind]]},
        per_device_train_batch_size=len(rows), learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        max_grad_norm=CLIPPING, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    if ctx.device.type == "cpu":  # accelerate leaves FSDP out on CPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    data = [{"input_ids": row, "labels": row} for row in rows]
    training = Trainer(model, arguments, DataCollatorWithFlattening(), train_dataset=data)
    gradients: dict[str, Tensor] = {}
    clip = Accelerator.clip_grad_norm_

    def record(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
        gradients.update({name: p.grad.full_tensor().clone() for name, p in training.model.named_parameters()})
        return clip(accelerator, *args, **kwargs)

    losses = []
    run = training.training_step

    def record_loss(*args: Any, **kwargs: Any) -> Tensor:  # Trainer logs it in fp32
        losses.append(run(*args, **kwargs))
        return losses[0]

    with (
        mock.patch.object(Accelerator, "clip_grad_norm_", record),
        mock.patch.object(training, "training_step", record_loss),
    ):
        training.train()
    weights = {name: p.full_tensor().detach() for name, p in training.model.named_parameters()}
    return {"gradient": gradients, "weight": weights}, losses[0].item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_step_of_trainer_equals_one_process(
    pool: Pool, setup: Setup, table: Table, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Gradients, weights and the loss; half of a gradient would be seen."""
    case = Case(kind, dtype, "reference" if dtype == torch.float64 else setup.impl)
    ranks = pool.run(step, case, str(tmp_path))
    table.add(f"trainer {kind} {dtype}", [[Ratio(name, 0, x, x) for name, (x, _) in r["spent"].items()] for r in ranks])
    shown = "\n".join(map(str, ranks))
    print(shown)
    assert all(x <= 1 for rank in ranks for x, _ in rank["spent"].values()), shown
    assert all(rank["half_a_gradient"] > 1 for rank in ranks), shown
    assert all(rank["kernels"] == [case.impl] for rank in ranks), shown
