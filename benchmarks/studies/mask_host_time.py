"""Processor time of the host for a new mask of a million tokens in 10,000 documents, of one rank of eight. No GPU.

    OMP_NUM_THREADS=1 python benchmarks/studies/mask_host_time.py [--json out.json]

plan: the order of the documents, which keys each rank needs, and regions. tables: what the kernels read, forward and
backward. Both are made once for all layers of a step. The least of some repetitions is reported, and the load of the
machine before and after: a busy one has less cache for each process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.bench_two_sided import agents, block_diffusion, forest, images, rollouts
from benchmarks.environment import describe, result_text
from ringflash.attention import schedule
from ringflash.sequence import balanced, layout
from ringflash.sequence import mask as sequence_mask
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.hopper.backward.host import first_keys, hop_of
from ringflash_kernels.hopper.forward.host import tile_table
from ringflash_kernels.hopper.walks import has_begins, limits, walks
from ringflash_kernels.mask import Mask

TOKENS, RANKS, RANK = 1 << 20, 8, 3
CPU = torch.device("cpu")


def padded(mask: SequenceMask) -> SequenceMask:
    """Return the mask with a last document that fills the sequence."""
    bounds, parents, both, counts = mask.bounds, mask.parents, mask.bidirectional, mask.global_tokens
    if bounds[-1] == TOKENS:
        return mask
    return SequenceMask(
        TOKENS,
        window_size=mask.window_size,
        cu_seqlens=(*bounds, TOKENS),
        parents=None if parents is None else (*parents, -1),
        bidirectional=None if both is None else (*both, False),
        global_tokens=None if counts is None else (*counts, 0),
    )


FAMILIES: dict[str, Callable[[], SequenceMask]] = {
    "documents of 104 tokens": lambda: forest([104] * 10_000, [-1] * 10_000),
    "documents of 104 tokens, window of 32, 8 global tokens": lambda: forest(
        [104] * 10_000, [-1] * 10_000, left=31, global_tokens=8
    ),
    "588 x (16 answers of 96 after 240)": lambda: rollouts(588, 240, 16, 96),
    "588 x (16 answers of 96 after 240), window of 128": lambda: rollouts(588, 240, 16, 96, left=127),
    "19 x (512 answers of 96 after 5k)": lambda: rollouts(19, 5000, 512, 96),
    "agent trees, turns of 32 to 256": lambda: agents(TOKENS - 512, shortest=32, longest=256),
    "5,000 images of 64 in text": lambda: images(5_000, 140, 64),
    "block diffusion, blocks of 104": lambda: block_diffusion(5_000, 104),
}


def plan(mask: SequenceMask, name: str) -> Mask:
    """Return the mask of a rank's queries and the keys that it gathers."""
    return schedule.plan_single_block(mask, RANKS, RANK, name).mask


def tables(mask: Mask) -> None:
    """Make the tables of the Hopper kernels at head_dim 128, with an even number of query heads for each KV head."""
    hop_of(mask, CPU)
    if not mask.is_two_sided:
        tile_table(mask, CPU, 64, mask.q_span)
        return
    walks(mask, CPU, mask.q_span, 64, 128, near=True, shifted=True)
    limits(mask, CPU, 64, mask.q_span)
    side = mask.cached("transposed", mask.transposed)
    walks(side, CPU, (0, side.seqlen_q), 128, 64, near=True)
    if has_begins(mask):
        first_keys(mask, CPU)


def forget() -> None:
    """Empty the caches of masks."""
    for module in (sequence_mask, balanced, layout, schedule):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def measure(make: Callable[[], SequenceMask], name: str, repetitions: int) -> dict[str, float]:
    """Return the least processor milliseconds of planning and of the tables."""
    found: dict[str, list[float]] = {"plan_ms": [], "tables_ms": []}
    for _ in range(repetitions):
        forget()
        gc.collect()
        mask = padded(make())
        begin = time.process_time()
        visible = plan(mask, name)
        middle = time.process_time()
        tables(visible)
        end = time.process_time()
        found["plan_ms"].append(1e3 * (middle - begin))
        found["tables_ms"].append(1e3 * (end - middle))
    least = {key: round(min(values), 1) for key, values in found.items()}
    least["sum_ms"] = round(sum(least.values()), 1)
    return {"documents": len(mask.bounds) - 1, "regions": len(visible.regions), **least}


def main() -> None:
    """Measure every family under three layouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="families whose name contains this text")
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load, results = [os.getloadavg()[0]], []
    for family, make in FAMILIES.items():
        for name in ("zigzag", "balanced", "striped"):
            if options.only in family:
                results.append({"mask": family, "layout": name, **measure(make, name, options.repetitions)})
                print(json.dumps(results[-1]), flush=True)
    if options.json:
        busy = {"cores": os.cpu_count(), "load_average": [*load, os.getloadavg()[0]]}
        about = {"environment": describe(), **busy, "tokens": TOKENS, "ranks": RANKS}
        options.json.write_text(result_text({**about, "results": results}))


if __name__ == "__main__":
    main()
