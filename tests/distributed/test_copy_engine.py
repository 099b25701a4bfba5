"""Keys gathered by heads: over shared memory and slow threads, as "copy_engine", and over messages, as NCCL.

2 to 4 CPU processes, fp64. Messages are gloo's, in the order that NCCL's stream gives them. Everything but the memory
itself is the code that GPUs run; the copies, streams and barriers of CUDA are not tested here. Cases run many to a
message, in one process after another length and another number of ranks, since that is what buffers have to survive.
tests/unit/test_happens_before.py leaves out each wait in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringflash
from ringflash.attention import schedule, sections
from ringflash.attention.sections import GatherSizes, Sections
from ringflash.comm import call_numbers
from ringflash.comm.transport import registry
from ringflash.sequence.mask import SequenceMask
from tests.helpers import ring_check
from tests.helpers.cases import Case, mask_cases, narrow_cases, single_cases
from tests.helpers.peer_memory import Later, SharedMemory, copy_engine, messages_by_heads
from tests.helpers.pool import Context, Pool, on_ranks

MANY_HEADS = [Case(num_heads=8, num_kv_heads=8), Case(num_heads=12, num_kv_heads=6, batch=2, causal=False)]
# All masks run over gloo; 5 has no factor of the grid but one.
CASES = [*mask_cases()[::5], *single_cases()[::4], *MANY_HEADS, *narrow_cases()]
LENGTHS = (6, 3, 9, 1, 5)  # tokens a chunk, in turn


@contextmanager
def taking_turns(turns: bool) -> Iterator[None]:
    """Calls publish in two parts and gather into two buffers, a head at a time, as long ones do, or whole."""
    whole = 0 if turns else sections.MAX_UNBUFFERED_KV_BYTES
    parts = mock.patch.object(sections, "PUBLISHED_BYTES", 0 if turns else sections.PUBLISHED_BYTES)
    with mock.patch.object(sections, "MAX_UNBUFFERED_KV_BYTES", whole), parts, one_head_a_section():
        yield


def one_head_a_section() -> AbstractContextManager:
    """Short calls have many sections too."""
    return mock.patch.object(sections, "choose_sections", lambda sizes, *_: Sections(*[(1,) * sizes.kv[2]] * 2))


@on_ranks(2, 4, 3, timeout_s=150)
def test_equals_dense(ctx: Context) -> None:
    """Every case against the dense oracle, gathered whole and by turns; the transport has bytes at the end."""
    with copy_engine():
        for number, case in enumerate(CASES):
            with taking_turns(number % 2 == 0):
                ring_check.check(ctx, case, LENGTHS[number % len(LENGTHS)])
        check_unequal_sections(ctx)
        ring_check.check(ctx, Case(layout="striped", documents="crossing"), 64)
        for number, documents in enumerate(("crossing", "mixed", "aligned")):
            with taking_turns(number % 2 == 0):
                ring_check.check(ctx, Case(layout="balanced", documents=documents), 40)
        for window in ("none", "left"):
            with taking_turns(window == "none"):
                ring_check.check(ctx, Case(layout="documents", documents="divisible", window=window), 8)
        assert ringflash.buffer_bytes() > 0


def check_unequal_sections(ctx: Context) -> None:
    for number, heads in enumerate([((1, 2, 3), (1, 4, 1)), ((1, 5), (1, 2, 2, 1)), ((3, 1, 2), (1, 5))]):
        case = Case(num_heads=12, num_kv_heads=6, batch=2, causal=number == 1)
        with (
            taking_turns(number % 2 == 0),
            mock.patch.object(sections, "choose_sections", lambda *_, heads=heads: Sections(*heads)),
        ):
            ring_check.check(ctx, case, 4 + number)


def stages(count: int) -> AbstractContextManager:
    """Gradients of so many sections wait for their way home, as in long calls, all but the last of them together."""
    return mock.patch.object(sections, "choose_num_gradient_buffers", lambda *args: min(count, len(args[-1])))


@pytest.mark.parametrize("memory", [copy_engine, messages_by_heads])
@on_ranks(3)
def test_gradients_sent_together(ctx: Context, memory: Callable[[], AbstractContextManager]) -> None:
    with memory():
        for number, case in enumerate([*CASES[1::4], *MANY_HEADS]):
            with taking_turns(number % 2 == 0), stages(3 + number % 3):
                ring_check.check(ctx, case, LENGTHS[number % len(LENGTHS)])
        with stages(3):
            check_unequal_sections(ctx)


@pytest.mark.parametrize("turns", range(1, 9))
def test_a_stage_is_free_when_its_next_section_begins(turns: int) -> None:
    """A section waits for the last but one; what is sent with that, or before, has left its stage."""
    for number in range(turns, 40):
        together = sections.return_batches(number, turns)
        assert [section for group in together for section in group] == list(range(number))
        assert together[-1] == (number - 1,)
        sent = {section: group[-1] for group in together for section in group}
        assert all(sent[section] <= max(section + turns - 2, section) for section in range(number))
        fewest = 1 + -(-(number - 1) // max(1, turns - 1))
        assert len(together) == fewest


def sizes_of(shape: tuple[int, ...], num_heads: int, keys: int) -> GatherSizes:
    """Sizes of a causal call in bf16 whose ranks see all keys."""
    return GatherSizes(shape, num_heads, keys, keys, shape[1] * keys // 2, torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "ranks", "stages"),
    [(1 << 15, 2, 2), (1 << 16, 2, 8), (1 << 17, 2, 5), (1 << 15, 8, 5), (1 << 16, 8, 2), (1 << 17, 8, 2)],
)
def test_stages(rows: int, ranks: int, stages: int) -> None:
    """Stages of 8 KV heads of 128: more than two, in 1.25 GiB, if calls are long and their keys arrive at once."""
    keys = ranks * rows
    sizes = sizes_of((1, rows, 8, 128), 32, keys)
    heads = _sections_of(sizes).backward
    assert sections.choose_num_gradient_buffers(sizes, heads) == stages
    assert sections.choose_num_gradient_buffers(sizes._replace(pairs=rows * 8192), heads) == 2  # a window


@on_ranks(2, 4, 3)
def test_messages_equal_dense(ctx: Context) -> None:
    """Every second case, gathered by messages."""
    with messages_by_heads():
        for number, case in list(enumerate(CASES))[::2]:
            with taking_turns(number % 4 == 0):
                ring_check.check(ctx, case, LENGTHS[number % len(LENGTHS)])
        check_unequal_sections(ctx)


@pytest.mark.parametrize("memory", [copy_engine, messages_by_heads])
@on_ranks(4)
def test_groups_in_turn(ctx: Context, memory: Callable[[], AbstractContextManager]) -> None:
    """Two groups in turn, whose areas are their own and whose buffers are shared; then one of two ranks."""
    whole, halves = dist.new_group(range(ctx.size)), [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    half = halves[ctx.rank // 2]
    assert whole is not None and half is not None
    places = [ctx, ctx._replace(group=whole), ctx._replace(group=half, rank=ctx.rank % 2, size=2)]
    with memory():
        for number, case in enumerate(CASES[:9]):
            with taking_turns(number % 2 == 0):
                ring_check.check(places[number % 3], case, LENGTHS[number % len(LENGTHS)])


@pytest.mark.parametrize("memory", [copy_engine, messages_by_heads])
@on_ranks(4)
def test_deterministic_mode_repeats(ctx: Context, memory: Callable[[], AbstractContextManager]) -> None:
    with memory(), one_head_a_section():
        for _ in range(5):
            assert ring_check.repeats_exactly(ctx, Case(causal=False), 6, "float32", "reference")


KV_HEADS = 6


@pytest.mark.parametrize("turns", [True, False])
@on_ranks(3)
def test_buffers_are_kept_counted_and_released(ctx: Context, turns: bool) -> None:
    """K/V: two heads of the sequence and a rank's own, or the whole sequence; gradients: two heads, and what arrives.

    After a call, a shorter one, their release, and a call again.
    """
    head = 2 * (3 * 2 * 8) * Case().head_dim * 8
    shard = head * KV_HEADS // 3
    held = (2 * head + shard if turns else KV_HEADS * head) + 2 * head + head * 2 // 3 + call_numbers.HEADER_BYTES
    case = Case(num_heads=KV_HEADS, num_kv_heads=KV_HEADS, causal=False)
    with copy_engine(), taking_turns(turns):
        for chunks in ((8, 3), (8,)):
            ringflash.release_buffers()
            assert ringflash.buffer_bytes() == 0
            for chunk in chunks:
                ring_check.check(ctx, case, chunk)
                assert ringflash.buffer_bytes() == held


@on_ranks(4)
def test_memory_of_a_destroyed_group_is_freed(ctx: Context) -> None:
    """When the next group is opened, which may have the name of the first one."""
    case, held = Case(), []
    with copy_engine():
        ringflash.release_buffers()
        for chunk in (6, 3, 1):
            group = dist.new_group(list(range(ctx.size)))
            ring_check.check(ctx._replace(group=group), case, chunk)
            held.append(sum(memory.num_bytes() for memory in registry._open_areas()))
            dist.destroy_process_group(group)
    assert held[0] > held[1] > held[2] > 0


@pytest.mark.parametrize(
    "rows, num_kv_heads, num_heads, forward, backward",
    [
        (32, 8, 32, (8,), (8,)),
        (4096, 8, 32, (2, 6), (6, 2)),
        (8192, 8, 32, (1, 7), (1, 6, 1)),
        (32768, 8, 32, (1, 7), (1,) * 8),
        (131072, 8, 32, (1, 7), (1,) * 8),
        (262144, 8, 32, (1,) * 8, (1,) * 8),
        (8192, 32, 32, (2, 5, 13, 12), (2, 8, 8, 8, 4, 2)),
        (8192, 64, 64, (3, 8, 21, 32), (4, *[8] * 7, 4)),
        (131072, 64, 64, (1,) * 64, (1,) * 64),
        (8192, 8, 64, (1, 7), (1, 6, 1)),
        (8000, 6, 12, (1, 5), (4, 2)),
        (10000, 6, 12, (1, 5), (1, 4, 1)),
        (12000, 6, 24, (1, 5), (1, 4, 1)),
        (10**6, 1, 8, (1,), (1,)),
        (10**6, 2, 8, (1, 1), (1, 1)),
        (1 << 15, 3, 6, (1, 2), (1, 1, 1)),
    ],
)
def test_sections(
    rows: int, num_kv_heads: int, num_heads: int, forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    found = _sections_of(sizes_of((1, rows, num_kv_heads, 128), num_heads, 4 * rows))
    assert found == (forward, backward)


def test_fewer_columns_are_a_shorter_call() -> None:
    """The same tokens on two ranks, in 64 columns and in 128."""
    by_columns = [_sections_of(sizes_of((1, 8192, 8, dim), 32, 16384)).backward for dim in (64, 128)]
    assert by_columns == [(6, 2), (1, 6, 1)]


@pytest.mark.parametrize(
    "rows, num_kv_heads, transport, expected",
    [
        (4096, 8, "nccl", ((2, 6), (6, 2))),
        (2048, 8, "copy_engine", ((8,), (8,))),  # half of the work
        (4096, 32, "copy_engine", ((5, 6, 8, 10, 3), (16, 16))),
        (4096, 32, "nccl", ((32,), (32,))),
    ],
)
def test_sections_of_few_pairs(
    rows: int, num_kv_heads: int, transport: str, expected: tuple[tuple[int, ...], ...]
) -> None:
    sizes = sizes_of((1, rows, num_kv_heads, 128), 32, 8192)
    assert _sections_of(sizes, transport=transport) == expected


def test_sections_have_every_head_once() -> None:
    """And no buffer more than it is to hold, but for those whose least section is larger."""
    shapes = itertools.product((1, 3), (10, 10**4, 10**6), range(1, 40), (64, 128))
    for shape, group, ranks in itertools.product(shapes, (1, 3, 8), (2, 16)):
        batch, rows, num_kv_heads, head_dim = shape
        keys = ranks * rows
        sizes = sizes_of(shape, group * num_kv_heads, keys)
        chosen = _sections_of(sizes)
        least = max(1, -(-sections.MIN_SECTION_PAIRS // (group * batch * keys)))
        for heads, stage in zip(chosen, (2, 4), strict=True):
            assert sum(heads) == num_kv_heads and min(heads) >= 1
            whole = stage == 2 and sections.fits_unbuffered(sizes)
            enough = max(least, sections.BUFFER_BYTES // (2 * batch * keys * head_dim * stage))
            assert whole or max(heads) <= enough or heads == (num_kv_heads,)


_sections_of = sections.choose_sections


@pytest.mark.parametrize("way", ["forward", "backward"])
@on_ranks(2)
def test_call_after_an_error_begins_anew(ctx: Context, way: str) -> None:
    """On every rank alike a device has no memory left for the kernel of a section."""
    run_on_stream, issued = SharedMemory.run_on_stream, itertools.count()

    def refused(self: SharedMemory, stream: str, *args: Any, **options: Any) -> Later:
        if next(issued) > 4 and stream == "even":
            raise MemoryError("no memory left")
        return run_on_stream(self, stream, *args, **options)

    schedule.plan_single_block.cache_clear()
    with mock.patch.dict(registry._open, clear=True), copy_engine(), one_head_a_section():
        q, k, v = (torch.randn(1, 8, 6, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
        attend = partial(ringflash.ring_attention, q, k, v, group=ctx.group, causal=False)
        out = attend() if way == "backward" else None
        with mock.patch.object(SharedMemory, "run_on_stream", refused), pytest.raises(MemoryError):
            attend() if out is None else out.sum().backward()
        mask = schedule.plan_single_block(SequenceMask(8 * ctx.size, False), ctx.size, ctx.rank, "zigzag", 1).mask
        assert not any(way in key for key in mask._cache if isinstance(key, tuple))
        ring_check.check(ctx, Case(causal=False), 6)


def explanation(ctx: Context) -> tuple[str, int]:
    q, k = torch.zeros(1, 8, 8, 16), torch.zeros(1, 8, 4, 16)
    with copy_engine():
        said = ringflash.explain(q, k, k, group=ctx.group)
    return str(said), said.num_visible


def test_explained(pool: Pool) -> None:
    """Rank 0 of a zigzag sees all chunks, rank 1 all but the last."""
    (first, all_pairs), (second, pairs) = pool.run(explanation, size=2)
    assert "16 keys of ranks [0, 1], " in first and "backward: sections of 4 KV heads" in first
    assert "12 keys of ranks [0, 1], " in second
    assert all_pairs + pairs == 16 * 17 // 2


@on_ranks(2)
def test_refused_on_the_cpu(ctx: Context) -> None:
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(NotImplementedError, match="got 'copy_engine'; use 'auto'"):
        ringflash.ring_attention(q, q, q, group=ctx.group, transport="copy_engine")
