"""Speed of the kernels with two releases of triton: every row of bench_kernels.py, each release in a process of its own.

    for turn in 1 2; do for path in "" TRITON_3_9; do
        PYTHONPATH=$path python benchmarks/studies/bench_releases.py time $turn$path.json      (one Hopper GPU, a minute each)
    done; done
    python benchmarks/studies/bench_releases.py join *.json

Compare medians over both turns: a machine drifts, and cuDNN, which knows nothing of triton, shows how far. `join` writes
triton_3_6.json and triton_3_9.json with the samples of all turns.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from benchmarks import bench_kernels as bench  # noqa: E402
from benchmarks.environment import describe  # noqa: E402

LONG = 5e13  # FLOPs of a call of which two samples are enough


def time(path: Path) -> None:
    """Write the samples of every row to a JSON file, and again after each row."""
    random.seed(5)
    torch.manual_seed(0)
    teams = [bench.ours(), bench.ours(deterministic=True), bench.cudnn()]
    about, results = describe(), []
    for row in sorted(bench.ROWS, key=lambda row: row.seqlen):
        for direction in ("forward", "backward"):
            inputs = bench.Inputs(row)
            built = {team.name: team.build[direction](inputs) for team in teams if direction in team.build}
            runs = {name: run for name, run in built.items() if run is not None}
            flops = row.flops(direction)
            rounds, sample_ms = (2, 1) if flops > LONG else (4, 12)
            samples = bench.measure(runs, flops, rounds=rounds, sample_ms=sample_ms) if runs else {}
            results.append({"row": str(row), "pass": direction, "samples": samples})
            path.write_text(json.dumps({"environment": about, "results": results}, indent=1))


def join(paths: list[Path]) -> None:
    """Write a file for each release, with medians over the turns."""
    releases: dict[str, list[dict]] = {}
    for path in paths:
        run = json.loads(path.read_text())
        releases.setdefault(run["environment"]["triton"], []).append(run)
    for release, runs in releases.items():
        rows: dict[tuple[str, str], dict[str, list[float]]] = {}
        for result in (result for run in runs for result in run["results"]):
            samples = rows.setdefault((result["row"], result["pass"]), {})
            for name, values in result["samples"].items():
                samples.setdefault(name, []).extend(values)
        results = [
            {"row": row, "pass": direction, "tflops": {n: statistics.median(v) for n, v in s.items()}, "samples": s}
            for (row, direction), s in rows.items()
        ]
        text = json.dumps({"environment": runs[0]["environment"], "results": results}, indent=1)
        Path(f"triton_{'_'.join(release.split('.')[:2])}.json").write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "time":
        time(Path(sys.argv[2]))
    else:
        join([Path(name) for name in sys.argv[2:]])
