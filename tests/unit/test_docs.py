"""The documents against the code and the committed results: figures, tables, and links. One process, no GPU.

`make docs` builds the site, where a link inside docs/ that leads nowhere is an error.
"""

from __future__ import annotations

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
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("name", draw_figures.figures())
def test_figures_are_those_the_code_draws(name: str) -> None:
    """`make figures` draws them anew."""
    assert (draw_figures.FIGURES / name).read_text() == draw_figures.figures()[name]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, with their tables and quoted figures written anew."""
    root = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        (root / page.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (root / page.relative_to(ROOT)).write_text(page.read_text())
    write_tables.main(root)
    return root


@pytest.mark.parametrize("name", [f"{page.relative_to(ROOT)}" for page in PAGES])
def test_tables_and_figures_are_those_of_the_committed_results(name: str, written: Path) -> None:
    """`make figures` writes them anew."""
    assert (written / name).read_text() == (ROOT / name).read_text()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("7.0<!-- a::steps::kind=timed::seconds::.1f --> s", "2.5<!-- a::steps::kind=timed::seconds::.1f --> s"),
        ("of 9%<!-- a::worst::lse::.0% -->.", "of 50%<!-- a::worst::lse::.0% -->."),
    ],
)
def test_a_quoted_figure_that_aged_is_written_anew(
    text: str, want: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [{"kind": "warm_up", "seconds": 9.0}, {"kind": "timed", "seconds": 2.5}, {"kind": "waits", "seconds": 1.0}]
    (tmp_path / "a.json").write_text(json.dumps({"steps": steps, "worst": {"lse": 0.5}}))
    monkeypatch.setattr(quotes, "RESULTS", tmp_path)
    assert quotes.quoted(text) == want
    with pytest.raises(ValueError, match="must name a committed figure"):
        quotes.quoted("1<!-- a::nothing::.1f -->")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_whole_steps_are_written_beside_their_plan() -> None:
    """Seconds of every timed step, the rest of the last one, and parts that add up to it."""
    parts = {"attention": 9.0, "linear": 2.5, "communication": 0.25, "idle": 0.25}
    step = {
        "kind": "timed", "seqlen": 131072, "seconds": 12.5, "allocated_gib": 40.0, "areas_gib": 2.0,
        "mfu_percent": 44.44, "tokens_per_second_per_gpu": 2730.7,
    }  # fmt: skip
    versions = {x: "1" for x in ("torch", "triton", "lightning", "transformers", "liger-kernel", "commit", "device")}
    memory = {"weights": 35 << 30, "fragmentation": 1 << 30, "CUDA and libraries": 3 << 30}
    result = {
        **versions, "command": "benchmarks/train_steps.py --lengths 131072x2", "ranks": 4, "about": "Said.",
        "built_seconds": 61.2, "plans": {"131072": {"memory_bytes": memory, "step_seconds": {"linear": 2, "rest": 7}}},
        "steps": [
            {**step, "kind": "warm_up", "seqlen": 16384},
            step, {**step, "seconds": 12.0, "parts": parts},
            {**step, "kind": "waits", "exposed_communication_ms": 31.4},
        ],
    }  # fmt: skip
    lines = write_tables.steps_tables(result).splitlines()
    assert lines[0].startswith("`torchrun --nproc-per-node 4 benchmarks/train_steps.py") and "in 61 s" in lines[0]
    assert lines[4] == "| 131,072 | 12.50, 12.00 | 9.00 (-25%) | 2,731 | 44.4% | 42.0 | 35.0 (-17%) | 31 |"
    assert lines[6] == "| s of | attention | linear | communication | idle | together |"
    assert lines[8:] == ["| 131,072 | 9.00 (75.0%) | 2.50 (20.8%) | 0.25 (2.1%) | 0.25 (2.1%) | 12.00 |"]
    untraced = {**result, "plans": {}, "steps": [{**step, "mfu_percent": None}]}
    assert write_tables.steps_tables(untraced).splitlines()[4:] == ["| 131,072 | 12.50 |  | 2,731 |  | 42.0 |  |  |"]


def test_diff_of_wrapping_is_that_of_the_readme() -> None:
    """The first of the README's diffs."""
    shown = re.findall(r"```diff\n.*?```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown[0] in (ROOT / "docs" / "wrapping.md").read_text()


def test_rings_over_documents_are_written_by_layout() -> None:
    """Forward / both passes; a contender that is missing leaves its cell empty."""
    zigzag, balanced = "ringflash, copy_engine", "ringflash, nccl, balanced"
    rows = [
        {"row": f"8 tokens a rank, 4/2 heads of 64, {kind}", "pass": name, "percent": {zigzag: 80.6, **more}}
        for kind, more in (("documents", {balanced: 97.4}), ("documents of 1k to 16k", {}))
        for name in ("forward", "forward + backward")
    ]
    about = {"device": "2 x H", "commit": "abc"}
    lines = write_tables.ring_documents_table({"environment": about, "results": rows}).splitlines()
    assert lines[4] == "| 128 to 32k | 81 / 81 |  |  |  |  | 97 / 97 |"
    assert lines[5] == "| 1k to 16k | 81 / 81 |  |  |  |  |  |"


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
    assert len(rows) == 8
    assert [name for name, allowed, _ in rows if SpecifierSet(allowed) != ranges[name]] == []
    assert [name for name, _, tried in rows if tried not in (pinned[name], "none:")] == []
    assert {name: version for name, version in NEWEST_TESTED.items() if name != "torch"}.items() <= pinned.items()


def test_the_table_of_tritons_is_that_of_the_kernels() -> None:
    page = (ROOT / "docs" / "index.md").read_text()
    rows = [" | ".join(("", release, *known, "")).strip() for release, known in TRITON_RELEASES.items()]
    assert "\n".join(["|---|---|---|---|", *rows]) + "\n\n" in page


def test_every_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[2:] if f"{page.relative_to(ROOT / 'docs')}" not in listed] == []
