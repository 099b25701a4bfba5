"""Training on a 2 x 2 mesh of data and context against one process: gradients, clipping, weights, losses.

Four gloo processes on the CPU (strategy_worker.py) do all runs; every test reads its part.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.launching import run_ranks, write_text

RTOL_FP64 = 1e-11
WORLD_SIZE = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    folder, out = write_text(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("found")
    run_ranks("tests.recipes.strategy_worker", folder, out, num_ranks=WORLD_SIZE)
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("clipping", ["norm", "value", "lightning", "replicated"])
@pytest.mark.parametrize("quantity", ["gradient", "weight", "loss"])
def test_training_equals_one_process(ranks: list[dict[str, Any]], clipping: str, quantity: str) -> None:
    """fp64, three steps of AdamW: clipped by our norm, by value, and by Lightning's own hook."""
    errors = [rank[clipping][quantity] for rank in ranks]
    assert max(errors) <= RTOL_FP64, errors


@pytest.mark.parametrize("clipping", ["norm", "value", "replicated"])
def test_logged_norm_is_that_of_the_whole_gradient(ranks: list[dict[str, Any]], clipping: str) -> None:
    """Before clipping, over the shards of all ranks."""
    errors = [rank[clipping]["grad_norm"] for rank in ranks]
    assert max(errors) <= RTOL_FP64, errors


def test_copies_of_parameters_are_written_once(ranks: list[dict[str, Any]]) -> None:
    """Sharded over two ranks, and written as if over all; the checkpoint is that of any number of copies."""
    for rank in ranks:
        assert rank["replicated"]["placements"] == ["(Replicate(), Shard(dim=0))"]
        assert rank["replicated"]["read"] and rank["replicated"]["over_all"]
        assert rank["replicated"]["written"] == 1  # bytes in the files over those that the checkpoint refers to
        assert rank["refusal"]["copies"].startswith("replicate_size must divide the number of ranks (4), got 3; 1")


def test_gradients_were_large_enough_to_clip(ranks: list[dict[str, Any]]) -> None:
    """Else the comparison above would say nothing about clipping."""
    assert all(rank[clipping]["clipped"] for rank in ranks for clipping in ("norm", "value"))


@pytest.mark.parametrize("name", ["train", "held_out", "train by position", "held_out by position"])
def test_evaluation_is_the_mean_over_tokens_of_all_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    """Sequences with more documents have fewer labels: the mean of the sequences' means is another number."""
    errors = [rank["evaluation"][name] for rank in ranks]
    assert max(errors) <= RTOL_FP64, errors


def test_passkeys_are_judged_over_four_ranks_as_on_one(ranks: list[dict[str, Any]]) -> None:
    """A model that knows nothing finds none, and is as surprised by the right digits."""
    for rank in ranks:
        assert max(rank["passkey"]["errors"]) <= RTOL_FP64 and rank["passkey"]["found"] == [0.0, 0.0]


def test_tokens_are_counted_with_the_time_they_took(ranks: list[dict[str, Any]]) -> None:
    """A clock of a second for each batch, of two sequences of 48: also after an evaluation has begun it anew."""
    for rank in ranks:
        assert set(rank["progress"]["speeds"]) == {2 * 48.0}, rank["progress"]


def test_losses_of_a_few_sequences_are_not_shown_beside_those_of_all(ranks: list[dict[str, Any]]) -> None:
    """Lightning's sanity check takes two batches unless it is told otherwise."""
    assert all(rank["progress"]["evaluated_at"] == [1, 3] for rank in ranks), ranks[0]["progress"]


def test_loss_is_that_of_all_batches_of_a_step(ranks: list[dict[str, Any]]) -> None:
    """Four of them, in fp32; that of the last alone is another number."""
    for rank in ranks:
        assert max(rank["progress"]["errors"]) <= 1e-6, rank["progress"]


def test_sequences_are_not_shared_out_twice(ranks: list[dict[str, Any]]) -> None:
    """Lightning's default would judge by half of each data rank's sequences, and say nothing."""
    assert all("use_distributed_sampler must be False" in rank["second_share"] for rank in ranks)


def test_data_ranks_have_as_many_batches(ranks: list[dict[str, Any]]) -> None:
    """In training, validation, test and prediction; the rank with more would wait for the other half an hour."""
    for rank in ranks:
        assert len(rank["uneven"]) == 4 and set(rank["uneven"]) == {
            "data loaders must have as many batches on every rank, got [1] and [2]; drop or repeat sequences until all "
            "have as many."
        }


def test_sizes_are_refused_before_any_rank_joins(ranks: list[dict[str, Any]]) -> None:
    """Three does not divide four: every rank says so, and no process group was made."""
    for rank in ranks:
        assert "must be the number of ranks (4), got 1 * 3; start 3 ranks" in rank["refusal"]["message"]
        assert not rank["refusal"]["joined"]


def test_mesh_has_rings_of_neighbours(ranks: list[dict[str, Any]]) -> None:
    """Ranks 0 and 1 share a sequence, 2 and 3 another; all four share the parameters; samplers split by data.

    All groups have the timeout asked for.
    """
    for rank, found in enumerate(ranks):
        assert found["mesh"] == {
            "axes": ["data_parallel", "context_parallel"],
            "sizes": [2, 2],
            "cp_ranks": [0, 1] if rank < 2 else [2, 3],
            "shard_size": 4,
            "sampler": {"num_replicas": 2, "rank": rank // 2},
            "num_consumed": 6,
            "timeouts": [True] * 3,
        }


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", "torch.float32"), ("bf16-mixed", "torch.float32"), ("bf16-true", "torch.bfloat16")],
)
def test_precisions_train(ranks: list[dict[str, Any]], precision: str, dtype: str) -> None:
    """Parameters have the dtype that is asked for, rotary frequencies are exact; metrics are the same on every rank."""
    for rank in ranks:
        assert rank[precision]["frequencies"] == ["torch.float32"]
        assert rank[precision]["dtypes"] == [dtype]
        assert rank[precision]["metrics"] == ranks[0][precision]["metrics"]
        assert all(math.isfinite(x) for step in rank[precision]["metrics"] for x in step.values())
