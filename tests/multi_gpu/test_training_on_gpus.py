"""Training on GPUs: what the README offers, a step at a time, against the same step on one GPU. Two GPUs or more.

Lightning, a module of one's own, DeepSpeed and Liger, and what saves memory. A job for each, of processes of their
own, since process groups and patched libraries stay; all at once on the same GPUs, since most of their time is
start-up. What a rank found is written part by part (training_worker.py): a part that fails or hangs does not hide the
ones before it.

In fp64 a step equals that of one process to 1e-11. In bf16 the budget is the house's (ringflash/testing/tolerance.py):
twice what one process loses to fp64 by plain eager attention in the same precision, and one eps of the largest value,
for every parameter, at the maximum and in the mean; DeepSpeed has no fp64, and is compared in fp32 too. On the CPU
(`--backend gloo --impl reference`) a smaller model shows that the tests themselves are right.
"""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import Ranks
from tests.helpers.shared_gpu import num_gpus, visible
from tests.helpers.tolerance import Ratio
from tests.multi_gpu.conftest import Setup, Table
from tests.recipes.test_wrap_lightning import write_changed

pytestmark = pytest.mark.multi_gpu

LIMIT_S = 120.0  # of all jobs together; a rank that is still at work then shows where
PRECISIONS = ("64-true", "bf16-mixed")
STAGES = ("zero0", "zero1", "zero2", "zero3")
NEEDED = {"deepspeed": "deepspeed", "liger": "liger_kernel"}
STEPS = [
    *(("lightning", f"{precision} {ranks}") for precision in PRECISIONS for ranks in ("cp", "dp x cp")),
    ("lightning", "bf16-mixed cp over nccl"),
    *(("own", f"{precision} cp") for precision in PRECISIONS),
    *(("memory", f"{precision} saving") for precision in PRECISIONS),
    ("liger", "bf16-mixed liger"),
    *(("deepspeed", f"fp32 {stage}") for stage in (*STAGES, "zero2_offload", "zero3_offload")),
    *(("deepspeed", f"bf16 {stage}") for stage in STAGES),
    *(("deepspeed", f"{dtype} {stage} through lightning") for dtype in ("fp32", "bf16") for stage in STAGES[2:]),
]

Found = dict[str, Any]


class Job:
    """The ranks of one job, started at once."""

    def __init__(self, name: str, setup: Setup, out: Path) -> None:
        self.setup, self.out = setup, out
        on_gpus = setup.backend == "nccl"
        task = {
            "job": name, "out": str(out), "device_type": "cuda" if on_gpus else "cpu", "impl": setup.impl,
            "stacks_at": time.time() + LIMIT_S * setup.patience - 8,
        }  # fmt: skip
        write_changed(out)
        gpus = visible(setup.ranks) if on_gpus else ""
        environment = {"CUDA_VISIBLE_DEVICES": gpus, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if not on_gpus:
            environment["DS_ACCELERATOR"] = "cpu"
        self.ranks = Ranks(
            "tests.multi_gpu.training_worker", json.dumps(task), num_ranks=setup.ranks,
            ranks_per_host=num_gpus(setup.ranks) if on_gpus else None,
            processes=multiprocessing.get_context("spawn") if on_gpus else None, **environment,
        )  # fmt: skip
        self._output: str | None = None
        self._deadline = time.monotonic() + LIMIT_S * setup.patience

    def output(self) -> str:
        """Output of the ranks, once all have ended."""
        if self._output is None:
            try:
                self._output = self.ranks.finish(max(1.0, self._deadline - time.monotonic()))
            except AssertionError as failure:
                self._output = str(failure)
            (self.out / "output").write_text(self._output)
        return self._output

    def found(self, part: str) -> list[Found]:
        """Return what each rank found in a part; fail if a rank found nothing."""
        output = self.output()
        files = [self.out / f"{rank}.json" for rank in range(self.setup.ranks)]
        ranks = [json.loads(file.read_text()).get(part, {}) if file.exists() else {} for file in files]
        errors = [
            f"rank {i}: {rank.get('error', 'nothing')}"
            for i, rank in enumerate(ranks)
            if "seconds" not in rank or "error" in rank
        ]
        assert not errors, "\n".join([f"{part} must end on every rank, got", *errors, "all that was printed:", output])
        return ranks


@pytest.fixture(scope="module")
def jobs(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Jobs by name, if their library is installed."""
    names = ["lightning", "own", "memory"] + [
        name for name, needed in NEEDED.items() if importlib.util.find_spec(needed)
    ]
    if setup.backend != "nccl" and "liger" in names:
        names.remove("liger")
    jobs: dict[str, Job] = {}
    try:
        for name in names:
            jobs[name] = Job(name, setup, tmp_path_factory.mktemp(name))
        yield jobs
    finally:
        for job in jobs.values():
            job.ranks.close()


def job_of(jobs: dict[str, Job], name: str, setup: Setup) -> Job:
    """A job, or the reason why there is none."""
    if name not in jobs:
        pytest.skip(f"{NEEDED[name]} is not installed" if setup.backend == "nccl" else f"{name} needs GPUs")
    return jobs[name]


@pytest.mark.parametrize("name, part", STEPS, ids=lambda x: x.replace(" ", "-"))
def test_a_step_equals_one_process(jobs: dict[str, Job], setup: Setup, table: Table, name: str, part: str) -> None:
    """Gradients before clipping, weights after a clipped step of SGD, the loss; half of a gradient would be seen."""
    job = job_of(jobs, name, setup)
    if "dp x cp" in part and setup.ranks != 4:
        pytest.skip("two data ranks of two context ranks are four")
    if "nccl" in part and setup.backend != "nccl":
        pytest.skip("NCCL needs GPUs")
    ranks = job.found(part)
    spent = [[Ratio(key, 0, x, x) for key, (x, _) in rank["spent"].items()] for rank in ranks]
    table.add(f"training {name} {part}", spent)
    shown = "\n".join(map(str, ranks))
    assert all(x <= 1 for rank in ranks for x, _ in rank["spent"].values()), shown
    assert all(rank["half_a_gradient"] > 1 for rank in ranks), shown
    if "bf16" in part:
        assert all(kernel.startswith(setup.impl) for rank in ranks for kernel in rank["kernels"]), shown


def test_offloading_changes_no_bit(jobs: dict[str, Job]) -> None:
    """Checkpoints through pinned memory and side streams: the gradients of a run without them."""
    ranks = jobs["memory"].found("offloading_changes_no_bit")
    assert all(rank["differences"] == {} for rank in ranks), ranks


def test_drawn_parameters_are_those_of_one_process(jobs: dict[str, Job]) -> None:
    """Equal to the bit, on every rank."""
    ranks = jobs["memory"].found("drawn")
    assert all(rank["differences"] == {} for rank in ranks), ranks
    assert all(rank["sums"] == ranks[0]["sums"] for rank in ranks), ranks


def test_exposed_communication_changes_nothing(jobs: dict[str, Job]) -> None:
    ranks = jobs["memory"].found("exposed")
    for rank in ranks:
        assert len(rank["milliseconds"]) == 3 and all(math.isfinite(x) and x >= 0 for x in rank["milliseconds"]), ranks
        assert rank["measured"] == rank["plain"], ranks
