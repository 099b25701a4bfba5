"""Training steps of torchtitan with ring attention beside its own context parallelism: seconds, tokens/s, memory.

    python benchmarks/bench_torchtitan.py --lengths 32768,131072 --json results.json

Starts torchtitan's own Trainer on all GPUs, once for each length and attention: "ring" is ringflash.torchtitan, "flex"
torchtitan's all-gather of keys before flex attention. The model is llama3 with the shapes of 8B, a few layers and a
small vocabulary; each sequence is one document of random tokens. FSDP2 shards over the ring, selective activation
checkpointing keeps attention in both, and nothing is compiled but flex attention, with the tuning that torchtitan asks
for, or with the options that it found at 32,768 tokens (--tuned: there it takes a minute and a half, and its time grows
with the square of the length). --parts adds what the time of one more step consists of. The results are saved after
every run.

torchtitan 0.3 trains with torch 2.14 only. With an older torch its backend "partial_dtensor" still runs, which the
plug-in refuses: the ring is then put in place by hand. The attention of both contenders is the same as with 2.14.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

OLD_TORCH = not hasattr(dist, "set_timeout")
if OLD_TORCH:  # names that torchtitan 0.3 imports or calls, and that "partial_dtensor" does not need
    dist.set_timeout = lambda *_: None  # type: ignore[attr-defined]
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        torch.distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # noqa: E402
from torchtitan.models.common import attention as titan_attention  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry, parallelize  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from benchmarks import device_time  # noqa: E402
from benchmarks.environment import describe, result_text  # noqa: E402

ABOUT = (
    "Steps of torchtitan's Trainer, {flavor} with {layers} layers and a vocabulary of 16,384, one document a sequence. "
    "seconds: wall-clock time from the loss of one step to that of the next, on the first rank; tokens_per_s of all "
    "GPUs together, by the median; memory_gib: peak of torch's allocator on the first rank. "
    "losses and gradient_norms are those of every step, from the first."
)
ATTENTIONS = ("ring", "flex")
WARM_UP = 3
# What torchtitan's tuning of flex attention chose on an H100 at 32,768 tokens, for these heads.
TUNED = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 3, "fwd_num_warps": 4,
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32,
    "bwd_num_stages": 3, "bwd_num_warps": 4,
}  # fmt: skip
VOCAB = 16384  # a few layers have their share of a head of this size


class NoTokenizer(BaseTokenizer):
    """Tokens are drawn at random."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Without fields."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """Return nothing."""
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        """Return nothing."""
        return ""

    def get_vocab_size(self) -> int:
        """Return no size: the model has its own."""
        return 0


class RandomTokens(BaseDataLoader):
    """Sequences of one document, the same for all ranks of a ring."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Without fields."""

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, **_: Any) -> None:
        self.generator = torch.Generator().manual_seed(dp_rank)
        self.seqlen = seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            ids = torch.randint(VOCAB, (1, self.seqlen + 1), generator=self.generator)
            yield {"input": ids[:, :-1], "positions": torch.arange(self.seqlen)[None]}, ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: runs are not resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def configure(
    attention: str, seqlen: int, layers: int, steps: int, flavor: str, tuned: int, parts: int
) -> Trainer.Config:
    """Return torchtitan's configuration of one run."""
    config = getattr(config_registry, flavor)()
    model = config.model_spec.model
    del model.layers[layers:]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCAB
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCAB)  # with torch 2.11 the chunked loss ends in a crash
    config.tokenizer, config.dataloader = NoTokenizer.Config(), RandomTokens.Config()
    training = config.training
    training.seq_len, training.local_batch_size, training.global_batch_size = seqlen, 1, -1
    training.steps, training.disable_cuda_graphs = WARM_UP + steps + parts, True
    config.metrics.log_freq, config.metrics.enable_tensorboard = 1, False
    config.profiler.enable_profiling = config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint, config.debug.seed = SelectiveAC.Config(), 0
    config.parallelism = ParallelismConfig(
        context_parallel_degree=int(os.environ["WORLD_SIZE"]),
        spmd_backend="partial_dtensor" if OLD_TORCH else "spmd_types",
    )
    if tuned:
        options = {**FlexAttention.inductor_configs, "max_autotune": False}
        FlexAttention._compiled_flex_attn = torch.compile(titan_attention.flex_attention, options=options)
        for _, flex, _, _ in model.traverse(FlexAttention.Config):
            flex.kernel_options = dict(TUNED)
    if attention == "ring":
        names = ("ring_attention", "keep_attention")
        config.override = OverrideConfig(imports=[f"ringflash.torchtitan.{name}" for name in names])
    return config


def use_old_torch(attention: str) -> None:
    """Call what an older torch has, and for the ring put it in place."""
    create = titan_attention._compiled_create_block_mask
    titan_attention._compiled_create_block_mask = lambda *args, separate_full_blocks, **kwargs: create(*args, **kwargs)
    if attention == "ring":
        put_the_ring_in_place()


def put_the_ring_in_place() -> None:
    """Give the attention of llama3 its ring under "partial_dtensor", which does not parallelize it."""
    import ringflash.torchtitan  # noqa: F401  # its check of the configuration is replaced next

    def take_group(modules: Any, mesh: Any) -> None:
        for module in modules:
            module.group, module._parallelized = mesh.get_group(), True

    Trainer.Config._validate_cuda_graphs = lambda _: None
    parallelize.apply_cp_to_forward = take_group


def measure(out: Path, attention: str, **arguments: Any) -> None:
    """Train on this rank; the first one writes what its steps took."""
    if OLD_TORCH:
        use_old_torch(attention)
    trainer = configure(attention, **arguments).build()
    ends, losses, norms, log = [], [], [], trainer.metrics_processor.log

    def logged(step: int, loss: float, largest: float, norm: float, **more: Any) -> None:
        ends.append(time.perf_counter())  # the loss is on the host: the step has ended on the device
        losses.append(loss)
        norms.append(norm)
        log(step, loss, largest, norm, **more)

    trainer.metrics_processor.log = logged
    last = profile_last_step(trainer) if arguments["parts"] else {}
    trainer.train()
    if dist.get_rank() == 0:
        timed = ends[WARM_UP - 1 : WARM_UP + arguments["steps"]]
        seconds = [end - begin for begin, end in itertools.pairwise(timed)]
        found = {
            "seqlen": arguments["seqlen"],
            "attention": attention,
            "seconds": [round(x, 5) for x in seconds],
            "tokens_per_s": round(arguments["seqlen"] / statistics.median(seconds)),
            "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else None,
            "losses": losses,
            "gradient_norms": norms,
            **last,
        }
        out.write_text(json.dumps(found))
    trainer.close()
    dist.destroy_process_group()


def profile_last_step(trainer: Trainer) -> dict[str, Any]:
    """Let a trainer profile its last step, and return where it will put the parts of the step, in seconds."""
    found: dict[str, Any] = {}
    train_step = trainer.train_step

    def step(batches: Any) -> None:
        if trainer.step < trainer.config.training.steps:
            train_step(batches)
            return
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            begin = time.perf_counter()
            train_step(batches)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            trace.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text())["traceEvents"]
        parts = device_time.parts_of_step(device_time.step_spans(events), seconds)
        found["parts"] = {kind: round(x, 4) for kind, x in parts.items()}
        found["longest"] = device_time.longest_kernels(events, 16)

    trainer.train_step = step
    return found


def main() -> None:
    """Start a run for each length and attention, and save what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,131072", help="tokens of a sequence")
    parser.add_argument("--attentions", default=",".join(ATTENTIONS), help="ring, flex")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help=f"after {WARM_UP} that compile and allocate")
    parser.add_argument("--tuned", type=int, default=0, help="1: flex attention by the options in this file")
    parser.add_argument("--parts", type=int, default=0, help="1: profile one more step")
    parser.add_argument("--flavor", default="llama3_8b", help="function of torchtitan.models.llama3.config_registry")
    parser.add_argument("--nproc", type=int, default=None, help="GPUs; default all")
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)  # of a rank that this script has started
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in ("layers", "steps", "flavor", "tuned", "parts")}
    if options.only:
        attention, seqlen = options.only.split(":")
        measure(options.json, attention, seqlen=int(seqlen), **shape)
        return
    results: dict[str, Any] = {"about": ABOUT.format(**shape), **describe("torchtitan"), "rows": []}
    for seqlen in options.lengths.split(","):
        for attention in options.attentions.split(","):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder, "result.json")
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
                command += [str(options.nproc or torch.cuda.device_count()), __file__, "--json", str(out)]
                command += ["--only", f"{attention}:{seqlen}", *(f"--{name}={value}" for name, value in shape.items())]
                subprocess.run(command, check=True)
                results["rows"].append(row := json.loads(out.read_text()))
            options.json.write_text(result_text(results))
            print(f"{attention} at {seqlen}: {row['tokens_per_s']} tokens/s, {row['memory_gib']} GiB", flush=True)


if __name__ == "__main__":
    main()
