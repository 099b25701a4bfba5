"""Write the tables of docs/numerics.md from the committed results: python -m benchmarks.write_numerics."""

from __future__ import annotations

import json

from benchmarks.environment import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "numerics.md"
BEGIN, END = "<!-- begin {name} -->", "<!-- end {name} -->"


def main() -> None:
    """Replace every table whose markers are on the page."""
    page = PAGE.read_text()
    for path in sorted(RESULTS.glob("multi_gpu_*.json")):
        page = replaced(page, path.stem, multi_gpu_table(json.loads(path.read_text())))
    PAGE.write_text(page)


def replaced(page: str, name: str, table: str) -> str:
    """The page with a new table between the markers of `name`.

    Raises:
        ValueError: the page has no such markers.
    """
    begin, end = BEGIN.format(name=name), END.format(name=name)
    if begin not in page or end not in page:
        raise ValueError(f"{PAGE.name} must have the lines {begin!r} and {end!r}, got neither; add them.")
    head, rest = page.split(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def multi_gpu_table(result: dict) -> str:
    """Largest error over budget by tensor, and the case it occurred in."""
    rows = [
        f"| `{name}` | {worst['max']:.2f} | {worst['mean']:.2f} | {worst['case']} |"
        for name, worst in result["worst"].items()
    ]
    source = (
        f"`{result['command']}` on {result['device']}, torch {result['torch']}, NCCL {result['nccl']}, "
        f"commit {result['commit']}: {result['num_cases']} cases in {result['dtype']}."
    )
    return "\n".join([source, "", "| tensor | max | mean | case of the largest max |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    main()
