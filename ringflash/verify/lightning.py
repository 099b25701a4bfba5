"""Verification of a LightningModule: Lightning's own Trainer takes the step, with `ContextParallelStrategy`.

cp=1 is the same number of ranks with a sequence each, and all of them the same one.
"""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DoublePrecision
from torch.utils.data import DataLoader

from ringflash.lightning.strategy import ContextParallelStrategy
from ringflash.verify.capture import Capture, plain_name, whole
from ringflash.verify.compare import Check
from ringflash.verify.diagnosis import Reach
from ringflash.verify.observe import (
    Observation,
    Tensors,
    assign,
    average,
    gradient_order,
    gradients_of,
    logits_of,
    parameters_of,
    whole_inputs,
)
from ringflash.verify.session import Session
from ringflash.verify.subject import Training

_PRECISION: dict[torch.dtype, Any] = {torch.float32: "32-true", torch.bfloat16: "bf16-true"}


class LightningSession(Session):
    """One verification of one LightningModule; all ranks take part in every run."""

    def observe(self, *, ring: bool, wide: bool = False, weights: Tensors | None = None) -> Observation:
        """Evaluate, and take one training step."""
        training = self.factory(self.group if ring else None)
        module = training.module
        module.configure_optimizers = lambda: training.optimizer(module.parameters())  # type: ignore[assignment]
        size = self.group.size()
        strategy = ContextParallelStrategy(*((size, 1) if ring else (1, size)))
        observer = _Observer(self, training, strategy, weights)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        precision = {"plugins": [DoublePrecision()]} if wide else {"precision": _PRECISION[self.settings.dtype]}
        trainer = lightning.Trainer(
            strategy=strategy, accelerator=self.settings.device.type, devices=local_size, num_nodes=size // local_size,
            max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0, callbacks=[observer],
            **precision,
        )  # fmt: skip
        trainer.validate(module, _Sequence(observer), verbose=False)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if "loss" in name}
        trainer.fit(module, datamodule=_Sequence(observer))
        observer.seen.eval_losses = metrics
        return observer.seen

    def _runs(self, got: Observation) -> Any:
        return self._with_cp1(got)

    def _mask_check(self) -> Check:
        """Not made: outside its Trainer the module is not called."""
        return Check("mask", note="not for a LightningModule")

    def _probe(self, check: Check) -> list[Reach]:
        return []


class _Observer(lightning.Callback):
    """Reads one evaluation and one step."""

    def __init__(
        self, session: Session, training: Training, strategy: ContextParallelStrategy, weights: Tensors | None
    ) -> None:
        self.session, self.training, self.strategy, self.weights = session, training, strategy, weights
        self.seen = Observation()
        self.capture: Capture | None = None
        self.order: list[str] = []

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share the sequence; None where each has it whole."""
        return self.strategy.cp_group if self.strategy.cp_size > 1 else None

    def batch(self) -> dict[str, Any]:
        """This rank's part of the sequence, drawn once the model is there."""
        if self.group is not None:
            self.session._see(self.training)
        data = self.session.data
        batch = self.training.prepare(data.input_ids, group=self.group, cu_seqlens=data.cu_seqlens, labels=data.labels)
        self.seen.inputs = whole_inputs(batch, self.group, data.seqlen, self.training.layout)
        return batch

    def on_validation_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """The first thing after the model was built: give it its weights, and read them."""
        if self.seen.weights:
            return
        for name, parameter in module.named_parameters():
            if self.weights is not None:
                assign(parameter, self.weights[plain_name(name)])
        self.seen.weights = parameters_of(module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Watch the layers."""
        self.order = gradient_order(module)
        length = self.session.data.seqlen // self.strategy.cp_size
        self.capture = Capture(module, length, keep_gradient=True).__enter__()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Gradients, before they are clipped."""
        assert self.capture is not None
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

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The loss, and what the step made of the parameters."""
        self.seen.loss = average(outputs["loss"], self.group)
        self.seen.stepped = parameters_of(module)


class _Sequence(lightning.LightningDataModule):
    """One batch to train on and to judge by."""

    def __init__(self, observer: _Observer) -> None:
        super().__init__()
        self.observer = observer

    def train_dataloader(self) -> DataLoader[Any]:
        """Asked for after the model was built."""
        return DataLoader([self.observer.batch()], batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> dict[str, DataLoader[Any]]:
        """By name, as `CausalLM` wants it."""
        return {"verify": self.train_dataloader()}
