"""Time of one rank's kernels for a million tokens, in blocks of keys and by sections of heads; messages left out.

    python benchmarks/studies/bench_blocks.py [--json results.json]          (one Hopper GPU, half a minute)

A call runs as it would over NCCL, with its copies and sums, but nothing is sent: K/V are random numbers. The first rank
of a zigzag has the shortest rows for a kernel to work on: half of its tokens see all keys, the others few.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from benchmarks.environment import describe  # noqa: E402
from ringflash.attention import schedule, sections  # noqa: E402
from ringflash.attention.gather_by_heads import HeadGather  # noqa: E402
from ringflash.attention.inputs import BackwardInputs  # noqa: E402
from ringflash.attention.schedule import Gathering  # noqa: E402
from ringflash.comm.transport import NcclGather, Pending, PointToPoint, buffers  # noqa: E402
from ringflash.sequence.mask import SequenceMask  # noqa: E402

T = TypeVar("T")
SEQLEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, ROUNDS = 1 << 20, 32, 8, 128, 3


def main() -> None:
    """Print TFLOP/s of forward and backward for each number of tokens a GPU and rank; write them to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for tokens in (1024, 2048, 4096, 16384):
        for rank in (0, SEQLEN // tokens // 2):
            rows.append(measure(tokens, rank))
            if options.json:  # after each, since a time limit may end the run
                result = {"environment": describe(), "seqlen": SEQLEN, "rows": rows}
                options.json.write_text(json.dumps(result, indent=1))


def measure(tokens: int, rank: int) -> dict[str, Any]:
    """Return TFLOP/s of one rank's forward and backward, by way; all ways take turns."""
    cp_size, mask, shape = SEQLEN // tokens, SequenceMask(SEQLEN), (1, tokens, NUM_KV_HEADS, HEAD_DIM)
    whole = schedule.plan_gather(mask, cp_size, rank, "zigzag")
    sizes = sections.choose_blocks(
        shape, NUM_HEADS, whole.capacity, whole.returned_rows, whole.pairs, cp_size, torch.bfloat16, "nccl"
    )
    blocks = schedule.plan_blocks(mask, cp_size, rank, "zigzag", sizes)
    calls = {"in blocks": call(blocks, rank), "by sections": call((whole,), rank)}
    q, dout = (torch.randn(1, tokens, NUM_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in calls}
    for _ in range(1 + ROUNDS):  # the first allocates, and is left out
        for way, attention in calls.items():
            for _ in range(2):  # a sample follows one of its own way: a cool GPU is a fifth faster
                seconds = sample(attention, dout, q, k, v)
            samples[way].append(seconds)
        fill_buffers()
    flops = 4 * NUM_HEADS * HEAD_DIM * whole.mask.num_visible / 1e12
    result: dict[str, Any] = {"tokens": tokens, "rank": rank, "blocks": sizes}
    for way, times in samples.items():
        forward, backward = (sorted(column)[ROUNDS // 2] for column in zip(*times[1:], strict=True))
        result[way] = {"forward": flops / forward, "backward": 2.5 * flops / backward}
    parts = (f"{way} {result[way]['forward']:.0f} / {result[way]['backward']:.0f}" for way in calls)
    print(f"{tokens} tokens, rank {rank} of {cp_size}, TFLOP/s: {'; '.join(parts)}", flush=True)
    for attention in calls.values():
        cast(NcclGather, attention.memory).release()
    buffers.release_buffers()
    return result


def call(blocks: tuple[Gathering, ...], rank: int) -> HeadGather:
    """Return a call over messages that are not sent."""
    channel = SimpleNamespace(name="gloo", rank=rank, group=None, post=lambda *_: Pending([]), num_posted=0, members=())
    memory = NcclGather(cast(PointToPoint, channel), torch.device("cuda", 0))
    return HeadGather(blocks, memory, "hopper", HEAD_DIM**-0.5, deterministic=False)


def fill_buffers() -> None:
    """Let random numbers arrive, since the power of products depends on them."""
    for (_, name), storage in buffers._storage.items():
        if name.startswith("kv."):
            storage.view(torch.bfloat16).normal_()


def sample(attention: HeadGather, *inputs: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of a forward and a backward."""
    dout, q, k, v = inputs
    out, forward = timed(lambda: attention.forward(q, k, v))
    _, backward = timed(lambda: attention.backward(BackwardInputs(dout, None, q, k, v, *out)))
    return forward, backward


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of some work and the seconds that the GPU takes for it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = work()
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end) / 1000


if __name__ == "__main__":
    main()
