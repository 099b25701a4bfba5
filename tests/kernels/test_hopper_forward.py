"""The Hopper forward kernel against the fp64 reference: masks, head sizes, strides, resuming, repeats.

Runs on one GPU of compute capability 9.0, skipped elsewhere. Masks are crossed with every head size in bf16 and
with one in fp16 (the kernels differ in nothing else there); lengths straddle the tiles of 128 and 192 rows and of
64 and 128 keys, and random masks and shapes from a seeded generator cover what the list forgets. A first run
compiles about a hundred variants: some four minutes, or half a minute in 14 processes (`-n 14`).
"""

from __future__ import annotations

import random

import pytest
import torch

from ringflash.testing.tolerance import assert_close
from ringflash_kernels.mask import Mask, Region
from tests.helpers.mask_oracle import Shape, inputs, oracle_and_baseline
from tests.two_sided import kernel_masks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]

MASKS = {
    "full": Mask.full(768, 1024),
    "full, ragged": Mask.full(300, 517),
    "causal": Mask.band(1024, 1024, causal=True),
    "causal, ragged": Mask.band(701, 701, causal=True),
    "causal, fewer queries": Mask.band(65, 900, causal=True),
    "causal, rows that see nothing": Mask.band(690, 340, causal=True),
    "window": Mask.band(1330, 1330, causal=True, window_size=(370, 0)),
    "window to both sides": Mask.band(900, 860, window_size=(133, 160)),
    "window narrower than a block": Mask.band(500, 500, causal=True, window_size=(3, 0)),
    "one row": Mask.band(1, 1131, causal=True),
    "three keys": Mask.full(67, 3),
    "documents": Mask.documents([0, 5, 135, 136, 300, 1001]),
    "documents, not causal, window": Mask.documents([0, 600, 860, 900], causal=False, window_size=(140, 110)),
    "a hop of halves": Mask.of(512, 512, [Region(0, 256, 0, 256, upper=0), Region(256, 512, 0, 512, upper=0)]),
    "lower half of the queries, upper of the keys": Mask.of(660, 820, [Region(330, 660, 0, 400)]),
    "rectangle inside": Mask.of(610, 633, [Region(133, 450, 170, 590, -110, 220)]),
    "nothing": Mask.of(130, 70, []),
    **kernel_masks.MASKS,
}
HEAD_DIMS = (64, 96, 128, 192, 256)
NUM_CHUNKS = 4


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, head_dim: int) -> None:
    check(MASKS[name], head_dim=head_dim)


@pytest.mark.parametrize("name", ["full, ragged", "causal, ragged", "documents"])
def test_half_precision(name: str) -> None:
    check(MASKS[name], head_dim=128, dtype=torch.float16)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (8, 8), (6, 2), (7, 1), (32, 8)])
def test_heads(num_heads: int, num_kv_heads: int) -> None:
    check(MASKS["causal, ragged"], num_heads=num_heads, num_kv_heads=num_kv_heads, batch=1)


@pytest.mark.parametrize("num_sms", [1, 7, 100])
def test_any_number_of_sms(num_sms: int) -> None:
    check(MASKS["causal, ragged"], num_sms=num_sms, batch=3)


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(seed: int) -> None:
    chance = random.Random(seed)
    seqlen_q, seqlen_k = chance.randint(1, 900), chance.randint(1, 900)
    kv_heads, group = chance.randint(1, 3), chance.randint(1, 4)
    window = (chance.choice((-1, chance.randint(0, 400))), chance.choice((-1, chance.randint(0, 400))))
    mask = Mask.band(seqlen_q, seqlen_k, causal=chance.random() < 0.5, window_size=window)
    if chance.random() < 0.4:
        cuts = sorted(chance.sample(range(1, 900), chance.randint(1, 6)))
        mask = Mask.documents([0, *cuts, 900], causal=chance.random() < 0.5, window_size=window)
    check(
        mask, head_dim=chance.choice(HEAD_DIMS), dtype=chance.choice((torch.bfloat16, torch.float16)),
        num_heads=kv_heads * group, num_kv_heads=kv_heads, batch=chance.randint(1, 3),
        num_sms=chance.choice((None, chance.randint(1, 132))), seed=seed,
    )  # fmt: skip


def test_transposed_storage() -> None:
    """(batch, num_heads, seqlen, head_dim) in memory: strides the other way round, no copies."""
    mask = MASKS["causal, ragged"]
    q, k, v = (torch.randn(2, 4, 701, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    out, lse = fresh(q, k, v, mask, out=torch.full_like(q, float("nan")))
    assert_right(out, lse, q, k, v, mask)


def test_results_go_into_views_and_nowhere_else() -> None:
    mask = MASKS["causal, ragged"]
    q, k, v = draw(mask)
    canvas = torch.full((2, 800, 6, 128), 7.0, device="cuda", dtype=q.dtype)
    lse_canvas = torch.full((2, 4, 800), 7.0, device="cuda")
    out, lse = fresh(q, k, v, mask, out=canvas[:, 50:751, 1:5], lse=lse_canvas[:, :, 50:751])
    assert_right(out, lse, q, k, v, mask)
    canvas[:, 50:751, 1:5] = 7.0
    lse_canvas[:, :, 50:751] = 7.0
    assert (canvas == 7.0).all() and (lse_canvas == 7.0).all()


def test_rows_that_see_nothing_keep_their_state() -> None:
    mask = MASKS["causal, rows that see nothing"]
    q, k, v = draw(mask)
    acc, lse = torch.randn(q.shape, device="cuda"), torch.randn(2, 4, 690, device="cuda")
    kept, kept_lse = acc[:, :350].clone(), lse[:, :, :350].clone()
    last = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    fresh(q, k, v, mask, out=last, lse=lse.clone(), acc=acc)
    fresh(q, k, v, mask, out=acc, lse=lse, acc=acc)
    assert torch.equal(acc[:, :350], kept) and torch.equal(lse[:, :, :350], kept_lse)
    assert torch.equal(last[:, :350], kept.to(q.dtype))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_repeats_are_equal_bit_by_bit(head_dim: int) -> None:
    mask = MASKS["window"]
    q, k, v = draw(mask, head_dim=head_dim)
    first = fresh(q, k, v, mask)
    for num_sms in (None, 3):
        again = fresh(q, k, v, mask, num_sms=num_sms)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_captured_hop_replays() -> None:
    mask = MASKS["causal, ragged"]
    q, k, v = draw(mask)
    want = fresh(q, k, v, mask)
    out, lse = torch.empty_like(want[0]), torch.empty_like(want[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(q, k, v, mask, 128**-0.5, out=out, lse=lse)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_a_dropped_hop_is_noticed() -> None:
    """The tolerance would see a merge that did not happen."""
    mask = MASKS["full, ragged"]
    q, k, v = draw(mask)
    out, lse = fresh(q, k[:, :400], v[:, :400], Mask.full(300, 400))
    with pytest.raises(AssertionError):
        assert_right(out, lse, q, k, v, mask)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    q, k, v = draw(MASKS["full"])
    with pytest.raises(ValueError, match="softmax_scale must be positive"):
        forward(q, k, v, MASKS["full"], scale, out=torch.empty_like(q), lse=torch.empty(2, 4, 768, device="cuda"))


def shape_of(**sizes) -> Shape:
    return Shape(**{"head_dim": 128, "num_heads": 4, "num_kv_heads": 2, "batch": 2, **sizes})


def draw(mask: Mask, seed: int = 0, **sizes) -> tuple[torch.Tensor, ...]:
    """q, k and v on the GPU."""
    return inputs(mask, shape_of(**sizes), seed=seed, device="cuda")[:3]


def assert_right(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | torch.Tensor
) -> None:
    found = {"out": out, "lse": lse}
    assert_close(found, *oracle_and_baseline(q, k, v, mask, q.shape[-1] ** -0.5), num_chunks=NUM_CHUNKS)


def check(mask: Mask, *, num_sms: int | None = None, seed: int = 0, **sizes) -> None:
    """One call, and the same queries over two sets of keys: into fp32, then on in place and into the final dtype."""
    q, k, v = draw(mask, seed, **sizes)
    _, k1, v1 = draw(mask, seed + 1000, **sizes)
    assert_right(*fresh(q, k, v, mask, num_sms=num_sms), q, k, v, mask)

    acc, lse = fresh(q, k, v, mask, out=torch.full(q.shape, float("nan"), device="cuda"), num_sms=num_sms)
    assert_right(acc, lse, q, k, v, mask)
    out, last_lse = fresh(q, k1, v1, mask, lse=lse.clone(), acc=acc, num_sms=num_sms)
    acc, lse = fresh(q, k1, v1, mask, out=acc, lse=lse, acc=acc, num_sms=num_sms)
    visible = mask.dense("cuda")
    both = torch.cat([k, k1], 1), torch.cat([v, v1], 1), torch.cat([visible, visible], 1)
    assert_right(out, last_lse, q, *both)
    assert_right(acc, lse, q, *both)
    assert torch.equal(acc.to(out.dtype), out) and torch.equal(lse, last_lse)


def forward(*args, **kwargs) -> None:
    """The kernel; imported late, since triton's driver needs a GPU."""
    from ringflash_kernels.hopper.forward.host import forward as hopper_forward

    hopper_forward(*args, **kwargs)


def fresh(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, *, out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, **options,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A call whose results start as NaN where the test does not give them."""
    nan = float("nan")
    out = torch.full(q.shape, nan, device="cuda", dtype=q.dtype) if out is None else out
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), nan, device="cuda") if lse is None else lse
    forward(q, k, v, mask, q.shape[-1] ** -0.5, out=out, lse=lse, **options)
    return out, lse
