"""Refusals of wrapping before anything runs, what it leaves as it was, and a module that never attends. CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ringflash
from tests.helpers import own_models as own

SET = nn.Linear(2, 2)
SET.forward = lambda x: x  # type: ignore[method-assign]


def call(model: nn.Module) -> torch.Tensor:
    return model(own.tokens(), torch.arange(own.LENGTH))


@pytest.mark.parametrize(
    ("layer", "pattern"),
    [
        (nn.MultiheadAttention(8, 2), r"layers\.0 must not be nn\.MultiheadAttention, got MultiheadAttention; call"),
        (nn.TransformerEncoderLayer(8, 2), r"layers\.0 must not be nn\.TransformerEncoderLayer"),
        (nn.LSTM(2, 2), r"layers\.0 must not be nn\.RNNBase, got LSTM"),
        (
            nn.BatchNorm1d(2),
            r"layers\.0 must not be nn\.BatchNorm1d, got BatchNorm1d; its statistics are of the rank's",
        ),
        (nn.Embedding(2, 2, scale_grad_by_freq=True), r"layers\.0 must not have scale_grad_by_freq or max_norm, got"),
        (nn.Embedding(2, 2, max_norm=1.0), r"layers\.0 must not have .* max_norm=1\.0, which depend on all tokens"),
        (SET, r"layers\.0\.forward must be the method of its class"),
        (
            torch.compile(nn.Linear(2, 2)),
            r"layers\.0 must not be compiled yet, got a module of torch\.compile; compile",
        ),
    ],
)
def test_layers_are_refused_by_name(layer: nn.Module, pattern: str) -> None:
    with pytest.raises(NotImplementedError, match=pattern):
        ringflash.wrap_attention(nn.ModuleDict({"layers": nn.ModuleList([layer])}), None)


def test_a_module_is_wrapped_once_with_its_layout() -> None:
    with pytest.raises(ValueError, match=r"layout must be that of ring \('zigzag'\), got 'contiguous'"):
        ringflash.wrap_attention(own.Bound(), None, layout="contiguous")
    model = ringflash.wrap_attention(own.build(own.Model), None)
    with pytest.raises(ValueError, match="Model must not be wrapped twice"):
        ringflash.wrap_attention(model, None)


def test_a_transformers_model_that_refuses_is_named() -> None:
    from tests.helpers import models

    pytest.importorskip("transformers")
    model = models.build(impl="sdpa")
    model.config.layer_types = ["chunked_attention"] * 2
    with pytest.raises(NotImplementedError, match="lm must take attn_implementation='ringflash', got: .*chunked"):
        ringflash.wrap_attention(nn.ModuleDict({"lm": model}), None)
    from transformers import BloomConfig, BloomModel

    bloom = BloomModel(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1))
    with pytest.raises(NotImplementedError, match="got: BloomModel, whose layers do not follow attn_impl"):
        ringflash.wrap_attention(nn.ModuleDict({"lm": bloom}), None)


class Silent(nn.Module):
    """Never calls an attention that can be seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_module_that_never_attends_is_an_error() -> None:
    model = ringflash.wrap_attention(Silent(), None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Silent must call scaled_dot_product_attention"):
            model(torch.ones(2))


def test_what_is_not_wrapped_is_unchanged() -> None:
    """torch's function, other models of the class, names of parameters, copies."""
    plain, model = own.build(own.Model, rotary=True, is_causal=True), own.build(own.Model, rotary=True, is_causal=True)
    before = call(plain)
    wrapped = ringflash.wrap_attention(model, None)
    assert isinstance(wrapped, own.Model) and type(plain) is own.Model
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(call(plain), before)
    duplicate: Any = copy.deepcopy(wrapped)
    assert torch.allclose(call(duplicate), before, rtol=0, atol=1e-12)
    assert duplicate._ringflash_state is not wrapped._ringflash_state
    assert duplicate._ringflash_state is duplicate.blocks[1].attn._ringflash_state


def test_a_ring_is_copied_with_its_group() -> None:
    """A moving average of the weights copies a model; a process group itself cannot be."""
    model: Any = own.build(own.Bound)
    model.ring.group = group = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 2)
    duplicate = copy.deepcopy(model)
    assert duplicate.ring is not model.ring and duplicate.ring.group is group
    assert vars(duplicate.ring).keys() == vars(model.ring).keys() and repr(duplicate.ring) == repr(model.ring)


def test_autocast_reaches_the_attention() -> None:
    """torch's own attention casts its inputs, and so must the ring's."""
    plain, wrapped = (own.build(own.Model, rotary=True, is_causal=True).float() for _ in range(2))
    ringflash.wrap_attention(wrapped, None)
    calls: Any = wrapped._ringflash_state
    calls.trace = []
    with torch.autocast("cpu", torch.bfloat16):
        assert call(wrapped).dtype == call(plain).dtype == torch.bfloat16
    assert {x.dtype for attention in calls.trace for x in attention.tensors} == {torch.bfloat16}


def test_layers_compiled_one_by_one_share_their_code() -> None:
    """Wrapped layers do, as before: torch gives up after 8 compilations, and the rest would run eagerly."""
    from torch._dynamo.testing import CompileCounter

    model: Any = ringflash.wrap_attention(own.build(own.Model, rotary=True, is_causal=True), None)
    torch._dynamo.reset()
    counter = CompileCounter()
    for block in model.blocks:
        block.compile(backend=counter)
    call(model)
    assert counter.frame_count == 1


def test_check_wrapped_wants_a_wrapped_module() -> None:
    with pytest.raises(ValueError, match="module must be wrapped, got Silent, which is not"):
        ringflash.check_wrapped(Silent(), lambda group: None)
