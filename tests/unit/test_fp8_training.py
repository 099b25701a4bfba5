"""benchmarks/fp8_training.py from end to end at toy sizes, with the reference implementations on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import fp8_training
from benchmarks.fp8_training import CHOICES, VARIANTS, Run, Shape, new_model
from recipes.lightning.text import text_files

TOY = {"steps": 3, "seeds": 0, "layers": 1, "width": 256, "seqlen": 130, "batch": 1}


def test_curves_and_errors_of_every_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 follows bf16 closely, but not exactly, and its gradients have larger errors, in the order of its choices."""
    monkeypatch.setattr(fp8_training, "HELD_OUT_SEQUENCES", 2)
    files = [pair for pair in text_files() if "/" not in pair[0]]
    monkeypatch.setattr(fp8_training, "text_files", lambda: files)
    file = tmp_path / "curves.json"
    fp8_training.main([*(f"--{name}={value}" for name, value in TOY.items()), f"--json={file}"])
    written = json.loads(file.read_text())
    assert written["steps"] == 3
    for variant in VARIANTS:
        curves, final, layers = (written[name][variant] for name in ("curves", "final", "layers"))
        assert set(curves) == set(final) == set(CHOICES)
        assert curves["bf16"] == curves["bf16 again"], "equal on a CPU, where no sum changes its order"
        assert curves["bf16"][0] > curves["bf16"][2]
        for name in ("FP8, backward bf16", "FP8, backward fp8_scores", "FP8, backward fp8"):
            apart = [abs(x - y) / y for x, y in zip(curves[name], curves["bf16"], strict=True)]
            assert 0 < max(apart) < 0.01
            assert 0 < abs(final[name]["held_out"][0] / final["bf16"]["held_out"][0] - 1) < 0.01
        for when in ("start", "end"):
            errors = layers[when]["attention"]
            (exact,), (rounded,) = errors["bf16"], errors["FP8, backward fp8"]
            assert all(0 < 3 * exact[name] < rounded[name] < 0.15 for name in ("out", "dq", "dk"))
            assert 0 < layers[when]["parameters"]["bf16"][0] < layers[when]["parameters"]["FP8, backward bf16"][0] < 0.1


def test_runs_are_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants without runs are not in the results."""
    monkeypatch.setattr(fp8_training, "HELD_OUT_SEQUENCES", 2)
    files = [pair for pair in text_files() if "/" not in pair[0]]
    monkeypatch.setattr(fp8_training, "text_files", lambda: files)
    file = tmp_path / "curves.json"
    flags = {**TOY, "steps": 2, "only": "^with QK-norm, (bf16$|.*scores)", "json": file}
    fp8_training.main([f"--{name}={value}" for name, value in flags.items()])
    written = json.loads(file.read_text())
    asked = {"with QK-norm": ["bf16", "FP8, backward fp8_scores"]}
    assert {variant: list(found) for variant, found in written["final"].items()} == asked
    assert {variant: list(found) for variant, found in written["curves"].items()} == asked


def test_fewer_steps_decay_to_the_same_rate() -> None:
    """`decay` fits the schedule to the steps that there is time for: a tenth of the peak at their end."""
    text = torch.zeros(64, dtype=torch.int16)
    model = new_model(Shape(1, 256, 8, 1), True, CHOICES["bf16"], 0, torch.device("cpu"))
    run = Run(model, text, torch.zeros(40, 1, dtype=torch.int64), 8, 1e-3)
    assert run.rates.argmax() == 2 and run.rates.max().item() == pytest.approx(1e-3)
    run.decay(20)
    assert run.rates[19].item() == pytest.approx(1.2e-4, rel=0.2) and run.rates[20].item() == pytest.approx(1e-4)
