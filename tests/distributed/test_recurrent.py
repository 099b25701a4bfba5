"""Recurrences over shards: gated delta rule, Mamba-2 scan and short convolutions equal those over the whole sequence.

gloo, 2 and 4 CPU processes, fp64. The recurrences here are loops over tokens.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringflash import recurrent
from ringflash.recurrent import ContiguousShard
from ringflash.sequence.layout import shard_sequence
from tests.helpers.pool import Context, Pool, on_ranks

LENGTH = 12  # three tokens a rank of four: as many as the halo
DOCUMENTS = ((0, 5, 6, 12), (0, 3, 6, 12))  # within shards, and at their ends


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loop_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule, token by token; g for each head, or for each feature of a key."""
    state = value.new_zeros(len(value), value.shape[2], key.shape[-1], value.shape[-1])
    state = state if initial_state is None else initial_state
    outs = []
    for t in range(value.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
        k, b = key[:, t, :, :, None], beta[:, t, :, None, None]
        state = state + b * k * (value[:, t, :, None] - (k * state).sum(-2, keepdim=True))
        outs.append((query[:, t, :, :, None] * state).sum(-2))
    return torch.stack(outs, 1), state


def loop_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, return_final_states: bool
) -> tuple[Tensor, Tensor]:
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    state = x.new_zeros(len(x), x.shape[2], x.shape[3], B.shape[-1])
    outs = []
    for t in range(x.shape[1]):
        state = state * (A * dt[:, t]).exp()[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outs.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outs, 1), state


def delta_inputs(batch: int, per_feature: bool) -> dict[str, Tensor]:
    shape = (batch, LENGTH, 2)
    return {
        "query": drawn(*shape, 4, seed=1),
        "key": torch.nn.functional.normalize(drawn(*shape, 4, seed=2), dim=-1),
        "value": drawn(*shape, 3, seed=3),
        "g": -drawn(*shape, *(4,) * per_feature, seed=4).abs() / 4,
        "beta": drawn(*shape, seed=5).sigmoid(),
    }


def mamba_inputs(batch: int) -> dict[str, Tensor]:
    names = {"x": (4, 3), "dt": (4,), "B": (2, 5), "C": (2, 5)}
    inputs = {name: drawn(batch, LENGTH, *shape, seed=i) for i, (name, shape) in enumerate(names.items())}
    return {**inputs, "dt_bias": drawn(4, seed=6), "A": -drawn(4, seed=7).exp(), "D": drawn(4, seed=8)}


def run(kind: str, inputs: dict[str, Tensor], shard: ContiguousShard) -> Tensor:
    if kind == "mamba2":
        return recurrent.mamba2_scan(loop_scan, **inputs, shard=shard, dt_softplus=True, dt_limit=(0.1, 2.0))
    if kind.startswith("conv"):
        weight = inputs["weight"]
        channels, width = len(weight), weight.shape[-1]

        def conv(x: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(x, (width - 1, 0))
            return torch.nn.functional.conv1d(padded, weight, groups=channels).tanh()

        return recurrent.causal_conv(conv, inputs["x"].transpose(1, 2), width, shard).transpose(1, 2)
    return recurrent.delta_rule(loop_rule, **inputs, shard=shard)


def inputs_of(kind: str, batch: int) -> dict[str, Tensor]:
    if kind.startswith("conv"):  # a halo of four tokens: with four ranks, of two of them; or of none
        return {
            "x": drawn(batch, LENGTH, 3, seed=1),
            "weight": drawn(3, 1, 1 if kind == "conv of a token" else 5, seed=2),
        }
    return mamba_inputs(batch) if kind == "mamba2" else delta_inputs(batch, kind == "kda")


def outputs_and_gradients(kind: str, inputs: dict[str, Tensor], group: Any, bounds: Any, layout: str) -> list[Tensor]:
    """This rank's outputs, in its layout, and its part of the gradients of all inputs."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    held = {
        name: recurrent.to_sequence_order(shard_sequence(x, group, 1, layout), group, layout) if x.dim() > 2 and
        x.shape[1] == LENGTH else x for name, x in leaves.items()
    }  # fmt: skip
    length = LENGTH // (1 if group is None else group.size())
    out = recurrent.from_sequence_order(run(kind, held, ContiguousShard.of(length, group, bounds)), group, layout)
    weights = drawn(len(out), LENGTH, *out.shape[2:], seed=9)
    (out * shard_sequence(weights, group, 1, layout)).sum().backward()
    return [out.detach(), *(x.grad for x in leaves.values())]  # type: ignore[misc]


def equals_whole(ctx: Context, layout: str) -> None:
    for kind in ("conv", "conv of a token", "mamba2", "delta", "kda"):
        for batch, bounds in ((2, None), *((1, bounds) for bounds in DOCUMENTS)):
            inputs = inputs_of(kind, batch)
            got, *gradients = outputs_and_gradients(kind, inputs, ctx.group, bounds, layout)
            want, *expected = documents_apart(kind, inputs, bounds)
            assert torch.allclose(got, shard_sequence(want, ctx.group, 1, layout), rtol=0, atol=1e-12)
            for gradient, whole in zip(gradients, expected, strict=True):
                dist.all_reduce(gradient, group=ctx.group)
                assert torch.allclose(gradient, whole, rtol=0, atol=1e-12), kind


def documents_apart(kind: str, inputs: dict[str, Tensor], bounds: tuple[int, ...] | None) -> list[Tensor]:
    """Outputs and gradients of one process that runs the loops on each document by itself."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    outs = []
    for a, b in zip((bounds or (0, LENGTH))[:-1], (bounds or (0, LENGTH))[1:], strict=True):
        cut = {name: x[:, a:b] if x.dim() > 2 and x.shape[1] == LENGTH else x for name, x in leaves.items()}
        outs.append(run(kind, cut, ContiguousShard(None, ((0, b - a),), 0)))
    out = torch.cat(outs, 1)
    (out * drawn(*out.shape, seed=9)).sum().backward()
    return [out.detach(), *(x.grad for x in leaves.values())]  # type: ignore[misc]


@pytest.mark.parametrize("size, layout", [(2, "zigzag"), (2, "contiguous"), (4, "contiguous")])
def test_recurrences_equal_the_whole_sequence(pool: Pool, size: int, layout: str) -> None:
    pool.run(equals_whole, layout, size=size)


@on_ranks(2)
def test_a_forgotten_state_would_be_seen(ctx: Context) -> None:
    """Negative control: without the states of previous ranks, the check above would see a difference."""
    for kind in ("conv", "mamba2", "delta"):
        inputs = inputs_of(kind, 1)
        held = {
            name: shard_sequence(x, ctx.group, 1, "contiguous") if x.dim() > 2 and x.shape[1] == LENGTH else x
            for name, x in inputs.items()
        }
        shard = ContiguousShard.of(LENGTH // ctx.size, ctx.group)
        error = (run(kind, held, shard) - run(kind, held, shard._replace(before=0))).abs().max()
        assert (error > 1e-3) == (ctx.rank > 0)


@pytest.mark.parametrize("name", ["z", "initial_states", "seq_idx"])
def test_options_of_a_shard_are_refused(name: str) -> None:
    """A gate would be applied before the states of previous ranks are added, and states to each document."""
    shard = ContiguousShard.of(LENGTH)
    with pytest.raises(
        NotImplementedError, match=f"must not describe tokens, documents, states or gates, .*, got {name}; pass"
    ):
        recurrent.mamba2_scan(loop_scan, **mamba_inputs(1), shard=shard, **{name: drawn(1, seed=1)})
    with pytest.raises(NotImplementedError, match="got initial_state; pass"):
        recurrent.delta_rule(loop_rule, **delta_inputs(1, False), shard=shard, initial_state=name)


@on_ranks(2)
def test_bounds_of_a_shard_are_refused(ctx: Context) -> None:
    """They would begin a document with each rank."""
    with pytest.raises(ValueError, match="cu_seqlens must end at the global sequence length .12., got 6"):
        ContiguousShard.of(6, ctx.group, (0, 5, 6))


def _conv(x: Tensor, group: Any, bounds: Any, layout: str) -> Tensor:
    shard = ContiguousShard.of(x.shape[1], group, bounds)
    return run("conv", {"x": x, "weight": drawn(3, 1, 5, seed=2)}, shard)


def _delta(x: Tensor, group: Any, bounds: Any, layout: str) -> Tensor:
    inputs = {name: y[:, : x.shape[1]] for name, y in delta_inputs(len(x), False).items()}
    return run("delta", inputs, ContiguousShard.of(x.shape[1], group, bounds))


DIFFERENCES = {
    "x": r"recurrent layer on \[\[1, .*\] \(rank 0\), \[\[2, .*\] \(rank 1\)",
    "bounds": r"cu_seqlens \(0, 4, 12\) \(rank 0\), \(0, 8, 12\) \(rank 1\)",
    "layout": r"layout balanced \(rank 0\), contiguous \(rank 1\)",
}


@pytest.mark.parametrize(
    ("exchange", "differs"),
    [*itertools.product((_conv, _delta), ("x", "bounds")),
     *itertools.product((recurrent.to_sequence_order, recurrent.from_sequence_order), DIFFERENCES)],
)  # fmt: skip
@on_ranks(2)
def test_exchanges_that_differ_are_refused(ctx: Context, exchange: Any, differs: str) -> None:
    """Both ranks raise, also if all messages would have equal sizes."""
    given = {"x": drawn(1, 6, 3, seed=1), "bounds": (0, 4, 12), "layout": "balanced"}
    if ctx.rank:
        given[differs] = {"x": drawn(2, 6, 3, seed=1), "bounds": (0, 8, 12), "layout": "contiguous"}[differs]
    with pytest.raises(
        ValueError, match=f"all ranks of the group must make the same call, got .*{DIFFERENCES[differs]}"
    ):
        exchange(given["x"], ctx.group, bounds=given["bounds"], layout=given["layout"])


@on_ranks(1, 2)
def test_shards_of_another_length_are_refused(ctx: Context) -> None:
    """Documents would end elsewhere; one rank's error reaches the other."""
    shard = ContiguousShard.of(6, ctx.group if ctx.size > 1 else None)
    length = 8 if ctx.rank == ctx.size - 1 else 6
    for kind in ("conv", "mamba2", "delta"):
        inputs = {name: x[:, :1].expand(-1, length, *x.shape[2:]) if x.dim() > 2 and name != "weight" else x
                  for name, x in inputs_of(kind, 1).items()}  # fmt: skip
        with pytest.raises(ValueError, match="shard must be made for the 8 tokens of a rank, got one for 6"):
            run(kind, inputs, shard)


@on_ranks(2)
def test_a_compiled_recurrence_equals_the_eager_one(ctx: Context) -> None:
    """Exchanges are left out of the graph."""
    inputs, shard = delta_inputs(1, False), ContiguousShard.of(LENGTH // 2, ctx.group, (0, 5, LENGTH))
    held = {name: shard_sequence(x, ctx.group, 1) for name, x in inputs.items()}

    def layer(value: Tensor) -> Tensor:
        value = recurrent.to_sequence_order(value, ctx.group)
        out = recurrent.delta_rule(loop_rule, **held | {"value": value}, shard=shard)
        return recurrent.from_sequence_order(out, ctx.group)

    results = []
    for call in (layer, torch.compile(layer, backend="eager")):
        value = held["value"].clone().requires_grad_()
        out = call(value)
        results.append((out, *torch.autograd.grad(out.square().sum(), value)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_steps_of_a_scan_are_computed_in_fp32() -> None:
    seen: list[Tensor] = []

    def scan(x: Tensor, dt: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen.append(dt)
        return x, None

    inputs = {name: x.bfloat16() for name, x in mamba_inputs(1).items()}
    recurrent.mamba2_scan(scan, **inputs, shard=ContiguousShard.of(LENGTH), dt_softplus=True)
    want = torch.nn.functional.softplus(inputs["dt"].float() + inputs["dt_bias"].float())
    torch.testing.assert_close(seen[0], want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "layout, length", [("zigzag", 24), ("striped", 256), ("contiguous", 12), ("balanced", 24), ("documents", 24)]
)
@on_ranks(4)
def test_order_and_back(ctx: Context, layout: str, length: int) -> None:
    whole, bounds = drawn(2, length, 3, seed=1), (0, 8, length)
    cut = partial(shard_sequence, group=ctx.group, layout=layout, cu_seqlens=torch.tensor(bounds))
    x = cut(whole).clone().requires_grad_()
    ordered = recurrent.to_sequence_order(x, ctx.group, layout, bounds)
    assert torch.equal(ordered, shard_sequence(whole, ctx.group, 1, "contiguous"))
    assert torch.equal(recurrent.from_sequence_order(ordered, ctx.group, layout, bounds), x)
    ordered.backward(shard_sequence(whole + 1, ctx.group, 1, "contiguous"))
    assert torch.equal(x.grad, cut(whole + 1))  # type: ignore[arg-type]
