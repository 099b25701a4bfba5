"""Changes to a transformers model after `set_group`: refused on every rank, or right; `generate` on one rank.

gloo, 2 CPU processes, fp64; needs the huggingface extra.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.prune import l1_unstructured

from ringflash import huggingface, shard_sequence, wrap_attention
from tests.distributed.test_huggingface import build, compare, tokens
from tests.helpers import models
from tests.helpers.pool import Context, on_ranks

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForTokenClassification
from transformers.models.llama.modeling_llama import LlamaAttention


def second_model(model: Any) -> nn.Module:
    """Another model from the same configuration object, for attention in one process."""
    return type(model)._from_config(model.config, attn_implementation="sdpa")


CHANGES: dict[str, Callable[[Any], object]] = {
    "shared configuration": second_model,
    "set_attn_implementation": lambda model: model.set_attn_implementation("sdpa"),
}


REFUSED = "attn_implementation must stay 'ringflash' after set_group, got 'sdpa'"


@pytest.mark.parametrize(
    "change, kind, ranks, compiled",
    [
        ("shared configuration", "llama", (0, 1), False),
        ("set_attn_implementation", "llama", (0, 1), False),
        ("shared configuration", "llama", (1,), False),
        ("set_attn_implementation", "phi3", (0,), False),  # its rotary embedding has the ranks meet before layer 0
        ("set_attn_implementation", "llama", (0, 1), True),
    ],
)
@on_ranks(2)
def test_another_attention_implementation_is_refused(
    ctx: Context, change: str, kind: str, ranks: tuple[int, ...], compiled: bool
) -> None:
    """Once; then the model is on the ring again."""
    with_loss = build(kind, ctx.group)
    model = with_loss.model
    run = torch.compile(model, backend="eager") if compiled else model
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    want = run(**batch).logits
    if ctx.rank in ranks:
        CHANGES[change](model)
    with pytest.raises(ValueError, match=REFUSED):
        run(**batch)
    assert torch.equal(run(**batch).logits, want)


@on_ranks(2)
def test_a_wrapped_model_refuses_it_too(ctx: Context) -> None:
    chat = wrap_attention(Chat(build("llama", None).model), ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    chat(**batch)
    second_model(chat.model)
    with pytest.raises(ValueError, match=REFUSED):
        chat(**batch)


@on_ranks(2)
def test_a_model_can_be_taken_off_the_ring(ctx: Context) -> None:
    model = build("llama", ctx.group).model
    huggingface.set_group(model, None)
    model.set_attn_implementation("sdpa")
    whole = build("llama", None).model
    want = whole(**huggingface.prepare_batch(tokens(), group=None)).logits
    assert (model(tokens()).logits - want).abs().max() <= 1e-10 * want.abs().max()


@pytest.mark.parametrize("past_hooks, ranks", [(False, (0, 1)), (False, (1,)), (True, (0, 1)), (True, (1,))])
@on_ranks(2)
def test_labels_shifted_in_the_shard_are_refused(ctx: Context, past_hooks: bool, ranks: tuple[int, ...]) -> None:
    model = build("llama", ctx.group).model
    run = model.forward if past_hooks else model
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    labels = batch["shift_labels"]
    assert torch.isfinite(run(**batch, labels=labels).loss)
    if ctx.rank in ranks:
        batch = batch | {"labels": labels, "shift_labels": None}
    else:
        batch = batch | {"labels": labels}
    with pytest.raises(ValueError, match="shift_labels must be given with labels on a ring"):
        run(**batch).loss.backward()


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("impl", ["ringflash", "sdpa"])
@on_ranks(2)
def test_a_loss_over_another_group_is_refused(ctx: Context, impl: str, ranks: tuple[int, ...]) -> None:
    """It would be cp_size times too small, or that of a model that attends within each shard."""
    wrong = ctx.rank in ranks
    model = models.build(impl=impl if wrong else "ringflash")
    if impl == "ringflash" or not wrong:
        huggingface.set_group(model, ctx.group)
    with_loss = huggingface.CausalLMWithLoss(model, None if wrong and impl == "ringflash" else ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    with pytest.raises(ValueError, match="group must be the one that set_group gave .* with one group"):
        with_loss(**batch)


@on_ranks(2)
def test_loss_of_a_model_whose_decoder_has_the_group(ctx: Context) -> None:
    """set_group may be called for the decoder only, and for the group by another object."""
    whole, decoder = models.build(), models.build()
    huggingface.set_group(whole, ctx.group)
    huggingface.set_group(decoder.model, ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    again = dist.new_group(list(range(ctx.size)))
    losses = [huggingface.CausalLMWithLoss(model, again)(**batch) for model in (whole, decoder)]
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)


@on_ranks(2)
def test_labels_without_their_number_are_refused(ctx: Context) -> None:
    """The mean over a shard's labels is not its part of the sequence's."""
    model = build("llama", ctx.group).model
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    if ctx.rank:
        batch.pop("num_items_in_batch")
    with pytest.raises(ValueError, match="num_items_in_batch must be given with labels on a ring"):
        model(**batch, labels=batch["shift_labels"])
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    model.z_loss_coefficient = 0.25 * ctx.rank  # Bamba's
    match = "z_loss_coefficient must be 0 with labels on a ring, got 0.25"
    with pytest.raises(NotImplementedError, match=match):
        model(**batch, labels=batch["shift_labels"])


@on_ranks(2)
def test_images_are_refused_and_text_is_not(ctx: Context) -> None:
    """A model for both; one rank has an image."""
    huggingface.register()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 4, "patch_size": 2, **sizes}
    text = AutoConfig.for_model("llama", **models.TINY)
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=60)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=torch.float64)
    ring = deepcopy(whole)
    ring.set_attn_implementation("ringflash")
    huggingface.set_group(ring, ctx.group)
    ids = tokens() % 60
    batch = huggingface.prepare_batch(ids, group=ctx.group)
    batch = {name: batch[name] for name in ("input_ids", "position_ids", "use_cache", "checksum")}
    want = shard_sequence(whole(ids).logits, ctx.group)
    torch.testing.assert_close(ring(**batch).logits, want, rtol=1e-9, atol=1e-12)
    image = {"pixel_values": torch.zeros(1, 3, 4, 4, dtype=torch.float64)} if ctx.rank else {}
    with pytest.raises(NotImplementedError, match="pixel_values must not be given to a model on a ring, whose shards"):
        ring(**batch, **image)


@on_ranks(2)
def test_labels_averaged_over_the_shard_are_refused(ctx: Context) -> None:
    huggingface.register()
    model = AutoModelForTokenClassification.from_config(
        AutoConfig.for_model("llama", **models.TINY), attn_implementation="ringflash"
    )
    huggingface.set_group(model, ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    batch = {name: batch[name] for name in ("input_ids", "position_ids", "use_cache", "checksum")}
    assert model(**batch).logits.shape[1] == batch["input_ids"].shape[1]
    labels = {"labels": torch.ones_like(batch["input_ids"])} if ctx.rank else {}
    with pytest.raises(NotImplementedError, match="labels must not be given to LlamaForTokenClassification on a ring"):
        model(**batch, **labels)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@on_ranks(2)
def test_what_depends_on_the_shard_length_is_refused(ctx: Context, ranks: tuple[int, ...]) -> None:
    """The last tokens of a shard; noise that Trainer's option adds, in training only."""
    model = build("llama", ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    from transformers.integrations.neftune import activate_neftune

    kept = 1 if ctx.rank in ranks else 0
    with pytest.raises(NotImplementedError, match="logits_to_keep must be 0 on a ring, .*, got 1: the last tokens"):
        model.model(**batch, logits_to_keep=kept)
    model.model(**batch, logits_to_keep=torch.arange(2))
    if kept:
        activate_neftune(model.model, 5.0)
    model.eval()(**batch)
    with pytest.raises(NotImplementedError, match="neftune_noise_alpha must be None"):
        model.train()(**batch)


@on_ranks(2)
def test_late_adapters_with_a_loss_are_refused(ctx: Context) -> None:
    peft = pytest.importorskip("peft")
    model = build("llama", ctx.group).model
    config = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9)
    adapted = peft.get_peft_model(model, config)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    with pytest.raises(NotImplementedError, match="peft_type must be one that only changes layers, .* got ADALORA"):
        adapted(**batch, labels=batch["shift_labels"])


def _edit(name: str, value: object) -> Callable[[Any], None]:
    return lambda model: setattr(model.config, name, value)


def _halve(*given: Any) -> Any:
    """A forward, its hook, or a loss."""
    return given[-1] / 2


EDITS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "window": ("gpt_oss", _edit("sliding_window", 4), "what the configuration says of the layer (4), got 9"),
    "layer types": ("mistral", _edit("layer_types", ["full_attention"] * 2), "says of the layer (None), got 9"),
    "softcap": ("gemma2", _edit("final_logit_softcapping", 30.0), "must be those of lm_head times a number"),
    "scale": ("granite", _edit("logits_scaling", 4.0), "scale of the logits must stay 1, got 0.25"),
    "routers": ("llama", _edit("output_router_logits", True), "output_router_logits must be"),
    "kinds": ("llama", _edit("layer_types", ["linear_attention"] * 2), "layer_types must be"),
    "head": ("llama", lambda m: m.lm_head.register_forward_hook(_halve), "Linear with a forward hook, tests.distri"),
    "head_backward": (
        "llama",
        lambda m: m.lm_head.register_full_backward_pre_hook(_halve),
        "Linear with a backward hook, tests.distri",
    ),
    "prune": ("llama", lambda m: l1_unstructured(m.lm_head, "weight", 0.5), "Linear with a forward hook, torch.nn"),
    "head_forward": ("llama", lambda m: setattr(m.lm_head, "forward", _halve), "Linear with a forward of its own"),
    "hook": ("llama", lambda m: m.register_forward_hook(_halve), "LlamaForCausalLM must have no forward or"),
    "hook_backward": ("llama", lambda m: m.register_full_backward_hook(_halve), "got a backward hook, tests.distri"),
    "forward": ("llama", lambda m: setattr(m, "forward", _halve), "got a forward that was set on the object: only"),
    "loss": ("llama", lambda m: setattr(m, "loss_function", _halve), "loss_function must be transformers' own for"),
}


@pytest.mark.parametrize("edit, ranks", [*((edit, (0, 1)) for edit in EDITS), ("softcap", (1,)), ("scale", (0,))])
@on_ranks(2)
def test_configuration_edited_later_is_refused(ctx: Context, edit: str, ranks: tuple[int, ...]) -> None:
    kind, change, message = EDITS[edit]
    model = build(kind, ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    model(**batch)
    _edit("use_bidirectional_attention", True)(model.model)  # its layers are causal
    model(**batch)
    if ctx.rank in ranks:
        change(model.model)
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        model(**batch)


def _attend_alone(layer: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    """A patched forward of an attention layer, which calls torch's attention itself."""
    heads = (hidden_states.shape[0], hidden_states.shape[1], -1, layer.head_dim)
    q, k, v = (f(hidden_states).view(heads).transpose(1, 2) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layer.o_proj(out.transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize(
    "how, found", [("object", "1 (1 in all)"), ("class", "0 (2 in all)"), ("within", "1 (1 in all)")]
)
@on_ranks(2)
def test_attention_off_the_ring_is_refused(ctx: Context, how: str, found: str) -> None:
    """A layer's forward is patched, or the layer is inside one of another class, that attends by itself."""
    model = build("llama", ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    layer = model.model.model.layers[1]
    if how == "object":
        layer.self_attn.forward = partial(_attend_alone, layer.self_attn)
    elif how == "within":
        own = type("Own", (nn.ModuleList,), {"forward": lambda inner, **given: _attend_alone(inner[0], **given)})
        layer.self_attn = own([layer.self_attn])
    with mock.patch.object(LlamaAttention, "forward", _attend_alone) if how == "class" else nullcontext():
        with pytest.raises(NotImplementedError, match=re.escape(f"got none from LlamaAttention {found}, so")):
            model(**batch)
        if how == "class":
            wrapped = wrap_attention(models.build(), ctx.group)
            wrapped(**{name: batch[name] for name in ("input_ids", "position_ids", "use_cache")})


@pytest.mark.parametrize(
    "spoil, found",
    [
        ("seeds", r"model\.layers\.1\S*up_proj\.weight \(1 of "), ("head", r"lm_head\.weight \(1 of "),
        ("averages", r".* \(21 of 21\)"),
    ],
)  # fmt: skip
@on_ranks(2)
def test_another_model_on_a_rank_is_refused(ctx: Context, spoil: str, found: str) -> None:
    """Initial values or gradients differ. Forwards 1, 2, 4, ... compare, as do evaluations; copies do, too."""
    ring = build("llama", ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    for model in (deepcopy(ring), ring):
        weight = model.model.lm_head.weight if spoil == "head" else model.model.model.layers[1].mlp.up_proj.weight
        if spoil == "averages":
            model(**batch).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()  # on the gradient of this rank's shard
        elif ctx.rank:
            weight.data.mul_(1.01)
        call = model if spoil == "seeds" or model is ring else partial(model.model, labels=batch["shift_labels"])
        for grad in (False, True):
            text = rf"parameters must be equal on all ranks .* values of {found}.*; seed"
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=text):
                call(**batch)
    for parameter in ring.parameters():
        parameter.allreduce = False  # as of experts of a rank
    for _ in range(4):
        ring(**batch)


@on_ranks(2)
def test_buffers_of_a_copied_model_are_compared(ctx: Context) -> None:
    model = models.build()
    model.model.register_buffer("counted", torch.zeros(()))
    huggingface.set_group(model, ctx.group)
    copied = deepcopy(model)
    copied.model.norm.register_forward_pre_hook(lambda *_: copied.model.counted.add_(ctx.rank))
    with pytest.raises(ValueError, match="buffers that a training forward changes must be equal .* of counted; each"):
        copied.train()(**huggingface.prepare_batch(tokens(), group=ctx.group))


@on_ranks(2)
def test_later_rotary_embedding_knows_the_length(ctx: Context) -> None:
    """A rotary embedding whose angles depend on the length, put into both models after `set_group`."""
    ring, whole = build("llama", ctx.group), build("llama", None)
    for model in (ring, whole):
        config = deepcopy(model.model.config)
        config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        config.max_position_embeddings = 20  # of 32 tokens; a shard has 16
        body = model.model.model
        body.rotary_emb = type(body.rotary_emb)(config)
    batches = [huggingface.prepare_batch(tokens(), group=group) for group in (ctx.group, None)]
    compare(ctx, (ring, batches[0]), (whole, batches[1]))


@on_ranks(2)
def test_dropout_is_refused_when_it_acts(ctx: Context) -> None:
    """Training, evaluation and training again are one computation where there is no dropout."""
    model = build("llama", ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    losses = [model.train(mode)(**batch) for mode in (True, False, True)]
    assert losses[0] == losses[1] == losses[2]
    for layer in model.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert model.eval()(**batch) == losses[0]
    with pytest.raises(NotImplementedError, match=r"dropout must be 0, got 0\.5"):
        model.train()(**batch)


class Chat(nn.Module):
    """A module that holds a transformers model, as a LightningModule does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).logits

    def predict_step(self, prompt: torch.Tensor) -> torch.Tensor:
        return self.model.generate(prompt, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize(
    "kind, holder",
    [("llama", "copy"), ("llama", "wrapped"), ("mistral", "adapted"), ("phi3", "copy"), ("llama4_text", "copy"),
     ("gpt_oss", "copy")],
)  # fmt: skip
@on_ranks(2)
def test_one_rank_generates_after_training(ctx: Context, kind: str, holder: str) -> None:
    """Rank 1 generates by itself after a backward; then both go on over the ring, with the loss of before."""
    with_loss = build(kind, ctx.group)
    model, batch = with_loss.model, huggingface.prepare_batch(tokens(), group=ctx.group)
    impl = "eager" if kind == "gpt_oss" else "sdpa"
    plain = type(model)._from_config(deepcopy(model.config), attn_implementation=impl, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    if holder == "wrapped":
        chat = wrap_attention(Chat(model), ctx.group)
        run = chat.predict_step
    elif holder == "adapted":
        import peft

        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
        run = lambda prompt: adapted.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)  # noqa: E731
    else:
        with_loss = deepcopy(with_loss)
        run = lambda prompt: with_loss.model.generate(prompt, max_new_tokens=6, do_sample=False)  # noqa: E731
    loss = with_loss(**batch)
    loss.backward()
    if ctx.rank == 1:
        want = plain.generate(tokens()[:, :9], max_new_tokens=6, do_sample=False)
        assert torch.equal(run(tokens()[:, :9]), want) and want.shape == (1, 15)
    assert with_loss(**batch) == loss


@on_ranks(2)
def test_ranks_rotate_alike_after_one_generated(ctx: Context) -> None:
    """transformers' "dynamic" angles stay at the longest sequence so far: those of the rank that generated."""
    trained = []
    for group in (ctx.group, None):
        model: Any = models.build("llama", **models.ROTATIONS["dynamic"])
        huggingface.set_group(model, group)
        if group is None or ctx.rank == 1:
            model.generate(torch.cat([tokens()] * 2, 1), max_new_tokens=2, do_sample=False)
        batch = huggingface.prepare_batch(tokens(), group=group)
        trained.append((huggingface.CausalLMWithLoss(model, group), batch))
    compare(ctx, *trained)
