"""The Hugging Face plug in one process: equals transformers' own attention in fp64, and refuses what it cannot do.

CPU; needs the huggingface extra. The oracle is "sdpa" with transformers' masks: its "eager" takes the softmax in fp32
whatever the model's dtype, and its loss casts logits to fp32.
"""

from __future__ import annotations

import pytest
import torch

import ringflash
from ringflash import huggingface
from ringflash.huggingface.freezing import differentiate_alike
from ringflash.huggingface.refusals import find_shape_error

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_window": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "mistral_window": ("mistral", {"sliding_window": 5}),
}
LENGTH = 24
BOUNDS = (0, 7, 8, 24)


def build(name: str = "llama", impl: str = "ringflash", **changes: object) -> torch.nn.Module:
    huggingface.register()
    kind, extra = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **TINY, **extra, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=impl, dtype=torch.float64)


def tokens(batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 61, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def documents() -> torch.Tensor:
    return torch.tensor(BOUNDS, dtype=torch.int32)


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() <= 1e-10 * want.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_dense(name: str) -> None:
    ring, dense = build(name), build(name, "sdpa")
    huggingface.set_group(ring, None)
    ids = tokens(2)
    batch = huggingface.prepare_batch(ids, group=None)
    got, want = ring(**batch).logits, dense(ids, use_cache=False).logits
    assert_equal(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    for p, q in zip(ring.parameters(), dense.parameters(), strict=True):
        assert_equal(p.grad, q.grad)


@pytest.mark.parametrize("positions", ["global", "document"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_equal_dense_one_by_one(name: str, positions: str) -> None:
    ring, dense, ids = build(name), build(name, "sdpa"), tokens()
    batch = huggingface.prepare_batch(ids, group=None, cu_seqlens=documents(), position_ids=positions)
    got = ring(**batch).logits
    want = []
    for start, stop in zip(BOUNDS, BOUNDS[1:], strict=False):
        # transformers' RoPE is fp32: counting from elsewhere gives equal logits to 1e-7 only, so count alike.
        first = start if positions == "global" else 0
        places = torch.arange(first, first + stop - start)[None]
        want.append(dense(ids[:, start:stop], position_ids=places, use_cache=False).logits)
    assert_equal(got, torch.cat(want, 1))


TRAINABLE = {
    "q alone": ("q_proj",),
    "k alone": ("k_proj",),
    "q and v": ("q_proj", "v_proj"),
    "last layer": ("layers.1",),
}


@pytest.mark.parametrize("parts", TRAINABLE.values(), ids=TRAINABLE)
def test_partly_frozen_model_has_the_gradients_of_dense(parts: tuple[str, ...]) -> None:
    ring, dense, ids = build("qwen3"), build("qwen3", "sdpa"), tokens()
    for model, batch in ((ring, huggingface.prepare_batch(ids, group=None)), (dense, {"input_ids": ids})):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in parts))
        model(**batch).logits.square().sum().backward()
    assert any(p.requires_grad for p in ring.parameters())
    for p, q in zip(ring.parameters(), dense.parameters(), strict=True):
        assert (p.grad is not None) == p.requires_grad
        if p.requires_grad:
            assert_equal(p.grad, q.grad)


def test_frozen_inputs_share_storage_and_get_no_gradient() -> None:
    q, k = torch.ones(2, requires_grad=True), torch.ones(2)
    alike = differentiate_alike(q, k)
    assert alike[0] is q and alike[1].requires_grad and alike[1].data_ptr() == k.data_ptr()
    (alike[0] * alike[1]).sum().backward()
    assert q.grad is not None and k.grad is None
    with torch.no_grad():
        assert differentiate_alike(q, k)[1] is k


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_loss_without_logits_equals_transformers(name: str) -> None:
    ring, dense, ids = build(name), build(name, "sdpa"), tokens(2)
    loss = huggingface.CausalLMWithLoss(ring, None, chunk_tokens=5)(**huggingface.prepare_batch(ids, group=None))
    logits = dense(ids, use_cache=False).logits[:, :-1]
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert_equal(loss, want)


def test_ones_mask_is_fine() -> None:
    batch = huggingface.prepare_batch(tokens(), group=None)
    model = build()
    assert torch.equal(model(**batch, attention_mask=torch.ones(1, LENGTH)).logits, model(**batch).logits)


def _padding() -> torch.Tensor:
    mask = torch.ones(1, LENGTH, dtype=torch.int64)
    mask[:, -3:] = 0
    return mask


REFUSED = {
    "padding mask": ({"attention_mask": _padding()}, ValueError, "all ones, got zeros; pack documents with cu_seqlens"),
    "4-D mask": ({"attention_mask": torch.zeros(1, 1, LENGTH, LENGTH)}, NotImplementedError, "attention_mask must be"),
    "cache": ({"use_cache": True}, NotImplementedError, "use_cache must not .* pass use_cache=False"),
    "local bounds": ({"cu_seq_lens_q": documents()}, NotImplementedError, "cu_seq_lens_q .* whole packed sequence"),
    "softcap": ({"softcap": 30.0}, NotImplementedError, "softcap must not"),
    "sinks": ({"s_aux": torch.zeros(4)}, NotImplementedError, "s_aux must not .* sinks"),
    "head mask": ({"head_mask": torch.ones(4)}, NotImplementedError, "head_mask must not"),
    "unknown": ({"temperature": 2.0}, NotImplementedError, "temperature must not .* drop it"),
    "shifted positions": ({"position_ids": torch.arange(1, LENGTH + 1)[None]}, ValueError, "prepare_batch"),
    "packed positions": ({"position_ids": (torch.arange(LENGTH) % 12)[None]}, ValueError, "position_ids must be"),
    "position shape": ({"position_ids": torch.arange(LENGTH)[None].expand(3, -1)}, ValueError, r"\(1 or batch, 24\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_call(case: str) -> None:
    changes, kind, message = REFUSED[case]
    ids = tokens(2 if case == "position shape" else 1)
    if case == "position shape":
        query = torch.zeros(2, 4, LENGTH, 8)
        error = find_shape_error(query, None, changes["position_ids"])
        assert isinstance(error, kind) and "(1 or batch, 24)" in str(error)
        return
    with pytest.raises(kind, match=message):
        build()(**huggingface.prepare_batch(ids, group=None) | changes)


def test_refuses_wrong_document_positions() -> None:
    batch = huggingface.prepare_batch(tokens(), group=None, cu_seqlens=documents())
    with pytest.raises(ValueError, match="within each document"):
        build()(**batch | {"position_ids": (torch.arange(LENGTH) % 8)[None]})


def test_refuses_dropout_in_training() -> None:
    with pytest.raises(NotImplementedError, match="dropout must be 0, got 0.5"):
        build(attention_dropout=0.5).train()(**huggingface.prepare_batch(tokens(), group=None))


def test_refuses_layers_it_cannot_do() -> None:
    model = build("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(NotImplementedError, match="got 'chunked_attention'"):
        huggingface.set_group(model, None)


def test_refuses_another_implementation() -> None:
    with pytest.raises(ValueError, match="attn_implementation='ringflash', got 'eager'"):
        huggingface.set_group(build(impl="eager"), None)


def test_refuses_labels_that_are_not_shifted() -> None:
    with pytest.raises(ValueError, match="shifted by one token"):
        huggingface.prepare_batch(tokens(), group=None, labels=tokens())


def test_refuses_unknown_positions() -> None:
    for positions in ("document", "local"):
        with pytest.raises(ValueError, match="'document' with cu_seqlens"):
            huggingface.prepare_batch(tokens(), group=None, position_ids=positions)


@pytest.mark.parametrize(
    "name, value", [("final_logit_softcapping", 30.0), ("logits_scaling", 8.0), ("logit_scale", 0.5)]
)
def test_refuses_logits_that_are_not_linear(name: str, value: float) -> None:
    model = build()
    setattr(model.config, name, value)
    with pytest.raises(NotImplementedError, match=name):
        huggingface.CausalLMWithLoss(model, None)


def test_refuses_models_without_head() -> None:
    with pytest.raises(NotImplementedError, match="lm_head"):
        huggingface.CausalLMWithLoss(build().model, None)


def test_padding_changes_nothing() -> None:
    model = huggingface.CausalLMWithLoss(build(), None)
    ids = tokens()
    padded = ringflash.pad_sequence(ids, ringflash.loss.shift_labels(ids), cp_size=5)
    batch = huggingface.prepare_batch(padded.tokens, group=None, labels=padded.labels)
    assert batch["input_ids"].shape[1] == 30
    assert_equal(model(**batch), model(**huggingface.prepare_batch(ids, group=None)))
