"""benchmarks/train_steps.py: Qwen3-8B's recipe scaled down by flags, on two gloo processes of the CPU, bf16-mixed.

A CPU's step is not traced; tests/unit/test_device_time.py has what is made of a trace.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from benchmarks.device_time import IDLE
from benchmarks.train_steps import Step, StepTimes, line, plans, schedule
from ringflash.commands.cli import main as ringflash
from ringflash.huggingface.flops import MatmulSizes, training_flops
from ringflash.memory import Memory
from tests.helpers.plans import model_of, read_once  # noqa: F401, a fixture
from tests.recipes.launching import ROOT, run_ranks
from tests.recipes.test_8b_recipes import SMALL

FLAGS = {
    **{f"model.model.{name}": value for name, value in SMALL.items()},
    "trainer.strategy.init_args.context_parallel_size": 2, "model.memory.mlp_tile_tokens": 40, "loggers": "[csv]",
    "model.model.head_dim": 64,
}  # fmt: skip


def test_steps_of_two_lengths(tmp_path: Path) -> None:
    """Every step is there with its length, and losses are those of a model that knows nothing."""
    recipe = ROOT / "recipes" / "lightning"
    flags = [f"--{key}={value}" for key, value in FLAGS.items()]
    output = run_ranks(
        "benchmarks.train_steps", "--lengths", "192,384", "--warm_up", "96", "--waits", "--document_tokens", "100",
        "--attention", "reference,reference_fp8_all",
        "--json", tmp_path / "results", "--output_dir", tmp_path / "run",
        "--config", recipe / "qwen3_8b_pretrain.yaml", "--config", recipe / "1m_cp8_8gpus.yaml", *flags, num_ranks=2,
    )  # fmt: skip
    result = json.loads((tmp_path / "results").read_text())
    steps = result["steps"]
    order = (("warm_up", 96), ("timed", 192), ("waits", 192), ("timed", 384), ("waits", 384))
    kernels = ("reference", "reference_fp8_all")
    want = [(*pair, kernel) for pair in order for kernel in kernels]
    want.insert(2, want[1])
    assert [(step["kind"], step["seqlen"], step["attention"]) for step in steps] == want
    assert all(5.0 < step["loss"] < 6.0 for step in steps)  # log(257) is 5.55
    assert all(step["seconds"] > 0 and math.isfinite(step["grad_norm"]) for step in steps)
    assert [step["exposed_communication_ms"] > 0 for step in steps if step["kind"] == "waits"] == [True] * 4
    assert not any("parts" in step or step["mfu_percent"] is not None for step in steps) and result["plans"] == {}
    assert (result["ranks"], result["memory"]["offload_checkpoints"]) == (2, True)
    model, windows = model_of(result["model"])
    counted = MatmulSizes(model.matmul_parameters, model.mean_size)
    for step in steps:
        assert step["tokens_per_second_per_gpu"] * 2 * step["seconds"] == pytest.approx(step["seqlen"])
        bounds = {96: [0, 96], 192: [0, 100, 192], 384: [0, 100, 200, 300, 384]}[step["seqlen"]]
        flops = training_flops(counted, windows, bounds)
        assert step["tflops_per_gpu"] * 2e12 * step["seconds"] == pytest.approx(flops)
    assert all(line(step) in output for step in steps)


def test_a_trace_without_a_device_is_all_idle() -> None:
    times = StepTimes([], None)
    times._trace = times._tracing.enter_context(profile(activities=[ProfilerActivity.CPU]))
    torch.ones(3).sum()
    found = times._traced(2.0)
    assert found["parts"].pop(IDLE) == 2.0 and not any(found["parts"].values()) and found["kernels"] == []
    assert times._trace is None


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize(("name", "tile"), [("qwen3_8b", 8192), ("qwen3_30b_a3b", 0)])
def test_plans_equal_the_commands(name: str, tile: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a GPU that it knows; of others and of other precisions there are none."""
    recipe = ROOT / "recipes" / "lightning" / f"{name}_pretrain.yaml"
    overlay = tmp_path / "few_layers.yaml"
    overlay.write_text(yaml.safe_dump({"model": {"model": {"num_hidden_layers": 4}}}))
    config = {**yaml.safe_load(recipe.read_text())["model"]["model"], "num_hidden_layers": 4}
    job: dict[str, Any] = {"config": config, "cp_size": 4, "dp_size": 1, "precision": "bf16-mixed"}
    memory = Memory("attention_kept", offload_checkpoints=True, mlp_tile_tokens=tile, liger=True)
    found = plans([1 << 17, 1 << 19], "NVIDIA H200", memory=memory, **job)
    for seqlen in (1 << 17, 1 << 19):
        flags = ["--seqlen", str(seqlen), "--gpus", "4", "--model.memory.offload_checkpoints", "true", "--json"]
        assert ringflash(["plan", str(recipe), str(overlay), *flags]) in (0, 1)  # fits or not
        want = json.loads(capsys.readouterr().out)
        assert found[str(seqlen)] == {name: want[name] for name in ("step_seconds", "memory_bytes", "memory_at", "mfu")}
    documents = plans([1 << 17], "NVIDIA H200", memory=memory, document_tokens=1 << 12, **job)[str(1 << 17)]
    seconds = [plan["step_seconds"]["attention forward"] for plan in (documents, found[str(1 << 17)])]
    assert seconds[0] == pytest.approx(seconds[1] * ((1 << 12) + 1) / ((1 << 17) + 1))
    assert plans([1 << 17], "CPU", memory=memory, **job) == {}
    assert plans([1 << 17], "NVIDIA H200", memory=memory, **{**job, "precision": "32-true"}) == {}


def test_schedule() -> None:
    """The second step of the warm-up and the last of each length are traced."""
    assert schedule("8x2,16", 4, waits=True) == [
        Step(4, "warm_up"), Step(4, "warm_up", traced=True),
        Step(8, "timed"), Step(8, "timed", traced=True), Step(8, "waits"),
        Step(16, "timed", traced=True), Step(16, "waits"),
    ]  # fmt: skip
    assert len(schedule("8x2,16", 4, waits=False)) == 5
    both = [Step(8, "timed", traced, kernel) for traced in (False, True) for kernel in ("hopper", "hopper_fp8_all")]
    assert schedule("8x2", 4, False, ["hopper", "hopper_fp8_all"])[3:] == both


@pytest.mark.parametrize("lengths", ["8k", "8x0", "", "8,x2", "8xmany"])
def test_other_schedules_are_refused(lengths: str) -> None:
    with pytest.raises(ValueError, match="lengths must be TOKENS or TOKENSxSTEPS with commas, got"):
        schedule(lengths, 4, waits=False)
