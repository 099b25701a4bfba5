"""FP8 through `ring_attention`, its specification on 2 CPU processes: over gloo and over shared memory.

The owner rounds K and V, and records of them travel. (Chunks of other lengths than multiples of 128 tokens travel in
bf16, and every rank rounds what it has gathered.) One process with the same implementation is the baseline of
the tolerance: cutting the sequence may not add more than its error again. It hardly adds any if chunks are multiples of
128 tokens. Blocks of keys that share a scale are then the same on every rank and so are the bits of q8, k8 and v8;
results differ by the order of sums. In one block of keys, out and lse have the bits of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringflash
from ringflash.attention import sections
from ringflash.comm.transport import Message, Pending, PointToPoint
from ringflash.testing import tolerance
from tests.distributed.test_blocks_of_keys import in_blocks
from tests.helpers import ring_check
from tests.helpers.cases import Case, mask_cases
from tests.helpers.peer_memory import copy_engine, messages_by_heads
from tests.helpers.pool import Context, Pool, WorkerError

IMPL = "reference_fp8"
MASKS = [replace(case, head_dim=64, num_heads=2, num_kv_heads=1) for case in mask_cases()]
SHAPES = [
    Case(head_dim=128, num_heads=4, num_kv_heads=2, batch=2, strides="fused_qkv"),
    Case(head_dim=256, num_heads=2, num_kv_heads=2, causal=False, softmax_scale=0.03),
    Case(head_dim=64, num_heads=3, num_kv_heads=1, strides="sliced", lse_gradient=False),
]
ALIGNED = 128


def one_process(case: Case, whole: ring_check.Problem, chunk: int, impl: str = IMPL) -> dict[str, torch.Tensor]:
    """Return the results of one process, which holds all positions in order."""
    return ring_check.run(Context(None, 0, 1, whole.q.device), case, whole, chunk, impl)


def compared(
    ctx: Context, case: Case, chunk: int, impl: str = IMPL
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Results of this rank and of one process, after asserting that the former keep within the tolerance."""
    whole = ring_check.problem(case, 2 * ctx.size * chunk, torch.bfloat16, ctx.device)
    got = ring_check.run(ctx, case, whole, chunk, impl)
    mine: dict[str, torch.Tensor] = {}  # each takes as long as the ring: one rank computes it for all
    if ctx.rank == 0:
        mine = ring_check.oracle(case, whole, chunk, torch.float64)
    elif ctx.rank == 1:
        mine = one_process(case, whole, chunk, impl)
    results: list[Any] = [None] * ctx.size
    dist.all_gather_object(results, {name: x.cpu() for name, x in mine.items()}, ctx.group)
    want, alone = (
        {name: ring_check.shard(ctx, case, x[name], name).to(ctx.device) for name in got} for x in results[:2]
    )
    tolerance.assert_close(got, want, alone, num_chunks=2)
    return got, alone


@contextmanager
def blocks_of_keys() -> Iterator[None]:
    """Calls gather keys by heads over shared memory, the shard of one rank at a time."""
    with copy_engine(), in_blocks(1):
        yield


@contextmanager
def sections_over_messages() -> Iterator[None]:
    """Calls gather one head at a time over messages, and the first one travels while the others are written."""
    with (
        messages_by_heads(),
        mock.patch.object(sections, "choose_sections", lambda sizes, *_: sections.Sections(*[(1,) * sizes.kv[2]] * 2)),
        mock.patch.object(sections, "PUBLISHED_BYTES", 0),
    ):
        yield


PATHS: dict[str, Callable[[], AbstractContextManager]] = {
    "gloo": nullcontext, "copy engine": copy_engine, "messages": sections_over_messages, "blocks": blocks_of_keys,
}  # fmt: skip


def check_all(ctx: Context, cases: list[Case], chunk: int, path: str, impl: str = IMPL) -> None:
    """Assert that this rank's results keep within the tolerance, and if operands are equal, that they hardly differ."""
    with PATHS[path]():
        for case in cases:
            got, alone = compared(ctx, case, chunk, impl)
            # With "_all" the scales of dK and dV follow from the queries of the rank.
            # In stripes, 64 rows of q share a scale that are not neighbours in one process.
            if chunk % ALIGNED == 0 and not impl.endswith("_all") and case.layout != "striped":
                assert_same_operands(got, alone, exact=("out", "lse") if path.startswith("copy engine") else ())


def assert_same_operands(
    got: dict[str, torch.Tensor], alone: dict[str, torch.Tensor], exact: tuple[str, ...] = ()
) -> None:
    """Assert that results differ by one rounding of their dtype, of the largest value, at most; `exact` not at all."""
    for name, x in got.items():
        y = alone[name]
        largest = y[y.isfinite()].abs().max().item()
        allowed = 0.0 if name in exact else torch.finfo(y.dtype).eps * largest
        torch.testing.assert_close(x, y, rtol=0, atol=allowed, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("path", ["gloo", "copy engine"])
def test_masks(pool: Pool, path: str) -> None:
    """With chunks of 50 tokens, whose blocks of keys are those of no other rank."""
    pool.run(check_all, MASKS[path == "copy engine" :: 9], 50, path, size=2)


@pytest.mark.parametrize("path", PATHS)
def test_operands_have_the_same_bits_on_every_rank(pool: Pool, path: str) -> None:
    """If chunks are multiples of 128 tokens: each owner rounds its keys for all ranks."""
    pool.run(check_all, [*MASKS[list(PATHS).index(path) :: 26], *SHAPES], ALIGNED, path, size=2)


def test_a_window_begins_inside_of_a_chunk(pool: Pool) -> None:
    """At a multiple of 128 keys, so that out and lse still have the bits of one process."""
    case = replace(MASKS[0], window="left", layout="contiguous")
    pool.run(check_all, [case, replace(case, layout="zigzag")], 2 * ALIGNED, "copy engine", size=2)


@pytest.mark.parametrize("path", ["gloo", "copy engine"])
@pytest.mark.parametrize("impl", ["reference_fp8_scores", "reference_fp8_all"])
def test_products_of_the_backward(pool: Pool, path: str, impl: str) -> None:
    """The forward keeps the largest score of each row for "_all"."""
    pool.run(check_all, [*MASKS[path == "copy engine" :: 20], *SHAPES[::2]], ALIGNED, path, impl, size=2)


def sent(ctx: Context, case: Case, chunk: int, path: str) -> list[tuple[str, int]]:
    """Kind and bytes of each message that this rank sends, apart from the numbers of calls."""
    seen: list[tuple[str, int]] = []

    def post(self: PointToPoint, sends: list[Message], recvs: list[Message]) -> Pending:
        messages = [message for message in sends if message.tensor.nbytes > 8]
        seen.extend((message.what.split()[0], message.tensor.nbytes) for message in messages)
        return original(self, sends, recvs)

    original = PointToPoint.post
    whole = ring_check.problem(case, 2 * ctx.size * chunk, torch.bfloat16, ctx.device)
    with PATHS[path](), mock.patch.object(PointToPoint, "post", post):
        ring_check.run(ctx, case, whole, chunk, IMPL)
    return seen


@pytest.mark.parametrize("path", ["gloo", "messages"])
def test_records_travel(pool: Pool, path: str) -> None:
    """Half the bytes of K and V in bf16 and 128 for each record, in both passes; gradients return in fp32."""
    case = replace(SHAPES[0], causal=False)
    records = case.batch * 2 * case.num_kv_heads * (2 * ALIGNED * case.head_dim + 128)
    gradients = 2 * case.batch * 2 * ALIGNED * case.num_kv_heads * case.head_dim * 4
    for seen in pool.run(sent, case, ALIGNED, path, size=2):
        assert sum(size for kind, size in seen if kind == "K/V") == 2 * records
        assert sum(size for kind, size in seen if kind == "dK/dV") == gradients


def test_exchanged_heads(pool: Pool) -> None:
    pool.run(check_all, [replace(SHAPES[0], transport="ulysses")], ALIGNED, "gloo", "reference_fp8_all", size=2)


def check_other_blocks(ctx: Context) -> None:
    case, chunk = replace(MASKS[0], window="left", layout="contiguous"), 50
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
        ({"impl": IMPL, "fp8_backward": "fp8"}, TypeError, "unexpected keyword argument 'fp8_backward'"),
        ({"impl": "reference_fp8_e5m2"}, ValueError, "must be 'auto' or one of .*, got 'reference_fp8_e5m2'"),
        ({"impl": "reference_fp8_all", "deterministic": True}, NotImplementedError, "deterministic must be False .*"),
    ],
)
def test_other_backwards_are_refused_by_name(options: dict[str, Any], error: type[Exception], message: str) -> None:
    x = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(error, match=message):
        ringflash.ring_attention(x, x, x, group=None, **options)
