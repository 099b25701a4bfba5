"""Ranks whose calls are not in one order: left out, swapped in the backward, or left by an error. 2 or 4 CPU processes.

Over gloo the ranks compare every call. Where they do not, as on GPUs, the numbers of the calls travel with K/V: over
emulated peer memory, and over messages by heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import ringflash
from ringflash import huggingface
from ringflash.attention import sections
from ringflash.comm import agreement, call_numbers, call_order
from ringflash.comm.call_order import CallOrder
from ringflash.comm.transport import registry
from tests.helpers import models, peer_memory
from tests.helpers import own_models as own
from tests.helpers.peer_memory import copy_engine, messages_by_heads
from tests.helpers.pool import Context, Pool, on_ranks

Call = Callable[[], torch.Tensor]


@contextmanager
def forgotten() -> Iterator[None]:
    """Calls of earlier tests are not counted, nor in later ones those of a test, which may differ between its ranks."""
    with ExitStack() as stack:
        stack.callback(ringflash.set_agreement_check, "changed")
        for notes in (registry._open, call_numbers._of_groups, agreement._errors_of_groups, agreement._compared):
            stack.enter_context(mock.patch.dict(notes, clear=True))  # larger groups of these ranks keep theirs
        yield


@contextmanager
def not_compared(memory: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Leave the ranks only the words sent with K/V to learn about each other's calls."""
    with forgotten(), memory():
        ringflash.set_agreement_check("never")
        yield


def two_layers(ctx: Context) -> tuple[Call, Call]:
    """Layers with different values and equal shapes."""
    torch.manual_seed(ctx.rank)

    def layer() -> Call:
        q, k, v = (torch.randn(1, 8, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
        return lambda: ringflash.ring_attention(q, k, v, group=ctx.group, causal=False)  # type: ignore[return-value]

    return layer(), layer()


def backwards_swapped(ctx: Context) -> None:
    """Rank 0 differentiates the layers in the order of their forward."""
    outs = [layer() for layer in two_layers(ctx)]
    for out in outs if ctx.rank == 0 else reversed(outs):
        out.sum().backward()


def a_step_left(ctx: Context) -> None:
    """Only rank 0 has an error between two layers, which its caller catches to go on with the next step."""
    first, second = two_layers(ctx)
    first()
    if ctx.rank:
        second().sum().backward()
    else:
        first()
        second()


def a_backward_left_out(ctx: Context) -> None:
    """Rank 0 goes on to the next forward."""
    first, second = two_layers(ctx)
    out = first()
    if ctx.rank:
        out.sum().backward()
    second()


def other_layers(ctx: Context, bound: bool = False) -> None:
    """Each rank leaves out another layer of its model, as stochastic depth does with other seeds."""
    model = own.build(own.Model, **({"make": own.Bound} if bound else {"is_causal": True}))
    ringflash.wrap_attention(model, ctx.group)
    model(*own.shard(ctx)).sum().backward()
    model.blocks[ctx.rank].forward = lambda x, _: x
    model(*own.shard(ctx)).sum().backward()


def other_layers_bound(ctx: Context) -> None:
    other_layers(ctx, bound=True)


def other_layers_of_transformers(ctx: Context) -> None:
    pytest.importorskip("transformers")
    model = models.build(num_hidden_layers=3)
    huggingface.set_group(model, ctx.group)
    batch = huggingface.prepare_batch(models.tokens(), group=ctx.group)
    model.model.layers[1 + ctx.rank].forward = lambda x, *_, **__: x
    model(**batch, labels=batch["shift_labels"]).loss.backward()


MISTAKES = {
    a_step_left: "call 3 (forward) (rank 0), 3 (backward of call 2) (rank 1); run the same layers",
    backwards_swapped: "call 3 (backward of call 1) (rank 0), 3 (backward of call 2) (rank 1); run the same layers",
    a_backward_left_out: "call 2 (forward) (rank 0), 2 (backward of call 1) (rank 1); run the same layers",
    **dict.fromkeys(
        (other_layers, other_layers_bound),
        "call 5 (forward of blocks.1.attn) (rank 0), 5 (forward of blocks.0.attn) (rank 1); run the same layers",
    ),
    other_layers_of_transformers: (
        "call 2 (forward of LlamaAttention 2) (rank 0), 2 (forward of LlamaAttention 1) (rank 1); run the same layers"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(2)
def test_calls_over_gloo_are_refused_with_both_names(ctx: Context, mistake: Callable[[Context], None]) -> None:
    """On every rank; nothing is sent."""
    with forgotten(), pytest.raises(ValueError) as raised:
        mistake(ctx)
    assert str(raised.value).startswith("all ranks of the group must make the same call, got " + MISTAKES[mistake])


@on_ranks(2)
def test_the_number_of_calls_is_compared(ctx: Context) -> None:
    """Rank 1 makes a call that is not compared and sends nothing, as where a device has no memory left for it."""
    with forgotten(), pytest.raises(ValueError, match=r"got call 1 \(forward\) \(rank 0\), 2 \(forward\) \(rank 1\)"):
        if ctx.rank:
            call_numbers.begin(ctx.group)
        two_layers(ctx)[0]()


@pytest.mark.parametrize(
    "memory, mistake",
    [
        (copy_engine, backwards_swapped),
        (messages_by_heads, backwards_swapped),
        (copy_engine, a_step_left),
        (copy_engine, other_layers),
        (messages_by_heads, other_layers),
    ],
)
@on_ranks(2)
def test_numbers_that_travel_with_keys(ctx: Context, memory: Any, mistake: Callable[[Context], None]) -> None:
    """Every rank that reads K/V of the other one raises at its next call, at every later one, and at a check."""
    texts = set()
    with not_compared(memory):
        two_layers(ctx)[0]().sum().backward()  # so that areas have their size
        call_numbers._of_groups.clear()
        with suppress(RuntimeError, TimeoutError), mock.patch.object(peer_memory, "TIMEOUT_S", 1.0):
            mistake(ctx)
        check = partial(agreement.agree, ctx.group, {"checkpoint": "one"})
        for call in (two_layers(ctx)[0], two_layers(ctx)[0], check):
            with pytest.raises(RuntimeError) as raised:
                call()
            texts.add(str(raised.value))
    (text,) = texts
    assert text.startswith("ranks were in different attention calls: this rank in call ")
    if mistake is backwards_swapped:
        mine, other = (f"call 3 (backward of call {number})" for number in (1 + ctx.rank, 2 - ctx.rank))
        assert f"this rank in {mine}, rank {1 - ctx.rank} in {other}; " in text
    elif mistake is other_layers:
        mine, other = f"5 (forward of blocks.{1 - ctx.rank}.attn)", "5 (forward) of another layer"
        assert f"this rank in call {mine}, rank {1 - ctx.rank} in call {other} or with other arguments; " in text
    else:
        mine, other = ("3 (forward)", "3 (backward of call 2)")[:: 1 - 2 * ctx.rank]
        assert f"this rank in call {mine}, rank {1 - ctx.rank} in call {other}; " in text


@pytest.mark.parametrize("memory", [copy_engine, messages_by_heads])
@pytest.mark.parametrize("turns", [False, True])
@on_ranks(4)
def test_calls_in_one_order_pass(ctx: Context, memory: Any, turns: bool) -> None:
    """Two steps of two layers, in the right order, then a check. Call words also arrive if sections share buffers."""
    with (
        not_compared(memory),
        mock.patch.object(sections, "MAX_UNBUFFERED_KV_BYTES", 0 if turns else sections.MAX_UNBUFFERED_KV_BYTES),
    ):
        for _ in range(3):
            outs = [layer() for layer in two_layers(ctx)]
            for out in reversed(outs):
                out.sum().backward()
        agreement.agree(ctx.group, {"checkpoint": "one"})
        calls = call_numbers._calls(ctx.group)
        assert calls.count == 12 and not calls.problem and not calls.unread


def as_on_a_gpu(*inputs: Any, **options: Any) -> int:
    """`agree` for tensors of a GPU: a repeated call is not compared."""
    return _agree(*inputs[:3], torch.device("cuda"), **options)


_agree = agreement.agree


@on_ranks(2)
def test_kinds_of_layers_in_turn_are_compared_once(ctx: Context) -> None:
    """Two kinds of layers take turns, as windowed and full ones do; then rank 0 makes one of them out of turn.

    It is found by the checksum sent with its keys.
    """
    exchange = mock.Mock(side_effect=agreement._exchange)
    torch.manual_seed(ctx.rank)
    q = torch.randn(1, 8, 2, 16, dtype=torch.float64)

    def call(scale: float) -> None:
        ringflash.ring_attention(q, q, q, group=ctx.group, softmax_scale=scale)

    with (
        forgotten(),
        copy_engine(),
        mock.patch.object(agreement, "agree", as_on_a_gpu),
        mock.patch.object(agreement, "_exchange", exchange),
    ):
        ringflash.set_agreement_check("changed")
        for scale in (0.1, 0.2, 0.1, 0.2, 0.2):
            call(scale)
        assert exchange.call_count == 2
        call(0.1 if ctx.rank else 0.2)
        with pytest.raises(RuntimeError) as raised:
            call(0.1)
    theirs = "call 6 (forward) of another layer or with other arguments"
    assert f"this rank in call 6 (forward), rank {1 - ctx.rank} in {theirs}; " in str(raised.value)


def test_announced_gatherings_are_not_compared() -> None:
    """On a GPU, after what has always been followed by the same one; the order is compared at the end."""
    compared = mock.Mock()
    with mock.patch.object(call_order, "agree", compared):
        order = CallOrder(mock.Mock(), "unit", "call the same")
        for device_type, names, seen in (("cuda", "ababac", "abac"), ("cuda", "abac", "abc"), ("cpu", "ab", "ab")):
            for name in names:
                order.enter(name, device_type)
            order.end()
            found = [call.args[1]["unit"] for call in compared.call_args_list]
            assert found == [*seen, "none left"]
            compared.reset_mock()


@pytest.mark.parametrize("in_time", [True, False])
def test_words_of_a_failed_call(in_time: bool) -> None:
    """A word that arrives later may be that of the next call of a peer that left this one alike."""
    group, arrival, number = mock.Mock(), mock.Mock(**{"query.return_value": in_time}), call_numbers.CallNumber(1)
    with suppress(MemoryError), agreement.TrackedCall(group):
        word = torch.tensor([call_numbers.CallNumber(2).word])
        call_numbers.compare_later(group, arrival, number, word, [1])
        raise MemoryError
    arrival.query.return_value = True
    with pytest.raises(RuntimeError, match="this rank in call 1 .*, rank 1 in call 2 ") if in_time else nullcontext():
        call_numbers.check(group, torch.device("cpu"))


def left_before_the_first_message(ctx: Context) -> list[str]:
    """Rank 0 has no memory for the result of its second call, whose caller goes on to a third."""
    texts = []
    with (
        forgotten(),
        copy_engine(),
        mock.patch.object(agreement, "agree", as_on_a_gpu),
        mock.patch.object(peer_memory, "TIMEOUT_S", 1.0),
    ):
        ringflash.set_agreement_check("changed")
        layer, _ = two_layers(ctx)
        layer()
        full = mock.Mock(side_effect=MemoryError("no memory left"))
        empty = mock.patch("ringflash.attention.gather_by_heads.out_shape", full)
        for _ in range(2):
            try:
                if ctx.rank == 0 and not texts:
                    with empty:
                        layer()
                layer()
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_error_before_the_first_message_is_remembered(pool: Pool) -> None:
    """The rank's next call is not taken for the present one of the others."""
    first, second = pool.run(left_before_the_first_message, size=2)
    assert first[0] == "MemoryError: no memory left" and second[0].startswith("RuntimeError: barrier ")
    for text in (first[1], second[1]):
        assert text.startswith("ValueError: all ranks of the group must make the same call, got errors in calls ")
        assert (
            "1, the last in call 2 after 0 messages (rank 0), 1, the last in call 2 after 1 messages (rank 1)" in text
        )


@on_ranks(2)
def test_error_that_no_peer_hears_is_raised(ctx: Context) -> None:
    """With what became of the comparison; and the rank's next call is compared, since the peers are in this one.

    A rank in error is not answered: its peers repeat a call, which they do not compare.
    """
    cuda, answer = torch.device("cuda"), mock.Mock(side_effect=RuntimeError("no answer from some of 2 ranks"))
    with forgotten():
        agreement.agree(ctx.group, {"a": 1}, device=cuda)
        with mock.patch.object(agreement, "_exchange", answer):
            with pytest.raises(ValueError, match="^q must be shorter$") as raised:
                agreement.agree(ctx.group, {"a": 1}, ValueError("q must be shorter"), device=cuda)
            with pytest.raises(RuntimeError):
                agreement.agree(ctx.group, {"a": 1}, device=cuda)
    assert str(raised.value.__cause__) == "no answer from some of 2 ranks" and answer.call_count == 2


@on_ranks(2)
def test_versions_are_compared(ctx: Context) -> None:
    """Messages are as long as this version's constants say."""
    version = "0.0.9" if ctx.rank else ringflash.__version__
    with forgotten(), mock.patch.object(agreement, "__version__", version), pytest.raises(ValueError) as raised:
        two_layers(ctx)[0]()
    assert f"got ringflash {ringflash.__version__} (rank 0), 0.0.9 (rank 1); install one version" in str(raised.value)
