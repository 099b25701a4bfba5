"""Bytes of text files as batches: data without a file to prepare. `tokens` has the data for real training."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ringflash import huggingface
from ringflash.comm.agreement import READ_TIMEOUT, agree
from ringflash.lightning.sequences import Batch, SequenceData
from ringflash.lightning.strategy import strategy_of
from ringflash.lightning.text import VOCAB_SIZE, PackedSequence, PackedText, is_held_out, text_files


class TextData(SequenceData):
    """Bytes of text files, packed: sequences to train on, and some trained and some held-out ones to judge by.

    Every rank reads all of the text and cuts its part out of whole sequences.

    Args:
        seqlen: tokens of a whole sequence, over all ranks that share it.
        folder: where the files lie; default the sources of Python's standard library.
        suffix: how their names end.
        num_eval_sequences: sequences to judge by, of each kind; divisible by the data-parallel size.
        seed: names the order of the sequences.
    """

    def __init__(
        self,
        seqlen: int,
        folder: str | None = None,
        suffix: str = ".py",
        num_eval_sequences: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__(seqlen, num_eval_sequences, seed)
        self.folder, self.suffix = folder, suffix

    def read(self) -> tuple[PackedText, PackedText]:
        """Read and pack the files, on all ranks or none.

        Raises:
            ValueError: no files, or too little text in them; other text on another rank; a model without the bytes
                and the separator.
        """
        self.check_vocabulary(VOCAB_SIZE, "bytes and the separator between documents")
        parts: list[PackedText] = []
        error = None
        try:
            files = text_files(self.folder, self.suffix)
            for held in (False, True):
                paths = [path for name, path in files if is_held_out(name) == held]
                parts.append(PackedText((path.read_bytes() for path in paths), self.seqlen))
        except (ValueError, OSError) as problem:
            error = problem
        fingerprints = [part.fingerprint for part in parts]
        agree(dist.group.WORLD, {"fingerprints of the text": fingerprints}, error, timeout=READ_TIMEOUT)
        train, held_out = parts
        return train, held_out

    def identity(self) -> dict[str, Any]:
        """Also the text."""
        assert isinstance(self.train, PackedText)
        return {**super().identity(), "text": self.train.fingerprint}

    def on_before_batch_transfer(self, batch: PackedSequence, dataloader_idx: int) -> Batch:
        """This rank's shard of the sequence, cut before it goes to the device."""
        strategy = strategy_of(self.trainer)
        return huggingface.prepare_batch(
            batch["input_ids"], group=strategy.cp_group, cu_seqlens=batch["cu_seqlens"], layout=strategy.layout
        )
