"""Results of the benchmarks in one form, and what changed between two of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# bench_ring's --probes: a ring's work without its messages or copies, which no peer leaves out.
_PROBES = ("kernels alone", "copy_engine, without copies")


@dataclass(frozen=True)
class Measured:
    """One row of a benchmark.

    Args:
        name: row and pass.
        figures: by contender; more is better.
        ours: contender that is this project's; of several transports the fastest.
        unit: of the figures: TFLOP/s of kernels, percent of the ideal of rings.
    """

    name: str
    figures: dict[str, float]
    ours: str
    unit: str

    @property
    def peer(self) -> str | None:
        """The fastest of the others."""
        others = {who: x for who, x in self.figures.items() if not who.startswith("ringflash") and who not in _PROBES}
        return max(others, key=others.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """Ours over the fastest peer of the same run."""
        return None if self.peer is None else self.figures[self.ours] / self.figures[self.peer]


@dataclass(frozen=True)
class Change:
    """A row in two results.

    Args:
        ratio: the new figure over the old one; both over the same peer where each run had it, because a machine's
            own speed moves from run to run.
    """

    name: str
    ratio: float
    against_peer: bool


def read_results(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """What a result file was measured on, and its rows.

    Raises:
        ValueError: a file that is none.
    """
    try:
        content = json.loads(path.read_text())
        rows = [_measured(row) for row in content["results"]]
        return content["environment"], [row for row in rows if row is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must hold results of ringflash bench, got {error!r}; write it with ringflash bench --out."
        ) from error


def _measured(row: dict[str, Any]) -> Measured | None:
    """None for a row that this project does not compute."""
    figures = row.get("tflops") or row["percent"]
    mine = [who for who in figures if who.startswith("ringflash")]
    if not mine:
        return None
    if not all(figure > 0 for figure in figures.values()):
        raise ValueError(f"figures of {row['row']} must be positive, got {figures}")
    ours = "ringflash" if "ringflash" in mine else max(mine, key=figures.__getitem__)  # a ring has one by transport
    return Measured(f"{row['row']}, {row['pass']}", figures, ours, "TFLOP/s" if row.get("tflops") else "% of the ideal")


def gone(new: list[Measured], old: list[Measured]) -> list[str]:
    """Names of the rows that the new results do not have: left out, or their kernel failed."""
    there = {row.name for row in new}
    return [row.name for row in old if row.name not in there]


def changes(new: list[Measured], old: list[Measured]) -> list[Change]:
    """Rows that both results have."""
    before = {row.name: row for row in old}
    found = []
    for row in new:
        was = before.get(row.name)
        if was is None:
            continue
        if row.ratio is not None and was.ratio is not None and row.peer == was.peer:
            found.append(Change(row.name, row.ratio / was.ratio, True))
        else:
            found.append(Change(row.name, row.figures[row.ours] / was.figures[was.ours], False))
    return found
