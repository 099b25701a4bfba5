"""A tier of its own: it needs torchtitan, and the torch that torchtitan needs (`make test-torchtitan`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, which `make test` leaves out, and skip them without torchtitan."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.frameworks)
            item.add_marker(pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"))
