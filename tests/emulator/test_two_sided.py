"""The production kernels under two-sided masks, from their own source and launchers, on the CPU emulator, against fp64.

Masks at head_dim 64 and 128; the other head dims with one mask.
"""

from __future__ import annotations

import math

import pytest
import torch

import ringflash
from ringflash.testing.tolerance import assert_close
from ringflash_kernels.mask import Mask, Region
from tests.emulator.emulator import Emulator
from tests.emulator.oracle import is_caught
from tests.emulator.test_backward import _gradients
from tests.emulator.test_forward import _forward, _outputs
from tests.emulator.test_fp8_backward import _assert_equal
from tests.emulator.test_fp8_backward import _gradients as _fp8_gradients
from tests.emulator.test_fp8_forward import _check, _operands
from tests.emulator.test_fp8_forward import _forward as _fp8_forward
from tests.helpers.mask_oracle import Shape, inputs, oracle_and_baseline
from tests.two_sided.forests import random_forest
from tests.two_sided.kernel_masks import DEEP, MASKS, keys_of, mask_of, one_by_one, sequence_mask

_NIGHTLY = pytest.mark.nightly
_EACH = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())


_EVEN, _ODD = (pytest.param(Shape(128, heads, 1), marks=_NIGHTLY) for heads in (2, 3))  # two heads a tile, and one


@pytest.mark.parametrize("shape", [Shape(64), _EVEN, _ODD], ids=str)
@_EACH
def test_forward_masks(mask: Mask, shape: Shape) -> None:
    assert mask.is_two_sided
    assert_close(*_outputs(mask, shape), num_chunks=2)


@pytest.mark.parametrize(
    "shape",
    [Shape(96, 2, 2), Shape(128, 4, 1, batch=2), Shape(192, 2, 1), Shape(192, 2, 1, value_dim=128), Shape(256, 2, 2)],
    ids=str,
)
def test_forward_shapes(shape: Shape) -> None:
    assert_close(*_outputs(MASKS["deep, window"], shape, num_sms=3), num_chunks=2)


@pytest.mark.parametrize("head_dim", [64, 128, pytest.param(256, marks=_NIGHTLY)])
def test_forward_resumes(head_dim: int) -> None:
    """Blocks of keys of two ranks, the state carried in fp32, give the attention of the sequence."""
    shape, mask = Shape(head_dim), sequence_mask(DEEP)
    whole = mask_of(DEEP)
    q, k, v, _ = inputs(whole, shape)
    exact, baseline = oracle_and_baseline(q, k, v, whole, shape.scale)
    positions = [ringflash.local_positions(DEEP.seqlen, 2, rank, "zigzag") for rank in range(2)]
    for rank, mine in enumerate(positions):
        own = q[:, mine].contiguous()
        state, lse = torch.full(own.shape, math.nan), torch.full((1, shape.num_heads, own.shape[1]), math.nan)
        out = torch.full(own.shape, math.nan, dtype=q.dtype)
        blocks = one_by_one(mask, 2, rank, "zigzag")
        for index, block in enumerate(blocks):
            keys, values = (x[:, keys_of(block, positions)].contiguous() for x in (k, v))
            into = out if index == len(blocks) - 1 else state
            acc = state if index else None
            _forward(Emulator(), own, keys, values, block.mask, shape.scale, out=into, lse=lse, acc=acc)
        expected = [{"out": x["out"][:, mine], "lse": x["lse"][..., mine]} for x in (exact, baseline)]
        assert_close({"out": out, "lse": lse}, *expected, num_chunks=2)


@_NIGHTLY
@pytest.mark.parametrize("seed", range(10))
def test_forward_random_forests(seed: int) -> None:
    """Random forests and shapes; several interleavings give the same bits."""
    mask, shape = mask_of(random_forest(seed + 50, 400)), Shape((64, 128, 96)[seed % 3], 2, 1)
    first = _outputs(mask, shape, emulator=Emulator(seed), num_sms=3)
    assert_close(*first)
    other, *_ = _outputs(mask, shape, emulator=Emulator(seed + 1, resident=3), num_sms=3)
    assert all(torch.equal(first[0][name], other[name]) for name in other)


@pytest.mark.parametrize("shape", [Shape(64), Shape(128, 4, 1), Shape(256, 2, 2)], ids=str)
def test_fp8_forward(shape: Shape) -> None:
    """Fresh calls, and one that resumes: at head_dim 256 it reads the ends from global memory."""
    for mask in MASKS.values() if shape.head_dim == 64 else (MASKS["deep, window"],):
        _check(*_fp8_forward(*_operands(mask, shape), mask, shape))
    rows, records = _operands(mask, shape)
    generator = torch.Generator().manual_seed(1)
    acc = torch.randn(rows.values.shape, generator=generator)
    lse = torch.randn(shape.batch, shape.num_heads, mask.seqlen_q, generator=generator)
    _check(*_fp8_forward(rows, records, mask, shape, acc=acc, lse=lse))


_FORWARD = "forward.kernel"
_RELEASE = "    mbarrier.arrive(barriers.k_empty.index(index), count=1)\n"
_WITH_ENDS = """    if MASKED and CFG.mask == "ends":  # the ends are in the slot
        s = hide(s, index, key, rows, shared, pointers, CFG)
"""
_FORWARD_FAULTS = {
    "a row too many": ("pipeline", "s = seen_only(s, own, ends", "s = seen_only(s, own, ends + 1"),
    "a first key too early": ("pipeline", "where(keys[None, :] >= start", "where(keys[None, :] + 1 >= start"),
    "a masked block runs unmasked": ("pipeline", "(number & 1) * (number >> 1)", "(number & 1) * 0"),
    "the first block counts twice": (_FORWARD, "gl.maximum(num_masked - 1, 0)", "num_masked"),
    "ends of another block": (_FORWARD, "tma_load(ends_desc, [0, key]", "tma_load(ends_desc, [0, key + 1]"),
    "ends are read after their release": (_FORWARD, _WITH_ENDS + _RELEASE, _RELEASE + _WITH_ENDS),
    "the stretch of another block": (_FORWARD, "            if j == 0:\n", "            if j == 1:\n"),
    "the first stretch of the next tile": (_FORWARD, "(entry, 1) + of_lane(entry, 2) - 1", "(entry, 1)"),
    "V of the last block is left out": (_FORWARD, "\n    load_previous(", "\n    0 and load_previous("),
    "a stretch is left out": ("walks", "1 + (fill < tile_size).long(), 0)", "(place % width > 0).long(), 0)"),
    "Q of another head": ("pipeline", "own_head(tile.head, w, CFG)", "tile.head * CFG.heads"),
    "rows are counted from elsewhere": ("walks", "mask.ends() - rows[0],", "mask.ends() - rows[0] + 1,"),
}


@pytest.mark.parametrize("fault", _FORWARD_FAULTS.values(), ids=_FORWARD_FAULTS.keys())
def test_forward_faults_are_caught(fault) -> None:
    def check(mask: Mask, emulator: Emulator) -> None:
        assert_close(*_outputs(mask, Shape(128), emulator=emulator))

    assert any(is_caught(fault, MASKS[name], check) for name in ("deep, window", "rollouts"))


@pytest.mark.parametrize("in_step", [False, True])
@_EACH
def test_backward_masks(mask: Mask, in_step: bool) -> None:
    assert_close(*_gradients(mask, Shape(64), in_step=in_step), num_chunks=2)


_SHAPES = [
    (Shape(96, 2, 2), False), (Shape(128, 4, 2), True), (Shape(192, 2, 1), True),
    (Shape(192, 2, 1, value_dim=128), False), (Shape(256, 2, 2), False),
]  # fmt: skip


@pytest.mark.parametrize(
    "shape, whole_groups",
    [*_SHAPES, *(pytest.param(shape, not groups, marks=_NIGHTLY) for shape, groups in _SHAPES)],
    ids=str,
)
def test_backward_shapes(shape: Shape, whole_groups: bool) -> None:
    options = dict(whole_groups=whole_groups, in_step=whole_groups, accumulate=not whole_groups)
    assert_close(*_gradients(MASKS["deep, window"], shape, **options), num_chunks=2)


_KEYS, _WIDE_KEYS, _QUERIES = "backward.keys", "backward.wide", "backward.queries"


def _fresh(mask: Mask) -> Mask:
    """Return the mask without what was cached with it."""
    return Mask(mask.seqlen_q, mask.seqlen_k, mask.regions)


def _walking_down(emulator: Emulator) -> Emulator:
    """Let walks with many masked blocks go down, too: those of the tests have few others."""
    emulator.load("backward.host")._SHORT_MASKED = 1.0
    return emulator


@pytest.mark.parametrize(
    "shape, whole_groups",
    [(Shape(64), False), (Shape(128, 4, 2), True), pytest.param(Shape(96, 2, 2), False, marks=_NIGHTLY)],
    ids=str,
)
def test_backward_walks_down(shape: Shape, whole_groups: bool) -> None:
    options = dict(whole_groups=whole_groups, accumulate=not whole_groups, emulator=_walking_down(Emulator()))
    assert_close(*_gradients(_fresh(MASKS["deep"]), shape, **options), num_chunks=2)


def _in_parts(emulator: Emulator) -> Emulator:
    """Let walks of more than two blocks be cut into parts of one, under any mask."""
    host = emulator.load("backward.host")
    host._PART_BLOCKS = host._EARLY_PART_BLOCKS = 1
    host._is_cut = lambda *_: True
    return emulator


_LAST_TILE = Mask.of(300, 200, [Region(0, 200, 0, 200), Region(200, 300, 0, 40)])  # in parts, and not full


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "shape", [Shape(64), *(pytest.param(x, marks=_NIGHTLY) for x in (Shape(96, 2, 2), Shape(128, 4, 2)))], ids=str
)
def test_backward_in_parts(shape: Shape, accumulate: bool) -> None:
    """Long tiles of keys add up dK and dV of their parts, also the last one, which has fewer keys."""
    for mask in (MASKS["deep, window"], MASKS["rollouts"], _LAST_TILE):
        options = dict(emulator=_in_parts(Emulator()), whole_groups=True, in_step=True, accumulate=accumulate)
        assert_close(*_gradients(_fresh(mask), shape, **options), num_chunks=2)


def test_lost_parts_are_caught() -> None:
    def check(mask: Mask, emulator: Emulator) -> None:
        options = dict(emulator=_in_parts(emulator), whole_groups=True, accumulate=False)
        assert_close(*_gradients(_fresh(mask), Shape(64), **options))

    for fault in (
        (_KEYS, "if sum > 0:", "if sum > 1:"),
        (_KEYS, "(sum - 1) * 128 + W * 64", "(sum - 1) * 128"),
        ("walks", "(counts > 1).cumsum(0)[walk]", "(counts > 1).long()[walk]"),
    ):
        assert is_caught(fault, MASKS["deep, window"], check), fault


def _in_sections(emulator: Emulator) -> Emulator:
    """Let each group of heads be a section of its own."""
    host = emulator.load("backward.host")
    host._BESIDE_TOGETHER = host._L2_BYTES_PER_SECTION = 1
    return emulator


@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize("shape", [Shape(128, 6, 3), pytest.param(Shape(128, 8, 4, batch=2), marks=_NIGHTLY)], ids=str)
def test_other_heads_are_done_beside(shape: Shape, resident: int) -> None:
    """With the only dq known, warps beside the tiles prepare later heads and cast those of earlier ones."""
    emulator = _in_sections(_in_parts(Emulator(0, resident=resident)))
    host, found = emulator.load("backward.host"), []
    original = host.HopperBackward._row_passes
    host.HopperBackward._row_passes = lambda *args: found.append(original(*args)) or found[-1]
    options = dict(emulator=emulator, whole_groups=True, in_step=True, accumulate=False, only_dq=True)
    assert_close(*_gradients(_fresh(MASKS["deep, window"]), shape, **options), num_chunks=2)
    assert found[0] is not None


def test_faults_beside_are_caught() -> None:
    def check(mask: Mask, emulator: Emulator) -> None:
        options = dict(whole_groups=True, in_step=True, accumulate=False, only_dq=True)
        emulator = _in_sections(_in_parts(emulator))
        assert_close(*_gradients(_fresh(mask), Shape(128, 4, 2), emulator=emulator, **options))

    for fault in (
        ("backward.row_passes", "wait_for(passes.counters_ptr + 2 + section * 2, problem.num", "(problem.num"),
        (
            "backward.row_passes",
            "gl.where(phase == 0, 1, (phase + 3) // 2)",
            "gl.where(phase == 0, 1, (phase + 1) // 2)",
        ),
        ("backward.row_passes", ".permute([0, 1, 3, 2, 4])", ""),
        ("backward.row_passes", "gl.where(empty, 0.0, delta)", "delta * 0"),
        ("backward.host", "first=self._cast", "first=self._cast + 1"),
    ):
        assert is_caught(fault, MASKS["deep, window"], check), fault


def test_backward_through_lse() -> None:
    assert_close(*_gradients(MASKS["deep, window"], Shape(128), with_dlse=True), num_chunks=2)


@pytest.mark.parametrize("products", ["fp8_scores", "fp8", pytest.param("bf16", marks=_NIGHTLY)])
@pytest.mark.parametrize("shape", [Shape(64, 2, 1), pytest.param(Shape(128, 4, 2), marks=_NIGHTLY)], ids=str)
def test_fp8_backward(shape: Shape, products: str) -> None:
    for name in ("deep, window", "many small documents") if shape.head_dim == 64 else ("deep, window",):
        _assert_equal(*_fp8_gradients(MASKS[name], shape, products, promote=4))


@_NIGHTLY
@pytest.mark.parametrize("seed", range(8))
def test_backward_random_forests(seed: int) -> None:
    mask, shape = mask_of(random_forest(seed + 50, 400)), Shape((64, 128, 96)[seed % 3], 2, 1)
    assert_close(*_gradients(mask, shape, emulator=Emulator(seed), in_step=bool(seed % 2)))


@pytest.mark.parametrize("shape", [Shape(64), pytest.param(Shape(128, 2, 1), marks=_NIGHTLY)], ids=str)
@pytest.mark.parametrize("name", ["deep, window", "many small documents"])
def test_backward_in_a_fixed_order(name: str, shape: Shape) -> None:
    """Equal bits whatever the order in which thread blocks run, and right."""
    options = dict(deterministic=True, accumulate=False)
    first = _gradients(MASKS[name], shape, **options, emulator=Emulator(0, resident=3))
    assert_close(*first, num_chunks=2)
    other, *_ = _gradients(MASKS[name], shape, **options, emulator=Emulator(1, resident=3))
    assert all(torch.equal(first[0][name], other[name]) for name in other)


def _same_sums(faults: list) -> bool:
    """Return whether the fp32 sums of dQ are the same bits for several orders of thread blocks."""
    shape, deep, found = Shape(64), MASKS["deep"], []
    q, k, v, dout = inputs(deep, shape)
    lse = torch.zeros(1, 2, deep.seqlen_q)
    for seed in (0, 4, 5, 6):
        mask = _fresh(deep)
        module = Emulator(seed, resident=3, faults=faults).load("backward.host")
        run = module.HopperBackward(dout, q, dout, lse, softmax_scale=0.1, deterministic=True)
        run.add(k, v, mask, torch.zeros(k.shape), torch.zeros(v.shape))
        found.append(run.accumulated_dq().clone())
    return all(torch.equal(found[0], x) for x in found)


def test_sums_have_the_same_bits() -> None:
    assert _same_sums([])
    assert not _same_sums([("walks", "int(last[begin + a])", "-1")]), "no tile waits for another"


_BACKWARD_FAULTS = {
    "a first key too early": (64, (_KEYS, "(keys[:, None] >= begins", "(keys[:, None] + 1 >= begins")),
    "first keys of other rows": (64, (_KEYS, "tma_load(begins_desc, [0, row]", "tma_load(begins_desc, [0, row + 1]")),
    "a masked block runs unmasked": (64, ("backward.problem", "block * 2 + masked)", "block * 2)")),
    "dQ goes to the wrong block": (
        64,
        (_KEYS, "head_row + block * 64\n                    h", "head_row\n                    h"),
    ),
    "a stretch is skipped": (64, ("backward.problem", "first, number + 1)", "first, first)")),
    "a tile is drawn twice": (
        64,
        (
            _KEYS,
            "            index = draw(drawn_ptr)\n        else",
            "            index = draw(drawn_ptr) - 1\n        else",
        ),
    ),
    "K arrives before the last dQ": (64, (_KEYS, "sm.kv_empty.index(1), (round", "sm.kv_empty.index(0), (round")),
    "dK is overwritten before it has left": (
        128,
        (_KEYS, "tma_store_wait(0)  # until dK and dV of the previous tile have been read", "pass"),
    ),
    "dQ of a walk down goes to the wrong block": (128, (_KEYS, "first_head + g) + block * 64", "first_head + g)")),
    "a first key too early, wide": (192, (_WIDE_KEYS, "keys[:, None] >= begins", "keys[:, None] + 1 >= begins")),
    "a masked block runs unmasked, wide": (192, ("backward.problem", "block * 2 + masked)", "block * 2)")),
    "a row too many, dQ": (192, (_QUERIES, "rows[:, None] < ends", "rows[:, None] <= ends")),
    "ends of another block, dQ": (192, (_QUERIES, "(ends_desc, [0, block * 64]", "(ends_desc, [0, block * 64 + 1]")),
}


@pytest.mark.parametrize("head_dim, fault", _BACKWARD_FAULTS.values(), ids=_BACKWARD_FAULTS.keys())
def test_backward_faults_are_caught(head_dim: int, fault: tuple[str, str, str]) -> None:
    def check(mask: Mask, emulator: Emulator) -> None:
        emulator = _walking_down(emulator) if head_dim == 128 else emulator
        assert_close(*_gradients(mask, Shape(head_dim), emulator=emulator, whole_groups=True, accumulate=False))

    assert any(is_caught(fault, MASKS[name], check) for name in ("deep, window", "block diffusion"))
