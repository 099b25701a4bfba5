"""The documents against the code and the committed results: figures, tables, and links. One process, no GPU.

`make docs` builds the site, where a link inside docs/ that leads nowhere is an error.
"""

import json
import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from benchmarks import draw_figures, quotes, write_tables
from ringflash.commands.doctor.judge import NEWEST_TESTED, declared_ranges
from ringflash_kernels.api import TRITON_RELEASES
from tests.recipes.launching import ROOT

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
UNIT = re.compile(r"(?<![\w.])\d[\d.,]*\s*(?:s\b|%|GiB|TFLOP/s|ms\b|µs)")
MARKED = re.compile(r"^<!-- begin (\w+) -->$", re.MULTILINE)
GENERATED = re.compile(r"<!-- begin (\w+) -->.*?<!-- end \1 -->|```.*?```", re.DOTALL)
UNQUOTED = {  # settings of the code, definitions, and what a table of the same page shows, rounded
    "README.md": ["100% is perfect", "after 600 s (`set_timeout`)"],
    "docs/performance.md": [
        "by about 5%, so", "`--tolerance` (5%)", "by up to 15%: a", "fresh, within 2%.", "*ideal*, 100%, is",
        "about 11 µs of", "power, after 50 ms without", "kernels 2.5 to 3% of", "than 50 ms always",
        "up to 2 GiB; above", "up to 1.25 GiB, if",
    ],
    "docs/fp8.md": [
        "about 5% in `out`", "about 1% of bf16's; [single", "loss within 1% of", "within about 1% of bf16's in",
        "take 38 ms forward", "and 54 ms in", "at most 6% anywhere", "ends within 2% of",
        "norm, within 2.5%, more", "by up to 1.8%.", "ended 2 to 3% higher", "end within 0.4% of bf16",
        "about 1% higher", "is 3 to 8% off", "up to 14% wrong", "is 4 to 11%.", "within 0.3% of that",
    ],
}  # fmt: skip
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", draw_figures.figures())
def test_figures_are_those_the_code_draws(name: str) -> None:
    """`make figures` draws them anew."""
    assert (draw_figures.FIGURES / name).read_text() == draw_figures.figures()[name]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages and the sidecar of quotes, with tables and quoted figures written anew."""
    root = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        (root / page.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (root / page.relative_to(ROOT)).write_text(page.read_text())
    (root / quotes.SIDECAR).write_text((ROOT / quotes.SIDECAR).read_text())
    write_tables.main(root)
    return root


@pytest.mark.parametrize("name", [*(f"{page.relative_to(ROOT)}" for page in PAGES), quotes.SIDECAR])
def test_tables_and_figures_are_those_of_results(name: str, written: Path) -> None:
    """`make figures` writes them anew."""
    assert (written / name).read_text() == (ROOT / name).read_text()


def test_no_table_is_left_empty() -> None:
    """Markers of a name that nothing writes would stay as they are, with an old table or none between them."""
    marked = [(f"{page.relative_to(ROOT)}", name) for page in PAGES for name in MARKED.findall(page.read_text())]
    assert sorted(marked) == sorted((page, name) for page, name, _ in write_tables.tables())


@pytest.mark.parametrize("path", sorted(quotes.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_result_is_of_one_run(path: Path) -> None:
    """Tables and quotes find its commit, command, machine and release at one place."""
    result = json.loads(path.read_text())
    assert result.get("environment", result).keys() >= {"commit", "command", "device", "torch"}


def test_site_leads_to_results_in_the_repository() -> None:
    shown = write_tables.on_page_markdown("[a](../benchmarks/results/a.json) [b](../../benchmarks/b.py) [c](plan.md)")
    found = [
        f"[{name}]({write_tables.REPOSITORY}/benchmarks/{path})"
        for name, path in (("a", "results/a.json"), ("b", "b.py"))
    ]
    assert shown == " ".join([*found, "[c](plan.md)"])


def test_aged_quote_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page, over a line break, and in the sidecar; other figures of the page stay."""
    steps = [{"kind": "warm_up", "seconds": 9.0}, {"kind": "timed", "seconds": 2.5}, {"kind": "waits", "seconds": 1.0}]
    (tmp_path / "a.json").write_text(json.dumps({"steps": steps, "worst": {"lse": 0.5}}))
    (tmp_path / "docs").mkdir()
    page, sidecar = tmp_path / "page.md", tmp_path / quotes.SIDECAR
    page.write_text("It took 7.0 s\nand 9% of 7.0 s.")
    sidecar.write_text(
        '["page.md"]\n"took {7.0} s and {9%} of" = ["a::steps::kind=timed::seconds::.1f", "a::worst::lse::.0%"]'
    )
    monkeypatch.setattr(quotes, "RESULTS", tmp_path)
    quotes.write_quotes(tmp_path)
    assert page.read_text() == "It took 2.5 s\nand 50% of 7.0 s."
    assert '"took {2.5} s and {50%} of" = [' in sidecar.read_text()


@pytest.mark.parametrize(
    ("key", "result", "error"),
    [
        ("took {7.0} s", "a::nothing::.1f", "must name a committed figure"),
        ("takes {7.0} s", "a::worst::lse::.1f", "must have the words .* 0 times"),
        ("{7.0} s", "a::worst::lse::.1f", "must have the words .* 2 times"),
        ("took {7.0} {s}", "a::worst::lse::.1f", "must name a result for each figure"),
    ],
)
def test_wrong_quote_fails(key: str, result: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('{"worst": {"lse": 0.5}}')
    (tmp_path / "docs").mkdir()
    (tmp_path / "page.md").write_text("It took 7.0 s of 7.0 s.")
    (tmp_path / quotes.SIDECAR).write_text(f'["page.md"]\n"{key}" = ["{result}"]')
    monkeypatch.setattr(quotes, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=error):
        quotes.write_quotes(tmp_path)


@pytest.mark.parametrize("name", UNQUOTED)
def test_figure_with_unit_has_a_result(name: str) -> None:
    """In a generated table, in docs/quoted.toml, or in the list above, which has no phrase that the page lacks."""
    text = (ROOT / name).read_text()
    known = [found.span() for found in GENERATED.finditer(text)] + quotes.quoted_figures(name, text)
    for phrase in UNQUOTED[name]:
        (found,) = re.finditer(r"\s+".join(map(re.escape, phrase.split())), text)
        known.append(found.span())
    figures = [x for x in UNIT.finditer(text) if not any(begin <= x.start() < end for begin, end in known)]
    assert [text[x.start() - 40 : x.end() + 20] for x in figures] == []


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 90 and max(len(line) for line in lines) <= 120


def test_links_lead_to_files() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing


def test_the_table_of_versions_is_that_of_the_project() -> None:
    """Ranges as pyproject.toml declares them, and CI's versions as it pins them."""
    pinned = dict(re.findall(r"^([a-z-]+)==(.*)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.MULTILINE))
    rows = re.findall(
        r"^\| ([a-z-]+) \| (>=\S+) \| (\S+).* \| .* \|$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE
    )
    ranges = declared_ranges()
    assert len(rows) == 10
    assert [name for name, allowed, _ in rows if SpecifierSet(allowed) != ranges[name]] == []
    assert [name for name, _, tried in rows if tried not in (pinned.get(name), "none:")] == []
    assert {name: version for name, version in NEWEST_TESTED.items() if name != "torch"}.items() <= pinned.items()


def test_the_table_of_tritons_is_that_of_the_kernels() -> None:
    page = (ROOT / "docs" / "index.md").read_text()
    rows = [" | ".join(("", release, *known, "")).strip() for release, known in TRITON_RELEASES.items()]
    assert "\n".join(["|---|---|---|---|", *rows]) + "\n\n" in page


def test_every_page_is_in_the_navigation() -> None:
    """The log's days are on its page."""
    listed = (ROOT / "mkdocs.yml").read_text() + re.sub(r"\]\(", "log/", (ROOT / "docs/log/README.md").read_text())
    assert [page.name for page in PAGES[2:] if f"{page.relative_to(ROOT / 'docs')}" not in listed] == []


def test_log_headings_have_a_verdict() -> None:
    """In brackets at their end; an entry that only describes how others were measured ends with "conditions"."""
    days = [page for page in PAGES if page.match("docs/log/2*.md")]
    headings = [x for page in days for x in re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)]
    assert headings and [x for x in headings if not re.search(r" \([^()]+\)$|: conditions$", x)] == []
