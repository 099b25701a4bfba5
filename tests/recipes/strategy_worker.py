"""Runs of a tiny model on every rank of one launch; what each rank found goes to <out>/<rank>.json.

    torchrun --nproc_per_node 4 -m tests.recipes.strategy_worker <folder of texts> <out>

The reference is plain torch in one process: no mesh, no shards, no Lightning.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
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
from ringflash.lightning.module import build_model
from ringflash.memory import Memory

CONFIG = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SEQLEN, DP_SIZE, CP_SIZE, STEPS, NUM_EVAL = 48, 2, 2, 3, 4
SAVING = Memory("attention_kept", offload_checkpoints=True, mlp_tile_tokens=7)
CLIPPING = {"norm": 0.05, "value": 1e-3}  # both far below what the gradients are

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
    """A trainer on data x context ranks that writes and prints nothing."""
    strategy = ContextParallelStrategy(context_parallel_size=CP_SIZE)
    defaults = {"accelerator": "cpu", "max_steps": STEPS, "logger": False, "use_distributed_sampler": False}
    options = {"strategy": strategy, **defaults, **options}
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    return lightning.Trainer(
        devices=per_host, num_nodes=int(os.environ["WORLD_SIZE"]) // per_host, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def data(folder: str) -> TextData:
    """Sequences of a few documents each."""
    return TextData(SEQLEN, folder, ".txt", num_eval_sequences=NUM_EVAL)


def reference(module: CausalLM, texts: Any, algorithm: str) -> Iterator[tuple[Tensors, Tensors, float, float]]:
    """Gradients after clipping, weights, loss and norm of each step, by one process over both data ranks' samples."""
    module.model = model = reference_model(module.seed)
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


def reference_model(seed: int) -> nn.Module:
    """The model in one process, in fp64."""
    torch.set_default_dtype(torch.float64)
    try:
        return build_model(CONFIG, None, seed)
    finally:
        torch.set_default_dtype(torch.float32)


def evaluation(folder: str) -> dict[str, Any]:
    """Largest error of the losses over fixed sequences, whole and by position, against one process's own sums."""
    module, strategy = CausalLM(CONFIG), ContextParallelStrategy(context_parallel_size=CP_SIZE, layout="balanced")
    trainer = trainer_with(plugins=[DoublePrecision()], strategy=strategy)
    trainer.validate(module, datamodule=data(folder), verbose=False)
    model, errors = reference_model(module.seed), {}
    for name, text in (("train", trainer.datamodule.train), ("held_out", trainer.datamodule.held_out)):
        sums: dict[int, list[float]] = {}
        for i in range(NUM_EVAL):
            for bucket, loss in token_losses(model, text[i * len(text) // NUM_EVAL]):
                sums.setdefault(bucket, []).append(loss)
        want = {bucket: sum(losses) / len(losses) for bucket, losses in sums.items()}
        got = module.eval_losses_by_position[name]
        assert got.keys() == want.keys() and len(want) > 2, (got, want)
        errors[f"{name} by position"] = max(abs(got[bucket] - loss) / loss for bucket, loss in want.items())
        every = [loss for losses in sums.values() for loss in losses]
        errors[name] = abs(module.eval_losses[name] - sum(every) / len(every)) / (sum(every) / len(every))
    return errors


def passkey(folder: str) -> dict[str, Any]:
    """The keys' losses over the ring, in stripes, and as one process computes them from whole logits."""
    seqlen, callback = 256, Passkey(depths=(0.1, 0.9), num_keys=2, num_digits=3, seed=1)
    module, texts = CausalLM(CONFIG), TextData(seqlen, folder, ".txt", num_eval_sequences=1)
    strategy = ContextParallelStrategy(layout="striped")
    trainer = trainer_with(plugins=[DoublePrecision()], callbacks=[callback], strategy=strategy)
    trainer.validate(module, datamodule=texts, verbose=False)
    model, draw, wanted = reference_model(module.seed), random.Random(1), {}
    for depth in callback.depths:
        losses = []
        for _ in range(2):
            key = "".join(draw.choices("0123456789", k=3))
            ids, _ = passkey_sequence(key, depth, seqlen, encoder("bytes"))
            hidden = model.model.model(input_ids=ids, position_ids=torch.arange(seqlen)[None], use_cache=False)
            logits = model.model.lm_head(hidden.last_hidden_state)[0, -4:-1]
            losses.append(nn.functional.cross_entropy(logits, ids[0, -3:]).item())
        wanted[depth] = sum(losses) / len(losses)
    return {
        "errors": [abs(callback.found[depth].loss - loss) / loss for depth, loss in wanted.items()],
        "found": [found.keys for found in callback.found.values()],
    }


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


def compare(
    module_class: Callable[..., CausalLM], algorithm: str, folder: str, strategy: ContextParallelStrategy | None = None
) -> dict[str, Any]:
    """Largest errors over all steps and parameters, relative to the largest value of each."""
    recorder, trainer = fit(
        module_class(CONFIG), folder, plugins=[DoublePrecision()],
        gradient_clip_val=CLIPPING[algorithm], gradient_clip_algorithm=algorithm,
        strategy=strategy or ContextParallelStrategy(CP_SIZE),
    )  # fmt: skip
    errors: dict[str, Any] = {"gradient": 0.0, "weight": 0.0, "loss": 0.0}
    expected = reference(CausalLM(CONFIG), trainer.datamodule.train, algorithm)
    for (grads, weights), metrics, (ref_grads, ref_weights, loss, norm) in zip(
        recorder.steps, recorder.metrics, expected, strict=True
    ):
        for key, ours, theirs in (("gradient", grads, ref_grads), ("weight", weights, ref_weights)):
            assert ours.keys() == theirs.keys()
            worst = max(((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs)
            errors[key] = max(errors[key], worst)
        errors["loss"] = max(errors["loss"], abs(metrics["loss"] - loss) / loss)
        if "grad_norm" in metrics:
            errors["grad_norm"] = max(errors.get("grad_norm", 0.0), abs(metrics["grad_norm"] - norm) / norm)
            errors["clipped"] = norm > CLIPPING[algorithm]
    return errors


def replicated(folder: str, path: Path) -> dict[str, Any]:
    """Run `compare` with two copies of the parameters; a run without copies reads its checkpoint."""
    strategy = ContextParallelStrategy(CP_SIZE, replicate_size=2, layout="balanced")
    found = compare(CausalLM, "norm", folder, strategy)
    module, trainer = strategy.lightning_module, strategy._trainer
    trainer.save_checkpoint(path)
    placed = {str(p.placements) for p in module.parameters()}
    whole = {name: p.detach().full_tensor() for name, p in module.named_parameters()}
    other = CausalLM(CONFIG)
    trainer_with(plugins=[DoublePrecision()]).validate(other, datamodule=data(folder), ckpt_path=path, verbose=False)
    read = {name: p.detach().full_tensor() for name, p in other.named_parameters()}
    pieces = FileSystemReader(path).read_metadata().storage_data.values()
    return found | {
        "placements": sorted(placed), "read": all(torch.equal(read[name], x) for name, x in whole.items()),
        "written": sum(part.stat().st_size for part in path.glob("*.distcp")) / sum(piece.length for piece in pieces),
        "over_all": {str(p.placements) for p in other.parameters()} == {"(Shard(dim=0),)"},
    }  # fmt: skip


def precision(name: str, folder: str) -> dict[str, Any]:
    """Return the dtypes of parameters in one of Lightning's precisions, and what the run logs."""
    module = CausalLM(CONFIG)
    recorder, _ = fit(module, folder, precision=name, gradient_clip_val=1.0)
    dtypes, frequencies = {str(p.dtype) for p in module.parameters()}, {str(x.dtype) for x in module.buffers()}
    return {"dtypes": sorted(dtypes), "frequencies": sorted(frequencies), "metrics": recorder.metrics}


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
    """A logger that says where its results lie as W&B's does, by save_dir alone; it keeps none."""

    name, version, save_dir = "curve", 0, "curve"  # type: ignore[assignment]

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """Lightning wants it overridden."""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Likewise."""


class Losses(lightning.Callback):
    """This rank's loss of each batch, as a part of its step's."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, module: CausalLM, outputs: Any, *_: Any) -> None:
        self.parts.append(outputs["loss"])


def progress(folder: str) -> dict[str, Any]:
    """Tokens a second of each step's line; an evaluation comes in the middle of the second step. Errors of the loss.

    The sanity check takes half of the sequences.
    """
    clock, recorder, losses, lines = Clock(), Recorder(), Losses(), Progress(every_n_steps=1)
    progress_module.time = clock  # type: ignore[assignment]
    trainer = trainer_with(
        callbacks=[clock, lines, Probe(clock), recorder, losses], logger=Curve(), accumulate_grad_batches=4,
        check_val_every_n_epoch=None, val_check_interval=6, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(LightningClipping(CONFIG), datamodule=data(folder))  # logs no norm
    wanted = torch.stack(losses.parts).reshape(STEPS, 4).sum(1)
    dist.all_reduce(wanted)
    logged = torch.tensor([batch["loss"] for batch in recorder.metrics[3::4]])
    return {
        "speeds": [step["tokens_per_second"] for step in recorder.metrics if "tokens_per_second" in step],
        "errors": (logged / (wanted / dist.get_world_size()) - 1).abs().tolist(),
        "evaluated_at": [step for step, _ in lines.evaluations],
    }


def refusal(folder: str) -> dict[str, Any]:
    """The error of sizes that do not multiply to the ranks, and whether anything was sent before it."""
    try:
        fit(CausalLM(CONFIG), folder, strategy=ContextParallelStrategy(3, 1))
    except ValueError as error:
        first = str(error)
    try:
        fit(CausalLM(CONFIG), folder, strategy=ContextParallelStrategy(replicate_size=3))
    except ValueError as error:
        return {"message": first, "copies": str(error), "joined": dist.is_initialized()}
    return {}


def second_share(folder: str) -> str:
    """The error of an evaluation for which Lightning would share the sequences out."""
    try:
        trainer_with(use_distributed_sampler=True).validate(CausalLM(CONFIG), datamodule=data(folder), verbose=False)
    except ValueError as error:
        return str(error)
    return "not refused"


class Idle(lightning.LightningModule):
    """It would hang: nothing must reach its steps."""

    def configure_model(self) -> None:
        """Shard nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("a batch came")

    validation_step = test_step = predict_step = training_step

    def configure_optimizers(self) -> None:
        """None."""


def uneven() -> list[str]:
    """The errors of data ranks of which one has a batch more, in training, evaluation and prediction."""
    errors = []
    for name in ("fit", "validate", "test", "predict"):
        batches = torch.utils.data.DataLoader(range(1 + int(os.environ["RANK"]) // CP_SIZE))
        try:
            getattr(trainer_with(limit_val_batches=0 if name == "fit" else None), name)(Idle(), batches)
        except ValueError as error:
            errors.append(str(error))
    return errors


def mesh(folder: str) -> dict[str, Any]:
    """Return this rank's place."""
    limit = timedelta(seconds=1234)
    _, trainer = fit(CausalLM(CONFIG), folder, strategy=ContextParallelStrategy(CP_SIZE, timeout=limit))
    strategy = trainer.strategy
    groups = [*strategy.device_mesh.get_all_groups(), strategy.shard_mesh.get_group()]
    return {
        "timeouts": [group._get_backend(torch.device("cpu")).options._timeout == limit for group in groups],
        "axes": list(strategy.device_mesh.mesh_dim_names), "sizes": [strategy.dp_size, strategy.cp_size],
        "cp_ranks": dist.get_process_group_ranks(strategy.cp_group), "shard_size": strategy.shard_mesh.size(),
        "sampler": strategy.distributed_sampler_kwargs, "num_consumed": trainer.datamodule.num_consumed,
    }  # fmt: skip


def main() -> None:
    """All of it, one after the other."""
    folder, out = sys.argv[1:]
    found = {"refusal": refusal(folder), "mesh": mesh(folder)}
    found["uneven"] = uneven()
    found["second_share"] = second_share(folder)
    found["evaluation"] = evaluation(folder)
    found["passkey"] = passkey(folder)
    found["norm"] = compare(CausalLM, "norm", folder)
    found["replicated"] = replicated(folder, Path(out, "replicated.ckpt"))
    found["value"] = compare(partial(CausalLM, memory=SAVING), "value", folder)
    found["lightning"] = compare(LightningClipping, "norm", folder)
    found["progress"] = progress(folder)
    found |= {name: precision(name, folder) for name in ("32-true", "bf16-mixed", "bf16-true")}
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
