"""Speed of the kernels with two releases of triton, in turns at every sample: every row of bench_kernels.py.

    python benchmarks/studies/bench_releases.py results.json "" TRITON_3_9      (one Hopper GPU, five minutes)

The other arguments are folders to put before PYTHONPATH, one a release; "" is the installed triton. Each release has a
process of its own, and one of them at a time uses the GPU: so a clock that drifts by 10% in minutes changes no ratio.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from benchmarks import bench_kernels as bench  # noqa: E402
from benchmarks.environment import describe, result_text  # noqa: E402

LONG = 5e13  # FLOPs of a call of which three samples are enough
ROWS = [(row, d) for row in sorted(bench.ROWS, key=lambda row: row.seqlen) for d in ("forward", "backward")]


def answer() -> None:
    """Build the rows and take the samples that standard input asks for; print a line of JSON for each."""
    print(json.dumps(describe()["triton"]), flush=True)
    teams = [bench.ours(), bench.ours(deterministic=True)]
    runs: dict[str, bench.Run] = {}
    for line in sys.stdin:
        match json.loads(line):
            case int(index):
                runs.clear()
                row, direction = ROWS[index]
                torch.manual_seed(0)
                inputs = bench.Inputs(row)
                built = {team.name: team.build[direction](inputs) for team in teams if direction in team.build}
                runs = {name: run for name, run in built.items() if run is not None}
                for run in runs.values():
                    bench.timed_ms(run, 1)
                print(json.dumps(list(runs)), flush=True)
            case [str(name), int(repeats)]:
                bench.timed_ms(runs[name], repeats)
                print(bench.timed_ms(runs[name], repeats), flush=True)


class Release:
    """A process with one release of triton."""

    def __init__(self, folder: str) -> None:
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__], env=os.environ | {"PYTHONPATH": path}, **pipes)
        self.triton = self._read()
        self.name = ".".join(self.triton.split(".")[:2])

    def ask(self, question: Any) -> Any:
        """Send a line and return the answer."""
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        return json.loads(self._process.stdout.readline())


def main(path: Path, folders: list[str]) -> None:
    """Write the samples of every row to a JSON file, and again after each row."""
    random.seed(5)
    releases = [Release(folder) for folder in folders]
    about = describe() | {"triton": " and ".join(release.triton for release in releases)}
    results = []
    for index, (row, direction) in enumerate(ROWS):
        runs = [(release, name) for release in releases for name in release.ask(index)]
        flops = row.flops(direction)
        repeats = max(1, round(6e12 / flops))  # 12 ms
        samples: dict[str, list[float]] = {f"{release.name} {name}": [] for release, name in runs}
        for _ in range(3 if flops > LONG else 8):
            for release, name in random.sample(runs, len(runs)):
                samples[f"{release.name} {name}"].append(flops / release.ask([name, repeats]) / 1e9)
        tflops = {name: statistics.median(values) for name, values in samples.items()}
        results.append({"row": str(row), "pass": direction, "tflops": tflops, "samples": samples})
        path.write_text(result_text({"environment": about, "results": results}))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        answer()
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
