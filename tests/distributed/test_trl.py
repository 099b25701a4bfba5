"""TRL's trainers over a ring equal one process: SFT with packed documents, DPO, and GRPO.

gloo, 4 CPU processes, fp64 models. Needs the trl extra. TRL computes log-probabilities in fp32, so that parameters may
differ by fp32's epsilon in each update, whose norm is that of the clipped gradient times the learning rate.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers import models
from tests.helpers.pool import Context, Pool, on_ranks

pytest.importorskip("trl")

from trl.trainer.utils import add_fused_lm_head

from ringflash.accelerate.forward import RingForward, put_on_ring
from ringflash.accelerate.rows import BatchRows, TokenTypes, read_rows, share_rows, shift_rows
from ringflash.accelerate.trl import FusedHead, count_groups_of_rings, score_batch
from tests.helpers import trainer

UPDATES = 2 * 0.5 * 0.05  # steps, learning rate, norm


@pytest.mark.parametrize("kind", ["sft", "dpo", "dpo fsdp", "dpo precompute", "grpo", "grpo shared"])
def test_training_is_that_of_one_process(pool: Pool, alone: Pool, kind: str, tmp_path: Path) -> None:
    """Two clipped steps, a ring of four ranks; SFT is evaluated, and GRPO generates for two batches a step.

    Reference models are on the ring, too. "grpo shared" computes a prompt once for its four answers.
    """
    (one,) = alone.run(trainer.train_with_trl, f"{tmp_path}/one", kind)
    for ring in pool.run(trainer.train_with_trl, f"{tmp_path}/ring", kind):
        assert len(ring["logged"]) >= 2
        assert ("shared" in kind) == (len(ring["saved"]) > 0) and all(after < before for before, after in ring["saved"])
        assert "dpo" not in kind or ring["attention"] == {"ringflash"}
        for got, want in zip(ring["logged"], one["logged"], strict=True):
            assert got == pytest.approx(want, rel=1e-6, abs=1e-7)
        for name, want in one["parameters"].items():
            atol = UPDATES * torch.finfo(torch.float32).eps
            torch.testing.assert_close(ring["parameters"][name], want, rtol=0, atol=atol)


@on_ranks(2)
def test_router_loss_is_of_the_whole_sequence(ctx: Context) -> None:
    """On every rank: TRL's trainers add it to their loss."""
    ring, whole = (models.build("qwen3_experts", "sdpa", output_router_logits=True) for _ in range(2))
    add_fused_lm_head(ring)
    put_on_ring(ring, ctx.group)
    ids = models.tokens(2)
    got = ring(input_ids=ids, labels=ids, fused_lm_head=True).aux_loss
    torch.testing.assert_close(got, whole(ids).aux_loss.to(got), rtol=1e-6, atol=0)


@on_ranks(2)
def test_counted_positions_are_not_shared(ctx: Context) -> None:
    """Llama 4's layers without rotation would count those of packed tokens; with chunks its tables are refused, too."""
    model = models.build("chunks", "sdpa", layer_types=["full_attention"] * 2, attention_chunk_size=None)
    add_fused_lm_head(model)
    put_on_ring(model, ctx.group)
    ids = models.tokens(2)
    with (
        mock.patch.object(RingForward, "min_shared", 1),
        pytest.raises(NotImplementedError, match="share_prefixes must be False for .*, got True: its layers count"),
    ):
        model(input_ids=ids, labels=ids, fused_lm_head=True)


def test_other_labels_and_token_types_are_not_shared() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    packed = share_rows(read_rows(ids, shift_rows(ids).masked_fill(ids < 7, -100)), 1)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 7, 9]]
    assert packed.labels.tolist() == [[-100, -100, 8, -100, 9, -100]]
    assert packed.places.tolist() == [[-1, -1, 2, -1], [-1, -1, 4, -1]]
    in_first_row = shift_rows(ids).masked_fill(torch.tensor([[False] * 4, [True, True, False, False]]), -100)
    packed = share_rows(read_rows(ids, in_first_row), 1)
    assert packed.labels.tolist() == [[6, 7, 8, -100, 9, -100]]
    assert packed.places.tolist() == [[0, 1, 2, -1], [-1, -1, 4, -1]], "the second row has no value at shared labels"
    with pytest.raises(ValueError, match="labels must be the next tokens of a row with share_prefixes"):
        share_rows(read_rows(ids, ids), 1)
    types = TokenTypes("token_type_ids", ids, torch.full_like(ids, -1), 0)
    with pytest.raises(NotImplementedError, match="token_type_ids must be None with share_prefixes"):
        share_rows(read_rows(ids, shift_rows(ids), types=types), 1)


def refusal(**changes: Any) -> str:
    """Error of a GRPO configuration on rings of two, or the prompts' batch that it then counts."""
    good = {
        "per_device_train_batch_size": 2, "steps_per_generation": 4, "num_generations": 4, "num_generations_eval": None,
        "per_device_eval_batch_size": 6, "do_eval": False, "scale_rewards": "group", "world_size": 6,
    }  # fmt: skip
    args = SimpleNamespace(**good | changes)
    try:
        count_groups_of_rings(args, 2)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return str(args.generation_batch_size)


def test_groups_that_rings_would_divide_are_refused() -> None:
    assert refusal() == "24"
    assert "per_device_train_batch_size * steps_per_generation must be a multiple of the 16" in refusal(
        num_generations=16
    )
    assert "per_device_eval_batch_size must be a multiple of the 4 generations" in refusal(do_eval=True)
    assert refusal(do_eval=True, num_generations_eval=3) == "24"
    assert "scale_rewards must not be 'batch'" in refusal(scale_rewards="batch")
    assert "normalize_advantages must not be True" in refusal(normalize_advantages=True)
    assert "top_entropy_quantile must be 1 " in refusal(top_entropy_quantile=0.2)


def test_head_in_fp32_is_so_under_autocast() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((1, 6, 32), (11, 32)))
    labels = torch.arange(6)[None]
    with_loss: Any = SimpleNamespace(decode=lambda: (hidden, weight, None), logit_scale=1.0)
    head = FusedHead(2.0, ("log_probs", "mean_logits"), cast_lm_head_to_fp32=True)
    shard, rows = {"shift_labels": labels, "num_items_in_batch": 6}, BatchRows(labels, labels, None, None, 6, None)
    with torch.autocast("cpu", torch.bfloat16):
        got = score_batch(head, with_loss, shard, rows, labels, None)  # type: ignore[arg-type]
    logits = (hidden @ weight.T).double() / 2
    want = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(got.log_probs.double(), want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(got.mean_logits.double(), logits.mean(-1), rtol=1e-6, atol=1e-5)
