"""Expectations of `ringflash verify` for a layer's mask, and right models of many kinds that meet it. One process."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from ringflash.testing.dense import visible
from ringflash.verify.compare import Check
from ringflash.verify.layer_masks import LayerMask, LayerMasks, ReachReader, declared_masks, ranges_of
from ringflash.verify.probe import read_forward
from ringflash.verify.target import Training, draw_data
from tests.helpers.models import TINY

SEQLEN, BOUNDS = 48, [0, 19, 29, 48]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", [LayerMask(), LayerMask(window=1), LayerMask(window=5), LayerMask(chunk=5)], ids=str)
def test_spans_are_those_of_dense_attention(mask: LayerMask, causal: bool) -> None:
    """Every key's queries, in every document, from whose start chunks are counted."""
    positions = torch.arange(SEQLEN)
    side = -1 if mask.window is None else mask.window - 1
    seen = visible(positions, positions, causal=causal, window_size=(side, side), cu_seqlens=BOUNDS)
    if mask.chunk is not None:
        places = torch.cat([torch.arange(stop - start) for start, stop in pairwise(BOUNDS)])
        seen &= places[:, None] // mask.chunk == places[None] // mask.chunk
    masks = LayerMasks({"layer": mask}, draw_data(61, SEQLEN, BOUNDS, 0, torch.device("cpu")), causal)
    for key in range(SEQLEN):
        assert torch.equal(masks._queries_of("layer", key), seen[:, key])


def test_queries_of_documents_that_continue_others() -> None:
    data = draw_data(61, 12, [0, 4, 7, 12], 0, torch.device("cpu"), [-1, 0, 0], [False, True, False])
    masks = LayerMasks({"full": LayerMask(), "window": LayerMask(window=3)}, data, causal=True)
    seen = [ranges_of(masks._queries_of(name, key)) for name, key in (("full", 2), ("full", 5), ("window", 3))]
    assert seen == ["[2, 12)", "[4, 7)", "[3, 6) and [7, 9)"]


def check_of(config: Any, bounds: list[int] | None, window: int | None = None) -> tuple[list[str], Check]:
    """(the layers' masks, the verdict) on one process."""
    from transformers import AutoModelForCausalLM

    from ringflash import huggingface

    huggingface.register()
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="ringflash", experts_implementation="eager", dtype=torch.float32
    )
    huggingface.set_group(model, None)
    training = Training(huggingface.CausalLMWithLoss(model, None))
    data = draw_data(61, SEQLEN, bounds, 0, torch.device("cpu"))
    masks = LayerMasks(declared_masks(training.module, window), data, causal=True)
    look = partial(ReachReader, positions=masks.positions)
    check = masks.check(*2 * [lambda wide: read_forward(training, None, data, look)])
    return [str(mask) for mask in masks.masks.values()], check


WINDOWED, FULL, CHUNKED = "a window of 5", "full attention", "chunks of 5"
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
          "num_key_value_heads": 4, "first_k_dense_replace": 2, "head_dim": 4}  # fmt: skip
KINDS = [
    ("llama", {}, [FULL, FULL]),
    ("mistral", {"sliding_window": 5}, [WINDOWED, WINDOWED]),
    ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2, "head_dim": 8}, [WINDOWED, FULL]),
    ("gpt_oss", {"sliding_window": 5, "head_dim": 8, **MOE, "rope_parameters": None}, [WINDOWED, FULL]),
    ("qwen3_moe", {"head_dim": 8, **MOE}, [FULL, FULL]),
    ("llama4_text", {"head_dim": 8, "attention_chunk_size": 5, "no_rope_layers": [1, 0], "moe_layers": [],
                     "intermediate_size_mlp": 48}, [CHUNKED, FULL]),
    ("phi3", {"sliding_window": 5, "pad_token_id": 0}, [WINDOWED, WINDOWED]),
    ("cohere2", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}, [WINDOWED, FULL]),
    ("deepseek_v3", LATENT, [FULL, FULL]),
    ("persimmon", {}, [FULL, FULL]),
]  # fmt: skip


@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["whole", "documents"])
@pytest.mark.parametrize(("family", "options", "want"), KINDS, ids=[kind[0] for kind in KINDS])
def test_right_models_pass(family: str, options: dict[str, Any], want: list[str], bounds: list[int] | None) -> None:
    config = pytest.importorskip("transformers").AutoConfig.for_model(family, **{**TINY, **options})
    masks, check = check_of(config, bounds)
    assert (masks, check.verdict, check.note) == (want, "ok", "")


def test_window_that_hides_nothing_is_not_right() -> None:
    config = pytest.importorskip("transformers").AutoConfig.for_model("mistral", **TINY, sliding_window=48)
    _, check = check_of(config, None)
    assert (check.verdict, check.failed) == ("not compared", [])
    assert check.note.startswith("a window of 48 hides nothing from the positions that are changed; raise --seqlen")


def test_window_of_the_command_line_goes_first() -> None:
    config = pytest.importorskip("transformers").AutoConfig.for_model("llama", **TINY)
    masks, check = check_of(config, None, window=5)
    assert masks == [WINDOWED] * 2 and len(check.failed) == 2
    assert check.note.startswith("position 0 reaches 5, outside [0, 5) at cp=1 and cp=N")


def test_model_without_configuration_is_not_compared() -> None:
    masks = LayerMasks(declared_masks(nn.Linear(2, 2)), draw_data(61, 8, None, 0, torch.device("cpu")), causal=True)
    assert masks.check(lambda wide: {}, lambda wide: {}).verdict == "not compared"
