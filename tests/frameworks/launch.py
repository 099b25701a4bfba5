"""Workers of this tier, under torchrun in the environment of a trainer, with recipes/trainers importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.recipes.launching import ROOT, run

PATH = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "recipes" / "trainers")))
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def torchrun(program: str | Path, num_ranks: int, *arguments: str | Path, **environment: str) -> str:
    """Run a worker of this folder, or another script, on CPU processes; return what it prints.

    Raises:
        AssertionError: as `run`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    script = ROOT / "tests/frameworks" / program
    return run([*command, script, *arguments], timeout_s=800, PYTHONPATH=PATH, **QUIET, **environment)
