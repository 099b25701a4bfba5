"""Bad calls raise the same error on every rank, within seconds, before anything is sent. gloo, 2 to 4 CPU processes."""

from __future__ import annotations

import re
import threading
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import ringflash
from ringflash.attention import operators, plan
from ringflash.comm.transport import PointToPoint
from ringflash_kernels import flash4, reference
from tests.helpers import refusals
from tests.helpers.pool import Context, Pool, on_ranks


@pytest.mark.parametrize("name", refusals.REFUSALS)
@pytest.mark.parametrize("size", [2, 4])
def test_refusal(pool: Pool, name: str, size: int) -> None:
    refusals.assert_refused(name, pool.run(refusals.attempt, name, size=size, timeout_s=20))


@on_ranks(2)
def test_check_switched_off_still_refuses_locally(ctx: Context) -> None:
    """A rank in error raises by itself; no other rank waits for it here."""
    ringflash.set_agreement_check("never")
    try:
        with pytest.raises(ValueError, match="window_size must be"):
            ringflash.ring_attention(**{**refusals.good_call(ctx), "window_size": (-2, 0)})
    finally:
        ringflash.set_agreement_check("changed")


def again_after_an_error(ctx: Context, others: tuple[int, int]) -> str:
    """Kernels fail, as where a device has no memory left, on a rank after so many other messages; all call again."""
    q = torch.randn(1, 8, 2, 16, dtype=torch.float64)
    call = partial(ringflash.ring_attention, q, q, q, group=ctx.group, causal=False, impl="reference")

    def fail(*_: Any, **__: Any) -> None:
        for _ in range(others[ctx.rank]):
            post.call_args.args[0].post([], [])
        raise MemoryError("no memory left")

    with (
        mock.patch.object(PointToPoint, "post", autospec=True, side_effect=PointToPoint.post) as post,
        mock.patch.object(reference, "forward", fail),
        pytest.raises(MemoryError),
    ):
        call()
    try:
        call()
    except ValueError as problem:
        return str(problem)
    finally:
        ringflash.comm.agreement._errors_of_groups.clear()
    return "accepted"


def test_calls_that_ended_unlike_are_not_made_again(pool: Pool) -> None:
    """Their messages would be taken for those of the new call. Those that did may be."""
    assert pool.run(again_after_an_error, (0, 0), size=2) == ["accepted"] * 2
    for text in pool.run(again_after_an_error, (0, 1), size=2):
        assert re.search(
            r"errors in calls 1, the last in call \d+ after 1 messages \(rank 0\), "
            r"1, the last in call \d+ after 2 messages \(rank 1\); start the processes again",
            text,
        )


@on_ranks(2, timeout_s=20)
def test_package_missing_on_a_host_is_an_error_of_all(ctx: Context) -> None:
    call = refusals.good_call(ctx)
    if ctx.rank == 1:
        call["impl"] = "fa4"
    with (
        mock.patch.object(flash4, "unsupported", side_effect=ImportError("undefined symbol")),
        pytest.raises(ImportError if ctx.rank == 1 else RuntimeError, match="undefined symbol"),
    ):
        ringflash.ring_attention(**call)


@on_ranks(2, timeout_s=20)
def test_ranks_differ_in_kernel_of_auto(ctx: Context) -> None:
    """A package that one host lacks: on GPUs "auto" would take another transport there, and both would wait."""
    call = {**refusals.good_call(ctx), "impl": "auto"}
    chosen = ("flash2", "fa4 cannot take it") if ctx.rank else plan.choose_impl(*(call[x] for x in "qkv"))
    text = r"got kernel reference \(rank 0\), flash2 \(rank 1\); install the same packages .*, or name an impl"
    with mock.patch.object(plan, "choose_impl", lambda *_: chosen), pytest.raises(ValueError, match=text):
        ringflash.ring_attention(**call)


@on_ranks(2)
def test_an_error_before_the_first_message_is_noted(ctx: Context) -> None:
    """No memory for the row maxima: the next call of a rank that left here would be the others' present one."""
    agreement = ringflash.comm.agreement
    with (
        mock.patch.object(operators, "_empty_row_max", mock.Mock(side_effect=MemoryError("no memory left"))),
        pytest.raises(MemoryError),
    ):
        ringflash.ring_attention(**refusals.good_call(ctx))
    try:
        times, place = agreement._errors_of_groups[ctx.group]
        assert times == 1 and re.fullmatch(r"in call \d+ after 0 messages", place)
        assert torch.isfinite(ringflash.ring_attention(**refusals.good_call(ctx))).all()
    finally:
        agreement._errors_of_groups.clear()


@on_ranks(2)
def test_threads_do_not_share_the_buffers(ctx: Context) -> None:
    """A second thread calls while the first one is in a kernel, whose call goes on."""
    q = torch.randn(1, 8, 2, 16)
    call = partial(ringflash.ring_attention, q, q, q, group=ctx.group, impl="reference")
    want, texts, compute = call(), [], reference.forward

    def beside() -> None:
        with pytest.raises(RuntimeError) as raised:
            call()
        texts.append(str(raised.value))

    def forward(*args: Any, **options: Any) -> None:
        if not texts:
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()
        compute(*args, **options)

    with mock.patch.object(reference, "forward", forward):
        assert torch.equal(call(), want)
    assert "two threads of this process called" in texts[0]


@on_ranks(2)
def test_an_error_in_any_letters_reaches_all_ranks(ctx: Context) -> None:
    """The last rank has an error that JSON writes in many more bytes than letters."""
    error = ValueError("é" * 600) if ctx.rank == ctx.size - 1 else None
    with pytest.raises(ValueError, match="^" + "é" * 100):
        ringflash.comm.agreement.agree(ctx.group, {}, error)


@on_ranks(2, timeout_s=20)
def test_a_call_of_gpus_is_compared_once(ctx: Context) -> None:
    """All ranks make a call of a GPU's tensors, then only the first rank makes it again.

    Also where the group has gloo for CPUs: a host that waits for the others at every call holds its GPU up.
    """
    for _ in range(2 if ctx.rank == 0 else 1):
        ringflash.comm.agreement.agree(ctx.group, {"call": "one"}, device=torch.device("cuda"))


@on_ranks(2, timeout_s=20)
def test_a_check_without_a_device_is_made_every_time(ctx: Context) -> None:
    """Also over NCCL only: a rank that remembers the check would go on, and the one in error wait for it."""
    with mock.patch.object(ringflash.comm.agreement, "backend_of", lambda *_: "nccl"):
        ringflash.comm.agreement.agree(ctx.group, {"checkpoint": "one"})
        error = ValueError("damaged meanwhile") if ctx.rank == ctx.size - 1 else None
        with pytest.raises(ValueError, match="^damaged meanwhile"):
            ringflash.comm.agreement.agree(ctx.group, {"checkpoint": "one"}, error)
