"""Plans against measured steps, as the committed results have them, and against docs/plan.md. One process, no GPU."""

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.train_steps import document_bounds
from ringflash.commands.plan.command import visible_fraction
from ringflash.commands.plan.job import GIB, GPUS, Machine, TrainingJob
from ringflash.commands.plan.memory import layer_input_bytes, worst_moment
from ringflash.commands.plan.search import longest_sequence
from ringflash.commands.plan.timing import step_time
from tests.helpers.jobs import HOST, JOB
from tests.helpers.plans import model_of
from tests.recipes.launching import ROOT


def _is_run(result: Any) -> bool:
    """Return whether a file of results is of benchmarks/train_steps.py."""
    return isinstance(result, dict) and {"steps", "ranks", "memory", "model"} <= result.keys()


MEASURED = [
    (path.stem, run, step)
    for path in sorted((ROOT / "benchmarks" / "results").glob("*_*xh200.json"))
    if _is_run(run := json.loads(path.read_text()))
    for step in {step["seqlen"]: step for step in run["steps"]}.values()  # the last of each length
]


def _is_settled(name: str, step: dict[str, Any]) -> bool:
    """Return False for a short step that was the first of its run, one tile, or waited for a host."""
    unsettled = (
        "fp8_steps_float8_1xh200", "fp8_steps_eight_layers_2xh200", "fp8_steps_eight_layers_float8_2xh200",
    )  # fmt: skip
    return name not in unsettled or step["seqlen"] > 100_000


def _waited_for_copies(run: dict[str, Any]) -> bool:
    """Return whether checkpoints left and returned one at a time, with no work meanwhile, as they did once."""
    return run["memory"]["offload_checkpoints"] and "document_tokens" not in run


def _no_longer(run: dict[str, Any], step: dict[str, Any]) -> float:
    """Seconds of a step that its commit spent on what is left out or hidden since.

    These are copies of checkpoints, and products of tiles, by their part of all, in millions of parameters by layer.
    """
    parts, layers = step["parts"], run["model"]["num_hidden_layers"]
    if parts["idle"] > 0.15 * step["seconds"] and step["seqlen"] < 100_000:
        return 0.0  # the host's pace, with work left over
    if not _waited_for_copies(run):
        return 0.0
    mlp, others = 151, 4 * 42 + 3 * 622 / layers
    return parts["host copies"] + parts["linear"] * (mlp + mlp / 3) / (5 * mlp + others)


def _planned(run: dict[str, Any], step: dict[str, Any]) -> tuple[TrainingJob, Machine]:
    seqlen = step["seqlen"]
    named = step.get("attention") or "auto"
    impl = named.replace(":fp8_", "_").replace(":fp8", "_all")  # "hopper_fp8:fp8" in earlier results
    bounds = document_bounds(seqlen, run.get("document_tokens", 0))
    job = TrainingJob(
        model=model_of(run["model"])[0], seqlen=seqlen, cp_size=run["ranks"], precision=run["precision"],
        visible_fraction=visible_fraction(seqlen, [None], bounds), impl=impl,
        float8="tensorwise" if "--model.float8 tensorwise" in run["command"] else None,
        **{**run["memory"], "liger": bool(run["memory"]["liger"]) and run.get("liger-kernel") != "none"},
    )  # fmt: skip
    return job, replace(HOST, num_gpus=run["ranks"])


def _held_gib(run: dict[str, Any], step: dict[str, Any]) -> float:
    """Memory of torch's allocator and the transport, by the plan."""
    job, machine = _planned(run, step)
    moment, parts = worst_moment(job, machine)
    planned = sum(value for name, value in parts.items() if name not in ("fragmentation", "CUDA and libraries"))
    if moment in ("the loss", "the last layer's backward") and _waited_for_copies(run):
        planned -= layer_input_bytes(job)  # which waits for its copy, or arrives early
    return planned / GIB


def _seconds(run: dict[str, Any], step: dict[str, Any]) -> float:
    """Measured seconds without what is left out since, and in long steps without what the device was idle."""
    return step["seconds"] - _no_longer(run, step) - (step["parts"]["idle"] if step["seqlen"] >= 100_000 else 0.0)


@pytest.mark.parametrize(
    ("name", "run", "step"), [pytest.param(*case, id=f"{case[0]}-{case[2]['seqlen']}") for case in MEASURED]
)
def test_memory_and_time_are_those_of_measured_steps(name: str, run: dict[str, Any], step: dict[str, Any]) -> None:
    """Within 4% of what was held at the peak of a step on H200s, and within 15% of its time."""
    assert _held_gib(run, step) == pytest.approx(step["allocated_gib"] + step["areas_gib"], rel=0.04)
    if not _is_settled(name, step):
        return
    planned = step_time(*_planned(run, step))
    assert planned.step == pytest.approx(_seconds(run, step), rel=0.15)
    idle, waits = step["parts"]["idle"] / step["seconds"], planned.parts["waiting for the host"] > 0
    assert waits if step["seqlen"] < 100_000 and idle > 0.15 else not waits or idle > 0.05


def test_page_compares_steps_with_present_plans() -> None:
    """Planned over measured: the range of each kind of step."""
    apart: dict[str, list[tuple[float, float]]] = {}
    for name, run, step in MEASURED:
        if _is_settled(name, step):
            layers, experts = run["model"]["num_hidden_layers"], "num_experts" in run["model"]
            kind = "layers of Qwen3-30B-A3B" if experts else f"{layers} layers of Qwen3-8B"
            held, seconds = _held_gib(run, step), step_time(*_planned(run, step)).step
            measured = step["allocated_gib"] + step["areas_gib"], _seconds(run, step)
            apart.setdefault(kind, []).append((held / measured[0] - 1, seconds / measured[1] - 1))
    rows = [
        f"| {kind} | "
        + " | ".join(f"{100 * min(x):+.0f} to {100 * max(x):+.0f}%" for x in zip(*found, strict=True))
        + " |"
        for kind, found in apart.items()
    ]
    page = (ROOT / "docs" / "plan.md").read_text()
    assert len(rows) == 3 and [row for row in rows if row not in page] == []


def test_the_page_says_what_fits() -> None:
    """Thousands of tokens by number and kind of GPU, and precision."""
    page, best = (ROOT / "docs" / "plan.md").read_text(), replace(JOB, offload_checkpoints=True, liger=True)
    rows = []
    for num_gpus in (1, 2, 4, 8, 16, 32, 64):
        lengths = [
            longest_sequence(replace(best, cp_size=num_gpus, precision=precision), Machine(GPUS[gpu], num_gpus)) // 1000
            for precision in ("bf16-mixed", "bf16-true")
            for gpu in ("H100", "H200")
        ]
        rows.append(f"| {num_gpus} | {' | '.join(f'{length:,}' if length else 'none' for length in lengths)} |")
    missing = [row for row in rows if row not in page]
    assert not missing, "\n".join(["put these rows into docs/plan.md", *rows])
