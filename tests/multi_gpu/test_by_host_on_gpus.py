"""Exchange of heads on GPUs, in pretended hosts, low precision by the tolerance policy.

The first half of the ranks is one host and the second half another, as a mesh or patched names say; or all are one
host. Heads travel over the copy engine or NCCL, keys between hosts over NCCL. Real hosts have not been tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ringflash
from ringflash.comm.group import Host
from ringflash.comm.transport import copy_engine, registry
from ringflash.testing.tolerance import Ratio, assert_within
from tests.helpers import ring_check
from tests.helpers.cases import Case
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup, Table
from tests.multi_gpu.test_copy_engine_on_gpus import replay
from tests.multi_gpu.test_ring_on_gpus import CHUNK, suited

pytestmark = pytest.mark.multi_gpu

CASES = [
    Case(num_heads=8, num_kv_heads=8),
    Case(num_heads=8, num_kv_heads=2, documents="mixed", window="left"),
    Case(num_heads=8, num_kv_heads=1, causal=False, window="both", layout="contiguous", batch=2),
    Case(num_heads=8, num_kv_heads=4, layout="striped", documents="crossing"),
]


@contextmanager
def heads_over(name: str) -> Iterator[None]:
    """Heads travel over the copy engine, or by messages since GPUs are out of reach; checked at the end."""
    with mock.patch.dict(registry._open, clear=True):
        if name == "copy_engine":
            yield
        else:
            with out_of_reach():
                yield
        used = {registry.transport_name(both[1]) for key, both in registry._open.items() if "heads in" in key[0]}
        assert used <= {name if torch.cuda.is_available() else "gloo"}


def out_of_reach() -> mock._patch:
    return mock.patch.object(copy_engine, "_check_locations", mock.Mock(side_effect=copy_engine.OutOfReach("planted")))


def measure(ctx: Context, transport: str, way: str, *args: object) -> list[Ratio]:
    case, *rest = args
    assert isinstance(case, Case)
    with heads_over("nccl" if "messages" in way else "copy_engine"):
        return ring_check.measure(_on_hosts(ctx, transport), replace(case, transport=transport), *rest)  # type: ignore[arg-type]


def _on_hosts(ctx: Context, transport: str) -> Context:
    if transport == "ulysses":
        return ctx
    grid = torch.arange(ctx.size).view(2, -1)
    return ctx._replace(group=DeviceMesh(ctx.device.type, grid, mesh_dim_names=("host", "gpu")))


@pytest.mark.parametrize("way", ["copy engine", "messages"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_by_host(pool: Pool, setup: Setup, table: Table, case: Case, way: str) -> None:
    spent = pool.run(measure, "by_host", way, suited(case, setup.impl), CHUNK, setup.dtype, setup.impl)
    assert_within(table.add(f"by_host-{case}-{way}", spent))


@pytest.mark.parametrize("way", ["copy engine", "messages"])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_ulysses(pool: Pool, setup: Setup, table: Table, case: Case, way: str) -> None:
    spent = pool.run(measure, "ulysses", way, suited(case, setup.impl), CHUNK, setup.dtype, setup.impl)
    assert_within(table.add(f"ulysses-{case}-{way}", spent))


def chosen_by_auto(ctx: Context, *args: object) -> tuple[list[Ratio], str]:
    """Two calls of a group whose ranks are on two hosts, as far as they can tell; and the transport of the next."""
    case, *rest = args
    assert isinstance(case, Case)
    ctx = ctx._replace(group=dist.new_group(list(range(ctx.size))))
    x = torch.ones(1, 128, case.num_heads, 64, dtype=torch.bfloat16, device=ctx.device)
    with (
        out_of_reach(),
        mock.patch("ringflash.comm.hosts.this_host", lambda: Host(f"host{2 * ctx.rank // ctx.size}", "")),
    ):
        spent = [ratio for _ in range(2) for ratio in ring_check.measure(ctx, case, *rest)]  # type: ignore[arg-type]
        return spent, ringflash.explain(x, x, x, group=ctx.group).algorithm


def test_auto(pool: Pool, setup: Setup, table: Table) -> None:
    if setup.backend != "nccl":
        pytest.skip("auto on CPUs is gloo")
    if setup.ranks < 4:
        pytest.skip("two hosts of one GPU exchange nothing")
    spent = pool.run(chosen_by_auto, suited(CASES[0], setup.impl), CHUNK, setup.dtype, setup.impl)
    assert_within(table.add("by_host-auto", [ratios for ratios, _ in spent]))
    assert {transport for _, transport in spent} == {"by_host"}


def replay_on_hosts(ctx: Context, transport: str, impl: str) -> list[float]:
    return replay(_on_hosts(ctx, transport), transport, impl)


@pytest.mark.parametrize("transport", ["ulysses", "by_host"])
def test_graph_replays(pool: Pool, setup: Setup, transport: str) -> None:
    if setup.backend != "nccl" or setup.impl != "hopper":
        pytest.skip("captures impl hopper on GPUs")
    assert pool.run(replay_on_hosts, transport, setup.impl) == [[0.0] * 4] * setup.ranks
