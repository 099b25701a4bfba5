"""Calls drawn at random, a few in flight at a time: what the lists of cases forget. `--random-calls 500` draws more.

A seed draws masks, layout, shapes, strides, transport and in which order the backwards run, with other messages of the
ranks between the calls. Of the first 180 seeds one, 136, exceeds the budget of lse, at head_dim 256 (docs/numerics.md).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import ringflash
from ringflash.sequence.layout import LAYOUTS, granularity
from ringflash.testing import dense, tolerance
from ringflash.testing.tolerance import Ratio, assert_within
from tests.helpers.pool import Context, Pool
from tests.helpers.ring_check import shard, strided
from tests.multi_gpu.conftest import Setup, Table

pytestmark = pytest.mark.multi_gpu

MOST_TOKENS = {"nccl": 3000, "gloo": 300}
CHUNK = 64  # rows that share a budget at least: of fewer the largest error is chance


@dataclass(frozen=True)
class Call:
    """One call, by its options; tensors follow from `seed`."""

    seed: int
    seqlen: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    causal: bool
    window_size: tuple[int, int]
    cu_seqlens: tuple[int, ...] | None
    softmax_scale: float | None
    layout: str
    strides: str
    return_lse: bool
    deterministic: bool
    transport: str
    trains: bool

    def options(self) -> dict:
        """Keywords of `ring_attention`, but for the group and the kernel."""
        bounds = None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, dtype=torch.int32)
        names = "causal", "window_size", "softmax_scale", "layout", "return_lse", "deterministic", "transport"
        return {**{name: getattr(self, name) for name in names}, "cu_seqlens": bounds}

    def masks(self) -> dict:
        """Keywords of `dense.attention`."""
        return {name: getattr(self, name) for name in ("causal", "window_size", "softmax_scale", "cu_seqlens")}


class Started(NamedTuple):
    """A call after its forward."""

    call: Call
    whole: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


def draw(seed: int, size: int, setup: Setup) -> list[Call]:
    """The calls of one seed, equal on every rank."""
    chance = random.Random(seed)
    return [_call(chance, size, setup) for _ in range(chance.choice((1, 1, 2, 3)))]


def _call(chance: random.Random, size: int, setup: Setup) -> Call:
    layout = chance.choice(LAYOUTS[:3])
    unit = granularity(size, layout)
    seqlen = unit * chance.randint(1, max(1, MOST_TOKENS[setup.backend] // unit))
    cuts = sorted(chance.choices(range(seqlen + 1), k=chance.choice((1, 2, 5, 20)))) if chance.random() < 0.4 else None
    layout = "balanced" if cuts is not None and len(cuts) == 5 else layout  # no draw: a seed's other calls stay
    num_kv_heads = chance.choice((1, 1, 2, 3, 4, 8))
    head_dims = (64, 96, 128, 192, 256) if setup.impl == "hopper" else range(8, 257, 8)
    head_dim = chance.choice(head_dims)
    window_size = (-1, -1)
    if chance.random() < 0.4:
        window_size = tuple(chance.choice((-1, 0, 1, seqlen // 3, seqlen // 7, seqlen, 2 * seqlen)) for _ in range(2))
    alone = seqlen < CHUNK * size or cuts is not None or 0 in window_size  # rows that see one key have a dq of 0
    return Call(
        seed=chance.randrange(1 << 30), seqlen=seqlen, batch=1 if cuts else chance.randint(1, 3),
        num_heads=num_kv_heads * chance.choice((1, 1, 2, 3, 4)), num_kv_heads=num_kv_heads, head_dim=head_dim,
        v_head_dim=chance.choice((head_dim, head_dim, head_dim, head_dim - 8, 8)) or head_dim,
        causal=chance.random() < 0.6, window_size=window_size,
        cu_seqlens=None if cuts is None else tuple(dict.fromkeys((0, *cuts, seqlen))),
        softmax_scale=chance.choice((None, None, 0.05, 0.5)), layout=layout,
        strides=chance.choice(("contiguous", "heads_first", "fused_qkv", "sliced")),
        return_lse=alone or chance.random() < 0.4, deterministic=chance.random() < 0.3,
        transport="gloo" if setup.backend == "gloo" else chance.choice(("nccl", "copy_engine")),
        trains=[chance.random() < 0.9 for _ in range(2)][1],  # two draws, as once: a seed's other calls stay
    )  # fmt: skip


def run(ctx: Context, seed: int, setup: Setup) -> list[Ratio]:
    """Return what all calls of a seed spend of the tolerance on this rank."""
    calls, chance = draw(seed, ctx.size, setup), random.Random(-seed)
    started = []
    for call in calls:
        started.append(_start(ctx, call, setup))
        if chance.random() < 0.5:
            dist.all_reduce(torch.ones(1 << chance.randint(0, 20), device=ctx.device))
    if chance.random() < 0.5:
        started.reverse()
    return [ratio for each in started for ratio in _finish(ctx, each, setup)]


def _start(ctx: Context, call: Call, setup: Setup) -> Started:
    generator = torch.Generator(ctx.device).manual_seed(call.seed)
    heads = {"q": call.num_heads, "k": call.num_kv_heads, "v": call.num_kv_heads, "dout": call.num_heads}
    dtype = getattr(torch, setup.dtype)
    state = torch.promote_types(dtype, torch.float32)
    whole = {
        name: torch.randn(
            call.batch, call.seqlen, number, call.v_head_dim if name in ("v", "dout") else call.head_dim,
            generator=generator, dtype=state, device=ctx.device,
        ).to(dtype)
        for name, number in heads.items()
    }  # fmt: skip
    whole["dlse"] = torch.randn(
        call.batch, call.num_heads, call.seqlen, generator=generator, dtype=state, device=ctx.device
    )
    inputs = {name: strided(shard(ctx, call, whole[name]), call.strides) for name in ("q", "k", "v")}
    for x in inputs.values():
        x.requires_grad_(call.trains)
    result = ringflash.ring_attention(**inputs, group=ctx.group, impl=setup.impl, **call.options())
    return Started(
        call, whole, inputs, dict(zip(("out", "lse"), result if call.return_lse else (result,), strict=False))
    )


def _finish(ctx: Context, started: Started, setup: Setup) -> list[Ratio]:
    """The backward of a call, and what the call spent."""
    call, whole, inputs, outputs = started
    got = {name: x.detach() for name, x in outputs.items()}
    if call.trains:
        cotangents = [shard(ctx, call, whole[f"d{name}"], name) for name in outputs]
        grads = torch.autograd.grad(list(outputs.values()), list(inputs.values()), cotangents)
        got |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    dlse = whole["dlse"] if call.return_lse else None
    exact, baseline = (
        dense.attention(*(whole[n].to(dtype) for n in ("q", "k", "v", "dout")), dlse, **call.masks())
        for dtype in (torch.float64, whole["q"].dtype)
    )
    mine, base = ({n: shard(ctx, call, x[n], n) for n in got} for x in (exact, baseline))
    rows = call.seqlen // ctx.size
    return tolerance.measure(
        got, mine, None if setup.dtype == "float64" else base, num_chunks=max(1, min(4, rows // CHUNK))
    )


def test_random_calls(pool: Pool, setup: Setup, table: Table, random_seed: int) -> None:
    spent = pool.run(run, random_seed, setup)
    assert_within(table.add(f"random-{random_seed}", spent))
