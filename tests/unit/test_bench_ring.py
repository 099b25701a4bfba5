"""benchmarks/bench_ring.py from end to end at toy sizes: two CPU processes over gloo. Its structure, and no speed.

Without torchrun, which `ringflash bench` starts it by (test_bench_command.py).
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from benchmarks.bench_ring import ROWS, TOY, bench, is_asked_for, shares
from benchmarks.ring_contenders import CONTENDERS, IDEALS, IDEALS_BY_HEADS, PROBES, Setting
from tests.recipes import launching


def written_by(folder: Path, *arguments: str) -> dict[str, Any]:
    """Results of two ranks."""
    command = ("--toy", *arguments, "--json", folder / "ring.json")
    launching.run_ranks("benchmarks.bench_ring", *command, num_ranks=2, timeout_s=100)
    return json.loads((folder / "ring.json").read_text())


def test_rows_and_figures(tmp_path: Path) -> None:
    written = written_by(tmp_path, "--probes", "--rounds", "2")
    assert written["ranks"] == 2 and "torch" in written["environment"]
    assert [result["row"] for result in written["results"]] == [str(row) for row in TOY for _ in range(2)]
    for result in written["results"]:
        layouts = ("striped", "balanced") if "documents" in result["row"] else ()
        ours = {"ringflash, gloo", *(f"ringflash, gloo, {layout}" for layout in layouts)}
        assert set(result["percent"]) == {*ours, "Ulysses", "kernels alone"}
        assert set(result["ms"]) | set(result["left_out"]) == set(IDEALS) | set(CONTENDERS) | set(PROBES)
        figures = [result["ideal_ms"], *result["ms"].values(), *result["percent"].values()]
        assert all(math.isfinite(x) and x > 0 for x in figures)
    # Areas over gloo are those of one call; the gradients of one head that arrive, of a chunk, outlive it.
    assert written["results"][0]["transport_bytes"] == {"ringflash, gloo": 2 * 64 * 64 * 4}


def test_rows_in_fp8(tmp_path: Path) -> None:
    """Ours and the ideal are rounded, what cannot be is left out, and results say so in their name."""
    fp8 = ("--impl", "reference_fp8_scores")
    for result in written_by(tmp_path, "--probes", "--rows", "causal", "--rounds", "1", *fp8)["results"]:
        assert result["row"] == f"{TOY[0]}, reference_fp8_scores"
        assert set(result["percent"]) == {"ringflash, gloo", "Ulysses"}
        assert result["left_out"]["one device, flash-attn-4"] == "does not compute in the chosen impl"
        assert result["transport_bytes"] == {"ringflash, gloo": 2 * 64 * 64 * 4}  # as above


def test_rows_are_named_as_their_results() -> None:
    """A pattern that is found in no name asks for nothing."""
    assert [is_asked_for(row, "causal, forward$") for row in TOY] == [True, *[False] * (len(TOY) - 1)]
    assert all(is_asked_for(row, r"forward \+ backward$") for row in TOY)
    assert not any(is_asked_for(row, "causal$") for row in TOY)


def test_the_ideal_by_heads(tmp_path: Path) -> None:
    for result in written_by(tmp_path, "--ideal", "heads", "--rows", "full", "--rounds", "1")["results"]:
        assert result["ideal_ms"] == result["ms"]["one device, ringflash, a share of the heads"]
        assert set(result["percent"]) == {"ringflash, gloo", "Ulysses"}


def test_heads_that_cannot_be_shared_out_are_no_ideal() -> None:
    """8 KV heads over 3 ranks."""
    group = cast(dist.ProcessGroup, SimpleNamespace(size=lambda: 3))
    setting = Setting(ROWS[0], group, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="must be there as the ideal, got .*32/8 heads over 3 ranks.*--ideal whole"):
        bench(setting, dict(IDEALS_BY_HEADS), 1, 1.0)


def test_ideal_is_the_faster_kernel_by_devices() -> None:
    got = shares({"one device, ringflash": 80.0, "one device, flash-attn-4": 64.0, "Ulysses": 10.0}, 8)
    assert got["ideal_ms"] == 8.0 and got["percent"] == {"Ulysses": pytest.approx(80.0)}
    got = shares({"one device, flash-attn-4, a share of the heads": 8.0, "Ulysses": 10.0}, 8)
    assert got["ideal_ms"] == 8.0 and got["percent"] == {"Ulysses": pytest.approx(80.0)}
