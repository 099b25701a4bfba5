"""FP8 through `ring_attention`, its specification on 2 CPU processes: over gloo by hops, over shared memory by heads.

K and V arrive in bf16, and every rank rounds the keys that it has gathered. One process with the same implementation is
the baseline of the tolerance: cutting the sequence may not add more than its error again. It hardly adds any if chunks
are multiples of 128 tokens. Blocks of keys that share a scale are then the same on every rank and so are the bits of
q8, k8 and v8; results differ by the order of sums. By heads this needs the first key that a rank sees to begin a chunk,
as without windows and documents; out and lse then have the bits of one process.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import ringflash
from ringflash.comm.transport import Message, Pending, PointToPoint
from tests.helpers import ring_check, tolerance
from tests.helpers.cases import Case, mask_cases
from tests.helpers.peer_memory import copy_engine
from tests.helpers.pool import Context, Pool, WorkerError

IMPL = "reference_fp8"
MASKS = [replace(case, head_dim=64, num_heads=2, num_kv_heads=1) for case in mask_cases()]
SHAPES = [
    Case(head_dim=128, num_heads=4, num_kv_heads=2, batch=2, strides="fused_qkv"),
    Case(head_dim=256, num_heads=2, num_kv_heads=2, causal=False, softmax_scale=0.03),
    Case(head_dim=64, num_heads=3, num_kv_heads=1, strides="sliced", lse_gradient=False),
]
ALIGNED = 128
WHOLE_CHUNKS = [case for case in MASKS if case.window == "none" and case.documents in ("none", "whole", "aligned")]


def one_process(
    case: Case, whole: ring_check.Problem, chunk: int, fp8_backward: str = "bf16"
) -> dict[str, torch.Tensor]:
    """Return the results of one process, which holds all positions in order."""
    return ring_check.run(Context(None, 0, 1, whole.q.device), case, whole, chunk, IMPL, fp8_backward=fp8_backward)


def check_all(ctx: Context, cases: list[Case], chunk: int, by_heads: bool, fp8_backward: str = "bf16") -> None:
    """Assert that this rank's results keep within the tolerance, and if operands are equal, that they hardly differ."""
    with copy_engine() if by_heads else nullcontext():
        for case in cases:
            whole = ring_check.problem(case, 2 * ctx.size * chunk, torch.bfloat16, ctx.device)
            got = ring_check.run(ctx, case, whole, chunk, IMPL, fp8_backward=fp8_backward)
            alone = one_process(case, whole, chunk, fp8_backward)
            results = ring_check.oracle(case, whole, chunk, torch.float64), alone
            want, alone = ({name: ring_check.shard(ctx, case, x[name], name) for name in got} for x in results)
            tolerance.assert_close(got, want, alone, num_chunks=2)
            if chunk == ALIGNED and fp8_backward != "fp8":  # whose scales of dK and dV follow from the rank's queries
                assert_same_operands(got, alone, exact=("out", "lse") if by_heads else ())


def assert_same_operands(
    got: dict[str, torch.Tensor], alone: dict[str, torch.Tensor], exact: tuple[str, ...] = ()
) -> None:
    """Assert that results differ by one rounding of their dtype, of the largest value, at most; `exact` not at all."""
    for name, x in got.items():
        y = alone[name]
        largest = y[y.isfinite()].abs().max().item()
        allowed = 0.0 if name in exact else torch.finfo(y.dtype).eps * largest
        torch.testing.assert_close(x, y, rtol=0, atol=allowed, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("by_heads", [False, True], ids=["by hops", "by heads"])
def test_masks(pool: Pool, by_heads: bool) -> None:
    """With chunks of 50 tokens, whose blocks of keys are those of no other rank."""
    pool.run(check_all, MASKS[by_heads::5], 50, by_heads, size=2)


@pytest.mark.parametrize("by_heads", [False, True], ids=["by hops", "by heads"])
def test_operands_have_the_same_bits_on_every_rank(pool: Pool, by_heads: bool) -> None:
    """If chunks are multiples of 128 tokens."""
    cases = WHOLE_CHUNKS if by_heads else MASKS[::7]
    pool.run(check_all, [*cases, *SHAPES], ALIGNED, by_heads, size=2)


@pytest.mark.parametrize("by_heads", [False, True], ids=["by hops", "by heads"])
@pytest.mark.parametrize("fp8_backward", ["fp8_scores", "fp8"])
def test_products_of_the_backward(pool: Pool, by_heads: bool, fp8_backward: str) -> None:
    """The forward keeps the largest score of each row for "fp8"."""
    cases = [*WHOLE_CHUNKS[by_heads::9], *SHAPES[::2]]
    pool.run(check_all, cases, ALIGNED, by_heads, fp8_backward, size=2)


def sent(ctx: Context, case: Case, chunk: int) -> list[tuple[str, int]]:
    """Kind and bytes of each message that this rank sends."""
    seen: list[tuple[str, int]] = []

    def post(self: PointToPoint, sends: list[Message], recvs: list[Message]) -> Pending:
        seen.extend((message.what.split()[0], message.tensor.nbytes) for message in sends if message.rank is not None)
        return original(self, sends, recvs)

    original = PointToPoint.post
    whole = ring_check.problem(case, 2 * ctx.size * chunk, torch.bfloat16, ctx.device)
    with mock.patch.object(PointToPoint, "post", post):
        ring_check.run(ctx, case, whole, chunk, IMPL)
    return seen


@pytest.mark.parametrize("chunk", [64, 50])
def test_records_travel(pool: Pool, chunk: int) -> None:
    """Half the bytes of K and V in bf16 and 128 for each record, in both passes; gradients return in fp32."""
    case = SHAPES[0]
    records = case.batch * -(-2 * chunk // ALIGNED) * case.num_kv_heads * (2 * ALIGNED * case.head_dim + 128)
    gradients = 2 * case.batch * 2 * chunk * case.num_kv_heads * case.head_dim * 4
    messages = [("K/V", records), ("K/V", records), ("dK/dV", gradients)]
    assert pool.run(sent, case, chunk, size=2) == [messages] * 2


def test_exchanged_heads(pool: Pool) -> None:
    pool.run(check_all, [replace(SHAPES[0], transport="ulysses")], ALIGNED, False, "fp8", size=2)


def check_other_blocks(ctx: Context) -> None:
    case, chunk = MASKS[0], 50
    whole = ring_check.problem(case, 2 * ctx.size * chunk, torch.bfloat16, ctx.device)
    got, alone = ring_check.run(ctx, case, whole, chunk, IMPL), one_process(case, whole, chunk)
    assert_same_operands(got, {name: ring_check.shard(ctx, case, alone[name], name) for name in got})


def test_control_other_blocks_are_noticed(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="Tensor-likes are not close"):
        pool.run(check_other_blocks, size=2)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "problem"), [(64, torch.float64, "dtype torch.float64"), (16, torch.bfloat16, "head_dim 16")]
)
def test_other_inputs_are_refused_by_name(head_dim: int, dtype: torch.dtype, problem: str) -> None:
    x = torch.zeros(1, 8, 2, head_dim, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"impl='{IMPL}' must be able to take the inputs, got {problem} "):
        ringflash.ring_attention(x, x, x, group=None, impl=IMPL)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"impl": "auto", "fp8_backward": "fp8"}, ValueError, "must be 'bf16' with impl='reference', got 'fp8'"),
        ({"impl": IMPL, "fp8_backward": "e5m2"}, ValueError, "must be one of .*, got 'e5m2'; use 'bf16'"),
        ({"impl": IMPL, "fp8_backward": "fp8", "deterministic": True}, NotImplementedError, "deterministic must be"),
    ],
)
def test_other_backwards_are_refused_by_name(options: dict[str, Any], error: type[Exception], message: str) -> None:
    x = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(error, match=message):
        ringflash.ring_attention(x, x, x, group=None, **options)


def test_auto_never_rounds() -> None:
    x = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    assert ringflash.explain(x, x, x, group=None).impl == "reference"
    assert ringflash.explain(x, x, x, group=None, impl=IMPL).impl == IMPL
