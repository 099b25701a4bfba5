"""Exchange of heads on GPUs, in pretended hosts: NCCL between all ranks, low precision by the tolerance policy.

The first half of the ranks is one host and the second half another, as a mesh says; or all are one host. Real hosts
have not been tested.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import ringflash
from tests.helpers import ring_check
from tests.helpers.cases import Case
from tests.helpers.pool import Context, Pool
from tests.helpers.tolerance import Ratio, assert_within
from tests.multi_gpu.conftest import Setup, Table
from tests.multi_gpu.test_ring_on_gpus import CHUNK, suited

pytestmark = pytest.mark.multi_gpu

CASES = [
    Case(num_heads=8, num_kv_heads=8),
    Case(num_heads=8, num_kv_heads=2, documents="mixed", window="left"),
    Case(num_heads=8, num_kv_heads=1, causal=False, window="both", layout="contiguous", batch=2),
    Case(num_heads=8, num_kv_heads=4, layout="striped", documents="crossing"),
]


def measure(ctx: Context, transport: str, hops: bool, *args: object) -> list[Ratio]:
    case, *rest = args
    assert isinstance(case, Case)
    with ring_check.by_hops(hops):
        return ring_check.measure(_on_hosts(ctx, transport), replace(case, transport=transport), *rest)  # type: ignore[arg-type]


def _on_hosts(ctx: Context, transport: str) -> Context:
    if transport == "ulysses":
        return ctx
    grid = torch.arange(ctx.size).view(2, -1)
    return ctx._replace(group=DeviceMesh(ctx.device.type, grid, mesh_dim_names=("host", "gpu")))


@pytest.mark.parametrize("by_hops", [False, True], ids=["by heads", "by hops"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_by_host(pool: Pool, setup: Setup, table: Table, case: Case, by_hops: bool) -> None:
    spent = pool.run(measure, "by_host", by_hops, suited(case, setup.impl), CHUNK, setup.dtype, setup.impl)
    assert_within(table.add(f"by_host-{case}{'-by-hops' * by_hops}", spent))


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_ulysses(pool: Pool, setup: Setup, table: Table, case: Case) -> None:
    spent = pool.run(measure, "ulysses", False, suited(case, setup.impl), CHUNK, setup.dtype, setup.impl)
    assert_within(table.add(f"ulysses-{case}", spent))


def capture(ctx: Context) -> str:
    x = torch.ones(1, 128, 8, 64, dtype=torch.bfloat16, device=ctx.device)
    ringflash.ring_attention(x, x, x, group=ctx.group, transport="ulysses", impl="flash2")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError) as error, torch.cuda.graph(graph):
        ringflash.ring_attention(x, x, x, group=ctx.group, transport="ulysses", impl="flash2")
    return str(error.value)


def test_capture_is_refused(pool: Pool, setup: Setup) -> None:
    if setup.backend != "nccl":
        pytest.skip("a CPU has no graphs")
    assert all("must not be captured into a CUDA graph" in text for text in pool.run(capture))
