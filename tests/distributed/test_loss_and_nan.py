"""The loss over a group has the scale every backend averages to; NaN reaches the rows that see it, across ranks.

gloo, 2 to 4 CPU processes, fp64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringflash
from ringflash.loss import cross_entropy
from ringflash.testing import dense
from ringflash.testing.tolerance import assert_close
from tests.helpers import ring_check
from tests.helpers.cases import Case
from tests.helpers.pool import Context, on_ranks


@pytest.mark.parametrize("num_labelled", [1, 5])
@on_ranks(2, 3, 4)
def test_ranks_average_to_the_mean_token_loss(ctx: Context, num_labelled: int) -> None:
    """Mean over ranks of loss and gradients, against one process with torch's cross-entropy.

    With one labelled token, every rank but the first has none.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4 * ctx.size, 8, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(19, 8, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 19, (1, 4 * ctx.size), generator=generator)
    labels[:, num_labelled:] = -100
    want = torch.nn.functional.cross_entropy((hidden @ weight.T)[0], labels[0])
    want_hidden, want_weight = torch.autograd.grad(want, (hidden, weight))
    mine, mine_labels = (ringflash.shard_sequence(x, ctx.group) for x in (hidden, labels))
    loss = cross_entropy(mine, weight, mine_labels, group=ctx.group, chunk_tokens=3)
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    total = torch.cat([x.detach().flatten() for x in (loss, dhidden, dweight)])
    dist.all_reduce(total, group=ctx.group)
    expected = torch.cat([x.detach().flatten() for x in (want, want_hidden, want_weight)])
    assert_close({"mean": total[None] / ctx.size}, {"mean": expected[None]})


@pytest.mark.parametrize(
    "by_rank, messages",
    [
        ([8, 7], [r"num_tokens must be the same .* got \[8, 7\] in rank order"] * 2),
        ([-1, torch.tensor(5)], ["num_tokens must be 0 or more, got -1", r"valid on every rank, .* on ranks \[0\]"]),
        ([torch.tensor(-3)] * 2, ["num_tokens must be 0 or more, got -3"] * 2),
        ([8, None], [r"must be given on all ranks of the group or on none, got none on ranks \[1\]"] * 2),
        ([None, float("nan")], [r"valid on every rank, .* on ranks \[1\]", "integer or a tensor of one, got nan"]),
    ],
)
@on_ranks(2)
def test_numbers_of_tokens_are_refused_on_every_rank(ctx: Context, by_rank: list[Any], messages: list[str]) -> None:
    """And the next call is unharmed: no rank has left a message behind."""
    hidden, weight, labels = torch.ones(1, 4, 8), torch.ones(19, 8), torch.ones(1, 4, dtype=torch.int64)
    call = partial(cross_entropy, hidden, weight, labels, group=ctx.group)
    with pytest.raises(ValueError, match=messages[ctx.rank]):
        call(num_tokens=by_rank[ctx.rank])
    assert call(num_tokens=8 if ctx.rank else torch.tensor(8)).isfinite()


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("case", [Case(), Case(window="left", documents="crossing", causal=False)], ids=str)
@on_ranks(4)
def test_nan_stays_where_it_is_seen(ctx: Context, case: Case, name: str) -> None:
    """One NaN at position 9 of q, k or v: out is NaN where it is seen, and has the bits of a clean run elsewhere."""
    whole = ring_check.problem(case, 12 * ctx.size, torch.float64, ctx.device)
    clean = ring_check.run(ctx, case, whole, 6, "reference")["out"]
    getattr(whole, name)[:, 9] = float("nan")
    out = ring_check.run(ctx, case, whole, 6, "reference")["out"]
    position = torch.arange(12 * ctx.size)
    seen = dense.visible(
        position, position, causal=case.causal, window_size=case.window_size(6),
        cu_seqlens=case.cu_seqlens(12 * ctx.size, 6),
    )[:, 9]  # fmt: skip
    touched = seen if name != "q" else position == 9
    mine = ring_check.shard(ctx, case, touched[None])[0]
    assert bool(out[:, mine].isnan().all())
    assert torch.equal(out[:, ~mine], clean[:, ~mine])
