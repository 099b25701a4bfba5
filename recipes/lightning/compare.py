"""Compare the loss curves of two runs step by step:

    python -m recipes.lightning.compare runs/quickstart-cp1 runs/quickstart

The newest version of each run is used. Only steps that both runs have logged are compared.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path


def newest_curve(run: Path) -> Path:
    """Return the path of the curve of a run's newest version, or of a version if `run` is one.

    Raises:
        ValueError: there is no curve.
    """
    if (run / "metrics.csv").is_file():
        return run / "metrics.csv"
    curves = sorted(run.glob("version_*/metrics.csv"), key=lambda x: int(x.parent.name.removeprefix("version_")))
    if not curves:
        raise ValueError(f"run must hold version_N/metrics.csv, got none in {run}; train into it first.")
    return curves[-1]


def read_losses(curve: Path) -> dict[int, float]:
    """Return the training loss by step."""
    with curve.open(newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row["loss"]}


def largest_difference(a: dict[int, float], b: dict[int, float]) -> tuple[float, int]:
    """Return the largest difference between the losses of a step, and the number of common steps.

    Raises:
        ValueError: there is no common step.
    """
    steps = a.keys() & b.keys()
    if not steps:
        raise ValueError(
            f"curves must have a step in common, got {len(a)} and {len(b)} others; train both from step 0."
        )
    return max(abs(a[step] - b[step]) for step in steps), len(steps)


def main() -> None:
    """Print the largest difference between two runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path, help="output_dir of a run, or one version of it")
    runs = parser.parse_args().runs
    try:
        curves = [newest_curve(run) for run in runs]
        difference, count = largest_difference(*(read_losses(curve) for curve in curves))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{curves[0].parent} and {curves[1].parent}: same seed, same data,")
    print(f"losses of the {count} steps that both have differ by {difference:.2e} at most")


if __name__ == "__main__":
    main()
