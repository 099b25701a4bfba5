"""What doctor says of one thing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """One line.

    Args:
        level: "fault" where training would fail or be wrong, "warning" where it would be slow or cannot be judged.
        remedy: what to do; "" for ok.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def ok(what: str, found: str) -> Finding:
    return Finding("ok", what, found)


def warning(what: str, found: str, remedy: str) -> Finding:
    return Finding("warning", what, found, remedy)


def fault(what: str, found: str, remedy: str) -> Finding:
    return Finding("fault", what, found, remedy)
