"""The Hugging Face plug in one process: equals transformers' own attention in fp64.

CPU; needs the huggingface extra. The oracle is "sdpa" with transformers' masks: its "eager" takes the softmax in fp32
whatever the model's dtype, and its loss casts logits to fp32.
"""

from copy import deepcopy

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

import ringflash
from ringflash import huggingface
from ringflash.attention.inputs import require_grad_together
from ringflash.verify.capture import embedding_head
from tests.helpers.models import BOUNDS, EXPERTS, LENGTH, MODELS, TINY, build, documents, tokens

transformers = pytest.importorskip("transformers")


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() <= 1e-10 * want.abs().max().clamp(min=1e-3)


def assert_alike(ours: torch.nn.Module, got: torch.Tensor, whole: torch.nn.Module, want: torch.Tensor) -> None:
    """Results are equal, and so are the gradients of a loss, or of the squares of logits."""
    assert_equal(got, want)
    for x in (got, want):
        (x if x.dim() == 0 else x.square().sum()).backward()
    pairs = [(p.grad, q.grad) for p, q in zip(ours.parameters(), whole.parameters(), strict=True) if q.requires_grad]
    assert pairs
    for mine, wanted in pairs:
        assert_equal(mine, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_dense(name: str) -> None:
    ring, dense = build(name), build(name, "sdpa")
    huggingface.set_group(ring, None)
    ids = tokens(2)
    batch = huggingface.prepare_batch(ids, group=None)
    got, want = ring(**batch).logits, dense(ids, use_cache=False).logits
    assert_alike(ring, got, dense, want)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_over_fp32_parameters(name: str) -> None:
    """transformers' Trainer runs so with bf16=True: no further from fp64 than twice what dense attention is."""
    ids = tokens(2)
    batch = huggingface.prepare_batch(ids, group=None)
    exact = build(name, "sdpa")(ids, use_cache=False).logits
    ring, dense = build(name).float(), build(name, "sdpa").float()
    huggingface.set_group(ring, None)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = ring(**batch).logits, dense(ids, use_cache=False).logits
    assert got.dtype == want.dtype
    far, near = ((x.double() - exact).abs() for x in (got, want))
    limit = torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert far.max() <= 2 * near.max() + limit and far.mean() <= 2 * near.mean() + limit


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


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_chunks_equal_dense(packed: bool) -> None:
    """The dense model is given its masks: older transformers count chunks of documents from the sequence's start.

    The scale of the layers without rotation counts from the start of the sequence, as in transformers.
    """
    ring, dense, ids = build("chunks"), build("chunks", "sdpa"), tokens(1 if packed else 2)
    huggingface.set_group(ring, None)
    bounds = documents() if packed else None
    positions = "document" if packed else "global"
    batch = huggingface.prepare_batch(ids, group=None, cu_seqlens=bounds, position_ids=positions)
    document = torch.repeat_interleave(torch.arange(3), documents().diff()) if packed else torch.zeros(LENGTH)
    position = batch["position_ids"][0]
    causal = (document[:, None] == document) & (position[:, None] >= position)
    masks = {"full_attention": causal, "chunked_attention": causal & (position[:, None] // 5 == position // 5)}
    got, want = (
        ring(**batch).logits,
        dense(
            ids, position_ids=batch["position_ids"], use_cache=False,
            attention_mask={kind: mask[None, None].expand(len(ids), 1, -1, -1) for kind, mask in masks.items()},
        ).logits,
    )  # fmt: skip
    assert_alike(ring, got, dense, want)


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "q_proj or v_proj", "layers.1"])
def test_partly_frozen_model_has_dense_gradients(trained: str) -> None:
    ring, dense, ids = build("qwen3"), build("qwen3", "sdpa"), tokens()
    for model, batch in ((ring, huggingface.prepare_batch(ids, group=None)), (dense, {"input_ids": ids})):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained.split(" or ")))
        model(**batch).logits.square().sum().backward()
    assert any(p.requires_grad for p in ring.parameters())
    for p, q in zip(ring.parameters(), dense.parameters(), strict=True):
        assert (p.grad is not None) == p.requires_grad
        if p.requires_grad:
            assert_equal(p.grad, q.grad)


def test_frozen_inputs_share_storage_without_gradient() -> None:
    q, k = torch.ones(2, requires_grad=True), torch.ones(2)
    alike = require_grad_together(q, k)
    assert alike[0] is q and alike[1].requires_grad and alike[1].data_ptr() == k.data_ptr()
    (alike[0] * alike[1]).sum().backward()
    assert q.grad is not None and k.grad is None
    with torch.no_grad():
        assert require_grad_together(q, k)[1] is k


def test_sinks_keep_their_dtype_with_bf16_attention() -> None:
    """100.3 is 100.5 in bf16: sigmoid(-0.2) instead of sigmoid(0)."""
    lse, sinks = torch.full((1, 1, 4), 100.3), torch.tensor([100.3], requires_grad=True)
    out = ringflash.apply_sinks(torch.ones(1, 4, 1, 8, dtype=torch.bfloat16), lse, sinks)
    assert out.dtype == torch.bfloat16 and (out == 0.5).all()
    out.float().sum().backward()
    assert (sinks.grad + 32 * 0.25).abs() <= 1e-4 * 8


SCALED = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 0.3},
    "hyperclovax": {"logits_scaling": 0.3},
    "minicpm3": {
        "dim_model_base": 80, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_loss_of_scaled_logits_equals_the_models(kind: str) -> None:
    huggingface.register()
    config = AutoConfig.for_model(kind, **{**TINY, "pad_token_id": 0, **SCALED[kind]})
    models = [AutoModelForCausalLM.from_config(config, attn_implementation="ringflash") for _ in range(2)]
    ours, whole = (model.double() for model in models)
    ours.load_state_dict(whole.state_dict())
    batch, ids = huggingface.prepare_batch(tokens(2), group=None), tokens(2)
    wrapped = huggingface.CausalLMWithLoss(ours, None, chunk_tokens=5)
    loss, (losses, _) = wrapped(**batch), wrapped(**batch, per_token=True)
    logits = whole(ids, position_ids=batch["position_ids"], use_cache=False).logits[:, :-1]
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert_equal(losses.sum() / ids[:, 1:].numel(), want)
    assert_alike(ours, loss, whole, want)


@pytest.mark.parametrize("name, padded", [*((name, False) for name in (*EXPERTS, "sinks")), ("mixtral", True)])
def test_balancing_loss_equals_the_models(name: str, padded: bool) -> None:
    """transformers sums it in fp32; neither has padding, nor the labels that are given by default."""
    ours, whole = (
        build(name, impl, output_router_logits=True, router_aux_loss_coef=2.0) for impl in ("ringflash", "sdpa")
    )
    huggingface.set_group(ours, None)
    wrapped, ids = huggingface.CausalLMWithLoss(ours, None), tokens(2)
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]]) if padded else None
    labels = ids if mask is None else ids.masked_fill(~mask, -100)
    batch = huggingface.prepare_batch(ids, group=None, attention_mask=mask)
    loss, want = wrapped(**batch), whole(ids, labels=labels, attention_mask=mask, use_cache=False)
    assert wrapped.router_loss is not None and want.aux_loss > 1
    assert (wrapped.router_loss - want.aux_loss).abs() <= 1e-6 * want.aux_loss
    assert (loss - want.loss).abs() <= 1e-6 * want.loss
    score = wrapped(**batch, per_token=True)[0].sum() / (labels[:, 1:] != -100).sum()
    assert_equal(score + 2 * wrapped.router_loss, loss)
    loss.backward()
    want.loss.backward()
    for p, q in zip(ours.parameters(), whole.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 1e-6 * q.grad.abs().max()


def test_a_copy_with_loss_is_of_its_class_and_mode() -> None:
    """A moving average or a reference policy with a separate head is such a copy. The group is the same."""

    class WithValues(huggingface.CausalLMWithLoss):
        def __init__(self) -> None:
            super().__init__(build(), None)
            self.values = torch.nn.Linear(TINY["hidden_size"], 1)

    model = WithValues().eval()
    model.group = group = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 2)
    copied = deepcopy(model)
    assert type(copied) is WithValues and not copied.training and copied.group is group
    assert copied.values.weight is not model.values.weight
    assert vars(copied).keys() == vars(model).keys() and copied.state_dict().keys() == model.state_dict().keys()


def test_ones_mask_is_fine() -> None:
    batch = huggingface.prepare_batch(tokens(), group=None)
    model = build()
    assert torch.equal(model(**batch, attention_mask=torch.ones(1, LENGTH)).logits, model(**batch).logits)


def test_compiled_model_equals_eager_and_still_refuses() -> None:
    eager, model = build(), build()
    compiled = torch.compile(model, backend="aot_eager")
    batch = huggingface.prepare_batch(tokens(), group=None, cu_seqlens=documents())
    want, got = eager(**batch).logits, compiled(**batch).logits
    assert_alike(model, got, eager, want)
    with pytest.raises(ValueError, match="all ones, got others"):
        compiled(**batch, attention_mask=torch.zeros(1, LENGTH, dtype=torch.int64))


def test_positions_are_checked_after_a_meta_forward() -> None:
    """Positions of fake tensors, with which every comparison succeeds, were kept for later forwards of the length."""
    model, input_ids, positions = build(), tokens()[:, :20], torch.arange(20)[None]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(DataDependentOutputException):
        model(mode.from_tensor(input_ids), position_ids=mode.from_tensor(positions), use_cache=False)
    with pytest.raises(ValueError, match="must be the shard's global positions"):
        model(input_ids, position_ids=positions + 1, use_cache=False)


def test_partly_frozen_attention_has_no_graph_break() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q, k, v = require_grad_together(q, k, k)
        return ringflash.ring_attention(q, k, v, group=None)

    q, k = torch.randn(2, 1, 8, 2, 16, dtype=torch.float64)
    q.requires_grad_()
    (got,) = torch.autograd.grad(attend(q, k).square().sum(), q)
    whole = k.clone().requires_grad_()
    (want,) = torch.autograd.grad(ringflash.ring_attention(q, whole, whole, group=None).square().sum(), q)
    assert_equal(got, want)


def test_body_of_a_model_that_is_its_base_is_found() -> None:
    """Llama 4's prefix names nothing; `ringflash verify` compares its logits all the same."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "intermediate_size_mlp": 8, "head_dim": 4, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.Llama4TextConfig(**sizes, **heads, num_hidden_layers=1, moe_layers=[])
    model = transformers.Llama4ForCausalLM(config)
    assert model.base_model is model and embedding_head(model) == (model.model, model.lm_head)
