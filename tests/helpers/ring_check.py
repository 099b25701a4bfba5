"""Run one case through `ring_attention` on all ranks and compare with attention of the whole sequence.

Each rank computes the oracle by itself from the same seed, so that nothing but the call under test communicates.
"""

import zlib
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

import ringflash
from ringflash.testing import dense, tolerance
from ringflash.testing.tolerance import SEQUENCE_DIM, Ratio, assert_within
from tests.helpers.cases import Case
from tests.helpers.pool import Context


class Problem(NamedTuple):
    """The whole sequence in the dtype under test: (batch, seqlen, heads, head_dim); dlse (batch, heads, seqlen)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor


def check(ctx: Context, case: Case, chunk: int = 6, dtype: str = "float64", impl: str = "reference") -> list[Ratio]:
    """Assert that out, lse, dq, dk and dv of this rank keep within the tolerance; return what they spent of it."""
    spent = measure(ctx, case, chunk, dtype, impl)
    assert_within(spent)
    return spent


def measure(ctx: Context, case: Case, chunk: int, dtype: str, impl: str) -> list[Ratio]:
    """Return what out, lse, dq, dk and dv of this rank spend of the tolerance, each of its two halves by itself."""
    whole = problem(case, 2 * ctx.size * chunk, getattr(torch, dtype), ctx.device)
    want = oracle(case, whole, chunk, torch.float64)
    baseline = None if dtype == "float64" else oracle(case, whole, chunk, whole.q.dtype)
    got = run(ctx, case, whole, chunk, impl)
    mine = {name: shard(ctx, case, want[name], name) for name in got}
    base = baseline and {name: shard(ctx, case, baseline[name], name) for name in got}
    return tolerance.measure(got, mine, base, num_chunks=2)


def repeats_exactly(ctx: Context, case: Case, chunk: int, dtype: str, impl: str) -> bool:
    """Return whether two deterministic runs agree in every bit."""
    whole = problem(case, 2 * ctx.size * chunk, getattr(torch, dtype), ctx.device)
    first, second = (run(ctx, case, whole, chunk, impl, deterministic=True) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def assert_trains_alike(
    ctx: Context, ring: torch.nn.Module, loss: torch.Tensor, whole: torch.nn.Module, want: torch.Tensor,
    *, summed: bool = False, rtol: float = 1e-10,
) -> None:  # fmt: skip
    """Run both backwards; losses and gradients, averaged or summed over the ranks, are those of one process."""
    loss.backward()
    want.backward()
    both = zip(ring.parameters(), whole.parameters(), strict=True)
    pairs = [(loss.detach(), want.detach()), *((p.grad, q.grad) for p, q in both if q.grad is not None)]
    for got, expected in pairs:
        dist.all_reduce(got, group=ctx.group)
        assert torch.isfinite(got).all()
        assert (got / (1 if summed else ctx.size) - expected).abs().max() <= rtol * expected.abs().max()


def problem(case: Case, seqlen: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case} {seqlen}".encode()))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    rows = (case.batch, seqlen)
    q, k, v, dout = (draw(*rows, n, case.head_dim) for n in (case.num_heads, *2 * [case.num_kv_heads], case.num_heads))
    v, dout = (x[..., : case.value_dim].contiguous() for x in (v, dout))
    if case.strides == "expanded_dout":
        dout = dout[:, :, :1, :1].expand_as(q)
    dlse = draw(case.batch, case.num_heads, seqlen).to(torch.promote_types(dtype, torch.float32))
    return Problem(q, k, v, dout, dlse * case.lse_gradient)


def oracle(case: Case, whole: Problem, chunk: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Attention of the whole sequence on this device."""
    state = torch.promote_types(dtype, torch.float32)
    q, k, v, dout = (x.to(dtype) for x in whole[:4])
    return dense.attention(
        q, k, v, dout, whole.dlse.to(state), causal=case.causal, window_size=case.window_size(chunk),
        cu_seqlens=case.cu_seqlens(q.shape[1], chunk), softmax_scale=case.softmax_scale,
    )  # fmt: skip


def run(
    ctx: Context, case: Case, whole: Problem, chunk: int, impl: str, *, deterministic: bool = False
) -> dict[str, torch.Tensor]:
    """out, dq, dk and dv of this rank by `ring_attention`, and lse if the loss sees it."""
    q, k, v = (strided(shard(ctx, case, x), case.strides).requires_grad_() for x in whole[:3])
    bounds = case.cu_seqlens(whole.q.shape[1], chunk)
    result = ringflash.ring_attention(
        q, k, v, group=ctx.group, causal=case.causal, window_size=case.window_size(chunk),
        cu_seqlens=None if bounds is None else torch.tensor(bounds, dtype=torch.int32),
        softmax_scale=case.softmax_scale, layout=case.layout, impl=impl, return_lse=case.lse_gradient,
        deterministic=deterministic, transport=case.transport,
    )  # fmt: skip
    dout = shard(ctx, case, whole.dout)
    if case.strides == "expanded_dout":
        dout = dout[:, :, :1, :1].expand_as(q)
    outputs = dict(zip(("out", "lse"), result if case.lse_gradient else (result,), strict=False))
    cotangents = (dout, shard(ctx, case, whole.dlse, "lse"))[: len(outputs)]
    dq, dk, dv = torch.autograd.grad(tuple(outputs.values()), (q, k, v), cotangents)
    return {name: x.detach() for name, x in outputs.items()} | {"dq": dq, "dk": dk, "dv": dv}


def strided(x: torch.Tensor, strides: str) -> torch.Tensor:
    """The same values in the memory order a model may hand over."""
    if strides == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "fused_qkv":
        return torch.cat((x, x, x), 2)[:, :, : x.shape[2]].detach()
    if strides == "sliced":
        return torch.stack((x, x), -1)[..., 0].detach()
    return x.contiguous()


class HasLayout(Protocol):
    """A layout and documents: bounds, or a function of the length and of the tokens of a chunk."""

    @property
    def layout(self) -> str: ...
    @property
    def cu_seqlens(self) -> Any: ...


def shard(ctx: Context, case: HasLayout, x: torch.Tensor, name: str = "") -> torch.Tensor:
    """This rank's rows, by global position."""
    dim = SEQUENCE_DIM.get(name, 1)
    positions = positions_of(case, x.shape[dim], ctx.size, ctx.rank)
    return x.index_select(dim, positions.to(x.device))


def positions_of(case: HasLayout, seqlen: int, size: int, rank: int) -> torch.Tensor:
    """Positions of the tokens of a rank."""
    bounds = case.cu_seqlens(seqlen, seqlen // (2 * size)) if callable(case.cu_seqlens) else case.cu_seqlens
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    return ringflash.local_positions(seqlen, size, rank, case.layout, cu_seqlens)
