"""transformers' Trainer in a worker of the pool, on one process or on a ring: what its training was."""

import os
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from accelerate import DistributedType, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState, GradientState
from tokenizers import pre_tokenizers
from transformers import (
    DataCollatorWithFlattening,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from ringflash.accelerate import forward as ring_forward
from ringflash.accelerate.rows import share_rows
from ringflash.comm.seeding import seeded
from tests.helpers import models, span_models
from tests.helpers.one_step import one_process, worst
from tests.helpers.pool import Context
from tests.helpers.tokens import word_tokenizer


def sequences(count: int, length: int = 21, prefixes: bool = False) -> list[dict[str, list[int]]]:
    """Prompts of 3 tokens with answers to learn, of several lengths.

    Args:
        prefixes: token types are those of PaliGemma, whose prompts see both ways; otherwise of images (Gemma 3), of
            which one is every second prompt.
    """
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(1, 60, (length - 4 * (i % 4),), generator=generator).tolist() for i in range(count)]
    types = [[i % 2] * 3 + [0] * 3 + [1] * 2 + [0] * (len(row) - 8) for i, row in enumerate(rows)]
    if prefixes:
        types = [[0] * 3 + [1] * (len(row) - 3) for row in rows]
    return [
        {"input_ids": row, "labels": [-100] * 3 + row[3:], "token_type_ids": x}
        for row, x in zip(rows, types, strict=True)
    ]


def right_padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch of rows, padded on the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    pads = {"input_ids": 0, "labels": -100} | ({"token_type_ids": 0} if "token_type_ids" in rows[0] else {})
    batch = {name: [row[name] + [pad] * (longest - len(row[name])) for row in rows] for name, pad in pads.items()}
    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {name: torch.tensor(x) for name, x in (batch | {"attention_mask": mask}).items()}


@cache
def register() -> None:
    """Register the backend once in this process."""
    from ringflash import accelerate

    accelerate.register()


def join(ctx: Context) -> None:
    """Let accelerate find this worker's place; forget what an earlier case configured."""
    local = ctx.rank if ctx.device.index is None else ctx.device.index
    place = {"RANK": ctx.rank, "LOCAL_RANK": local, "WORLD_SIZE": ctx.size, "LOCAL_WORLD_SIZE": ctx.size}
    on_cpu = str(ctx.device.type == "cpu").lower()
    os.environ.update({name: str(x) for name, x in place.items()} | {"ACCELERATE_USE_CPU": on_cpu})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # never dialled: the workers have joined
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def loss_in_fp64(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Return transformers' loss of causal models, which it computes in fp32 whatever the dtype of the logits."""
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum" if num_items_in_batch else "mean"
    )
    return losses / num_items_in_batch if num_items_in_batch else losses


def build(ctx: Context, name: str, sizes: dict[str, int]) -> tuple[Any, Any]:
    """The model of a name, and the configuration of its rings; one process has none, and a loss in fp64.

    Args:
        name: with " adapted" at its end the model has PEFT's adapters.
    """
    make = span_models.build if name in span_models.KINDS else models.build
    model: Any = make(name.removesuffix(" adapted"), "sdpa")
    if ctx.size == 1:
        model.loss_function = loss_in_fp64
    if name.endswith(" adapted"):
        import peft

        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        with seeded(1):
            model = peft.get_peft_model(model, config).double()
    if ctx.size == 1:
        return model, None
    register()
    return model, ParallelismConfig(cp_backend="ringflash", **sizes)


def train(
    ctx: Context,
    folder: str,
    name: str,
    packed: bool,
    sizes: dict[str, int],
    options: dict[str, Any],
    resume: bool = False,
) -> dict[str, Any]:
    """Evaluate, train a few steps and evaluate; return what the training logged, and the parameters at the end.

    Args:
        packed: concatenate the rows of a batch, with position_ids; otherwise pad them on the right.
        sizes: of the `ParallelismConfig`, for several workers.
        resume: begin at the checkpoint that an earlier training left in the folder.
    """
    join(ctx)
    model, config = build(ctx, name, sizes)
    rings = ctx.size // sizes["cp_size"] if config else 1
    arguments = TrainingArguments(
        folder, parallelism_config=config, **{
            "max_steps": 3, "per_device_train_batch_size": 4 // rings, "per_device_eval_batch_size": 4 // rings,
            "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "linear",
            "max_grad_norm": 0.9, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
            "use_cpu": True, "seed": 1,
        } | options,
    )  # fmt: skip
    if arguments.fsdp:  # accelerate leaves it out on CPUs
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    collate = DataCollatorWithFlattening() if packed else right_padded
    data, shown = (sequences(count, prefixes=name == "paligemma") for count in (24, 8))
    trainer = Trainer(model, arguments, collate, train_dataset=data, eval_dataset=shown)
    with span_models.in_fp64() if name in span_models.KINDS else nullcontext():
        if not arguments.fsdp:  # for which accelerate wants an optimizer
            trainer.evaluate()
        trainer.train(f"{folder}/checkpoint-1" if resume else None)
        trainer.evaluate()
    names = "loss", "grad_norm", "eval_loss"
    logged = [{k: x[k] for k in names if k in x} for x in trainer.state.log_history if "train_loss" not in x]
    saved = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {"logged": [x for x in logged if x], "parameters": {k: x.clone() for k, x in saved.items()}}


def answer(ctx: Context, folder: str, sizes: dict[str, int]) -> tuple[list[list[int]], float]:
    """Return what Seq2SeqTrainer generates for nine prompts, in order, and their loss."""
    join(ctx)
    model, config = build(ctx, "llama", sizes)
    model.generation_config.pad_token_id = 0
    rings = ctx.size // sizes["cp_size"] if config else 1
    arguments = Seq2SeqTrainingArguments(
        folder, parallelism_config=config, per_device_eval_batch_size=4 // rings, predict_with_generate=True,
        generation_max_length=12, report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(model, arguments, right_padded, processing_class=tokenizer())
    found = trainer.predict([{name: x[:8] for name, x in row.items()} for row in sequences(9)])
    return found.predictions.tolist(), found.metrics["test_loss"]


class ForwardsFirst(Trainer):
    """Both forwards of a step of two batches run before its two backwards."""

    losses: tuple[torch.Tensor, ...] = ()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.losses += (self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch),)
        for i, loss in enumerate(self.losses if len(self.losses) == 2 else ()):
            self.accelerator.gradient_state._set_sync_gradients(i == 1)
            self.accelerator.backward(loss, scale_wrt_gas=False)
        return self.losses[-1].detach()


def step_with_zero(
    ctx: Context, folder: str, config: dict[str, Any], kind: type[Trainer] = Trainer
) -> dict[str, tuple[float, str]]:
    """The parts of their budgets that one step of two batches spends in fp32, with DeepSpeed's ZeRO.

    The norm of the gradients is below the clipping, which would hide their scale.

    Args:
        config: of DeepSpeed.
    """
    from deepspeed.utils import safe_get_full_fp32_param
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from ringflash.deepspeed.engine import skip_shared_memory_op

    register()
    skip_shared_memory_op()
    join(ctx)
    on_gpus = mock.patch.object(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU))
    cpu = {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    with mock.patch.dict(os.environ, cpu), on_gpus:  # accelerate leaves DeepSpeed out on CPUs
        model: Any = models.build("llama", "sdpa").float()
        rows = sequences(4)
        batch, known = right_padded(rows), {"clipping": 5.0, "learning_rate": 0.5}
        steps = [one_process(model, plain_loss, [batch], x, **known) for x in (torch.float64, torch.float32)]
        arguments = TrainingArguments(
            folder, parallelism_config=ParallelismConfig(cp_backend="ringflash", cp_size=2, dp_replicate_size=2),
            deepspeed={"zero_allow_untested_optimizer": True, **config, "train_micro_batch_size_per_gpu": "auto"},
            max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.5,
            lr_scheduler_type="constant", max_grad_norm=5.0, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        try:
            trainer = kind(model, arguments, right_padded, train_dataset=rows)
            trainer.train()
            backward = trainer.accelerator.deepspeed_engine_wrapped.engine.backward
            trainer.get_eval_dataloader(rows)  # is prepared, too, and changes the engine no more
            assert trainer.accelerator.deepspeed_engine_wrapped.engine.backward is backward
        finally:
            unset_hf_deepspeed_config()
        moved = {}
        for name, p in trainer.model.named_parameters():
            whole = safe_get_full_fp32_param(p)
            moved[name] = (p if whole is None else whole).detach().double() - steps[0]["start"][name]
        want, low = ({name: x.double() - step["start"][name] for name, x in step["weight"].items()} for step in steps)
        return worst({"step": moved}, {"step": want}, {"step": {name: x.float() for name, x in low.items()}})


def plain_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over all labels of a batch, padded on the right."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def tokenizer() -> Any:
    """One token for each letter of "a" to "z" and a space; padding and the end are two more tokens."""
    words = ["<pad>", "<eos>", *" abcdefghijklmnopqrstuvwxyz"]
    return word_tokenizer(words, pre_tokenizers.Split("", "isolated"), pad_token="<pad>", eos_token="<eos>")


PROMPTS = ("sort this", "a", "count to ten", "say it")
ANSWERS = ("hist ors t", "b", "one two three", "no")


def train_with_trl(ctx: Context, folder: str, kind: str) -> dict[str, Any]:
    """Train two steps with SFTTrainer, DPOTrainer or GRPOTrainer; return what it logged and the parameters.

    Args:
        kind: "sft", "dpo" or "grpo"; "dpo fsdp", whose reference model TRL shards itself; "dpo precompute", which
            computes the reference with the policy before that is prepared; "grpo shared", with share_prefixes.
    Returns:
        saved: tokens of batches before and after common beginnings were packed.
        attention: names of the implementations that ran without gradients, in reference models.
    """
    import trl
    from datasets import Dataset

    join(ctx)
    model, config = build(ctx, "llama", {"cp_size": ctx.size})
    attention, forward = set(), LlamaAttention.forward
    saved: list[tuple[int, int]] = []

    def share(rows: Any, min_shared: int) -> Any:
        packed = share_rows(rows, min_shared)
        saved.append((rows.input_ids.numel(), packed.input_ids.numel()))
        return packed

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            attention.add(self.config._attn_implementation)
        return forward(self, *args, **options)

    options: dict[str, Any] = {
        "output_dir": folder, "parallelism_config": config, "max_steps": 2, "per_device_train_batch_size": 4,
        "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.05,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "seed": 1, "bf16": False, "gradient_checkpointing": False, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    prompts, chosen, rejected = list(PROMPTS), list(ANSWERS), list(ANSWERS[::-1])
    common: dict[str, Any] = {"model": model, "processing_class": tokenizer()}
    if kind == "sft":
        data = Dataset.from_dict({"prompt": prompts * 4, "completion": chosen * 4})
        args = trl.SFTConfig(**options | {"packing": True, "max_length": 32, "per_device_train_batch_size": 2})
        trainer: Any = trl.SFTTrainer(args=args, train_dataset=data, eval_dataset=data, **common)
    elif kind.startswith("dpo"):
        data = Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})
        if ctx.rank == 0:
            data.save_to_disk(f"{folder}/data")
        torch.distributed.barrier(ctx.group)
        data = Dataset.load_from_disk(f"{folder}/data")  # TRL keeps what it computes in advance next to the data
        if config and kind == "dpo fsdp":
            wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
            options |= {"fsdp": True, "fsdp_config": wrapped}
        args = trl.DPOConfig(**options, precompute_ref_log_probs=kind == "dpo precompute")
        if args.fsdp:  # accelerate leaves it out on CPUs
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        reference = None if kind == "dpo precompute" else build(ctx, "llama", {"cp_size": ctx.size})[0]
        with mock.patch.object(LlamaAttention, "forward", noted):
            trainer = trl.DPOTrainer(args=args, ref_model=reference, train_dataset=data, **common)
    else:
        data = Dataset.from_dict({"prompt": prompts * 2})
        sizes = {"num_generations": 4, "max_completion_length": 6, "generation_batch_size": 8}
        sizes |= {"gradient_accumulation_steps": 2, "cast_lm_head_to_fp32": kind == "grpo shared"}
        args = trl.GRPOConfig(**options | sizes | {"temperature": 0.7})
        judge = partial(rewards, rank=ctx.rank)
        trainer = trl.GRPOTrainer(args=args, reward_funcs=judge, train_dataset=data, rollout_func=rollout, **common)
    sharing = mock.patch.object(ring_forward.RingForward, "min_shared", int(kind == "grpo shared"))
    with (
        mock.patch.object(LlamaAttention, "forward", noted),
        sharing,
        mock.patch.object(ring_forward, "share_rows", share),
    ):
        trainer.train()
    if kind == "sft":
        trainer.evaluate()
    names = (
        "loss", "grad_norm", "eval_loss", "mean_token_accuracy", "entropy", "num_tokens", "logps/chosen", "reward",
        "kl",
    )  # fmt: skip
    if "grpo" in kind:  # counts the tokens of every rank
        names = tuple(name for name in names if name != "num_tokens")
    logged = [{k: x[k] for k in names if k in x} for x in trainer.state.log_history]
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in trainer.model.named_parameters()}
    parameters = {name: p.detach().clone() for name, p in whole.items()}
    return {"logged": [x for x in logged if x], "parameters": parameters, "attention": attention, "saved": saved}


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of several lengths, other ones on each rank, as engines sample them."""
    coded, rank = trainer.processing_class(prompts)["input_ids"], trainer.accelerator.process_index
    completions = [
        [3 + (5 * i + 7 * j + len(ids) + rank) % 20 for j in range(3 + i % 4)] for i, ids in enumerate(coded)
    ]
    return {"prompt_ids": coded, "completion_ids": completions, "logprobs": None}


def rewards(completion_ids: list[list[int]], rank: int, **_: Any) -> list[float]:
    """Other rewards on each rank, as a judge that samples gives them."""
    return [(sum(ids) + rank * i) % 7 / 7 for i, ids in enumerate(completion_ids)]
