"""Ranks without a launcher: their place and their output, and that a failure or a hang of one is an error. CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recipes.launching import run_ranks

PLACE = """
import json, os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # none has left while others still connect
place = [dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], dist.is_torchelastic_launched(), sys.argv[1]]
print(json.dumps(place) + "\\n", end="", flush=True)
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise ValueError("only here")
time.sleep(1000)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a module that ranks find."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(code: str) -> str:
        (tmp_path / "rank_module.py").write_text(code)
        return "rank_module"

    return make


def test_ranks_know_their_place(module) -> None:
    places = sorted(map(json.loads, run_ranks(module(PLACE), "argument", num_ranks=3).split("\n")[:-1]))
    assert places == [[rank, 3, str(rank), True, "argument"] for rank in range(3)]


def test_a_rank_that_fails_ends_the_others(module) -> None:
    with pytest.raises(AssertionError, match=r"exit statuses \[-9, 1\]:\n(.*\n)*ValueError: only here"):
        run_ranks(module(FAILS), num_ranks=2, timeout_s=60)


def test_ranks_that_hang_are_ended(module) -> None:
    with pytest.raises(AssertionError, match=r"exit statuses \[-9, -9\]:"):
        run_ranks(module("import time; time.sleep(1000)"), num_ranks=2, timeout_s=1)
