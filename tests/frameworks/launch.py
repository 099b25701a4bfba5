"""Workers of this tier, under torchrun in the environment of a trainer, with recipes/trainers importable."""

from __future__ import annotations

import os
import sys

from tests.recipes.launching import ROOT, run


def torchrun(worker: str, num_ranks: int, **environment: str) -> str:
    """Run a worker of this folder on CPU processes, and return what it prints."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "recipes" / "trainers")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return run([*command, ROOT / "tests/frameworks" / worker], PYTHONPATH=path, **offline, **environment)
