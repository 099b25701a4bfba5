"""TRL's trainers over a ring equal one process: SFT with packed documents, DPO, and GRPO.

gloo, 4 CPU processes, fp64 models. Needs the trl extra. TRL computes log-probabilities in fp32, so that parameters may
differ by fp32's epsilon in each update, whose norm is that of the clipped gradient times the learning rate.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import trainer
from tests.helpers.pool import Pool

pytest.importorskip("trl")


UPDATES = 2 * 0.5 * 0.05  # steps, learning rate, norm


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_training_is_that_of_one_process(pool: Pool, alone: Pool, kind: str, tmp_path: Path) -> None:
    """Two clipped steps, a ring of four ranks; SFT is evaluated, too."""
    (one,) = alone.run(trainer.train_with_trl, f"{tmp_path}/one", kind)
    for ring in pool.run(trainer.train_with_trl, f"{tmp_path}/ring", kind):
        assert len(ring["logged"]) >= 2
        for got, want in zip(ring["logged"], one["logged"], strict=True):
            assert got == pytest.approx(want, rel=1e-6, abs=1e-7)
        for name, want in one["parameters"].items():
            atol = UPDATES * torch.finfo(torch.float32).eps
            torch.testing.assert_close(ring["parameters"][name], want, rtol=0, atol=atol)
