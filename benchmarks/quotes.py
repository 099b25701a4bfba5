"""Figures quoted in prose: each names its committed result, and is updated together with the tables.

In the text of a page: `254.7<!-- training_whole_8xh200::steps::kind=timed::seqlen=1048576::seconds::.1f --> s`.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from benchmarks.environment import ROOT

RESULTS = ROOT / "benchmarks" / "results"
QUOTE = re.compile(r"[\w.,+%-]+<!-- (\w+)::(.+?)::([^:]+?) -->")


def quoted(text: str) -> str:
    """Return `text` with every quoted figure updated from the results.

    Raises:
        ValueError: the results do not have a figure.
    """
    return QUOTE.sub(_quote, text)


def _quote(match: re.Match[str]) -> str:
    name, path, form = match.groups()
    try:
        value = _find(_load(name), path.split("::"))
        written = format(value, form)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"a quote must name a committed figure, got {match[0]!r}: {error!r}.") from error
    return f"{written}<!-- {name}::{path}::{form} -->"


@cache
def _load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _find(value: Any, path: list[str]) -> Any:
    """Follow the keys to a value; `key=value` selects the last entry of a list that matches all such pairs."""
    for part in path:
        key, is_filter, wanted = part.partition("=")
        if isinstance(value, list) and is_filter:
            value = [entry for entry in value if str(entry.get(key)) == wanted]
        else:
            value = (value[-1] if isinstance(value, list) else value)[part]
    return value
