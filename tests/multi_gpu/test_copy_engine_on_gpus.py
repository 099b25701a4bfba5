"""The transport "copy_engine" and CUDA graphs on GPUs of one host. Two GPUs or more.

The cases are every seventh of the distributed ones, with lengths that change from call to call, beside collectives of
torch on the same GPUs. A graph of a forward and backward is captured once and replayed on other values.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringflash
from tests.helpers import ring_check
from tests.helpers.cases import Case, all_cases
from tests.helpers.pool import Context, Pool
from tests.helpers.tolerance import Ratio, assert_within
from tests.multi_gpu.conftest import Setup
from tests.multi_gpu.test_ring_on_gpus import SECTIONS, in_sections, suited

pytestmark = pytest.mark.multi_gpu

CHUNKS = (160, 96, 512)  # tokens


def over_copy_engine(ctx: Context, cases: list[Case], dtype: str, impl: str) -> list[Ratio]:
    """Return what every case spends of its budget."""
    spent: list[Ratio] = []
    with mock.patch("ringflash.attention.plan.choose_transport", lambda *_: "copy_engine"):
        for number, case in enumerate(cases):
            beside = dist.all_reduce(torch.ones(1 << 20, device=ctx.device), group=ctx.group, async_op=True)
            spent += ring_check.measure(ctx, case, CHUNKS[number % len(CHUNKS)], dtype, impl)
            assert beside is not None
            beside.wait()
    return spent


def repeats(ctx: Context, case: Case, dtype: str, impl: str) -> bool:
    with mock.patch("ringflash.attention.plan.choose_transport", lambda *_: "copy_engine"):
        return ring_check.repeats_exactly(ctx, case, CHUNKS[0], dtype, impl)


def in_many_sections(ctx: Context, turns: bool, dtype: str, impl: str) -> list[Ratio]:
    with in_sections(turns):
        return over_copy_engine(ctx, [suited(case, impl) for case in SECTIONS], dtype, impl)


@pytest.mark.parametrize("turns", [False, True], ids=["whole", "turns"])
def test_many_sections(pool: Pool, setup: Setup, turns: bool) -> None:
    if setup.backend != "nccl":
        pytest.skip("the copy engine needs GPUs")
    for spent in pool.run(in_many_sections, turns, setup.dtype, setup.impl, timeout_s=120):
        assert_within(spent)


def test_cases(pool: Pool, setup: Setup) -> None:
    if setup.backend != "nccl":
        pytest.skip("the copy engine needs GPUs")
    cases = [suited(case, setup.impl) for case in all_cases()[::7]]
    for spent in pool.run(over_copy_engine, cases, setup.dtype, setup.impl, timeout_s=300):
        assert_within(spent)


def test_deterministic(pool: Pool, setup: Setup) -> None:
    if setup.backend != "nccl":
        pytest.skip("the copy engine needs GPUs")
    assert all(pool.run(repeats, suited(Case(), setup.impl), setup.dtype, setup.impl))


def against_deterministic(ctx: Context, impl: str, tokens: int, calls: int) -> float:
    """Largest difference of (out, dq, dk, dv) between calls at full speed and a deterministic one, over the largest."""
    torch.manual_seed(ctx.rank)
    inputs = [torch.randn(1, tokens, n, 128, device=ctx.device, dtype=torch.bfloat16) for n in (16, 4, 4, 16)]
    q, k, v = (x.requires_grad_() for x in inputs[:3])

    def results(deterministic: bool) -> list[torch.Tensor]:
        out = ringflash.ring_attention(
            q, k, v, group=ctx.group, causal=False, transport="copy_engine", impl=impl, deterministic=deterministic
        )
        assert isinstance(out, torch.Tensor)
        return [x.float() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3]))]

    want = results(True)
    worst = 0.0
    for _ in range(calls):
        differences = ((got - x).abs().max() / x.abs().max() for got, x in zip(results(False), want, strict=True))
        worst = max(worst, *(x.item() for x in differences))
    return worst


def test_no_call_overtakes_another(pool: Pool, setup: Setup) -> None:
    """Buffers are used again from section to section and call to call. A tile that came too late is off by its size."""
    if setup.backend != "nccl" or setup.impl != "hopper":
        pytest.skip("needs the speed of impl hopper on GPUs")
    assert max(pool.run(against_deterministic, setup.impl, 4096, 40, timeout_s=120)) < 2**-7


def replay_in_sections(ctx: Context, transport: str, impl: str) -> list[float]:
    with in_sections(turns=True):
        return replay(ctx, transport, impl)


def replay(ctx: Context, transport: str, impl: str) -> list[float]:
    """Largest difference of (out, dq, dk, dv) between a replay on new values and a call on them.

    Longer calls come between the capture and the replay: all buffers grow, other masks take the place of the first.
    """

    def zeros(rows: int) -> tuple[torch.Tensor, ...]:
        options = {"device": ctx.device, "dtype": torch.bfloat16, "requires_grad": True}
        return tuple(torch.zeros(1, rows, n, 128, **options) for n in (4, 2, 2))

    def step(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        out = ringflash.ring_attention(*inputs, group=ctx.group, transport=transport, impl=impl, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))

    inputs = zeros(512)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles, allocates and agrees before the capture
        step(inputs)
        step(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step(inputs)
    for rows in range(1024, 16384, 1024):
        step(zeros(rows))
    with torch.no_grad():
        for x in inputs:
            x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    replayed = [x.clone() for x in captured]
    return [(a.float() - b.float()).abs().max().item() for a, b in zip(replayed, step(inputs), strict=True)]


REPLAYS = {
    "nccl": replay,
    "nccl, sections": replay_in_sections,
    "copy_engine": replay,
    "copy_engine, sections": replay_in_sections,
}


@pytest.mark.parametrize("way", REPLAYS)
def test_graph_replays(pool: Pool, setup: Setup, way: str) -> None:
    """Deterministic: a replay has the bits of a call."""
    if setup.backend != "nccl" or setup.impl != "hopper":
        pytest.skip("captures impl hopper on GPUs")
    assert pool.run(REPLAYS[way], way.partition(",")[0], setup.impl) == [[0.0] * 4] * setup.ranks
