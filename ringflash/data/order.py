"""Order of training: of documents before they are packed, and of sequences, numbered over all epochs as samples.

Sample i is sequence i % num_sequences of epoch i // num_sequences; every epoch is shuffled differently. Step s of data
rank r reads sample s * dp_size + r. The progress of a run is therefore one number, which stays valid if the run
resumes on another number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

ORDER = 2  # version of these orders and of their use: a checkpoint's place in the data means nothing in another one


class SampleOrder(Sampler[int]):
    """Endless sampler of the sequences of one data rank, starting from sample number `first`.

    Args:
        num_sequences: number of sequences in an epoch.
        seed: seed of the shuffling; equal on all ranks.
        dp_rank, dp_size: data rank (index of its ring), and number of rings.
        first: number of samples that all ranks together have consumed.
    Raises:
        ValueError: no sequences, a rank outside [0, dp_size), or first below 0.
    """

    def __init__(self, num_sequences: int, *, seed: int, dp_rank: int, dp_size: int, first: int) -> None:
        if num_sequences < 1 or first < 0:
            raise ValueError(
                f"num_sequences must be 1 or more and first 0 or more, got {num_sequences} and {first}; prepare more "
                "text, and count samples from 0."
            )
        if not 0 <= dp_rank < dp_size:
            raise ValueError(
                f"dp_rank must be in [0, {dp_size}), got {dp_rank}: ranks would train on the same samples; pass the "
                "index of the ring, not the rank in the job."
            )
        self.num_sequences, self.seed, self.step = num_sequences, seed, dp_size
        self.next = first + dp_rank

    def __iter__(self) -> Iterator[int]:
        shuffled_epoch, order = -1, torch.empty(0)
        for sample in range(self.next, 1 << 62, self.step):
            epoch, index = divmod(sample, self.num_sequences)
            if epoch != shuffled_epoch:
                shuffled_epoch, order = epoch, shuffled(self.num_sequences, f"{self.seed}/{epoch}")
            yield int(order[index])


def mix_lengths(documents: Tensor, lengths: Tensor) -> Tensor:
    """Reorder documents so that any run of them has short and long ones in the proportions of the whole.

    Sequences packed from them then have similar attention work, which the slowest data rank of a step decides. The
    quantile of the i-th document's length is i times the golden ratio, modulo 1, whose values fill [0, 1) evenly.

    Args:
        documents: (num_documents,), int64, shuffled; those within an eighth of an octave keep their order.
        lengths: (num_documents,), int64, tokens of each.
    """
    mantissas, exponents = torch.frexp(lengths.double())  # exact arithmetic, so equal on every machine
    by_length = documents[torch.argsort(exponents + (16 * mantissas).floor() / 16, stable=True)]
    quantiles = torch.arange(len(documents), dtype=torch.float64, device="cpu") * ((math.sqrt(5) - 1) / 2) % 1
    mixed = torch.empty_like(documents)
    mixed[torch.argsort(quantiles)] = by_length
    return mixed


def shuffled(count: int, name: str) -> Tensor:
    """Return a permutation of range(count) that depends only on `name`: (count,), int64; equal on every machine."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()  # torch uses 32 bits of a seed
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(count, generator=generator, device="cpu")  # whatever torch's default device is
