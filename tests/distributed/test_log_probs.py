"""`ringflash.log_probs` equals transformers' own logits in one process: values, and gradients of an RL objective.

gloo, 2 CPU processes, fp64; needs the huggingface extra.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ringflash
from ringflash import huggingface
from tests.helpers import hybrids, models
from tests.helpers.pool import Context, on_ranks
from tests.helpers.ring_check import assert_trains_alike

pytest.importorskip("transformers")

LENGTH = 21  # 4 does not divide it
LENGTHS = (21, 13)  # of the rows of a padded batch
BOUNDS = (0, 6, 7, 21)
TEMPERATURE = 0.7


def tokens(batch: int) -> torch.Tensor:
    return torch.randint(0, 61, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def padding() -> torch.Tensor:
    return (torch.arange(LENGTH)[None] < torch.tensor(LENGTHS)[:, None]).long()


def objective(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """A clipped policy objective with an entropy bonus, alike on every rank."""
    generator = torch.Generator().manual_seed(2)
    advantages, old = (torch.randn(2, *log_probs.shape, generator=generator, dtype=torch.float64)).unbind()
    ratio = (log_probs - log_probs.detach() + 0.3 * old).exp()
    completion = log_probs.detach() != 0
    policy = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -((policy + 0.1 * entropy) * completion).sum() / completion.sum()


def spans(kind: str) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every document of a batch."""
    if kind == "packed":
        return [(0, start, stop) for start, stop in zip(BOUNDS, BOUNDS[1:], strict=False)]
    return [(row, 0, length) for row, length in enumerate(LENGTHS if kind == "padded" else (LENGTH,))]


def plain(model: Any, input_ids: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies from the logits of each document by itself."""
    log_probs, entropy = (torch.zeros(input_ids.shape, dtype=torch.float64) for _ in range(2))
    for row, start, stop in spans(kind):
        logits = model(input_ids[row : row + 1, start:stop]).logits[0, :-1] / TEMPERATURE
        log_p = logits.log_softmax(-1)
        following = input_ids[row, start + 1 : stop, None]
        log_probs[row, start : stop - 1] = log_p.gather(-1, following).squeeze(-1)
        entropy[row, start : stop - 1] = -(log_p.exp() * log_p).sum(-1)
    return log_probs, entropy


def ring_model(group: dist.ProcessGroup | None, layout: str = "zigzag") -> huggingface.CausalLMWithLoss:
    model = models.build("llama")
    huggingface.set_group(model, group, layout=layout)
    return huggingface.CausalLMWithLoss(model, group, chunk_tokens=4)


def shard_parameters(ring: torch.nn.Module, ctx: Context) -> None:
    """FSDP2 of the layers and the rest; each is resharded after its forward."""
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    for module in (*ring.model.model.layers, ring):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)


@pytest.mark.parametrize(
    "kind, layout, sharded",
    [
        ("one", "zigzag", False),
        ("padded", "zigzag", False),
        ("packed", "zigzag", False),
        ("packed", "contiguous", False),
        ("packed", "balanced", False),
        ("packed", "documents", False),
        ("padded", "zigzag", True),
    ],
)
@on_ranks(2)
def test_values_and_gradients_are_those_of_one_process(ctx: Context, kind: str, layout: str, sharded: bool) -> None:
    input_ids = tokens(2 if kind == "padded" else 1)
    ring, whole = ring_model(ctx.group, layout), models.build("llama", "sdpa")
    if sharded:
        shard_parameters(ring, ctx)
    got = ringflash.log_probs(
        ring, input_ids, group=ctx.group, layout=layout, temperature=TEMPERATURE, return_entropy=True,
        attention_mask=padding() if kind == "padded" else None,
        cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32) if kind == "packed" else None,
    )  # fmt: skip
    want = plain(whole, input_ids, kind)
    for mine, expected in zip(got, want, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    mine, expected = objective(*got), objective(*want)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    mine.backward()
    expected.backward()
    for (name, ringed), one in zip(ring.model.named_parameters(), whole.parameters(), strict=True):
        averaged = ringed.grad.full_tensor() if sharded else ringed.grad / ctx.size
        if not sharded:
            dist.all_reduce(averaged, group=ctx.group)
        assert one.grad.abs().max() > 0
        torch.testing.assert_close(
            averaged, one.grad, rtol=1e-10, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}"
        )


@pytest.mark.parametrize(
    "kind, layout, least",
    [
        ("padded", "zigzag", True),
        ("packed", "balanced", True),
        ("packed", "contiguous", 3),
        ("padded", "contiguous", 4),
    ],
)
@on_ranks(2, 4)
def test_shared_prefixes_change_nothing(ctx: Context, kind: str, layout: str, least: int) -> None:
    """Values and gradients of prompts with several answers, each common beginning once, and of each by itself."""
    rollouts = [[5, 6, 7, 8, 9, *rest] for rest in ([1, 2, 3], [1, 2, 4, 4], [], [11], [1, 2, 3])] + [[5, 9, 9], [3]]
    lengths = torch.tensor(list(map(len, rollouts)))
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in rollouts], batch_first=True)
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    where = {"attention_mask": mask}
    ids = padded
    if kind == "packed":
        ids, where = torch.tensor(sum(rollouts, []))[None], {"cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)).int()}
    causal, whole = hybrids.build("llama"), hybrids.build("llama", "sdpa")  # gradients are not summed in fp32
    huggingface.set_group(causal, ctx.group, layout=layout)
    ring = huggingface.CausalLMWithLoss(causal, ctx.group)
    seen: list[int] = []
    ring.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True)
    options = {"group": ctx.group, "layout": layout, "temperature": TEMPERATURE, "return_entropy": True}
    apart = [x.detach() for x in ringflash.log_probs(ring, ids, **options, **where)]
    got = ringflash.log_probs(ring, ids, **options, **where, share_prefixes=least)
    assert seen[1] < seen[0] and len(seen) == 2
    for mine, expected in zip(got, apart, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    alone = [torch.zeros(padded.shape, dtype=torch.float64) for _ in range(2)]
    for row, rollout in enumerate(rollouts):
        log_p = (whole(torch.tensor([rollout])).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        alone[0][row, : len(rollout) - 1] = log_p.gather(-1, torch.tensor(rollout)[1:, None]).squeeze(-1)
        alone[1][row, : len(rollout) - 1] = -(log_p.exp() * log_p).sum(-1)
    if kind == "packed":
        alone = [x[mask != 0][None] for x in alone]
    assert_trains_alike(ctx, ring.model, objective(*got), whole, objective(*alone), rtol=1e-12)


@pytest.mark.parametrize(
    "name, changes, kind",
    [
        ("chunks", {}, "packed"),
        ("llama", models.ROTATIONS["dynamic"], "packed"),  # each document is shorter than 16 tokens
        *(("llama", changes, "one") for changes in models.ROTATIONS.values()),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
@on_ranks(2)
def test_lengths_and_positions_without_padding(
    ctx: Context, name: str, changes: dict[str, Any], kind: str, alone: bool
) -> None:
    """Angles that depend on the length, and Llama 4, whose attention counts positions: in each document."""
    group = None if alone else ctx.group
    ring = models.build(name, **changes)
    huggingface.set_group(ring, group)
    got = ringflash.log_probs(
        huggingface.CausalLMWithLoss(ring, group), tokens(1), group=group, temperature=TEMPERATURE,
        cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32) if kind == "packed" else None,
    )  # fmt: skip
    want, _ = plain(models.build(name, "sdpa", **changes), tokens(1), kind)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    if kind == "one":  # the length is that of the padded row
        given = {"group": group, "attention_mask": padding()[1:]}
        model = huggingface.CausalLMWithLoss(ring, group)
        apart, shared = (ringflash.log_probs(model, tokens(1), **given, share_prefixes=x) for x in (False, True))
        torch.testing.assert_close(shared, apart, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"attention_mask": padding().flip(1)}, "set tokenizer.padding_side = 'right'"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be above 0, got nan"),
        ({"temperature": 0.5}, "temperature 1.0 (rank 0), 0.5 (rank 1)"),
        (
            {
                "input_ids": tokens(1),
                "attention_mask": None,
                "cu_seqlens": torch.tensor([0, 50, LENGTH], dtype=torch.int32),
            },
            "cu_seqlens must ascend, got (0, 50, 21)",
        ),
        ({"return_entropy": True}, "return_entropy False (rank 0), True (rank 1)"),
        ({"input_ids": tokens(2).flip(1)}, "must be the same on all ranks of the group"),
    ],
)
@on_ranks(2, timeout_s=20)
def test_refusals_are_raised_on_every_rank(ctx: Context, changes: dict[str, Any], text: str) -> None:
    """One rank is wrong, or has another sequence."""
    arguments = {"input_ids": tokens(2), "attention_mask": padding()} | (changes if ctx.rank == 1 else {})
    with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
        ringflash.log_probs(ring_model(ctx.group), group=ctx.group, **arguments)
