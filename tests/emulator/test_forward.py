"""The production forward kernel, from its own source and launcher, on the CPU emulator, against fp64. CPU.

The grid is thin: every mask runs at head_dim 64, every head_dim with two masks; lengths are a few tiles.
"""

import math

import pytest
import torch

from ringflash.testing.tolerance import assert_close
from ringflash_kernels.mask import Mask, Region
from tests.emulator.emulator import EmulationError, Emulator
from tests.emulator.host import cuda_properties
from tests.emulator.oracle import MASKS, SHAPES, far_apart, is_caught, random_problem
from tests.helpers.mask_oracle import Shape, inputs, oracle_and_baseline

_CAUSAL = MASKS["causal, ragged"]
_BOTH = pytest.mark.parametrize("mask", [_CAUSAL, MASKS["documents"]], ids=["band", "bounds"])


def _forward(emulator: Emulator | None, *args, num_sms: int = 2, **kwargs) -> None:
    with cuda_properties(num_sms):
        (emulator or Emulator()).load("forward.host").forward(*args, num_sms=num_sms, **kwargs)


def _outputs(mask: Mask, shape: Shape, *, emulator: Emulator | None = None, out_dtype=None, **kwargs):
    """out and lse of a fresh call, written over NaN; of the oracle, and of the baseline."""
    q, k, v, _ = inputs(mask, shape)
    exact, baseline = oracle_and_baseline(q, k, v, mask, shape.scale)
    out = torch.full(exact["out"].shape, math.nan, dtype=out_dtype or shape.dtype)
    lse = torch.full(exact["lse"].shape, math.nan)
    _forward(emulator, q, k, v, mask, shape.scale, out=out, lse=lse, **kwargs)
    return {"out": out, "lse": lse}, exact, baseline


def _chunks(mask: Mask) -> int:
    return 2 if mask.seqlen_q >= 128 else 1


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks(mask):
    assert_close(*_outputs(mask, Shape()), num_chunks=_chunks(mask))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@_BOTH
def test_shapes(mask, shape):
    assert_close(*_outputs(mask, shape), num_chunks=2)


@pytest.mark.parametrize("widths", [(128, 64), (576, 512), (256, 128)], ids=str)
def test_other_narrow_values_are_refused_by_name(widths):
    host = Emulator().load("forward.host")
    q, v = (torch.empty(1, 8, 1, width, dtype=torch.bfloat16) for width in widths)
    named = f"head_dim {widths[0]} of q and k and {widths[1]} of v (192 and 128, or one for all)"
    assert host.unsupported(q, q, v) == named
    q, v = (torch.empty(1, 8, 1, width, dtype=torch.bfloat16) for width in (192, 128))
    assert host.unsupported(q, q, v) is None


@_BOTH
@pytest.mark.parametrize("head_dim", [64, 192])
def test_fp32_output(mask, head_dim):
    assert_close(*_outputs(mask, Shape(head_dim), out_dtype=torch.float32), num_chunks=2)


@pytest.mark.parametrize("num_sms", [1, 3, 50])
def test_grid_sizes(num_sms):
    assert_close(*_outputs(MASKS["window"], Shape(batch=2), num_sms=num_sms), num_chunks=2)


@pytest.mark.parametrize("shape", [Shape(64), Shape(128), Shape(192), Shape(256), Shape(192, value_dim=128)], ids=str)
def test_interleavings(shape):
    """Partitions, blocks and copies in other orders give the same bits."""
    first, exact, baseline = _outputs(_CAUSAL, shape, num_sms=3)
    for seed in range(1, 6):
        other, _, _ = _outputs(_CAUSAL, shape, emulator=Emulator(seed, resident=3), num_sms=3)
        assert all(torch.equal(first[name], other[name]) for name in first)


@_BOTH
def test_last_group_of_more_heads(mask):
    """Two of three heads alternate at last; so do two of the six heads of two sequences."""
    emulator = Emulator()
    module = emulator.load("forward.host")
    module._L2_BYTES_PER_GROUP, module.heads_at_last = 0, lambda *_: 2
    for batch in (1, 2):
        shape = Shape(num_heads=3, num_kv_heads=3, batch=batch)
        assert_close(*_outputs(mask, shape, emulator=emulator, num_sms=3), num_chunks=2)


def _hops(mask: Mask, keys: list[tuple[int, int]]) -> list[Mask]:
    """The mask as a ring's hops see it: of each piece of the keys."""
    seqlen_q = mask.seqlen_q
    moved = []
    for start, stop in keys:
        cut = [(r, max(r.k_start, start), min(r.k_stop, stop)) for r in mask.regions]
        regions = [
            Region(r.q_start, r.q_stop, a - start, b - start, *(None if x is None else x - start for x in r[4:]))
            for r, a, b in cut
            if a < b
        ]
        moved.append(Mask.of(seqlen_q, stop - start, regions))
    return moved


@pytest.mark.parametrize("shape", [Shape(64), Shape(96), Shape(128), Shape(256), Shape(192, value_dim=128)], ids=str)
@pytest.mark.parametrize("name", ["causal, fewer queries", "documents", "causal, rows that see nothing"])
def test_resume(name, shape):
    """Keys in three hops, the state carried in fp32 and cast by the last hop, give the attention of one call."""
    mask = MASKS[name]
    q, k, v, _ = inputs(mask, shape)
    exact, baseline = oracle_and_baseline(q, k, v, mask, shape.scale)
    cuts = [0, mask.seqlen_k // 3, mask.seqlen_k // 2, mask.seqlen_k]
    keys = list(zip(cuts, cuts[1:], strict=False))
    shape_of_out = exact["out"].shape
    state, out = torch.full(shape_of_out, math.nan), torch.full(shape_of_out, math.nan, dtype=q.dtype)
    lse = torch.full(exact["lse"].shape, math.nan)
    emulator = Emulator()
    for hop, ((start, stop), part) in enumerate(zip(keys, _hops(mask, keys), strict=True)):
        last = hop == len(keys) - 1
        pieces = (q, k[:, start:stop], v[:, start:stop], part, shape.scale)
        _forward(emulator, *pieces, out=out if last else state, lse=lse, acc=state if hop else None)
    assert_close({"out": out, "lse": lse}, exact, baseline, num_chunks=_chunks(mask))


@pytest.mark.parametrize("mask", [MASKS["nothing"], MASKS["rectangle inside"]], ids=["nothing", "part"])
def test_rows_that_see_nothing_keep_their_state(mask):
    shape = Shape()
    q, k, v, _ = inputs(mask, shape)
    state, lse = torch.randn(q.shape), torch.randn(shape.batch, shape.num_heads, mask.seqlen_q)
    out, new_lse = torch.full(q.shape, math.nan, dtype=q.dtype), lse.clone()
    _forward(None, q, k, v, mask, shape.scale, out=out, lse=new_lse, acc=state.clone())
    unseen = ~mask.dense().any(1)
    assert unseen.any() and torch.equal(new_lse[..., unseen], lse[..., unseen])
    assert torch.equal(out[:, unseen], state[:, unseen].to(out.dtype))


@pytest.mark.parametrize("resume", [False, True])
def test_nan_reaches_lse(resume):
    """An lse of -inf would say that the row saw nothing: the backward would return no gradient for it."""
    mask, shape = _CAUSAL, Shape()
    q, k, v, _ = inputs(mask, shape)
    q[0, 3, 1, 7] = math.nan
    out, lse = torch.zeros(q.shape), torch.zeros(1, 2, 190)
    _forward(None, q, k, v, mask, shape.scale, out=out, lse=lse, acc=out.clone() if resume else None)
    broken = torch.zeros(2, 190, dtype=torch.bool)
    broken[1, 3] = True
    assert torch.equal(lse[0].isnan(), broken) and torch.equal(out[0].isnan().all(-1).T, broken)


def test_outputs_in_larger_tensors():
    """Strided destinations: neighbouring memory stays as it was."""
    mask, shape = Mask.band(150, 150, causal=True), Shape(num_heads=2, batch=2)
    q, k, v, _ = inputs(mask, shape)
    exact, baseline = oracle_and_baseline(q, k, v, mask, shape.scale)
    out = torch.full((2, 200, 3, 64), 7.0, dtype=q.dtype)
    lse = torch.full((2, 3, 200), 7.0)
    _forward(None, q, k, v, mask, shape.scale, out=out[:, 20:170, 1:], lse=lse[:, 1:, 20:170])
    assert_close({"out": out[:, 20:170, 1:], "lse": lse[:, 1:, 20:170]}, exact, baseline)
    assert (out[:, :20] == 7).all() and (out[:, 170:] == 7).all() and (out[:, :, 0] == 7).all()
    assert (lse[:, :, :20] == 7).all() and (lse[:, :, 170:] == 7).all() and (lse[:, 0] == 7).all()


def _far_apart(tmp_path, emulator: Emulator | None = None):
    """A call whose tensors have batches 2^30 elements apart."""
    mask, shape = Mask.band(100, 100, causal=True), Shape(batch=3)
    q, k, v, _ = inputs(mask, shape)
    exact, baseline = oracle_and_baseline(q, k, v, mask, shape.scale)
    q, k, v = (far_apart(x, tmp_path / name) for name, x in (("q", q), ("k", k), ("v", v)))
    out = far_apart(torch.full(q.shape, math.nan, dtype=q.dtype), tmp_path / "out")
    lse = far_apart(torch.full(exact["lse"].shape, math.nan), tmp_path / "lse")
    _forward(emulator, q, k, v, mask, shape.scale, out=out, lse=lse)
    return {"out": out, "lse": lse}, exact, baseline


def test_offsets_beyond_32_bits(tmp_path):
    assert_close(*_far_apart(tmp_path))


def test_offset_in_32_bits_is_caught(tmp_path):
    emulator = Emulator(faults=[("forward.kernel", "tile.batch.to(gl.int64)", "tile.batch")])
    with pytest.raises(EmulationError, match="int32 overflow"):
        _far_apart(tmp_path, emulator)


@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed):
    mask, shape = random_problem(seed)
    assert_close(*_outputs(mask, shape, emulator=Emulator(seed)))


# A fault in the mask, and one in each kind of synchronisation: (module, source text, what replaces it).
FAULTS = {
    "a key too many": ("pipeline", "keys[None, :] < rows.stop[:, None]", "keys[None, :] <= rows.stop[:, None]"),
    "a key too many on the left": (
        "pipeline", "keys[None, :] >= rows.start[:, None]", "keys[None, :] + 1 >= rows.start[:, None]",
    ),
    "band is shifted by one": ("forward.host", "region.upper + shift", "region.upper + shift + 1"),
    "a partly masked block runs unmasked": (
        "forward.kernel", "first = gl.maximum(n - tile.end_full, 1)", "first = gl.maximum(n - tile.end_full - 1, 1)",
    ),
    "the last partly masked block runs unmasked": (
        "forward.kernel", "gl.maximum(n - tile.first_full, first)", "gl.maximum(n - tile.first_full + 1, first)",
    ),
    "phase of V is inverted": (
        "forward.kernel", "barriers.v_full.index(index), phase)", "barriers.v_full.index(index), phase ^ 1)",
    ),
    "phase of K is inverted": (
        "forward.kernel", "barriers.k_empty.index(index), phase ^ 1)", "barriers.k_empty.index(index), phase)",
    ),
    "an arrival is missing": ("forward.kernel", "mbarrier.arrive(barriers.v_empty.index(index), count=1)", "pass"),
    "proxy fences are missing": ("pipeline", "fence_async_shared()", "pass"),
    "staging buffers are overwritten while they leave": ("pipeline", "tma_store_wait(0)", "pass"),
    "the second of two bands is the first": ("pipeline", "stop + problem.jump", "stop"),
    "a block that some rows see is passed over": (
        "pipeline", "stop_of(own_last_row, problem, CFG)", "stop_of(own_last_row - 63, problem, CFG)",
    ),
    "a block that some rows see on the left is passed over": (
        "pipeline", "row + FIRST + problem.lower - first_key, 0", "row + FIRST + 64 + problem.lower - first_key, 0",
    ),
    "the first turn is not passed": (
        "forward.kernel", "CFG.tiles.num_warpgroups - 1:\n        pass_turn(kv, W, CFG)", "5:\n        pass",
    ),
    "a turn is not passed": ("forward.kernel", "    pass_turn(kv, W, CFG)\n    s = seen", "    s = seen"),
    "a turn is passed to oneself": ("pipeline", "(W + 1) % CFG.tiles.num_warpgroups, 256, True", "W, 256, True"),
    "the last turn is not taken": ("forward.kernel", "if W == 0:\n        take_turn", "if W == 2:\n        take_turn"),
    "a block that is passed takes no turn": (
        "forward.kernel", "    take_turn(kv, W, CFG)\n    pass_turn(kv, W, CFG)\n    return", "    return",
    ),
    "V of a block arrives with its own K": (
        "forward.kernel", "key + CFG.tiles.block_n, head_kv, CFG)", "key, head_kv, CFG)",
    ),
    "the last stage of a tile is kept": ("forward.kernel", "kv = pass_stage(kv, shared, barriers, CFG)", "kv += 1"),
    "P V is not waited for": ("forward.kernel", "acc = wait_values(acc, CFG)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_planted_faults_are_caught(fault):
    def check(mask: Mask, emulator: Emulator) -> None:
        for head_dim in (128, 64):
            assert_close(*_outputs(mask, Shape(head_dim), emulator=emulator))

    names = "wide window", "window", "causal, ragged", "zigzag chunks before all keys"
    assert any(is_caught(fault, MASKS[name], check) for name in names)
