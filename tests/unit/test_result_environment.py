"""A result file: its commit and its lines. One process, git, no GPU."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import environment


def test_a_checkout_with_changes_is_named_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.delenv("RINGFLASH_COMMIT", raising=False)
    (tmp_path / "file").write_text("1")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "file"], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    clean = environment.describe()["commit"]
    assert len(clean) == 7
    (tmp_path / "file").write_text("2")
    assert environment.describe()["commit"] == f"{clean}-dirty"


def test_result_has_a_line_for_each_row() -> None:
    result = {"about": {"device": "x", "ranks": 2}, "none": [], "rows": [{"a": [1, 2]}, 3], "ms": 0.5}
    text = environment.result_text(result)
    assert json.loads(text) == result and list(json.loads(text)) == list(result)
    assert [line for line in text.splitlines() if line.startswith("  ")] == [
        '  "device": "x",', '  "ranks": 2', '  {"a": [1, 2]},', "  3",
    ]  # fmt: skip
