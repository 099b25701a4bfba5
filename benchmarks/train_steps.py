"""Whole training steps of a recipe at several lengths: seconds, MFU, memory, and where the time of a step goes.

    torchrun --nproc-per-node 4 benchmarks/train_steps.py --lengths 131072x3,524288x2 --warm_up 16384 \\
      --config recipes/lightning/qwen3_8b_pretrain.yaml --config recipes/lightning/1m_cp8_8gpus.yaml \\
      --trainer.strategy.init_args.context_parallel_size 4 --json results.json

Flags that are not named below are the recipe's. Its model, memory, strategy and optimizer are built once; two steps at
the warm-up's length compile and allocate. Of each length the last step is also traced, on the first GPU and without
the host's operators; the steps before it say what tracing costs. `--document_tokens` packs each sequence with
documents of so many tokens; without it a sequence is one. `--waits` adds a step whose rings are measured, which
then do not work side by side. The results are written anew after every step. On CPUs nothing is traced.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import lightning
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

import ringflash  # noqa: E402
from benchmarks.device_time import longest_kernels, parts_of_step, step_spans  # noqa: E402
from benchmarks.environment import describe  # noqa: E402
from recipes.lightning.train import main as train  # noqa: E402
from ringflash import huggingface  # noqa: E402
from ringflash.comm.transport import buffers  # noqa: E402
from ringflash.commands.plan.command import make_plan, visible_fraction  # noqa: E402
from ringflash.commands.plan.job import Job, Precision  # noqa: E402
from ringflash.commands.plan.machine import GIB, GPUS, Machine  # noqa: E402
from ringflash.commands.plan.read import model_of  # noqa: E402
from ringflash.flops import peak_tflops  # noqa: E402
from ringflash.lightning import CausalLM, ExposedCommunication  # noqa: E402
from ringflash.lightning.sequences import Batch, Loader, SequenceData  # noqa: E402
from ringflash.lightning.strategy import strategy_of  # noqa: E402
from ringflash.lightning.text import text_files  # noqa: E402
from ringflash.memory import Memory  # noqa: E402

ABOUT = (
    "Steps of {parameters:.2f} B parameters, memory {memory}. Byte tokens of Python's own sources; every token sees "
    "all before it in its document, which is {document}. seconds are of the slowest rank, by the clock, from the end "
    "of one step on the device to the end of the next, reading the batch included. allocated_gib and reserved_gib are "
    "the peaks of torch's allocator, areas_gib the symmetric memory beside it, device_gib what the driver counts in "
    "use after the step; of the rank with most. parts are of the first rank's device: of every instant the first of "
    "attention, linear, optimizer, other, host copies and communication that runs, so that communication is what "
    "nothing hides."
)
KERNELS = 24  # with the most time, to be named in the results


class Step(NamedTuple):
    """A step to train: a sequence of so many tokens for each data rank."""

    seqlen: int
    kind: Literal["warm_up", "timed", "waits"]
    traced: bool = False


def schedule(lengths: str, warm_up: int, waits: bool) -> list[Step]:
    """The steps of a command line: "131072x3,524288" is three of 131,072 tokens and one of 524,288.

    Raises:
        ValueError: lengths of another form.
    """
    steps = [Step(warm_up, "warm_up"), Step(warm_up, "warm_up", traced=True)]  # the first trace loads its libraries
    for text in lengths.split(","):
        seqlen, _, count = text.partition("x")
        if not seqlen.isdigit() or not (count or "1").isdigit() or count == "0":
            raise ValueError(f"lengths must be TOKENS or TOKENSxSTEPS with commas, got {text!r}; write 131072x3.")
        number = int(count or 1)
        steps += [Step(int(seqlen), "timed", traced=step == number - 1) for step in range(number)]
        steps += [Step(int(seqlen), "waits")] * waits
    return steps


class Documents(SequenceData):
    """Sequences of the lengths given, in this order, of the bytes of Python's own sources.

    Args:
        lengths: tokens of the sequence of each step.
        document_tokens: of every document in a sequence but the last, which may be shorter; 0 is one document.
    """

    def __init__(self, lengths: list[int], document_tokens: int = 0) -> None:
        super().__init__(lengths[0], num_eval_sequences=1, seed=0)
        self.lengths, self.document_tokens = lengths, document_tokens

    def setup(self, stage: str) -> None:
        """Read the sources; the text begins again where it ends."""
        self.text = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for _, path in text_files())), dtype=torch.uint8
        )

    def train_dataloader(self) -> Loader:
        """A sequence for each step, others for each data rank."""
        strategy = strategy_of(self.trainer)
        firsts = itertools.accumulate(self.lengths, initial=0)
        places = [
            (strategy.dp_size * first + strategy.dp_rank * length, length)
            for first, length in zip(firsts, self.lengths, strict=False)
        ]
        return torch.utils.data.DataLoader(_Cut(self.text), batch_size=None, sampler=places)

    def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> Batch:
        """This rank's shard; `seqlen`, which the progress line reads, is the length of this step."""
        self.seqlen = batch.shape[1]
        bounds = torch.tensor(document_bounds(self.seqlen, self.document_tokens), dtype=torch.int32)
        packed = {"cu_seqlens": bounds.to(batch.device)} if self.document_tokens else {}
        return huggingface.prepare_batch(batch, group=strategy_of(self.trainer).cp_group, **packed)


def document_bounds(seqlen: int, document_tokens: int) -> list[int]:
    """Of the documents in a sequence, from 0 to its length."""
    return [*range(0, seqlen, document_tokens or seqlen), seqlen]


class _Cut(torch.utils.data.Dataset[torch.Tensor]):
    """Tokens from a place in a text on: (1, length), int64."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __getitem__(self, place: tuple[int, int]) -> torch.Tensor:
        first, length = place
        return self.text[torch.arange(first, first + length) % len(self.text)].long()[None]


class StepTimes(lightning.Callback):
    """Measures every step and writes what it found.

    Args:
        steps: what each step is.
        path: file for the results; None prints alone.
        document_tokens: as `Documents`.
    """

    def __init__(self, steps: list[Step], path: Path | None, document_tokens: int = 0) -> None:
        self.steps, self.path, self.document_tokens = steps, path, document_tokens
        self.results: dict[str, Any] = {}
        self.waits = ExposedCommunication(every_n_steps=1)
        self._tracing = ExitStack()
        self._trace: profile | None = None

    def setup(self, trainer: lightning.Trainer, pl_module: CausalLM, stage: str) -> None:
        """The ranks have met, and there is no model yet, nor Liger in its family."""
        self._planned = self._plans(trainer, pl_module)
        self._clock = time.perf_counter()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: CausalLM) -> None:
        """The model is there: say what it is."""
        self._synchronize()
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        memory = asdict(pl_module.memory)
        self.results = {
            **describe("lightning", "transformers", "liger-kernel"),
            "about": ABOUT.format(
                parameters=parameters / 1e9,
                memory=memory,
                document=f"of {self.document_tokens} tokens" if self.document_tokens else "the whole sequence",
            ),
            "document_tokens": self.document_tokens,
            "ranks": dist.get_world_size(),
            "model": pl_module.config,
            "memory": memory,
            "precision": trainer.precision,
            "built_seconds": round(time.perf_counter() - self._clock, 2),
            "steps": [],
            "plans": self._planned,
        }
        self._begin(trainer)

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: CausalLM, *_: Any) -> None:
        """Measure the rings where that is asked."""
        if self.steps[trainer.global_step].kind == "waits":
            self.waits.on_train_batch_start(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Mark in a trace where the backward ends: a kernel of no work."""
        if self._trace is not None:
            torch.cuda._sleep(1)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: CausalLM, *_: Any) -> None:
        """Measure the step, write the results, and begin the next."""
        self._synchronize()
        seconds, step = time.perf_counter() - self._clock, self.steps[trainer.global_step - 1]
        found = self._measured(trainer, pl_module, step, seconds)
        if step.kind == "waits":
            self.waits.on_train_batch_end(trainer, pl_module)
            found["exposed_communication_ms"] = self.waits.milliseconds
        if self._trace is not None:
            found |= self._traced(found["seconds"])
        self.results["steps"].append(found)
        if trainer.is_global_zero:
            print(line(found), flush=True)
            if self.path is not None:
                self.path.write_text(json.dumps(self.results, indent=1) + "\n")
        if trainer.global_step < len(self.steps):
            self._begin(trainer)

    def on_exception(self, trainer: lightning.Trainer, pl_module: CausalLM, exception: BaseException) -> None:
        """Stop measuring."""
        self.waits.on_exception(trainer, pl_module, exception)
        self._tracing.close()

    def _begin(self, trainer: lightning.Trainer) -> None:
        """The clock of the next step, and its trace where one is asked for."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            if self.steps[trainer.global_step].traced and trainer.is_global_zero:
                self._trace = self._tracing.enter_context(profile(activities=[ProfilerActivity.CUDA]))
        trainer.strategy.barrier()  # to read a trace and to begin one takes the first rank some seconds
        self._clock = time.perf_counter()

    def _traced(self, seconds: float) -> dict[str, Any]:
        """Parts of the step, and its longest kernels; ends the trace."""
        assert self._trace is not None
        trace, self._trace = self._trace, None
        self._tracing.close()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            trace.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return {"parts": parts_of_step(step_spans(events), seconds), "kernels": longest_kernels(events, KERNELS)}

    def _measured(self, trainer: lightning.Trainer, module: CausalLM, step: Step, seconds: float) -> dict[str, Any]:
        """Time and memory of the rank with most of it, and what is equal on all."""
        strategy = strategy_of(trainer)
        most = {"seconds": seconds, **_memory(strategy.root_device)}
        values = torch.tensor(list(most.values()), dtype=torch.float64, device=strategy.root_device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        most = dict(zip(most, (round(value, 4) for value in values.tolist()), strict=True))
        loss, norm = (trainer.callback_metrics[name].item() for name in ("loss", "grad_norm"))
        speed: dict[str, float | None] = {
            "tokens_per_second_per_gpu": step.seqlen / strategy.cp_size / most["seconds"],
        }
        if module.flops_of is not None:
            bounds = document_bounds(step.seqlen, self.document_tokens)
            flops = module.flops_of(bounds) / strategy.cp_size / most["seconds"]
            peak = peak_tflops(_name(strategy.root_device))
            speed |= {"tflops_per_gpu": flops / 1e12, "mfu_percent": peak and flops / peak / 1e10}
        return {"kind": step.kind, "seqlen": step.seqlen, **most, "loss": loss, "grad_norm": norm, **speed}

    def _plans(self, trainer: lightning.Trainer, module: CausalLM) -> dict[str, Any]:
        """`plans` of what is trained; none for a family that no plan counts."""
        strategy = strategy_of(trainer)
        try:
            return plans(
                sorted({step.seqlen for step in self.steps}), _name(strategy.root_device), module.config,
                cp_size=strategy.cp_size, dp_size=strategy.dp_size, precision=trainer.precision, memory=module.memory,
                accumulates=trainer.accumulate_grad_batches > 1, document_tokens=self.document_tokens,
            )  # fmt: skip
        except NotImplementedError:
            return {}

    @staticmethod
    def _synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def plans(
    lengths: list[int], device: str, config: dict[str, Any], *, memory: Memory, document_tokens: int = 0, **job: Any
) -> dict[str, Any]:
    """What `ringflash plan` says of each length; nothing on a device or in a precision that it does not know.

    It counts Liger's kernels where it knows what they keep.

    Args:
        config: of the model.  job: of `ringflash.commands.plan.job.Job`, beside the model, the length and the memory.
    """
    gpu = next((gpu for name, gpu in GPUS.items() if name in device), None)
    if gpu is None or job["precision"] not in get_args(Precision):
        return {}
    machine = Machine(gpu, job["cp_size"] * job["dp_size"])
    model, windows = model_of(config)
    kept = asdict(memory)
    installed = find_spec("liger_kernel") is not None
    kept["liger"] = model.liger is not None and (installed if memory.liger == "auto" else memory.liger)
    visible = {
        seqlen: visible_fraction(seqlen, windows, document_bounds(seqlen, document_tokens)) for seqlen in lengths
    }
    made = {
        str(seqlen): make_plan(Job(model, seqlen, visible_fraction=visible[seqlen], **job, **kept), machine)
        for seqlen in lengths
    }
    wanted = ("step_seconds", "memory_bytes", "memory_at", "mfu")
    return {seqlen: {name: plan[name] for name in wanted} for seqlen, plan in made.items()}


def line(step: dict[str, Any]) -> str:
    """A step, and its parts where it was traced, to be read at once."""
    parts = "  ".join(f"{name} {seconds:.2f}" for name, seconds in step.get("parts", {}).items())
    mfu = step.get("mfu_percent")
    return (
        f"{step['kind']:>8} {step['seqlen']:>9,} tokens {step['seconds']:9.2f} s  loss {step['loss']:.4f}  "
        f"grad_norm {step['grad_norm']:.4f}  {step['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU  "
        f"MFU {'unknown' if mfu is None else f'{mfu:.1f}%'}  {step['device_gib']:.1f} GiB  {parts}"
    )


def _memory(device: torch.device) -> dict[str, float]:
    """GiB since the step began; zeros on a CPU but for the areas."""
    areas = (ringflash.buffer_bytes() - buffers.buffer_bytes()) / GIB
    if device.type != "cuda":
        return {"allocated_gib": 0.0, "reserved_gib": 0.0, "areas_gib": areas, "device_gib": 0.0}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        "areas_gib": areas,
        "device_gib": (total - free) / GIB,
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main(args: list[str] | None = None) -> None:
    """Train the steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--lengths", required=True, help="TOKENSxSTEPS of each length, with commas")
    parser.add_argument("--warm_up", type=int, required=True, help="tokens of the two steps before")
    parser.add_argument("--document_tokens", type=int, default=0, help="of the documents of a sequence; 0 is one")
    parser.add_argument("--waits", action="store_true", help="a step of each length more, whose rings are measured")
    parser.add_argument("--json", type=Path, help="file for the results")
    options, recipe = parser.parse_known_args(args)
    if options.document_tokens < 0:
        parser.error(f"--document_tokens must be 0 or more, got {options.document_tokens}; 0 is one document.")
    steps = schedule(options.lengths, options.warm_up, options.waits)
    fixed = {
        "data": "benchmarks.train_steps.Documents", "data.lengths": [step.seqlen for step in steps],
        "data.document_tokens": options.document_tokens,
        "trainer.max_steps": len(steps), "trainer.limit_val_batches": 0, "trainer.accumulate_grad_batches": 1,
        "trainer.num_sanity_val_steps": 0, "checkpoint.save_top_k": 0, "progress.every_n_steps": len(steps) + 1,
    }  # fmt: skip
    # Lightning warns of arguments given to it where the command line has some too: here it has the same ones.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    train(
        ["fit", *recipe, *(f"--{key}={value}" for key, value in fixed.items())],
        [StepTimes(steps, options.json, options.document_tokens)],
    )


if __name__ == "__main__":
    main()
