"""recipes/trainers/verl_ring.py inside verl. CPU, in an environment of its own (make test-frameworks)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.frameworks.launch import torchrun
from tests.recipes.launching import ROOT

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_verl_equals_one_process(num_ranks: int) -> None:
    """Six heads over four ranks are more than Ulysses takes."""
    output = torchrun("verl_worker.py", num_ranks, VERL_USE_EXTERNAL_MODULES="verl_ring")
    assert "equal to one process: Llama Qwen3 GptOss" in output


def test_verl_ring_after_the_engines_is_refused() -> None:
    """They would keep verl's functions, beside attention that is ours."""
    code = "import sys, verl; sys.modules['verl.workers.engine.fsdp'] = None; import verl_ring"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "recipes/trainers", capture_output=True, text=True)
    assert "verl_ring must be imported before verl's engines, got verl.workers.engine.fsdp" in result.stderr
