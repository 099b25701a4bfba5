"""Benchmark results in a common form, and the changes between two of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Probes of bench_ring (--probes): rings without messages or copies, which are no fair contenders.
_PROBES = ("kernels alone", "copy_engine, without copies")


@dataclass(frozen=True)
class Measured:
    """One row of a benchmark.

    Args:
        name: row and pass.
        figures: figures by contender; higher is better.
        ours: this project's contender; the fastest of several transports.
        unit: TFLOP/s for kernels, percent of the ideal for rings, of which toys on the CPU show no speed.
    """

    name: str
    figures: dict[str, float]
    ours: str
    unit: str

    @property
    def peer(self) -> str | None:
        """The fastest peer."""
        others = {who: x for who, x in self.figures.items() if not who.startswith("ringflash") and who not in _PROBES}
        return max(others, key=others.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """Our figure over that of the fastest peer in the same run."""
        return None if self.peer is None else self.figures[self.ours] / self.figures[self.peer]


@dataclass(frozen=True)
class Change:
    """Change of a row between two results.

    Args:
        ratio: new figure over old figure, each relative to the same peer if both runs have one, because the speed of a
            machine varies from run to run.
    """

    name: str
    ratio: float
    against_peer: bool


def read_results(path: Path) -> tuple[dict[str, Any], list[Measured]]:
    """Return the environment of a result file, and its rows.

    Raises:
        ValueError: the file holds no results.
    """
    try:
        content = json.loads(path.read_text())
        rows = [_measured(row, " of a toy" if content.get("toy") else "") for row in content["results"]]
        return content["environment"], [row for row in rows if row is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must hold results of ringflash bench, got {error!r}; write it with ringflash bench --out."
        ) from error


def _measured(row: dict[str, Any], of_what: str) -> Measured | None:
    """Return a row in the common form; None if this project has no figure in it."""
    figures = row.get("tflops") or row["percent"]
    mine = [who for who in figures if who.startswith("ringflash")]
    if not mine:
        return None
    if not all(figure > 0 for figure in figures.values()):
        raise ValueError(f"figures of {row['row']} must be positive, got {figures}")
    ours = "ringflash" if "ringflash" in mine else max(mine, key=figures.__getitem__)  # a ring has one per transport
    unit = "TFLOP/s" if row.get("tflops") else f"% of the ideal{of_what}"
    return Measured(f"{row['row']}, {row['pass']}", figures, ours, unit)


def gone(new: list[Measured], old: list[Measured]) -> list[str]:
    """Return the names of the rows that are missing in the new results: not run, or the kernel failed."""
    there = {row.name for row in new}
    return [row.name for row in old if row.name not in there]


def changes(new: list[Measured], old: list[Measured]) -> list[Change]:
    """Return the changes of the rows that both results have."""
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
