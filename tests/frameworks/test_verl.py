"""recipes/trainers/verl_ring.py inside verl. CPU, in an environment of its own (make test-frameworks)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.frameworks.launch import PATH, torchrun
from tests.recipes.launching import run

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_verl_equals_one_process(num_ranks: int) -> None:
    """Six heads over four ranks are more than Ulysses takes."""
    output = torchrun("verl_worker.py", num_ranks, VERL_USE_EXTERNAL_MODULES="verl_ring")
    assert "equal to one process: Llama Qwen3 GptOss" in output


def test_verl_ring_after_the_engines_is_refused() -> None:
    """They would keep verl's functions, with attention that is ours."""
    code = "import sys, verl; sys.modules['verl.workers.engine.fsdp'] = None; import verl_ring"
    with pytest.raises(AssertionError, match="verl_ring must be imported before verl's engines, got verl.workers"):
        run([sys.executable, "-c", code], PYTHONPATH=PATH)


def test_verl_ring_is_an_entry_point(tmp_path: Path) -> None:
    """A package's entry point, in place of the variable."""
    (tmp_path / "ring-0.dist-info").mkdir()
    (tmp_path / "ring-0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: ring\nVersion: 0\n")
    (tmp_path / "ring-0.dist-info/entry_points.txt").write_text("[verl.plugins]\nring = verl_ring\n")
    code = "import verl, verl.utils.ulysses as u; print('padded by', u.ulysses_pad.__module__)"
    assert "padded by verl_ring" in run([sys.executable, "-c", code], PYTHONPATH=os.pathsep.join([str(tmp_path), PATH]))
