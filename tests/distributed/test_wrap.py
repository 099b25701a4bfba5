"""A wrapped module equals the unwrapped one in logits, loss and every gradient; what cannot be wrapped is refused.

gloo, 2 and 4 CPU processes, fp64. The unwrapped module runs torch's own attention on the whole sequence.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ringflash
from ringflash import huggingface
from ringflash.comm.modules import buffers
from ringflash.wrap.wrapper import in_step, refuse_between_steps
from tests.helpers import models
from tests.helpers import own_models as own
from tests.helpers.pool import Context, Pool, on_ranks
from tests.helpers.ring_check import assert_trains_alike

RTOL = 1e-10

MODELS: dict[str, dict[str, Any]] = {
    "learned": {"is_causal": True},
    "rotary": {"is_causal": True, "rotary": True, "scale": 0.3, "kv_heads": 2, "enable_gqa": True},
    "bidirectional": {},
    "broken": {"is_causal": True, "broken": True},
    "bound": {"make": own.Bound},
    "latent": {"make": own.Latent},
    "partly": {"make": own.Partly},
    "reentrant": {"is_causal": True, "reentrant": True},
    "non_reentrant": {"is_causal": True, "reentrant": False, "rotary": True},
}


def loss_of(logits: torch.Tensor, labels: torch.Tensor, size: int) -> torch.Tensor:
    """`ringflash.loss`'s scale, without it."""
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total * size / (own.tokens().numel() - len(own.tokens()))


@on_ranks(2)
def test_positions_follow_documents(ctx: Context) -> None:
    """Tokens are their positions: a Lightning module knows those of each batch, whose documents differ."""
    lightning = pytest.importorskip("lightning")
    from ringflash.lightning import SequenceSharding

    strategy = SimpleNamespace(cp_group=ctx.group, layout="balanced")
    about = {"trainer": SimpleNamespace(datamodule=None), "check_sequence_sharding": False}
    module = type("Module", (SequenceSharding, lightning.LightningModule), about)()
    with mock.patch("ringflash.lightning.sharding.ranks_of", lambda _: strategy):
        for bounds in ([0, 7, 8, 24], [0, 12, 24], [0, 24]):
            batch = {"input_ids": torch.arange(24)[None], "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
            shard = module.on_before_batch_transfer(batch | {"position_ids": "document"}, 0)
            tokens = shard["input_ids"][0]
            assert torch.equal(module.positions(shard["input_ids"]), tokens)
            first = torch.tensor([max(x for x in bounds if x <= token) for token in tokens.tolist()])
            assert torch.equal(shard["position_ids"][0], tokens - first)
            assert len(shard["input_ids"][0]) == 24 // ctx.size


def equals_unwrapped(ctx: Context, name: str, compiled: bool) -> None:
    ring, whole = (own.build(own.Model, **MODELS[name]) for _ in range(2))
    assert ringflash.wrap_attention(ring, ctx.group) is ring
    tokens, labels = own.tokens(), ringflash.loss.shift_labels(own.tokens())
    backend = "eager" if name == "broken" else "aot_eager"
    run = torch.compile(ring, backend=backend, fullgraph=name != "broken") if compiled else ring
    logits, want = run(*own.shard(ctx)), whole(tokens, torch.arange(own.LENGTH))
    loss = loss_of(logits, ringflash.shard_sequence(labels, ctx.group), ctx.size)
    expected = loss_of(want, labels, 1)
    assert_close(logits.detach(), ringflash.shard_sequence(want.detach(), ctx.group))
    assert_trains_alike(ctx, ring, loss, whole, expected, rtol=RTOL)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() <= RTOL * want.abs().max()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("broken", "partly")])
@pytest.mark.parametrize("size", [2, 4])
def test_wrapped_equals_unwrapped(pool: Pool, size: int, name: str) -> None:
    pool.run(equals_unwrapped, name, False, size=size)


@pytest.mark.parametrize("name", ["rotary", "bound", "non_reentrant", "broken", "partly"])
def test_compiled_equals_unwrapped(pool: Pool, name: str) -> None:
    """One graph: wrapping does not break it, checkpointed or not; where the layer itself does, nothing is missed.

    If a function of a layer is compiled, its attention leaves the graph, so that a checkpoint around it is seen.
    """
    pool.run(equals_unwrapped, name, name != "partly", size=2, timeout_s=120)


def _replace_attention(model: nn.Module) -> None:
    model.blocks[1].attn = own.build(own.Attention, is_causal=True, rotary=True)


def _replace_blocks(model: nn.Module) -> None:
    model.blocks = own.build(own.Model, is_causal=True, rotary=True).blocks


def _adapt(model: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules=["q", "kv"], init_lora_weights=False)
    peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    model.double()


class Around(nn.Module):
    """Computes the loss in a forward, as FSDP2 wants."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(*inputs).square().sum()


class Recomputed(nn.Module):
    """A layer that a checkpoint runs again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize("sharded", ["nothing", "nothing, by parameter", "model", "around it", "told", "part of it"])
@on_ranks(2, 4)
def test_parameters_that_some_ranks_use(ctx: Context, sharded: str) -> None:
    """Half of the ranks need one expert, the others another, in the second loss none; without and with FSDP2.

    Each backward follows its forward, or both follow both forwards, and run a unit again.
    """
    ring, whole = (Around(own.build(own.Model, is_causal=True)) for _ in range(2))
    for around in (ring, whole):
        around.model.blocks = nn.ModuleList([own.build(own.Choosing)])
        around.model.blocks[0].mlp = Recomputed(around.model.blocks[0].mlp)
    ringflash.wrap_attention(ring.model, ctx.group)
    length = 4 * own.LENGTH
    tokens = torch.randint(0, own.VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    positions = ringflash.local_positions(length, ctx.size, ctx.rank)
    if not sharded.startswith("nothing"):
        mesh = DeviceMesh.from_group(ctx.group, "cpu")
        fully_shard(ring.model.blocks[0].mlp.layer if sharded == "part of it" else ring.model.blocks[0], mesh=mesh)
        fully_shard(ring.model if sharded == "model" else ring, mesh=mesh)
    if sharded == "told":
        ringflash.align_units(ring, ctx.group)
    losses = []
    for i, row in enumerate(tokens[:, None]):
        losses += [ring(ringflash.shard_sequence(row, ctx.group), positions), whole(row, torch.arange(length))]
        for around in (ring, whole):
            around.model.blocks[0].experts[1].forward = torch.zeros_like
        while losses and (i or sharded != "part of it"):
            losses.pop(0).backward()
    if sharded == "nothing":
        ringflash.average_gradients(ring.parameters(), ctx.group)
    if sharded == "nothing, by parameter":  # the loop that many programs have
        for p in ring.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=ctx.group)
                p.grad /= ctx.size
    for (name, p), q in zip(ring.named_parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == ("experts.2" in name), name
        if q.grad is not None:
            assert_close(ctx.size * (p.grad if sharded.startswith("nothing") else p.grad.full_tensor()), q.grad)


def count_tokens(layer: nn.Module, group: Any, in_place: bool) -> nn.Module:
    """Let a layer count its calls and, by a hook, the signs of its inputs, over its `group` if there is one."""
    layer.group = group
    layer.register_buffer("calls", torch.zeros(()))
    layer.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
    layer.register_buffer("own", torch.zeros(2, dtype=torch.int64), persistent=False)

    def count(layer: Any, args: Any) -> None:
        layer.own = torch.stack([(args[0] > 0).sum(), (args[0] <= 0).sum()])
        counts = layer.own.clone()
        if layer.group is not None:
            dist.all_reduce(counts, group=layer.group)
        if in_place:
            layer.counts += counts
        else:
            layer.counts = layer.counts + counts
        layer.calls += 1

    layer.register_forward_pre_hook(count)
    return layer


@pytest.mark.parametrize("kind", ["own", "transformers"])
@on_ranks(2)
def test_buffers_that_follow_the_shard(ctx: Context, kind: str) -> None:
    """They are refused on every rank, in the forward that makes them differ; summed over the ring they pass.

    After the first forwards, here two, only every second is compared.
    """
    different = "must be equal on all ranks .*, got different values of [a-z0-9.]*counts;"
    for group in (None, ctx.group):
        if kind == "own":
            model = own.build(own.Model, is_causal=True)
            layer = count_tokens(model.blocks[1], group, in_place=False)
            ringflash.wrap_attention(model, ctx.group)
            run = partial(model, *own.shard(ctx))
        else:
            pytest.importorskip("transformers")
            model = models.build(impl="sdpa").train()
            layer = count_tokens(model.model.layers[0].mlp, group, in_place=True)
            model.set_attn_implementation("ringflash")
            huggingface.set_group(model, ctx.group)
            batch = huggingface.prepare_batch(models.tokens(), group=ctx.group)
            run = partial(huggingface.CausalLMWithLoss(model, ctx.group), **batch)
        with mock.patch.object(buffers, "INTERVAL", 2):
            if group is not None:
                run()
                run()
                everywhere = layer.own.clone()
                dist.all_reduce(everywhere, group=ctx.group)
                assert torch.equal(layer.counts, 2 * everywhere)
                layer.group = None
                run()
            with pytest.raises(ValueError, match=different):
                run()


LATER = {"attention": _replace_attention, "blocks": _replace_blocks, "adapters": _adapt}


@pytest.mark.parametrize("change", LATER)
@on_ranks(2)
def test_layers_put_in_later_attend_over_the_ring(ctx: Context, change: str) -> None:
    ring, whole = (own.build(own.Model, is_causal=True) for _ in range(2))
    ringflash.wrap_attention(ring, ctx.group)
    before = ring(*own.shard(ctx))
    for model in (ring, whole):
        LATER[change](model)
    got, want = ring(*own.shard(ctx)), whole(own.tokens(), torch.arange(own.LENGTH))
    assert not torch.equal(got, before)
    assert_close(got.detach(), ringflash.shard_sequence(want.detach(), ctx.group))


@on_ranks(2, 4)
def test_transformers_model_within_a_module(ctx: Context) -> None:
    pytest.importorskip("transformers")
    whole, ring = models.build(impl="sdpa"), nn.ModuleDict({"lm": models.build(impl="sdpa")})
    ringflash.wrap_attention(ring, ctx.group)
    batch = huggingface.prepare_batch(models.tokens(), group=ctx.group)
    hidden = ring["lm"].model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    want = whole.model(models.tokens(), use_cache=False).last_hidden_state
    assert_close(hidden.last_hidden_state.detach(), ringflash.shard_sequence(want.detach(), ctx.group))
    losses = (x.square().sum() for x in (hidden.last_hidden_state, want))
    assert_trains_alike(ctx, ring["lm"].model, next(losses), whole.model, next(losses), summed=True, rtol=RTOL)


class Partly(own.Attention):
    """Checkpoints a function, not the module: the second run is outside of every forward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(is_causal=True)
        self.use_reentrant = use_reentrant

    def attend(self, *tensors: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().attend, *tensors, use_reentrant=self.use_reentrant)


class Told(own.Attention):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return CALLS[self.how](q, k, v)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(*(x.detach() for x in (q, k, v)))  # it has no backward on the CPU


LIBRARY = torch.library.Library("flash_attn_of_tests", "FRAGMENT")
LIBRARY.define("fwd(Tensor q, Tensor k, Tensor v) -> Tensor")
LIBRARY.impl("fwd", F.scaled_dot_product_attention, "CompositeImplicitAutograd")

CALLS: dict[str, Any] = {
    "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.zeros(q.shape[2], q.shape[2])),
    "dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
    "integers": lambda q, k, v: F.scaled_dot_product_attention(*(x.long() for x in (q, k, v))),
    "cross": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4]),
    "heads": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
    "dimensions": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    "operator": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
    "functional": lambda q, k, v: torch._scaled_dot_product_attention_math(q, k, v)[0],
    "namespace": lambda q, k, v: torch.ops.flash_attn_of_tests.fwd(q, k, v),
    "overload": lambda q, k, v: torch.ops.flash_attn_of_tests.fwd.default(q, k, v),
    "flex": _flex,
}
PATTERNS = {
    "mask": r"without attn_mask, got a mask", "dropout": "dropout_p of 0, got 0.1", "integers": "floating point, got",
    "cross": r"got \d+ queries and 4 keys", "heads": "enable_gqa=True", "dimensions": r"on \(batch, heads, seqlen",
    "operator": "_scaled_dot_product_flash_attention_for_cpu; call", "functional": "attention_math; call",
    "namespace": "got flash_attn_of_tests.fwd;", "overload": "fwd.default; call", "flex": "got flex_attention",
}  # fmt: skip


def refused(ctx: Context, layer: Any, error: type[Exception], message: str, last_rank: bool = False) -> None:
    """Assert that a wrapped model of such layers, on the last rank or on all, ends with this error on every rank."""
    made = layer if not last_rank or ctx.rank == ctx.size - 1 else own.Attention
    model = own.build(own.Model, make=made)
    ringflash.wrap_attention(model, ctx.group)
    with pytest.raises(error, match=message):
        model(*own.shard(ctx)).sum().backward()


@pytest.mark.parametrize("how", CALLS)
@on_ranks(2)
def test_calls_are_refused_with_the_layers_name(ctx: Context, how: str) -> None:
    error: Any = NotImplementedError
    if how == "flex":  # which compiles its own call
        error = torch._dynamo.exc.InternalTorchDynamoError
    message = rf"^(NotImplementedError: )?(?=blocks\.0\.attn must attend )[\s\S]*{PATTERNS[how]}"
    refused(ctx, partial(Told, how), error, message)


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_checkpoint_around_only_the_call_is_refused(ctx: Context, reentrant: bool) -> None:
    """The backward would run torch's attention on the shard."""
    refused(ctx, partial(Partly, reentrant), NotImplementedError, "checkpoint the module, not a function in it")


class Hidden(own.Attention):
    """Attends in a way that cannot be seen."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(
    "layer, error, message",
    [
        (partial(Told, "mask"), NotImplementedError, r"blocks\.0\.attn must attend without attn_mask"),
        (Hidden, RuntimeError, "Model must call scaled_dot_product_attention"),
    ],
)
@on_ranks(2)
def test_one_ranks_refusal_reaches_the_others(ctx: Context, layer: Any, error: type[Exception], message: str) -> None:
    """The others have gone on to the ring."""
    refused(ctx, layer, error, message, last_rank=True)


def check(ctx: Context, kind: type[own.Model], options: dict[str, Any]) -> None:
    model = ringflash.wrap_attention(own.build(kind, **options), ctx.group)

    def run(group: dist.ProcessGroup | None) -> None:
        size, rank = (1, 0) if group is None else (ctx.size, ctx.rank)
        shard = ringflash.shard_sequence(own.tokens(), group)
        model(shard, ringflash.local_positions(own.LENGTH, size, rank))

    ringflash.check_wrapped(model, run)
    assert model.training and all(block.training for block in model.blocks)


class ScaledByLength(own.Attention):
    """The planted error: a scale that grows with the length, which is the shard's."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=q.shape[2] / 100)


class Single(own.Model):
    """One layer, behind which no other is given anything."""

    def __init__(self) -> None:
        super().__init__(ScaledByLength)
        self.blocks = self.blocks[:1]


@on_ranks(2)
def test_check_finds_a_scale_of_the_shards_length(ctx: Context) -> None:
    """q, k and v are right."""
    message = r"^blocks\.0\.attn must call attention .* \(True\) and scale \(0\.32\) .*, got True and 0\.16"
    with pytest.raises(ValueError, match=message):
        check(ctx, Single, {})


def masked(logits: torch.Tensor, value: float) -> torch.Tensor:
    """Logits whose last tokens of the vocabulary are only padding."""
    return logits.masked_fill(torch.arange(logits.shape[-1]) > logits.shape[-1] - 3, value)


class Masked(own.Model):
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return masked(super().forward(tokens, positions), -torch.inf)


class Compiled(own.Model):
    """Its layers are compiled when they are first called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.blocks:
            block.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("name", ["learned", "rotary", "bound"])
@on_ranks(2, 4)
def test_check_finds_positions_counted_from_the_shard(ctx: Context, name: str) -> None:
    """On every rank, with the first layer that is given something else."""
    with pytest.raises(ValueError, match=r"^blocks\.0\.attn.*positions must be global"):
        check(ctx, own.Misplaced, MODELS[name])


class Shifted(own.Model):
    """Each token is given the previous one after the last attention."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens, positions)
        return logits + F.pad(logits[:, :-1], (0, 0, 1, 0))


class MaskedShifted(Shifted):
    """Its masked logits are larger than every difference."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens, positions)
        return masked(logits, torch.finfo(logits.dtype).min)


class HandWritten(own.Attention):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return (q @ k.transpose(2, 3)).masked_fill(hidden, -torch.inf).softmax(-1) @ v


class LastByHand(own.Model):
    """The attention of the last layer is not seen."""

    def __init__(self) -> None:
        super().__init__(is_causal=True)
        self.blocks[1].attn = HandWritten()


class Mixer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.mix = MIXERS[how]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)


class Mixing(own.Model):
    """Tokens are mixed in front of a head of zeros, whose logits are right."""

    def __init__(self, how: str) -> None:
        super().__init__(is_causal=True)
        nn.init.zeros_(self.head.weight)
        self.head = nn.Sequential(Mixer(how), self.head)


MIXERS: dict[str, Any] = {
    "shift": lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0)),
    "convolution": lambda x: F.conv1d(x.mT, torch.ones(x.shape[2], 1, 3).double(), padding=1, groups=x.shape[2]).mT,
    "cumsum": lambda x: x.cumsum(1),
    "roll": lambda x: x.roll(1, 1),
    "pooling": lambda x: x - x.mean(1, keepdim=True),
    "norm": lambda x: F.normalize(x, dim=1),
}
RETURNS = "must return the same values as in a run on the whole sequence, got a "
GIVEN = "must be given the same values as in a run on the whole sequence, got a "
OF_OUTPUTS = [
    (Shifted, MODELS["learned"], f"Shifted {RETURNS}"),
    (MaskedShifted, MODELS["learned"], f"MaskedShifted {RETURNS}"),
    (LastByHand, {}, f"blocks.1.attn.out {GIVEN}"),
    *((Mixing, {"how": how}, f"head.1 {GIVEN}") for how in MIXERS),
]


@pytest.mark.parametrize("kind, options, message", OF_OUTPUTS)
@on_ranks(2)
def test_check_finds_what_follows_the_last_attention(
    ctx: Context, kind: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check(ctx, kind, options)


class Reordered(own.Model):
    """The MLP of a layer, which treats each token separately, is given them in another order: no error."""

    def __init__(self) -> None:
        super().__init__(is_causal=True)
        mlp = self.blocks[1].mlp
        mlp.register_forward_pre_hook(lambda _, args: args[0].flip(1))
        mlp.register_forward_hook(lambda _, args, output: output.flip(1))


RIGHT = [
    *((own.Model, MODELS[name]) for name in ("learned", "rotary", "bidirectional", "bound")),
    (Masked, MODELS["learned"]),  # infinite logits
    (Compiled, MODELS["rotary"]),  # the whole sequence's attention is then an operator that wrapping refuses
    (Reordered, {}),
]


@pytest.mark.parametrize("kind, options", RIGHT)
@on_ranks(2, timeout_s=120)
def test_check_accepts_what_is_right(ctx: Context, kind: Any, options: dict[str, Any]) -> None:
    check(ctx, kind, options)


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(x, group=group)
    return x


def per_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


LOSSES: dict[str, tuple[Any, bool]] = {  # of logits, labels, mask and group; True if the ring has the same
    "mean": (lambda x, y, m, group: per_token(x, y).mean(), True),
    "masked": (lambda x, y, m, group: (per_token(x, y) * m).sum() / summed(m.sum(), group), True),
    "z": (lambda x, y, m, group: per_token(x, y).mean() + x.logsumexp(-1).square().mean(), True),
    "own_mask": (lambda x, y, m, group: (per_token(x, y) * m).sum() / m.sum(), False),
    "divisor": (lambda x, y, m, group: per_token(x, y).sum() / (y.numel() - (group is not None)), False),
    "pooled": (lambda x, y, m, group: F.cross_entropy(x.mean(1), y[:, 0] * 0), False),
    "shifted": (lambda x, y, m, group: per_token(x.roll(1, 1), y).mean(), False),
    "preference": (lambda x, y, m, group: F.softplus((per_token(x, y) - math.log(own.VOCAB)).sum(1)).mean(), False),
    "variance": (lambda x, y, m, group: per_token(x, y).mean() + x.var(1).mean(), False),
    "nan": (lambda x, y, m, group: (per_token(x, y) * m * 0).sum() / (m * 0).sum(), False),
    "nan_on_a_shard": (lambda x, y, m, group: (m[:, 9:] > 0).sum() * torch.nan if group else 0 * x.sum(), False),
}


class Same(own.Model):
    """Newly initialised: its logits are 0, and every token has the same loss."""

    def __init__(self) -> None:
        super().__init__(is_causal=True)
        nn.init.zeros_(self.head.weight)


@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.float64) for name in LOSSES), ("mean", torch.bfloat16), ("divisor", torch.bfloat16)]
)
@on_ranks(2)
def test_check_compares_the_loss(ctx: Context, name: str, dtype: torch.dtype) -> None:
    """The model's loss is ln(vocabulary) on every shard. In bf16 a loss that is 4% too large shows by random logits."""
    model = ringflash.wrap_attention(own.build(Same), ctx.group).to(dtype)
    loss, right = LOSSES[name]
    mask = (torch.arange(own.LENGTH) > own.LENGTH // 4).double().expand(2, -1)

    def run(group: dist.ProcessGroup | None) -> torch.Tensor:
        tokens, labels, m = (ringflash.shard_sequence(x, group) for x in (own.tokens(), own.tokens().flip(0), mask))
        positions = ringflash.shard_sequence(torch.arange(own.LENGTH)[None], group)[0]
        return loss(model(tokens, positions), labels, m, group) * (ctx.size if name == "masked" and group else 1)

    if right:
        ringflash.check_wrapped(model, run)
        return
    with pytest.raises(ValueError, match=r"^the loss of run, averaged over the ranks,.* must (equal|be a number)"):
        ringflash.check_wrapped(model, run)


class Pooled(own.Model):
    """Returns a result for each sequence, of its last token, its mean, or its last token wherever that is."""

    how = "mean"
    group: Any = None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = super().forward(tokens, positions)
        whole = tokens.shape[1] == own.LENGTH
        if self.how == "gathered":
            x = ringflash.unshard_sequence(x, None if whole else self.group)
        return x.mean(1) if self.how == "mean" else x[:, -1]


@pytest.mark.parametrize("how", ["mean", "gathered", "last"])
@on_ranks(2)
def test_check_compares_results_of_a_sequence(ctx: Context, how: str) -> None:
    model = own.build(Pooled, is_causal=True)
    model.how, model.group = how, ctx.group
    ringflash.wrap_attention(model, ctx.group)

    def run(group: dist.ProcessGroup | None) -> None:
        positions = ringflash.shard_sequence(torch.arange(own.LENGTH)[None], group)[0]
        model(ringflash.shard_sequence(own.tokens(), group), positions)

    if how != "last":
        ringflash.check_wrapped(model, run)
        return
    with pytest.raises(ValueError, match="Pooled must return on every rank the result for the whole sequence, or"):
        ringflash.check_wrapped(model, run)


@on_ranks(2)
def test_shards_of_other_sequences_are_refused(ctx: Context) -> None:
    """Each rank has drawn a batch of its own, as by a loader that splits data over all ranks; also copies of shards."""
    model = ringflash.wrap_attention(own.build(own.Model, **MODELS["rotary"]), ctx.group)
    right, positions = own.shard(ctx)
    other = ringflash.shard_sequence(own.tokens().roll(ctx.rank, 1), ctx.group)
    for given in (other, other.clone()):
        with pytest.raises(
            ValueError, match="sequences that shard_sequence cuts must be the same on all ranks of a ring"
        ):
            model(given, positions)
    for given in (right, right.clone()):
        model(given, positions)
    if ctx.rank:  # two sequences with this shard: it is not known which one a copy is of
        ringflash.shard_sequence(own.tokens().index_fill(1, torch.tensor([0]), 1), ctx.group)
    for _ in range(4):
        model(right.clone(), positions)
    for _ in range(7):
        model(right, positions)
    contiguous = ringflash.shard_sequence(own.tokens(), ctx.group, layout="contiguous")
    with pytest.raises(ValueError, match="cut by the layout of the module's attention, 'zigzag', got .'contiguous'"):
        model(contiguous, positions)


@on_ranks(2)
def test_forward_patched_later_is_called(ctx: Context) -> None:
    """The class of a layer is patched after the first module with such layers was wrapped."""
    shard, positions = own.shard(ctx)
    ring, whole = (own.build(own.Model, **MODELS["rotary"]) for _ in range(2))
    ringflash.wrap_attention(ring, ctx.group)
    ring(shard, positions)
    cls = type(whole.blocks[0])
    forward = cls.forward
    with mock.patch.object(cls, "forward", lambda block, *given: forward(block, *given) / 2):
        want = whole(own.tokens(), torch.arange(own.LENGTH))
        later = ringflash.wrap_attention(own.build(own.Model, **MODELS["rotary"]), ctx.group)
        for module in (ring, later):
            assert_close(module(shard, positions), ringflash.shard_sequence(want, ctx.group))


@on_ranks(2)
def test_evaluations_compare_ranks(ctx: Context) -> None:
    """Sequences and parameters of evaluations; and in training a rank that has stayed in evaluation mode."""
    model = ringflash.wrap_attention(own.build(own.Model, **MODELS["rotary"]), ctx.group)
    right, positions = own.shard(ctx)
    other = ringflash.shard_sequence(own.tokens().roll(ctx.rank, 1), ctx.group)
    with torch.no_grad():
        with pytest.raises(ValueError, match="sequences that shard_sequence cuts must be the same on all ranks"):
            model(other, positions)
        model.head.weight.add_(ctx.rank)
        with pytest.raises(ValueError, match=r"parameters must be equal on all .* values of head\.weight \(1 of "):
            model(right, positions)
        model.head.weight.sub_(ctx.rank)
        for _ in range(3):
            model(right, positions)
    model(right, positions).sum().backward()
    model.train(ctx.rank == 0)
    with pytest.raises(ValueError, match=r"got call \d+ \(forward of \S+\) .* in evaluation mode\) \(rank 1"):
        model(right, positions)


@on_ranks(2)
def test_averages_compare_parameters(ctx: Context) -> None:
    """A layer that is not wrapped was seeded by the rank. What is meant to differ is divided only."""
    layer = nn.Linear(4, 4).double()
    with torch.no_grad():
        layer.weight += ctx.rank
    layer.weight.grad, layer.bias.grad = (
        torch.full((4, 4), 2.0 + ctx.rank).double(),
        torch.arange(4.0).double() * ctx.rank,
    )
    with pytest.raises(ValueError, match=r"different values of parameter 0 \(4, 4\) \(1 of 2\); seed all ranks alike"):
        ringflash.average_gradients(layer.parameters(), ctx.group)
    layer.weight.allreduce = False  # type: ignore[attr-defined]
    ringflash.average_gradients(layer.parameters(), ctx.group)
    assert_close(layer.weight.grad, torch.full((4, 4), (2.0 + ctx.rank) / ctx.size).double())
    assert_close(layer.bias.grad, torch.arange(4.0).double() / 2)


@on_ranks(2)
def test_gradients_of_a_shard_are_refused(ctx: Context) -> None:
    """The second step averages none; forwards 1, 2 and 4 compare the ranks' parameters."""
    model = ringflash.wrap_attention(own.build(own.Model, **MODELS["rotary"]), ctx.group)
    shard, positions = own.shard(ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for averaged in (True, False):
        optimizer.zero_grad()
        model(shard, positions).square().sum().backward()
        if averaged:
            ringflash.average_gradients(model.parameters(), ctx.group)
        optimizer.step()
    model(shard, positions)
    with pytest.raises(ValueError, match="parameters must be equal on all ranks of a ring, .* got different values of"):
        model(shard, positions)


@pytest.mark.parametrize("version", [1, 2])
@on_ranks(4)
def test_fsdp_over_data_ranks_only_is_refused(ctx: Context, version: int) -> None:
    """Two rings, whose ranks each have shards of their own; with FSDP2 no parameter is in the outermost unit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    model = ringflash.wrap_attention(own.build(own.Model, **MODELS["rotary"]), mesh["ring"])
    around: nn.Module = model
    if version == 1:
        around = FullyShardedDataParallel(model, mesh["data"].get_group(), device_id=ctx.device)
    for unit in (*model.blocks, model.embedding, model.positions, model.head) if version == 2 else ():
        fully_shard(unit, mesh=mesh["data"])
    shard = ringflash.shard_sequence(own.tokens().roll(mesh["data"].get_local_rank(), 1), mesh["ring"])
    positions = ringflash.local_positions(own.LENGTH, 2, mesh["ring"].get_local_rank())
    around(shard, positions).square().sum().backward()
    torch.optim.SGD(around.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match="parameters must be equal on all ranks of a ring, .* got different values of"):
        around(shard, positions)


@on_ranks(2)
def test_transforms_of_functions_are_refused(ctx: Context) -> None:
    """The comparison of parameters, which have no values there, comes after that."""
    model = ringflash.wrap_attention(own.build(own.Model, is_causal=True), ctx.group)
    batch = own.tokens()[:, : own.LENGTH // ctx.size], torch.arange(own.LENGTH // ctx.size)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, batch).sum()

    with pytest.raises(NotImplementedError, match=r"outside of torch\.func's transforms"):
        torch.func.grad(loss)(dict(model.named_parameters()))


@pytest.mark.parametrize("kind", [own.Model, own.Bound])
@on_ranks(2)
def test_attention_between_steps_is_refused(ctx: Context, kind: Any) -> None:
    """On the ring, on every rank; also RingAttention that is called by itself, and in a copied module."""
    model = ringflash.wrap_attention(own.build(kind), ctx.group)
    refuse_between_steps(model)
    q = torch.ones(1, 4, 2, 8)
    args = (q, q, q) if kind is own.Bound else (own.tokens()[:, :8], torch.arange(8))
    for each in (model, copy.deepcopy(model)):
        call: Any = partial(each.ring if kind is own.Bound else each, *args)
        with pytest.raises(RuntimeError, match="must be called in a step of the module .* got a call between steps"):
            call()
        with in_step(each):
            call()
        with ringflash.disable_ring(each):
            call()


@on_ranks(2)
def test_disabled_ring_attends_to_whole_sequences(ctx: Context) -> None:
    """Also one rank's own, also in a compiled layer and in RingAttention; then the ring is back."""
    for kind, options in ((Compiled, MODELS["rotary"]), (own.Model, MODELS["bound"])):
        ring, whole = own.build(kind, **options), own.build(own.Model, **options)
        ringflash.wrap_attention(ring, ctx.group)
        prompt, positions, length = own.tokens()[:, :8], torch.arange(8), 7 + ctx.rank
        with torch.no_grad():
            for _ in range(2):
                with ringflash.disable_ring(ring), ringflash.disable_ring(ring):
                    assert_close(ring(prompt[:, :length], positions[:length]), whole(prompt, positions)[:, :length])
                got = ring(*own.shard(ctx))
                want = whole(own.tokens(), torch.arange(own.LENGTH))
                assert_close(got, ringflash.shard_sequence(want, ctx.group))
        if ctx.rank == 0:
            with ringflash.disable_ring(ring):
                ring(prompt, positions).sum().backward()
        with pytest.raises(ValueError, match=r"must be the one that was wrapped, .*, got its blocks\.0; pass the root"):
            with ringflash.disable_ring(ring.blocks[0]):
                pass
