"""The README's diff, applied to a plain LightningModule: two ranks train and judge as one process without it.

Two gloo processes on the CPU (wrap_worker.py), fp64.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.nn.functional import cross_entropy

from ringflash.lightning import SequenceSharding
from ringflash.lightning.first_step import FirstStep
from tests.recipes.launching import ROOT, run_ranks

RTOL = 1e-10


def readme_diff() -> list[str]:
    """Lines of the first diff, which is of a LightningModule."""
    blocks = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return blocks[0].splitlines()


def apply(diff: list[str], text: str) -> str:
    """A text after the diff: a line that goes is replaced by the one that follows it, an import is added on top."""
    header = ""
    for i, line in enumerate(diff):
        if line.startswith("-"):
            assert text.count(line[1:] + "\n") == 1 and diff[i + 1].startswith("+"), line
            text = text.replace(line[1:] + "\n", diff[i + 1][1:] + "\n")
        elif line.startswith("+") and not (i and diff[i - 1].startswith("-")):
            header += line[1:] + "\n"
    return header + text


def write_changed(folder: Path) -> None:
    """plain_gpt.py after README's diff, as changed_gpt.py."""
    plain = (ROOT / "tests/recipes/plain_gpt.py").read_text()
    (folder / "changed_gpt.py").write_text(apply(readme_diff(), plain))


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two ranks, and of the one rank of a second launch."""
    folder = tmp_path_factory.mktemp("wrap")
    write_changed(folder)
    run_ranks("tests.recipes.wrap_worker", folder, folder, num_ranks=2)
    run_ranks("tests.recipes.wrap_worker", folder, folder, num_ranks=1)
    return [json.loads(Path(folder, f"{name}.json").read_text()) for name in ("0of2", "1of2", "0of1")]


@pytest.fixture(scope="module")
def ranks(launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of each of two ranks."""
    return launches[:2]


def test_the_diff_changes_three_lines() -> None:
    """Beside the import."""
    assert sum(line.startswith("-") for line in readme_diff()) == 3


@pytest.mark.parametrize("quantity", ["weights", "loss", "eval_loss", "manual", "average", "compiled"])
def test_training_equals_the_plain_module(ranks: list[dict[str, Any]], quantity: str) -> None:
    """After three steps, also of its own backward, with a layer that inductor compiles, and as a moving average.

    Losses are logged as the plain module logs them: the mean over the tokens of all ranks, not those of one rank.
    """
    assert all(rank[quantity] <= RTOL for rank in ranks), ranks


def test_shuffled_data_is_in_one_order(launches: list[dict[str, Any]]) -> None:
    """On two ranks and on one: by Lightning's sampler under the strategy, by a generator of one's own anywhere.

    "plain" is the module without the diff under Lightning's default strategy; with it, it runs there as well.
    """
    *two, one = (found["orders"] for found in launches)
    assert len(one["own"]) == 12 and max(abs(a - b) for a, b in zip(one["own"], one["lightning"], strict=True)) > 1e-3
    for rank in two:
        assert rank["lightning"] == pytest.approx(one["lightning"], rel=RTOL)
        assert rank["own"] == pytest.approx(one["plain"], rel=RTOL)
    assert one["default strategy"] == pytest.approx(one["plain"], rel=RTOL)
    assert one["own"] == pytest.approx(one["plain"], rel=RTOL)


def test_callbacks_meet_shards(ranks: list[dict[str, Any]]) -> None:
    """FSDP2 leaves an outermost module whole after a forward without a backward: an evaluation, the comparison."""
    hooks = ("validation batch", "sanity validation", "comparison", "step")
    for rank in ranks:
        assert rank["whole"] == dict.fromkeys(hooks, 0)


def test_callbacks_decide_alike(ranks: list[dict[str, Any]]) -> None:
    """Decisions follow the mean over ranks: 2, 1, 1.5, 2. By its own scores rank 1 would stop after 2."""
    for rank in ranks:
        assert rank["decisions"] == {"best": ["epoch=1.ckpt", 1.0], "stopped": 3, "score": 2.0, "worst": 3.0}


def test_sum_without_a_choice_is_refused() -> None:
    """A sum of each rank's part goes over all ranks; a loss of the whole sequence must not be summed."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {})()
    for log in (
        lambda: module.log("n", 1.0, reduce_fx="sum"),
        lambda: module.log_dict({"n": 1.0}, reduce_fx=torch.sum),
    ):
        with pytest.raises(ValueError, match="sync_dist must be given with reduce_fx=.*sum.*, got none for n; True"):
            log()


def test_comparison_leaves_no_trace(ranks: list[dict[str, Any]]) -> None:
    """Three steps have counted in a buffer and collected in a list, and nothing else has."""
    assert all(rank["counted"] == [3, [0, 1, 2]] for rank in ranks), ranks


@pytest.mark.parametrize(
    ("what", "beginning"),
    [
        ("misplaced", "model.blocks.0.attn must be given the q"),
        ("tied", "head.weight must be in the unit of model.embedding.weight, whose"),  # FSDP2 would part them
        ("unshifted", "token_loss must be given the labels of the whole sequence ([31] in its calls), got [30] over"),
        ("local_mean", "training_step's loss, averaged over the ring, must be that of the whole sequence ("),
        ("uncut", "batches must be cut before a step, got one that on_before_batch_transfer has not seen; call super"),
        ("batches", "batch must be the same on all ranks of a ring, which each take a part of it, got 2 different"),
        (
            "averaged",
            "callbacks must not copy the module, whose parameters are sharded, got EMAWeightAveraging; average",
        ),
    ],
)
def test_what_would_train_otherwise_is_refused(ranks: list[dict[str, Any]], what: str, beginning: str) -> None:
    """Before the first step, on every rank."""
    for rank in ranks:
        assert rank["refusals"][what].startswith(beginning), rank["refusals"][what]


def test_batch_with_a_mask_is_refused() -> None:
    """Hugging Face's collators make one."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {})()
    batch = dict.fromkeys(("input_ids", "labels", "attention_mask"), torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="batch must have only input_ids, labels .*, got also attention_mask; leave"):
        module.shard_batch(batch, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_many_tokens_keeps_its_digits(dtype: torch.dtype) -> None:
    """One process, on whole sequences: within eps of fp64 on the same logits, not of their sum in the low dtype."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {"_ringflash_step": FirstStep(whole=True)})()
    torch.manual_seed(0)
    logits, labels = torch.randn(1, 20_000, 16).to(dtype), torch.randint(0, 16, (1, 20_000))
    labels[:, ::3] = -100
    loss, want = module.token_loss(logits, labels), cross_entropy(logits[0].double(), labels[0])
    assert loss.dtype == torch.float32 and abs(loss.item() - want.item()) < torch.finfo(dtype).eps * want.item() / 10


@pytest.mark.parametrize("labels", [-100, 3])
def test_loss_without_labels_is_nothing(labels: int) -> None:
    """Not 0 / 0, which would make every parameter NaN. A loss that is infinite stays so."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {"_ringflash_step": FirstStep(whole=True)})()
    logits = torch.zeros(1, 8, 5, dtype=torch.float64)
    logits[..., 3] = -torch.inf
    loss = module.token_loss(logits.requires_grad_(), torch.full((1, 8), labels))
    loss.backward()
    assert loss.item() == (0.0 if labels == -100 else torch.inf)
    assert labels != -100 or not logits.grad.any()
