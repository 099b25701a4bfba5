"""The command `ringflash bench`: run a benchmark or show its results, and compare them with a baseline.

run (bench_kernels.py or bench_ring.py, in separate processes)  ->  results (JSON)  ->  compare, show, plot
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich.table import Table

from benchmarks.compare import Change, Measured, changes, gone, read_results
from ringflash.commands.console import console

ROOT = Path(__file__).parents[1]
_BAR = 40
_MOST_TOYS = 64


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("what", help="kernels (one GPU), ring (all GPUs), or a file of results to show")
    parser.add_argument("--rows", default="", help="only rows in whose name this regular expression is found")
    parser.add_argument("--rounds", type=int | None, default=None, help="samples of each contender; null is 5")
    parser.add_argument("--nproc", type=int, help="ranks of the ring; null is all GPUs")
    parser.add_argument(
        "--toy", action="store_true", help="small rings over gloo, which show that the benchmark runs, but no speed"
    )
    parser.add_argument("--out", type=Path | None, default=None, help="file for the results, with machine and versions")
    parser.add_argument(
        "--baseline",
        type=Path | None,
        default=None,
        help="earlier results; exit status 1 if a row is slower or missing",
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="fraction of the baseline's speed that a row may lose"
    )
    parser.add_argument(
        "--plot", type=Path | None, default=None, help="picture of the results: .png, .svg or .pdf; needs matplotlib"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> int:
    """Print the table and return 1 if a row of the baseline is missing or slower by more than the tolerance, else 0."""
    _check_rows(options.rows)
    _check_run(options)
    if not 0 <= options.tolerance < 1:
        raise ValueError(f"--tolerance must be a fraction from 0 to below 1, got {options.tolerance:g}; 5% is 0.05.")
    if options.plot is not None:
        _check_plot(options.plot)
        _check_written("--plot", options.plot)
    before = [] if options.baseline is None else read_results(options.baseline)[1]  # raises before the long run
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json") if options.out is None else options.out
        path = _measure(options, path) if options.what in ("kernels", "ring") else Path(options.what)
        environment, rows = read_results(path)
    if not rows:
        raise ValueError(f"{path} must hold a row that ringflash computes, got none; name other results.")
    rows = [row for row in rows if re.search(options.rows, row.name)]
    if not rows:
        raise _no_row(options.rows)
    compared = changes(rows, before)
    slower = [change for change in compared if change.ratio < 1 - options.tolerance]
    missing = gone(rows, [row for row in before if re.search(options.rows, row.name)])
    if options.json:
        print(json.dumps(_as_json(environment, rows, compared, slower, missing), indent=2))
    else:
        _print(environment, rows, compared, slower, missing)
    if options.plot is not None:
        _plot(options.plot, rows)
    if options.baseline is not None and not compared:
        raise ValueError(f"{options.baseline} must have rows of these results, got none in common; see --rows.")
    return 1 if slower or missing else 0


def _measure(options: Namespace, out: Path) -> Path:
    """Run a script of benchmarks/ and return the path of its results.

    Raises:
        RuntimeError: the run failed.
    """
    script = ROOT / "benchmarks" / f"bench_{options.what}.py"
    rounds, before = 5 if options.rounds is None else options.rounds, _mtime_ns(out)
    arguments = [str(script), "--rows", options.rows, "--rounds", str(rounds), "--json", str(out.resolve())]
    command = [sys.executable]
    if options.what == "ring":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(_num_ranks(options))]
        arguments += ["--toy"] if options.toy else []
    else:
        _check_gpu()
    path = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run([*command, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, stdout=sys.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"{script.name} must end with status 0, got {done.returncode}; its output is above.")
    if _mtime_ns(out) == before:  # the file is that of an earlier run
        raise _no_row(options.rows)
    return out


def _mtime_ns(path: Path) -> int | None:
    """Return the time of the last change of a file in nanoseconds."""
    return path.stat().st_mtime_ns if path.exists() else None


def _no_row(pattern: str) -> ValueError:
    return ValueError(f"--rows must be found in the name of a row, got {pattern!r}; leave it out for all rows.")


def _check_gpu() -> None:
    import torch

    if torch.cuda.device_count() == 0:
        raise RuntimeError("kernels must be timed on a GPU, got none; bench ring --toy runs without.")


def _num_ranks(options: Namespace) -> int:
    import torch

    if options.toy:
        return options.nproc or 2
    gpus = torch.cuda.device_count()
    if gpus < (options.nproc or 2):
        raise RuntimeError(
            f"a ring must have {options.nproc or '2'} GPUs{'' if options.nproc else ' or more'}, got {gpus}; "
            "--toy runs it over gloo on the CPU."
        )
    return options.nproc or gpus


def _as_json(
    environment: dict[str, Any], rows: list[Measured], compared: list[Change], slower: list[Change], missing: list[str]
) -> dict[str, Any]:
    return {
        "environment": environment,
        "rows": [
            {"name": row.name, "figures": row.figures, "unit": row.unit, "ours": row.ours, "ratio": row.ratio}
            for row in rows
        ],
        "compared": [change.__dict__ for change in compared],
        "regressions": [change.name for change in slower],
        "gone": missing,
    }


def _print(
    environment: dict[str, Any], rows: list[Measured], compared: list[Change], slower: list[Change], missing: list[str]
) -> None:
    out = console()
    about = ("device", "torch", "triton", "commit", "command")
    out.print(", ".join(f"{key} {environment[key]}" for key in about if key in environment))
    by_name = {change.name: change for change in compared}
    unit = f", {rows[0].unit}" if rows else ""
    table = Table("row", f"ours{unit}", "fastest peer", "ours / peer", "/ baseline", "")
    longest = max((row.figures[row.ours] for row in rows), default=1.0)
    for row in rows:
        peer = "" if row.peer is None else f"{row.figures[row.peer]:.4g} ({row.peer})"
        change = by_name.get(row.name)
        against = "" if change is None else f"{change.ratio:.3f}{'' if change.against_peer else ' absolute'}"
        style = "[red]" if change in slower else "[default]"
        bar = "█" * round(_BAR * row.figures[row.ours] / longest)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, f"{row.figures[row.ours]:.4g}", peer, ratio, f"{style}{against}[/]", bar)
    out.print(table)
    for change in slower:
        out.print(f"[red]slower than the baseline: {change.name}, {change.ratio:.3f}[/]")
    for name in missing:
        out.print(f"[red]only in the baseline: {name}[/]")


def _check_rows(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"--rows must be a regular expression, got {pattern!r} ({error}); put a backslash before ( ) [ * + ?."
        ) from error


def _check_run(options: Namespace) -> None:
    """Raise ValueError for options that do not apply to the requested run."""
    given = {"out": options.out is not None, "rounds": options.rounds is not None}
    given |= {"nproc": options.nproc is not None, "toy": options.toy}
    taken = {"ring": tuple(given), "kernels": ("out", "rounds")}.get(options.what, ())
    for name in (name for name, is_given in given.items() if is_given and name not in taken):
        wanted = "ring" if name in ("nproc", "toy") else "kernels or ring"
        raise ValueError(f"--{name} must be given with {wanted} only, got {options.what!r}; leave it out.")
    if options.nproc is not None and options.nproc < 2:
        raise ValueError(f"--nproc must be 2 or more, got {options.nproc}; a ring of one sends nothing.")
    if options.toy and options.nproc is not None and options.nproc > _MOST_TOYS:
        raise ValueError(
            f"--nproc must be at most {_MOST_TOYS} with --toy, got {options.nproc}; each is a process here."
        )
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"--rounds must be 1 or more, got {options.rounds}; leave it out for 5.")
    if options.out is not None:
        _check_written("--out", options.out)


def _check_written(name: str, path: Path) -> None:
    """Raise an error for an unwritable path before the run, whose results would otherwise be lost."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{name} must be in a folder that exists, got {path}; make the folder first.")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{name} must be a file that can be written, got {path}; name another.")


def _check_plot(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot must end in .png, .svg or .pdf, got {path}; name such a file.")
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as missing:
        raise RuntimeError(
            f"matplotlib must be installed for --plot, got {missing}; pip install matplotlib."
        ) from missing


def _plot(path: Path, rows: list[Measured]) -> None:
    """Plot the figures of all contenders, as points by row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.5 * len(rows)), 5.0), layout="constrained")
    contenders = list(dict.fromkeys(who for row in rows for who in row.figures))
    for who in contenders:
        places = [i for i, row in enumerate(rows) if who in row.figures]
        style = "o-" if who.startswith("ringflash") else "x--"
        axes.plot(places, [rows[i].figures[who] for i in places], style, label=who)
    axes.set_xticks(range(len(rows)), [row.name for row in rows], rotation=60, ha="right", fontsize=7)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
