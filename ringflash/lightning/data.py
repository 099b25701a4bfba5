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
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ringflash.comm.agreement import READ_TIMEOUT, gather, raising_together
from ringflash.data.files import TokenFiles, raise_for
from ringflash.data.order import ORDER, SampleOrder, mix_lengths
from ringflash.data.sequences import TokenSequences, split
from ringflash.lightning.module import CausalLM
from ringflash.lightning.strategy import ContextParallelStrategy, strategy_of
from ringflash.lightning.trainer_checks import check_interval

Loader = DataLoader[Any]
Batch = dict[str, Any]  # as ringflash.huggingface.prepare_batch returns it


class Sequences(Protocol):
    """Dataset with a length and numbered sequences."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class SequenceData(lightning.LightningDataModule):
    """Base of the data modules: sequences to train on, and fixed sequences to evaluate; a subclass reads them.

    Evaluations use some sequences of the training set and some that are held out. A batch is one sequence on each
    data rank. A run resumes exactly, even in the middle of an epoch or on a different number of ranks.

    Args:
        seqlen: tokens of a whole sequence, over all ranks that share it.
        num_eval_sequences: sequences to evaluate from each of the two sets; divisible by the data-parallel size.
        seed: determines the order of the sequences.
    """

    def __init__(self, seqlen: int, num_eval_sequences: int, seed: int) -> None:
        super().__init__()
        self.seqlen, self.num_eval_sequences, self.seed = seqlen, num_eval_sequences, seed
        self.num_consumed = 0

    def read(self) -> tuple[Sequences, Sequences]:
        """Return the sequences to train on and the held-out ones."""
        raise NotImplementedError(f"read must be overridden, got none in {type(self).__name__}; return two datasets.")

    def setup(self, stage: str) -> None:
        """Read the sequences, and add the callback that counts consumed samples.

        Raises:
            ValueError: a trainer that would split the sequences a second time, give all data ranks the same ones, wait
                for epochs that never end, end them in the middle of a step, or evaluate by the clock; a number of
                evaluation sequences that the data ranks do not divide.
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
        """Return an endless loader that starts at the first unconsumed sequence."""
        return _loader(self.train, _Unconsumed(self))

    def val_dataloader(self) -> dict[str, Loader]:
        """Return this data rank's share of the evaluation sequences, which are evenly spaced over each set."""
        strategy = strategy_of(self.trainer)
        loaders = {}
        for name, text in (("train", self.train), ("held_out", self.held_out)):
            chosen = [i * len(text) // self.num_eval_sequences for i in range(self.num_eval_sequences)]
            loaders[name] = _loader(text, chosen[strategy.dp_rank :: strategy.dp_size])
        return loaders

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Move all of the batch but cu_seqlens, which only the host reads."""
        tensors = {name: value for name, value in batch.items() if name != "cu_seqlens"}
        moved = super().transfer_batch_to_device(tensors, device, dataloader_idx)
        return {**moved, "cu_seqlens": batch["cu_seqlens"]}

    def identity(self) -> dict[str, Any]:
        """Return the properties of the data that must match a checkpoint's for its position to mean the same."""
        return {"num_sequences": len(self.train), "seqlen": self.seqlen, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and the data's `identity`."""
        return {"num_consumed": self.num_consumed, **self.identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of a checkpoint when fitting; evaluations ignore it.

        Raises:
            ValueError: text, length or order different from the checkpoint's.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        for name, value in self.identity().items():
            if state_dict.get(name) != value:
                raise ValueError(
                    f"{name} must be that of the checkpoint ({state_dict.get(name)}), got {value}; "
                    "resume with the same text, seqlen, seed and version of ringflash."
                )
        self.num_consumed = state_dict["num_consumed"]

    def check_vocabulary(self, vocab_size: int, where: str) -> None:
        """Raise ValueError on every rank if a `CausalLM` lacks tokens: ranks that meet one would fail, others hang."""
        module = None if self.trainer is None else self.trainer.lightning_module
        got = _vocab_size(module.config) if isinstance(module, CausalLM) else None
        if got is not None and got < vocab_size:
            raise ValueError(
                f"vocab_size of the model must be {vocab_size} or more for {where}, got {got}; "
                "give the model that of the tokenizer."
            )

    def _check_eval_sequences(self) -> None:
        """Raise ValueError unless the held-out data have enough sequences, and all data ranks get as many."""
        dp_size, available = strategy_of(self.trainer).dp_size, min(len(self.train), len(self.held_out))
        count = self.num_eval_sequences
        if count < 1 or count % dp_size or count > available:
            raise ValueError(
                f"num_eval_sequences must be a multiple of the data-parallel size ({dp_size}) from 1 to the number of "
                f"held-out sequences ({available}), got {count}; change it, or give more text."
            )


def _vocab_size(config: dict[str, Any]) -> int | None:
    """Return the vocabulary size of a configuration, by default that of its model family."""
    if "vocab_size" in config:
        return config["vocab_size"]
    from transformers import AutoConfig

    return getattr(AutoConfig.for_model(**config), "vocab_size", None)


def _check_sampler(trainer: lightning.Trainer) -> None:
    """Refuse Lightning's samplers: they ignore data ranks, or would split an evaluation set that is already split."""
    if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
        raise ValueError(
            "use_distributed_sampler must be False with data that each rank already reads its part of, got True, which "
            "is Lightning's default; pass Trainer(use_distributed_sampler=False)."
        )
    if trainer.overfit_batches and strategy_of(trainer).dp_size > 1:
        raise ValueError(
            f"overfit_batches must be 0 with several data ranks, got {trainer.overfit_batches}: all of them would "
            "train on the same sequences; set data_parallel_size to 1."
        )


def _check_epochs(trainer: lightning.Trainer) -> None:
    """Refuse epochs that never end, which is Lightning's default, or that end in the middle of a step."""
    endless = isinstance(trainer.limit_train_batches, float) and not trainer.overfit_batches
    if endless and trainer.max_epochs not in (None, -1):
        raise ValueError(
            f"max_epochs must be -1 without limit_train_batches, got {trainer.max_epochs}: the sequences have no end; "
            "give max_steps, or the batches of an epoch with limit_train_batches, or max_epochs=-1 for no limit."
        )
    batches, counts = trainer.limit_train_batches, [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            counts += callback.scheduling.values()
    for accumulated in counts:
        if isinstance(batches, int) and batches % accumulated and not trainer.fast_dev_run:
            raise ValueError(
                f"limit_train_batches must be a multiple of accumulate_grad_batches ({accumulated}), got {batches}: "
                "the last step of an epoch would divide by batches that it does not have; change one of them."
            )


def _accumulated(trainer: lightning.Trainer, epoch: int) -> int:
    """Return the number of batches per step in an epoch."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return trainer.accumulate_grad_batches


class _Unconsumed(Sampler[int]):
    """Sampler of this data rank's sequences; each iteration starts at the first unconsumed one.

    A trainer whose epochs are limited (limit_train_batches) starts an iteration in each epoch.
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
    """Refuse a checkpoint of another data class: Lightning finds positions by class name, and would start at 0."""
    classes = [name for name, state in checkpoint.items() if isinstance(state, dict) and "num_consumed" in state]
    if classes and type(data).__qualname__ not in classes:
        raise ValueError(
            f"data must be of the checkpoint's class ({', '.join(classes)}), got {type(data).__qualname__}, which "
            "would begin at its first sequence; resume with the same data, or start a new run from exported weights."
        )


def _loader(sequences: Sequences, chosen: Sampler[int] | list[int]) -> Loader:
    return DataLoader(cast(Dataset[Any], sequences), batch_size=None, sampler=chosen)


class CountConsumed(lightning.Callback):
    """Callback that counts samples after each batch, and saves the count as of the last complete step.

    The module could not count: its hook runs after the checkpoint callbacks, and the saved count would be one batch
    behind. Checkpoint callbacks run after all other callbacks.
    """

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Begin a new epoch if the checkpoint has completed one, unless an evaluation is due at its end.

        Lightning would train one more batch in the completed epoch, as a step of its own.
        """
        epochs = trainer.fit_loop
        loop, fetcher = epochs.epoch_loop, epochs._data_fetcher
        assert fetcher is not None
        batches = loop.batch_progress.current
        completed = loop._num_ready_batches_reached() and batches.completed == batches.ready
        if loop.restarting and completed and not loop._should_check_val_fx(fetcher):
            loop.restarting = False
            if epochs.epoch_progress.current.completed < epochs.epoch_progress.current.processed:
                epochs.epoch_progress.increment_completed()
                epochs.reset_restart_stage()

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Set the epoch's number of batches per step, which Lightning leaves at 1 in an epoch that it resumes."""
        trainer.accumulate_grad_batches = _accumulated(trainer, trainer.current_epoch)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Count one sample for every data rank."""
        trainer.datamodule.num_consumed += strategy_of(trainer).dp_size

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Round the number of batches up to whole steps, in case accumulate_grad_batches has changed.

        Lightning ends a step by the number of batches so far; without rounding the first step could be short.

        Raises:
            ValueError: a checkpoint of another data class, whose position Lightning would not restore.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            _check_class(trainer.datamodule, checkpoint)
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        missing = -progress["current"]["ready"] % _accumulated(trainer, checkpoint["epoch"])
        for kind in ("current", "total"):
            progress[kind] = {name: count + missing for name, count in progress[kind].items()}

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save a position in the middle of a step (accumulate_grad_batches) as the start of that step.

        Checkpoints do not contain partial gradients, so a resumed run repeats the whole step.
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
    """Documents of token files, shuffled, mixed by length and packed, with some of them held out.

    Each rank reads only its own chunks of a sequence.

    Args:
        folder: token files written by `python -m recipes.data prepare`; the same files on every host.
        seqlen: tokens of a whole sequence, over all ranks that share it.
        held_out_percent: percentage of documents held out of training; the same documents for every seed.
        num_eval_sequences: sequences to evaluate from each of the two sets; divisible by the data-parallel size.
        seed: determines the order of the documents in the sequences, and of the sequences.
        verify: compare all checksums first; the ranks of a host share the work, so that each file is read once.
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
            TokenFileError: damaged files.
            ValueError: a model with a smaller vocabulary.
        """
        strategy = strategy_of(self.trainer)
        self.files = open_on_all_ranks(Path(self.folder), strategy, self.verify)
        self.check_vocabulary(self.files.header.vocab_size, self.folder)
        trained, held_out = split(len(self.files), self.held_out_percent, self.seed)
        trained = mix_lengths(trained, torch.from_numpy(self.files.lengths)[trained])
        return self._sequences(trained, strategy), self._sequences(held_out, strategy)

    def identity(self) -> dict[str, Any]:
        """Add the files' fingerprint, the percentage held out, and the version of the order of documents."""
        added = {"tokens": self.files.header.fingerprint, "held_out_percent": self.held_out_percent, "order": ORDER}
        return {**super().identity(), **added}

    def _sequences(self, documents: Tensor, strategy: ContextParallelStrategy) -> TokenSequences:
        cp_rank = strategy.cp_mesh.get_local_rank()
        return TokenSequences(
            self.files, documents, self.seqlen, cp_size=strategy.cp_size, cp_rank=cp_rank, layout=strategy.layout
        )


def open_on_all_ranks(folder: Path, strategy: ContextParallelStrategy, verify: bool) -> TokenFiles:
    """Open the files of a folder on all ranks or none: if only one rank raised, the others would hang.

    Raises:
        TokenFileError: this rank's files are damaged or missing.
        ValueError, RuntimeError: another rank's files are, or ranks have different files.
    """
    with raising_together(dist.group.WORLD, {}, timeout=READ_TIMEOUT):
        files = TokenFiles(folder)
        if verify:
            raise_for(folder, files.corrupt_shards(strategy.local_rank, strategy.num_processes))
    assert dist.group.WORLD is not None
    if len(set(gather(dist.group.WORLD, files.header.fingerprint))) > 1:
        raise ValueError(f"{folder} must hold the same token files on every rank, got different ones; copy them again.")
    return files
