"""The production backward kernels, from their own source and launcher, on the CPU emulator, against fp64. CPU.

The grid is thin: every mask runs at head_dim 64 (dQ in the loop) and 192 (dQ apart), every head_dim with a few masks;
lengths are a few tiles.
"""

from contextlib import contextmanager

import pytest
import torch

from ringflash.testing.tolerance import assert_close
from ringflash_kernels.api import collect, publish
from ringflash_kernels.hopper.backward.tiles import BACKWARD_TILES
from ringflash_kernels.mask import Mask, Region
from tests.emulator.emulator import EmulationError, Emulator
from tests.emulator.host import cuda_properties
from tests.emulator.oracle import MASKS, SHAPES, far_apart, is_caught, random_problem
from tests.helpers.mask_oracle import Shape, inputs, oracle_and_baseline
from tests.two_sided import kernel_masks

_CAUSAL = MASKS["causal, ragged"]
_GAP = Mask.of(130, 420, [Region(0, 64, 0, 70), Region(64, 130, 300, 333)])  # tiles of keys that no query sees


def _gradients(
    mask: Mask,
    shape: Shape,
    *,
    emulator: Emulator | None = None,
    accumulate: bool = True,
    fp32: bool = False,
    deterministic: bool = False,
    with_dlse: bool = False,
    whole_groups: bool = False,
    in_step: bool = False,
    only_dq: bool = False,
):
    """dq, dk, dv of the kernels, of the oracle, and of the baseline.

    Args:
        fp32: what is stored, not added, is fp32 all the same, in strided views.
        whole_groups: a CTA walks all heads of a group although the launch is small.
        in_step: tiles begin where the others are although the queries are few.
        only_dq: the result of dq is in a larger tensor, and is known from the start.
    """
    q, k, v, dout = inputs(mask, shape)
    dlse = torch.randn(shape.batch, shape.num_heads, mask.seqlen_q) if with_dlse else None
    grads = {"dout": dout} | ({"dlse": dlse} if with_dlse else {})
    exact, baseline = oracle_and_baseline(q, k, v, mask, shape.scale, **grads)
    out, lse = exact["out"].to(shape.dtype), exact["lse"].float()
    module = (emulator or Emulator()).load("backward.host")
    if whole_groups:
        module._MANY_TILES = module.SMS = 1
    if in_step:
        module.IN_STEP_BYTES = 0
    dq = torch.full((*q.shape[:3], 2 * q.shape[3]), torch.nan, dtype=q.dtype)[..., : q.shape[3]] if only_dq else None
    options = {"dlse": dlse, "deterministic": deterministic, "only_dq": dq}
    run = module.HopperBackward(dout, q, out, lse, softmax_scale=shape.scale, **options)
    if accumulate:
        dk, dv = (torch.full(x.shape, 0.5) for x in (k, v))
    elif fp32:
        dk, dv = torch.full((*k.shape[:3], k.shape[3] + v.shape[3]), torch.nan).split((k.shape[3], v.shape[3]), 3)
    else:
        dk, dv = (torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (k, v))
    run.clock.fill_(10)  # at two CTAs, in the middle of a round
    with cuda_properties(3):  # of a two-sided mask each program takes several tiles
        run.add(k, v, mask, dk, dv, accumulate=accumulate)
    if accumulate:
        dk, dv = dk - 0.5, dv - 0.5
    names = ("dq", "dk", "dv")
    got = dict(zip(names, (run.finish(dq), dk, dv), strict=True))
    return got, {n: exact[n] for n in names}, {n: baseline[n] for n in names}


def _chunks(mask: Mask) -> int:
    return 2 if min(mask.seqlen_q, mask.seqlen_k) >= 128 else 1


@pytest.mark.parametrize("shape", [Shape(64), Shape(192, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks(mask, shape):
    assert_close(*_gradients(mask, shape), num_chunks=_chunks(mask))


@pytest.mark.parametrize(
    "mask", [_CAUSAL, MASKS["documents"], MASKS["rectangle inside"]], ids=["band", "bounds", "part"]
)
@pytest.mark.parametrize("shape", [Shape(64, 1), Shape(64, 2), Shape(128, 2, 2, 2)], ids=str)
def test_stored_gradients(mask, shape):
    """dk and dv in the inputs' dtype overwrite what was there, also for keys that no query sees."""
    assert_close(*_gradients(mask, shape, accumulate=False), num_chunks=_chunks(mask))


@pytest.mark.parametrize("mask", [_CAUSAL, _GAP, MASKS["rectangle inside"]], ids=["band", "gap", "part"])
@pytest.mark.parametrize("num_heads", [1, 2], ids=["mha", "gqa"])
def test_stored_in_fp32(mask, num_heads):
    """fp32 dk and dv that are interleaved are overwritten, also for keys that no query sees."""
    got, exact, baseline = _gradients(mask, Shape(num_heads=num_heads), accumulate=False, fp32=True)
    assert got["dk"].dtype == got["dv"].dtype == torch.float32
    assert_close(got, exact, baseline, num_chunks=_chunks(mask))


@pytest.mark.parametrize("mask", [_CAUSAL, _GAP, MASKS["rectangle inside"]], ids=["band", "gap", "part"])
@pytest.mark.parametrize("widths", [(192,), (192, 128), (256,), (64,), (128,)], ids=str)
def test_only_dq(mask, widths):
    """At 192 kernels of dQ store the result, if every query is in the hop's rectangle; at 128 tiles are drawn."""
    shape, narrow = Shape(widths[0], 4, 2, value_dim=widths[-1]), len(widths) == 2
    for deterministic in {narrow, False}:  # only then dq of narrow values has a kernel of its own
        got = _gradients(mask, shape, only_dq=True, deterministic=deterministic)
        assert_close(*got, num_chunks=_chunks(mask))


@pytest.mark.parametrize(
    "mask, head_dim", [(_CAUSAL, 192), (kernel_masks.MASKS["deep, window"], 128)], ids=["192", "128"]
)
def test_broken_promise_of_only_dq(mask, head_dim):
    """The result holds the heads that are cast before the end: all, or the first sections."""
    q, k, v, dout = inputs(mask, Shape(head_dim))
    dq, dk, dv = torch.empty_like(q), torch.zeros(k.shape), torch.zeros(v.shape)
    lse, module = torch.zeros(1, 2, mask.seqlen_q), Emulator().load("backward.host")
    module._L2_BYTES_PER_SECTION = module._BESIDE_TOGETHER = 1
    run = module.HopperBackward(dout, q, q, lse, softmax_scale=1.0, only_dq=dq)
    with cuda_properties(3):
        run.add(k, v, mask, dk, dv)
    with pytest.raises(ValueError, match="out must be the tensor that was given as only_dq, got another; leave"):
        run.finish()
    with pytest.raises(RuntimeError, match="add must be called once if only_dq is given, got another call; leave"):
        run.add(k, v, mask, dk, dv)


@pytest.mark.parametrize(
    "seqlen, group, deterministic, expected",
    [(1024, 1, False, 8), (2048, 1, False, 4), (4096, 1, False, 8), (1024, 4, False, 32), (1024, 1, True, 32)],
    ids=str,
)
def test_short_heads_run_few_at_a_time(seqlen, group, deterministic, expected):
    """Heads together, of 64 at head_dim 128: with more of them, dQ of short ones would not stay in L2."""
    q = torch.zeros(1, 64, 4, 128, dtype=torch.bfloat16)
    module, lse = Emulator().load("backward.host"), torch.zeros(1, 4, 64)
    run = module.HopperBackward(q, q, q, lse, softmax_scale=1.0, deterministic=deterministic)
    hop = module.hop_of(Mask.band(seqlen, seqlen, causal=True), torch.device("cpu"))
    assert run.heads_together(hop, 64, group) == expected


@pytest.mark.parametrize(
    "head_dim, seqlen, num_kv_heads, accumulate, only_dq, drawn",
    [
        (128, 2048, 4, False, False, True),
        (128, 2049, 4, False, False, False),
        (128, 2048, 2, False, False, False),
        (128, 2048, 4, True, False, False),
        (128, 2049, 4, False, True, True),
        (128, 2048, 2, False, True, True),
        (128, 16384, 2, False, True, False),  # tiles of whole groups
        (64, 2048, 4, False, True, False),
    ],
    ids=str,
)
def test_tiles_of_single_heads_are_drawn(head_dim, seqlen, num_kv_heads, accumulate, only_dq, drawn):
    """Programs of a launch, of which each takes many tiles if they are drawn: of short heads, or if dq is known."""
    q, k = (torch.empty(1, seqlen, n, head_dim, dtype=torch.bfloat16) for n in (4, num_kv_heads))
    module, launches = Emulator().load("backward.host"), []
    module.preprocess = lambda *_, **__: None
    module._KEYS = lambda _, num_programs, *args, **constants: launches.append((num_programs, constants["PERSISTENT"]))
    dq = torch.empty_like(q) if only_dq else None
    run = module.HopperBackward(q, q, q, torch.empty(1, 4, seqlen), softmax_scale=1.0, only_dq=dq)
    dk, dv = torch.empty(2, *k.shape, dtype=torch.float32 if accumulate else k.dtype)
    with cuda_properties(3):
        run.add(k, k, Mask.band(seqlen, seqlen, causal=True), dk, dv, accumulate=accumulate)
    assert [early for _, early in launches] == [drawn]
    assert (launches[0][0] == 3) == drawn


def test_last_section_of_two_heads():
    """Tiles of the first head, then those of the other two, which alternate."""
    emulator = Emulator()
    module = emulator.load("backward.host")
    module._L2_BYTES_PER_SECTION, module.heads_at_last = 0, lambda *_: 2
    assert_close(*_gradients(_CAUSAL, Shape(num_heads=3, num_kv_heads=3), emulator=emulator), num_chunks=2)


@pytest.mark.parametrize("mask", [_CAUSAL, _GAP], ids=["band", "gap"])
@pytest.mark.parametrize("widths", [(96,), (128,), (192,), (192, 128)], ids=str)
def test_groups_stored_in_fp32(mask, widths):
    shape = Shape(widths[0], 4, 2, value_dim=widths[-1])
    result = _gradients(mask, shape, emulator=Emulator(1), accumulate=False, fp32=True, whole_groups=True)
    assert_close(*result, num_chunks=2)


@pytest.mark.parametrize(
    "dtypes, accumulate",
    [((torch.bfloat16, torch.bfloat16), True), ((torch.float16,) * 2, False), ((torch.float32, torch.bfloat16), False)],
    ids=["added in bf16", "neither fp32 nor as k", "two dtypes"],
)
def test_other_dtypes_are_refused(dtypes, accumulate):
    q, k, v, dout = inputs(_CAUSAL, Shape())
    run = Emulator().load("backward.host").HopperBackward(dout, q, q, torch.zeros(1, 2, 190), softmax_scale=1.0)
    dk, dv = (torch.zeros(k.shape, dtype=dtype) for dtype in dtypes)
    with pytest.raises(ValueError, match="dk and dv must share one dtype of .*, got .*; cast them"):
        run.add(k, v, _CAUSAL, dk, dv, accumulate=accumulate)
    with pytest.raises(ValueError, match="k and v must be in torch.bfloat16 as q is, got torch.float16 and .*; cast"):
        run.add(k.half(), v, _CAUSAL, dk, dv, accumulate=accumulate)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", [_CAUSAL, MASKS["documents"]], ids=["band", "bounds"])
def test_shapes(mask, shape):
    assert_close(*_gradients(mask, shape), num_chunks=2)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_gradient_through_lse(head_dim):
    mask = MASKS["causal, rows that see nothing"]
    assert_close(*_gradients(mask, Shape(head_dim), with_dlse=True))


@pytest.mark.parametrize("shape", [Shape(64), Shape(128), Shape(256), Shape(192, value_dim=128)], ids=str)
def test_interleavings(shape):
    """Partitions, blocks and copies in other orders give the same gradients."""
    for seed in range(1, 6):
        assert_close(*_gradients(_CAUSAL, shape, emulator=Emulator(seed, resident=3)))


@pytest.mark.parametrize("head_dim", BACKWARD_TILES)
def test_only_ds_is_rounded_on_the_way_to_dk(head_dim):
    """P is not, although another consumer may have computed it: it would add a quarter to dK's error."""
    mask, shape = Mask.full(256, 256), Shape(head_dim, 1, 1)
    got, exact, _ = _gradients(mask, shape)
    q, k, v, dout = (x[0, :, 0].double() for x in inputs(mask, shape))
    scores = q @ k.T * shape.scale
    out = scores.softmax(-1) @ v
    delta = (dout * out.to(shape.dtype)).sum(-1, keepdim=True)
    ds = (scores.softmax(-1) * (dout @ v.T - delta)).to(shape.dtype)
    rounded_once = ds.double().T @ q * shape.scale
    errors = [(x - exact["dk"][0, :, 0]).abs().mean() for x in (got["dk"][0, :, 0], rounded_once)]
    assert errors[0] <= 1.05 * errors[1], errors


def _hops(head_dim: int, deterministic: bool, emulator: Emulator):
    """Gradients of keys in three hops, of the oracle, and of the baseline."""
    mask, shape = Mask.band(200, 300, causal=True), Shape(head_dim)
    q, k, v, dout = inputs(mask, shape)
    exact, baseline = oracle_and_baseline(q, k, v, mask, shape.scale, dout=dout)
    out, lse = exact["out"].to(shape.dtype), exact["lse"].float()
    module = emulator.load("backward.host")
    run = module.HopperBackward(dout, q, out, lse, softmax_scale=shape.scale, deterministic=deterministic)
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    for start, stop in ((0, 70), (70, 230), (230, 300)):
        hop = Mask.of(200, stop - start, [Region(0, 200, 0, stop - start, upper=100 - start)])
        run.add(*(x[:, start:stop] for x in (k, v)), hop, dk[:, start:stop], dv[:, start:stop])
    got = {"dq": run.finish(), "dk": dk, "dv": dv}
    return got, {n: exact[n] for n in got}, {n: baseline[n] for n in got}


@pytest.mark.parametrize("head_dim, deterministic", [(64, False), (96, True), (192, False), (256, True)])
def test_hops_add_up(head_dim, deterministic):
    """Keys in three hops give the gradients of one call."""
    assert_close(*_hops(head_dim, deterministic, Emulator()), num_chunks=2)


def test_gradient_at_any_address():
    """A contiguous view, as of a concatenation's gradient, at an address that TMA cannot take."""
    q, k, v, dout = inputs(_CAUSAL, Shape())
    moved = torch.empty(1 + dout.numel(), dtype=dout.dtype)[1:].view(dout.shape).copy_(dout)
    results = []
    for given in (dout, moved):
        run = Emulator().load("backward.host").HopperBackward(given, q, q, torch.zeros(1, 2, 190), softmax_scale=1.0)
        dk, dv = torch.zeros(2, *k.shape)
        run.add(k, v, _CAUSAL, dk, dv)
        results.append(torch.cat((run.finish().float().flatten(), dk.flatten(), dv.flatten())))
    assert moved.data_ptr() % 16 and torch.equal(*results)


@pytest.mark.parametrize("head_dim", [64, 192])
def test_launches_are_on_the_device_of_the_tensors(monkeypatch, head_dim):
    """If another device is the current one, each of the kernels would read memory of a stranger."""
    module, current, places = Emulator().load("backward.host"), [], []
    launcher = type(module._KEYS)
    launch = launcher.__call__

    @contextmanager
    def guard(device):
        current.append(device)
        yield
        current.pop()

    def noted(*args, **constants):
        places.append(tuple(current))
        launch(*args, **constants)

    monkeypatch.setattr(module, "device_guard", guard)
    monkeypatch.setattr(launcher, "__call__", noted)
    q, k, v, dout = inputs(MASKS["three keys"], Shape(head_dim))
    run = module.HopperBackward(dout, q, q, torch.zeros(1, 2, 67), softmax_scale=1.0)
    run.add(k, v, MASKS["three keys"], *torch.zeros(2, *k.shape))
    run.finish()
    assert places == [(q.device,)] * (4 if head_dim == 192 else 3)


@pytest.mark.parametrize("head_dim", [64, 96, 192])
def test_dq_into_a_view(head_dim):
    """The heads of a larger tensor are written, the others left."""
    q, k, v, dout = inputs(_CAUSAL, Shape(head_dim, batch=2))
    run = Emulator().load("backward.host").HopperBackward(dout, q, q, torch.zeros(2, 2, 190), softmax_scale=1.0)
    run.dq.normal_()
    whole = torch.full((2, 190, 5, head_dim), torch.nan, dtype=q.dtype)
    given = run.finish(whole[:, :, 1:3])
    assert torch.equal(given, run.finish()) and torch.equal(given, whole[:, :, 1:3])
    assert whole[:, :, [0, 3, 4]].isnan().all()
    with pytest.raises(ValueError, match="out must be .* with unit last stride, got .*; leave it out"):
        run.finish(whole[:, :, :3])


@pytest.mark.parametrize("accumulate", [True, False], ids=["added", "stored"])
@pytest.mark.parametrize("mask", [_CAUSAL, MASKS["documents"], MASKS["full"]], ids=["band", "bounds", "full"])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_whole_groups(mask, head_dim, accumulate):
    """One CTA sums dK and dV of the heads that share them."""
    shape = Shape(head_dim, 4, 2)
    assert_close(*_gradients(mask, shape, accumulate=accumulate, whole_groups=True), num_chunks=2)


@pytest.mark.parametrize("mask", ["full, ragged", "wide window", "zigzag chunks before all keys", "rectangle inside"])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_tiles_that_begin_where_the_others_are(mask, head_dim):
    """Rounds over the queries that begin anywhere give the same gradients."""
    shape = Shape(head_dim, 4, 2, batch=2)
    got = _gradients(MASKS[mask], shape, whole_groups=True, in_step=True, accumulate=head_dim != 64)
    assert_close(*got, num_chunks=_chunks(MASKS[mask]))


def _bits(mask: Mask, shape: Shape, emulator: Emulator) -> list[torch.Tensor]:
    """The fp32 sums of a deterministic pass over its first 130 keys, then over `mask`."""
    q, k, v, dout = inputs(mask, shape)
    lse = torch.full((shape.batch, shape.num_heads, mask.seqlen_q), 5.0)
    run = emulator.load("backward.host").HopperBackward(
        dout, q, dout, lse, softmax_scale=shape.scale, deterministic=True
    )
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    run.add(*(x[:, :130] for x in (k, v)), Mask.full(mask.seqlen_q, 130), *(x[:, :130] for x in (dk, dv)))
    run.add(k, v, mask, dk, dv)
    return [run.accumulated_dq(), dk, dv]


def _repeats(mask: Mask, shape: Shape, faults: tuple = ()) -> bool:
    """True if interleavings and orders of reductions leave the bits as they are."""
    mask = Mask(mask.seqlen_q, mask.seqlen_k, mask.regions)  # keeps nothing that was made with a fault
    first, *others = (_bits(mask, shape, Emulator(seed, resident=4, faults=faults)) for seed in range(3))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    "head_dim, mask",
    [
        (64, _CAUSAL),
        (64, _GAP),
        (64, MASKS["window to both sides"]),
        (96, MASKS["documents"]),
        (96, MASKS["rectangle inside"]),
        (128, MASKS["wide window"]),
        (128, MASKS["zigzag chunks before all keys"]),
        (192, MASKS["window"]),
        (256, MASKS["documents"]),
    ],
)
def test_deterministic(head_dim, mask):
    """Equal bits for every interleaving and order of reductions, and within the budget."""
    shape = Shape(head_dim, 4, 2)
    assert_close(*_gradients(mask, shape, deterministic=True), num_chunks=2)
    assert _repeats(mask, shape)


def _far_apart(tmp_path, emulator: Emulator | None = None):
    """A call whose tensors have batches 2^30 elements apart."""
    mask, shape = Mask.band(100, 100, causal=True), Shape(batch=3)
    q, k, v, dout = inputs(mask, shape)
    exact, baseline = oracle_and_baseline(q, k, v, mask, shape.scale, dout=dout)
    given = {"q": q, "k": k, "v": v, "dout": dout, "out": exact["out"].to(q.dtype), "lse": exact["lse"].float()}
    far = {name: far_apart(x, tmp_path / name) for name, x in given.items()}
    dk, dv = (far_apart(torch.zeros(k.shape), tmp_path / name) for name in ("dk", "dv"))
    module = (emulator or Emulator()).load("backward.host")
    run = module.HopperBackward(far["dout"], far["q"], far["out"], far["lse"], softmax_scale=shape.scale)
    run.add(far["k"], far["v"], mask, dk, dv)
    got = {"dq": run.finish(), "dk": dk, "dv": dv}
    return got, {n: exact[n] for n in got}, {n: baseline[n] for n in got}


def test_offsets_beyond_32_bits(tmp_path):
    assert_close(*_far_apart(tmp_path))


def test_offset_in_32_bits_is_caught(tmp_path):
    old, new = "(tl.program_id(0) // num_blocks).to(tl.int64)", "tl.program_id(0) // num_blocks"
    with pytest.raises(EmulationError, match="int32 overflow"):
        _far_apart(tmp_path, Emulator(faults=[("backward.preprocess", old, new)]))


@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed):
    mask, shape = random_problem(seed)
    assert_close(*_gradients(mask, shape, emulator=Emulator(seed)))


# A fault in the mask, and one in each kind of synchronisation: (module, source text, what replaces it).
FAULTS = {
    "mask lets a row too many see a key": ("backward.problem", "return passed < ", "return passed <= "),
    "band is shifted by one": ("backward.host", "else corner - upper\n", "else corner - upper + 1\n"),
    "a partly masked block runs unmasked": ("backward.keys", "(block < full_start)", "(block + 1 < full_start)"),
    "phase of dS is inverted": (
        "backward.keys", "(sm.ds_full.index(last), last_parity)", "(sm.ds_full.index(last), last_parity ^ 1)",
    ),
    "phase of Q is inverted": (
        "backward.keys", "(sm.q_full.index(slot), parity)", "(sm.q_full.index(slot), parity ^ 1)",
    ),
    "consumers and producer begin at different blocks": (
        "backward.keys", "block = receive_number(sm.begin.index(slot))", "block = start",
    ),
    "an arrival is missing": ("backward.keys", "mbarrier.arrive(sm.q_empty.index(slot), count=1)", "pass"),
    "staging buffers are overwritten while they leave": ("backward.dq", "tma_store_wait(0)", "pass"),
    "proxy fences are missing": ("backward.keys", "fence_async_shared()", "pass"),
}  # fmt: skip


# The same for the turns of two consumers.
FAULTS_IN_TURNS = {
    "the first turn is not passed": ("backward.keys", "    if W == 1:\n        pass_turn(step, W)\n", ""),
    "a turn is not passed": ("backward.keys", "p = arrive_after(p, 32, sm.TURN_AFTER, 9 - W, 256)", "pass"),
    "a turn is passed to oneself": ("backward.keys", "sm.TURN_AFTER, 9 - W, 256", "sm.TURN_AFTER, 8 + W, 256"),
    "the last turn is not taken": ("backward.keys", "if W == 0:\n        take_turn", "if W == 2:\n        take_turn"),
}


# The same for the separate kernel of dQ, and for the kernel of keys that goes with it.
FAULTS_APART = {
    "a partly masked block runs unmasked": (
        "backward.queries", "(block < full_start) | (block >= full_stop)", "(block < full_start)",
    ),
    "tiles are shifted by one": ("backward.queries", "(problem.num_tiles - 1)", "problem.num_tiles"),
    "phase of K and V is inverted": (
        "backward.queries",
        "mbarrier.wait(sm.full.index(slot), parity)",
        "mbarrier.wait(sm.full.index(slot), parity ^ 1)",
    ),
    "phase of Q is inverted": (
        "backward.queries", "(sm.q_full.index(0), round & 1)", "(sm.q_full.index(0), ~round & 1)",
    ),
    "buffers are filled too early": ("backward.queries", "mbarrier.wait(sm.empty.index(slot), parity ^ 1)", "pass"),
    "K is given back while dQ needs it": (
        "backward.queries", "dq0, dq1, ds0, ds1 = warpgroup_mma_wait(0,", "dq0, dq1, ds0, ds1 = warpgroup_mma_wait(2,",
    ),
    "exp does not wait for S": ("backward.queries", "wait(products_of_dp,", "wait(products_of_dp + 3,"),
    "an arrival is missing": ("backward.queries", "mbarrier.arrive(sm.empty.index(v_slot), count=1)", "pass"),
    "dQ is staged over what leaves": ("backward.queries", "    tma_store_wait(1)\n", ""),
    "Q is given back while dQ leaves": ("backward.queries", "    tma_store_wait(0)\n", ""),
    "proxy fence is missing": (
        "backward.queries", "    fence_async_shared()\n    if dq_desc.dtype", "    if dq_desc.dtype",
    ),
    "phase of dO is inverted": (
        "backward.wide", "(sm.dout_full.index(slot), parity)", "(sm.dout_full.index(slot), parity ^ 1)",
    ),
    "K is given back while dK leaves": ("backward.wide", "tma_store_wait(0)", "pass"),
}  # fmt: skip


# The same for additions to dQ in a fixed order: bits differ, or the emulator raises.
FAULTS_IN_ORDER = {
    "nobody waits for the previous tile": ("backward.dq", "order.wait_for_tile(previous, number, block)", "pass"),
    "launches share numbers": ("backward.host", "self._next_number += num_tiles", "pass"),
    "dK is staged over what leaves": ("backward.dq", "for ahead in gl.static_range(sm.DQ_BUFFERS)", "for ahead in ()"),
    "phase of dQ is inverted": ("backward.dq", "parity = step // WRITERS & 1", "parity = ~(step // WRITERS) & 1"),
}  # fmt: skip


_CAUGHT = [
    pytest.param(fault, shape, id=f"{shape}-{name}")
    for shape, faults in ((Shape(), FAULTS), (Shape(128), FAULTS_IN_TURNS), (Shape(192), FAULTS_APART))
    for name, fault in faults.items()
]


@pytest.mark.parametrize("fault, shape", _CAUGHT)
def test_planted_faults_are_caught(fault, shape):
    def check(mask: Mask, emulator: Emulator) -> None:
        assert_close(*_gradients(mask, shape, emulator=emulator, in_step=True))

    assert any(is_caught(fault, MASKS[name], check) for name in ("wide window", "window", "causal, ragged"))


@pytest.mark.parametrize(
    "old, new",
    [(">= (block + 1) * 64", ">= block * 64"), ("(g == 0) & (first_row", "(first_row")],
    ids=["seen", "later head"],
)
def test_passed_blocks_that_are_not_empty(old, new):
    """Half a tile's keys pass a block that sees them, or the first one of a later head, whose step has a dQ to add."""

    def check(mask: Mask, emulator: Emulator) -> None:
        options = dict(accumulate=False, whole_groups=True)
        assert_close(*_gradients(mask, Shape(64, 4, 2), emulator=emulator, **options), num_chunks=2)

    assert any(is_caught(("backward.keys", old, new), mask, check) for mask in (_CAUSAL, MASKS["full"]))


# Several tiles for each block; the second block sees some before and two after a gap.
_MANY_TILES = Mask.full(70, 600), Mask.of(130, 700, [Region(0, 70, 0, 290), Region(70, 130, 520, 700)])


@pytest.mark.parametrize("fault", [None, *FAULTS_IN_ORDER.values()], ids=["none", *FAULTS_IN_ORDER.keys()])
def test_planted_faults_are_caught_in_order(fault):
    faults = () if fault is None else (fault,)
    try:
        equal = all(_repeats(mask, Shape(), faults) for mask in _MANY_TILES)
    except EmulationError:
        equal = False
    assert equal is (fault is None)


@pytest.mark.parametrize(
    "widths, ranks", [((64, 64), (3,)), ((96, 96), (1, 0, 2)), ((192, 128), (2, 0)), ((64, 64), (0, 7, 1, 2))]
)
def test_sum_over_ranks(widths: tuple[int, int], ranks: tuple[int, ...]) -> None:
    """Own and others' dK and dV, of segments that so many others have; the sum is fp32 in the order given."""
    torch.manual_seed(widths[0])
    whole = torch.randn(2, 60, 3, sum(widths))
    places = range(7, 60, 14)  # of each segment in what this rank has gathered
    own = [whole[:, place : place + 11 - index] for index, place in zip(range(len(ranks)), places, strict=False)]
    come = [torch.randn(count, 2, x.shape[1], 3, sum(widths)) for count, x in zip(ranks, own, strict=True)]
    sources, first = [], 0
    for place, x, partials in zip(places, own, come, strict=False):
        rows = torch.arange(x.shape[1])
        constant = [torch.full_like(rows, value) for value in (x.shape[1], len(partials))]
        sources.append(torch.stack([place + rows, first + rows, *constant]))
        first += partials.shape[:3].numel()
    want = [x.clone() for x in own]
    for total, partials in zip(want, come, strict=True):
        for partial in partials:
            total += partial
    wanted, others = torch.cat(want, 1), torch.cat([partials.flatten(0, 2) for partials in come])
    rows = wanted.shape[1]
    for fused in (True, False):
        gradients = torch.full((2, rows + 3, 5, sum(widths)), torch.nan, dtype=torch.bfloat16)
        dk, dv = gradients[:, 1 : rows + 1, 2:].split(widths, 3)
        if fused:
            Emulator().load("gather_scatter").collect(whole, others, torch.cat(sources, 1), dk, dv)
        else:
            collect("reference", whole, others, torch.cat(sources, 1), max(ranks), dk, dv)
        assert torch.equal(torch.cat((dk, dv), 3), wanted.bfloat16())
        assert int(gradients.isfinite().sum()) == wanted.numel()


def test_sums_of_ranks_whose_offsets_pass_32_bits(tmp_path):
    """Offsets of 8 ranks from some ten million tokens on."""
    row = 2 * 2 * 64
    first, partials = 2**31 // row - 7, torch.randn(15, 2, 2 * 64)
    others = torch.from_file(str(tmp_path / "others"), shared=True, size=2**31 + 16 * row).view(-1, 2, 2 * 64)
    others[first : first + 15] = partials  # mostly a hole in a file
    own, rows = torch.randn(1, 5, 2, 2 * 64), torch.arange(5)
    sources = torch.stack([rows, first + rows, torch.full_like(rows, 5), torch.full_like(rows, 3)])
    dk, dv = torch.full((2, 1, 5, 2, 64), torch.nan)
    Emulator().load("gather_scatter").collect(own, others, sources, dk, dv)
    assert torch.equal(torch.cat((dk, dv), 3), own + partials[:5] + partials[5:10] + partials[10:])


@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (192, 128)], ids=str)
def test_to_the_peers(widths: tuple[int, int]) -> None:
    """K and V from strided views to their places, as `api.publish` does it head by head; nothing else is written."""
    torch.manual_seed(widths[0])
    k, v = (torch.randn(2, 50, 5, width, dtype=torch.bfloat16)[:, 7:44, 2:] for width in widths)
    line, area_rows = sum(widths), 40
    first = [0, 2 * area_rows * line, 2 * area_rows * line + line]  # sections of one head and of two
    lines = torch.tensor([[at, step] for at, step in zip(first, (line, 2 * line, 2 * line), strict=True)])
    there = torch.cat([torch.arange(20), torch.arange(23, 40)]).int()
    areas = torch.full((2, 3 * 2 * area_rows * line), torch.nan, dtype=torch.bfloat16)
    publish("reference", k, v, areas[0], lines, there, area_rows)
    publish("reference", *(x.to("meta") for x in (k, v, areas[0], lines, there)), area_rows)  # no value on the host
    Emulator().load("gather_scatter").publish(k, v, areas[1], lines, there, area_rows)
    assert torch.equal(areas[0].nan_to_num(), areas[1].nan_to_num())
    assert int(areas[1].isfinite().sum()) == k.numel() + v.numel()
    assert torch.equal(areas[0].view(3, -1)[0].view(2, area_rows, line)[:, there.long(), widths[0] :], v[:, :, 0])
