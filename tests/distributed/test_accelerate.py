"""transformers' Trainer and accelerate over rings equal one process: losses, evaluations, and parameters after steps.

gloo, 4 CPU processes, fp64; needs the accelerate extra.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringflash
from ringflash.accelerate import registration
from ringflash.accelerate.forward import put_on_ring
from tests.helpers import models, span_models
from tests.helpers.pool import Context, Pool, on_ranks
from tests.helpers.ring_check import assert_trains_alike

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers
from accelerate import Accelerator, ParallelismConfig
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import TorchContextParallelConfig, convert_outputs_to_fp32
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import seed_worker

from ringflash import accelerate
from tests.helpers import trainer

LAYERS = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
CASES: dict[str, tuple[str, bool, dict[str, int], dict[str, Any]]] = {
    "padded, two rings": (
        "llama",
        False,
        {"cp_size": 2, "dp_replicate_size": 2},
        {"save_strategy": "steps", "save_steps": 1},
    ),
    "packed, windows": ("qwen3_window", True, {"cp_size": 4}, {"average_tokens_across_devices": False}),
    "images, two rings": ("gemma3", False, {"cp_size": 2, "dp_replicate_size": 2}, {}),
    "prefixes": ("paligemma", False, {"cp_size": 4}, {}),
    "experts": ("qwen3_experts", False, {"cp_size": 4}, {"gradient_checkpointing": True}),
    "fsdp": ("llama", True, {"cp_size": 2, "dp_shard_size": 2}, {"fsdp": True, "fsdp_config": LAYERS}),
    "fsdp, adapted": ("llama adapted", True, {"cp_size": 4}, {"fsdp": True, "fsdp_config": LAYERS}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(pool: Pool, alone: Pool, case: str, tmp_path: Path) -> None:
    """Three steps of two batches each, clipped, between two evaluations; labels of prompts are -100."""
    name, packed, sizes, options = CASES[case]
    (one,) = alone.run(trainer.train, f"{tmp_path}/one", name, packed, sizes, options)
    rings = pool.run(trainer.train, f"{tmp_path}/ring", name, packed, sizes, options)
    for rank, ring in enumerate(rings):
        assert len(ring["logged"]) == 4 and "eval_loss" in ring["logged"][-1]
        assert_alike(ring, one)
        assert rank > 0 or set(ring["parameters"]) == set(one["parameters"])
    if "save_steps" in options:  # one process goes on from the ring's first checkpoint
        (resumed,) = alone.run(trainer.train, f"{tmp_path}/ring", name, packed, sizes, options, True)
        assert_alike(resumed, one)


def assert_alike(ring: dict[str, Any], one: dict[str, Any]) -> None:
    for got, want in zip(ring["logged"], one["logged"], strict=True):
        assert got == pytest.approx(want, rel=1e-6)  # Trainer adds losses in fp32
    assert ring["logged"][-1]["eval_loss"] == pytest.approx(one["logged"][-1]["eval_loss"], rel=1e-12)
    for key, got in ring["parameters"].items():  # FSDP gathers them on the first rank
        torch.testing.assert_close(got, one["parameters"][key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name, changes", [("chunks", {}), *(("llama", x) for x in models.ROTATIONS.values())])
@on_ranks(2)
def test_lengths_and_positions_are_those_of_the_batch(ctx: Context, name: str, changes: dict[str, Any]) -> None:
    """A row of 21 tokens, which the layout pads, and rows that are all padded, which become documents of one row.

    "chunks" is Llama 4, whose attention counts positions.
    """
    ring, whole = (models.build(name, "sdpa", **changes) for _ in range(2))
    put_on_ring(ring, ctx.group)
    ids = models.tokens(2)[:, :21]
    mask = torch.ones_like(ids)
    mask[:, 17:] = 0
    for rows, shown, positions in ((ids[:1], torch.ones_like(mask[:1]), torch.arange(21)[None]), (ids, mask, None)):
        batch = {"input_ids": rows, "attention_mask": shown, "position_ids": positions}
        labels = rows.masked_fill(shown == 0, -100)
        want = trainer.loss_in_fp64(whole(**batch).logits, labels, 61)
        torch.testing.assert_close(ring(**batch, labels=labels).loss, want, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "paligemma", "hrm"])
@on_ranks(2)
def test_spans_are_those_of_the_whole_rows(ctx: Context, name: str) -> None:
    """Rows of 21 tokens, which the layout pads: one, two, and padded ones; documents that end and begin with spans.

    Packed documents are compared with each by itself: transformers looks their spans up by positions in documents.
    """
    ring, whole = (span_models.build(name, "sdpa") for _ in range(2))
    put_on_ring(ring, ctx.group)
    ids, mask, types = models.tokens(2)[:, :21] % 59, torch.ones(2, 21, dtype=torch.int64), torch.zeros(2, 21).long()
    types[:, 7:] = 1
    if name.startswith("gemma"):
        types[:, 12:19], types[:, 0] = 0, 1
    if name == "hrm":
        types = 1 - types
    padded, packed = mask.clone(), torch.arange(21)[None] % 11
    padded[0, 17:] = 0
    whole_rows, two_documents = (slice(0, 21),), (slice(0, 11), slice(11, 21))
    for rows, given, documents in (
        (1, {"attention_mask": mask[:1]}, whole_rows),
        (2, {"attention_mask": mask}, whole_rows),
        (2, {"attention_mask": padded}, whole_rows),
        (1, {"position_ids": packed}, two_documents),
    ):
        batch = {"input_ids": ids[:rows], span_models.KINDS[name][1]: types[:rows]}
        labels = ids[:rows].masked_fill(given.get("attention_mask", mask[:rows]) == 0, -100)
        with span_models.in_fp64():
            parts = [{key: x[:, part] for key, x in (batch | given).items()} for part in documents]
            want = trainer.loss_in_fp64(torch.cat([whole(**part).logits for part in parts], 1), labels, 61)
            loss = ring(**batch, **given, labels=labels).loss
        torch.testing.assert_close(loss, want, rtol=1e-9, atol=0)


@pytest.mark.parametrize("sizes", [{"cp_size": 4}, {"cp_size": 2, "dp_replicate_size": 2}])
def test_generated_answers_are_those_of_one_process(
    pool: Pool, alone: Pool, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Each once, in the order of the prompts. Two rings repeat prompts to fill the last batch."""
    ((want, loss),) = alone.run(trainer.answer, str(tmp_path), sizes)
    for got, ring_loss in pool.run(trainer.answer, str(tmp_path), sizes):
        assert got[:9] == want[:9] and len(got) == (9 if sizes["cp_size"] == 4 else 12)
        assert sizes["cp_size"] == 2 or ring_loss == pytest.approx(loss, rel=1e-12)


@on_ranks(2)
def test_a_second_preparation_for_mixed_precision(ctx: Context) -> None:
    """The ring's forward, with what TRL gave it, is found inside accelerate's wrappers of the first."""
    model = models.build("llama", "sdpa")
    put_on_ring(model, ctx.group)
    forward = model.forward
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(forward))
    put_on_ring(model, ctx.group)
    assert model.forward is forward


@on_ranks(2)
def test_hooks_of_a_device_map_are_no_own_forward(ctx: Context) -> None:
    """accelerate sets a forward that calls the model's own."""
    model, ids = models.build("llama", "sdpa"), models.tokens(2)
    want = trainer.loss_in_fp64(model(ids).logits, ids, 61)
    add_hook_to_module(model, ModelHook())
    add_hook_to_module(model.lm_head, ModelHook())
    put_on_ring(model, ctx.group)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, want, rtol=1e-12, atol=0)


@on_ranks(4)
def test_model_without_wrappers_stays_on_the_ring(ctx: Context) -> None:
    """unwrap_model(keep_fp32_wrapper=False) makes a method of the forward that it finds inside them."""
    trainer.join(ctx)
    model, config = trainer.build(ctx, "llama", {"cp_size": 4})
    accelerator = Accelerator(cpu=True, parallelism_config=config, mixed_precision="bf16")
    prepared, ids = accelerator.prepare_model(model), models.tokens(2)
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    want = trainer.loss_in_fp64(models.build("llama", "sdpa")(ids).logits, ids, 61)
    for loss in (bare(input_ids=ids, labels=ids).loss, bare(ids, labels=ids).loss):
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    forward = bare.forward
    put_on_ring(bare, prepared.module.forward.__func__.group)
    assert bare.forward is forward.__func__


class RoundingTrainer:
    """A Trainer of transformers 5.20, in a ring of four with 419 labels."""

    args = SimpleNamespace(average_tokens_across_devices=False)
    accelerator = SimpleNamespace(parallelism_config=SimpleNamespace(cp_backend="ringflash", cp_size=4))

    def get_tp_size(self) -> int:
        """Size of the ring, as `register` lets it say."""
        return 4

    def count(self) -> int:
        """Labels of this rank's batches, divided by the ranks that have them."""
        return 419 // self.get_tp_size()


def test_operations_of_a_batch_are_counted_once() -> None:
    """Trainer adds those of every rank, and the tokens of every rank."""
    trainer_: Any = RoundingTrainer()
    trainer_.state = SimpleNamespace(num_input_tokens_seen=7)
    assert registration.floating_point_ops(lambda *_: 400, trainer_, {}) == 100

    def count(self: Any, _: object) -> None:
        self.state.num_input_tokens_seen += 4 * 21

    registration._track_num_input_tokens(count, trainer_, {})
    assert trainer_.state.num_input_tokens_seen == 7 + 21


def test_labels_of_a_ring_are_not_rounded() -> None:
    """If tokens are not averaged across devices, Trainer divided 419 labels by four and the ring multiplied by it."""
    trainer_ = RoundingTrainer()
    assert registration._get_num_items_in_batch(RoundingTrainer.count, trainer_) == 419
    assert trainer_.get_tp_size() == 4


@on_ranks(4)
def test_workers_of_a_ring_are_seeded_alike(ctx: Context) -> None:
    """Trainer seeds them by the process; the ranks of a ring must read the same batches."""
    trainer.join(ctx)
    _, config = trainer.build(ctx, "llama", {"cp_size": 2, "dp_replicate_size": 2})
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    seed = partial(seed_worker, num_workers=3, rank=ctx.rank)
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(range(8), worker_init_fn=seed))
    assert loader.worker_init_fn.func is seed_worker
    assert loader.worker_init_fn.keywords == {"num_workers": 3, "rank": ctx.rank // 2}


@on_ranks(2)
def test_a_step_without_labels_changes_nothing(ctx: Context) -> None:
    """The loss is NaN, since transformers divides by 0 labels, but gradients are 0, as in one process."""
    ring, whole = (models.build("llama", "sdpa") for _ in range(2))
    put_on_ring(ring, ctx.group)
    ids = models.tokens(2)
    for model, count in product((ring, whole), (torch.tensor(0), None)):
        loss = model(input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=count).loss
        loss.backward()
        assert loss.isnan() and not any(p.grad.any() for p in model.parameters())


@on_ranks(2)
def test_a_compiled_model(ctx: Context) -> None:
    """Compile by torch.compile, then in place, which runs the same code."""
    ring, whole = (models.build("llama", "sdpa", num_hidden_layers=1) for _ in range(2))
    put_on_ring(ring, ctx.group)
    ids = models.tokens(2)
    compiled = torch.compile(ring, backend="eager")
    ring.compile(backend="eager")
    for run in (compiled, ring):
        for model in (ring, whole):
            model.zero_grad()
        want = trainer.loss_in_fp64(whole(ids).logits, ids, 61)
        assert_trains_alike(ctx, ring, run(input_ids=ids, labels=ids).loss, whole, want, rtol=1e-12)
    torch._dynamo.reset()  # other tests compile the same frames, up to a limit


@pytest.mark.parametrize("stage, kind", [*((i, transformers.Trainer) for i in range(4)), (3, trainer.ForwardsFirst)])
def test_a_step_with_zero_is_that_of_one_process(pool: Pool, stage: int, kind: Any, tmp_path: Path) -> None:
    """Two rings of two, two batches; stage 3 shards every parameter."""
    pytest.importorskip("deepspeed")
    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    for spent in pool.run(trainer.step_with_zero, str(tmp_path), config, kind):
        assert spent["step"][0] <= 1, spent


@on_ranks(4)
def test_zero_settings_without_an_average_are_refused(ctx: Context, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    for key, value in (("gradient_allreduce_op", "sum"), ("sequence_parallel_size", 2)):
        with pytest.raises(ValueError, match=f"{key} must "):
            trainer.step_with_zero(ctx, str(tmp_path), {"zero_optimization": {"stage": 1}, key: value})


def use_wrongly(ctx: Context, folder: str) -> dict[str, str]:
    """Return the error of each wrong use on this rank, or "none"; good calls follow."""
    trainer.join(ctx)
    model, config = trainer.build(ctx, "llama", {"cp_size": 4})
    errors: dict[str, str] = {}

    def attempt(name: str, call: Callable[..., Any], **arguments: Any) -> None:
        try:
            call(**arguments)
            errors[name] = "none"
        except (ValueError, NotImplementedError, RuntimeError) as error:
            errors[name] = f"{type(error).__name__}: {error}"

    attempt("registered twice", accelerate.register)
    attempt("handler", ParallelismConfig, cp_backend="ringflash", cp_size=4, cp_handler=TorchContextParallelConfig())
    attempt("tensor parallel", ParallelismConfig, cp_backend="ringflash", cp_size=2, tp_size=2)
    three = ParallelismConfig(cp_backend="ringflash", cp_size=3)
    attempt("does not divide", Accelerator, cpu=True, parallelism_config=three)
    trainer.join(ctx)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = accelerator.prepare_model(model)
    ids = models.tokens(2)
    mask = torch.ones_like(ids)
    left, holes, right = mask.clone(), mask.clone(), mask.clone()
    left[0, :3], holes[1, 5:7], right[1, 20:] = 0, 0, 0
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    documents = torch.where(positions < 10, positions, positions - 10)
    good = {"input_ids": ids, "labels": ids}
    attempt("left padding", model, **good, attention_mask=left)
    attempt("one rank's left padding", model, **good, attention_mask=left if ctx.rank == 3 else mask)
    attempt("holes", model, **good, attention_mask=holes)
    attempt("numbers of documents", model, **good, attention_mask=mask + (mask.cumsum(1) > 9))
    attempt("4-D mask", model, **good, attention_mask=mask[:, None, None])
    attempt("labelled padding", model, **good, attention_mask=right)
    attempt("documents and a mask", model, **good, attention_mask=mask, position_ids=documents)
    attempt("late positions", model, **good, position_ids=positions + 1)
    attempt("other bounds", model, **good, cu_seq_lens_q=torch.tensor([0, 5, 24]))
    attempt("only numbers of documents", model, **good, seq_idx=positions // 10)
    attempt("no labels", model, input_ids=ids)
    attempt("embeddings", model, **good, inputs_embeds=torch.zeros(2, 24, 32))
    attempt("token types", model, **good, token_type_ids=torch.zeros_like(ids))
    attempt("router logits", model, **good, output_router_logits=True)
    causal = accelerator.unwrap_model(model)
    compute, causal.loss_function = causal.loss_function, trainer.loss_in_fp64
    attempt("loss function", model, **good)
    causal.loss_function = compute
    attempt("other tokens on a rank", model, input_ids=ids + (ctx.rank == 1), labels=ids)
    short = ids[:, : 24 - 2 * (ctx.rank == 1)]
    attempt("other length on a rank", model, input_ids=short, labels=short)
    attempt("objects", accelerator.gather_for_metrics, input_data=["text"])
    changed = models.build("llama", "sdpa")
    changed.forward = lambda **given: type(changed).forward(changed, **given)  # type: ignore[assignment]
    attempt("forward of an object", accelerator.prepare_model, model=changed)
    attempt("second group", put_on_ring, model=accelerator.unwrap_model(model), group=dist.new_group())
    accelerator.dataloader_config.dispatch_batches = True
    attempt("dispatched batches", accelerator.prepare_data_loader, data_loader=torch.utils.data.DataLoader([1, 2]))
    accelerator.dataloader_config.dispatch_batches = None
    sampler = BatchRebalanceSampler([1, 2], 2, dp_size=1, grad_accum=1)
    loader = torch.utils.data.DataLoader([1, 2], batch_sampler=sampler)
    attempt("rebalanced batches", accelerator.prepare_data_loader, data_loader=loader)
    arguments = transformers.TrainingArguments(
        folder, parallelism_config=config, use_cpu=True, report_to="none", disable_tqdm=True
    )
    predict = transformers.Trainer(accelerator.unwrap_model(model), arguments, trainer.right_padded).predict
    attempt("logits", predict, test_dataset=trainer.sequences(4))

    class TimesProcesses(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Any:
            loss = model(**inputs, num_items_in_batch=num_items_in_batch).loss
            loss *= self.accelerator.num_processes  # in place, as ms-swift does
            return loss

    arguments.gradient_accumulation_steps, other = 2, trainer.build(ctx, "llama", {"cp_size": 4})[0]
    train = TimesProcesses(other, arguments, trainer.right_padded, train_dataset=trainer.sequences(16)).train
    attempt("loss times processes", train)
    loss = model(**good).loss
    log_probs = ringflash.log_probs(model, ids, group=accelerator.torch_device_mesh["cp"])
    torch.testing.assert_close(loss, -log_probs.mean() * ids.shape[1] / (ids.shape[1] - 1), rtol=1e-12, atol=0)
    return errors


REFUSED = {
    "registered twice": "RuntimeError: register must be called once",
    "handler": "ValueError: cp_size must be 1 or more and cp_handler None",
    "tensor parallel": "NotImplementedError: tp_size and sp_size must be 1",
    "does not divide": r"ValueError: dp_replicate_size \* .* must be the number of processes \(4\), got 1 \* 1 \* 3",
    "left padding": "ValueError: attention_mask must be 0 on the right .*padding_side = 'right'",
    "one rank's left padding": "ValueError: (rank 3 of the group: )?attention_mask must be 0 on the right",
    "holes": "ValueError: attention_mask must be 1 on one interval of each row",
    "numbers of documents": "ValueError: attention_mask must be 0 or 1, got values up to 2",
    "4-D mask": "ValueError: attention_mask must have the shape of input_ids .*leave 4-D masks out",
    "labelled padding": "ValueError: labels must be -100 where attention_mask is 0",
    "documents and a mask": "ValueError: attention_mask must be left out if position_ids restart",
    "late positions": "ValueError: position_ids must count from 0 in each document",
    "other bounds": "ValueError: cu_seq_lens_q must be the bounds of the documents of one row",
    "only numbers of documents": r"NotImplementedError: documents must be given by .*, got only \['seq_idx'\]; add",
    "no labels": "NotImplementedError: input_ids and labels must be given",
    "embeddings": "NotImplementedError: a batch must have only input_ids, .*got also .'inputs_embeds'.; leave",
    "token types": "NotImplementedError: token_type_ids must be given only to a model whose mask .* LlamaForCausalLM; ",
    "router logits": "NotImplementedError: output_router_logits must be False, .*, got True; change the",
    "loss function": "NotImplementedError: loss_function must be transformers' own for .*, got .*loss_in_fp64; remove",
    "other tokens on a rank": "ValueError: input_ids and labels given to prepare_batch must be the same on all ranks",
    "other length on a rank": r"ValueError: all ranks .* got batch of accelerate \[2, 24\] .*; give a ring's ranks",
    "objects": "NotImplementedError: gather_for_metrics must be given tensors",
    "forward of an object": "NotImplementedError: forward must be the method of LlamaForCausalLM, got a function",
    "second group": "RuntimeError: model must be prepared for one group",
    "dispatched batches": "NotImplementedError: dispatch_batches must be False",
    "rebalanced batches": "NotImplementedError: train_sampling_strategy must be 'random' or",
    "loss times processes": "ValueError: compute_loss must multiply .* number of rings .1., .*processes .4., which",
    "logits": "NotImplementedError: compute_metrics and predict must be left out",
}  # fmt: skip


def test_wrong_uses_are_refused_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    """Each with its remedy; the ring goes on after them."""
    for rank, errors in enumerate(pool.run(use_wrongly, str(tmp_path))):
        assert set(errors) == set(REFUSED)
        for name, text in errors.items():
            assert re.match(REFUSED[name], text), f"rank {rank}, {name}: {text}"
