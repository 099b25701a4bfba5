"""Changes to a transformers model after `set_group`: refused on every rank, or right; `generate` on one rank.

gloo, 2 CPU processes, fp64; needs the huggingface extra.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringflash import huggingface, wrap_attention
from tests.distributed.test_huggingface import build, compare, tokens
from tests.helpers.pool import Context, Pool

pytest.importorskip("transformers")


def second_model(model: Any) -> nn.Module:
    """Another model from the same configuration object, for attention in one process."""
    return type(model)._from_config(model.config, attn_implementation="sdpa")


CHANGES: dict[str, Callable[[Any], object]] = {
    "shared configuration": second_model,
    "set_attn_implementation": lambda model: model.set_attn_implementation("sdpa"),
}


def changed(ctx: Context, change: str, kind: str, ranks: tuple[int, ...], compiled: bool) -> list[str]:
    """Errors of three forwards, the first one before the change; the loss of the last must be that of the first."""
    with_loss = build(kind, ctx.group)
    model = with_loss.model
    run = torch.compile(model, backend="aot_eager") if compiled else model
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    want, errors = run(**batch).logits, []
    if ctx.rank in ranks:
        CHANGES[change](model)
    for _ in range(2):
        try:
            assert torch.equal(run(**batch).logits, want)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    return errors


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
def test_another_attention_implementation_is_refused_on_every_rank(
    pool: Pool, change: str, kind: str, ranks: tuple[int, ...], compiled: bool
) -> None:
    """Once; then the model is on the ring again."""
    for first, second in pool.run(changed, change, kind, ranks, compiled, size=2):
        assert "attn_implementation must stay 'ringflash' after set_group, got 'sdpa'" in first and second == ""


def wrapped_and_changed(ctx: Context) -> str:
    chat = wrap_attention(Chat(build("llama", None).model), ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    chat(**batch)
    second_model(chat.model)
    return error_of(lambda: chat(**batch))


def test_a_wrapped_model_refuses_it_too(pool: Pool) -> None:
    for text in pool.run(wrapped_and_changed, size=2):
        assert "attn_implementation must stay 'ringflash' after set_group, got 'sdpa'" in text


def off_the_ring(ctx: Context) -> None:
    model = build("llama", ctx.group).model
    huggingface.set_group(model, None)
    model.set_attn_implementation("sdpa")
    whole = build("llama", None).model
    want = whole(**huggingface.prepare_batch(tokens(), group=None)).logits
    assert (model(tokens()).logits - want).abs().max() <= 1e-10 * want.abs().max()


def test_a_model_can_be_taken_off_the_ring(pool: Pool) -> None:
    pool.run(off_the_ring, size=2)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def unshifted_labels(ctx: Context, past_hooks: bool, ranks: tuple[int, ...]) -> str:
    model = build("llama", ctx.group).model
    run = model.forward if past_hooks else model
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    labels = batch["shift_labels"]
    assert torch.isfinite(run(**batch, labels=labels).loss)
    if ctx.rank in ranks:
        batch = batch | {"labels": labels, "shift_labels": None}
    return error_of(lambda: run(**batch))


@pytest.mark.parametrize("past_hooks, ranks", [(False, (0, 1)), (False, (1,)), (True, (0, 1))])
def test_labels_that_would_be_shifted_in_the_shard_are_refused(
    pool: Pool, past_hooks: bool, ranks: tuple[int, ...]
) -> None:
    for text in pool.run(unshifted_labels, past_hooks, ranks, size=2):
        assert "ValueError: shift_labels must be given with labels on a ring" in text


def late_adapters(ctx: Context) -> str:
    import peft

    model = build("llama", ctx.group).model
    config = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9)
    adapted = peft.get_peft_model(model, config)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    return error_of(lambda: adapted(**batch, labels=batch["shift_labels"]))


def test_adapters_with_a_loss_of_their_own_put_on_after_set_group_are_refused(pool: Pool) -> None:
    pytest.importorskip("peft")
    for text in pool.run(late_adapters, size=2):
        assert "NotImplementedError: peft_type must be one that only changes layers, such as LORA, got ADALORA" in text


def _edit(name: str, value: object) -> Callable[[Any], None]:
    return lambda model: setattr(model.config, name, value)


EDITS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "window": ("gpt_oss", _edit("sliding_window", 4), "what the configuration says of the layer (4), got 9"),
    "layer types": ("mistral", _edit("layer_types", ["full_attention"] * 2), "says of the layer (None), got 9"),
    "softcap": ("gemma2", _edit("final_logit_softcapping", 30.0), "must be those of lm_head times a number"),
    "scale": ("granite", _edit("logits_scaling", 4.0), "scale of the logits must stay 1, got 0.25"),
    "routers": ("llama", _edit("output_router_logits", True), "output_router_logits must be"),
    "direction": ("llama", _edit("use_bidirectional_attention", True), "nothing raised"),  # its layers are causal
    "kinds": ("llama", _edit("layer_types", ["linear_attention"] * 2), "layer_types must be"),
}


def edited(ctx: Context, edit: str) -> str:
    kind, change, _ = EDITS[edit]
    model = build(kind, ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    model(**batch)
    change(model.model)
    return error_of(lambda: model(**batch))


@pytest.mark.parametrize("edit", EDITS)
def test_a_configuration_edited_after_set_group_is_refused(pool: Pool, edit: str) -> None:
    for text in pool.run(edited, edit, size=2):
        assert EDITS[edit][2] in text


def other_rotation(ctx: Context) -> None:
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


def test_a_rotary_embedding_replaced_after_set_group_knows_the_length_of_the_sequence(pool: Pool) -> None:
    pool.run(other_rotation, size=2)


def modes(ctx: Context) -> None:
    """Training, evaluation and training again are one computation where there is no dropout."""
    model = build("llama", ctx.group)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group)
    losses = [model.train(mode)(**batch) for mode in (True, False, True)]
    assert losses[0] == losses[1] == losses[2]
    for layer in model.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert model.eval()(**batch) == losses[0]
    assert "dropout must be 0, got 0.5" in error_of(lambda: model.train()(**batch))


def test_the_mode_may_change_and_dropout_is_refused_when_it_acts(pool: Pool) -> None:
    pool.run(modes, size=2)


class Chat(nn.Module):
    """A module that holds a transformers model, as a LightningModule does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).logits

    def predict_step(self, prompt: torch.Tensor) -> torch.Tensor:
        return self.model.generate(prompt, max_new_tokens=6, do_sample=False)


def generates(ctx: Context, kind: str, holder: str) -> None:
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


@pytest.mark.parametrize(
    "kind, holder",
    [("llama", "copy"), ("llama", "wrapped"), ("mistral", "adapted"), ("phi3", "copy"), ("llama4_text", "copy"),
     ("gpt_oss", "copy")],
)  # fmt: skip
def test_one_rank_generates_after_training(pool: Pool, kind: str, holder: str) -> None:
    pool.run(generates, kind, holder, size=2)
