"""A hundred steps in a row whose lengths and masks change, while collectives are in flight on the same GPUs.

A step is forward and backward of two layers, as FSDP2 has them: the next weights are gathered under an attention, and
gradients are scattered under the backward. Nothing is read between steps, so that they follow one another closely; at
the end every tensor of every step is compared with fp64.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import ringflash
from ringflash.testing import tolerance
from ringflash.testing.tolerance import Ratio, assert_within
from tests.helpers import ring_check
from tests.helpers.cases import Case
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup, Table
from tests.multi_gpu.test_ring_on_gpus import over, suited

pytestmark = pytest.mark.multi_gpu

NUM_STEPS = 100
CHUNKS = {"nccl": (160, 32, 1024, 96), "gloo": (32, 96, 64)}
CASES = [
    Case(num_heads=8, num_kv_heads=2, head_dim=128),
    Case(window="left", documents="crossing"),
    Case(causal=False, num_heads=6, num_kv_heads=2, head_dim=192),
    Case(documents="mixed", layout="striped"),
]
WEIGHTS = {"nccl": 1 << 20, "gloo": 1 << 10}  # elements a rank gathers and scatters

Tensors = dict[str, torch.Tensor]


class Layer(NamedTuple):
    """One attention: this rank's q, k, v, the gradients from its loss, and what is right."""

    case: Case
    chunk: int
    inputs: list[torch.Tensor]
    cotangents: tuple[torch.Tensor, ...]
    want: Tensors
    baseline: Tensors | None

    def options(self) -> dict:
        """Keywords of `ring_attention`."""
        num_tokens = self.want["out"].shape[1] * dist.get_world_size()
        bounds = self.case.cu_seqlens(num_tokens, self.chunk)
        return {
            "causal": self.case.causal,
            "window_size": self.case.window_size(self.chunk),
            "cu_seqlens": None if bounds is None else torch.tensor(bounds, dtype=torch.int32),
            "layout": self.case.layout,
        }


def layer(ctx: Context, case: Case, chunk: int, dtype: torch.dtype) -> Layer:
    """Drawn from the case, the same on every rank."""
    whole = ring_check.problem(case, 2 * ctx.size * chunk, dtype, ctx.device)

    def right(dtype: torch.dtype) -> Tensors:
        found = ring_check.oracle(case, whole, chunk, dtype)
        return {name: ring_check.shard(ctx, case, x, name) for name, x in found.items()}

    want, baseline = right(torch.float64), None if dtype == torch.float64 else right(dtype)
    inputs = [ring_check.shard(ctx, case, x).requires_grad_() for x in whole[:3]]
    cotangents = (ring_check.shard(ctx, case, whole.dout), ring_check.shard(ctx, case, whole.dlse, "lse"))
    return Layer(case, chunk, inputs, cotangents, want, baseline)


def steps(ctx: Context, transport: str, setup: Setup) -> tuple[list[Ratio], bool]:
    """Return what the tensors of all steps spend, and whether the other collectives brought what they should."""
    draw = random.Random(7)
    dtype, backend = getattr(torch, setup.dtype), setup.backend
    layers = [layer(ctx, suited(x, setup.impl), n, dtype) for x in CASES for n in CHUNKS[backend]]
    weights = torch.empty(WEIGHTS[backend], device=ctx.device)
    gathered, scattered = torch.empty(ctx.size, len(weights), device=ctx.device), torch.empty_like(weights)
    found: list[tuple[Layer, Tensors]] = []
    sums, expected = [], []
    with over(transport):
        for step in range(NUM_STEPS):
            both = draw.sample(layers, 2)
            weights.fill_(step + ctx.rank)
            gather = dist.all_gather_into_tensor(gathered.view(-1), weights, group=ctx.group, async_op=True)
            results = [
                ringflash.ring_attention(*x.inputs, group=ctx.group, impl=setup.impl, return_lse=True, **x.options())
                for x in both
            ]
            gather.wait()
            scatter = dist.reduce_scatter_tensor(scattered, gathered.view(-1), group=ctx.group, async_op=True)
            for x, (out, lse) in reversed(list(zip(both, results, strict=True))):
                dq, dk, dv = torch.autograd.grad((out, lse), x.inputs, x.cotangents)
                got = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
                found.append((x, {name: value.detach() for name, value in got.items()}))
            scatter.wait()
            sums.append(scattered.sum(dtype=torch.float64))
            expected.append(float(len(weights) * ctx.size * (step + ctx.rank)))
    spent = [r for x, got in found for r in tolerance.measure(got, x.want, x.baseline, num_chunks=2)]
    return spent, torch.stack(sums).tolist() == expected


@pytest.mark.parametrize("transport", ["copy_engine", "nccl"])
def test_hundred_steps(pool: Pool, setup: Setup, table: Table, transport: str) -> None:
    if setup.backend == "gloo":
        if transport == "copy_engine":
            pytest.skip("the copy engine needs GPUs")
        transport = "gloo"
    results = pool.run(steps, transport, setup, timeout_s=240)
    assert_within(table.add(f"a hundred steps over {transport}", [spent for spent, _ in results]))
    assert all(right for _, right in results)
