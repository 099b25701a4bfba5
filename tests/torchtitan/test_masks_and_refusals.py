"""Masks of torchtitan on its own modules, and what is refused before training. CPU, one process and two."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask

from ringflash.testing.tolerance import assert_close
from tests.recipes.launching import run_ranks

pytestmark = pytest.mark.timeout(900)

SEQLEN = 96
POSITIONS = torch.stack([
    torch.cat([torch.arange(40), torch.arange(1), torch.arange(55)]),
    torch.cat([torch.arange(7), torch.arange(89)]),
])  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def titan() -> Any:
    """Let torchtitan run on the CPU; it is imported here, so that other environments can collect this file."""
    from tests.torchtitan import cpu

    return cpu


# The mask_mods that models of torchtitan combine, by name: lists of a factory and its argument.
MASKS = {
    "causal": [("get_causal_mask_mod",)],
    "documents": [("get_causal_mask_mod",), ("get_document_mask_mod", POSITIONS)],
    "packed": [("get_causal_mask_mod",), ("get_efficient_causal_mask_mod_for_packed_document", POSITIONS)],
    "packed_row": [("get_causal_mask_mod",), ("get_efficient_causal_mask_mod_for_packed_document", POSITIONS[:1])],
    "window": [("get_sliding_window_mask_mod", 9), ("get_efficient_causal_mask_mod_for_packed_document", POSITIONS)],
    "blocks": [("get_causal_mask_mod",), ("get_fixed_block_mask_mod", 20), ("get_document_mask_mod", POSITIONS)],
}


def made(mask: Sequence[Sequence[Any]]) -> list[Callable]:
    """mask_mods of an entry of MASKS."""
    from torchtitan.models.common import attention

    return [getattr(attention, name)(*arguments) for name, *arguments in mask]


def tensors(batch: int, v_dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch, SEQLEN, 4, 16), (batch, SEQLEN, 2, 16), (batch, SEQLEN, 2, v_dim), (4,))
    return [torch.randn(x, dtype=torch.float64, generator=generator).requires_grad_() for x in shapes]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_equals_that_of_flex_attention(name: str) -> None:
    """Without a ring: on the module that replaces torchtitan's, with sinks and values of another width."""
    from torchtitan.models.common.attention import FlexAttention

    from ringflash.torchtitan.inner_attention import RingInnerAttention
    from ringflash.torchtitan.ring_mask import read_mask

    positions = POSITIONS[:1] if name == "packed_row" else POSITIONS
    mods, batch = made(MASKS[name]), len(positions)
    block_mask = create_block_mask(and_masks(*mods), batch, None, SEQLEN, SEQLEN, device="cpu")
    ring = RingInnerAttention(RingInnerAttention.Config())
    ring._parallelized = True
    found = []
    for attention, mask in (
        (FlexAttention(FlexAttention.Config()), block_mask),
        (ring, read_mask(mods, positions)),
    ):
        q, k, v, sinks = tensors(batch, v_dim=8)

        def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor = sinks) -> torch.Tensor:
            return out * torch.sigmoid(lse - sinks)[..., None]

        out = attention(q, k, v, attention_masks=mask, scale=0.3, enable_gqa=True, out_transform=with_sinks)
        weight = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()
        gradients = torch.autograd.grad(out, [q, k, v, sinks], weight)
        found.append(dict(zip(("out", "dq", "dk", "dv", "dsinks"), (out, *gradients), strict=True)))
    flex, got = ({name: x.detach().reshape(1, -1) for name, x in tensors.items()} for tensors in found)
    assert_close(got, flex)


def test_a_mask_without_documents_has_no_bounds() -> None:
    from ringflash.torchtitan.ring_mask import RingMask, read_mask

    whole = torch.arange(SEQLEN)[None]
    mods = made([("get_causal_mask_mod",), ("get_efficient_causal_mask_mod_for_packed_document", whole)])
    assert read_mask(mods, whole) == RingMask(None, None)


def _prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) | (k < 8)


UNREADABLE = {
    "a function of the user": lambda: [*made(MASKS["packed"]), _prefix],
    "a combination": lambda: [and_masks(*made(MASKS["packed"]))],
    "not causal": lambda: made(MASKS["packed"][1:]),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_other_masks_are_refused(name: str) -> None:
    from ringflash.torchtitan.ring_mask import read_mask

    with pytest.raises(NotImplementedError, match=r"mask_mods must .*, got .*; leave ringflash.torchtitan"):
        read_mask(UNREADABLE[name](), POSITIONS)


def test_calls_of_the_module_that_are_refused() -> None:
    from torch.distributed import ProcessGroup

    from ringflash.torchtitan.inner_attention import RingInnerAttention
    from ringflash.torchtitan.ring_mask import RingMask

    q, k, v, _ = tensors(1)
    mask = RingMask(None, None)

    def refused(match: str, attention_masks: Any = mask, **unknown: Any) -> None:
        with pytest.raises(NotImplementedError, match=match):
            ring(q, k, v, attention_masks=attention_masks, **unknown)

    ring = RingInnerAttention(RingInnerAttention.Config())
    refused("must parallelize the attention of every layer")
    ring._parallelized = True
    refused("without score_mod", score_mod=lambda score, *_: score)
    refused("without block_size and score_mod", score_mod=lambda score, *_: score, block_size=128)
    refused("must be made by Decoder._create_flex_attention_mask, .* got NoneType", None)
    ring.group = ProcessGroup(0, 1)
    refused("must be cut by torchtitan's Trainer", mask)


def overridden(**differs: Any) -> Any:
    """Configuration after overrides, as the Trainer's constructor makes it before it builds the model."""
    from torchtitan.config.override import apply_overrides

    from tests.torchtitan.train import configure

    config = configure({"model": "llama3", "cp": 2, "override": ["ring_attention"], **differs})
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    return config


@pytest.mark.parametrize(
    ("differs", "match"),
    [
        ({"balancer": "ptrr"}, "context_parallel_load_balancer must be 'headtail' or None .* got 'ptrr'"),
        ({"backend": "partial_dtensor"}, "spmd_backend must be 'spmd_types' .* got 'partial_dtensor'"),
        ({"flavor": "llama3_debugmodel_varlen_attn", "cp": 1}, "must have flex attention, .* got none; choose"),
        ({"cuda_graphs": True}, "disable_cuda_graphs must be True .* --training.disable_cuda_graphs"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_configurations_that_are_refused(differs: dict[str, Any], match: str) -> None:
    config = overridden(**differs)
    with pytest.raises(NotImplementedError, match=match):
        config._validate_cuda_graphs()


def test_options_reach_the_module() -> None:
    from torchtitan.models.common.attention import FlexAttention

    from ringflash.torchtitan import ring_attention
    from ringflash.torchtitan.inner_attention import RingInnerAttention

    assert ring_attention(FlexAttention.Config(), impl="reference").build().options["impl"] == "reference"
    with pytest.raises(ValueError, match="causal"):
        ring_attention(FlexAttention.Config(), causal=False)
    assert not issubclass(RingInnerAttention, FlexAttention)


def test_checkpointing_without_the_ring_warns(caplog: pytest.LogCaptureFixture) -> None:
    for override, warned in ((["ring_attention"], True), (["ring_attention", "keep_attention"], False)):
        caplog.clear()
        overridden(checkpointing="selective", override=override)._validate_cuda_graphs()
        assert ("add ringflash.torchtitan.keep_attention" in caplog.text) is warned


def test_a_refusal_reaches_every_rank(tmp_path: Path) -> None:
    """The Trainer's constructor raises it on both ranks."""
    case = {"model": "llama3", "cp": 2, "override": ["ring_attention"], "balancer": "ptrr"}
    case["refused"] = "context_parallel_load_balancer must be 'headtail' or None"
    run_ranks("tests.torchtitan.train", tmp_path / "out", json.dumps(case), num_ranks=2, timeout_s=600)
