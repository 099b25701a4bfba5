"""All hops of a ring on the emulated Hopper kernels, against fp64 attention of the whole sequence. CPU, one process.

The ring's calls, rank after rank: the state continued from hop to hop in fp32 and cast on the last, gradients of a
hop into fp32 buffers of their own that the owner adds up. Messages are left out: a source's K/V are its shard.
"""

from __future__ import annotations

import pytest
import torch

from ringflash.attention.schedule import build
from ringflash.sequence.layout import local_positions
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.mask import Mask
from tests.emulator.emulator import Emulator
from tests.emulator.host import cuda_properties
from tests.emulator.oracle import Shape, inputs, oracle_and_baseline
from tests.helpers.tolerance import assert_close

MASKS = {
    "causal": SequenceMask(264),
    "full": SequenceMask(264, causal=False),
    "causal, window": SequenceMask(264, window_size=(90, 0)),
    "documents": SequenceMask(264, cu_seqlens=(0, 1, 60, 70, 200, 264)),
    "documents, window": SequenceMask(264, causal=False, window_size=(50, 20), cu_seqlens=(0, 100, 264)),
}
SHAPE = Shape(64, 2, 1)


@pytest.mark.parametrize("cp_size, layout", [(2, "zigzag"), (3, "zigzag"), (2, "contiguous")])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_hops_of_a_schedule(mask: SequenceMask, cp_size: int, layout: str) -> None:
    whole = Mask.documents(mask.bounds, causal=mask.causal, window_size=mask.window_size)
    q, k, v, dout = inputs(whole, SHAPE)
    exact, baseline = oracle_and_baseline(q, k, v, whole, SHAPE.scale, dout=dout)
    rows = [local_positions(mask.seqlen, cp_size, rank, layout) for rank in range(cp_size)]
    got = {name: torch.full_like(exact[name], torch.nan) for name in exact}
    gradients = [torch.zeros(2, 1, len(rows[0]), SHAPE.num_kv_heads, SHAPE.head_dim) for _ in rows]
    for rank, mine in enumerate(rows):
        hops = [hop for hop in build(mask, cp_size, rank, layout).hops if hop.source is not None]
        shards = [(k[:, rows[hop.source]], v[:, rows[hop.source]]) for hop in hops]
        out, lse = _forward(q[:, mine], shards, [hop.mask for hop in hops])
        run = (
            Emulator()
            .load("backward.host")
            .HopperBackward(dout[:, mine], q[:, mine], out, lse, softmax_scale=SHAPE.scale)
        )
        for hop, (keys, values) in zip(hops, shards, strict=True):
            partial = torch.zeros_like(gradients[0])
            run.add(keys, values, hop.mask, partial[0], partial[1])
            gradients[hop.source] += partial
        got["out"][:, mine], got["lse"][..., mine], got["dq"][:, mine] = (
            out.double(),
            lse.double(),
            run.finish().double(),
        )
    for mine, (dk, dv) in zip(rows, gradients, strict=True):
        got["dk"][:, mine], got["dv"][:, mine] = dk.double(), dv.double()
    assert_close(got, exact, baseline, num_chunks=2 * cp_size)


def _forward(
    q: torch.Tensor, shards: list[tuple[torch.Tensor, torch.Tensor]], masks: list[Mask]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over all hops, as `ring.forward` calls the kernel."""
    kernel = Emulator().load("forward.host").forward
    out, carried = torch.full(q.shape, torch.nan, dtype=q.dtype), torch.full(q.shape, torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    for index, ((keys, values), mask) in enumerate(zip(shards, masks, strict=True)):
        target = out if index == len(masks) - 1 else carried
        acc = None if index == 0 else carried
        with cuda_properties(2):
            kernel(q, keys, values, mask, SHAPE.scale, out=target, lse=lse, acc=acc)
    return out, lse
