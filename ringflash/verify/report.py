"""Report of a verification: a table for people, JSON for machines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringflash.verify.compare import Check

_STYLE = {"ok": "green", "FAILED": "bold red", "not compared": "yellow"}
_SHOWN = 3  # names of failed tensors in a row of the table


@dataclass
class Report:
    """The verdict, equal on all ranks."""

    cp_size: int
    settings: str
    checks: list[Check] = field(default_factory=list)
    first: str = ""
    hint: str = ""

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not any(check.failed for check in self.checks)


def print_report(report: Report, console: Console) -> None:
    """Print the table, then the first difference and its likely cause."""
    table = Table(title=f"cp={report.cp_size} against cp=1: {report.settings}", title_justify="left")
    for heading in ("check", "verdict", "error / budget", "what"):
        table.add_column(heading, overflow="fold")
    for check in report.checks:
        ratio = "" if check.ratio is None else f"{check.ratio:.3g}"
        names = ", ".join(check.failed[:_SHOWN]) + (f" and {n} more" if (n := len(check.failed) - _SHOWN) > 0 else "")
        what = "; ".join(part for part in (names, check.note) if part)
        table.add_row(check.name, Text(check.verdict, _STYLE[check.verdict]), ratio, Text(what))
    console.print(table)
    if report.passed:
        console.print(Text("passed: cp=N trains what cp=1 trains", "green"))
        return
    console.print(Text(f"first difference: {report.first}"))
    if report.hint:
        console.print(Text(f"likely cause: {report.hint}"))


def to_json(report: Report) -> str:
    """Return the report as JSON; an infinite ratio is null."""
    content: dict[str, Any] = {
        "passed": report.passed, "cp_size": report.cp_size, "settings": report.settings,
        "first_difference": report.first, "likely_cause": report.hint,
        "checks": [check.as_json() for check in report.checks],
    }  # fmt: skip
    for check in content["checks"]:
        if check["ratio"] == float("inf"):
            check["ratio"] = None
    return json.dumps(content, indent=2)
