"""Memory that is given back to the driver behind a backward, whose lanes are late. Two ranks, which may share a GPU.

With expandable segments the allocator unmaps a block as soon as the stream that allocated it is idle. A lane that still
uses the block then ends with an illegal memory access.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import ringflash
from ringflash.comm.transport.lanes import Lanes
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup

pytestmark = pytest.mark.multi_gpu

_beside = Lanes.run_in_lane
_DELAY_CYCLES = 50_000_000  # some 30 ms


def late(self: Lanes, lane: str, work: Callable[[], None], *args: Any, **options: Any) -> Any:
    """Kernels, and what follows them, begin long after the host has returned."""

    def delayed() -> None:
        torch.cuda._sleep(_DELAY_CYCLES)
        work()

    return _beside(self, lane, delayed if lane in ("even", "odd", "end") else work, *args, **options)


def unmapped_behind_a_backward(ctx: Context, transport: str, impl: str, dtype: str) -> list[bool]:
    """Compare the gradients of three delayed backwards with those without delay."""
    torch.manual_seed(ctx.rank)
    q, k, v = (
        torch.randn(1, 8192, heads, 128, device=ctx.device, dtype=getattr(torch, dtype)).requires_grad_()
        for heads in (8, 4, 4)
    )
    dout = torch.randn_like(q)

    def gradients() -> tuple[torch.Tensor, ...]:
        out = ringflash.ring_attention(
            q, k, v, group=ctx.group, causal=False, transport=transport, impl=impl, deterministic=True
        )
        assert isinstance(out, torch.Tensor)
        torch.cuda.synchronize()
        return torch.autograd.grad(out, (q, k, v), dout)

    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        want = [x.clone() for x in gradients()]
        equal = []
        for _ in range(3):
            with mock.patch.object(Lanes, "run_in_lane", late):
                got = gradients()
                torch.cuda.empty_cache()
            torch.cuda.synchronize()
            equal += [torch.equal(one, other) for one, other in zip(got, want, strict=True)]
        return equal
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


@pytest.mark.parametrize("transport", ["copy_engine", "nccl"])
def test_memory_outlives_late_lanes(pool: Pool, setup: Setup, transport: str) -> None:
    if setup.backend != "nccl":
        pytest.skip("needs GPUs")
    for equal in pool.run(unmapped_behind_a_backward, transport, setup.impl, setup.dtype, size=2, timeout_s=120):
        assert all(equal)
