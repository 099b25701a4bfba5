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
from tests.recipes.launching import ROOT, run_ranks

RTOL = 1e-10


def readme_diff() -> list[str]:
    """Its lines."""
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
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


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("wrap")
    plain = (ROOT / "tests/recipes/plain_gpt.py").read_text()
    (folder / "changed_gpt.py").write_text(apply(readme_diff(), plain))
    run_ranks("tests.recipes.wrap_worker", folder, folder, num_ranks=2)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def test_the_diff_changes_three_lines() -> None:
    """Beside the import."""
    assert sum(line.startswith("-") for line in readme_diff()) == 3


@pytest.mark.parametrize("quantity", ["weights", "loss", "eval_loss"])
def test_training_equals_the_plain_module(ranks: list[dict[str, Any]], quantity: str) -> None:
    """After three steps; the evaluation shows the true loss, not cp_size times it."""
    assert all(rank[quantity] <= RTOL for rank in ranks), ranks


def test_local_positions_are_found_before_the_first_step(ranks: list[dict[str, Any]]) -> None:
    """On every rank, by the layer's name."""
    for rank in ranks:
        assert rank["planted"].startswith("model.blocks.0.attn must be given the q"), rank


def test_parameters_that_sharding_would_part_are_refused(ranks: list[dict[str, Any]]) -> None:
    """A head and an embedding in two children of the module, tied: FSDP2 would make two parameters of them."""
    for rank in ranks:
        assert rank["tied"].startswith("head.weight must lie in the unit of model.embedding.weight, whose"), rank


def test_batch_with_a_mask_is_refused() -> None:
    """As Hugging Face's collators make it."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {})()
    batch = dict.fromkeys(("input_ids", "labels", "attention_mask"), torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="batch must have input_ids, labels .* alone, got attention_mask, too; leave"):
        module.shard_batch(batch, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_many_tokens_keeps_its_digits(dtype: torch.dtype) -> None:
    """One process, on whole sequences: within eps of fp64 on the same logits, not of their sum in the low dtype."""
    module = type("Module", (SequenceSharding, lightning.LightningModule), {"_ringflash_whole": True})()
    torch.manual_seed(0)
    logits, labels = torch.randn(1, 20_000, 16).to(dtype), torch.randint(0, 16, (1, 20_000))
    labels[:, ::3] = -100
    loss, want = module.token_loss(logits, labels), cross_entropy(logits[0].double(), labels[0])
    assert loss.dtype == torch.float32 and abs(loss.item() - want.item()) < torch.finfo(dtype).eps * want.item() / 10
