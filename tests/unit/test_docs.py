"""The documents against the code and the committed results: figures, tables, and links. One process, no GPU.

`make docs` builds the site, where a link inside docs/ that leads nowhere is an error.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import draw_figures, write_tables
from tests.recipes.launching import ROOT

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", draw_figures.figures())
def test_figures_are_those_the_code_draws(name: str) -> None:
    """`make figures` draws them anew."""
    assert (draw_figures.FIGURES / name).read_text() == draw_figures.figures()[name]


def test_tables_are_those_of_the_committed_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUMERICS", "PERFORMANCE"):
        page = getattr(write_tables, name)
        (tmp_path / page.name).write_text(page.read_text())
        monkeypatch.setattr(write_tables, name, tmp_path / page.name)
    write_tables.main()
    for page in tmp_path.iterdir():
        assert page.read_text() == (ROOT / "docs" / page.name).read_text()


def test_links_lead_to_files() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in LINK.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[2:] if f"{page.relative_to(ROOT / 'docs')}" not in listed] == []
