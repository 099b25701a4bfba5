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
from ringflash_kernels import reference
from tests.helpers import refusals
from tests.helpers.pool import Context, Pool


@pytest.mark.parametrize("name", refusals.REFUSALS)
@pytest.mark.parametrize("size", [2, 4])
def test_refusal(pool: Pool, name: str, size: int) -> None:
    refusals.assert_refused(name, pool.run(refusals.attempt, name, size=size, timeout_s=20))


def trusting(ctx: Context) -> str:
    """With the check off a rank in error raises by itself; no other rank waits for it here."""
    ringflash.set_agreement_check("never")
    try:
        ringflash.ring_attention(**{**refusals.good_call(ctx), "window_size": (-2, 0)})
    except ValueError as problem:
        return str(problem)
    finally:
        ringflash.set_agreement_check("changed")
    return "accepted"


def test_check_switched_off_still_refuses_locally(pool: Pool) -> None:
    assert all("window_size must be" in text for text in pool.run(trusting, size=2))


def again_after_an_error(ctx: Context, hops: tuple[int, int]) -> str:
    """A rank's kernel fails on its hop of this number, as where a device has no memory left; then all call again."""
    q = torch.randn(1, 8, 2, 16, dtype=torch.float64)
    call = partial(ringflash.ring_attention, q, q, q, group=ctx.group, causal=False, impl="reference")
    work = [reference.forward] * hops[ctx.rank] + [mock.Mock(side_effect=MemoryError("no memory left"))]
    with (
        mock.patch.object(reference, "forward", lambda *args, **options: work.pop(0)(*args, **options)),
        pytest.raises(MemoryError),
    ):
        call()
    try:
        call()
    except ValueError as problem:
        return str(problem)
    finally:
        ringflash.comm.agreement._interrupted.clear()
    return "accepted"


def test_calls_that_did_not_end_alike_are_not_made_again(pool: Pool) -> None:
    """Their messages would be taken for those of the new call. Those that did may be."""
    assert pool.run(again_after_an_error, (0, 0), size=2) == ["accepted"] * 2
    for text in pool.run(again_after_an_error, (0, 1), size=2):
        assert re.search(
            r"errors in calls 1, the last in call \d+ after 1 messages \(rank 0\), "
            r"1, the last in call \d+ after 2 messages \(rank 1\); start the processes again",
            text,
        )


def within_another_threads_call(ctx: Context) -> str:
    """A second thread calls while the first one is in a kernel."""
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
    return texts[0]


def test_threads_do_not_share_the_buffers(pool: Pool) -> None:
    """On every rank; the first thread's call goes on."""
    assert all("must be called by one thread" in text for text in pool.run(within_another_threads_call, size=2))


def long_error(ctx: Context) -> str:
    """The last rank has an error that JSON writes in many more bytes than letters."""
    error = ValueError("é" * 600) if ctx.rank == ctx.size - 1 else None
    with pytest.raises(ValueError) as raised:
        ringflash.comm.agreement.agree(ctx.group, {}, error)
    return str(raised.value)


def test_an_error_in_any_letters_reaches_all_ranks(pool: Pool) -> None:
    assert all(text.startswith("é" * 100) for text in pool.run(long_error, size=2))


def repeated_by_the_first(ctx: Context, device: str) -> None:
    """All ranks make a call of this device's tensors, then the first rank makes it again, alone."""
    for _ in range(2 if ctx.rank == 0 else 1):
        ringflash.comm.agreement.agree(ctx.group, {"call": "one"}, device=torch.device(device))


def test_a_call_of_gpus_is_compared_once(pool: Pool) -> None:
    """Also where the group has gloo for CPUs: a host that waits for the others at every call holds its GPU up."""
    pool.run(repeated_by_the_first, "cuda", size=2, timeout_s=20)


def refused_the_second_time(ctx: Context) -> str:
    """Ask twice for what is no call of a GPU, of a group without gloo; then the last rank has an error."""
    with mock.patch.object(ringflash.comm.agreement, "backend_of", lambda *_: "nccl"):
        ringflash.comm.agreement.agree(ctx.group, {"checkpoint": "one"})
        error = ValueError("damaged meanwhile") if ctx.rank == ctx.size - 1 else None
        with pytest.raises(ValueError) as raised:
            ringflash.comm.agreement.agree(ctx.group, {"checkpoint": "one"}, error)
    return str(raised.value)


def test_a_check_without_a_device_is_made_every_time(pool: Pool) -> None:
    """Also over NCCL alone: a rank that remembers the check would go on, and the one in error wait for it."""
    for text in pool.run(refused_the_second_time, size=2, timeout_s=20):
        assert text.startswith("damaged meanwhile")
