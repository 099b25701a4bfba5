"""Dropout outside attention: ranks that are seeded alike draw different masks, again in recomputation, and stay alike.

gloo, 2 CPU processes, fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringflash
from ringflash import huggingface
from ringflash.comm import cuda_graphs, seeding
from ringflash.huggingface import forward_inputs
from tests.helpers import models
from tests.helpers import own_models as own
from tests.helpers.pool import Context, on_ranks


def gathered(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(found, x.contiguous(), group=group)
    return found


def assert_alike(group: dist.ProcessGroup) -> None:
    """Later draws, such as a loader's, are equal on all ranks."""
    first, *others = gathered(torch.get_rng_state(), group)
    assert all(torch.equal(first, x) for x in others)


def assert_independent(masks: list[Tensor]) -> None:
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < (one != other).double().mean() < 0.6


@pytest.mark.parametrize("reentrant", [None, False, True])
@on_ranks(2)
def test_transformers_model(ctx: Context, reentrant: bool | None) -> None:
    """The masks of two forwards on two ranks differ; with checkpointed layers the gradients are the same to the bit."""
    transformers = pytest.importorskip("transformers")

    def step(reentrant: bool | None, rate: float) -> tuple[list[Tensor], list[Any], Tensor]:
        config = transformers.PhiConfig(**models.TINY, embd_pdrop=rate, resid_pdrop=rate, hidden_act="gelu")
        with seeding.seeded(0):
            model = transformers.PhiForCausalLM._from_config(
                config, attn_implementation="ringflash", dtype=torch.float64
            )
        huggingface.set_group(model, ctx.group)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        masks: list[Tensor] = []
        model.model.embed_dropout.register_forward_hook(lambda _, x, y: masks.append((y != 0).double()))
        model.train()
        batch = huggingface.prepare_batch(models.tokens(), group=ctx.group)
        labels = batch["shift_labels"]
        torch.manual_seed(5)
        before = torch.get_rng_state()
        for _ in range(2):
            model(**batch, labels=labels).loss.backward()
        return masks, [p.grad for p in model.parameters()], before

    huggingface.register()
    masks, gradients, before = step(reentrant, 0.5)
    assert_independent([x for mask in masks for x in gathered(mask, ctx.group)])
    assert_alike(ctx.group)
    assert not torch.equal(torch.get_rng_state(), before)
    for got, want in zip(gradients, step(None, 0.5)[1], strict=True):
        assert torch.equal(got, want)
    *_, before = step(reentrant, 0.0)
    assert torch.equal(torch.get_rng_state(), before), "without dropout nothing is drawn"


@on_ranks(2)
def test_a_captured_forward_seeds_nothing(ctx: Context) -> None:
    """torch raises if generators are read then, so a model with dropout is refused, and one without runs as before."""
    transformers = pytest.importorskip("transformers")
    huggingface.register()
    config = transformers.PhiConfig(**models.TINY, embd_pdrop=0.0, resid_pdrop=0.5, hidden_act="gelu")
    model = transformers.PhiForCausalLM._from_config(config, attn_implementation="ringflash")
    huggingface.set_group(model, ctx.group)
    batch = huggingface.prepare_batch(models.tokens(), group=ctx.group)
    with (
        mock.patch.object(cuda_graphs, "capturing", lambda device: True),
        mock.patch.object(cuda_graphs, "check_growth"),  # areas over gloo are those of one call
    ):
        with pytest.raises(NotImplementedError, match="dropout must be 0 while a CUDA graph is captured, got layers.0"):
            model.train()(**batch)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        with mock.patch.object(forward_inputs, "seeded_by_rank", mock.Mock(side_effect=AssertionError)):
            model(**batch)


@on_ranks(2)
def test_refused_forward_leaves_the_generators(ctx: Context) -> None:
    pytest.importorskip("transformers")
    model = models.build().train()
    huggingface.set_group(model, ctx.group)
    batch = huggingface.prepare_batch(models.tokens(), group=ctx.group)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for wrong in ({"position_ids": batch["position_ids"] + 1}, {}):
        with pytest.raises(ValueError, match="position_ids must be") if wrong else nullcontext():
            model.model(**batch | wrong)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_generators_of_both_devices_are_seeded(on_gpu: bool) -> None:
    """A forward on a GPU draws from its generator, for which a second one of the CPU stands, and from no other."""
    gpu = torch.Generator()
    drawn, after = [], []
    with mock.patch.object(torch.cuda, "default_generators", (gpu,)):
        for rank in range(2):
            for generator in (torch.default_generator, gpu):
                generator.manual_seed(5)
            for _ in range(2):
                with seeding.seeded_by_rank(mock.Mock(**{"rank.return_value": rank}), torch.device("cuda", 0)):
                    drawn.append(torch.rand(8, generator=gpu if on_gpu else None))
            after.append([torch.get_rng_state(), gpu.get_state()])
    assert not any(torch.equal(x, y) for x, y in combinations(drawn, 2))
    assert all(map(torch.equal, *after))


class Dropping(own.Model):
    """Own layers with dropout between them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(is_causal=True)
        self.after = nn.ModuleList(After(**options) for _ in self.blocks)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(positions)
        for block, after in zip(self.blocks, self.after, strict=True):
            x = after(block(x, positions))
        return self.head(x)


class After(nn.Module):
    """Dropout by a layer and by a function, checkpointed as a module or only the function."""

    def __init__(self, reentrant: bool | None, function: bool = False) -> None:
        super().__init__()
        self.drop, self.reentrant, self.function = Drop(), reentrant, function

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.drop(x)
        run = nn.functional.dropout if self.function else self.drop
        return checkpoint(run, x, use_reentrant=self.reentrant)


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.masks.append((y.detach() != 0).double())
        return nn.functional.dropout(y, 0.5)


def step(ctx: Context, compiled: bool, **options: Any) -> tuple[list[Tensor], list[Any]]:
    """Masks of the two layers, and gradients."""
    model = own.build(Dropping, **options)
    ringflash.wrap_attention(model, ctx.group)
    run = torch.compile(model, backend="eager") if compiled else model
    torch.manual_seed(5)
    run(*own.shard(ctx)).square().sum().backward()
    torch._dynamo.reset()  # other tests compile the same frames, up to a limit
    return [x.drop.masks[0] for x in model.after], [p.grad for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_own_module(ctx: Context, reentrant: bool | None, compiled: bool) -> None:
    masks, gradients = step(ctx, compiled, reentrant=reentrant)
    assert_independent([x for mask in masks for x in gathered(mask, ctx.group)])
    assert_alike(ctx.group)
    for got, want in zip(gradients, step(ctx, False, reentrant=None)[1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_checkpoint_that_draws_another_mask_is_refused(ctx: Context, reentrant: bool) -> None:
    with pytest.raises(NotImplementedError, match="after.0: dropout runs inside a checkpoint .* covers only a part"):
        step(ctx, False, reentrant=reentrant, function=True)


class Random(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw, self.drawn = draw, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.drawn = self.draw(torch.full_like(x, -1.0))
        return x


@pytest.mark.parametrize(
    "draw",
    [nn.RReLU(), nn.functional.gumbel_softmax, partial(nn.functional.alpha_dropout, training=True)],
    ids=["rrelu", "gumbel_softmax", "alpha_dropout"],
)
@on_ranks(2)
def test_other_functions_that_draw_for_each_element(ctx: Context, draw: Callable[[Tensor], Tensor]) -> None:
    model = own.build(Dropping, reentrant=None)
    model.after[0].drop = Random(draw)
    ringflash.wrap_attention(model, ctx.group)
    torch.manual_seed(5)
    model(*own.shard(ctx))
    one, other = gathered(model.after[0].drop.drawn, ctx.group)
    assert (one != other).double().mean() > 0.3
    assert_alike(ctx.group)


@on_ranks(2)
def test_a_whole_graph_with_dropout_is_refused(ctx: Context) -> None:
    model = own.build(Dropping, reentrant=None)
    ringflash.wrap_attention(model, ctx.group)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fullgraph must be False for a wrapped layer with dropout"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(*own.shard(ctx))
    torch._dynamo.reset()
