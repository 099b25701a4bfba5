"""Order of training: the sequences of all epochs, numbered consecutively as samples.

Sample i is sequence i % num_sequences of epoch i // num_sequences; every epoch is shuffled differently. Step s of data
rank r reads sample s * dp_size + r. The progress of a run is therefore one number, which stays valid if the run
resumes on another number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class SampleOrder(Sampler[int]):
    """Endless sampler of the sequences of one data rank, starting from sample number `first`.

    Args:
        num_sequences: number of sequences in an epoch.
        seed: seed of the shuffling; equal on all ranks.
        first: number of samples that all ranks together have consumed.
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
    """Return a permutation of range(count) that depends only on `name`: (count,), int64; equal on every machine."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()  # torch uses 32 bits of a seed
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))
