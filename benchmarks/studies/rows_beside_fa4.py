"""Speed on one GPU of rows in which flash-attn-4 was faster, and of variants of our kernels, in turns in one process.

    python -m benchmarks.studies.rows_beside_fa4 [--rows hd192] [--packages rk_old] [--json results.json]

A variant is a copy of the package `ringflash_kernels` under another name, in whose files every `ringflash_kernels` is
that name. With --warm i/n, an n-th of the kernels is compiled, on short inputs: flash-attn-4's take minutes.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import bench_kernels as bench
from benchmarks.bench_kernels import Contender, Inputs, Row, Run
from benchmarks.environment import describe, result_text

ROWS = (
    *(Row(192, 16384, 1, 16, 16, kind, 128) for kind in ("causal", "full")),
    Row(192, 8192, 1, 128, 128, "causal", 128), Row(192, 2048, 4, 128, 128, "causal", 128),
    Row(192, 4096, 2, 128, 128, "causal", 128), Row(192, 4096, 4, 16, 16, "full", 128),
    Row(192, 12000, 1, 20, 20, "causal", 128), Row(192, 65536, 1, 4, 4, "causal", 128),
    Row(192, 16384, 1, 16, 16, "documents", 128), Row(192, 65536, 1, 8, 8, "documents", 128),
    Row(192, 32768, 1, 16, 16, "window", 128),
    *(Row(192, 16384, 1, 16, 16, kind) for kind in ("causal", "full")),
    *(Row(128, 12000, 1, heads, kv_heads, "full") for heads, kv_heads in ((28, 4), (28, 28))),
    Row(128, 12288, 1, 28, 4, "full"), Row(128, 16384, 1, 16, 4, "full"),
    *(Row(128, 1024, 16, 16, 16, kind) for kind in ("causal", "full")),
    *(Row(128, 2048, 8, 16, 16, kind) for kind in ("causal", "full")),
    Row(128, 4096, 4, 16, 16, "causal"), Row(128, 49152, 1, 24, 3, "causal"), Row(128, 5000, 3, 40, 8, "causal"),
    *(Row(128, 16384, 1, 16, 16, kind) for kind in ("causal", "full")), Row(128, 8192, 2, 32, 8, "causal"),
    *(Row(64, 16384, 1, 32, 32, kind) for kind in ("causal", "full")),
    Row(64, 4096, 4, 32, 32, "causal"), Row(64, 2048, 8, 32, 32, "causal"),
    *(Row(96, 16384, 1, 16, 16, kind) for kind in ("causal", "full")),
    *(Row(256, 16384, 1, 8, 8, kind) for kind in ("causal", "full")),
)  # fmt: skip


def variant(package: str) -> Contender:
    """Return the kernels of a copy of our package."""
    backward = import_module(f"{package}.hopper.backward.host").HopperBackward
    forward = import_module(f"{package}.hopper.forward.host").forward
    mask_of = import_module(f"{package}.mask").Mask

    def mask(row: Row) -> object:
        if row.kind == "documents":
            return mask_of.documents(bench.document_bounds(row.seqlen))
        window = (4096, 0) if row.kind == "window" else (-1, -1)
        return mask_of.band(row.seqlen, row.seqlen, causal=row.kind != "full", window_size=window)

    def build(x: Inputs, direction: str) -> Run:
        out, dq, dk, dv = (torch.empty_like(t) for t in (x.dout, x.q, x.k, x.v))
        attend = partial(forward, x.q, x.k, x.v, mask(x.row), x.scale, out=out, lse=x.lse)
        attend()

        def run() -> None:
            call = backward(x.dout, x.q, out, x.lse, softmax_scale=x.scale, only_dq=dq)
            call.add(x.k, x.v, mask_, dk, dv, accumulate=False)
            call.finish(dq)

        mask_ = mask(x.row)
        run.result, attend.result = (dq, dk, dv), (out,)  # type: ignore[attr-defined]
        return attend if direction == "forward" else run

    return Contender(package, {d: partial(build, direction=d) for d in ("forward", "backward")})


def runs_of(row: Row, direction: str, teams: list[tuple[Contender, str]], inputs: Inputs) -> dict[str, Run]:
    """Return what each contender of the row runs, after a first call; one that fails is left out."""
    runs = {}
    for team, pattern in teams:
        if not re.search(pattern, f"{row}, {direction}"):
            continue
        try:
            run = team.build[direction](inputs)
            if run is not None:
                run()
                torch.cuda.synchronize()
                runs[team.name] = run
        except Exception as error:
            print(f"{row}, {direction}: {team.name} failed: {error!r}"[:300], flush=True)
    return runs


def differences(runs: dict[str, Run]) -> dict[str, float]:
    """Return the largest difference of each variant's results from ours, divided by the mean of ours."""
    results = {name: [t.float() for t in run.result] for name, run in runs.items() if hasattr(run, "result")}
    ours = results.pop("ringflash_kernels")
    pairs = {name: zip(result, ours, strict=True) for name, result in results.items()}
    return {name: max(float((a - b).abs().max() / b.abs().mean()) for a, b in pair) for name, pair in pairs.items()}


def kernel_of(row: Row, direction: str) -> tuple:
    """Return what the compiled kernels of a row depend on."""
    return direction, row.head_dim, row.value_dim, row.kind, row.num_heads == row.num_kv_heads


def contenders(packages: str, peers: str) -> Iterator[tuple[Contender, str]]:
    """Return ours, variants (name=pattern of rows, comma separated) and peers, each with its pattern."""
    for package in filter(None, f"ringflash_kernels,{packages}".split(",")):
        name, _, pattern = package.partition("=")
        yield variant(name), pattern
    for name in filter(None, peers.split(",")):
        yield getattr(bench, name)(), ""


def main() -> None:
    """Print and save every row as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows and passes in whose name this pattern is found")
    parser.add_argument("--packages", default="", help="variants, each as name or name=pattern of rows")
    parser.add_argument("--peers", default="flash_attn_4,cudnn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-ms", type=float, default=20)
    parser.add_argument("--warm", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    random.seed(5)
    torch.manual_seed(0)
    teams, about = list(contenders(options.packages, options.peers)), describe("flash-attn-4", "nvidia-cutlass-dsl")
    asked = [(r, d) for r in ROWS for d in ("forward", "backward") if re.search(options.rows, f"{r}, {d}")]
    results = []
    if options.warm:
        part, parts = map(int, options.warm.split("/"))
        asked = list({kernel_of(*x): x for x in reversed(asked)}.values())[part::parts]
    for row, direction in asked:
        inputs = Inputs(replace(row, seqlen=min(row.seqlen, 2048), batch=1) if options.warm else row)
        runs = runs_of(row, direction, teams, inputs)
        if options.warm:
            continue
        errors, flops = differences(runs), row.flops(direction)
        samples = bench.measure(runs, flops, rounds=options.rounds, sample_ms=options.sample_ms)
        medians = {name: statistics.median(values) for name, values in samples.items()}
        mine = medians["ringflash_kernels"]
        figures = [f"{name} {value:.0f} ({mine / value:.3f})" for name, value in medians.items()]
        print(f"{row}, {direction}: {', '.join(figures)} {errors or ''}", flush=True)
        result = {"row": str(row), "pass": direction, "tflops": medians, "samples": samples, "differences": errors}
        results.append(result)
        if options.json:
            options.json.write_text(result_text({"environment": about, "results": results}))
        del inputs, runs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
