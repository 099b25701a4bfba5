"""ring_attention among other things: interleaved layers, several groups at once, autograd through unshard, compile.

gloo, 2 to 4 CPU processes, fp64.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ringflash
from ringflash.memory import Memory, save_memory
from ringflash.testing import dense
from ringflash.testing.tolerance import assert_close
from tests.helpers import ring_check
from tests.helpers.cases import Case
from tests.helpers.peer_memory import messages_by_heads
from tests.helpers.pool import Context, Pool, on_ranks


@on_ranks(2, 3, 4)
def test_layers_may_interleave(ctx: Context) -> None:
    """Three layers of other lengths and masks forward, then backward in another order than a stack's."""
    cases = [Case(), Case(documents="mixed", layout="contiguous"), Case(causal=False, window="both", num_heads=2)]
    inputs, results, wants = [], [], []
    for case, chunk in zip(cases, (7, 3, 5), strict=True):
        whole = ring_check.problem(case, 2 * ctx.size * chunk, torch.float64, ctx.device)
        q, k, v = (ring_check.shard(ctx, case, x).requires_grad_() for x in whole[:3])
        bounds = case.cu_seqlens(whole.q.shape[1], chunk)
        out, lse = ringflash.ring_attention(
            q, k, v, group=ctx.group, causal=case.causal, window_size=case.window_size(chunk), layout=case.layout,
            cu_seqlens=None if bounds is None else torch.tensor(bounds, dtype=torch.int32), return_lse=True,
        )  # fmt: skip
        inputs.append((q, k, v))
        results.append(
            (out, lse, ring_check.shard(ctx, case, whole.dout), ring_check.shard(ctx, case, whole.dlse, "lse"))
        )
        want = ring_check.oracle(case, whole, chunk, torch.float64)
        wants.append({name: ring_check.shard(ctx, case, x, name) for name, x in want.items()})
    for i in (1, 2, 0):
        out, lse, dout, dlse = results[i]
        dq, dk, dv = torch.autograd.grad((out, lse), inputs[i], (dout, dlse))
        assert_close({"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}, wants[i])


@on_ranks(2, 3)
def test_rows_with_separate_documents(ctx: Context) -> None:
    """Rows of a batch are attended one after another, each within its documents; with sinks, as an extra key would."""
    case = Case(batch=2, window="left")
    whole, lists = ring_check.problem(case, 12 * ctx.size, torch.float64, ctx.device), ([0, 5], [0, 1, 9])
    bounds = [torch.tensor([*x, 12 * ctx.size], dtype=torch.int32) for x in lists]
    q, k, v = (ring_check.shard(ctx, case, x).requires_grad_() for x in whole[:3])
    window, sinks = case.window_size(6), torch.linspace(-1, 1, q.shape[2], dtype=q.dtype)
    out, lse = ringflash.ring_attention(
        q, k, v, group=ctx.group, cu_seqlens=bounds, window_size=window, return_lse=True
    )
    cotangents = (ring_check.shard(ctx, case, whole.dout), ring_check.shard(ctx, case, whole.dlse, "lse"))
    grads = torch.autograd.grad((out, lse), (q, k, v), cotangents)
    rows = [
        dense.attention(
            *(x[i : i + 1] for x in whole), causal=True, cu_seqlens=tuple(bounds[i].tolist()), window_size=window
        )
        for i in range(2)
    ]
    want = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    shards = {name: ring_check.shard(ctx, case, x, name) for name, x in want.items()}
    got = {"out": out.detach(), "lse": lse.detach()} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
    assert_close(got, shards)
    alone = ringflash.ring_attention(q, k, v, group=ctx.group, cu_seqlens=bounds, window_size=window)
    assert torch.equal(alone, out)
    share = lse.exp() / (lse.exp() + sinks.exp()[:, None])
    assert_close(
        {"out": ringflash.apply_sinks(out, lse, sinks).detach()}, {"out": (out * share.mT[..., None]).detach()}
    )
    for wrong in (bounds[:1], [0, 5], []):
        with pytest.raises(ValueError, match="cu_seqlens must be a tensor, or a list with a tensor for each row"):
            ringflash.ring_attention(q, k, v, group=ctx.group, cu_seqlens=wrong if ctx.rank else bounds[:1])
    unseeing, no_sink = lse.detach().clone(), torch.full_like(sinks, -torch.inf)
    unseeing[:, :, 0] = -torch.inf
    inputs = [x.requires_grad_() for x in (out.detach().clone(), unseeing, no_sink)]
    same = ringflash.apply_sinks(*inputs)
    assert torch.equal(same[:, 1:], out[:, 1:]) and not same[:, 0].any()
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(same.sum(), inputs))
    with pytest.raises(ValueError, match=r"sinks \(num_heads,\) \(4,\) for out .*; transpose them"):
        ringflash.apply_sinks(out, lse.mT, sinks)


@on_ranks(2)
def test_training_after_inference_mode(ctx: Context) -> None:
    """The first call allocates buffers and their views, into which later calls write."""
    case = Case(head_dim=24)
    whole = ring_check.problem(case, 2 * ctx.size * 6, torch.float64, ctx.device)
    for path in (nullcontext, messages_by_heads):
        with path():
            with torch.inference_mode():
                q, k, v = (ring_check.shard(ctx, case, x) for x in whole[:3])
                out = ringflash.ring_attention(q, k, v, group=ctx.group)
            want = ring_check.oracle(case, whole, 6, torch.float64)["out"]
            assert_close({"out": out}, {"out": ring_check.shard(ctx, case, want)})
            ring_check.check(ctx, case)


def group_name(ctx: Context) -> str:
    return dist.new_group(list(range(ctx.size))).group_name


def test_ranks_of_a_pool_name_groups_alike(pool: Pool) -> None:
    """After a body on some of them made a group, too; or meshes of later bodies would wait for each other."""
    pool.run(group_name, size=2)
    assert len(set(pool.run(group_name, size=4))) == 1


@on_ranks(4)
def test_two_groups_at_once(ctx: Context) -> None:
    """Data parallel 2 x context parallel 2: each pair has its own sequence and length."""
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("data", "context"))
    data, context = mesh["data"].get_local_rank(), mesh["context"].get_local_rank()
    inner = ctx._replace(group=mesh["context"], rank=context, size=2)
    for case in (Case(), Case(documents="mixed"), Case(causal=False, window="both", layout="contiguous")):
        ring_check.check(inner, case, chunk=4 + data)


@on_ranks(2)
def test_messages_of_the_caller_are_not_keys(ctx: Context) -> None:
    """Rank 1 waits for a message while both call; it has the size of K and V, and is sent after the call."""
    q = torch.arange(256, dtype=torch.float64).view(1, 8, 2, 16) + ctx.rank
    want = ringflash.ring_attention(q, q, q, group=ctx.group)
    message = torch.full((2 * q.numel(),), float(1 - ctx.rank), dtype=torch.float64)
    received = [dist.irecv(message, group=ctx.group, group_src=0)] if ctx.rank else []
    out = ringflash.ring_attention(q, q, q, group=ctx.group)
    if ctx.rank == 0:
        dist.send(message, group=ctx.group, group_dst=1)
    for work in received:
        work.wait()
    assert torch.equal(out, want)
    assert (message == 1).all()


@on_ranks(4)
def test_mesh_of_two_axes_or_other_ranks_is_refused(ctx: Context) -> None:
    axes = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("data", "context"))
    lower, upper = (DeviceMesh(ctx.device.type, ranks) for ranks in ([0, 1], [2, 3]))
    x = torch.ones(1, 8, 2, 16)
    for mesh, message in (
        (axes, "group must be a 1-D mesh"),
        (lower if ctx.rank > 1 else upper, "must be a mesh that holds this rank"),
    ):
        with pytest.raises(ValueError, match=message):
            ringflash.ring_attention(x, x, x, group=mesh)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "documents"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@on_ranks(2, 3)
def test_unshard_reverses_shard(ctx: Context, layout: str, dim: int) -> None:
    """unshard(shard(x)) is x; the gradient of a shard is the sum over ranks of the gradients at its positions.

    The gradient that arrives is its caller's, who may use it again.
    """
    shape = [3, 5]
    shape.insert(dim, 4 * ctx.size)
    whole = torch.arange(60.0 * ctx.size, dtype=torch.float64).reshape(shape)
    bounds = torch.tensor([0, 2 * ctx.size, 4 * ctx.size])
    shard = ringflash.shard_sequence(whole, ctx.group, dim, layout, bounds).requires_grad_()
    again = ringflash.unshard_sequence(shard, ctx.group, dim, layout, bounds)
    assert torch.equal(again, whole)
    gradient = whole * (ctx.rank + 1)
    again.backward(gradient)
    assert torch.equal(gradient, whole * (ctx.rank + 1))
    total = sum(range(1, ctx.size + 1))
    assert torch.equal(shard.grad, total * shard.detach())
    own = ringflash.unshard_sequence(shard, ctx.group, dim, layout, bounds, gradient="own")
    assert torch.equal(torch.autograd.grad(own, shard, gradient)[0], (ctx.rank + 1) * shard)


@pytest.mark.parametrize("differing", ["unshard_sequence", "dtype", "dim", "layout", "cu_seqlens", "gradient"])
@on_ranks(2)
def test_unshard_of_other_shards_is_refused(ctx: Context, differing: str) -> None:
    """An all-gather of them would have ended a process, or returned the bytes of one dtype as another's."""
    first = ctx.rank == 0
    x = torch.ones(4, 4 if first or differing != "unshard_sequence" else 2)
    if first and differing == "dtype":
        x = x.int()
    dim = 0 if first and differing == "dim" else 1
    layout = "contiguous" if differing == "unshard_sequence" or first and differing == "layout" else "balanced"
    middle = 3 if first and differing == "cu_seqlens" else 4
    with pytest.raises(ValueError, match=f"all ranks of the group must make the same call, got {differing} "):
        gradient = "own" if first and differing == "gradient" else "sum"
        ringflash.unshard_sequence(x, ctx.group, dim, layout, torch.tensor([0, middle, 8]), gradient=gradient)
    with pytest.raises(ValueError, match="gradient must be 'sum' or 'own', got 'mean'"):
        ringflash.unshard_sequence(torch.ones(4, 4), ctx.group, gradient="mean" if first else "sum")
    if differing == "gradient":
        with pytest.raises(ValueError, match="gradient must be 'sum' or 'own', got 'mean'"):
            torch.compile(ringflash.unshard_sequence, backend="eager")(torch.ones(4, 4), ctx.group, gradient="mean")


@on_ranks(3)
def test_shard_is_differentiable(ctx: Context) -> None:
    """The gradient of the whole tensor is zero outside the shard."""
    whole = torch.ones(2, 4 * ctx.size, requires_grad=True)
    ringflash.shard_sequence(whole, ctx.group).sum().backward()
    mine = ringflash.local_positions(4 * ctx.size, ctx.size, ctx.rank)
    expected = torch.zeros_like(whole)
    expected[:, mine] = 1
    assert torch.equal(whole.grad, expected)


class MLP(torch.nn.Module):
    """A gated MLP, as in transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_tiled_mlps_learn_under_fsdp1(ctx: Context, use_orig_params: bool) -> None:
    """A step of SGD equals that of a module without tiles on one process, which is given what all ranks are.

    FSDP1 has views of a flat parameter in the place of the MLPs' own.
    """
    torch.manual_seed(0)
    plain = torch.nn.Sequential(MLP(), MLP())
    tiled = copy.deepcopy(plain)
    save_memory(tiled, Memory(mlp_tile_tokens=3))
    model = FullyShardedDataParallel(
        tiled, ctx.group, auto_wrap_policy=ModuleWrapPolicy({MLP}), use_orig_params=use_orig_params,
        device_id=ctx.device,
    )  # fmt: skip
    x = torch.randn(ctx.size, 8, 8, dtype=torch.float64)
    for module, rows in ((plain, x), (model, x[ctx.rank, None])):
        module(rows).square().mean().backward()
        torch.optim.SGD(module.parameters(), 0.5).step()
    with FullyShardedDataParallel.summon_full_params(model):
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
