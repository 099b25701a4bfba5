"""Masks and shapes to try, and faults that must be seen. Inputs and the oracle are in tests/helpers/mask_oracle.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch

from ringflash_kernels.mask import Mask, Region
from tests.emulator.emulator import EmulationError, Emulator
from tests.helpers.mask_oracle import Shape

MASKS = {
    "full": Mask.full(128, 256),
    "full, ragged": Mask.full(70, 201),
    "causal": Mask.band(256, 256, causal=True),
    "causal, ragged": Mask.band(190, 190, causal=True),
    "causal, fewer queries": Mask.band(65, 300, causal=True),
    "causal, rows that see nothing": Mask.band(290, 140, causal=True),
    "window": Mask.band(330, 330, causal=True, window_size=(70, 0)),
    "wide window": Mask.band(400, 500, causal=True, window_size=(290, 0)),
    "window to both sides": Mask.band(200, 260, window_size=(33, 60)),
    "one row": Mask.band(1, 131, causal=True),
    "three keys": Mask.full(67, 3),  # a single key has gradients of exactly 0, which leaves no error budget
    "documents": Mask.documents([0, 5, 135, 136, 300]),
    "documents, not causal, window": Mask.documents([0, 100, 260], causal=False, window_size=(40, 10)),
    "a hop of halves": Mask.of(256, 256, [Region(0, 128, 0, 128, upper=0), Region(128, 256, 0, 256, upper=0)]),
    "zigzag chunks before all keys": Mask.of(
        200, 400, [Region(0, 100, 0, 200, upper=100), Region(100, 200, 0, 400, upper=200)]
    ),
    "lower half of the queries, upper of the keys": Mask.of(260, 320, [Region(130, 260, 0, 160)]),
    "rectangle inside": Mask.of(210, 333, [Region(33, 150, 70, 290, -10, 120)]),
    "nothing": Mask.of(130, 70, []),
}


SHAPES = [
    Shape(96, 2, 2), Shape(128, 4, 1), Shape(192, 2, 1), Shape(192, 2, 1, value_dim=128),
    Shape(256, 2, 2, dtype=torch.float16), Shape(64, 4, 2, batch=2), Shape(64, 6, 1, dtype=torch.float16),
]  # fmt: skip


def random_problem(seed: int) -> tuple[Mask, Shape]:
    """A mask and a shape from a seeded generator: bands, windows, documents and rectangles of odd sizes."""
    rng = random.Random(seed)
    seqlen_q, seqlen_k = rng.randint(1, 300), rng.randint(2, 300)
    window = (rng.randint(0, 200), rng.choice((-1, rng.randint(0, 60))))
    starts = sorted(rng.sample(range(1, seqlen_k), min(rng.randint(1, 5), seqlen_k - 1)))
    mask = rng.choice(
        (
            Mask.band(seqlen_q, seqlen_k, causal=True),
            Mask.band(seqlen_q, seqlen_k, causal=rng.random() < 0.5, window_size=window),
            Mask.documents([0, *starts, seqlen_k], causal=rng.random() < 0.7),
            Mask.of(
                seqlen_q, seqlen_k, [Region(seqlen_q // 3, seqlen_q, seqlen_k // 5, seqlen_k, None, rng.randint(0, 99))]
            ),
        )
    )
    num_kv_heads, group = rng.randint(1, 2), rng.randint(1, 3)
    dtype = rng.choice((torch.bfloat16, torch.float16))
    return mask, Shape(
        rng.choice((64, 96, 128, 192, 256)), num_kv_heads * group, num_kv_heads, rng.randint(1, 2), dtype
    )


def far_apart(x: torch.Tensor, path: Path) -> torch.Tensor:
    """A copy of x whose first dimension is so strided that the last offsets pass 32 bits; mostly a hole in a file."""
    stride = 2**31 // (x.shape[0] - 1)
    stride += -stride % 64
    count = stride * (x.shape[0] - 1) + x[0].numel()
    storage = torch.from_file(str(path), shared=True, size=count, dtype=x.dtype)
    copy = storage.as_strided(x.shape, (stride, *torch.empty(x.shape[1:], device="meta").stride()))
    return copy.copy_(x)


def is_caught(fault: tuple[str, str, str], mask: Mask, check: Callable[[Mask, Emulator], None]) -> bool:
    """Return whether a check, or the emulator, sees the fault in one of a few interleavings."""
    mask = Mask(mask.seqlen_q, mask.seqlen_k, mask.regions)  # keeps nothing that was made without the fault, or with
    for seed in range(3):
        try:
            check(mask, Emulator(seed, faults=[fault]))
        except (AssertionError, EmulationError):
            return True
    return False
