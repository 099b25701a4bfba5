"""Ranks, kernel and dtype of this tier, its worker pool, and the table of errors it writes.

    pytest tests/multi_gpu --ranks 2 --impl flash2 --dtype bfloat16 --transport copy_engine --ratios ratios.json

`--backend gloo --impl reference` runs the same on the CPU, to check the tests themselves. `--ranks 8 --share-gpus` runs
eight ranks on the GPUs that there are (tests/helpers/shared_gpu.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from benchmarks.environment import describe, result_text
from ringflash.testing.tolerance import Ratio
from tests.helpers.pool import Pool


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of this tier."""
    parser.addoption("--ranks", type=int, default=2, help="processes, one GPU each")
    parser.addoption("--share-gpus", action="store_true", help="more ranks than GPUs: exact, but slow")
    parser.addoption("--impl", default="flash2", help="kernel: one of ringflash_kernels.IMPLS")
    parser.addoption("--dtype", default="bfloat16", help="dtype of q, k and v")
    parser.addoption("--backend", default="nccl", help="nccl, or gloo for the CPU")
    parser.addoption("--transport", default=None, help="of test_ring_on_gpus; default the backend's messages")
    parser.addoption("--random-calls", type=int, default=40, help="how many seeds of test_random_calls")
    parser.addoption("--ratios", type=Path, default=None, help="JSON file for the errors over their budgets")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Seeds of random calls."""
    if "random_seed" in metafunc.fixturenames:
        metafunc.parametrize("random_seed", range(metafunc.config.getoption("--random-calls", 40)))


class Setup(NamedTuple):
    """Values of the options."""

    ranks: int
    impl: str
    dtype: str
    backend: str
    shared: bool = False
    transport: str = "nccl"

    @property
    def patience(self) -> float:
        """Factor of all limits of time."""
        return 4.0 if self.shared else 1.0


class Table:
    """Largest error over budget, by case and tensor, over all ranks and chunks."""

    def __init__(self) -> None:
        self.cases: dict[str, dict[str, dict[str, float]]] = {}

    def add(self, case: str, per_rank: list[list[Ratio]]) -> list[Ratio]:
        """Enter one case; return its ratios on all ranks."""
        spent = [ratio for ratios in per_rank for ratio in ratios]
        for ratio in spent:
            worst = self.cases.setdefault(case, {}).setdefault(ratio.name, {"max": 0.0, "mean": 0.0})
            worst["max"], worst["mean"] = max(worst["max"], ratio.maximum), max(worst["mean"], ratio.mean)
        return spent

    def worst(self) -> dict[str, dict[str, float | str]]:
        """Return by tensor the largest ratios of all cases and the case of the largest maximum."""
        result: dict[str, dict[str, float | str]] = {}
        for name in sorted({name for tensors in self.cases.values() for name in tensors}):
            held = {case: tensors[name] for case, tensors in self.cases.items() if name in tensors}
            case = max(held, key=lambda key: held[key]["max"])
            result[name] = {"max": held[case]["max"], "mean": max(x["mean"] for x in held.values()), "case": case}
        return result


@pytest.fixture(scope="session")
def setup(request: pytest.FixtureRequest) -> Setup:
    """The options, if this machine has the GPUs for them; the defaults where pytest was started above this folder."""
    option = request.config.getoption
    ranks, backend, num_gpus = option("--ranks", 2), option("--backend", "nccl"), torch.cuda.device_count()
    few = backend == "nccl" and num_gpus < ranks
    if few and not (num_gpus and option("--share-gpus", False)):
        pytest.skip(f"needs {ranks} GPUs, found {num_gpus}; --share-gpus makes do with one")
    return Setup(
        ranks, option("--impl", "flash2"), option("--dtype", "bfloat16"), backend, few,
        option("--transport", None) or backend,
    )  # fmt: skip


@pytest.fixture(scope="session")
def pool(setup: Setup) -> Iterator[Pool]:
    """One process a GPU, or several."""
    pool = Pool(setup.ranks, backend=setup.backend, timeout_s=60, patience=setup.patience)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def table(setup: Setup, request: pytest.FixtureRequest) -> Iterator[Table]:
    """Collects ratios; written when the session ends, also of cases that failed."""
    table = Table()
    yield table
    path = request.config.getoption("--ratios", None)
    if path is not None:
        head = {**describe(), **setup._asdict(), "num_cases": len(table.cases)}
        # Tables show each case of a short list only; thousands of lines that are not read are not kept.
        cases = {"cases": table.cases} if len(table.cases) <= 50 else {}
        path.write_text(result_text({**head, "worst": table.worst(), **cases}))
