"""Batches for the ranks of a data x context mesh, and a place in them that a checkpoint keeps.

Samples are numbered through all epochs: sample i is the sequence number i % num_sequences of epoch
i // num_sequences, each epoch in an order of its own. Step s of data rank r is sample s * dp_size + r, so
what a run has seen is one number, whatever the number of ranks it continues on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Sampler, Subset

from ringflash import huggingface
from ringflash.lightning.strategy import strategy_of
from ringflash.lightning.text import PackedSequence, PackedText, is_held_out, text_files

Loader = DataLoader[PackedSequence]
Batch = dict[str, Any]  # what ringflash.huggingface.prepare_batch returns


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
                known, order = epoch, self._order(epoch)
            yield int(order[index])

    def _order(self, epoch: int) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=4).digest()  # torch reads 32 bits
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        return torch.randperm(self.num_sequences, generator=generator)


class TextData(lightning.LightningDataModule):
    """Bytes of text files, packed: sequences to train on, and some trained and some held-out ones to judge by.

    A step's batch is one sequence for each data rank. A run resumes exactly, in the middle of an epoch and on
    another number of ranks.

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
        super().__init__()
        self.seqlen, self.folder, self.suffix = seqlen, folder, suffix
        self.num_eval_sequences, self.seed = num_eval_sequences, seed
        self.num_consumed = 0

    def setup(self, stage: str) -> None:
        """Read and pack the files; have the trainer count what it consumes."""
        if not any(isinstance(callback, CountConsumed) for callback in self.trainer.callbacks):
            self.trainer.callbacks.insert(0, CountConsumed())
        files = text_files(self.folder, self.suffix)
        held_out = [path for name, path in files if is_held_out(name)]
        trained = [path for name, path in files if not is_held_out(name)]
        self.train, self.held_out = (PackedText((p.read_bytes() for p in x), self.seqlen) for x in (trained, held_out))
        self._check_eval_sequences()

    def train_dataloader(self) -> Loader:
        """Sequences without end, from the first one not consumed yet."""
        strategy = strategy_of(self.trainer)
        order = SampleOrder(
            len(self.train), seed=self.seed, dp_rank=strategy.dp_rank, dp_size=strategy.dp_size, first=self.num_consumed
        )
        return DataLoader(self.train, batch_size=None, sampler=order)

    def val_dataloader(self) -> dict[str, Loader]:
        """This data rank's share of the sequences to judge by, evenly spaced over the text."""
        strategy = strategy_of(self.trainer)
        loaders = {}
        for name, text in (("train", self.train), ("held_out", self.held_out)):
            chosen = [i * len(text) // self.num_eval_sequences for i in range(self.num_eval_sequences)]
            loaders[name] = DataLoader(Subset(text, chosen[strategy.dp_rank :: strategy.dp_size]), batch_size=None)
        return loaders

    def on_before_batch_transfer(self, batch: PackedSequence, dataloader_idx: int) -> Batch:
        """This rank's shard of the sequence, cut before it goes to the device."""
        group = strategy_of(self.trainer).cp_group
        return huggingface.prepare_batch(batch["input_ids"], group=group, cu_seqlens=batch["cu_seqlens"])

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """All but cu_seqlens, which only the host reads."""
        tensors = {name: value for name, value in batch.items() if name != "cu_seqlens"}
        moved = super().transfer_batch_to_device(tensors, device, dataloader_idx)
        return {**moved, "cu_seqlens": batch["cu_seqlens"]}

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and what gives it its meaning."""
        return {"num_consumed": self.num_consumed, "num_sequences": len(self.train), **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the place of a checkpoint.

        Raises:
            ValueError: other text, length or order than the checkpoint was made with.
        """
        for name, value in {"num_sequences": len(self.train), **self._identity()}.items():
            if state_dict[name] != value:
                raise ValueError(
                    f"{name} must be that of the checkpoint ({state_dict[name]}), got {value}; "
                    "resume with the same text, seqlen and seed."
                )
        self.num_consumed = state_dict["num_consumed"]

    def _identity(self) -> dict[str, int]:
        return {"seqlen": self.seqlen, "seed": self.seed}

    def _check_eval_sequences(self) -> None:
        dp_size, available = strategy_of(self.trainer).dp_size, min(len(self.train), len(self.held_out))
        count = self.num_eval_sequences
        if count < 1 or count % dp_size or count > available:
            raise ValueError(
                f"num_eval_sequences must be a multiple of the data-parallel size ({dp_size}) from 1 to the number of "
                f"held-out sequences ({available}), got {count}; change it, or give more text."
            )


class CountConsumed(lightning.Callback):
    """Counts samples at the end of each batch.

    A callback, because those of checkpoints run after all others, but before the module's own hook: a count
    kept by the module is one batch behind in the checkpoint.
    """

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Every data rank has consumed one sample."""
        trainer.datamodule.num_consumed += strategy_of(trainer).dp_size
