"""Count work, keys and messages of packed documents by layout, for 8 and 64 ranks: no GPU, no time.

python benchmarks/studies/count_documents.py --json benchmarks/results/documents.json

"every document" cuts each document over all ranks in mirrored pairs, pads it to 2 * ranks tokens and passes whole
shards round a ring, as Transformer Engine does for packed sequences; it is calculated.

Also counts the work of the sequences that data ranks compute in one step, by the order in which documents were packed.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from benchmarks.environment import describe, result_text
from ringflash.attention.schedule import plan_single_block
from ringflash.data.order import mix_lengths, shuffled
from ringflash.sequence.mask import SequenceMask

MIXES = {"128 to 32k": (128, 1 << 15), "1k to 256k": (1 << 10, 1 << 18), "1k to 16k": (1 << 10, 1 << 14)}
TOKENS_PER_RANK, GPUS_PER_HOST = 1 << 17, 8
NUM_SEQUENCES, WINDOW_STEPS = 2048, 4


def main() -> None:
    """Write the counts of every mix, number of ranks and layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packings", type=int, default=5, help="random packings of each mix")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    results = []
    for mix, lengths in MIXES.items():
        for ranks in (8, 64):
            packings = [
                SequenceMask(ranks * TOKENS_PER_RANK, cu_seqlens=pack(seed, ranks * TOKENS_PER_RANK, *lengths))
                for seed in range(options.packings)
            ]
            for layout, count in COUNTS.items():
                counted = [count(mask, ranks) for mask in packings]
                row = {name: mean(x[name] for x in counted) for name in counted[0]}
                worst = min(x["balance_percent"] for x in counted)
                results.append({"mix": mix, "ranks": ranks, "layout": layout, "worst_percent": worst, **row})
                print(results[-1])
    steps = [
        {"mix": mix, "seqlen": seqlen, "data_ranks": ranks, **balance_of_steps(lengths, seqlen, ranks)}
        for mix, lengths in MIXES.items()
        for seqlen in (1 << 17, 1 << 20)
        for ranks in (8, 64)
    ]
    about = {"environment": describe(), "tokens_per_rank": TOKENS_PER_RANK, "packings": options.packings}
    options.json.write_text(result_text({**about, "results": results, "steps": steps}))


def pack(seed: int, seqlen: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Return the bounds of documents of log-uniform lengths."""
    chance, bounds = random.Random(seed), [0]
    while bounds[-1] < seqlen:
        length = math.exp(chance.uniform(math.log(shortest), math.log(longest)))
        bounds.append(min(seqlen, bounds[-1] + round(length)))
    return tuple(bounds)


def count_layout(layout: str, mask: SequenceMask, ranks: int) -> dict[str, float]:
    """Count causal work, received keys and messages of one packing.

    Returns:
        balance_percent: mean work of the ranks over the largest.
        shards, most_shards: keys received by a rank over its own, mean and largest; gradients return the same way.
        host_shards: those received from another host of eight GPUs, mean.
        messages: received by a rank for each section of heads, mean.
    """
    work, keys, abroad, messages = [], [], [], []
    for rank in range(ranks):
        found = plan_single_block(mask, ranks, rank, layout)
        received = [segment for segment in found.segments if segment.owner != rank]
        work.append(found.mask.num_visible)
        keys.append(sum(segment.size for segment in received) / TOKENS_PER_RANK)
        here = rank // GPUS_PER_HOST
        abroad.append(sum(p.size for p in received if p.owner // GPUS_PER_HOST != here) / TOKENS_PER_RANK)
        messages.append(len(received))
    return {
        "balance_percent": 100 * mean(work) / max(work),
        "shards": mean(keys),
        "most_shards": max(keys),
        "host_shards": mean(abroad),
        "messages": mean(messages),
    }


def count_every_document(mask: SequenceMask, ranks: int) -> dict[str, float]:
    """Calculate the counts of `count_layout` if rank r holds the segments r and 2 * ranks - 1 - r of every document."""
    bounds = mask.bounds
    padded = sum(-(-(stop - start) // (2 * ranks)) * 2 * ranks for start, stop in pairwise(bounds))
    return {
        "balance_percent": 100 * bounds[-1] / padded,
        "shards": ranks - 1,
        "most_shards": ranks - 1,
        "host_shards": (ranks - 1) / GPUS_PER_HOST if ranks > GPUS_PER_HOST else 0,
        "messages": ranks - 1,
    }


def balance_of_steps(lengths: tuple[int, int], seqlen: int, data_ranks: int) -> dict[str, float]:
    """Count the mean work of a step's sequences over the largest, in percent, as a mean over NUM_SEQUENCES.

    Returns:
        shuffled, mixed: by the order of the documents.
        sorted: mixed, and the sequences of every WINDOW_STEPS steps ordered by their work.
    """
    bounds = torch.tensor(pack(0, NUM_SEQUENCES * seqlen, *lengths))
    tokens = bounds.diff()
    order = shuffled(len(tokens), "documents")
    mixed = work_of_sequences(tokens[mix_lengths(order, tokens[order])], seqlen)
    windows = mixed.unflatten(0, (-1, min(WINDOW_STEPS * data_ranks, NUM_SEQUENCES)))
    found = {"shuffled": work_of_sequences(tokens[order], seqlen), "mixed": mixed, "sorted": windows.sort().values}
    steps = {name: work.reshape(-1, data_ranks) for name, work in found.items()}
    return {name: 100 * (work.mean(1) / work.amax(1)).mean().item() for name, work in steps.items()}


def work_of_sequences(tokens: Tensor, seqlen: int) -> Tensor:
    """Count the visible pairs of each sequence, in random order, of documents that are packed in the given order."""
    edges = torch.cat([tokens.cumsum(0), torch.arange(0, NUM_SEQUENCES + 1) * seqlen]).unique()
    parts = edges.diff().double()
    work = torch.zeros(NUM_SEQUENCES).double().index_add_(0, edges[:-1] // seqlen, parts * (parts + 1) / 2)
    return work[shuffled(NUM_SEQUENCES, "sequences")]


COUNTS: dict[str, Callable[[SequenceMask, int], dict[str, float]]] = {
    **{layout: partial(count_layout, layout) for layout in ("zigzag", "striped", "balanced")},
    "every document": count_every_document,
}

if __name__ == "__main__":
    main()
