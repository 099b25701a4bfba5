"""Forests of documents, and the mask by its definition: shares no code with the package."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Forest:
    """Documents of given lengths, parents, directions and global tokens, and a window along the path."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    bidirectional: tuple[bool, ...]
    left: int = -1
    global_tokens: tuple[int, ...] | None = None

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        bounds = [0]
        for length in self.lengths:
            bounds.append(bounds[-1] + length)
        return tuple(bounds)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        counts = self.global_tokens or (0,) * len(self.lengths)
        return self.cu_seqlens, (*self.parents, -1), (*map(int, self.bidirectional), 0), (*counts, 0)

    @property
    def seqlen(self) -> int:
        return sum(self.lengths)

    @property
    def table(self) -> torch.Tensor:
        import ringflash

        return ringflash.document_table(
            torch.tensor(self.cu_seqlens, dtype=torch.int32),
            torch.tensor(self.parents, dtype=torch.int32),
            torch.tensor(self.bidirectional),
            None if self.global_tokens is None else torch.tensor(self.global_tokens),
        )

    def positions(self) -> torch.Tensor:
        """Position of each token in its path."""
        begins: list[int] = []
        out = []
        for length, parent in zip(self.lengths, self.parents, strict=True):
            begins.append(0 if parent < 0 else begins[parent] + self.lengths[parent])
            out.append(begins[-1] + torch.arange(length))
        return torch.cat(out)

    def visible(self) -> torch.Tensor:
        """(seqlen, seqlen), bool, by the definition of ancestors, directions and the window."""
        document = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        ancestor = torch.zeros(len(self.lengths), len(self.lengths), dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                ancestor[i] = ancestor[parent]
                ancestor[i, parent] = True
        own = document[:, None] == document[None]
        index, position = torch.arange(self.seqlen), self.positions()
        both = torch.tensor(self.bidirectional)[document][:, None]
        seen = ancestor[document[:, None], document[None]] | (own & (both | (index[None] <= index[:, None])))
        if self.left >= 0:
            near = position[None] >= position[:, None] - self.left
            if self.global_tokens is not None:
                near |= position[None] < torch.tensor(self.global_tokens)[document][:, None]
            seen &= near
        return seen


def random_forest(seed: int, seqlen: int, *, window: bool | None = None) -> Forest:
    """Trees of random shape, depth first; some documents bidirectional; sometimes a window, and global tokens."""
    rng = random.Random(seed)
    count = rng.randint(1, max(1, min(12, seqlen // 2)))
    cuts = sorted(rng.sample(range(1, seqlen), count - 1))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, seqlen], strict=True)]
    parents: list[int] = []
    path: list[int] = []
    for i in range(count):
        depth = rng.randint(0, len(path))
        del path[depth:]
        parents.append(path[-1] if path else -1)
        path.append(i)
    both = [rng.random() < 0.25 for _ in range(count)]
    has_window = rng.random() < 0.4 if window is None else window
    forest = Forest(tuple(lengths), tuple(parents), tuple(both), rng.randint(0, seqlen // 2) if has_window else -1)
    return with_global_tokens(forest, rng) if rng.random() < 0.5 else forest


def with_global_tokens(forest: Forest, rng: random.Random) -> Forest:
    """Return the forest with global tokens in some trees: up to the last branch, and a few more."""
    begins, roots = [], []
    for index, parent in enumerate(forest.parents):
        begins.append(0 if parent < 0 else begins[parent] + forest.lengths[parent])
        roots.append(index if parent < 0 else roots[parent])
    branches = [i for i in range(len(roots)) if forest.parents.count(i) > 1]
    counts = {}
    for root in dict.fromkeys(roots):
        least = max((begins[i] + forest.lengths[i] for i in branches if roots[i] == root), default=0)
        counts[root] = rng.choice((0, least + rng.randint(0, 20)))
    return replace(forest, global_tokens=tuple(counts[root] for root in roots))


def rollouts(prompt: int, answers: list[int]) -> Forest:
    """A prompt and answers that continue it."""
    return Forest((prompt, *answers), (-1, *[0] * len(answers)), (False,) * (1 + len(answers)))


def images(spans: list[tuple[int, int]], left: int = -1) -> Forest:
    """Text and images alternate: (tokens of text, tokens of the image that follows)."""
    lengths = [n for pair in spans for n in pair]
    return Forest(tuple(lengths), tuple(range(-1, len(lengths) - 1)), (False, True) * len(spans), left)


def block_diffusion(num_blocks: int, size: int) -> Forest:
    """Clean blocks, then the noisy blocks, last one first: noisy block i continues clean block i - 1."""
    parents = [*range(-1, num_blocks - 1), *range(num_blocks - 2, -2, -1)]
    return Forest((size,) * 2 * num_blocks, tuple(parents), (True,) * 2 * num_blocks)


TREES = {
    "rollouts": rollouts(37, [11, 20, 5, 55]),
    "deep": Forest(
        (20, 14, 10, 30, 7, 40, 7, 9, 6),
        (-1, 0, 1, 1, 0, 4, -1, 6, 6),
        (False, False, True, False, False, True, False, True, False),
    ),
    "spans": Forest((24, 10, 16, 3, 16, 12, 20, 5), (-1, 0, 1, 2, 3, 4, -1, 6), (True, False) * 4),
    "diffusion": block_diffusion(5, 8),
    "global tokens": Forest(
        (30, 17, 40, 20, 8), (-1, -1, 1, 2, -1), (False, False, True, False, False), global_tokens=(3, 5, 5, 5, 0)
    ),
    "global prompts": replace(rollouts(20, [9, 14, 5]), global_tokens=(24,) * 4),
}


def of_lengths(forest: Forest, seqlen: int) -> Forest:
    """Return a forest stretched or shrunk to another length, of at least one token for each document."""
    count = len(forest.lengths)
    cuts = [0, *(round(bound * (seqlen - count) / forest.seqlen) for bound in forest.cu_seqlens[1:])]
    lengths = tuple(b - a + 1 for a, b in zip(cuts, cuts[1:], strict=False))
    counts = forest.global_tokens and tuple(x and -(-x * seqlen // forest.seqlen) + 1 for x in forest.global_tokens)
    return Forest(lengths, forest.parents, forest.bidirectional, forest.left, counts)


FAMILIES = {
    "rollouts": rollouts(37, [11, 20, 5, 23]),
    "prefix lm": Forest((40, 56), (-1, 0), (True, False)),
    "images": images([(10, 16), (3, 16), (12, 16), (7, 16)]),
    "images, window": images([(10, 16), (3, 16), (12, 16), (7, 16)], left=20),
    "block diffusion": block_diffusion(6, 8),
    "window, global tokens": Forest((50, 30, 16), (-1, -1, 1), (False,) * 3, left=11, global_tokens=(4, 7, 7)),
    "window, global prompts": replace(rollouts(25, [30, 24, 17]), left=9, global_tokens=(27,) * 4),
}
