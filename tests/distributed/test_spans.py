"""Images and prefixes whose tokens see one another: transformers models on a ring equal transformers' own masks.

gloo, 2 and 3 CPU processes, fp64; needs the huggingface extra.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import ringflash
from ringflash import huggingface
from tests.helpers.pool import Context, on_ranks
from tests.helpers.ring_check import assert_trains_alike
from tests.helpers.span_models import KINDS, LENGTH, TEXT, TOWER, build, in_fp64, inputs

pytest.importorskip("transformers")

import transformers
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration


@pytest.mark.parametrize(
    "kind, layout", [(kind, layout) for kind in KINDS for layout in ("zigzag", "balanced", "contiguous")][:-1]
)
@on_ranks(2, 3)
def test_training_equals_transformers(ctx: Context, kind: str, layout: str) -> None:
    """Loss and gradients of one step, against the model on one process under the masks that it makes itself."""
    dense, ring = build(kind, "eager"), build(kind, "ringflash")
    huggingface.set_group(ring, ctx.group, layout=layout)
    tokens, types, ids = inputs(kind)
    named = {KINDS[kind][1]: types}
    if (kind, layout) == ("gemma4", "balanced"):
        with pytest.raises(NotImplementedError, match="layout must not be 'balanced' for a model in which only some"):
            ring(**huggingface.prepare_batch(tokens, group=ctx.group, layout=layout, block_sequence_ids=ids, **named))
        return
    labels = ringflash.loss.shift_labels(tokens, ringflash.span_documents(ids[0]))
    softmax = mock.patch.object(F, "softmax", lambda x, dim, dtype: x.softmax(dim))  # of transformers' eager attention
    with in_fp64(), softmax:
        batch = huggingface.prepare_batch(tokens, group=ctx.group, layout=layout, block_sequence_ids=ids, **named)
        loss = huggingface.CausalLMWithLoss(ring, ctx.group)(**batch)
        positions = torch.arange(LENGTH)[None]
        logits = dense(input_ids=tokens, position_ids=positions, use_cache=False, **named).logits
        want = F.cross_entropy(logits[0], labels[0])
        assert_trains_alike(ctx, ring, loss, dense, want)


TOWER_APART = {"": "ringflash", "text_config": "ringflash", "vision_config": "eager"}


@on_ranks(2)
def test_embeddings_with_images(ctx: Context) -> None:
    """Gemma 3 with two images, which the model puts among the whole sequence's embeddings, and which shards cut."""
    dense, ring = build("gemma3", "eager"), build("gemma3", TOWER_APART)
    huggingface.set_group(ring, ctx.group)
    tokens, types = inputs("gemma3")[0], torch.zeros(1, LENGTH, dtype=torch.int64)
    types[:, 7:11], types[:, 16:20] = 1, 1
    tokens[types == 1] = ring.config.image_token_id
    ids = torch.where(types == 1, torch.arange(LENGTH) // 12, -1)
    labels = ringflash.loss.shift_labels(tokens, ringflash.span_documents(ids[0]))
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    softmax = mock.patch.object(F, "softmax", lambda x, dim, dtype: x.softmax(dim))
    with in_fp64(), softmax:
        logits = dense(input_ids=tokens, pixel_values=pixels, token_type_ids=types, use_cache=False).logits
        want = F.cross_entropy(logits[0], labels[0])
        embeddings = ring.get_input_embeddings()(tokens)
        features = ring.get_image_features(pixels).pooler_output
        places = ring.model.get_placeholder_mask(tokens, inputs_embeds=embeddings, image_features=features)
        embeddings = embeddings.masked_scatter(places, features)
        batch = huggingface.prepare_batch(tokens, group=ctx.group, block_sequence_ids=ids, token_type_ids=types)
        batch |= {"input_ids": None, "inputs_embeds": ringflash.shard_sequence(embeddings, ctx.group)}
        loss = huggingface.CausalLMWithLoss(ring, ctx.group)(**batch)
        assert_trains_alike(ctx, ring, loss, dense, want)
        got = ring(**batch).logits
        assert (got - ringflash.shard_sequence(logits, ctx.group)).abs().max() <= 1e-10
    assert all(p.grad is not None for p in ring.model.multi_modal_projector.parameters())
    with pytest.raises(ValueError, match="give a tower of images another implementation .*'vision_config': 'sdpa'"):
        build("gemma3", "ringflash").get_image_features(pixels)
    with pytest.raises(NotImplementedError, match="mm_encoder_outputs must not be given to a model on a ring"):
        ring(**{**batch, "mm_encoder_outputs": {"image": features}} if ctx.rank else batch)


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("gemma3", {"types": "moved"}, "token_type_ids .* must be the shard of those"),
        ("gemma3", {"table": None}, "token_type_ids .* must be the shard of those"),
        ("gemma4", {"types": "text"}, "token_type_ids .* must be the shard of those"),
        ("paligemma", {"types": None}, "use_bidirectional_attention must be unset"),
        ("paligemma2", {"prefix": 21}, "spans must fit into the window .20 tokens. .*, got 21 tokens"),
    ],
)
@on_ranks(2)
def test_refusals(ctx: Context, kind: str, change: dict[str, Any], message: str) -> None:
    """Token types that are not those of the documents, on one rank: refused on every rank."""
    ring, (tokens, types, ids) = build(kind, "ringflash"), inputs(kind, change.get("prefix", 15))
    huggingface.set_group(ring, ctx.group)
    batch = huggingface.prepare_batch(tokens, group=ctx.group, block_sequence_ids=ids, **{KINDS[kind][1]: types})
    if ctx.rank == 1 and "types" in change:
        of_shard = batch[KINDS[kind][1]]
        changed = {"moved": of_shard.roll(1, 1), "text": torch.zeros_like(of_shard), None: None}
        batch[KINDS[kind][1]] = changed[change["types"]]
    if "table" in change:
        del batch["cu_seqlens"]
    with pytest.raises(
        (ValueError, NotImplementedError), match=message if ctx.rank == 1 or "types" not in change else ""
    ):
        ring(**batch)


MEDIA = "pixel_values must not be given to a model on a ring"
BLIND = {"vision_config": TOWER | {"model_type": "siglip_vision_model"}}
PI0 = {"vlm_config": {"model_type": "paligemma", **BLIND}, "dit_config": {"model_type": "gemma"}}
WIDE = TEXT | {"sliding_window": 5}
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {  # class, configuration, inputs, message
    "git": ("GitForCausalLM", {}, (), "that follow attn_implementation, got none in GitForCausalLM"),
    "deepseek_ocr2": (
        "DeepseekOcr2ForConditionalGeneration",
        {"text_config": TEXT | {"mlp_layer_types": ["dense", "dense"]}},
        ("input_ids", "pixel_values"),
        MEDIA,
    ),
    "pi0": ("PI0ForConditionalGeneration", PI0, ("state", "noise", "timestep", "input_ids", "pixel_values"), MEDIA),
    "unlimited_ocr": ("UnlimitedOcrForConditionalGeneration", {}, (), "got 'reference_sliding_attention'"),
    "diffusion_gemma": (
        "DiffusionGemmaForBlockDiffusion",
        {"text_config": TEXT | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
        (),
        "got DiffusionGemmaDecoderModel, which counts the",
    ),
    "step3p7": (
        "Step3p7ForConditionalGeneration",
        {"text_config": {"use_bidirectional_attention": True}, **BLIND},
        ("input_ids",),
        "got 'Step3p7TextModel.forward.<lambda> or causal' from the model",
    ),
    "t5gemma2": (
        "T5Gemma2ForConditionalGeneration",
        {"encoder": {"text_config": WIDE, **BLIND}, "decoder": WIDE},
        ("input_ids", "decoder_input_ids"),
        "mask_function must be a causal, .* got '.*' from the model",
    ),
    "molmo2": (
        "Molmo2ForConditionalGeneration",
        {},
        ("input_ids", "mm_token_type_ids"),
        "mm_token_type_ids must be None for Molmo 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@on_ranks(2)
def test_refuses_models_with_other_masks(ctx: Context, kind: str) -> None:
    """Models that make spans themselves, or other masks: by `set_group`, or in a forward."""
    huggingface.register()
    name, changes, given, message = REFUSED[kind]
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **changes)
        model = getattr(transformers, name)._from_config(config, attn_implementation="eager", dtype=torch.float64)
        model.set_attn_implementation("ringflash")
        shard = dict.fromkeys(given, torch.zeros(1, LENGTH // ctx.size, dtype=torch.int64))
        with pytest.raises((NotImplementedError, ValueError), match=message):
            huggingface.set_group(model, ctx.group)
            model(**shard)


@on_ranks(2)
def test_positions_in_parts(ctx: Context) -> None:
    """M-RoPE of Qwen-VL: time, row and column of each token, of which only the text's positions can be checked."""
    huggingface.register()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=TEXT | {"rope_parameters": rope},
        vision_config={"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32},
    )  # fmt: skip
    tokens, parts = inputs("paligemma")[0], torch.arange(LENGTH).expand(3, 1, -1).clone()
    parts[1:, :, 7:15] = torch.tensor([[7, 7, 8, 8, 9, 9, 10, 10], [7, 8, 7, 8, 7, 8, 7, 8]])[:, None]
    dense, ring = (
        Qwen2_5_VLForConditionalGeneration._from_config(deepcopy(config), attn_implementation=impl, dtype=torch.float64)
        for impl in ("sdpa", "ringflash")
    )
    ring.load_state_dict(dense.state_dict())
    huggingface.set_group(ring, ctx.group)
    batch = huggingface.prepare_batch(tokens, group=ctx.group, position_ids=parts)
    assert batch["position_ids"].shape == (4, 1, LENGTH // ctx.size)
    with in_fp64():
        want = ringflash.shard_sequence(dense(input_ids=tokens, position_ids=parts, use_cache=False).logits, ctx.group)
        for positions in (batch["position_ids"], batch["position_ids"][1:]):
            got = ring(**{**batch, "position_ids": positions}).logits
            assert (got - want).abs().max() <= 1e-10 * want.abs().max()
    text = parts[:1].expand(3, -1, -1)
    for wrong in (batch["position_ids"].roll(1, 0), text[..., : LENGTH // 2]):
        with pytest.raises(ValueError, match="position_ids must be"):
            ring(**{**batch, "position_ids": wrong})
