"""Loss curves of a small model on real text for several numbers of ranks per sequence: they must coincide.

    python -m benchmarks.studies.loss_curves [--sizes 1,2,4,8] [--again] [--steps 200] [--json results.json] [recipe flags]

Trains recipes/lightning/quickstart.yaml once per context_parallel_size. On CPUs the model is smaller and entirely in
fp64, so curves may differ only by the order of sums. On GPUs it is larger and in bf16-mixed, so curves may differ by
rounding. `--again` trains the first size twice, to show how much two equal runs differ, since kernels add dQ in any
order. Other flags go to the recipe: `--config recipes/lightning/fp8.yaml` trains in FP8 (GPUs only). Runs on
one host.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from lightning.pytorch import plugins
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.environment import ROOT, describe, result_text
from recipes.lightning.compare import newest_curve, read_losses

FLAGS = {
    "model.memory.checkpointing": "attention_kept", "trainer.num_sanity_val_steps": 0, "trainer.limit_val_batches": 0,
    "checkpoint.save_top_k": 0, "loggers": "[csv]", "progress.every_n_steps": 50,
}  # fmt: skip
SMALLER = {
    "data.seqlen": 768, "model.model.hidden_size": 64, "model.model.intermediate_size": 192,
    "model.model.num_hidden_layers": 2,
}  # fmt: skip
ON_GPUS = {  # heads of 128: the Hopper kernels
    "data.seqlen": 8192, "model.model.hidden_size": 512, "model.model.intermediate_size": 1536,
    "model.learning_rate": 3e-4,
}  # fmt: skip


class DoublePrecision(plugins.DoublePrecision):
    """Lightning's plugin, with norms in fp64 as well: transformers computes them in fp32 for any dtype of the model.

    An fp32 rounding that flips because of the order of a sum changes an activation by 1e-8; fp64 sums differ by 1e-16.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module, including the norms."""
        module = super().convert_module(module)
        norms = [part for part in module.modules() if isinstance(part, LlamaRMSNorm)]
        assert norms, "a model with LlamaRMSNorm"
        for norm in norms:
            norm.forward = functools.partial(_rms_norm, norm)
        return module


def _rms_norm(norm: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def main() -> None:
    """Train, print the largest difference between the curves, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2,4,8", help="ranks that share a sequence")
    parser.add_argument("--again", action="store_true", help="train the first size twice")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="file for the results")
    options, recipe_flags = parser.parse_known_args()
    sizes = {size: int(size) for size in options.sizes.split(",")}
    first = next(iter(sizes))
    if options.again:
        sizes[f"{first} again"] = sizes[first]
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: train(size, options.steps, recipe_flags, Path(folder, name)) for name, size in sizes.items()}
    apart = {name: largest_difference(curve, curves[first]) for name, curve in curves.items() if name != first}
    for name, difference in apart.items():
        print(f"cp={name} and cp={first}: {difference:.2e} of the loss at most, over {options.steps} steps")
    if options.json:
        precision = "bf16-mixed" if torch.cuda.is_available() else "fp64"
        head = {"environment": describe("lightning", "transformers"), "precision": precision, "apart": apart}
        options.json.write_text(result_text({**head, "losses": curves}))


def train(size: int, steps: int, recipe_flags: list[str], out: Path) -> list[float]:
    """Train with a number of ranks and return the loss of every step."""
    cuda = torch.cuda.is_available()
    flags = {**FLAGS, **(ON_GPUS if cuda else SMALLER), "output_dir": out}
    flags |= {"trainer.max_steps": steps, "model.decay_steps": steps}
    if not cuda:
        flags["trainer.plugins"] = "benchmarks.studies.loss_curves.DoublePrecision"
    command = ["launch/local.sh", "recipes/lightning/quickstart.yaml", *recipe_flags]
    command += [f"--{key}={value}" for key, value in flags.items()]
    environment = {**os.environ, "NPROC": str(size), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
    losses = read_losses(newest_curve(out))
    assert sorted(losses) == list(range(steps)), f"a loss for each of {steps} steps, got {len(losses)}"
    return [losses[step] for step in range(steps)]


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest difference in one step, relative to the loss."""
    return max(abs(x - y) / y for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
