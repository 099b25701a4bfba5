"""The quickstart recipe with the overlay fp8.yaml, scaled down by flags: two gloo processes on the CPU, three steps.

Losses follow those in fp32, and are not the same. The metrics have MFU by both peaks, and what attention rounded.
torchao, whose import takes seconds, is in a separate folder of the environment (Makefile).
"""

import sys
from pathlib import Path

import pytest

from recipes.lightning.compare import newest_curve, read_losses
from tests.recipes.launching import ROOT, run_ranks, train, write_text

FLAGS = {
    "trainer.max_steps": 3, "trainer.num_sanity_val_steps": 0, "data.seqlen": 96, "data.suffix": ".txt",
    "data.num_eval_sequences": 2,
    "model.model.hidden_size": 128, "model.model.num_attention_heads": 2, "model.model.num_key_value_heads": 1,
    "model.model.intermediate_size": 48, "model.model.num_hidden_layers": 2, "loggers": "[csv]",
    "progress.peak_tflops": 1,
}  # fmt: skip


TORCHAO = Path(sys.prefix, "float8")
WHICH_LAYERS = """
import pytest, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from ringflash.lightning.float8 import multiply_in_float8

sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
with torch.device("meta"):
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, num_hidden_layers=1, **sizes))
names = list(model.state_dict())
with pytest.raises(ValueError, match="float8 must be one of tensorwise, .*, got 'fp4'; leave"):
    multiply_in_float8(model, "fp4", "cpu")
multiply_in_float8(model, "rowwise", "cpu")
assert list(model.state_dict()) == names
found = {name.split(".")[-1] for name, x in model.named_modules() if type(x).__name__ == "Float8Linear"}
assert found == {"q_proj", "k_proj", "v_proj", "o_proj"}, found
"""


def curve(folder: Path, impl: str, float8: str = "null") -> Path:
    """Train, and return the file with the metrics."""
    folder, flags = folder / f"{impl}_{float8}", {**FLAGS, "model.impl": impl, "model.float8": float8}
    flags |= {"output_dir": folder, "data.folder": write_text(folder.parent / "text")}
    recipes = ROOT / "recipes" / "lightning"
    overlay = [f"--config={recipes / 'fp8.yaml'}"] if impl == "reference_fp8_scores" else []
    arguments = (recipes / "quickstart.yaml", *overlay, *(f"--{key}={flags[key]}" for key in flags))
    train(*arguments, num_ranks=2, PYTHONPATH=f".:kernels:{TORCHAO}")
    return newest_curve(folder)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metrics of a run in fp32."""
    return curve(tmp_path_factory.mktemp("exact"), "reference")


def check_follows(rounded: Path, exact: Path) -> None:
    """Assert that the losses are within 1% of the exact ones, differ from each of them, and fall."""
    got, want = read_losses(rounded), read_losses(exact)
    assert got.keys() == want.keys() and len(want) == 3
    assert all(0 < abs(got[step] - want[step]) < 0.01 * want[step] for step in want)
    assert want[2] < want[0] and got[2] < got[0]


def first_row(metrics: Path) -> dict[str, str]:
    """Return the metrics of the first step by name."""
    names, row = (line.split(",") for line in metrics.read_text().splitlines()[:2])
    return dict(zip(names, row, strict=True))


def test_attention_in_fp8_follows_exact_attention(exact: Path, tmp_path: Path) -> None:
    rounded = curve(tmp_path, "reference_fp8_scores")
    check_follows(rounded, exact)
    assert not any("fp8" in name for name in first_row(exact)), "only the overlay measures it"
    found = first_row(rounded)
    assert float(found["mfu_of_fp8_peak"]) == 0.5 * float(found["mfu"]) > 0
    assert float(found["fp8/saturated"]) == 0 and 0 <= float(found["fp8/flushed"]) < 0.05
    assert all(0.1 < float(found[f"fp8/amax_{name}"]) < 100 for name in "qkv")


@pytest.mark.skipif(not TORCHAO.exists(), reason="make .venv/.ready installs torchao")
def test_linear_layers_in_fp8_follow_fp32(exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FSDP2, and layers that are checkpointed except for their attention."""
    monkeypatch.setitem(FLAGS, "model.memory.checkpointing", "attention_kept")
    rounded = curve(tmp_path, "reference", "rowwise")
    check_follows(rounded, exact)
    assert "mfu_of_fp8_peak" in first_row(rounded)


@pytest.mark.skipif(not TORCHAO.exists(), reason="make .venv/.ready installs torchao")
def test_linear_layers_that_tensor_cores_can_multiply(tmp_path: Path) -> None:
    """The output embedding and layers of 40 columns stay, and parameters keep their names."""
    (tmp_path / "which_layers.py").write_text(WHICH_LAYERS)
    run_ranks(tmp_path / "which_layers.py", num_ranks=1, PYTHONPATH=f".:kernels:{TORCHAO}")
