"""Lightning on token files: every batch against `prepare_batch`, resume on another mesh, refusals on every rank.

Two launches of tokens_worker.py, of two gloo processes and of one, on the CPU; every test reads its part.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from ringflash.data import SampleOrder
from ringflash.lightning import CausalLM, TokenData
from tests.helpers.tokens import write_tokens
from tests.recipes.launching import run_ranks

DOCUMENTS = [[256, *((i * 31 + j * 7) % 256 for j in range(5 + i * 13 % 60))] for i in range(40)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of each rank, by "rank-of-ranks"."""
    folder, out = tmp_path_factory.mktemp("data") / "tokens", tmp_path_factory.mktemp("found")
    write_tokens(folder, DOCUMENTS, 15)
    write_tokens(folder.with_name("tokens-other"), [*DOCUMENTS[:-1], [1]], 15)
    corrupt = Path(shutil.copytree(folder, folder.with_name("tokens-corrupt"))) / "00001.bin"
    corrupt.write_bytes(b"\xff" + corrupt.read_bytes()[1:])
    for num_ranks in (2, 1):
        run_ranks("tests.recipes.tokens_worker", folder, out, num_ranks=num_ranks)
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*-of-*.json")}


def test_every_batch_is_that_of_prepare_batch(ranks: dict[str, dict[str, Any]]) -> None:
    """On data ranks, on a ring of two, and on one rank: each key, dtype and value; nothing more, nothing less."""
    assert sorted(ranks) == ["0-of-1", "0-of-2", "1-of-2"]
    for found in ranks.values():
        assert found["context"]["wrong"] == [] and found.get("data", found["context"])["wrong"] == []


def test_training_continues_in_the_middle_of_an_epoch(ranks: dict[str, dict[str, Any]]) -> None:
    """Three steps of two sequences, then three of one: what one rank would have drawn, on either mesh."""
    num_sequences = ranks["0-of-1"]["context"]["num_sequences"]
    assert num_sequences > 9
    order = SampleOrder(num_sequences, seed=3, dp_rank=0, dp_size=1, first=0)
    want = [index for index, _ in zip(order, range(9), strict=False)]
    first = [ranks[f"{rank}-of-2"]["data"]["indices"] for rank in range(2)]
    assert [first[i % 2][i // 2] for i in range(6)] == want[:6]
    for found in ranks.values():
        assert found["context"]["indices"] == want[6:] and found["context"]["num_consumed"] == 9


def test_epochs_of_the_trainer_go_on_in_the_data(ranks: dict[str, dict[str, Any]]) -> None:
    """Three of three steps each (limit_train_batches): nine sequences, none of them a second time."""
    found = ranks["0-of-1"]["epochs"]
    assert found["wrong"] == [] and found["num_consumed"] == 9 and len(set(found["indices"])) == 9


def test_checkpoint_in_the_middle_of_a_step_goes_on_with_the_whole_step(ranks: dict[str, dict[str, Any]]) -> None:
    """Two of its four sequences had gradients, which no checkpoint holds: all four come again, and the same bits."""
    whole, resumed = ranks["0-of-1"]["mid_step"]
    assert sorted(whole) == ["1", "2", "3"] and resumed.items() <= whole.items() and sorted(resumed) == ["2", "3"]


def test_continuing_with_more_batches_a_step_begins_with_a_whole_one(ranks: dict[str, dict[str, Any]]) -> None:
    """Six sequences in three steps, then a step of two: with the count of batches as it was it would have one."""
    found = ranks["0-of-1"]["changed"]
    assert found["num_consumed"] == 8 and found["wrong"] == []


def test_continuing_with_another_rate_has_that_rate(ranks: dict[str, dict[str, Any]]) -> None:
    """And decay and betas, where the checkpoint has others; after four steps of the warm-up."""
    rate = 1e-5 * CausalLM({}).rate_factor(4)
    assert ranks["0-of-1"]["changed"]["groups"] == [[rate, 0.5, [0.8, 0.9]], [rate, 0.0, [0.8, 0.9]]]


def test_both_kinds_of_sequences_are_judged(ranks: dict[str, dict[str, Any]]) -> None:
    """Losses for the trained and the held-out ones, the same on both ranks of a ring and on one rank."""
    for found in ranks.values():
        losses = found["context"]["eval_losses"]
        assert losses.keys() == {"train", "held_out"} and all(math.isfinite(x) for x in losses.values())
    assert ranks["0-of-2"]["context"]["eval_losses"] == ranks["1-of-2"]["context"]["eval_losses"]


def test_corrupt_file_on_one_rank_ends_all(ranks: dict[str, dict[str, Any]]) -> None:
    """Both ranks name the file and who has it; neither waits for the other."""
    for rank, error in (("0-of-2", "ValueError"), ("1-of-2", "TokenFileError")):
        assert ranks[rank]["corrupt"].startswith(f"{error}: shards in ")
        assert "got others in 00001.bin" in ranks[rank]["corrupt"]
    assert ranks["0-of-2"]["corrupt"].endswith("(raised on ranks [1])")


def test_refusals_are_those_of_every_rank(ranks: dict[str, dict[str, Any]]) -> None:
    """Other files on another rank, a model without some of the tokens, and a checkpoint of another split."""
    for rank in ("0-of-2", "1-of-2"):
        assert "must hold the same token files on every rank" in ranks[rank]["other"]
        assert "vocab_size of the model must be 257 or more" in ranks[rank]["vocabulary"]
    for found in ranks.values():
        assert "must be that of the checkpoint" in found["resumed_with_other"]


@pytest.mark.parametrize("percent", [0.0, 100.0, -1.0])
def test_held_out_part_that_is_none_or_all_is_refused(percent: float) -> None:
    """Before a trainer sees it."""
    with pytest.raises(ValueError, match=f"held_out_percent must be between 0 and 100, got {percent}"):
        TokenData("tokens", 48, held_out_percent=percent)
