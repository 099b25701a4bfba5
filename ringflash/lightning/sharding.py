"""A user's LightningModule on a ring: attention wrapped, batches sharded, and the loss scaled.

class GPT(SequenceSharding, lightning.LightningModule): ...
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ringflash import huggingface
from ringflash.attention.options import CallOptions
from ringflash.comm.group import Group, resolve
from ringflash.lightning.data import SequenceData
from ringflash.lightning.first_step import FirstStep, check_labels, check_same_batch, reduction_of, sample, warn_of_logs
from ringflash.lightning.strategy import OneProcess, check_ties, ranks_of
from ringflash.sequence.layout import DOCUMENT_LAYOUTS, granularity, local_positions, shard_sequence
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.wrap import wrap_attention
from ringflash.wrap.check import check_runs
from ringflash.wrap.interception import WrappedState
from ringflash.wrap.wrapper import refuse_between_steps, wrapped_state

if TYPE_CHECKING:
    _Base = lightning.LightningModule
else:
    _Base = object

# Lightning's warning for a module with a hook of this name if there is a data module; here the mixin's hook is meant.
OWN_HOOK = "You have overridden `on_before_batch_transfer` in `LightningModule` but have passed in a"
CHECKED_TOKENS = 8  # per chunk, in the comparison with the whole sequence


class SequenceSharding(_Base):  # type: ignore[misc,valid-type]
    """Mixin for a LightningModule that is written for whole sequences.

    List it before LightningModule among the bases, and use a strategy with a context axis. Each training or evaluation
    step then receives a shard of the batch, while `positions` and `token_loss` refer to the whole sequence. Between the
    steps attention is refused, unless `ringflash.disable_ring` says that sequences are whole. Before the first step of
    training, validation and test the module on the ring is compared with the module on the whole sequence, for a part
    of the batch. Each method may be overridden.
    """

    _ringflash_ready = False
    _ringflash_cut = False  # True once a batch has been sharded
    _ringflash_checked: frozenset[str] = frozenset()  # steps that have been compared
    _ringflash_documents: Tensor | None = None  # cu_seqlens of the current batch
    _ringflash_step: FirstStep | None = None  # during the comparison
    check_sequence_sharding = True  # False skips the checks of batches and of the first step

    def configure_model(self) -> None:
        """Wrap the attention and shard the parameters over all ranks, with each entry of a ModuleList as a unit.

        Raises:
            ValueError: the module itself has parameters, or two of its children have tied ones; a second trainer has
                other rings or another layout.
        """
        strategy = ranks_of(self.trainer)
        if self._ringflash_ready:
            _check_same_ring(wrapped_state(self).options, strategy)
            return
        self._ringflash_ready = True
        warnings.filterwarnings("ignore", OWN_HOOK)
        _check_data(self.trainer.datamodule)
        wrap_attention(self, strategy.cp_group, layout=strategy.layout)
        refuse_between_steps(self)
        if own := [name for name, _ in self.named_parameters(recurse=False)]:
            raise ValueError(
                f"parameters must be in submodules, whose forward gathers them, got {own}; move them into one."
            )
        if isinstance(strategy, OneProcess):
            return
        with check_ties(self):
            for child in self.children():
                for module in _modules_to_shard([child]):  # a layer of a list has no units inside
                    strategy.shard_parameters(module, [] if isinstance(child, nn.ModuleList) else _units(module))

    def shard_batch(self, batch: Any, group: Group) -> Any:
        """Return this rank's shard of a batch.

        Args:
            batch: a dict with "input_ids" and optionally "labels", "cu_seqlens" and "position_ids" ("global" or
                "document"), for `huggingface.prepare_batch`; or a tuple of tensors (batch, seqlen, ...), each sharded
                along dim 1. Labels are already shifted.
        Raises:
            ValueError: any other batch.
        """
        if isinstance(batch, Mapping) and "input_ids" in batch:
            if other := batch.keys() - {"input_ids", "labels", "cu_seqlens", "position_ids"}:
                raise ValueError(
                    "batch must have only input_ids, labels, cu_seqlens and position_ids, got also "
                    f"{', '.join(sorted(other))}; leave it out (padding is a label of -100 at the end, or a document), "
                    "or override shard_batch."
                )
            return huggingface.prepare_batch(group=group, layout=ranks_of(self.trainer).layout, **batch)
        if isinstance(batch, tuple | list) and all(isinstance(x, Tensor) and x.dim() > 1 for x in batch):
            return tuple(shard_sequence(x, group, layout=ranks_of(self.trainer).layout) for x in batch)
        raise ValueError(
            f"batch must be a dict with input_ids or a tuple of (batch, seqlen) tensors, got {type(batch).__name__}; "
            "override shard_batch."
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Shard the batch before it is moved to the device; check the module on the first batch of each kind of step.

        Raises:
            ValueError: ranks of a ring have different batches, or the check fails; on every rank.
        """
        trainer, group = self.trainer, ranks_of(self.trainer).cp_group
        self._ringflash_cut = True
        self._ringflash_documents = _documents(batch)
        if isinstance(trainer.datamodule, SequenceData):
            return batch  # its batches are already shards
        if self.check_sequence_sharding:
            check_same_batch(batch, group)
            step = _step_of(trainer)
            if step is not None and step not in self._ringflash_checked:
                self._ringflash_checked |= {step}
                self._check(batch, step, dataloader_idx)
        return self.shard_batch(batch, group)

    def positions(self, tokens: Tensor) -> Tensor:
        """Return the global positions of a shard's tokens, (seqlen_local,), or of all tokens if the batch is whole.

        Args:
            tokens: (batch, seqlen_local, ...).
        """
        if (group := self._group()) is None:
            return torch.arange(tokens.shape[1], device=tokens.device)
        layout, seqlen = ranks_of(self.trainer).layout, tokens.shape[1] * group.size()
        return local_positions(seqlen, group.size(), group.rank(), layout, self._ringflash_documents).to(tokens.device)

    def token_loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean cross-entropy over the tokens of the whole sequence, with the gradient scale of `ringflash.loss`.

        The value is equal on all ranks of a ring, so that it can be printed, logged and compared. The gradient is that
        of this rank's tokens times cp_size, because gradients are then averaged over ranks.

        Args:
            logits: (batch, seqlen_local, vocab_size).  labels: (batch, seqlen_local), shifted, -100 is none.
            weights: (batch, seqlen_local), of the tokens in the mean, such as a loss mask of 0 and 1; default 1.
                Differentiable.
        Returns:
            loss: scalar, fp32 (fp64 for fp64), 0 without labels or weights. A sum over a million tokens has two digits
                in bf16, and is inf in fp16.
        """
        group, labelled = self._group(), labels != IGNORE_INDEX
        order = None if group is None else getattr(ranks_of(self.trainer), "unit_order", None)
        if order is not None:  # a rank that left out a unit would wait below for one that did not
            order.enter("token_loss", logits.device.type)
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        mass = labelled if weights is None else torch.where(labelled, weights, 0).double()
        if weights is not None:  # 0 times an infinite loss is 0
            nothing = (mass.flatten() == 0) & ~losses.isfinite()
            losses = losses.masked_fill(nothing, 0) * mass.flatten().to(losses.dtype)
        local = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
        total, count, num_labels = _sum_over_group(group, local.detach(), mass.detach().sum(), labelled.sum())
        if self._ringflash_step is not None:
            self._ringflash_step.num_tokens.append(int(num_labels))
        if (state := self._wrapped()) is not None and state.watch is not None:
            for kind, x in (("logits", logits), ("labels", labels), ("weights", weights)):
                state.watch("token_loss", kind, x)
        cp_size, count = 1 if group is None else group.size(), torch.where(count == 0, 1, count)
        mean = (total / count).to(local.dtype)
        if mass.requires_grad:  # the divisor has weights, too, also those of other ranks
            local = local - mean * mass.sum()
        return cast(Tensor, _WithValue.apply(local * cp_size / count, mean))

    def log(self, name: str, value: Any, *args: Any, sync_dist: bool | None = None, **options: Any) -> None:
        """Log a value as Lightning does, but by default reduced over all ranks, which must all call this.

        Otherwise the curve would show only one rank's tokens, and `EarlyStopping` and `ModelCheckpoint` would decide
        by different numbers on different ranks.

        Args:
            sync_dist: False logs each rank's own value; default True, unless `rank_zero_only` is True.
        Raises:
            ValueError: a sum without `sync_dist`: counts must be summed over ranks, values that all ranks share must
                not.
        """
        reduce_fx = reduction_of(args, options)
        if sync_dist is None and reduce_fx == "sum":
            raise ValueError(
                f"sync_dist must be given with reduce_fx={reduce_fx!r}, got none for {name}; pass True if each "
                "rank has a part of the sum, False if all ranks have the same value."
            )
        sync_dist = not options.get("rank_zero_only", False) if sync_dist is None else sync_dist
        super().log(name, value, *args, sync_dist=sync_dist, **options)

    def log_dict(self, dictionary: Any, *args: Any, sync_dist: bool | None = None, **options: Any) -> None:
        """Log several values as `log` does."""
        super().log_dict(dictionary, *args, sync_dist=cast(bool, sync_dist), **options)

    def _group(self) -> Any:
        """Return the ring of the current step; None while whole sequences are run.

        Raises:
            RuntimeError: the batch was not cut.
        """
        if self._ringflash_step is not None and self._ringflash_step.whole:
            return None
        if (state := self._wrapped()) is not None and state.whole:
            return None
        if not self._ringflash_cut:
            raise RuntimeError(
                "batches must be cut before a step, got a batch that on_before_batch_transfer has not seen; call "
                "super()'s method where you override it, and take batch, not dataloader_iter, in steps."
            )
        return resolve(ranks_of(self.trainer).cp_group)

    def _wrapped(self) -> WrappedState | None:
        return getattr(self, "_ringflash_state", None)

    def _check(self, batch: Any, name: str, dataloader_idx: int) -> None:
        """Run `check_runs` of a step on a few tokens of a batch, if it is sharded at all.

        Of an evaluation, only what it logs has an effect, not what it returns.
        """
        strategy, precision = ranks_of(self.trainer), self.trainer.precision_plugin
        if resolve(strategy.cp_group) is None:
            return
        device = self.trainer.strategy.root_device
        size = granularity(strategy.cp_size, strategy.layout) * CHECKED_TOKENS
        bounds = torch.tensor([0, size], dtype=torch.int32) if strategy.layout in DOCUMENT_LAYOUTS else None
        tokens = sample(batch, size, local_positions(size, strategy.cp_size, 0, strategy.layout, bounds))
        if bounds is not None and isinstance(tokens, dict):
            tokens["cu_seqlens"] = bounds
        documents, self._ringflash_documents = self._ringflash_documents, _documents(tokens)
        local, whole = FirstStep(whole=False), FirstStep(whole=True)

        def run(group: Group) -> float | None:
            """Run a step on the shard, or for None on the whole sequence; return the loss of a training step."""
            step = whole if group is None else local
            gpus = [device] if device.type == "cuda" else []  # both runs draw the same numbers
            with self._as_trial(step), precision.forward_context(), torch.random.fork_rng(devices=gpus):
                shard = self._apply_batch_transfer_handler(self.shard_batch(tokens, group), device, dataloader_idx)
                step.run(getattr(self, name), shard, dataloader_idx)
            if group is None:
                check_labels(local, whole, strategy.cp_group)
            return step.loss if name == "training_step" else 0.0

        check_runs(
            self, run, f"{name}'s loss, averaged over the ring,",
            "use token_loss, which counts the tokens of all ranks (a loss mask is its argument weights), with labels "
            "shifted before the batch is sharded, or set check_sequence_sharding = False if another loss is intended",
        )  # fmt: skip
        warn_of_logs(name, local, whole, strategy.cp_group)
        self._ringflash_documents = documents

    @contextmanager
    def _as_trial(self, step: FirstStep) -> Iterator[None]:
        """Run the enclosed step as a trial: it logs and trains nothing, and knows if its sequence is whole."""
        self._ringflash_step = step
        self.log, self.log_dict = step.log, step.log_dict  # type: ignore[method-assign]
        self.manual_backward = step.stop  # type: ignore[method-assign]
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        trained = [(p, p.requires_grad) for group in groups for p in group["params"]]
        options = [deepcopy({name: x for name, x in group.items() if name != "params"}) for group in groups]
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        schedules = [deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        try:
            with isolate_rng(include_cuda=False):
                yield
        finally:
            del self.log, self.log_dict, self.manual_backward
            self._ringflash_step = None
            for parameter, is_trained in trained:  # a step that ended early may have toggled some
                parameter.requires_grad_(is_trained)
            for scheduler, schedule in zip(schedulers, schedules, strict=True):  # it may have made a step of them
                scheduler.load_state_dict(schedule)
            for group, option in zip(groups, options, strict=True):
                group.update(option)


def _step_of(trainer: Any) -> str | None:
    """Return the name of the step that the trainer is about to run; None for predictions, which log nothing."""
    if trainer.sanity_checking or trainer.validating:
        return "validation_step"
    return "training_step" if trainer.training else "test_step" if trainer.testing else None


def _check_same_ring(wrapped: CallOptions, strategy: Any) -> None:
    """Refuse a strategy with other shards than the one for which the module's attention was wrapped."""
    before, now = (
        "one process" if group is None else f"ranks {dist.get_process_group_ranks(group)} with layout {layout!r}"
        for group, layout in ((wrapped.group, wrapped.layout), (resolve(strategy.cp_group), strategy.layout))
    )
    if before != now:
        raise ValueError(
            f"strategy must have the ring for which an earlier trainer wrapped the module, {before}, got {now}; make a "
            "new module, and load a checkpoint into it."
        )


class _WithValue(torch.autograd.Function):
    """Return `value`, which may be infinite, with the gradient of `own`."""

    @staticmethod
    def forward(ctx, own, value):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


def _sum_over_group(group: Any, *values: Tensor) -> list[Tensor]:
    """Sum scalars over a group in one all-reduce; in fp64, which is exact for counts."""
    if group is None:
        return list(values)
    sums = torch.stack([value.double() for value in values])
    dist.all_reduce(sums, group=group)
    return list(sums)


def _check_data(data: lightning.LightningDataModule | None) -> None:
    """Refuse a data module that overrides the hook that shards batches: Lightning would not call the module's."""
    hook = "on_before_batch_transfer"
    if data is not None and not isinstance(data, SequenceData) and is_overridden(hook, data):
        raise ValueError(
            f"{hook} must be left to the module, got one in {type(data).__name__}, which would replace the module's "
            "and leave batches whole; do its work in the module's shard_batch."
        )


def _modules_to_shard(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Modules with parameters; a list or dict is replaced by its entries, because it has no forward to gather in."""
    for module in modules:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from _modules_to_shard(module.children())
        elif any(True for _ in module.parameters()):
            yield module


def _units(module: nn.Module) -> list[nn.Module]:
    """Return the entries of a module's outermost ModuleList, each gathered when it runs."""
    lists = (layer for layer in module.modules() if isinstance(layer, nn.ModuleList))
    first = next(lists, None)
    return [] if first is None else list(_modules_to_shard([first]))


def _documents(batch: Any) -> Tensor | None:
    """Return the document bounds of a batch, if it has any."""
    return batch.get("cu_seqlens") if isinstance(batch, Mapping) else None
