"""Verification of a LightningModule: Lightning's Trainer takes the step, with `ContextParallelStrategy`.

cp=1 uses the same number of ranks, which all train on the same whole sequence.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor
from torch.utils.data import DataLoader

from ringflash import huggingface
from ringflash.lightning.sharding import SequenceSharding
from ringflash.lightning.strategy import ContextParallelStrategy
from ringflash.verify.capture import Capture, plain_name
from ringflash.verify.observation import (
    Observation,
    Tensors,
    assign,
    attend_exactly,
    average,
    check_not_random,
    generator_states,
    gradient_order,
    prepare_batch,
    whole_inputs,
)
from ringflash.verify.probe import MakeReader
from ringflash.verify.session import Session
from ringflash.verify.target import Data, Training, default_prepare

_PRECISION: dict[torch.dtype, Any] = {torch.float32: "32-true", torch.bfloat16: "bf16-true"}


class LightningSession(Session):
    """Verification of one LightningModule."""

    cp1_on_all_ranks = True

    def observe(self, *, ring: bool, wide: bool = False, weights: Tensors | None = None) -> Observation:
        """Evaluate, then take one training step."""
        observer = _Observer(self, weights)
        trainer = self._trainer(observer, ring=ring, wide=wide)
        trainer.validate(observer.module, _Sequence(observer), verbose=False)
        observer.seen.eval_losses = {n: x.item() for n, x in trainer.callback_metrics.items() if "loss" in n}
        trainer.fit(observer.module, datamodule=_Sequence(observer))
        return observer.seen

    def read(self, data: Data, make_reader: MakeReader, *, ring: bool, wide: bool = False) -> Tensors:
        """Return the tensors that a reader collects in one evaluation."""
        reader = _Reader(data, make_reader)
        self._trainer(reader, ring=ring, wide=wide).validate(reader.module, _Sequence(reader), verbose=False)
        return reader.outputs

    def _trainer(self, callback: _SessionCallback, *, ring: bool, wide: bool = False) -> lightning.Trainer:
        """Build a training for a callback, and a trainer for it that writes and prints nothing."""
        size, training = self.group.size(), self.factory(self.group if ring else None)
        if wide:
            attend_exactly(training.module)
        callback.training, callback.strategy = training, ContextParallelStrategy(*((size, 1) if ring else (1, size)))
        module: Any = training.module
        module.configure_optimizers = lambda: training.optimizer(module.parameters())
        if isinstance(module, SequenceSharding):
            module.check_sequence_sharding = False  # verify itself reports the difference; the check would raise first
            if training.prepare in (default_prepare, huggingface.prepare_batch):
                training.prepare = _unsharded_batch
        logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)  # no device list
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        precision = {"plugins": [DoublePrecision()]} if wide else {"precision": _PRECISION[self.settings.dtype]}
        return lightning.Trainer(
            strategy=callback.strategy, accelerator=self.settings.device.type, devices=local_size,
            num_nodes=size // local_size, max_steps=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
            num_sanity_val_steps=0, callbacks=[callback],
            inference_mode=False,  # which cannot read DTensors, and which Lightning never uses over gloo
            **precision,
        )  # fmt: skip


def _unsharded_batch(input_ids: Tensor, *, labels: Tensor, cu_seqlens: Tensor | None, group: None) -> Any:
    """Return the batch that `SequenceSharding.shard_batch` is to shard."""
    if cu_seqlens is None:
        return input_ids, labels
    return {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens}


class _SessionCallback(lightning.Callback):
    """Callback that observes one training and supplies its data."""

    training: Training
    strategy: ContextParallelStrategy

    @property
    def module(self) -> Any:
        """The LightningModule."""
        return self.training.module

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the sequence; None if each rank has the whole sequence."""
        return self.strategy.cp_group if self.strategy.cp_size > 1 else None

    def data(self) -> Data:
        """Return the whole sequence."""
        raise NotImplementedError


class _Reader(_SessionCallback):
    """Callback that applies a reader to one evaluation."""

    def __init__(self, data: Data, make_reader: MakeReader) -> None:
        self._data, self.make_reader = data, make_reader
        self.outputs: Tensors = {}

    def data(self) -> Data:
        return self._data

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        """Add the hooks of the reader."""
        self._reader = self.make_reader(module, self.group, self._data, self.training.layout)

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Take the results of the reader."""
        self.outputs = self._reader.close()


class _Observer(_SessionCallback):
    """Callback that observes one evaluation and one step."""

    def __init__(self, session: Session, weights: Tensors | None) -> None:
        self.session, self.weights = session, weights
        self.seen = Observation()

    def data(self) -> Data:
        """Return the whole sequence, which is drawn once the model over the ring exists."""
        if self.group is not None:
            self.session.inspect(self.training)
        return self.session.data

    def on_validation_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Set and record the weights: this is the first hook after the model has been built."""
        if self.seen.weights:
            return
        for name, parameter in module.named_parameters():
            if self.weights is not None:
                assign(parameter, self.weights[plain_name(name)])
        self.seen.record_weights(module, self.group)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Record the batch that the module receives, and start the capture of the layers."""
        self.seen.inputs = whole_inputs(batch, self.group, self.session.data.seqlen, self.training.layout)
        self.order = gradient_order(module)
        length = self.session.data.seqlen // self.strategy.cp_size
        self.capture = Capture(module, length).__enter__()
        self.states = generator_states(self.session.data.input_ids.device)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Check that the forward, which has just ended, drew no random numbers."""
        check_not_random(self.states)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Record the layer outputs and the gradients, before they are clipped."""
        self.capture.__exit__(None, None, None)
        self.seen.record_outputs(module, self.capture, self.group, self.training.layout)
        self.seen.record_gradients(module, self.order, self.group)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss, and the parameters after the step."""
        self.seen.loss = average(outputs["loss"], self.group)
        self.seen.record_step(module, self.group)


class _Sequence(lightning.LightningDataModule):
    """Data module with a single batch, for both training and evaluation."""

    def __init__(self, callback: _SessionCallback) -> None:
        super().__init__()
        self.callback = callback

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the batch; Lightning calls this after the model has been built."""
        callback = self.callback  # the batch is a shard, or everything if the module shards its batches
        group = None if isinstance(callback.module, SequenceSharding) else callback.group
        return DataLoader([prepare_batch(callback.training, group, callback.data())], batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> dict[str, DataLoader[Any]]:
        """Return the loader by name, as `CausalLM` expects it."""
        return {"verify": self.train_dataloader()}
