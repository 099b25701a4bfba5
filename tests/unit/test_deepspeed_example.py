"""The example of docs/deepspeed.md under torchrun, run as printed. CPU, 2 processes; needs two extras."""

import re
from pathlib import Path

import pytest

from tests.helpers.examples import example, torchrun

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")


def test_example_runs_as_printed(tmp_path: Path) -> None:
    printed = torchrun(example("docs/deepspeed.md", "# zero.py"), tmp_path)
    losses = [float(x) for x in re.findall(r"rank 0: loss ([0-9.]+)", printed)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], printed
