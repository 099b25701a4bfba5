"""Training steps of a recipe at several lengths: seconds, MFU, memory, and a breakdown of the time.

    torchrun --nproc-per-node 4 benchmarks/train_steps.py --lengths 131072x3,524288x2 --warm_up 16384 \\
      --config recipes/lightning/qwen3_8b_pretrain.yaml --config recipes/lightning/1m_cp8_8gpus.yaml \\
      --trainer.strategy.init_args.context_parallel_size 4 --json results.json

Other flags than those below are passed to the recipe. Its model, memory, strategy and optimizer are built once; two
steps at the warm-up length compile and allocate. The last step of each length is also traced, on the first GPU and
without the host's operators; compare it with the earlier steps for the overhead of tracing. `--document_tokens` packs
each sequence with documents of this length; by default, a sequence is one document. `--waits` adds a step in which
waits of the ring are measured, which prevents overlap. `--attention hopper,hopper_fp8_all` takes each step once with
each kernel, in turns. The results are saved after every step. On CPUs nothing is traced.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
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
from benchmarks.environment import describe, result_text  # noqa: E402
from recipes.lightning.exposed_communication import ExposedCommunication  # noqa: E402
from recipes.lightning.text import text_files  # noqa: E402
from recipes.lightning.train import main as train  # noqa: E402
from ringflash import huggingface  # noqa: E402
from ringflash.comm.transport import buffers  # noqa: E402
from ringflash.commands.plan.command import make_plan, visible_fraction  # noqa: E402
from ringflash.commands.plan.job import GIB, GPUS, Machine, Precision, TrainingJob  # noqa: E402
from ringflash.commands.plan.model_shape import model_of  # noqa: E402
from ringflash.huggingface.flops import peak_tflops  # noqa: E402
from ringflash.lightning import CausalLM  # noqa: E402
from ringflash.lightning.data import Batch, Loader, SequenceData  # noqa: E402
from ringflash.lightning.strategy import strategy_of  # noqa: E402
from ringflash.memory import Memory  # noqa: E402

ABOUT = (
    "Steps of {parameters:.2f} B parameters, memory {memory}. Byte tokens of Python's own sources; attention is causal "
    "in each document, which is {document}. seconds: wall-clock time of the slowest rank, from the end of one step on "
    "the device to the end of the next, including reading the batch. allocated_gib and reserved_gib: peaks of torch's "
    "allocator; areas_gib: symmetric memory in addition; device_gib: memory in use by the driver's count after the "
    "step; each of the rank with most. parts: time of the first rank's device; every instant counts for the first of "
    "attention, linear, optimizer, other, host copies and communication that runs, so communication is only exposed "
    "time."
)
NUM_KERNELS = 24  # number of longest kernels to list in the results


class Step(NamedTuple):
    """A training step, with one sequence of `seqlen` tokens per data rank; `attention` "" is the recipe's."""

    seqlen: int
    kind: Literal["warm_up", "timed", "waits"]
    traced: bool = False
    attention: str = ""


def schedule(lengths: str, warm_up: int, waits: bool, attention: Sequence[str] = ("",)) -> list[Step]:
    """Parse the lengths of the steps: "131072x3,524288" is three steps of 131,072 tokens and one of 524,288.

    Args:
        attention: kernels to take each step with.

    Raises:
        ValueError: the lengths have another form.
    """
    steps = [Step(warm_up, "warm_up", attention=kernel) for kernel in attention]
    steps += [steps[-1]._replace(traced=True)]  # the first trace loads its libraries
    for text in lengths.split(","):
        seqlen, _, count = text.partition("x")
        if not seqlen.isdigit() or not (count or "1").isdigit() or count == "0":
            raise ValueError(f"lengths must be TOKENS or TOKENSxSTEPS with commas, got {text!r}; write 131072x3.")
        number = int(count or 1)
        steps += [
            Step(int(seqlen), "timed", step == number - 1, kernel) for step in range(number) for kernel in attention
        ]
        steps += [Step(int(seqlen), "waits", attention=kernel) for kernel in attention] * waits
    return steps


class Documents(SequenceData):
    """Sequences of the given lengths, in order, made of the bytes of Python's own sources.

    Args:
        lengths: length of the sequence of each step, in tokens.
        document_tokens: length of the documents in a sequence (the last one may be shorter); 0 is one document.
    """

    def __init__(self, lengths: list[int], document_tokens: int = 0) -> None:
        super().__init__(lengths[0], num_eval_sequences=1, seed=0)
        self.lengths, self.document_tokens = lengths, document_tokens

    def setup(self, stage: str) -> None:
        """Read the sources; the text is repeated if it is too short."""
        self.text = torch.frombuffer(
            bytearray(b"".join(path.read_bytes() for _, path in text_files())), dtype=torch.uint8
        )

    def train_dataloader(self) -> Loader:
        """Return a loader with one sequence per step, different on each data rank."""
        strategy = strategy_of(self.trainer)
        firsts = itertools.accumulate(self.lengths, initial=0)
        places = [
            (strategy.dp_size * first + strategy.dp_rank * length, length)
            for first, length in zip(firsts, self.lengths, strict=False)
        ]
        return torch.utils.data.DataLoader(_Cut(self.text), batch_size=None, sampler=places)

    def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> Batch:
        """Shard the batch; set `seqlen`, which the progress line reads, to the length of this step."""
        self.seqlen = batch.shape[1]
        bounds = torch.tensor(document_bounds(self.seqlen, self.document_tokens), dtype=torch.int32)
        packed = {"cu_seqlens": bounds.to(batch.device)} if self.document_tokens else {}
        return huggingface.prepare_batch(batch, group=strategy_of(self.trainer).cp_group, **packed)


def document_bounds(seqlen: int, document_tokens: int) -> list[int]:
    """Return the bounds of the documents in a sequence, from 0 to its length."""
    return [*range(0, seqlen, document_tokens or seqlen), seqlen]


class _Cut(torch.utils.data.Dataset[torch.Tensor]):
    """Dataset of tokens cut from a text: (1, length), int64."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __getitem__(self, place: tuple[int, int]) -> torch.Tensor:
        first, length = place
        return self.text[torch.arange(first, first + length) % len(self.text)].long()[None]


class StepTimes(lightning.Callback):
    """Callback that measures every step and saves the results.

    Args:
        steps: the planned steps, in order.
        path: file for the results; None only prints them.
        document_tokens: see `Documents`.
    """

    def __init__(self, steps: list[Step], path: Path | None, document_tokens: int = 0) -> None:
        self.steps, self.path, self.document_tokens = steps, path, document_tokens
        self.results: dict[str, Any] = {}
        self.waits = ExposedCommunication(every_n_steps=1)
        self._tracing = ExitStack()
        self._trace: profile | None = None

    def setup(self, trainer: lightning.Trainer, pl_module: CausalLM, stage: str) -> None:
        """Make the plans: the process group exists, but not the model, so Liger has not patched its classes yet."""
        self._planned = self._plans(trainer, pl_module)
        self._clock = time.perf_counter()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: CausalLM) -> None:
        """Describe the model, which now exists."""
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
        """Switch to the step's attention; start to measure the waits of the rings, if requested."""
        self._attend_by(self.steps[trainer.global_step].attention, trainer, pl_module)
        if self.steps[trainer.global_step].kind == "waits":
            self.waits.on_train_batch_start(trainer, pl_module)

    @staticmethod
    def _attend_by(kernel: str, trainer: lightning.Trainer, module: CausalLM) -> None:
        if kernel:
            assert module.model is not None
            strategy = strategy_of(trainer)
            huggingface.set_group(module.model.model, strategy.cp_group, layout=strategy.layout, impl=kernel)

    def on_before_optimizer_step(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Mark the end of the backward in a trace with an empty kernel."""
        if self._trace is not None:
            torch.cuda._sleep(1)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: CausalLM, *_: Any) -> None:
        """Measure the step, save the results, and begin the next step."""
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
                self.path.write_text(result_text(self.results))
        if trainer.global_step < len(self.steps):
            self._begin(trainer)

    def on_exception(self, trainer: lightning.Trainer, pl_module: CausalLM, exception: BaseException) -> None:
        """Stop measuring."""
        self.waits.on_exception(trainer, pl_module, exception)
        self._tracing.close()

    def _begin(self, trainer: lightning.Trainer) -> None:
        """Start the clock of the next step, and its trace if requested."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            if self.steps[trainer.global_step].traced and trainer.is_global_zero:
                self._trace = self._tracing.enter_context(profile(activities=[ProfilerActivity.CUDA]))
        trainer.strategy.barrier()  # the first rank needs several seconds to read a trace and to begin one
        self._clock = time.perf_counter()

    def _traced(self, seconds: float) -> dict[str, Any]:
        """End the trace and return the parts of the step and its longest kernels."""
        assert self._trace is not None
        trace, self._trace = self._trace, None
        self._tracing.close()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            trace.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return {"parts": parts_of_step(step_spans(events), seconds), "kernels": longest_kernels(events, NUM_KERNELS)}

    def _measured(self, trainer: lightning.Trainer, module: CausalLM, step: Step, seconds: float) -> dict[str, Any]:
        """Return the largest time and memory of any rank, and the values that are equal on all ranks."""
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
        kernel = {"attention": step.attention} if step.attention else {}
        return {"kind": step.kind, "seqlen": step.seqlen, **kernel, **most, "loss": loss, "grad_norm": norm, **speed}

    def _plans(self, trainer: lightning.Trainer, module: CausalLM) -> dict[str, Any]:
        """Return `plans` for the training; empty for a family that cannot be planned."""
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
    """Return the plan of `ringflash plan` for each length; empty on devices or in precisions that it does not know.

    Liger's kernels are counted if the plan supports them for the model.

    Args:
        config: configuration of the model.
        job: arguments of `ringflash.commands.plan.job.TrainingJob` other than model, seqlen and memory.
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
        str(seqlen): make_plan(
            TrainingJob(model=model, seqlen=seqlen, visible_fraction=visible[seqlen], **job, **kept), machine
        )
        for seqlen in lengths
    }
    wanted = ("step_seconds", "memory_bytes", "memory_at", "mfu")
    return {seqlen: {name: plan[name] for name in wanted} for seqlen, plan in made.items()}


def line(step: dict[str, Any]) -> str:
    """Return the text of a step, with its parts if it was traced."""
    parts = "  ".join(f"{name} {seconds:.2f}" for name, seconds in step.get("parts", {}).items())
    mfu, kernel = step.get("mfu_percent"), f" {step['attention']}" if "attention" in step else ""
    return (
        f"{step['kind']:>8} {step['seqlen']:>9,} tokens{kernel} {step['seconds']:9.2f} s  loss {step['loss']:.4f}  "
        f"grad_norm {step['grad_norm']:.4f}  {step['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU  "
        f"MFU {'unknown' if mfu is None else f'{mfu:.1f}%'}  {step['device_gib']:.1f} GiB  {parts}"
    )


def _memory(device: torch.device) -> dict[str, float]:
    """Return peak memory in GiB since the step began; on a CPU only the transport areas are not 0."""
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
    parser.add_argument("--attention", default="", help="kernels to take each step with, with commas")
    parser.add_argument("--json", type=Path, help="file for the results")
    options, recipe = parser.parse_known_args(args)
    if options.document_tokens < 0:
        parser.error(f"--document_tokens must be 0 or more, got {options.document_tokens}; 0 is one document.")
    steps = schedule(options.lengths, options.warm_up, options.waits, options.attention.split(","))
    fixed = {
        "data": "benchmarks.train_steps.Documents", "data.lengths": [step.seqlen for step in steps],
        "data.document_tokens": options.document_tokens,
        "trainer.max_steps": len(steps), "trainer.limit_val_batches": 0, "trainer.accumulate_grad_batches": 1,
        "trainer.num_sanity_val_steps": 0, "checkpoint.save_top_k": 0, "progress.every_n_steps": len(steps) + 1,
    }  # fmt: skip
    # Lightning warns if arguments are passed in code and on the command line; here both are the same.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    train(
        ["fit", *recipe, *(f"--{key}={value}" for key, value in fixed.items())],
        [StepTimes(steps, options.json, options.document_tokens)],
    )


if __name__ == "__main__":
    main()
