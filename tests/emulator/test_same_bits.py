"""Bits of the production kernels on 2, 4 and 8 ranks that gather K/V by heads, against one launch. CPU, emulated.

Each rank's launch is emulated from its own rows and the keys that it gathers, in fp32 outputs. docs/numerics.md says
what follows.
"""

import math

import pytest
import torch

import ringflash
from ringflash.attention import schedule
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.mask import Mask
from tests.emulator.emulator import Emulator
from tests.emulator.host import cuda_properties
from tests.helpers.mask_oracle import Shape, inputs

LENGTH = 512


def _launch(q, k, v, dout, mask, shape) -> dict[str, torch.Tensor]:
    """out, lse and dq of one deterministic launch, and its part of dk and dv."""
    emulator = Emulator()
    out, lse = torch.full(dout.shape, math.nan), torch.full((1, q.shape[2], q.shape[1]), math.nan)
    with cuda_properties(2):
        emulator.load("forward.host").forward(q, k, v, mask, shape.scale, out=out, lse=lse, num_sms=2)
        backward = emulator.load("backward.host").HopperBackward(
            dout, q, out.to(q.dtype), lse, softmax_scale=shape.scale, deterministic=True
        )
        dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
        backward.add(k, v, mask, dk, dv)
        dq = backward.finish()
    return {"out": out, "lse": lse.transpose(1, 2), "dq": dq, "dk": dk, "dv": dv}


def _equal(shape: Shape, whole: SequenceMask, single: Mask, cp_size: int, layout: str) -> set[str]:
    """Names of the results that have equal bits; dk and dv are the sum of the ranks' parts, in fp32."""
    q, k, v, dout = inputs(single, shape)
    want = _launch(q, k, v, dout, single, shape)
    sums = {"dk": torch.zeros(k.shape), "dv": torch.zeros(v.shape)}
    same = set(want)
    for rank in range(cp_size):
        block = schedule.plan_single_block(whole, cp_size, rank, layout)
        keys = torch.full((block.num_rows,), -1)
        for segment in block.segments:
            owned = ringflash.local_positions(LENGTH, cp_size, segment.owner, layout)
            keys[segment.row : segment.row + segment.size] = owned[segment.start : segment.start + segment.size]
        rows = ringflash.local_positions(LENGTH, cp_size, rank, layout)
        got = _launch(q[:, rows], k[:, keys], v[:, keys], dout[:, rows], block.mask, shape)
        same -= {name for name in ("out", "lse", "dq") if not torch.equal(got[name], want[name][:, rows])}
        for name, total in sums.items():
            total[:, keys] += got[name]
    return same - {name for name, total in sums.items() if not torch.equal(total, want[name])}


@pytest.mark.parametrize(
    "shape, cp_size, layout",
    [
        (Shape(64), 2, "zigzag"),
        (Shape(64), 8, "zigzag"),
        (Shape(64), 4, "contiguous"),
        (Shape(128), 4, "zigzag"),
        (Shape(192, value_dim=128), 2, "zigzag"),
    ],
    ids=str,
)
def test_causal(shape, cp_size, layout):
    """Rows have the bits of one device, whatever the number of ranks; sums over ranks have not."""
    single = Mask.band(LENGTH, LENGTH, causal=True)
    assert _equal(shape, SequenceMask(LENGTH), single, cp_size, layout) == {"out", "lse", "dq"}


def test_documents():
    """The rows of a tile decide which keys share a block, and so the order of sums: the check can fail."""
    bounds = (0, 70, 200, 201, LENGTH)
    single = Mask.documents(bounds)
    assert _equal(Shape(64), SequenceMask(LENGTH, cu_seqlens=bounds), single, 4, "zigzag") == set()
