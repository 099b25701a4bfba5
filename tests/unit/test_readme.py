"""The README's torchrun example, run as printed. CPU, 2 processes."""

from pathlib import Path

from tests.helpers.examples import example, torchrun


def test_example_runs_as_printed(tmp_path: Path) -> None:
    printed = torchrun(example("README.md", "# ring.py"), tmp_path)
    assert printed.count("out (1, 2048, 8, 64), |dk|") == 2, printed
