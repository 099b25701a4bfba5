"""The diff of docs/wrapping.md, applied to a plain LightningModule: two ranks train as one process without it.

Gloo processes on the CPU, fp64 (wrap_worker.py, which says what each part shows).
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.nn.functional import cross_entropy

from ringflash.lightning import SequenceSharding
from ringflash.lightning.first_step import FirstStep, sample
from tests.recipes.launching import ROOT, assert_made, each_part, launch_parts
from tests.recipes.wrap_worker import TESTS


def documented_diff() -> list[str]:
    """Return the lines of the diff of a LightningModule."""
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "wrapping.md").read_text(), re.DOTALL)
    return block.splitlines()


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
    """plain_gpt.py after documented diff, as changed_gpt.py."""
    plain = (ROOT / "tests/recipes/plain_gpt.py").read_text()
    (folder / "changed_gpt.py").write_text(apply(documented_diff(), plain))


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("wrap")
    write_changed(folder)
    return launch_parts(TESTS, "tests.recipes.wrap_worker", folder, tmp_path_factory)


@each_part(TESTS)
def test_on_ranks(launches: dict[int, list[dict[str, str]]], num_ranks: int, part: Callable[[Any], None]) -> None:
    assert_made(launches[num_ranks], part)


def test_the_diff_changes_three_lines() -> None:
    """Beside the import."""
    assert sum(line.startswith("-") for line in documented_diff()) == 3


def test_sum_without_a_choice_is_refused() -> None:
    """A sum of each rank's part goes over all ranks; a loss of the whole sequence must not be summed."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {})()
    for log in (
        lambda: module.log("n", 1.0, reduce_fx="sum"),
        lambda: module.log_dict({"n": 1.0}, reduce_fx=torch.sum),
    ):
        with pytest.raises(ValueError, match="sync_dist must be given with reduce_fx=.*sum.*, got none for n; pass"):
            log()


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_batch_with_a_mask_is_refused(kind: Callable[[Any], Any]) -> None:
    """Hugging Face's collators make one, in a BatchEncoding, which is a UserDict."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {})()
    batch = kind(dict.fromkeys(("input_ids", "labels", "attention_mask"), torch.zeros(1, 8, dtype=torch.int64)))
    with pytest.raises(ValueError, match="batch must have only .* and position_ids, got also attention_mask; leave"):
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


def test_sample_makes_the_ranks_unequal() -> None:
    """One rank keeps its first token that counts in labels, masks and weights; the window has most of them."""
    mask, held = torch.arange(16)[None] >= 9, torch.tensor([0, 1, 6, 7])
    labels = torch.where(mask, 3, -100)
    tokens = torch.arange(16)[None]
    batch = [tokens, labels, mask, mask.float()[..., None], mask * 0.5, torch.ones(1, 16), torch.randn(1, 5)]
    assert sample({"x": tokens, "position_ids": "document"}, 8, held).keys() == {"x"}
    found = sample(batch, 8, held)
    kept = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0]])  # of positions 8 to 15, of which 8 does not count
    assert torch.equal(found[0], tokens[:, 8:]) and torch.equal(found[6], batch[6])
    assert torch.equal(found[1], torch.where(kept.bool(), 3, -100))
    assert torch.equal(found[2], kept.bool()) and torch.equal(found[3], kept.float()[..., None])
    assert torch.equal(found[4], torch.tensor([[0, 16, 16, 16, 16, 16, 1, 1]]) / 32)
    assert torch.equal(found[5], torch.tensor([[1.0, 0, 1, 1, 1, 1, 0, 0]]))


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
