"""Refusals of the Hugging Face plug, in one process. CPU; needs the huggingface extra."""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ringflash
from ringflash import huggingface
from ringflash.comm.comparison import checksum_of_integers
from ringflash.huggingface.model_checks import check_rope
from ringflash.huggingface.spans import Use
from ringflash.huggingface.validation import find_shape_error, find_static_error
from tests.helpers.models import LENGTH, TINY, build, documents, tokens

pytest.importorskip("transformers")

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, BambaConfig, BambaForCausalLM, DynamicCache
from transformers.loss import loss_utils
from transformers.masking_utils import create_causal_mask
from transformers.models.mixtral import modeling_mixtral

FULL = torch.arange(LENGTH)[None]


def prepared(**options: Any) -> dict[str, Any]:
    return huggingface.prepare_batch(tokens(), group=None, **options)


def made(kind: str, auto: str = "AutoModelForCausalLM", device: str = "meta", **changes: Any) -> nn.Module:
    """A tiny model of transformers' own classes."""
    huggingface.register()
    with torch.device(device):
        config = transformers.AutoConfig.for_model(kind, **TINY | changes)
        return getattr(transformers, auto).from_config(config, attn_implementation="ringflash")


REFUSED = {
    "padding mask": ({"attention_mask": FULL < 21}, ValueError, "all ones, got others; pack documents with cu_seqlens"),
    "4-D mask": ({"attention_mask": torch.zeros(1, 1, LENGTH, LENGTH)}, NotImplementedError, "attention_mask must be"),
    "cache": ({"use_cache": True}, NotImplementedError, "use_cache must not .* pass use_cache=False"),
    "local bounds": ({"cu_seq_lens_q": documents()}, NotImplementedError, "cu_seq_lens_q .* whole packed sequence"),
    "softcap": ({"softcap": 30.0}, NotImplementedError, "softcap must not"),
    "sinks of other heads": ({"s_aux": torch.zeros(3)}, NotImplementedError, r"each head \(4,\), got \(3,\)"),
    "head mask": ({"head_mask": torch.ones(4)}, NotImplementedError, "head_mask must not"),
    "unknown": ({"temperature": 2.0}, NotImplementedError, "temperature must not .* drop it"),
    "shifted positions": ({"position_ids": FULL + 1}, ValueError, "prepare_batch"),
    "packed positions": ({"position_ids": FULL % 12}, ValueError, "position_ids must be"),
    "positions of documents": (
        prepared(cu_seqlens=documents()) | {"position_ids": FULL % 8}, ValueError, "within each document",
    ),
} | {
    name: ({name: value}, NotImplementedError, f"{name} must not be given to ringflash attention")
    for name, value in (
        ("output_attentions", True), ("cu_seq_lens_k", documents()), ("max_length_q", LENGTH), ("max_length_k", LENGTH),
        ("seq_idx", torch.zeros(1, LENGTH, dtype=torch.int32)), ("output_router_logits", True),
    )
}  # fmt: skip


@pytest.mark.parametrize("changes, kind, message", REFUSED.values(), ids=REFUSED)
def test_refuses_call(changes: dict[str, object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build()(**prepared() | changes)


@pytest.mark.parametrize(
    "name, options, changes, message",
    [
        ("llama", {"attention_dropout": 0.5}, {}, "dropout must be 0, got 0.5"),
        ("mistral_window", {}, {"is_causal": False}, "causal layer, got 5, causal=False; use full attention"),
        ("chunks", {}, {"is_causal": False}, "chunked_attention must be causal, got causal=False"),
    ],
)
def test_refuses_options_of_layers(name: str, options: dict, changes: dict, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        build(name, **options).train()(**prepared() | changes)


def test_refuses_positions_of_another_shape() -> None:
    query, kept = torch.zeros(2, 4, LENGTH, 8), FULL.expand(3, -1)
    error = find_shape_error(query, None, kept)
    assert isinstance(error, ValueError) and "(1 or batch, 24)" in str(error)
    lost = find_shape_error(query, None, None)  # as in Ministral3 without set_group
    assert "got None" in str(lost) and "the model to set_group, which looks for them" in str(lost)


@pytest.mark.parametrize("loaded_before", [False, True])
def test_refuses_classes_that_call_flash_attention(loaded_before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has none for our name, and code that it loaded before `register` takes flash-attention's."""
    huggingface.register()
    if loaded_before:
        code = importlib.import_module("transformers.models.falcon.modeling_falcon")
        monkeypatch.setattr(code, "is_flash_attention_requested", lambda config: True, raising=False)
    config = AutoConfig.for_model("falcon", hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ValueError, match="ForCausalLM has only implementations of its own: use another model"):
        huggingface.set_group(AutoModelForCausalLM.from_config(deepcopy(config)), None)
    with pytest.raises((KeyError, NotImplementedError), match="ringflash|FlashAttention2, which would attend to each"):
        huggingface.set_group(AutoModelForCausalLM.from_config(config, attn_implementation="ringflash"), None)


HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 1}
CAUSAL, PICKS = "AutoModelForCausalLM", "must return a result for each token, got {}, which would pick"
WRONG_ON_A_SHARD = {
    "a convolution": (CAUSAL, "jamba", MAMBA, r"layers\.0\.mamba\.conv1d must treat tokens one by one, got Conv1d"),
    "no attention": (
        CAUSAL, "mamba2", {"num_heads": 8, "head_dim": 8}, "got none in Mamba2ForCausalLM; .*ringflash.recurrent",
    ),
    "a recurrence": (CAUSAL, "minimax", HYBRID, "layer_types must be .* got 'linear_attention'"),
    "no position_ids": (
        CAUSAL, "bart", {"d_model": 32, "decoder_attention_heads": 4}, "take position_ids, got BartDecoder",
    ),
    "both directions": (
        CAUSAL, "gemma", {"use_bidirectional_attention": True}, "attention must be unset, got True, which",
    ),
    "positions from 2": (CAUSAL, "roberta", {}, "embeddings must count positions from 0, got RobertaEmbeddings"),
    "left out at random": (  # ranks with other seeds would pair the layers of other depths
        CAUSAL, "biogpt", {"layerdrop": 0.1}, r"layerdrop must be 0, got 0\.1: each rank would leave out diff",
    ),
    "a classifier": (
        "AutoModelForSequenceClassification", "llama", {}, PICKS.format("LlamaForSequenceClassification"),
    ),
    "answers": ("AutoModelForQuestionAnswering", "qwen3", {}, PICKS.format("Qwen3ForQuestionAnswering")),
    "a pooler": ("AutoModel", "bert", {}, PICKS.format("BertPooler")),
}  # fmt: skip


@pytest.mark.parametrize("auto, kind, changes, message", WRONG_ON_A_SHARD.values(), ids=WRONG_ON_A_SHARD)
def test_refuses_models_wrong_on_a_shard(auto: str, kind: str, changes: dict[str, Any], message: str) -> None:
    """Whatever their attention does."""
    model = made(kind, auto, **changes)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        huggingface.set_group(model, None)


def unknown_chunks(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Chunks are Llama 4's: another model that says it had them would not have them elsewhere."""
    model = build("qwen3")
    model.config.attention_chunk_size = 8
    model.config.layer_types = ["full_attention", "chunked_attention"]
    return model


def unknown_cache(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Llama 4's positions travel as a cache, which transformers ignores under a name that it has given up."""
    model = build("chunks")
    attention = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", lambda self, hidden_states, kv=None, **kwargs: None)
    return model


@pytest.mark.parametrize(
    "make, options, kind, message",
    [
        (unknown_chunks, {}, NotImplementedError, "got 'chunked_attention'"),
        (unknown_cache, {}, NotImplementedError, r"Llama4TextAttention must take a cache as one of .* 'kv'"),
        (lambda _: build(impl="eager"), {}, ValueError, "attn_implementation='ringflash', got 'eager'"),
        *(
            (lambda _: build("chunks"), {"layout": layout}, NotImplementedError,
             f"layout must not be '{layout}' for layers that attend in chunks")  # other bounds than the layout's
            for layout in ("balanced", "documents")
        ),
    ],
)  # fmt: skip
def test_refuses_to_set_the_group(
    make: Callable[..., nn.Module], options: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kind, match=message):
        huggingface.set_group(make(monkeypatch), None, **options)


@pytest.mark.parametrize("kind", ["qwen2_moe", "phimoe", "qwen3_window"])
def test_refuses_a_window_left_to_the_mask(kind: str) -> None:
    """transformers builds no mask for us, and these do not tell their attention of the window."""
    if kind == "qwen3_window":
        model = build(kind)
        for layer in model.model.layers:
            layer.self_attn.sliding_window = None
    else:
        windowed = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "num_experts": 4}
        model = made(kind, device="cpu", **windowed)
        huggingface.set_group(model, None)
    with pytest.raises(NotImplementedError, match="sliding_window must reach the attention of a sliding layer"):
        model(**prepared())


def test_refuses_document_bounds_that_the_model_drops() -> None:
    """StableLM hands its layers no keywords: the documents would see one another. Of its copies and after an error."""
    model = made("stablelm", device="cpu")
    for _ in range(2):
        huggingface.set_group(model, None)
    for each in (model, deepcopy(model)):
        with pytest.raises(NotImplementedError, match="cu_seqlens must reach the attention, got None .* StableLmModel"):
            each(**prepared(cu_seqlens=documents()))
        each(**prepared())


def test_refuses_document_bounds_with_encoder_states() -> None:
    """Cross-attention would be cut by them, too."""
    model = made(
        "bert-generation", device="cpu", is_decoder=True, add_cross_attention=True, attention_probs_dropout_prob=0
    )
    huggingface.set_group(model, None)
    states = torch.randn(1, tokens().shape[1], model.config.hidden_size)
    model(**prepared(), encoder_hidden_states=states)
    with pytest.raises(NotImplementedError, match="cu_seqlens must not be given together with encoder_hidden_states"):
        model(**prepared(cu_seqlens=documents()), encoder_hidden_states=states)


def test_document_bounds_are_those_of_the_same_forward() -> None:
    """Neither of one that ended in an error before its first layer, nor of one between a forward and its backward."""
    model = build().train()
    huggingface.set_group(model, None)
    packed, whole = prepared(cu_seqlens=documents()), prepared()
    with pytest.raises(IndexError):
        model(**packed | {"input_ids": torch.full_like(tokens(), 99)})
    want = model(**whole).logits
    model.gradient_checkpointing_enable()
    got = model(**whole).logits
    with torch.no_grad():
        model(**packed)
    got.sum().backward()  # runs the layers again
    assert torch.equal(got, want)


def test_the_checksum_knows_labels_from_tokens() -> None:
    ids, labels = tokens(), ringflash.loss.shift_labels(tokens())
    checksum = checksum_of_integers
    assert checksum(ids, labels) == checksum(ids.clone(), labels) != checksum(labels, ids)


NO_TOKEN = ringflash.loss.shift_labels(tokens())
NO_TOKEN[:, 3] = -1
BATCHES = {
    "labels not shifted": ({"labels": tokens()}, "shifted by one token"),
    "labels no tokens": ({"labels": NO_TOKEN}, "labels must be token ids or -100, got -1; write -100"),
    "positions of documents": ({"position_ids": "document"}, "'document' with cu_seqlens"),
    "positions of shards": ({"position_ids": "local"}, "'document' with cu_seqlens"),
    "padding of another length": (
        {"attention_mask": torch.ones(1, LENGTH - 1)}, r"for each of input_ids \(1, 24\), got .* 23\)",
    ),
    "padding by documents": ({"attention_mask": FULL // 9}, r"must be 0 or 1 .* up to 2; describe documents"),
    "padding on the left": ({"attention_mask": FULL > 3}, "padding before a token, which would see it"),
    "padding left of a document": (
        {"cu_seqlens": torch.tensor([0, 7, LENGTH]), "attention_mask": FULL != 7}, "padding before a token",
    ),
    "padding with labels": (
        {"labels": tokens().roll(-1, 1), "attention_mask": FULL < 20},
        "labels must be -100 where attention_mask is 0, got a token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("options, message", BATCHES.values(), ids=BATCHES)
def test_refuses_batch(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(**options)


def test_padding_may_end_each_document() -> None:
    """Its tokens have no labels by default, and the last ones before it none that are padding."""
    bounds = torch.tensor([0, 8, 16, LENGTH], dtype=torch.int32)
    batch = prepared(cu_seqlens=bounds, attention_mask=FULL % 8 < 6)
    assert torch.equal(batch["shift_labels"] != -100, FULL % 8 < 5)


def test_refuses_padding_that_full_attention_would_see() -> None:
    model, batch = build(), prepared(attention_mask=FULL < 20)
    assert torch.equal(model(**batch).logits, model(**batch | {"is_token": None}).logits)
    with pytest.raises(NotImplementedError, match="attention_mask must be None in prepare_batch for full attention"):
        build(is_causal=False)(**batch)


@pytest.mark.parametrize("kind", ["gemma2", "gemma4_text", "nanochat"])
@pytest.mark.parametrize("cap", [30.0, 1e6])
def test_refuses_logits_that_are_not_linear(kind: str, cap: float) -> None:
    """The cap of a million changes no logit of this model; a trained one may have larger."""
    with pytest.raises(NotImplementedError, match="logits of .*ForCausalLM must be those of lm_head times a number"):
        huggingface.CausalLMWithLoss(made(kind, final_logit_softcapping=cap), None)


def another(name: str, forward: Callable[..., Any]) -> nn.Module:
    model = build()
    model.__class__ = type(name, (type(model),), {"forward": forward})
    return model


def part_of_the_head() -> nn.Module:
    """Such as a vocabulary without its padding, whose softmax has fewer terms."""
    whole = type(build()).forward
    return another("Cut", lambda self, **kwargs: SimpleNamespace(logits=whole(self, **kwargs).logits[..., :60]))


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = build()
        change(model)
        return model

    return make


COSINE = type("Cosine", (nn.Linear,), {"forward": lambda self, x: x})


@pytest.mark.parametrize(
    "make, message",
    [
        (part_of_the_head, "logits of Cut must be those of lm_head .*, got 60 of 61; compute"),
        (
            lambda: another("Odd", lambda self, input_ids: input_ids.logits),
            "logits of Odd must be .*, got AttributeError without its decoder",
        ),
        (  # Phi's head; the loss would leave the bias out
            changed(lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.zeros(TINY["vocab_size"])))),
            "linear layer without bias, got torch.* with a bias; call",
        ),
        (changed(lambda model: setattr(model.lm_head, "__class__", COSINE)), "got .*Cosine with a forward of its own;"),
        (lambda: build().model, "lm_head"),
        (
            changed(lambda model: setattr(model.config, "output_router_logits", True)),
            "for a model without .*, got True for LlamaForCausalLM; compute",
        ),
    ],
)
def test_refuses_heads_and_balancing_losses(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(NotImplementedError, match=message):
        huggingface.CausalLMWithLoss(model, None)


def test_refuses_terms_beside_cross_entropy() -> None:
    """Bamba's z-loss, which the ring left out; a mean over tokens by a model's own code is accepted."""
    sizes = TINY | {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]}
    with torch.device("meta"):
        model = BambaForCausalLM(BambaConfig(**sizes, z_loss_coefficient=0.25))
    with pytest.raises(NotImplementedError, match="loss of BambaForCausalLM must be the cross-entropy of its logits"):
        huggingface.CausalLMWithLoss(model, None)
    model.z_loss_coefficient = 0.0
    huggingface.CausalLMWithLoss(model, None)

    def mean(self: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        logits = type(build()).forward(self, input_ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=self.factor * loss)

    own: Any = build()
    own.factor, own.__class__ = 1.0, type("Own", (type(own),), {"forward": mean})
    huggingface.CausalLMWithLoss(own, None)
    own.factor = 1.5
    with pytest.raises(NotImplementedError, match="loss of Own must be the cross-entropy of its logits, got other"):
        huggingface.CausalLMWithLoss(own, None)


@pytest.mark.parametrize("part", ["ForCausalLM", "fixed_cross_entropy"])
def test_refuses_a_loss_for_all_models(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that computes the same is accepted."""
    model, names = huggingface.CausalLMWithLoss(build(), None), ["ForCausalLM", "ForConditionalGeneration"]
    replaced: Any = loss_utils.LOSS_MAPPING
    if part not in replaced:
        replaced, names = vars(loss_utils), [part]
    compute = replaced[names[0]]
    for scale in (1.0, 0.5):
        changed = partial(lambda factor, *given, **named: factor * compute(*given, **named), scale)
        for name in names:
            monkeypatch.setitem(replaced, name, changed)
        refused = pytest.raises(NotImplementedError, match="loss_function must be transformers' own for causal")
        with nullcontext() if scale == 1.0 else refused:
            model(**prepared())


def test_options_of_other_families_scale_no_logits() -> None:
    model = build()
    model.config.logits_scaling, model.config.final_logit_softcapping = 8.0, 30.0
    assert huggingface.CausalLMWithLoss(model, None).logit_scale == 1


def test_refuses_another_balancing_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_mixtral.load_balancing_loss_func
    model = huggingface.CausalLMWithLoss(build("mixtral", output_router_logits=True), None)

    def halved(gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None) -> Any:
        return own(gate_logits, num_experts, top_k, attention_mask) / 2

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", halved)
    with pytest.raises(NotImplementedError, match="must be False for a model without transformers' load_balancing"):
        model(**prepared())


def test_refuses_two_coefficients_of_a_balancing_loss() -> None:
    """A model keeps the one that its configuration had when it was made."""
    model = build("mixtral", output_router_logits=True)
    model.config.router_aux_loss_coef = 0.5
    with pytest.raises(ValueError, match=r"router_aux_loss_coef must be the same .*, got 0\.001 and 0\.5; set both"):
        huggingface.CausalLMWithLoss(model, None)(**prepared())


def test_refuses_a_balancing_loss_without_experts() -> None:
    """A Qwen3-MoE may have none."""
    model = build("qwen3_experts", output_router_logits=True, mlp_only_layers=[0, 1])
    with pytest.raises(RuntimeError, match="among the outputs of Qwen3MoeForCausalLM .*, got none; set"):
        huggingface.CausalLMWithLoss(model, None)(**prepared())


def test_refuses_a_cache_with_content() -> None:
    model, cache = build(), DynamicCache()
    model(**prepared(), past_key_values=cache)
    with pytest.raises(NotImplementedError, match=r"length of query \(24\), got 48; pass use_cache=False"):
        model(**prepared(), past_key_values=cache)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])  # "cache" from transformers 5.24 on
def test_refuses_a_cache_handed_to_attention(name: str) -> None:
    """But not keywords of the loss: Gemma 4 hands labels on, GOT-OCR2 logits_to_keep, called with them or not."""
    x = torch.zeros(1, 4, LENGTH, 8)
    assert find_static_error(nn.Module(), x, x, 0.0, None, True, {"labels": x, "logits_to_keep": 0}) is None
    error = find_static_error(nn.Module(), x, x, 0.0, None, True, {name: object()})
    assert isinstance(error, NotImplementedError)
    assert f"{name} must not be given" in str(error) and "use_cache=False" in str(error)


def test_masks_of_spans_are_read() -> None:
    """PaliGemma's prompt, by token_type_ids; packed documents, which transformers finds by positions, are no such."""
    blocks, embeds = torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, LENGTH, 32)
    config = build().config
    packed = torch.arange(LENGTH)[None] % 8
    assert create_causal_mask(config, embeds, None, None, position_ids=packed) is None
    for positions in (None, packed):
        found = create_causal_mask(config, embeds, None, None, position_ids=positions, block_sequence_ids=blocks)
        assert torch.equal(found.ids, blocks) and found.use is Use.WITHIN_WINDOW
    with pytest.raises(NotImplementedError, match="got 'causal or test_masks_.*<lambda>' from the model; leave"):
        create_causal_mask(config, embeds, None, None, or_mask_function=lambda *_: torch.tensor(True))
    config.model_type = "molmo2_text"
    with pytest.raises(NotImplementedError, match="mm_token_type_ids must be None for Molmo 2"):
        create_causal_mask(config, embeds, None, None, block_sequence_ids=blocks)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
@pytest.mark.parametrize("nested", [False, True])
def test_angles_by_length_need_a_rotary_layer(rope_type: str, nested: bool) -> None:
    """Such a layer can be told the length of the whole sequence; other angles need none."""
    parameters: dict = {"rope_type": rope_type, "rope_theta": 1e4}
    base = nn.Module()
    for other in (None, {}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "default"}):
        base.config = SimpleNamespace(rope_parameters=other)
        check_rope(base)
    base.config = SimpleNamespace(rope_parameters={"full_attention": parameters} if nested else parameters)
    with pytest.raises(NotImplementedError, match=f"rope_type must be one .* got '{rope_type}' and no rotary layer"):
        check_rope(base)
    base.rotary = nn.Module()
    base.rotary.rope_type = {"full_attention": rope_type} if nested else rope_type
    check_rope(base)
