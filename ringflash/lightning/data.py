"""Training data for a data x context mesh: the base of all data modules, and token files.

Each data rank draws its own sequences, and a checkpoint keeps the position in the data. `ringflash.data.order` defines
how samples are numbered over all epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, Dataset, Sampler

from ringflash.comm.agreement import READ_TIMEOUT, agree, gather
from ringflash.data.files import TokenFiles, raise_for
from ringflash.data.format import TokenFileError
from ringflash.data.order import SampleOrder
from ringflash.data.sequences import TokenSequences, split
from ringflash.lightning.module import CausalLM
from ringflash.lightning.strategy import ContextParallelStrategy, strategy_of
from ringflash.lightning.trainer_checks import check_interval

Loader = DataLoader[Any]
Batch = dict[str, Any]  # what ringflash.huggingface.prepare_batch returns


class Sequences(Protocol):
    """A dataset whose sequences are numbered."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class SequenceData(lightning.LightningDataModule):
    """Sequences to train on, and some trained and some held-out ones to judge by; a subclass reads them.

    A step's batch is one sequence for each data rank. A run resumes exactly, in the middle of an epoch and on
    another number of ranks.

    Args:
        seqlen: tokens of a whole sequence, over all ranks that share it.
        num_eval_sequences: sequences to judge by, of each kind; divisible by the data-parallel size.
        seed: names the order of the sequences.
    """

    def __init__(self, seqlen: int, num_eval_sequences: int, seed: int) -> None:
        super().__init__()
        self.seqlen, self.num_eval_sequences, self.seed = seqlen, num_eval_sequences, seed
        self.num_consumed = 0

    def read(self) -> tuple[Sequences, Sequences]:
        """The sequences to train on and those held out."""
        raise NotImplementedError(f"read must be overridden, got none in {type(self).__name__}; return two datasets.")

    def setup(self, stage: str) -> None:
        """Read the sequences; have the trainer count what it consumes.

        Raises:
            ValueError: a trainer that would share the sequences out a second time, give all data ranks the same ones,
                count epochs that never end, end them in the middle of a step, or evaluate by the clock; sequences to
                judge by that do not fit the data ranks.
        """
        _check_sampler(self.trainer)
        if stage == "fit":
            _check_epochs(self.trainer)
            check_interval(self.trainer)
        if not any(isinstance(callback, CountConsumed) for callback in self.trainer.callbacks):
            self.trainer.callbacks.insert(0, CountConsumed())
        self.train, self.held_out = self.read()
        self._check_eval_sequences()

    def train_dataloader(self) -> Loader:
        """Sequences without end, from the first one not consumed yet."""
        return _loader(self.train, _Unconsumed(self))

    def val_dataloader(self) -> dict[str, Loader]:
        """This data rank's share of the sequences to judge by, evenly spaced over the text."""
        strategy = strategy_of(self.trainer)
        loaders = {}
        for name, text in (("train", self.train), ("held_out", self.held_out)):
            chosen = [i * len(text) // self.num_eval_sequences for i in range(self.num_eval_sequences)]
            loaders[name] = _loader(text, chosen[strategy.dp_rank :: strategy.dp_size])
        return loaders

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """All but cu_seqlens, which only the host reads."""
        tensors = {name: value for name, value in batch.items() if name != "cu_seqlens"}
        moved = super().transfer_batch_to_device(tensors, device, dataloader_idx)
        return {**moved, "cu_seqlens": batch["cu_seqlens"]}

    def identity(self) -> dict[str, Any]:
        """What gives a place in the data its meaning: equal where a checkpoint can be continued."""
        return {"num_sequences": len(self.train), "seqlen": self.seqlen, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and what gives it its meaning."""
        return {"num_consumed": self.num_consumed, **self.identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the place of a checkpoint; an evaluation of it takes nothing over.

        Raises:
            ValueError: other text, length or order than the checkpoint was made with.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        for name, value in self.identity().items():
            if state_dict[name] != value:
                raise ValueError(
                    f"{name} must be that of the checkpoint ({state_dict[name]}), got {value}; "
                    "resume with the same text, seqlen and seed."
                )
        self.num_consumed = state_dict["num_consumed"]

    def check_vocabulary(self, vocab_size: int, where: str) -> None:
        """Refuse a `CausalLM` without some of the tokens: the ranks that meet one would fail, and the others wait.

        Raises:
            ValueError: a model with a smaller vocabulary.
        """
        module = None if self.trainer is None else self.trainer.lightning_module
        got = _vocab_size(module.config) if isinstance(module, CausalLM) else None
        if got is not None and got < vocab_size:
            raise ValueError(
                f"vocab_size of the model must be {vocab_size} or more for {where}, got {got}; "
                "give the model that of the tokenizer."
            )

    def _check_eval_sequences(self) -> None:
        dp_size, available = strategy_of(self.trainer).dp_size, min(len(self.train), len(self.held_out))
        count = self.num_eval_sequences
        if count < 1 or count % dp_size or count > available:
            raise ValueError(
                f"num_eval_sequences must be a multiple of the data-parallel size ({dp_size}) from 1 to the number of "
                f"held-out sequences ({available}), got {count}; change it, or give more text."
            )


def _vocab_size(config: dict[str, Any]) -> int | None:
    """Of a configuration, which may leave it to its family."""
    if "vocab_size" in config:
        return config["vocab_size"]
    from transformers import AutoConfig

    return getattr(AutoConfig.for_model(**config), "vocab_size", None)


def _check_sampler(trainer: lightning.Trainer) -> None:
    """Refuse Lightning's own samplers, which know nothing of data ranks, or share out a share to judge by."""
    if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
        raise ValueError(
            "use_distributed_sampler must be False with sequences that are shared out already, got True, which is "
            "Lightning's default; pass Trainer(use_distributed_sampler=False)."
        )
    if trainer.overfit_batches and strategy_of(trainer).dp_size > 1:
        raise ValueError(
            f"overfit_batches must be 0 with several data ranks, got {trainer.overfit_batches}: all of them would "
            "train on the same sequences; set data_parallel_size to 1."
        )


def _check_epochs(trainer: lightning.Trainer) -> None:
    """Refuse epochs that never end, Lightning's default without a limit among them, or end in the middle of a step."""
    endless = isinstance(trainer.limit_train_batches, float) and not trainer.overfit_batches
    if endless and trainer.max_epochs not in (None, -1):
        raise ValueError(
            f"max_epochs must be -1 without limit_train_batches, got {trainer.max_epochs}: the sequences have no end; "
            "give max_steps, or the batches of an epoch with limit_train_batches, or max_epochs=-1 for no limit."
        )
    batches, accumulated = trainer.limit_train_batches, trainer.accumulate_grad_batches
    if isinstance(batches, int) and batches % accumulated and not trainer.fast_dev_run:
        raise ValueError(
            f"limit_train_batches must be a multiple of accumulate_grad_batches ({accumulated}), got {batches}: the "
            "last step of an epoch would divide by batches that it does not have; change one of them."
        )


class _Unconsumed(Sampler[int]):
    """This data rank's sequences from the first one not consumed yet, each time it is iterated.

    A trainer with epochs of its own (limit_train_batches) iterates it at the start of each of them.
    """

    def __init__(self, data: SequenceData) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        data, strategy = self.data, strategy_of(self.data.trainer)
        order = SampleOrder(
            len(data.train), seed=data.seed, dp_rank=strategy.dp_rank, dp_size=strategy.dp_size, first=data.num_consumed
        )
        return iter(order)


def _check_class(data: object, checkpoint: dict[str, Any]) -> None:
    """Lightning keeps a place under the name of the data's class, and begins at the first sequence without one."""
    places = [name for name, state in checkpoint.items() if isinstance(state, dict) and "num_consumed" in state]
    if places and type(data).__qualname__ not in places:
        raise ValueError(
            f"data must be of the checkpoint's class ({', '.join(places)}), got {type(data).__qualname__}, which would "
            "begin at its first sequence; resume with the same data, or start a new run from exported weights."
        )


def _loader(sequences: Sequences, chosen: Sampler[int] | list[int]) -> Loader:
    return DataLoader(cast(Dataset[Any], sequences), batch_size=None, sampler=chosen)


class CountConsumed(lightning.Callback):
    """Counts samples at the end of each batch, and those of whole steps in a checkpoint.

    A callback, because those of checkpoints run after all others, but before the module's own hook: a count
    kept by the module is one batch behind in the checkpoint.
    """

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Every data rank has consumed one sample."""
        trainer.datamodule.num_consumed += strategy_of(trainer).dp_size

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A step begins with the first batch also where it has more of them (accumulate_grad_batches) than before.

        Lightning ends a step by the number of batches so far, which is rounded up to whole steps.

        Raises:
            ValueError: a run that another class of data has begun, whose place in it Lightning would not hand over.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            _check_class(trainer.datamodule, checkpoint)
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        missing = -progress["current"]["ready"] % trainer.accumulate_grad_batches
        for kind in ("current", "total"):
            progress[kind] = {name: count + missing for name, count in progress[kind].items()}

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A place in the middle of a step (accumulate_grad_batches) is kept as the place where the step began.

        The gradients so far are in no checkpoint: who goes on from it makes the whole step.
        """
        loop = trainer.fit_loop.epoch_loop
        if not loop._should_accumulate():
            return
        count = loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for kind in ("current", "total"):
            progress[kind] = dict.fromkeys(progress[kind], progress[kind]["ready"] - count)
        data = trainer.datamodule
        checkpoint[type(data).__qualname__]["num_consumed"] -= count * strategy_of(trainer).dp_size


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
