"""The FP8 backward kernels on the CPU emulator, against their specification. CPU.

What differs from the specification is the order of sums, and roundings of what is between two values of e4m3. The
grid is thin: every mask at head_dim 64, head_dim 128 and groups of heads with a few.
"""

import pytest
import torch

from ringflash_kernels import fp8_reference
from ringflash_kernels.mask import Mask, Region
from tests.emulator.emulator import Emulator
from tests.emulator.host import cuda_properties
from tests.emulator.oracle import MASKS, is_caught
from tests.helpers.mask_oracle import Shape, inputs
from tests.helpers.nan_reach import PLACES, check_reach, plant

_CAUSAL = MASKS["causal, ragged"]
_NAMES = ("dq", "dk", "dv")


def _gradients(
    mask: Mask,
    shape: Shape,
    products: str,
    *,
    emulator: Emulator | None = None,
    stored: torch.dtype | None = None,
    with_dlse: bool = False,
    whole_groups: bool = False,
    promote: int = 128,
    num_sms: int = 2,
):
    """dq, dk, dv of the kernels and of the specification: added to, or overwritten in the dtype `stored`."""
    q, k, v, dout = inputs(mask, shape)
    generator = torch.Generator().manual_seed(1)
    dlse = torch.randn(*q.shape[:1], shape.num_heads, mask.seqlen_q, generator=generator) if with_dlse else None
    module = (emulator or Emulator()).load("fp8.backward")
    module._PROMOTE = promote
    if whole_groups:
        module.host._MANY_TILES = module.host.SMS = 1
    results = []
    for run in _passes(module, q, k, v, dout, mask, products, dlse):
        dk, dv = (torch.full(x.shape, 0.5, dtype=stored or torch.float32) for x in (k, v))
        with cuda_properties(num_sms):
            run.add(k, v, mask, dk, dv, accumulate=stored is None)
        results.append((run.finish(), dk, dv))
    return results


def _passes(module, q, k, v, dout, mask: Mask, products: str, dlse=None, num_keys: int | None = 0) -> list:
    """Begin a backward by the kernels, and by the specification; out and lse are the latter's."""
    module.quantise_kv, scale = fp8_reference.quantise_kv, q.shape[-1] ** -0.5
    out, (lse, row_max) = torch.empty_like(q), torch.empty(2, q.shape[0], q.shape[2], q.shape[1])
    fp8_reference.forward(q, k, v, mask, scale, out=out, lse=lse, row_max=row_max)
    options: dict = {"num_kv_heads": k.shape[2], "softmax_scale": scale, "products": products, "row_max": row_max}
    if dlse is not None:
        options["dlse"] = dlse
    return [
        module.Fp8Backward(dout, q, out, lse, num_keys=num_keys, **options),
        fp8_reference.Fp8ReferenceBackward(dout, q, out, lse, **options),
    ]


def _assert_equal(got, want, limit: float = 4e-3) -> None:
    """Compare by the error's share of each gradient's norm."""
    for name, x, y in zip(_NAMES, got, want, strict=False):
        x, y = x.double(), y.double()
        assert x.isfinite().all(), name
        assert (x - y).norm() <= limit * y.norm() + 1e-6, (name, float((x - y).norm() / y.norm()))


@pytest.mark.parametrize("products", ["fp8_scores", "fp8"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks(mask, products):
    _assert_equal(*_gradients(mask, Shape(), products))


@pytest.mark.parametrize("head_dim, products", [(128, "fp8_scores"), (128, "fp8"), (256, "fp8")])
@pytest.mark.parametrize("mask", ["causal, ragged", "documents"])
def test_wide_heads(mask, head_dim, products):
    _assert_equal(*_gradients(MASKS[mask], Shape(head_dim), products))


@pytest.mark.parametrize("mask", [name for name in MASKS if name not in ("causal, ragged", "documents")])
def test_masks_of_head_dim_256(mask):
    _assert_equal(*_gradients(MASKS[mask], Shape(256), "fp8"))


@pytest.mark.parametrize("num_keys", [None, 300])
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_size_of_dq(size, num_keys):
    """Neither sum of dQ overflows or rounds to 0, with one outlier and equal keys whose sums are the largest ones."""
    mask = Mask.full(200, 300)
    q, k, v, dout = inputs(mask, Shape())
    k[:, 100:] = k[:, 100:101]
    v[0, 150, :, 3] = 50.0
    k, v, dout = k / size, v * size, dout * size
    run, want = _passes(Emulator().load("fp8.backward"), q * size, k, v, dout, mask, "fp8", num_keys=num_keys)
    for x in (run, want):
        x.add(k, v, mask, *torch.zeros(2, *k.shape))
    _assert_equal([run.finish()], [want.finish()])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal, ragged", "rectangle inside"])
@pytest.mark.parametrize("stored", [None, torch.bfloat16], ids=["added", "bf16"])
def test_products_in_bf16(mask, head_dim, stored):
    _assert_equal(*_gradients(MASKS[mask], Shape(head_dim), "bf16", stored=stored))


@pytest.mark.parametrize("products", fp8_reference.PRODUCTS)
@pytest.mark.parametrize("num_heads", [1, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_stored_gradients(stored, products, num_heads):
    """Also of keys that no row sees, within the rectangle or outside of it."""
    shape = Shape(64, num_heads, batch=2)
    unseen_tile = Mask.of(200, 500, [Region(0, 100, 0, 100), Region(100, 200, 300, 500)])
    for mask in (MASKS["rectangle inside"], unseen_tile, MASKS["nothing"]):
        _assert_equal(*_gradients(mask, shape, products, stored=stored))


@pytest.mark.parametrize("products", fp8_reference.PRODUCTS)
def test_gradient_through_lse(products):
    mask = MASKS["causal, rows that see nothing"]
    _assert_equal(*_gradients(mask, Shape(), products, with_dlse=True))


@pytest.mark.parametrize("promote, head_dim", [(2, 64), (4, 64), (2, 256)])
@pytest.mark.parametrize("stored", [None, torch.float32, torch.bfloat16], ids=["added", "fp32", "bf16"])
def test_sums_that_leave_the_tensor_cores(stored, promote, head_dim):
    """dK and dV move to fp32 every few blocks, also between the heads of a group, and where they are overwritten."""
    shape = Shape(head_dim, 4, 2)
    results = _gradients(MASKS["wide window"], shape, "fp8", stored=stored, whole_groups=True, promote=promote)
    _assert_equal(*results)


@pytest.mark.parametrize("products, head_dim", [("fp8_scores", 64), ("fp8", 64), ("fp8", 256)])
def test_interleavings(products, head_dim):
    """Partitions, blocks and copies in other orders give the same gradients."""
    for seed in range(1, 4):
        for stored in (None, torch.bfloat16):  # the latter draws its tiles from a counter
            options: dict = dict(emulator=Emulator(seed, resident=3), stored=stored, num_sms=3)
            _assert_equal(*_gradients(_CAUSAL, Shape(head_dim), products, **options))


@pytest.mark.parametrize("head_dim, products", [*((64, x) for x in fp8_reference.PRODUCTS), (256, "fp8")])
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("zeros", [slice(220, 230), slice(200, 256)], ids=["some", "all"])
def test_nan_reaches_every_gradient_that_depends_on_it(zeros, place, head_dim, products):
    """Also if dO is 0 in some or all of the rows that see it; out and lse are the specification's."""
    mask, shape, row = Mask.documents([0, 128, 256]), Shape(head_dim), 200
    q, k, v, dout = inputs(mask, shape)
    dout[0, zeros] = 0.0
    plant(place, row, q, k, v, dout)
    run, _ = _passes(Emulator().load("fp8.backward"), q, k, v, dout, mask, products)
    dk, dv = torch.zeros(2, *k.shape)
    with cuda_properties(num_sms=2):
        run.add(k, v, mask, dk, dv)
    check_reach(mask, place[0], row, {"dq": run.finish(), "dk": dk, "dv": dv})
    assert dk[0, :128].isfinite().all() and dv[0, :128].isfinite().all()


# (module, source text, what replaces it)
FAULTS = {
    "transposed queries in another order": ("fp8.backward_operands", "position // 2 % 2 * 8", "position // 2 % 2 * 4"),
    "the scale of the block before": ("fp8.backward_keys", "scale_ptr + block", "scale_ptr"),
    "gain of dS is not undone": ("fp8.backward_operands", "k_scale * gain", "k_scale"),
    "phase of dS is inverted": (
        "fp8.backward_keys",
        "(sm.ds_full.index(last), last_parity)",
        "(sm.ds_full.index(last), last_parity ^ 1)",
    ),
    "staging buffers are overwritten while they leave": ("fp8.backward_keys", "tma_store_wait(0)", "pass"),
    "proxy fences are missing": ("fp8.backward_keys", "fence_async_shared()", "pass"),
}
FAULTS_OF_HEAD_DIM_256 = {
    "P is overwritten before it is read": ("fp8.backward_wide", "mbarrier.wait(sm.p_empty.index(0)", "(0"),
    "dK in the place of dV": ("fp8.backward_wide", "tile_ptr + 4 - W", "tile_ptr + 3 + W"),
    "the largest scale of another head": ("fp8.backward_queries", "batch_kv_head * 8 + 7", "batch_kv_head * 8 + 6"),
    "keys of dQ in another order": ("fp8.backward_operands", 'MODE == "fp8" and D == 256:  # KEY', "False:  # KEY"),
}  # fmt: skip


@pytest.mark.parametrize(
    "fault, head_dim",
    [*((x, 64) for x in FAULTS.values()), *((x, 256) for x in FAULTS_OF_HEAD_DIM_256.values())],
    ids=[*FAULTS, *FAULTS_OF_HEAD_DIM_256],
)
def test_planted_faults_are_caught(fault, head_dim):
    def check(mask: Mask, emulator: Emulator) -> None:
        _assert_equal(*_gradients(mask, Shape(head_dim), "fp8", emulator=emulator))

    assert is_caught(fault, _CAUSAL, check)


@pytest.mark.parametrize(
    "products, num_keys, head_dim",
    [("fp8_scores", None, 64), ("fp8", None, 64), ("fp8", 300, 64), ("fp8", None, 256), ("fp8", 300, 256)],
)
def test_hops_add_up(products, num_keys, head_dim):
    """Keys in three hops give the gradients of one call; dQ in fp16 changes its unit at the second one."""
    mask, shape = Mask.band(200, 300, causal=True), Shape(head_dim)
    q, k, v, dout = inputs(mask, shape)
    v[:, 128:] *= 100
    run, whole = _passes(Emulator().load("fp8.backward"), q, k, v, dout, mask, products, num_keys=num_keys)
    assert (run._pass.dq.dtype == torch.float16) == (num_keys is not None)
    dk, dv, whole_dk, whole_dv = torch.zeros(4, *k.shape)
    for start, stop in ((0, 128), (128, 256), (256, 300)):
        hop = Mask.of(200, stop - start, [Region(0, 200, 0, stop - start, upper=100 - start)])
        with cuda_properties(num_sms=2):
            run.add(*(x[:, start:stop] for x in (k, v)), hop, dk[:, start:stop], dv[:, start:stop])
    whole.add(k, v, mask, whole_dk, whole_dv)
    _assert_equal((run.finish(), dk, dv), (whole.finish(), whole_dk, whole_dv))


@pytest.mark.parametrize("mask", ["causal, ragged", "documents", "rectangle inside", "causal, rows that see nothing"])
@pytest.mark.parametrize("resume", [False, True])
def test_largest_scores(mask, resume):
    """The forward keeps a bound of each row's largest score that is at most a factor of two above."""
    mask, shape = MASKS[mask], Shape()
    q, k, v, _ = inputs(mask, shape)
    operands = fp8_reference.quantise_q(q), fp8_reference.quantise_kv(k, v, for_backward=False)
    exact, got = (torch.full((1, 2, mask.seqlen_q), 0.5) for _ in range(2))
    state = {"out": torch.zeros(q.shape), "lse": torch.zeros(exact.shape)}
    acc = torch.zeros(q.shape) if resume else None
    fp8_reference.forward_rows(*operands, mask, shape.scale, acc=acc, row_max=exact, **state)
    with cuda_properties(num_sms=2):
        Emulator().load("fp8.forward").forward(*operands, mask, shape.scale, acc=acc, row_max=got, num_sms=2, **state)
    empty = exact == -torch.inf
    assert torch.equal(got == -torch.inf, empty)
    above = (got - exact)[~empty]
    assert above.min() >= -1e-5 and above.max() <= 0.7
