"""Messages and pairs of a call over gloo: a key goes to the ranks that see it, and no pair is computed twice.

2 to 4 CPU processes. The expectation is counted from visibility pair by pair, not from the schedule.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from ringflash.comm.transport import Message, Pending, PointToPoint
from ringflash.testing import dense
from ringflash_kernels import reference
from tests.helpers import ring_check
from tests.helpers.cases import Case
from tests.helpers.pool import Context, Pool

CHUNK = 6  # tokens: fewer than 64, so that keys are gathered to the token

CASES = [
    Case(),
    Case(causal=False),
    Case(layout="contiguous"),
    Case(window="left"),
    Case(window="both", causal=False, layout="contiguous"),
    Case(window="self"),
    Case(documents="aligned"),
    Case(documents="aligned", layout="contiguous"),
    Case(documents="tokens", causal=False),
    Case(documents="crossing", layout="contiguous"),
    Case(documents="mixed", window="left"),
    Case(documents="crossing", layout="balanced"),
    Case(documents="aligned", layout="balanced"),
    Case(documents="divisible", window="left", layout="documents"),
    Case(documents="rollouts", layout="contiguous"),
    Case(documents="diffusion"),
]


def traffic(ctx: Context, case: Case) -> dict[str, int]:
    """Bytes of "K/V" and "dK/dV" that this rank sends and receives, and pairs of its kernels, summed over the heads."""
    seen = dict.fromkeys(("K/V sent", "K/V received", "dK/dV sent", "dK/dV received", "forward", "backward"), 0)

    def post(self: PointToPoint, sends: list[Message], recvs: list[Message]) -> Pending:
        for way, messages in (("sent", sends), ("received", recvs)):
            for message in messages:
                is_number = message.tensor.nbytes == 8
                seen[f"{message.what.split()[0]} {way}"] += 0 if is_number else message.tensor.nbytes
        return original(self, sends, recvs)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *args: Any, **options: Any) -> None:
        seen["forward"] += mask.num_visible * q.shape[2]
        kernel(q, k, v, mask, *args, **options)

    class Backward(reference.ReferenceBackward):
        def add(self, k: torch.Tensor, v: torch.Tensor, mask: Any, *args: Any, **options: Any) -> None:
            seen["backward"] += mask.num_visible * k.shape[2] * (case.num_heads // case.num_kv_heads)
            super().add(k, v, mask, *args, **options)

    original, kernel = PointToPoint.post, reference.forward
    with (
        mock.patch.object(PointToPoint, "post", post),
        mock.patch.object(reference, "forward", forward),
        mock.patch.object(reference, "begin_backward", Backward),
    ):
        ring_check.check(ctx, case, CHUNK)
    return seen


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_what_is_seen_is_sent_and_computed(pool: Pool, case: Case, size: int) -> None:
    seqlen = 2 * size * CHUNK
    position = torch.arange(seqlen)
    visible = dense.visible(
        position, position, causal=case.causal, window_size=case.window_size(CHUNK),
        cu_seqlens=case.cu_seqlens(seqlen, CHUNK),
    )  # fmt: skip
    rows = [ring_check.positions_of(case, seqlen, size, rank) for rank in range(size)]
    keys = [[int(visible[q][:, k].any(0).sum()) for k in rows] for q in rows]  # by reader and owner
    key_bytes = 2 * case.batch * case.num_kv_heads * case.head_dim * 8
    for rank, seen in enumerate(pool.run(traffic, case, size=size)):
        received = key_bytes * sum(keys[rank][owner] for owner in range(size) if owner != rank)
        sent = key_bytes * sum(keys[reader][rank] for reader in range(size) if reader != rank)
        pairs = case.num_heads * int(visible[rows[rank]].sum())
        assert seen == {
            "K/V sent": 2 * sent, "K/V received": 2 * received,  # once more in the backward
            "dK/dV sent": received, "dK/dV received": sent, "forward": pairs, "backward": pairs,
        }  # fmt: skip
