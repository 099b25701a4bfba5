"""The transport "copy_engine" and CUDA graphs, ours and inductor's, on GPUs of one host. Two GPUs or more.

The cases are every seventh of the distributed ones, with lengths that change from call to call, during collectives of
torch on the same GPUs. A graph of a forward and backward is captured once and replayed on other values.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ringflash
from ringflash.comm.transport import CopyEngine, open_transport
from ringflash.comm.transport.store_exchanges import StoreExchangeCount
from ringflash.testing.tolerance import Ratio, assert_within
from tests.helpers import ring_check
from tests.helpers.cases import Case, all_cases
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup
from tests.multi_gpu.test_ring_on_gpus import SECTIONS, in_sections, over, suited

pytestmark = pytest.mark.multi_gpu

CHUNKS = (160, 96, 512)  # tokens


def over_copy_engine(ctx: Context, cases: list[Case], dtype: str, impl: str) -> list[Ratio]:
    """Return what every case spends of its budget."""
    spent: list[Ratio] = []
    with over("copy_engine"):
        for number, case in enumerate(cases):
            beside = dist.all_reduce(torch.ones(1 << 20, device=ctx.device), group=ctx.group, async_op=True)
            spent += ring_check.measure(ctx, case, CHUNKS[number % len(CHUNKS)], dtype, impl)
            assert beside is not None
            beside.wait()
    return spent


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
    """Buffers are used again from section to section and call to call. A late tile is off by its size."""
    if setup.backend != "nccl" or setup.impl != "hopper":
        pytest.skip("needs the speed of impl hopper on GPUs")
    assert max(pool.run(against_deterministic, setup.impl, 4096, 40, timeout_s=120)) < 2**-7


def replay_in_sections(ctx: Context, transport: str, impl: str) -> list[float]:
    with in_sections(turns=True):
        return replay(ctx, transport, impl)


def replay(ctx: Context, transport: str, impl: str) -> list[float]:
    """Largest difference of (out, dq, dk, dv) between a replay on new values and a call on them.

    Longer calls are made between the capture and the replay: all buffers grow, other masks take the place of the first.
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
    "nccl": replay, "nccl, sections": replay_in_sections, "copy_engine": replay,
    "copy_engine, sections": replay_in_sections,
}  # fmt: skip


@pytest.mark.parametrize("way", REPLAYS)
def test_graph_replays(pool: Pool, setup: Setup, way: str) -> None:
    """Deterministic: a replay has the bits of a call."""
    if setup.backend != "nccl" or setup.impl != "hopper":
        pytest.skip("captures impl hopper on GPUs")
    assert pool.run(REPLAYS[way], way.partition(",")[0], setup.impl) == [[0.0] * 4] * setup.ranks


def after_a_mapping_of_one_rank(ctx: Context, impl: str) -> bool:
    """Reserve areas anew after rank 0 has mapped memory without the others; compare with the same call before."""
    torch.manual_seed(ctx.rank)
    q, k, v = (torch.randn(1, 512, n, 128, device=ctx.device, dtype=torch.bfloat16) for n in (4, 2, 2))

    def call() -> torch.Tensor:
        out = ringflash.ring_attention(q, k, v, group=ctx.group, transport="copy_engine", impl=impl)
        assert isinstance(out, torch.Tensor)
        return out

    before, memory = call(), open_transport("copy_engine", ctx.group)
    assert isinstance(memory, CopyEngine)
    ringflash.release_buffers()
    if ctx.rank == 0:
        alone = StoreExchangeCount(lambda: memory._empty(16), ctx.device)
        alone.catch_up(alone.count + 3)  # a mapping, and an exchange more
    return torch.equal(call(), before)


def test_areas_grow_after_other_groups_have_grown(pool: Pool, setup: Setup) -> None:
    if setup.backend != "nccl":
        pytest.skip("the copy engine needs GPUs")
    assert all(pool.run(after_a_mapping_of_one_rank, setup.impl))


def replay_after_backwards(ctx: Context, impl: str) -> float:
    """Largest difference between a replayed forward and a call, after a longer evaluation and longer backwards."""

    def inputs(rows: int, grad: bool = False) -> list[torch.Tensor]:
        options = {"device": ctx.device, "dtype": torch.bfloat16, "requires_grad": grad}
        return [torch.randn(1, rows, n, 128, **options) for n in (8, 4, 4)]

    def forward(tensors: list[torch.Tensor]) -> torch.Tensor:
        out = ringflash.ring_attention(*tensors, group=ctx.group, transport="copy_engine", impl=impl)
        assert isinstance(out, torch.Tensor)
        return out

    def train(rows: int) -> None:
        tensors = inputs(rows, grad=True)
        torch.autograd.grad(forward(tensors).sum(), tensors)
        torch.cuda.synchronize()

    ringflash.release_buffers()
    train(1024)
    static, side = inputs(8192), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        forward(static)
        forward(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=side):
        captured = forward(static)
    graph.replay()
    train(4096)
    with torch.no_grad():
        for x in static:
            x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        return (captured - forward(static)).abs().max().item()


def test_graph_replays_after_longer_backwards(pool: Pool, setup: Setup) -> None:
    if setup.backend != "nccl" or setup.impl != "hopper":
        pytest.skip("captures impl hopper on GPUs")
    assert pool.run(replay_after_backwards, setup.impl) == [0.0] * setup.ranks


def capture_beside_new_segments(ctx: Context, impl: str) -> str:
    """Return the error of a capture over NCCL after a program has switched expandable segments on."""
    q, k, v = (torch.zeros(1, 512, n, 128, device=ctx.device, dtype=torch.bfloat16) for n in (4, 2, 2))
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        with torch.cuda.stream(side):
            ringflash.ring_attention(q, k, v, group=ctx.group, transport="nccl", impl=impl)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            ringflash.ring_attention(q, k, v, group=ctx.group, transport="nccl", impl=impl)
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        torch.cuda.synchronize()
        ringflash.release_buffers()
        torch.cuda.empty_cache()


def test_capture_over_nccl_sees_new_segments(pool: Pool, setup: Setup) -> None:
    if setup.backend != "nccl" or setup.impl != "hopper":
        pytest.skip("captures impl hopper on GPUs")
    for error in pool.run(capture_beside_new_segments, setup.impl):
        assert error.startswith("NCCL_GRAPH_REGISTER must be 0")


def in_graphs_of_inductor(ctx: Context, impl: str) -> float:
    """Largest relative difference of (out, dq, dk, dv) between `mode="reduce-overhead"` and eager calls."""

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = ringflash.ring_attention(
            q * 1.5, k, v, group=ctx.group, transport="copy_engine", impl=impl, deterministic=True
        )
        assert isinstance(out, torch.Tensor)
        return out * 2

    fast, worst = torch.compile(layer, mode="reduce-overhead", dynamic=False), 0.0
    for step in range(8):
        rows = (512, 1024, 512, 1024, 4096, 512, 1024, 8192)[step]  # two of the graphs, longer eager calls between them
        options = {"device": ctx.device, "dtype": torch.bfloat16, "requires_grad": True}
        tensors = [torch.randn(1, rows, n, 128, **options) for n in (8, 4, 4)]
        found = []
        for call in (layer, fast if rows <= 1024 else layer):
            torch.compiler.cudagraph_mark_step_begin()
            out = call(*tensors)
            grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
            found.append([x.float().clone() for x in (out.detach(), *grads)])
        worst = max(worst, *(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found, strict=True)))
    return worst


def test_inductor_leaves_attention_out_of_its_graphs(pool: Pool, setup: Setup) -> None:
    if setup.backend != "nccl" or setup.impl != "hopper":
        pytest.skip("compiles around impl hopper on GPUs")
    assert max(pool.run(in_graphs_of_inductor, setup.impl, timeout_s=300)) < 2**-6
