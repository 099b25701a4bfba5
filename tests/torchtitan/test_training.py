"""torchtitan's own Trainer on a ring equals its own one-process run. CPU, gloo, 2 and 4 processes, fp64.

Every run of a model starts from the same parameters and reads the same four rows a step, whatever its parallelism. One
combination of each kind is run; torchtitan's flex attention is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringflash.testing.tolerance import assert_close
from tests.recipes.launching import run_ranks

pytestmark = pytest.mark.timeout(900)

Train = Callable[..., dict[str, torch.Tensor]]

LLAMA = {"model": "llama3", "validate": True}
MODELS = {
    "qwen3": {"model": "qwen3", "steps": 1},  # norms of queries and keys, grouped heads
    "deepseek_v3": {"model": "deepseek_v3", "steps": 1},  # latent attention, experts
    "gpt_oss": {"model": "gpt_oss", "flavor": "gpt_oss_debugmodel_flex", "steps": 1},  # sinks, windows, experts
}
BOTH = {"override": ["ring_attention", "keep_attention"]}
# By name: number of ranks, and what differs from one process. cp times tp, pp and replicas leaves ranks for FSDP.
RINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "validation": (2, {"cp": 2}),
    "contiguous": (2, {"cp": 2, "balancer": None}),
    "full_checkpoints": (2, {"cp": 2, "checkpointing": "full"}),
    "accumulation": (2, {"cp": 2, "rows": 1, "validate": False}),
    "full_dtensor": (2, {"cp": 2, "backend": "full_dtensor", "validate": False}),
    "four": (4, {"cp": 4}),
    "fsdp": (4, {"cp": 2, "rows": 2, "checkpointing": "selective", **BOTH}),
    "hsdp": (4, {"cp": 2, "rows": 2, "replicate": 2}),
    "tensor_parallel": (4, {"cp": 2, "tp": 2}),
    "pipeline": (4, {"cp": 2, "pp": 2, "validate": False}),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains on a number of ranks, and returns losses, gradients and parameters."""
    # Only in this environment, as torchtitan.
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("torchtitan")
    count = 0

    def run(num_ranks: int, case: dict[str, Any]) -> dict[str, torch.Tensor]:
        nonlocal count
        count += 1
        out = folder / f"{count}.safetensors"
        case = {"first": str(folder / f"{case['model']}.first"), **case}
        run_ranks("tests.torchtitan.train", out, json.dumps(case), num_ranks=num_ranks, timeout_s=600)
        return {name: x.reshape(1, -1) for name, x in load_file(out).items()}

    return run


@pytest.fixture(scope="module")
def llama(train: Train) -> dict[str, torch.Tensor]:
    """Return a run on one process, which the rings are compared with."""
    return train(1, LLAMA)


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_equals_one_process(name: str, llama: dict[str, torch.Tensor], train: Train) -> None:
    num_ranks, differs = RINGS[name]
    got = train(num_ranks, {**LLAMA, "override": ["ring_attention"], **differs})
    assert llama.keys() - got.keys() == ({"validation"} if "validate" in differs else set())
    assert_close(got, llama)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_one_process(name: str, train: Train) -> None:
    want = train(1, MODELS[name])
    got = train(2, {**MODELS[name], "cp": 2, "override": ["ring_attention"]})
    assert got.keys() == want.keys()
    assert_close(got, want)


def test_a_run_resumes_on_a_larger_ring(tmp_path: Path, llama: dict[str, torch.Tensor], train: Train) -> None:
    case = {**LLAMA, "override": ["ring_attention"], "folder": str(tmp_path)}
    train(2, {**case, "cp": 2})
    got = train(4, {**case, "cp": 4, "load_step": 1})
    assert got["losses"].shape == (1, 1)
    want = {"losses": llama["losses"][:, 1:]} | {name: x for name, x in llama.items() if name.startswith("parameter")}
    assert_close({name: got[name] for name in want}, want)
