"""Callback that prints a line every few steps: loss, gradient norm, learning rate, memory, speed, MFU, time left."""

from __future__ import annotations

import os
import resource
import time
from datetime import timedelta
from typing import Any

import lightning
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ringflash.huggingface.flops import FP8_PER_BF16, peak_tflops
from ringflash.lightning import CausalLM
from ringflash.lightning.data import SequenceData
from ringflash.lightning.module import bucket_bounds
from ringflash.lightning.strategy import strategy_of
from ringflash.sequence.layout import read_documents

_GIB = 1 << 30


class Progress(lightning.Callback):
    """Callback that prints loss, gradient norm, learning rate, memory, speed, MFU, and the time that is left.

    Only the first rank prints; memory and speed are also logged. Tokens are counted once per sequence: Lightning's
    ThroughputMonitor multiplies by the number of ranks, and would count them once for each rank of a ring. FLOPs are
    those of `ringflash.huggingface.flops`, for the documents of each batch.

    Args:
        every_n_steps: steps between two lines.
        peak_tflops: bf16 peak of one GPU, for MFU; default from `ringflash.huggingface.flops.PEAK_TFLOPS`, by the
            GPU's name. MFU is not printed for a device without a peak.
    """

    def __init__(self, every_n_steps: int = 10, peak_tflops: float | None = None) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be 1 or more, got {every_n_steps}; 1 prints every step.")
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"peak_tflops must be positive, got {peak_tflops}; leave it out for the table's.")
        self.every_n_steps, self.peak_tflops = every_n_steps, peak_tflops
        self.tokens_seen = 0  # by all data ranks, since the training began
        self.num_tokens, self.flops = 0, 0.0  # since the last line: tokens on all data ranks, FLOPs of this data rank
        self.console = Console(highlight=False, soft_wrap=True)
        self.evaluations: list[tuple[int, dict[str, float]]] = []

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Check that the module counts FLOPs and keeps its losses, and that the data has a known length.

        Raises:
            ValueError: not a CausalLM on a SequenceData.
        """
        if not (isinstance(pl_module, CausalLM) and isinstance(trainer.datamodule, SequenceData)):
            raise ValueError(
                f"Progress must have a CausalLM and a SequenceData, got {type(pl_module).__name__} and "
                f"{type(trainer.datamodule).__name__}; take Lightning's progress bar."
            )

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: CausalLM) -> None:
        """Print the model's size, the sequences and the device."""
        strategy = strategy_of(trainer)
        parameters = sum(p.numel() for p in pl_module.parameters())
        self._print(
            trainer,
            f"[bold]{parameters / 1e6:.2f} M parameters[/]; sequences of {trainer.datamodule.seqlen} tokens, "
            f"each over {strategy.cp_size} rank(s), {strategy.dp_size} at a time; "
            f"{_device_name(strategy.root_device)}; precision {trainer.precision}",
        )

    def on_train_start(self, trainer: lightning.Trainer, pl_module: CausalLM) -> None:
        """Say where a run continues, and start the clock."""
        data = trainer.datamodule
        self.tokens_seen = data.num_consumed * data.seqlen
        if trainer.ckpt_path is not None:
            self._print(
                trainer,
                f"continuing from {_relative_path(str(trainer.ckpt_path))}: step {trainer.global_step}, "
                f"{self.tokens_seen:,} tokens seen",
            )
        self._restart_clock(trainer)

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: CausalLM, *_: Any) -> None:
        """Restart the clock after an evaluation; only here, because other callbacks may evaluate after this one."""
        if self._evaluated:
            self._restart_clock(trainer)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: CausalLM, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        """Print and log on the first step and then every `every_n_steps`."""
        step, seqlen = trainer.global_step, trainer.datamodule.seqlen
        self.num_tokens += strategy_of(trainer).dp_size * seqlen
        self.tokens_seen += strategy_of(trainer).dp_size * seqlen
        if pl_module.flops_of is not None:
            bounds = batch["cu_seqlens"]
            self.flops += pl_module.flops_of([0, seqlen] if bounds is None else read_documents(bounds))
        if step <= self._clock_step or (step % self.every_n_steps and step > 1):
            return
        loss, rate = (trainer.callback_metrics[x].item() for x in ("loss", "learning_rate"))
        norm = trainer.callback_metrics.get("grad_norm")  # a module that overrides clipping may log none
        grad_norm = "" if norm is None else f"grad_norm {norm.item():8.4f}  "
        speed = {
            "memory_gib": _peak_memory(strategy_of(trainer).root_device),
            "tokens_seen": self.tokens_seen,
            **self._speed(trainer, "fp8" in pl_module.impl or pl_module.float8 is not None),
        }
        pl_module.log_dict(speed)
        flops = f"  {speed['tflops_per_rank']:.3g} TFLOP/s a rank" if "tflops_per_rank" in speed else ""
        mfu = f"  MFU {100 * speed['mfu']:.1f}%" if "mfu" in speed else ""
        mfu += f" ({100 * speed['mfu_of_fp8_peak']:.1f}% of the FP8 peak)" if "mfu_of_fp8_peak" in speed else ""
        left = timedelta(seconds=round(speed["seconds_per_step"] * (trainer.max_steps - step)))
        self._print(
            trainer,
            f"step [bold]{step:>6}[/]  loss [bold]{loss:7.4f}[/]  {grad_norm}lr {rate:.2e}  "
            f"{speed['memory_gib']:6.2f} GiB  {speed['tokens_per_second']:>10,.0f} tokens/s{flops}{mfu}  "
            f"{speed['seconds_per_step']:.3g} s a step  {self.tokens_seen:,} tokens seen"
            + (f"  {left} left" if trainer.max_steps > 0 else ""),
        )
        self._restart_clock(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: CausalLM) -> None:
        """Print the losses, also before the first step if the sanity check covers all evaluation sequences."""
        if trainer.sanity_checking and trainer.num_sanity_val_batches != trainer.num_val_batches:
            return  # a mean over some of the sequences cannot be compared with later ones
        self.evaluations.append((trainer.global_step, pl_module.eval_losses))
        if trainer.sanity_checking:  # Lightning drops what a module logs then
            for logger in trainer.loggers:
                logger.log_metrics({f"eval_loss/{name}": x for name, x in pl_module.eval_losses.items()}, step=0)
        text = "  ".join(f"{name} [bold]{loss:.4f}[/]" for name, loss in pl_module.eval_losses.items())
        self._print(trainer, f"step [bold]{trainer.global_step:>6}[/]  loss over fixed sequences: {text}")
        self._evaluated = True

    def on_train_end(self, trainer: lightning.Trainer, pl_module: CausalLM) -> None:
        """Print the first and last losses, the checkpoint and the loggers' folders."""
        if len(self.evaluations) > 1:
            (first, before), (last, after) = self.evaluations[0], self.evaluations[-1]
            table = Table("loss, mean over tokens", f"step {first}", f"step {last}")
            for name in after:
                table.add_row(name, f"{before[name]:.4f}", f"{after[name]:.4f}")
            self._print(trainer, table)
        if pl_module.eval_losses_by_position:
            self._print(trainer, _position_table(pl_module, trainer.datamodule.seqlen))
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
        self._print(trainer, f"checkpoint  {_relative_path(checkpoint) if checkpoint else 'none yet'}")
        for logger in trainer.loggers:
            if place := logger.log_dir or logger.save_dir:  # WandbLogger has no log_dir
                self._print(trainer, f"loss curve  {_relative_path(place)} ({type(logger).__name__})")

    def _speed(self, trainer: lightning.Trainer, in_fp8: bool) -> dict[str, float]:
        """Return tokens and FLOPs per second since the last line; all ranks call it together."""
        strategy = strategy_of(trainer)
        seconds = time.perf_counter() - self._clock
        per_step = trainer.accumulate_grad_batches * strategy.dp_size * trainer.datamodule.seqlen
        speed = {
            "seconds_per_step": seconds * per_step / self.num_tokens,
            "tokens_per_second": self.num_tokens / seconds,
            "tokens_per_second_per_rank": self.num_tokens / seconds / dist.get_world_size(),
        }
        flops = torch.tensor(self.flops / strategy.cp_size, dtype=torch.float64, device=strategy.root_device)
        dist.all_reduce(flops)
        if flops.item() > 0:
            speed["tflops_per_rank"] = flops.item() / dist.get_world_size() / seconds / 1e12
            peak = self.peak_tflops or peak_tflops(_device_name(strategy.root_device))
            if peak is not None:
                speed["mfu"] = speed["tflops_per_rank"] / peak
                if in_fp8:
                    speed["mfu_of_fp8_peak"] = speed["mfu"] / FP8_PER_BF16
        return speed

    def _restart_clock(self, trainer: lightning.Trainer) -> None:
        self._clock, self._clock_step, self._evaluated = time.perf_counter(), trainer.global_step, False
        self.num_tokens, self.flops = 0, 0.0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _print(self, trainer: lightning.Trainer, what: str | Table) -> None:
        if trainer.is_global_zero:
            self.console.print(what)


def _position_table(module: CausalLM, seqlen: int) -> Table:
    """Table of the last evaluation's losses by bucket; with a model that uses distant context they fall downwards."""
    losses = module.eval_losses_by_position
    table = Table("tokens of the document before", *losses)
    for bucket, bound in enumerate(bucket_bounds(seqlen)):
        found = [by_position.get(bucket) for by_position in losses.values()]
        if any(loss is not None for loss in found):
            table.add_row(f"from {bound:,}", *("" if loss is None else f"{loss:.4f}" for loss in found))
    return table


def _peak_memory(device: torch.device) -> float:
    """Return the peak memory in GiB: on CUDA since the last line, on the CPU since the process started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s) each"


def _relative_path(path: str) -> str:
    """Return a path relative to the working directory if it is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
