"""Hybrid transformers models over the ring: loss and every gradient equal transformers' own code on one process.

gloo, 2 and 4 CPU processes, fp64; needs the huggingface extra. One process runs "sdpa", and documents one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO

import pytest
import torch
from torch.nn.functional import cross_entropy

from ringflash import huggingface
from tests.helpers.examples import example
from tests.helpers.hybrids import MODELS, build
from tests.helpers.pool import Context, Pool, on_ranks
from tests.helpers.ring_check import assert_trains_alike

pytest.importorskip("transformers")

LENGTH = 24
BOUNDS = (0, 3, 13, 24)


def tokens(batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def alone(kind: str, ids: torch.Tensor, bounds: tuple[int, ...] | None) -> tuple[torch.nn.Module, torch.Tensor]:
    """transformers' model and its mean loss, with each document a sequence."""
    model = build(kind, "sdpa").train()
    bounds = bounds or (0, LENGTH)
    count = len(ids) * (LENGTH - len(bounds) + 1)
    parts = [ids[:, start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    losses = [  # transformers' own loss would be in fp32
        cross_entropy(model(part, use_cache=False).logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        for part in parts
    ]
    return model, torch.stack(losses).sum() / count


def equals_one_process(ctx: Context, kind: str, layout: str, batch: int, bounds: tuple[int, ...] | None) -> None:
    ids = tokens(batch)
    model = build(kind).train()
    huggingface.set_group(model, ctx.group, layout=layout)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    with_loss = huggingface.CausalLMWithLoss(model, ctx.group)
    loss = with_loss(**huggingface.prepare_batch(ids, group=ctx.group, cu_seqlens=cu_seqlens, layout=layout))
    whole, want = alone(kind, ids, bounds)
    assert_trains_alike(ctx, model, loss, whole, want)
    assert all(p.grad.abs().max() > 1e-6 for p in whole.parameters()), "a gradient that is zero shows nothing"


CASES = [(2, "zigzag", 2, None), (4, "contiguous", 1, None), (4, "zigzag", 1, BOUNDS)]
GRID = [(kind, *case) for kind in ("qwen3_next", "bamba") for case in CASES]
GRID += [("qwen3_next", 4, "balanced", 1, BOUNDS)]
GRID += [(kind, *CASES[2]) for kind in MODELS if kind not in ("llama", "qwen3_next", "bamba")]


@pytest.mark.parametrize("kind, size, layout, batch, bounds", GRID)
def test_loss_and_gradients_equal_one_process(
    pool: Pool, kind: str, size: int, layout: str, batch: int, bounds: tuple[int, ...] | None
) -> None:
    pool.run(equals_one_process, kind, layout, batch, bounds, size=size)


def example_prints(ctx: Context) -> str:
    """With the page's program, whose configuration is that of a hybrid model; the pool has joined."""
    code = example("docs/huggingface.md", "# train.py")
    code, count = re.subn(r"    config = LlamaConfig\(.*?\n    \)\n", "", code, flags=re.DOTALL)
    assert count == 1
    hybrid = example("docs/huggingface.md", "config = Qwen3NextConfig")
    code = f"from transformers import Qwen3NextConfig\n{hybrid}\n{code}"
    for line in ('dist.init_process_group("nccl" if cuda else "gloo")\n', "dist.destroy_process_group()\n"):
        assert line in code
        code = code.replace(line, "")
    with redirect_stdout(StringIO()) as printed:
        exec(code, {})
    return printed.getvalue()


def test_example_runs(pool: Pool) -> None:
    lines = pool.run(example_prints)
    assert all(line.startswith(f"rank {rank}: loss 5.") for rank, line in enumerate(lines)), lines


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h"])
@on_ranks(2)
def test_checkpoints_copies_and_generate(ctx: Context, kind: str) -> None:
    """Layers that are recomputed in the backward, after other forwards, a copy, and generate in between."""
    model = build(kind)
    huggingface.set_group(model, ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32))
    kept = huggingface.CausalLMWithLoss(model, ctx.group).train()
    other = deepcopy(kept)
    other.gradient_checkpointing_enable()
    prompt = tokens()[:, : 5 + ctx.rank]
    generated = model.generate(prompt, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, build(kind, "sdpa").generate(prompt, max_new_tokens=3, do_sample=False))
    kept(**batch).backward()
    other(**batch).backward()
    for p, q in zip(other.parameters(), kept.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert (p.grad - q.grad).abs().max() <= 1e-12 * q.grad.abs().max()


@on_ranks(2)
def test_wrong_calls_are_refused_on_every_rank(ctx: Context) -> None:
    """On every rank, also if a single rank calls wrongly; and the next call is right again."""
    model = build("qwen3_next")
    huggingface.set_group(model, ctx.group)
    good = huggingface.prepare_batch(tokens(), group=ctx.group)
    wrong: list[tuple[type[Exception], str, dict]] = [
        (NotImplementedError, "(cache|past_key_values) must not be .* use_cache=False", {"use_cache": True}),
        (ValueError, "position_ids must be the shard's global positions", {"position_ids": good["position_ids"] + 1}),
        (ValueError, "cu_seqlens must end at the global", {"cu_seqlens": torch.tensor([0, 12], dtype=torch.int32)}),
        (ValueError, "attention_mask must be None or all ones", {"attention_mask": torch.zeros(1, LENGTH // ctx.size)}),
    ]
    good.pop("shift_labels")
    want = model(**good).logits.detach()
    for kind, message, change in wrong:
        with pytest.raises(kind, match=message if ctx.rank == 1 else ""):
            model(**good | (change if ctx.rank == 1 else {}))
    assert torch.equal(model(**good).logits, want)


def _other_length(ctx: Context, model: torch.nn.Module, batch: dict) -> None:
    batch |= huggingface.prepare_batch(tokens()[:, : LENGTH - 8 * ctx.rank], group=ctx.group)


def _other_documents(ctx: Context, model: torch.nn.Module, batch: dict) -> None:
    """The layout "balanced" follows them."""
    huggingface.set_group(model, ctx.group, layout="balanced")
    bounds = torch.tensor((0, 8 + 4 * ctx.rank, LENGTH), dtype=torch.int32)
    batch |= huggingface.prepare_batch(tokens(), group=ctx.group, cu_seqlens=bounds, layout="balanced")


def _other_layers(ctx: Context, model: torch.nn.Module, batch: dict) -> None:
    model.model.layers[1 + ctx.rank].forward = lambda x, *_, **__: x


@pytest.mark.parametrize(
    "change, message",
    [
        (_other_length, r"recurrent layer on \[1, 12, 16\] \(rank 0\), \[1, 8, 16\] \(rank 1\)"),
        (_other_documents, r"cu_seqlens \d+ \(rank 0\), \d+ \(rank 1\)"),
        (_other_layers, "forward of Qwen3_5Attention 2.*forward of Qwen3_5GatedDeltaNet 1"),
    ],
)
@on_ranks(2)
def test_other_calls_on_a_rank_are_refused(ctx: Context, change: Callable[..., None], message: str) -> None:
    """At once, and on both ranks."""
    model = build("qwen3_5")
    huggingface.set_group(model, ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    change(ctx, model, batch)
    for name in ("checksum", "shift_labels"):
        batch.pop(name)
    with pytest.raises(ValueError, match=f"all ranks of the group must make the same call, got .*{message}"):
        model(**batch)
