"""Token files as batches, each rank reading its own chunks of a sequence and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringflash.comm.agreement import READ_TIMEOUT, agree, gather
from ringflash.data.files import TokenFiles, raise_for
from ringflash.data.format import TokenFileError
from ringflash.data.sequences import TokenSequences, split
from ringflash.lightning.sequences import SequenceData
from ringflash.lightning.strategy import ContextParallelStrategy, strategy_of


class TokenData(SequenceData):
    """Documents of token files, shuffled and packed; a part of them held out.

    Args:
        folder: what `python -m ringflash.data prepare` wrote; the same files on every host.
        seqlen: tokens of a whole sequence, over all ranks that share it.
        held_out_percent: documents kept from training; the same ones for every seed.
        num_eval_sequences: sequences to judge by, of each kind; divisible by the data-parallel size.
        seed: names the order of the documents in the sequences, and that of the sequences.
        verify: compare all checksums first: the ranks of a host read the files once between them.
    """

    def __init__(
        self,
        folder: str,
        seqlen: int,
        held_out_percent: float = 5.0,
        num_eval_sequences: int = 8,
        seed: int = 0,
        verify: bool = True,
    ) -> None:
        if not 0 < held_out_percent < 100:
            raise ValueError(f"held_out_percent must be between 0 and 100, got {held_out_percent}; 5 is the default.")
        super().__init__(seqlen, num_eval_sequences, seed)
        self.folder, self.held_out_percent, self.verify = folder, held_out_percent, verify

    def read(self) -> tuple[TokenSequences, TokenSequences]:
        """Open the files, on all ranks or none.

        Raises:
            TokenFileError: files that are not as they were written.
            ValueError: a model with a smaller vocabulary.
        """
        strategy = strategy_of(self.trainer)
        self.files = open_together(Path(self.folder), strategy, self.verify)
        self.check_vocabulary(self.files.header.vocab_size, self.folder)
        parts = split(len(self.files), self.held_out_percent, self.seed)
        train, held_out = (self._sequences(documents, strategy) for documents in parts)
        return train, held_out

    def identity(self) -> dict[str, Any]:
        """Also the files, and which of their documents are held out."""
        tokens = self.files.header.fingerprint
        return {**super().identity(), "tokens": tokens, "held_out_percent": self.held_out_percent}

    def _sequences(self, documents: torch.Tensor, strategy: ContextParallelStrategy) -> TokenSequences:
        cp_rank = strategy.cp_mesh.get_local_rank()
        return TokenSequences(
            self.files, documents, self.seqlen, cp_size=strategy.cp_size, cp_rank=cp_rank, layout=strategy.layout
        )


def open_together(folder: Path, strategy: ContextParallelStrategy, verify: bool) -> TokenFiles:
    """The files of a folder, once every rank has opened the same ones: one that raises alone hangs the others.

    Raises:
        TokenFileError: what is wrong with this rank's files.
        ValueError, RuntimeError: what is wrong with another's; other files on another rank.
    """
    files, error = None, None
    try:
        files = TokenFiles(folder)
        if verify:
            raise_for(folder, files.corrupt_shards(strategy.local_rank, strategy.num_processes))
    except (TokenFileError, OSError) as problem:
        error = problem
    agree(dist.group.WORLD, {}, error, timeout=READ_TIMEOUT)
    assert files is not None and dist.group.WORLD is not None
    if len(set(gather(dist.group.WORLD, files.header.fingerprint))) > 1:
        raise ValueError(f"{folder} must hold the same token files on every rank, got others; copy them again.")
    return files
