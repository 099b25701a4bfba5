"""Calls that repeat a tape, on two GPUs: their results have the bits of those of ordinary calls.

Inputs change from call to call, and their addresses too. `--backend gloo --impl reference` runs it without a tape.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import ringflash
from ringflash.attention import gather_by_heads
from ringflash.attention.recording.tape import Tape
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup

pytestmark = pytest.mark.multi_gpu

CALLS = 6  # of a form: ordinary, recorded, and then repeated


class Form(NamedTuple):
    """Sizes of a rank's q, k and v, and options of the call."""

    tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    options: dict[str, Any]
    strided: bool = False
    with_dlse: bool = False


FORMS = {
    "grouped": Form(1024, 32, 8, 128, 128, {}),
    "window": Form(512, 8, 4, 64, 64, {"window_size": (200, 0)}, strided=True, with_dlse=True),
    "documents": Form(1024, 8, 8, 128, 128, {"cu_seqlens": torch.tensor([0, 300, 301, 1200, 2048], dtype=torch.int32)}),
    "sections": Form(16384, 8, 8, 128, 128, {}),
    "fp8": Form(2048, 16, 8, 128, 128, {"impl": "hopper_fp8"}),
    "nccl": Form(1024, 8, 8, 128, 128, {"transport": "nccl"}),
    "wide": Form(512, 8, 2, 256, 256, {}),
    "latent": Form(512, 8, 8, 192, 128, {}),
}


def results(ctx: Context, form: Form, tapes: bool) -> list[tuple[torch.Tensor, ...]]:
    """Return out, lse, the out of a call without gradients, dq, dk and dv of each call."""
    found, kept = [], []
    ordinary = mock.patch.object(gather_by_heads, "can_repeat", lambda *_: False)
    if not tapes:
        ordinary.start()
    try:
        for seed in range(CALLS):
            torch.manual_seed(seed * ctx.size + ctx.rank)
            kept.append(torch.empty((77 * seed + 1) << 12, device=ctx.device))  # inputs move
            q, k, v, dout = (
                torch.randn(1, form.tokens, heads, size + 64 * form.strided, device=ctx.device, dtype=torch.bfloat16)
                for heads, size in (
                    (form.num_heads, form.head_dim), (form.num_kv_heads, form.head_dim),
                    (form.num_kv_heads, form.v_head_dim), (form.num_heads, form.v_head_dim),
                )
            )  # fmt: skip
            q, k = (x[..., : form.head_dim].detach().requires_grad_() for x in (q, k))
            v, dout = v[..., : form.v_head_dim].detach().requires_grad_(), dout[..., : form.v_head_dim]
            options = {"group": ctx.group, "deterministic": True, **form.options}
            if "cu_seqlens" in options:  # are those of two ranks
                options["cu_seqlens"] = options["cu_seqlens"] * ctx.size // 2
            out, lse = ringflash.ring_attention(q, k, v, return_lse=True, **options)
            targets = [out, lse] if form.with_dlse else [out]
            grads = torch.autograd.grad(targets, (q, k, v), [dout, torch.ones_like(lse)][: len(targets)])
            with torch.no_grad():
                again = ringflash.ring_attention(q, k, v, **options)
            found.append((out.detach(), lse.detach(), again, *grads))
    finally:
        if not tapes:
            ordinary.stop()
    return found


def compared(ctx: Context, form: Form) -> int:
    """Assert that both ways have the same bits; return how many calls repeated a tape."""
    want = results(ctx, form, tapes=False)
    with mock.patch.object(Tape, "repeat", autospec=True, side_effect=Tape.repeat) as repeated:
        for seed, (got, expected) in enumerate(zip(results(ctx, form, tapes=True), want, strict=True)):
            for name, x, y in zip(("out", "lse", "again", "dq", "dk", "dv"), got, expected, strict=True):
                assert torch.equal(x, y), (seed, name)
    return repeated.call_count


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_repeated_bits(pool: Pool, setup: Setup, form: Form) -> None:
    if setup.backend != "nccl":
        pytest.skip("tapes are for GPUs")
    if setup.impl != "hopper":
        pytest.skip("tapes are for the Hopper kernels")
    assert min(pool.run(compared, form, timeout_s=300)) > CALLS
