"""Models as `ringflash plan` reads them, each once in a process: that of 30 billion parameters takes seconds."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from ringflash.commands.plan import model_shape

Read = tuple[model_shape.ModelShape, list[Any]]


@cache
def _model_of(config: str) -> Read:
    return model_shape.model_of(json.loads(config))


def model_of(config: Mapping[str, Any]) -> Read:
    """Read a model as the plan does."""
    return _model_of(json.dumps(config))


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command and benchmarks/train_steps.py read a model once."""
    monkeypatch.setattr("ringflash.commands.plan.command.model_of", model_of)
    monkeypatch.setattr("benchmarks.train_steps.model_of", model_of)
