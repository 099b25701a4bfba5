"""Bad calls raise the same error on every rank, within seconds, before anything is sent. gloo, 2 to 4 CPU processes."""

from __future__ import annotations

import pytest

import ringflash
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


def long_error(ctx: Context) -> str:
    """The last rank has an error that JSON writes in many more bytes than letters."""
    error = ValueError("é" * 600) if ctx.rank == ctx.size - 1 else None
    with pytest.raises(ValueError) as raised:
        ringflash.agreement.agree(ctx.group, {}, error)
    return str(raised.value)


def test_an_error_in_any_letters_reaches_all_ranks(pool: Pool) -> None:
    assert all(text.startswith("é" * 100) for text in pool.run(long_error, size=2))
