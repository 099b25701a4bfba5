"""The quickstart recipe with the overlay fp8.yaml, scaled down by flags: two gloo processes on the CPU, three steps.

Losses follow those of exact attention, and are not the same. The metrics have MFU by both peaks, and what was rounded.
"""

from __future__ import annotations

from pathlib import Path

from recipes.lightning.compare import newest_curve, read_losses
from tests.recipes.launching import ROOT, train, write_text

FLAGS = {
    "trainer.max_steps": 3, "trainer.num_sanity_val_steps": 0, "data.seqlen": 96, "data.suffix": ".txt",
    "data.num_eval_sequences": 2,
    "model.model.hidden_size": 128, "model.model.num_attention_heads": 2, "model.model.num_key_value_heads": 1,
    "model.model.intermediate_size": 48, "model.model.num_hidden_layers": 2, "loggers": "[csv]",
    "progress.peak_tflops": 1,
}  # fmt: skip


def curve(folder: Path, impl: str) -> Path:
    """Train, and return the file with the metrics."""
    flags = {**FLAGS, "model.impl": impl, "output_dir": folder / impl, "data.folder": write_text(folder / "text")}
    recipes = ROOT / "recipes" / "lightning"
    overlay = [f"--config={recipes / 'fp8.yaml'}"] if impl == "reference_fp8" else []
    train(recipes / "quickstart.yaml", *overlay, *(f"--{key}={flags[key]}" for key in flags), num_ranks=2)
    return newest_curve(folder / impl)


def test_training_in_fp8_follows_exact_attention(tmp_path: Path) -> None:
    curves = [curve(tmp_path, impl) for impl in ("reference", "reference_fp8")]
    exact, rounded = map(read_losses, curves)
    assert exact.keys() == rounded.keys() and len(exact) == 3
    assert all(0 < abs(rounded[step] - exact[step]) < 0.01 * exact[step] for step in exact)
    assert exact[2] < exact[0] and rounded[2] < rounded[0]
    (plain, _), (metrics, row) = ([line.split(",") for line in file.read_text().splitlines()[:2]] for file in curves)
    assert not any("fp8" in name for name in plain), "only the overlay measures it"
    found = dict(zip(metrics, row, strict=True))
    assert float(found["mfu_of_fp8_peak"]) == 0.5 * float(found["mfu"]) > 0
    assert float(found["fp8/saturated"]) == 0 and 0 <= float(found["fp8/flushed"]) < 0.05
    assert all(0.1 < float(found[f"fp8/amax_{name}"]) < 100 for name in "qkv")
