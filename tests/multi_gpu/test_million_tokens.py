"""A causal sequence of a million tokens: sampled rows and keys of every rank against fp64.

A sampled query has its whole row of scores; that gives out, lse and dq. A sampled key needs the lse of all queries, and
their dout * out: those are the ring's own, which the sampled rows vouch for. Scores are so far apart that some hundred
keys make up most of a row: were all alike, a few lost tiles would not show.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringflash
from ringflash.testing import tolerance
from ringflash.testing.tolerance import Ratio, assert_within
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup, Table
from tests.multi_gpu.test_ring_on_gpus import over

pytestmark = pytest.mark.multi_gpu

TOKENS = {"nccl": 1 << 20, "gloo": 1 << 10}
HEADS = [(4, 1), (8, 8)]  # of q, of k and v: one section, and several that take turns with the buffers
HEAD_DIM, SCALE = 128, 2.5 * 128**-0.5
SAMPLES = 32  # of a rank's rows, in each of its two chunks
LIMIT_S = 120.0
KNOWN_LSE = 1.16  # of its budget: sums of a million terms in fp32, without compensation


class Found(NamedTuple):
    """Results of one rank: what its samples spend, and what they would if the keys of one chunk were not seen."""

    spent: list[Ratio]
    control: list[Ratio]


class Samples(NamedTuple):
    """Some positions of this rank, and the whole sequence: q, dout (seqlen, heads, head_dim), k, v (of KV heads)."""

    positions: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def of_head(self, head: int) -> tuple[Tensor, Tensor, int]:
        """Return k and v that a head of q reads, (seqlen, head_dim) each, and their index."""
        kv = head * self.k.shape[1] // self.q.shape[1]
        return self.k[:, kv], self.v[:, kv], kv

    def rows(self, dtype: torch.dtype, hidden: slice = slice(0)) -> dict[str, Tensor]:
        """out, lse and dq of the sampled queries, eager in this dtype; `hidden` keys are seen by no query."""
        unseen = torch.arange(len(self.k), device=self.k.device) > self.positions[:, None]
        unseen[:, hidden] = True
        heads = []
        for head in range(self.q.shape[1]):
            k, v = (x.to(dtype) for x in self.of_head(head)[:2])
            q, dout = (x[self.positions, head].to(dtype) for x in (self.q, self.dout))
            scores = (q @ k.T * SCALE).masked_fill_(unseen, float("-inf"))
            state = torch.promote_types(dtype, torch.float32)
            exact = scores if state == dtype else (q.to(state) @ k.to(state).T * SCALE).masked_fill_(unseen, -torch.inf)
            lse, p = exact.logsumexp(-1), scores.softmax(-1)
            out = p @ v
            ds = p * (dout @ v.T - (dout * out).sum(-1, keepdim=True))
            heads.append((out, lse, ds @ k * SCALE))
        out, lse, dq = (torch.stack(x, 1)[None] for x in zip(*heads, strict=True))
        return {"out": out, "lse": lse.transpose(1, 2), "dq": dq}

    def keys(self, dtype: torch.dtype, lse: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """dk and dv of the sampled keys; lse, delta: (heads, seqlen), fp64, of all queries."""
        unseen = torch.arange(len(self.k), device=self.k.device) < self.positions[:, None]
        grads = {
            name: torch.zeros(
                len(self.positions), *self.k.shape[1:], dtype=torch.promote_types(dtype, torch.float32),
                device=self.k.device,
            )
            for name in ("dk", "dv")
        }  # fmt: skip
        for head in range(self.q.shape[1]):
            *pair, kv = self.of_head(head)
            k, v = (x[self.positions].to(dtype) for x in pair)
            q, dout = (x[:, head].to(dtype) for x in (self.q, self.dout))
            p = (k @ q.T * SCALE - lse[head]).exp().masked_fill_(unseen, 0.0).to(dtype)
            grads["dv"][:, kv] += p @ dout
            grads["dk"][:, kv] += (p * (v @ dout.T - delta[head].to(dtype))) @ q * SCALE
        return {name: x.to(dtype)[None] for name, x in grads.items()}


def measure(ctx: Context, transport: str, tokens: int, num_heads: int, num_kv_heads: int, impl: str) -> Found:
    """On one rank: the call on its shard, then its samples by themselves."""
    draw = torch.Generator(ctx.device).manual_seed(0)  # the same on every rank
    q, k, v, dout = (
        torch.randn(tokens, heads, HEAD_DIM, generator=draw, device=ctx.device, dtype=torch.bfloat16)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    places = [ringflash.local_positions(tokens, ctx.size, rank).to(ctx.device) for rank in range(ctx.size)]
    mine = places[ctx.rank]
    shards = [x[mine][None].requires_grad_() for x in (q, k, v)]
    with over(transport):
        out, lse = ringflash.ring_attention(*shards, group=ctx.group, softmax_scale=SCALE, return_lse=True, impl=impl)
        dq, dk, dv = torch.autograd.grad(out, shards, dout[mine][None])
    out, lse = out.detach(), lse.detach()

    delta = (out[0].double() * dout[mine].double()).sum(-1).T  # (heads, rows), as lse
    everywhere = torch.empty(2, num_heads, tokens, dtype=torch.float64, device=ctx.device)
    parts = [torch.empty(2, num_heads, len(mine), dtype=torch.float64, device=ctx.device) for _ in places]
    dist.all_gather(parts, torch.stack((lse[0].double(), delta)), group=ctx.group)
    for place, part in zip(places, parts, strict=True):
        everywhere[..., place] = part

    chance = torch.Generator().manual_seed(ctx.rank)
    chunk = len(mine) // 2
    inside = torch.stack([torch.randperm(chunk, generator=chance)[:SAMPLES].sort().values for _ in range(2)])
    inside[:, 0], inside[:, -1] = 0, chunk - 1
    picked = torch.cat((inside[0], inside[1] + chunk)).to(ctx.device)
    samples = Samples(mine[picked], q, k, v, dout)
    got = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    got = {name: x[:, picked] for name, x in got.items()} | {"lse": lse[..., picked]}
    want = samples.rows(torch.float64) | samples.keys(torch.float64, *everywhere)
    baseline = samples.rows(torch.bfloat16) | samples.keys(torch.bfloat16, *everywhere)
    last = slice(int(mine[0]), int(mine[0]) + chunk)  # a chunk that all samples of the second half see but their own
    without = {"out": samples.rows(torch.float64, last)["out"][:, SAMPLES:]}
    control = tolerance.measure(without, {"out": want["out"][:, SAMPLES:]}, {"out": baseline["out"][:, SAMPLES:]})
    return Found(tolerance.measure(got, want, baseline, num_chunks=2), control)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("transport", ["messages", "copy_engine"])
def test_sampled_rows_and_keys(pool: Pool, setup: Setup, table: Table, transport: str, heads: tuple[int, int]) -> None:
    if transport == "copy_engine" and setup.backend != "nccl":
        pytest.skip("the copy engine needs GPUs")
    name = setup.backend if transport == "messages" else transport
    found = pool.run(measure, name, TOKENS[setup.backend], *heads, setup.impl, timeout_s=LIMIT_S)
    case = f"a million tokens over {name}, heads {heads[0]}/{heads[1]}"
    spent = table.add(case, [spent for spent, _ in found])
    assert all(ratio.maximum > 1 for _, control in found for ratio in control), found
    over = max(ratio.maximum for ratio in spent if ratio.name == "lse")
    assert over <= KNOWN_LSE
    assert_within([ratio for ratio in spent if ratio.name != "lse" or over <= 1])
    if over > 1:
        pytest.xfail(f"lse at {over:.2f} of its budget (docs/numerics.md)")
