"""Tiny transformers models of images and prefixes whose tokens see one another, and their inputs."""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ringflash import huggingface
from ringflash.comm.seeding import seeded
from tests.helpers.models import TINY

LENGTH = 36
TEXT = TINY | {"head_dim": 8}
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
TOWER = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "projection_dim": 32, "vocab_size": 32,
}  # fmt: skip
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 8}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # class, name of token types, changes of the text
    "gemma3": ("Gemma3ForConditionalGeneration", "token_type_ids", WINDOW),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        "mm_token_type_ids",
        WINDOW
        | {"use_bidirectional_attention": "vision", "global_head_dim": 8, "vocab_size_per_layer_input": 61,
           "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": None},
    ),
    "paligemma": ("PaliGemmaForConditionalGeneration", "token_type_ids", {"model_type": "gemma"}),
    "paligemma2": (
        "PaliGemmaForConditionalGeneration",
        "token_type_ids",
        {"model_type": "gemma2", "sliding_window": 20} | UNCAPPED,
    ),
    "hrm": ("HrmTextForCausalLM", "token_type_ids", {"hidden_size": 32}),
}  # fmt: skip
KINDS["gemma4_unified"] = (
    "Gemma4UnifiedForConditionalGeneration", "mm_token_type_ids", KINDS["gemma4"][2] | {"sliding_window": 8},
)  # fmt: skip


def build(kind: str, impl: str | dict[str, str]) -> Any:
    """A tiny model of images and text; without images its tower never runs."""
    import transformers

    huggingface.register()
    name, _, text = KINDS[kind]
    family = kind.rstrip("2")
    towers: dict[str, Any] = {
        "vision_config": TOWER | ({"model_type": "siglip_vision_model"} if family == "paligemma" else {})
    }
    if family == "gemma4_unified":
        towers = {}
    if family == "gemma4":
        towers["audio_config"] = None
    if family == "gemma3":
        towers["mm_tokens_per_image"] = 4
        towers["vision_config"]["vision_use_head"] = False
    if family == "hrm":
        config = transformers.AutoConfig.for_model("hrm_text", **TEXT | text)
    else:
        config = transformers.AutoConfig.for_model(family, text_config=TEXT | text, image_token_index=60, **towers)
    with seeded(0):
        return getattr(transformers, name)._from_config(config, attn_implementation=impl, dtype=torch.float64)


def inputs(kind: str, prefix: int = 15) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, token types and numbers of the spans: a prefix, or four images of which two cross shards of 2 and 3."""
    tokens = torch.randint(0, 59, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    types = torch.zeros_like(tokens)
    if kind.startswith("paligemma") or kind == "hrm":
        types[:, prefix:] = 1
        ids = torch.where(types == 0, 0, -1)
        return tokens, 1 - types if kind == "hrm" else types, ids
    for start, stop in ((3, 5), (7, 14), (16, 21), (30, 34)):
        types[:, start:stop] = 1
    begins = (types == 1) & (F.pad(types, (1, 0))[:, :-1] != 1)
    return tokens, types, torch.where(types == 1, begins.cumsum(1) - 1, -1)


def in_fp64() -> AbstractContextManager[Any]:
    """Compute norms and angles in fp64."""
    return mock.patch.object(Tensor, "float", Tensor.double)
