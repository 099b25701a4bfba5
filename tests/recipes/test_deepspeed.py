"""DeepSpeed's ZeRO 0 to 3 on data x context ranks against one process: gradients, weights, clipping, refusals.

Launches of two (1 x 2) and four (2 x 2) gloo processes on the CPU do all runs (deepspeed_worker.py, which says what
each part shows), each with a new folder for what DeepSpeed compiles: nothing. Needs the deepspeed extra.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.recipes.launching import assert_made, each_part, launch_parts, write_text

pytest.importorskip("deepspeed")

from ringflash.deepspeed.parameter_use import ParameterUse
from tests.recipes.deepspeed_worker import TESTS


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what DeepSpeed compiles."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def launches(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    folder = write_text(tmp_path_factory.mktemp("text"))
    environment = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(compiled)}
    return launch_parts(TESTS, "tests.recipes.deepspeed_worker", folder, tmp_path_factory, **environment)


@each_part(TESTS)
def test_on_ranks(launches: dict[int, list[dict[str, str]]], num_ranks: int, part: Callable[[Any], None]) -> None:
    assert_made(launches[num_ranks], part)


def test_nothing_is_compiled(compiled: Path) -> None:
    """DeepSpeed without ringflash compiles an operator when processes join, and needs g++ for it."""
    assert list(compiled.iterdir()) == []


def test_a_backward_after_one_that_failed_is_completed() -> None:
    """The failed one ends past the gradients of its layer, before zeros are filled in for the other."""
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    ParameterUse(layers, in_order=False)
    x = torch.ones(1, 2, requires_grad=True).clone()
    x.register_hook(mock.Mock(side_effect=OSError))
    with pytest.raises(OSError):
        layers[0](x).sum().backward()
    layers[0](x.detach()).sum().backward()
    got = [[None if p.grad is None else bool(p.grad.any()) for p in layer.parameters()] for layer in layers]
    assert got == [[True, True], [False, False]]
