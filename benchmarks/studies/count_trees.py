"""Count work, keys and messages of documents that continue others, by layout, for 2 to 64 ranks: no GPU, no time.

python benchmarks/studies/count_trees.py --json benchmarks/results/trees.json
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from benchmarks.environment import describe, result_text
from benchmarks.studies.count_documents import TOKENS_PER_RANK, count_layout
from ringflash.sequence.mask import SequenceMask

RANKS = (2, 8, 64)


class Trees:
    """Documents that are added until a sequence is full; the last one is cut."""

    def __init__(self, seed: int, seqlen: int) -> None:
        self.chance, self.seqlen = random.Random(seed), seqlen
        self.bounds, self.parents, self.both = [0], list[int](), list[bool]()

    def add(self, tokens: tuple[int, int], parent: int = -1, both: bool = False) -> int:
        """Add a document of log-uniform length, and return its index."""
        length = round(math.exp(self.chance.uniform(*map(math.log, tokens))))
        if not self.full:
            self.bounds.append(min(self.seqlen, self.bounds[-1] + length))
            self.parents.append(parent)
            self.both.append(both)
        return len(self.parents) - 1

    @property
    def full(self) -> bool:
        return self.bounds[-1] == self.seqlen

    def mask(self) -> SequenceMask:
        both = tuple(self.both) if any(self.both) else None
        return SequenceMask(self.seqlen, cu_seqlens=tuple(self.bounds), parents=tuple(self.parents), bidirectional=both)


def group(trees: Trees, answers: int, prompt: tuple[int, int], answer: tuple[int, int]) -> None:
    """Add a prompt and its answers."""
    root = trees.add(prompt)
    for _ in range(answers):
        if not trees.full:
            trees.add(answer, root)


def agent(trees: Trees, turns: int, turn: tuple[int, int], depth: int = 0, parent: int = -1) -> None:
    """Add turns, each after the one before; at every second one, on average, other turns follow, too."""
    path = []
    for at in range(depth, turns):
        if not trees.full:
            parent = trees.add(turn, parent)
            path.append((at, parent))
    for at, node in reversed(path[:-1]):
        if trees.chance.random() < 1 / 3:
            agent(trees, turns, turn, at + 1, node)


def prefix(trees: Trees) -> None:
    """Add a prefix that sees itself, and its continuation."""
    trees.add((1 << 14, 1 << 15), trees.add((1 << 12, 1 << 15), both=True))


def images(trees: Trees) -> None:
    """Add text with images."""
    parent = -1
    for _ in range(32):
        if not trees.full:
            parent = trees.add((256, 256), trees.add((64, 1024), parent), both=True)


def diffusion(ranks: int, block: int = 1024) -> SequenceMask:
    """Return clean blocks, then noisy ones, last one first, each after the clean blocks before it."""
    count = ranks * TOKENS_PER_RANK // block // 2
    parents = (*range(-1, count - 1), *range(count - 2, -2, -1))
    bounds = tuple(range(0, 2 * count * block + 1, block))
    return SequenceMask(bounds[-1], cu_seqlens=bounds, parents=parents, bidirectional=(True,) * 2 * count)


def filled(add: Callable[[Trees], None], seed: int, ranks: int) -> SequenceMask:
    """Return the mask of a sequence of trees."""
    trees = Trees(seed, ranks * TOKENS_PER_RANK)
    while not trees.full:
        add(trees)
    return trees.mask()


FAMILIES: dict[str, Callable[[int, int], SequenceMask]] = {
    "16 answers of 1k to 16k after 1k to 4k": lambda seed, ranks: filled(
        lambda t: group(t, 16, (1 << 10, 1 << 12), (1 << 10, 1 << 14)), seed, ranks
    ),
    "8 answers of 0.5k to 4k after 24k to 40k": lambda seed, ranks: filled(
        lambda t: group(t, 8, (24 << 10, 40 << 10), (512, 4096)), seed, ranks
    ),
    "64 answers of 8k to 32k after 4k": lambda seed, ranks: filled(
        lambda t: group(t, 64, (4096, 4096), (1 << 13, 1 << 15)), seed, ranks
    ),
    "agents, 12 turns of 256 to 4k": lambda seed, ranks: filled(lambda t: agent(t, 12, (256, 4096)), seed, ranks),
    "prefix-LM, 20k to 64k": lambda seed, ranks: filled(prefix, seed, ranks),
    "text with images of 256": lambda seed, ranks: filled(images, seed, ranks),
    "block diffusion": lambda seed, ranks: diffusion(ranks),
}


def main() -> None:
    """Write the counts of every family, number of ranks and layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packings", type=int, default=2, help="random packings of each family")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    results = []
    for family, make in FAMILIES.items():
        for ranks in RANKS:
            masks = [make(seed, ranks) for seed in range(options.packings)]
            for layout in ("zigzag", "balanced"):
                counted = [count_layout(layout, mask, ranks) for mask in masks]
                row = {name: mean(x[name] for x in counted) for name in counted[0]}
                worst = min(x["balance_percent"] for x in counted)
                documents = len(masks[0].bounds) - 1
                results.append(
                    {"mix": family, "ranks": ranks, "layout": layout, "documents": documents, "worst_percent": worst, **row}
                )
                print(results[-1], flush=True)
    about = {"environment": describe(), "tokens_per_rank": TOKENS_PER_RANK, "packings": options.packings}
    options.json.write_text(result_text({**about, "results": results}))


if __name__ == "__main__":
    main()
