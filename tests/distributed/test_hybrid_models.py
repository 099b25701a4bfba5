"""Hybrid transformers models over the ring: loss and every gradient equal transformers' own code on one process.

gloo, 2 and 4 CPU processes, fp64; needs the huggingface extra. One process runs "sdpa", and documents one by one.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ringflash import huggingface
from tests.helpers.hybrids import MODELS, build
from tests.helpers.pool import Context, Pool

pytest.importorskip("transformers")

LENGTH = 24
BOUNDS = (0, 3, 13, 24)


def tokens(batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def alone(kind: str, ids: torch.Tensor, bounds: tuple[int, ...] | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Mean loss of transformers' model and its gradients, with each document a sequence."""
    model = build(kind, "sdpa").train()
    bounds = bounds or (0, LENGTH)
    count = len(ids) * (LENGTH - len(bounds) + 1)
    parts = [ids[:, start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    losses = [  # transformers' own loss would be in fp32
        cross_entropy(model(part, use_cache=False).logits[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        for part in parts
    ]
    loss = torch.stack(losses).sum() / count
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def equals_one_process(ctx: Context, kind: str, layout: str, batch: int, bounds: tuple[int, ...] | None) -> None:
    ids = tokens(batch)
    model = build(kind).train()
    huggingface.set_group(model, ctx.group, layout=layout)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    with_loss = huggingface.CausalLMWithLoss(model, ctx.group)
    loss = with_loss(**huggingface.prepare_batch(ids, group=ctx.group, cu_seqlens=cu_seqlens, layout=layout))
    loss.backward()
    want, expected = alone(kind, ids, bounds)
    gradients = [p.grad for p in model.parameters()]
    for got, whole in zip([loss.detach(), *gradients], [want, *expected], strict=True):
        dist.all_reduce(got, group=ctx.group)
        assert whole.abs().max() > 1e-6, "a gradient that is zero shows nothing"
        assert (got / ctx.size - whole).abs().max() <= 1e-10 * whole.abs().max()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "size, layout, batch, bounds", [(2, "zigzag", 2, None), (4, "contiguous", 1, None), (4, "zigzag", 1, BOUNDS)]
)
def test_loss_and_gradients_equal_one_process(
    pool: Pool, kind: str, size: int, layout: str, batch: int, bounds: tuple[int, ...] | None
) -> None:
    pool.run(equals_one_process, kind, layout, batch, bounds, size=size)
