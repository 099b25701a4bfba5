"""Do the loss curves of a small model on real text lie on one another, whatever the number of ranks of a sequence?

    python -m benchmarks.loss_curves [--sizes 1,2,4,8] [--steps 200] [--json results.json]

Trains recipes/lightning/quickstart.yaml, smaller, once for each context_parallel_size: on CPUs in fp64, where curves
may differ only by the order of sums; on GPUs in bf16-mixed, where they may by rounding. One host.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.environment import ROOT, describe
from recipes.lightning.compare import newest_curve, read_losses

SMALLER = {
    "data.seqlen": 768, "model.model.hidden_size": 64, "model.model.intermediate_size": 192,
    "model.model.num_hidden_layers": 2, "model.memory.checkpointing": "attention_kept",
    "trainer.num_sanity_val_steps": 0, "trainer.limit_val_batches": 0, "checkpoint.save_top_k": 0,
    "loggers": "[csv]", "progress.every_n_steps": 50,
}  # fmt: skip


def main() -> None:
    """Train, print how far the curves lie apart, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,2,4,8", help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        curves = {size: train(size, options.steps, Path(folder, f"cp{size}")) for size in sizes}
    apart = {size: largest_difference(curves[size], curves[sizes[0]]) for size in sizes[1:]}
    for size, difference in apart.items():
        print(f"cp={size} and cp={sizes[0]}: {difference:.2e} of the loss at most, over {options.steps} steps")
    if options.json:
        precision = "bf16-mixed" if torch.cuda.is_available() else "fp64"
        head = {"environment": describe("lightning", "transformers"), "precision": precision, "apart": apart}
        options.json.write_text(json.dumps({**head, "losses": curves}) + "\n")


def train(size: int, steps: int, out: Path) -> list[float]:
    """Loss of every step with so many ranks."""
    flags = {**SMALLER, "output_dir": out, "trainer.max_steps": steps, "model.decay_steps": steps}
    if not torch.cuda.is_available():
        flags["trainer.plugins"] = "lightning.pytorch.plugins.DoublePrecision"
    command = ["launch/local.sh", "recipes/lightning/quickstart.yaml", *(f"--{k}={v}" for k, v in flags.items())]
    environment = {**os.environ, "NPROC": str(size), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
    losses = read_losses(newest_curve(out))
    assert sorted(losses) == list(range(steps)), f"a loss for each of {steps} steps, got {len(losses)}"
    return [losses[step] for step in range(steps)]


def largest_difference(a: list[float], b: list[float]) -> float:
    """Relative to the loss, of one step."""
    return max(abs(x - y) / y for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
