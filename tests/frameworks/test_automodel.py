"""recipes/trainers/automodel_ring.py inside NeMo Automodel. CPU, an environment of its own (make test-frameworks)."""

from __future__ import annotations

import pytest

from tests.frameworks.launch import torchrun

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_automodel_equals_one_process(num_ranks: int) -> None:
    assert "equal to one process: packed rows" in torchrun("automodel_worker.py", num_ranks)
