"""DeepSpeed's ZeRO 0 to 3 on data x context ranks against one process: gradients, weights, clipping, refusals.

Launches of two (1 x 2) and four (2 x 2) gloo processes on the CPU (deepspeed_worker.py) do all runs, each with a
folder of its own for what DeepSpeed compiles: nothing. Every test reads its part. Needs the deepspeed extra.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.launching import run_ranks, write_text

pytest.importorskip("deepspeed")

CONFIGS = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
CP_SIZE = 2
FP32_EPS = 2.0**-23

Found = dict[str, Any]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what DeepSpeed compiles."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Results of each rank."""
    folder, out = write_text(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("found")
    environment = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(compiled)}
    run_ranks("tests.recipes.deepspeed_worker", folder, out, str(CP_SIZE), num_ranks=request.param, **environment)
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("quantity", ["gradient", "weight"])
def test_training_equals_one_process(ranks: list[Found], name: str, quantity: str) -> None:
    """fp32 within the house's budget of every parameter: twice what one fp32 process loses to fp64, and one eps.

    Weights are those after a step of SGD clipped to a norm of 0.05, far below the gradient's: the update has the
    scale of the weights, and an error of it is not hidden.
    """
    parts = [rank[name][quantity] for rank in ranks]
    assert max(parts) <= 1.0, parts


def test_a_loss_without_cp_size_would_be_seen(ranks: list[Found]) -> None:
    """The negative control: gradients too small by cp_size are far outside the budget."""
    assert all(rank["negative_control"]["gradient"] > 1e3 for rank in ranks)


def test_nothing_is_clipped_unless_the_config_says_so(ranks: list[Found]) -> None:
    """DeepSpeed's own default is a norm of 1."""
    assert all(rank["default_clipping"] == 0.0 for rank in ranks)


@pytest.mark.parametrize("name", CONFIGS[:4])
def test_lightning_equals_plain_deepspeed(ranks: list[Found], name: str) -> None:
    """Two clipped steps of AdamW over two batches each, to the bit; the logged norm is that before clipping.

    The norm: DeepSpeed sums n = 32,000 squares in fp32, each addition with a relative error below eps. Errors of
    either sign add up to sqrt(n) eps (all of one sign: n eps), before the root halves them.
    """
    if len(ranks) < 4:
        pytest.skip("one data rank: the trainer's part runs on the larger mesh")
    for rank in ranks:
        found = rank["lightning"][name]
        assert found["equal"]
        assert found["norm"] > 0.05 and found["norm_error"] <= math.sqrt(32_000) * FP32_EPS
        assert found["loss"] == ranks[0]["lightning"][name]["loss"]


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_are_those_of_the_trainer_and_of_the_module(ranks: list[Found], name: str) -> None:
    """Four backwards by hand before each step, clipped; and accumulated by two: an epoch's third batch is a step, too.

    Each of up to four steps of fp32 rounds some ten times: gradients, their norm, the clipping, the update.
    """
    if len(ranks) > 2:
        pytest.skip("runs on the smaller mesh")
    assert all(error <= 40 * FP32_EPS for rank in ranks for error in rank["stepping"][name].values()), ranks


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_checkpoints_are_evaluated_and_continued(ranks: list[Found], name: str) -> None:
    """With another gradient_clip_val than the checkpoint's; at stage 1 with an average of the weights, kept in it."""
    if len(ranks) > 2:
        pytest.skip("runs on the smaller mesh")
    assert all(error <= 80 * FP32_EPS for rank in ranks for error in rank["resuming"][name].values()), ranks


def test_a_checkpoint_of_another_stage_is_refused(ranks: list[Found]) -> None:
    """DeepSpeed fails without a word."""
    if len(ranks) > 2:
        pytest.skip("runs on the smaller mesh")
    for rank in ranks:
        for message, stage in zip(rank["other_stage"], ("1 or 2", "3"), strict=True):
            assert message.startswith("ckpt_path must be a checkpoint of this run's ZeRO stage, got ")
            assert f"the parts of stage {stage}; train at that stage" in message


def test_the_configs_scheduler_is_followed_where_the_module_makes_none(ranks: list[Found]) -> None:
    """A linear warm-up over four steps, under an optimizer of the module's; through Lightning."""
    if len(ranks) < 4:
        pytest.skip("one data rank: the trainer's part runs on the larger mesh")
    for rank in ranks:
        assert rank["rates"] == pytest.approx([0.0, 0.025, 0.05, 0.075])


def test_data_ranks_have_as_many_batches(ranks: list[Found]) -> None:
    """Otherwise some would wait for gradients that the others do not have; through Lightning."""
    if len(ranks) < 4:
        pytest.skip("one data rank: the trainer's part runs on the larger mesh")
    message = "data loaders must have as many batches on every rank, got [1] and [2]"
    assert all(rank["unequal_batches"].startswith(message) for rank in ranks)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mpu", "mpu must be None, got object"),
        ("mesh_param", "mesh_param must be None, got tuple"),
        ("sequence_parallel_size", "sequence_parallel_size must not be in the config, got 2"),
        ("train_batch_size", "train_batch_size must not be in the config, got 8"),
        ("ranks_differ", "all ranks of the group must make the same call, got steps_per_print 1 (rank 0)"),
        ("one_rank", "mpu must be None, got object"),
    ],
)
def test_wrong_calls_are_refused_on_every_rank(ranks: list[Found], name: str, message: str) -> None:
    """Also what one rank alone does wrong."""
    assert all(rank["refusals"][name].startswith(message) for rank in ranks), [x["refusals"][name] for x in ranks]


def test_nothing_is_compiled(ranks: list[Found], compiled: Path) -> None:
    """DeepSpeed alone compiles an operator when processes join, and needs g++ for it."""
    assert list(compiled.iterdir()) == []
