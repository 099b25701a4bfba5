"""Verification of a LightningModule: Lightning's own Trainer takes the step, with `ContextParallelStrategy`.

cp=1 is the same number of ranks with a sequence each, and all of them the same one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
from ringflash.verify.capture import Capture, plain_name, whole
from ringflash.verify.observe import (
    Observation,
    Tensors,
    assign,
    average,
    check_not_random,
    disagreement_of,
    generator_states,
    gradient_order,
    gradients_of,
    logits_of,
    parameters_of,
    prepared,
    whole_inputs,
)
from ringflash.verify.probe import Look
from ringflash.verify.session import Session
from ringflash.verify.subject import Data, Training

_PRECISION: dict[torch.dtype, Any] = {torch.float32: "32-true", torch.bfloat16: "bf16-true"}


class LightningSession(Session):
    """One verification of one LightningModule; all ranks take part in every run."""

    def observe(self, *, ring: bool, wide: bool = False, weights: Tensors | None = None) -> Observation:
        """Evaluate, and take one training step."""
        observer = _Observer(self, weights)
        trainer = self._trainer(observer, ring=ring, wide=wide)
        trainer.validate(observer.module, _Sequence(observer), verbose=False)
        observer.seen.eval_losses = {n: x.item() for n, x in trainer.callback_metrics.items() if "loss" in n}
        trainer.fit(observer.module, datamodule=_Sequence(observer))
        return observer.seen

    def read(self, data: Data, look: Look, *, ring: bool, wide: bool = False) -> Tensors:
        """What `look` reads in an evaluation."""
        reader = _Reader(self, data, look)
        self._trainer(reader, ring=ring, wide=wide).validate(reader.module, _Sequence(reader), verbose=False)
        return reader.outputs

    def _trainer(self, reader: _Reads, *, ring: bool, wide: bool = False) -> lightning.Trainer:
        """A trainer that writes and prints nothing, for a module that it gives to `reader`."""
        size = self.group.size()
        training = self.factory(self.group if ring else None)
        strategy = ContextParallelStrategy(*((size, 1) if ring else (1, size)))
        reader.start(training, strategy)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        precision = {"plugins": [DoublePrecision()]} if wide else {"precision": _PRECISION[self.settings.dtype]}
        return lightning.Trainer(
            strategy=strategy, accelerator=self.settings.device.type, devices=local_size, num_nodes=size // local_size,
            max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0, callbacks=[reader],
            inference_mode=False,  # no DTensor can be read in it; over gloo Lightning never uses it
            **precision,
        )  # fmt: skip

    def _runs(self, got: Observation) -> Any:
        return self._with_cp1(got)

    def _at_cp1(self, make: Callable[[], Any]) -> Any:
        return make()


class _Reads(lightning.Callback):
    """Reads something off one training; gives it the sequence."""

    session: Session
    training: Training
    strategy: ContextParallelStrategy

    def start(self, training: Training, strategy: ContextParallelStrategy) -> None:
        """Take the training to be read, with the optimizer that verify steps."""
        self.training, self.strategy = training, strategy
        module = training.module
        module.configure_optimizers = lambda: training.optimizer(module.parameters())  # type: ignore[assignment]
        if isinstance(module, SequenceSharding):
            module.check_sequence_sharding = False  # it would raise before verify has looked
            if training.prepare is huggingface.prepare_batch:
                training.prepare = _whole

    @property
    def module(self) -> Any:
        """The LightningModule."""
        return self.training.module

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the sequence; None where each has it whole."""
        return self.strategy.cp_group if self.strategy.cp_size > 1 else None

    def data(self) -> Data:
        """The whole sequence."""
        return self.session.data

    def batch(self) -> Any:
        """What a data loader gives this rank: its part of it, or all of it for a module that cuts its batches."""
        return prepared(self.training, None if isinstance(self.module, SequenceSharding) else self.group, self.data())


def _whole(input_ids: Tensor, *, labels: Tensor, cu_seqlens: Tensor | None, group: None) -> Any:
    """The batch that `SequenceSharding.shard_batch` cuts."""
    if cu_seqlens is None:
        return input_ids, labels
    return {"input_ids": input_ids, "labels": labels, "cu_seqlens": cu_seqlens}


class _Reader(_Reads):
    """Reads something in one evaluation."""

    def __init__(self, session: Session, data: Data, look: Look) -> None:
        self.session, self._data, self.look = session, data, look
        self.outputs: Tensors = {}

    def data(self) -> Data:
        """The sequence that was asked for."""
        return self._data

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        """Watch the layers."""
        self._watch = self.look(module, self.group, self._data, self.training.layout)

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Read them."""
        self.outputs = self._watch.close()


class _Observer(_Reads):
    """Reads one evaluation and one step."""

    def __init__(self, session: Session, weights: Tensors | None) -> None:
        self.session, self.weights = session, weights
        self.seen = Observation()
        self.order: list[str] = []

    def data(self) -> Data:
        """The sequence, drawn once the model over the ring is there."""
        if self.group is not None:
            self.session._see(self.training)
        return super().data()

    def on_validation_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """The first thing after the model was built: give it its weights, and read them."""
        if self.seen.weights:
            return
        for name, parameter in module.named_parameters():
            if self.weights is not None:
                assign(parameter, self.weights[plain_name(name)])
        self.seen.weights = parameters_of(module)
        self.seen.apart_before = disagreement_of(self.seen.weights, self.group)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the batch as the module gets it, and watch the layers."""
        self.seen.inputs = whole_inputs(batch, self.group, self.session.data.seqlen, self.training.layout)
        self.order = gradient_order(module)
        length = self.session.data.seqlen // self.strategy.cp_size
        self.capture = Capture(module, length, keep_gradient=True).__enter__()
        self.states = generator_states(self.session.data.input_ids.device)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """The forward is over."""
        check_not_random(self.states)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Gradients, before they are clipped."""
        self.capture.__exit__(None, None, None)
        layout = self.training.layout
        self.seen.layers = {n: whole(x, self.group, layout) for n, x in self.capture.outputs.items()}
        gradient = self.capture.gradient()
        if gradient is not None:
            shared = whole(gradient, self.group, layout) / self.strategy.cp_size
            self.seen.loss_gradient = {"d loss / d hidden": shared}
        self.seen.logits = logits_of(module, self.seen.layers)
        gradients = gradients_of(module)
        self.seen.gradients = {name: gradients[name] for name in dict.fromkeys([*self.order, *gradients])}
        self.seen.disagreement = disagreement_of(gradients, self.group)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The loss, and what the step made of the parameters."""
        self.seen.loss = average(outputs["loss"], self.group)
        self.seen.stepped = parameters_of(module)
        self.seen.apart_after = disagreement_of(self.seen.stepped, self.group)


class _Sequence(lightning.LightningDataModule):
    """One batch to train on and to judge by."""

    def __init__(self, reader: _Reads) -> None:
        super().__init__()
        self.reader = reader

    def train_dataloader(self) -> DataLoader[Any]:
        """Asked for after the model was built."""
        return DataLoader([self.reader.batch()], batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> dict[str, DataLoader[Any]]:
        """By name, as `CausalLM` wants it."""
        return {"verify": self.train_dataloader()}
