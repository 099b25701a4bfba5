"""Time of one rank's kernels for a million tokens, in blocks of keys and by sections of heads; messages left out.

    python benchmarks/bench_blocks.py [--json results.json]          (one Hopper GPU, half a minute)

A call runs as it would over NCCL, with its copies and sums, but nothing is sent: K/V are random numbers. The first rank
of a zigzag has the shortest rows for a kernel to work on: half of its tokens see all keys, the others few.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from benchmarks.environment import describe  # noqa: E402
from ringflash.attention import schedule, sections  # noqa: E402
from ringflash.attention.gather_by_heads import HeadGather  # noqa: E402
from ringflash.attention.schedule import Gathering  # noqa: E402
from ringflash.comm.transport import MessageMemory, Pending, PointToPoint, buffers  # noqa: E402
from ringflash.sequence.mask import SequenceMask  # noqa: E402

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
    """Return TFLOP/s of one rank's forward and backward, in blocks and by sections."""
    cp_size, mask, shape = SEQLEN // tokens, SequenceMask(SEQLEN), (1, tokens, NUM_KV_HEADS, HEAD_DIM)
    whole = schedule.gather(mask, cp_size, rank, "zigzag")
    sizes = sections.choose_blocks(
        shape, NUM_HEADS, whole.capacity, whole.arriving, whole.pairs, cp_size, torch.bfloat16, "nccl"
    )
    result: dict[str, Any] = {"tokens": tokens, "rank": rank, "blocks": sizes}
    ways = {"in blocks": schedule.gather_blocks(mask, cp_size, rank, "zigzag", sizes), "by sections": (whole,)}
    for name, blocks in ways.items():
        forward, backward = time_call(blocks, rank, shape)
        result[name] = {"forward": forward, "backward": backward}
        print(f"{tokens} tokens, rank {rank} of {cp_size}, {name}: {forward:.0f} / {backward:.0f} TFLOP/s", flush=True)
    return result


def time_call(blocks: tuple[Gathering, ...], rank: int, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return TFLOP/s of the forward and the backward."""
    channel = SimpleNamespace(name="gloo", rank=rank, group=None, post=lambda *_: Pending([]), num_posted=0)
    memory = MessageMemory(cast(PointToPoint, channel), torch.device("cuda", 0))
    call = HeadGather(blocks, memory, "hopper", HEAD_DIM**-0.5, deterministic=False)
    q, dout = (torch.randn(1, shape[1], NUM_HEADS, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    call.forward(q, k, v)
    received = [storage for (_, name), storage in buffers._storage.items() if name.startswith("kv.")]
    for storage in [*received, memory._areas["kv"]]:
        storage.view(torch.bfloat16).normal_()
    out, lse = call.forward(q, k, v)
    flops = 4 * NUM_HEADS * HEAD_DIM * sum(block.mask.num_visible for block in blocks) / 1e12
    forward = flops / seconds(lambda: call.forward(q, k, v))
    backward = 2.5 * flops / seconds(lambda: call.backward(dout, None, q, k, v, out, lse))
    memory.release()
    buffers.release_buffers()
    return forward, backward


def seconds(call: Any) -> float:
    """Return the median time of a call, after one that is not timed."""
    call()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[ROUNDS // 2]


if __name__ == "__main__":
    main()
