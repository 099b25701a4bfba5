"""Messages and pairs: nothing that no query sees, K and V as one message, ahead of the kernel, in kept buffers.

gloo, 2 to 4 CPU processes. The expectation is counted from visibility pair by pair, not from the schedule.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import ringflash
from ringflash.comm.transport import Message, Pending, PointToPoint
from ringflash_kernels import reference
from tests.helpers import dense, ring_check
from tests.helpers.cases import Case
from tests.helpers.pool import Context, Pool, on_ranks

CHUNK = 6

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


def events(ctx: Context, case: Case) -> list[tuple[str, int]]:
    """("send", bytes), ("receive", bytes) and ("forward" | "backward", pairs) of one call, in order."""
    seen: list[tuple[str, int]] = []

    def post(self: PointToPoint, sends: list[Message], recvs: list[Message]) -> Pending:
        for name, messages in (("send", sends), ("receive", recvs)):
            seen.extend((name, message.tensor.nbytes) for message in messages if message.rank is not None)
        return original(self, sends, recvs)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *args: Any, **options: Any) -> None:
        seen.append(("forward", mask.num_visible))
        kernel(q, k, v, mask, *args, **options)

    class Backward(reference.ReferenceBackward):
        def add(self, k: torch.Tensor, v: torch.Tensor, mask: Any, *args: Any, **options: Any) -> None:
            seen.append(("backward", mask.num_visible))
            super().add(k, v, mask, *args, **options)

    original, kernel = PointToPoint.post, reference.forward
    with (
        mock.patch.object(PointToPoint, "post", post),
        mock.patch.object(reference, "forward", forward),
        mock.patch.object(reference, "begin_backward", Backward),
    ):
        ring_check.check(ctx, case, CHUNK)
    return seen


def pairs(case: Case, size: int) -> torch.Tensor:
    """Visible pairs between the queries of a rank and the keys of another: (size, size)."""
    seqlen = 2 * size * CHUNK
    position = torch.arange(seqlen)
    seen = dense.visible(
        position, position, causal=case.causal, window_size=case.window_size(CHUNK),
        cu_seqlens=case.cu_seqlens(seqlen, CHUNK),
    )  # fmt: skip
    rows = [ring_check.positions_of(case, seqlen, size, rank) for rank in range(size)]
    return torch.tensor([[int(seen[q][:, k].sum()) for k in rows] for q in rows])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_what_is_seen_is_sent_and_computed(pool: Pool, case: Case, size: int) -> None:
    count = pairs(case, size)
    kv_bytes = 2 * (2 * CHUNK) * case.num_kv_heads * case.head_dim * 8  # K and V in one message
    for rank, seen in enumerate(pool.run(events, case, size=size)):
        sources = [r for r in range(size) if count[rank, r] and r != rank]
        readers = [r for r in range(size) if count[r, rank] and r != rank]
        work = sorted(int(count[rank, r]) for r in range(size) if count[rank, r])
        assert sorted(n for name, n in seen if name == "forward") == work
        assert sorted(n for name, n in seen if name == "backward") == work
        # forward: K/V to the readers; backward: once more, and the gradients home to the sources
        assert [n for name, n in seen if name == "send"] == [kv_bytes] * (2 * len(readers) + len(sources))
        assert [n for name, n in seen if name == "receive"] == [kv_bytes] * (2 * len(sources) + len(readers))


def test_the_next_hop_is_posted_before_the_kernel(pool: Pool) -> None:
    for seen in pool.run(events, Case(causal=False), size=4):
        forward = [name for name, _ in seen if name != "receive"]
        assert forward[:7] == ["send", "forward"] * 3 + ["forward"]


@on_ranks(3)
def test_buffers_are_allocated_once(ctx: Context) -> None:
    """A long call makes them; short ones and as long ones use them again."""
    ringflash.release_buffers()
    assert ringflash.buffer_bytes() == 0
    sizes = set()
    for chunk in (8, 3, 8, 5):
        ring_check.check(ctx, Case(), chunk)
        sizes.add(ringflash.buffer_bytes())
    assert len(sizes) == 1 and min(sizes) > 0
