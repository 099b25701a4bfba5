"""Steps of transformers' Trainer over a ring of all ranks: by ringflash, and by Trainer's own context parallelism.

    torchrun --nproc-per-node 2 benchmarks/studies/trainer_steps.py --seqlen 65536 --json trainer_2xh200.json

A Llama of random weights, FSDP2, bf16, checkpointed layers, one sequence a step. The two take turns, each with a new
model of the same weights; the first step of a turn is not timed. Where there is no GPU, a tiny model under DDP shows
that the script runs; Trainer's own context parallelism is then refused, which is recorded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments, set_seed

import ringflash.accelerate
from benchmarks.environment import describe

BACKENDS = ("ringflash", "torch")
MODEL = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768, "max_position_embeddings": 1 << 20,
}  # fmt: skip
TINY = {**MODEL, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 256}


class StepEnds(TrainerCallback):
    """Times at which the device has ended each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Append the time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def train(backend: str, seqlen: int, num_steps: int) -> dict[str, Any]:
    """Return seconds of the timed steps, losses and peak memory of this rank, or the error that Trainer raised."""
    on_gpus = torch.cuda.is_available()
    AcceleratorState._reset_state(reset_partial_state=True)
    draw = torch.Generator().manual_seed(1)
    vocabulary = (MODEL if on_gpus else TINY)["vocab_size"]
    rows = [torch.randint(0, vocabulary, (seqlen,), generator=draw).tolist() for _ in range(num_steps + 1)]
    ends = StepEnds()
    try:
        set_seed(0)  # the same weights on every rank and in every turn
        with torch.device("cuda" if on_gpus else "cpu"):
            model = AutoModelForCausalLM.from_config(
                LlamaConfig(**MODEL if on_gpus else TINY), attn_implementation="sdpa", dtype=torch.float32
            )
        arguments = TrainingArguments(
            "unused", parallelism_config=ParallelismConfig(cp_backend=backend, cp_size=dist.get_world_size()),
            bf16=on_gpus, use_cpu=not on_gpus, fsdp=on_gpus, gradient_checkpointing=True, max_steps=num_steps + 1,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} if on_gpus else None,
            per_device_train_batch_size=1, learning_rate=1e-5, logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ends])
        if on_gpus:
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = [after - before for before, after in zip(ends.times, ends.times[1:], strict=False)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpus else 0.0
    return {"seconds": seconds, "losses": losses, "allocated_gib": round(peak, 2)}


def summary(turns: list[dict[str, Any]], seqlen: int) -> dict[str, Any]:
    """Return tokens per second of each backend that ran, by its median step, and their ratio."""
    speeds = {
        backend: seqlen / median(s for turn in turns if turn["cp_backend"] == backend for s in turn["seconds"])
        for backend in BACKENDS
        if any(turn["cp_backend"] == backend and "seconds" in turn for turn in turns)
        and not any(turn["cp_backend"] == backend and "error" in turn for turn in turns)
    }
    ratio = speeds["ringflash"] / speeds["torch"] if len(speeds) == 2 else None
    return {"tokens_per_second": {name: round(x, 1) for name, x in speeds.items()}, "ringflash_over_torch": ratio}


def main() -> None:
    """Take turns, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--turns", type=int, default=2, help="turns of each backend")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    os.environ["ACCELERATE_USE_CPU"] = str(not on_gpus).lower()
    ringflash.accelerate.register()
    turns: list[dict[str, Any]] = []
    for _ in range(options.turns):
        for backend in BACKENDS:
            turns.append({"cp_backend": backend, **train(backend, options.seqlen, options.steps)})
            gc.collect()
            if on_gpus:
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(json.dumps(turns[-1]), flush=True)
                if options.json:
                    found = {
                        **describe("transformers", "accelerate"), "ranks": dist.get_world_size(),
                        "model": MODEL if on_gpus else TINY, "seqlen": options.seqlen,
                        **summary(turns, options.seqlen), "turns": turns,
                    }  # fmt: skip
                    options.json.write_text(json.dumps(found, indent=1) + "\n")
    if dist.get_rank() == 0:
        print(json.dumps(summary(turns, options.seqlen)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
