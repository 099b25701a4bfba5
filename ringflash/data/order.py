"""The order of training: sequences of all epochs under one running number.

Sample i is the sequence number i % num_sequences of epoch i // num_sequences, each epoch in an order of its own.
Step s of data rank r is sample s * dp_size + r, so what a run has seen is one number, whatever the number of ranks
it continues on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class SampleOrder(Sampler[int]):
    """Sequences of one data rank, without end, from the sample number `first` on.

    Args:
        num_sequences: sequences of an epoch.
        seed: names the orders; equal on all ranks.
        first: samples that all ranks together have consumed.
    """

    def __init__(self, num_sequences: int, *, seed: int, dp_rank: int, dp_size: int, first: int) -> None:
        self.num_sequences, self.seed, self.step = num_sequences, seed, dp_size
        self.next = first + dp_rank

    def __iter__(self) -> Iterator[int]:
        known, order = -1, torch.empty(0)
        for sample in range(self.next, 1 << 62, self.step):
            epoch, index = divmod(sample, self.num_sequences)
            if epoch != known:
                known, order = epoch, shuffled(self.num_sequences, f"{self.seed}/{epoch}")
            yield int(order[index])


def shuffled(count: int, name: str) -> torch.Tensor:
    """The numbers below `count` in the order of that name: (count,), int64; the same on every machine."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()  # torch reads 32 bits
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
