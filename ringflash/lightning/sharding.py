"""A LightningModule of one's own on a ring: its attention wrapped, its batches cut, its loss scaled.

class GPT(SequenceSharding, lightning.LightningModule): ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ringflash import huggingface
from ringflash.comm.group import Group, resolve
from ringflash.lightning.first_step import FirstStep, check_same, check_step
from ringflash.lightning.sequences import SequenceData
from ringflash.lightning.strategy import OneProcess, keeping_ties, mixed_precision_policy, ranks_of
from ringflash.sequence.layout import granularity, local_positions, shard_sequence
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.wrap import wrap_attention
from ringflash.wrap.check import check_wrapped

if TYPE_CHECKING:
    _Base = lightning.LightningModule
else:
    _Base = object

CHECKED_TOKENS = 8  # of each chunk, in the comparison with the whole sequence


class SequenceSharding(_Base):  # type: ignore[misc,valid-type]
    """Mixin for a LightningModule that holds whole sequences' model and is given whole sequences' batches.

    It comes before LightningModule among the bases, and wants a strategy with a context axis. In training and
    evaluation each step then has a shard, `positions` and `token_loss` speak of the whole sequence, and before the
    first training step `check_wrapped` compares the module with itself on a prefix of the first batch. Each method is
    there to be overridden.
    """

    _ringflash_ready = False
    _ringflash_cut = False  # whether batches reach the module in parts
    _ringflash_checked = False
    _ringflash_step: FirstStep | None = None  # while it is compared
    check_sequence_sharding = True  # False skips comparisons: of batches, and of a training step run twice

    def configure_model(self) -> None:
        """Wrap the attention and shard the parameters over all ranks, once: each entry of a ModuleList is a unit.

        Raises:
            ValueError: parameters of the module itself, or tied ones of two of its children.
        """
        if self._ringflash_ready:
            return
        self._ringflash_ready = True
        strategy = ranks_of(self.trainer)
        _check_data(self.trainer.datamodule)
        wrap_attention(self, strategy.cp_group, layout=strategy.layout)
        if own := [name for name, _ in self.named_parameters(recurse=False)]:
            raise ValueError(
                f"parameters must lie in submodules, whose forward gathers them, got {own}; move them into one."
            )
        if isinstance(strategy, OneProcess):
            return
        with keeping_ties(self):
            for child in _with_forward(self.children()):
                strategy.shard_parameters(child, _units(child))

    def shard_batch(self, batch: Any, group: Group) -> Any:
        """This rank's part of a batch.

        Args:
            batch: {"input_ids", "labels" and "cu_seqlens" if there are any}, which `huggingface.prepare_batch` cuts;
                or a tuple of tensors (batch, seqlen, ...), each cut along dim 1. Labels are already shifted.
        Raises:
            ValueError: something else.
        """
        if isinstance(batch, dict) and "input_ids" in batch:
            if other := batch.keys() - {"input_ids", "labels", "cu_seqlens"}:
                raise ValueError(
                    f"batch must have input_ids, labels and cu_seqlens alone, got {', '.join(sorted(other))}, too; "
                    "leave it out (padding is a label of -100 at the end, or a document), or override shard_batch."
                )
            return huggingface.prepare_batch(group=group, layout=ranks_of(self.trainer).layout, **batch)
        if isinstance(batch, tuple | list) and all(isinstance(x, Tensor) and x.dim() > 1 for x in batch):
            return tuple(shard_sequence(x, group, layout=ranks_of(self.trainer).layout) for x in batch)
        raise ValueError(
            f"batch must be a dict with input_ids or a tuple of (batch, seqlen) tensors, got {type(batch).__name__}; "
            "override shard_batch."
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Cut the batch before it goes to the device; on the first of a training also check the module.

        Raises:
            ValueError: ranks of a ring with different batches, or what a check finds; on every rank.
        """
        trainer, group = self.trainer, ranks_of(self.trainer).cp_group
        self._ringflash_cut = True
        if isinstance(trainer.datamodule, SequenceData):
            return batch  # the data module's batches are shards
        if self.check_sequence_sharding:
            check_same(batch, group)
            if trainer.training and not self._ringflash_checked:
                self._ringflash_checked = True
                self._check(batch)
        return self.shard_batch(batch, group)

    def positions(self, tokens: Tensor) -> Tensor:
        """Global positions of a shard's tokens, (seqlen_local,); those of all tokens where the batch is whole.

        Args:
            tokens: (batch, seqlen_local, ...).
        """
        group = self._group()
        cp_size, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
        layout = ranks_of(self.trainer).layout
        return local_positions(tokens.shape[1] * cp_size, cp_size, cp_rank, layout).to(tokens.device)

    def token_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over the tokens of the whole sequence, whose gradient `ringflash.loss` scales.

        The value is the same on all ranks of a ring, so that it can be printed, logged and compared; its gradient is
        that of this rank's tokens, times cp_size, as averaging over ranks needs it.

        Args:
            logits: (batch, seqlen_local, vocab_size).  labels: (batch, seqlen_local), shifted, -100 is none.
        Returns:
            loss: scalar, fp32 (fp64 for fp64), 0 without labels; in bf16 the sum of a million tokens has two digits, in
                fp16 it is inf.
        """
        group = self._group()
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        local = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
        total, count = _summed(group, local.detach(), (labels != IGNORE_INDEX).sum())
        if self._ringflash_step is not None:
            self._ringflash_step.num_tokens.append(int(count))
        cp_size, count = 1 if group is None else group.size(), count.clamp(min=1)
        return cast(Tensor, _WithValue.apply(local * cp_size / count, (total / count).to(local.dtype)))

    def log(self, name: str, value: Any, *args: Any, sync_dist: bool | None = None, **options: Any) -> None:
        """Log a value as Lightning does, but by default its mean (least, greatest) over all ranks, which must all call.

        Each rank's own value would show a curve of one rank's tokens, and `EarlyStopping` and `ModelCheckpoint` would
        decide by different numbers.

        Args:
            sync_dist: False logs each rank's own value; default True, unless `rank_zero_only` is.
        Raises:
            ValueError: a sum without `sync_dist`: of counts it goes over all ranks, of equal values over none.
        """
        reduce_fx = options.get("reduce_fx", args[4] if len(args) > 4 else "mean")
        if sync_dist is None and reduce_fx in ("sum", sum, torch.sum):
            raise ValueError(
                f"sync_dist must be given with reduce_fx={reduce_fx!r}, got none for {name}; True for what each rank "
                "has a part of, False for what is equal on all ranks."
            )
        sync_dist = not options.get("rank_zero_only", False) if sync_dist is None else sync_dist
        super().log(name, value, *args, sync_dist=sync_dist, **options)

    def log_dict(self, dictionary: Any, *args: Any, sync_dist: bool | None = None, **options: Any) -> None:
        """Log several values as `log` does."""
        super().log_dict(dictionary, *args, sync_dist=cast(bool, sync_dist), **options)

    def _group(self) -> Any:
        if self._ringflash_step is not None and self._ringflash_step.whole:
            return None
        if not self._ringflash_cut:
            raise RuntimeError(
                "batches must be cut before a step, got one that on_before_batch_transfer has not seen; call super()'s "
                "where you override it, and take batch, not dataloader_iter, in steps."
            )
        return resolve(ranks_of(self.trainer).cp_group)

    def _check(self, batch: Any) -> None:
        """`check_wrapped` on the first tokens of a batch, and the loss of the ring beside that of the whole."""
        strategy, precision = ranks_of(self.trainer), self.trainer.precision_plugin
        prefix = _prefix(batch, granularity(strategy.cp_size, strategy.layout) * CHECKED_TOKENS)
        local, whole = FirstStep(whole=False), FirstStep(whole=True)

        def run(group: Group) -> None:
            shard = self.transfer_batch_to_device(self.shard_batch(prefix, group), self.trainer.strategy.root_device, 0)
            step = whole if group is None else local
            with self._as_checked(step), precision.train_step_context():
                step.run(self.training_step, shard)

        check_wrapped(self, run)
        dtype = mixed_precision_policy(precision.precision).param_dtype
        check_step(local, whole, strategy.cp_group, dtype or next(self.parameters()).dtype)

    @contextmanager
    def _as_checked(self, step: FirstStep) -> Iterator[None]:
        """Positions and losses of a whole sequence where it is one; nothing is logged, nor trained."""
        self._ringflash_step = step
        self.log = self.log_dict = _log_nothing  # type: ignore[method-assign]
        self.manual_backward = step.stop  # type: ignore[method-assign]
        groups = (group for optimizer in self.trainer.optimizers for group in optimizer.param_groups)
        trained = [(p, p.requires_grad) for group in groups for p in group["params"]]
        try:
            yield
        finally:
            del self.log, self.log_dict, self.manual_backward
            self._ringflash_step = None
            for parameter, is_trained in trained:  # a step that was stopped may have toggled some
                parameter.requires_grad_(is_trained)


class _WithValue(torch.autograd.Function):
    """One tensor's gradient under the value of another, which may be infinite."""

    @staticmethod
    def forward(ctx, own, value):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


def _summed(group: Any, *values: Tensor) -> list[Tensor]:
    """Scalars summed over a group, in one message: fp64 holds counts exactly."""
    if group is None:
        return list(values)
    sums = torch.stack([value.double() for value in values])
    dist.all_reduce(sums, group=group)
    return list(sums)


def _check_data(data: lightning.LightningDataModule | None) -> None:
    """Lightning asks a data module before it asks the module."""
    hook = "on_before_batch_transfer"
    if data is not None and not isinstance(data, SequenceData) and is_overridden(hook, data):
        raise ValueError(
            f"{hook} must be left to the module, got one in {type(data).__name__}; it would take the place of the one "
            "that cuts batches: do its work in the module's shard_batch."
        )


def _log_nothing(*_: Any, **__: Any) -> None:
    """In the place of self.log, which Lightning allows in a step of its own only."""


def _with_forward(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules that have parameters, those of a list in its place: only a forward can gather them."""
    for module in modules:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _with_forward(module.children())
        elif any(True for _ in module.parameters()):
            yield module


def _units(module: nn.Module) -> list[nn.Module]:
    """The layers of a stack, outermost: each is gathered when it runs."""
    lists = (layer for layer in module.modules() if isinstance(layer, nn.ModuleList))
    first = next(lists, None)
    return [] if first is None else list(_with_forward([first]))


def _prefix(batch: Any, size: int) -> Any:
    """The first tokens of every tensor with a sequence, without documents."""
    if isinstance(batch, dict):
        batch = {name: x for name, x in batch.items() if name != "cu_seqlens"}
    return apply_to_collection(batch, Tensor, lambda x: x[:, :size] if x.dim() > 1 else x)
