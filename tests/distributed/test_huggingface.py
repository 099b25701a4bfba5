"""A whole transformers model over the ring: cp=1 equals cp=N in loss and every gradient; refusals reach all ranks.

gloo, 2 and 4 CPU processes, fp64; needs the huggingface extra.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringflash
from ringflash import huggingface
from ringflash.memory import Memory, save_memory
from tests.helpers.pool import Context, on_ranks
from tests.helpers.ring_check import assert_trains_alike

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

LENGTH = 32
BOUNDS = (0, 11, 12, 32)
DIVISIBLE = (0, 8, 32)  # by 2 * 4 ranks
OF_KIND: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "deepseek_v3": {  # latent attention at its own dims; no experts, whose router is fp32
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64,
        "first_k_dense_replace": 2,
    },
    "gpt_oss": {  # sinks, and a balancing loss large compared with the tokens'
        "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None,
        "output_router_logits": True, "router_aux_loss_coef": 2.0,
    },
    "llama4_text": {  # chunks, and queries scaled by positions that the attention counts
        "attention_chunk_size": 10, "floor_scale": 4, "no_rope_layers": [1, 0], "moe_layers": [],
        "intermediate_size_mlp": 48,
    },
    "phi3": {  # the largest positions of the ranks lie on both sides of 20
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0],
        },
        "original_max_position_embeddings": 20, "max_position_embeddings": 64, "pad_token_id": 0,
    },
    "gemma2": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "ministral3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
                                       "original_max_position_embeddings": 8}},
}  # fmt: skip


def build(kind: str, group: dist.ProcessGroup | None, layout: str = "zigzag") -> huggingface.CausalLMWithLoss:
    huggingface.register()
    config = AutoConfig.for_model(
        kind, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, **OF_KIND.get(kind, {})},
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="ringflash", experts_implementation="eager", dtype=torch.float64
    )
    huggingface.set_group(model, group, layout=layout)
    return huggingface.CausalLMWithLoss(model, group)


def tokens() -> torch.Tensor:
    return torch.randint(0, 61, (1, LENGTH), generator=torch.Generator().manual_seed(1))


GRID = list(product(("llama", "qwen3", "mistral", "deepseek_v3"), (None, BOUNDS), ("zigzag", "contiguous")))
GRID += [("qwen3", BOUNDS, "balanced"), ("gpt_oss", BOUNDS, "balanced"), ("qwen3", DIVISIBLE, "documents")]
GRID += [  # their attention is that of the others
    (kind, *case)
    for kind in ("gpt_oss", "llama4_text", "phi3", "ministral3")
    for case in ((None, "contiguous"), (BOUNDS, "zigzag"))
]


@pytest.mark.parametrize("kind, bounds, layout", GRID)
@on_ranks(2, 4)
def test_loss_and_gradients_equal_one_process(
    ctx: Context, kind: str, bounds: tuple[int, ...] | None, layout: str
) -> None:
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    ring, whole = build(kind, ctx.group, layout), build(kind, None)
    batch = huggingface.prepare_batch(tokens(), group=ctx.group, cu_seqlens=cu_seqlens, layout=layout)
    compare(ctx, (ring, batch), (whole, huggingface.prepare_batch(tokens(), group=None, cu_seqlens=cu_seqlens)))


def compare(ctx: Context, ringed: tuple[Any, dict[str, Any]], alone: tuple[Any, dict[str, Any]]) -> None:
    """A model and its batch, on a ring and on one process."""
    (ring, batch), (whole, whole_batch) = ringed, alone
    assert_trains_alike(ctx, ring, ring(**batch), whole, whole(**whole_batch))


@pytest.mark.parametrize("bounds", [None, (0, 11, 28)])
@on_ranks(2)
def test_padding_changes_nothing(ctx: Context, bounds: tuple[int, ...] | None) -> None:
    """Loss and gradients of experts of whose tokens 4 are padding, against one process without any.

    On two ranks, of which one holds all of it.
    """
    ring, whole = build("gpt_oss", ctx.group), build("gpt_oss", None)
    ids = tokens()[:, :-4]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    padded, _, padded_bounds, _ = ringflash.pad_sequence(ids, None, cu_seqlens, cp_size=ctx.size, multiple_of=4)
    mask = (torch.arange(padded.shape[1]) < ids.shape[1])[None]
    batch = huggingface.prepare_batch(padded, group=ctx.group, cu_seqlens=padded_bounds, attention_mask=mask)
    assert padded.shape[1] == LENGTH
    compare(ctx, (ring, batch), (whole, huggingface.prepare_batch(ids, group=None, cu_seqlens=cu_seqlens)))


@pytest.mark.parametrize(
    "kind, checkpointing",
    [
        ("qwen3", "transformers"), ("ministral3", "transformers"), ("gpt_oss", "attention_kept"),
        ("llama4_text", "attention_kept"), ("ministral3", "attention_kept"),
    ],
)  # fmt: skip
@on_ranks(2)
def test_gradient_checkpointing_changes_nothing(ctx: Context, kind: str, checkpointing: str) -> None:
    models = [build(kind, ctx.group), build(kind, ctx.group)]
    if checkpointing == "transformers":
        name = "activation_checkpointing_enable"  # which Trainer calls if the model has it, as of transformers 5.23
        getattr(models[0], name if hasattr(models[0].model, name) else "gradient_checkpointing_enable")()
    else:
        save_memory(models[0].model, Memory(checkpointing))
    batch = huggingface.prepare_batch(tokens(), group=ctx.group, cu_seqlens=torch.tensor(BOUNDS, dtype=torch.int32))
    calls = [count_attention(model.train(), batch) for model in models]
    assert calls == [4, 2]  # layers, run again in the backward where they are checkpointed
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.isfinite(p.grad).all()
        assert (p.grad - q.grad).abs().max() <= 1e-12 * q.grad.abs().max()


def count_attention(model: huggingface.CausalLMWithLoss, batch: dict[str, Any]) -> int:
    """Forward, that of a longer sequence, and the backward of the first; how often the attention ran for it."""
    calls: list[object] = []
    for layer in model.model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(None))
    loss, kept = model(**batch), len(calls)
    with torch.no_grad():
        model(**huggingface.prepare_batch(tokens().repeat(1, 2), group=model.group))
    del calls[kept:]
    loss.backward()
    return len(calls)


FAULTS = {
    "local positions": "position_ids must be", "padding on one rank": "all ones, got others",
    "numbers of documents on one rank": "all ones, got others", "cache on one rank": "use_cache must not",
    "another sequence on one rank": "given to prepare_batch must be the same on all ranks",
    "other labels on one rank": "given to prepare_batch must be the same on all ranks",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2, 4)
def test_refusals_raise_on_every_rank(ctx: Context, fault: str) -> None:
    """Only the last rank, or all ranks, err."""
    last, length = ctx.rank == ctx.size - 1, LENGTH // ctx.size
    other = fault == "another sequence on one rank" and last
    batch = huggingface.prepare_batch(tokens().flip(1) if other else tokens(), group=ctx.group)
    model = build("llama", ctx.group).model
    if fault == "other labels on one rank" and last:
        labels = torch.full_like(tokens(), -100)
        batch = huggingface.prepare_batch(tokens(), group=ctx.group, labels=labels)
    if fault == "local positions":
        batch["position_ids"] = torch.arange(length)[None]
    if fault == "padding on one rank" and last:
        batch["attention_mask"] = torch.arange(length)[None] < 3
    if fault == "numbers of documents on one rank" and last:
        batch["attention_mask"] = torch.arange(length)[None] // 3 + 1
    if fault == "cache on one rank" and last:
        batch["use_cache"] = True
    with pytest.raises((ValueError, NotImplementedError), match=FAULTS[fault]):
        model(**batch)


@on_ranks(2)
def test_refuses_to_guess_the_group(ctx: Context) -> None:
    model = build("llama", ctx.group).model
    for module in model.modules():
        module.__dict__.pop("_ringflash_inputs", None)
    with pytest.raises(ValueError, match=r"set_group\(model, group\)"):
        model(**huggingface.prepare_batch(tokens(), group=ctx.group))
