"""Figures in prose: docs/quoted.toml names the committed result of each, and `make figures` writes them anew.

A key of the file is the words of a page around some figures, which are in braces; its value names their results:

    "in {254.7} s a step, at an MFU of {50.6}%" = [
        "training_whole_8xh200::steps::kind=timed::seqlen=1048576::seconds::.1f",
        "training_whole_8xh200::steps::kind=timed::seqlen=1048576::mfu_percent::.1f",
    ]
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SIDECAR = "docs/quoted.toml"
HEADER = "# Which committed result each figure in prose is (benchmarks/quotes.py). `make figures` writes them anew.\n"


def write_quotes(root: Path) -> None:
    """Write every quoted figure anew, in its page and in the sidecar.

    Raises:
        ValueError: a page does not have the words of a key exactly once, or the results do not have a figure.
    """
    lines = [HEADER]
    for name, quotes in tomllib.loads((root / SIDECAR).read_text()).items():
        text = (root / name).read_text()
        lines.append(f"[{_toml(name)}]")
        for key, results in quotes.items():
            figures = [_figure(result) for result in results]
            text = _replace(text, key, figures, name)
            lines.append(f"{_toml(_with_figures(key, figures))} = [")
            lines += [f"    {_toml(result)}," for result in results]
            lines.append("]")
        (root / name).write_text(text)
        lines.append("")
    (root / SIDECAR).write_text("\n".join(lines))


def quoted_figures(name: str, text: str) -> list[tuple[int, int]]:
    """Return the spans of a page's text that are quoted figures."""
    quotes = tomllib.loads((ROOT / SIDECAR).read_text()).get(name, {})
    return [_found(text, key, name).span(1 + i) for key, results in quotes.items() for i in range(len(results))]


def _replace(text: str, key: str, figures: list[str], name: str) -> str:
    """Replace the figures of a key in the text of a page."""
    found = _found(text, key, name)
    if len(found.groups()) != len(figures):
        raise ValueError(f"{SIDECAR} must name a result for each figure in braces, got {len(figures)} for {key!r}.")
    for i in reversed(range(len(figures))):
        begin, end = found.span(1 + i)
        text = text[:begin] + figures[i] + text[end:]
    return text


def _found(text: str, key: str, name: str) -> re.Match[str]:
    """Return where a page has the words of a key, with a group for each figure; lines may break between words."""
    pieces = re.split(r"\{([^{}]*)\}", key)
    pattern = "".join(
        f"({re.escape(piece)})" if i % 2 else r"\s+".join(re.escape(words) for words in re.split(r"\s+", piece))
        for i, piece in enumerate(pieces)
    )
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise ValueError(
            f"{name} must have the words of {SIDECAR} once, got {key!r} {len(found)} times; correct either."
        )
    return found[0]


def _with_figures(key: str, figures: list[str]) -> str:
    remaining = iter(figures)
    return re.sub(r"\{[^{}]*\}", lambda _: f"{{{next(remaining)}}}", key)


def _figure(result: str) -> str:
    """Return the figure that a result path names: file, keys, format."""
    name, *path, form = result.split("::")
    try:
        return format(_find(load(name), path), form)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{SIDECAR} must name a committed figure, got {result!r}: {error!r}.") from error


@cache
def load(name: str) -> Any:
    """Return the content of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of a page."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _find(value: Any, path: list[str]) -> Any:
    """Follow the keys to a value; `key=value` selects the last entry of a list that matches all such pairs."""
    for part in path:
        key, is_filter, wanted = part.partition("=")
        if isinstance(value, list) and is_filter:
            value = [entry for entry in value if str(entry.get(key)) == wanted]
        else:
            value = (value[-1] if isinstance(value, list) else value)[part]
    return value


def _toml(text: str) -> str:
    """Return a string of TOML, which has JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)
