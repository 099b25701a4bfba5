"""A causal language model for Lightning: built, sharded, and trained on a loss with the right scale on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from ringflash import huggingface
from ringflash.huggingface.batch import within_documents
from ringflash.huggingface.flops import layer_windows, matmul_sizes, training_flops
from ringflash.huggingface.weights import draw_weights, load_weights, merge_config, modules_in_fp32, read_config
from ringflash.lightning.float8 import multiply_in_float8
from ringflash.lightning.strategy import strategy_of
from ringflash.memory import Memory, save_memory
from ringflash.sequence.mask import Documents
from ringflash.sequence.padding import IGNORE_INDEX

Batch = dict[str, Any]

NUM_BUCKETS = 8  # number of `position_buckets`


class CausalLM(lightning.LightningModule):
    """A transformers model with ring attention, AdamW, and a cosine schedule with warm-up.

    Parameters are read from a checkpoint directory, or drawn from `seed` and their names only, so that on one kind of
    device they are equal for every number of ranks. With FSDP2 no rank ever holds all of them.

    Args:
        model: keywords of `transformers.AutoConfig.for_model`: model_type, hidden_size, ...; with `pretrained` only
            those that differ from the checkpoint's, such as rope_parameters to extend its context.
        pretrained: Hugging Face checkpoint directory (config.json, *.safetensors) to start from.
        learning_rate: peak of the schedule.
        warmup_steps: steps over which the rate rises from 0.
        decay_steps: step at which the rate reaches `final_rate` times the peak, warm-up included; it stays there.
        weight_decay: AdamW's decay of matrices; vectors (norms, biases) have none.
        betas: AdamW's betas.
        seed: determines the initial parameters.
        memory: which activations are kept for the backward; default all.
        impl: attention kernel, as in `ring_attention`; "auto" or for example "hopper_fp8" (docs/fp8.md).
        float8: recipe of torchao for the decoder's linear layers in FP8, as in `multiply_in_float8`; None is bf16.
    """

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        learning_rate: float = 1e-3,
        warmup_steps: int = 10,
        decay_steps: int = 1000,
        final_rate: float = 0.1,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        seed: int = 0,
        memory: Memory = Memory(),  # noqa: B008, it cannot change
        pretrained: str | None = None,
        impl: str = "auto",
        float8: str | None = None,
    ) -> None:
        super().__init__()
        self.pretrained = None if pretrained is None else Path(pretrained)
        self.config = merge_config(read_config(self.pretrained) if self.pretrained else {}, model or {})
        self.learning_rate, self.weight_decay, self.betas = learning_rate, weight_decay, betas
        self.warmup_steps, self.decay_steps, self.final_rate = warmup_steps, decay_steps, final_rate
        self.seed, self.memory, self.impl, self.float8 = seed, memory, impl, float8
        self.model: huggingface.CausalLMWithLoss | None = None
        self._in_fp32: list[nn.Module] = []
        # `training_flops` of a sequence's documents; None if the model's parameters cannot be counted
        self.flops_of: Callable[[Sequence[int] | Documents], float] | None = None
        self._losses: list[Tensor] = []  # one for each batch of this step so far
        self.eval_losses: dict[str, float] = {}  # last evaluation, by name of the loader
        self.eval_losses_by_position: dict[str, dict[int, float]] = {}  # and by `position_buckets`

    def configure_model(self) -> None:
        """Build the model and shard it over all ranks, once."""
        if self.model is not None:
            return
        strategy = strategy_of(self.trainer)
        self.model = empty_model(self.config, strategy.cp_group, self.memory, strategy.layout, self.impl)
        if self.float8 is not None:
            multiply_in_float8(self.model.model, self.float8, strategy.root_device.type)
        if (counted := matmul_sizes(self.model.model)) is not None:
            self.flops_of = partial(training_flops, counted, layer_windows(self.model.model.config))
        self._in_fp32 = modules_in_fp32(self.model.model)
        layers = self.model.get_submodule("model.model.layers").children()
        strategy.shard_parameters(self.model, layers, in_fp32=self._in_fp32)
        sharded = any(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        device = strategy.root_device if sharded else torch.device("cpu")
        if self.pretrained is None:
            draw_weights(self.model.model, device, self.seed)
        else:
            load_weights(self.model.model, device, self.pretrained)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a cast or move to all parameters and buffers, but never round a buffer, as transformers' loading does.

        Lightning's bf16-true would round rotary frequencies to bf16 and rotate distant tokens by wrong angles.
        Parameters that transformers keeps in fp32 are not rounded either, if FSDP2 shards them as separate units.
        """
        exact = dict(self.named_buffers())
        in_fp32 = {id(p) for module in self._in_fp32 for p in module.parameters() if isinstance(p, DTensor)}

        def unrounded(x: Tensor) -> Tensor:
            found: Tensor = fn(x)
            return x.to(found.device) if id(x) in in_fp32 and found.dtype.itemsize < x.dtype.itemsize else found

        result = super()._apply(unrounded, recurse)
        for name, buffer in list(self.named_buffers()):
            if torch.promote_types(buffer.dtype, exact[name].dtype) != buffer.dtype:
                owner, _, key = name.rpartition(".")
                self.get_submodule(owner)._buffers[key] = exact[name].to(buffer.device)
        return result

    def forward(self, **batch: Any) -> Any:
        """Return this rank's loss, scaled as in `ringflash.loss`; with per_token=True the loss of each token."""
        assert self.model is not None
        return self.model(**batch)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW, with weight decay only on matrices, and a schedule that follows `rate_factor` step by step.

        A checkpoint restores the position in the schedule and AdamW's moments, but not the rate, decay and betas.

        Raises:
            ValueError: parameters in fp16, in which AdamW's eps of 1e-8 is 0 and the first step 0 / 0.
        """
        if any(parameter.dtype == torch.float16 for parameter in self.parameters()):
            raise ValueError(
                "precision must keep parameters that AdamW can step, got fp16 (16-true), in which its eps is 0; use "
                "bf16-mixed or bf16-true."
            )
        named = dict(self.named_parameters())
        # By name, too: the biases of stacked experts have 2 dims.
        matrices = [p for name, p in named.items() if p.dim() > 1 and not name.endswith("bias")]
        vectors = [p for name, p in named.items() if p.dim() <= 1 or name.endswith("bias")]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas)
        scheduler = LearningRateSchedule(optimizer, self.rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def rate_factor(self, step: int) -> float:
        """Return the learning rate of a step (counted from 0) as a fraction of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        return self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * progress))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return this rank's loss, and log its mean over all ranks and over the step's batches so far.

        A mixture of experts also logs the routers' balancing loss of the last batch. The loss contains it, multiplied
        by its coefficient.
        """
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._losses = []
        loss = self(**batch)
        self._losses.append(loss.detach())
        self.log("loss", torch.stack(self._losses).mean(), sync_dist=True)
        self.log("learning_rate", self.optimizers().param_groups[0]["lr"])
        assert self.model is not None
        if self.model.router_loss is not None:
            self.log("router_loss", self.model.router_loss, sync_dist=True)
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Log the norm of the whole model's gradient, and clip by it; leave clipping by value to Lightning.

        A strategy that clips in the optimizer's step, as DeepSpeed does, logs the norm there.
        """
        strategy = strategy_of(self.trainer)
        if strategy.handles_gradient_clipping:
            return
        norm = strategy.gradient_norm(self.parameters())
        self.log("grad_norm", norm)
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm"):
            nn.utils.clip_grads_with_norm_(self.parameters(), gradient_clip_val, norm)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the configuration, which `python -m recipes.lightning.export` needs for the export."""
        checkpoint["model_config"] = self.config

    def on_validation_epoch_start(self) -> None:
        """Reset the sums of losses and of tokens for each loader and bucket."""
        shape = (len(self._eval_names()), NUM_BUCKETS, 2)
        self._totals = torch.zeros(shape, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the losses of this rank's tokens to the sums."""
        losses, _ = self(**batch, per_token=True)
        labelled = batch["shift_labels"] != IGNORE_INDEX
        seqlen = batch["shift_labels"].shape[1] * strategy_of(self.trainer).cp_size
        buckets = position_buckets(batch["position_ids"], batch["cu_seqlens"], seqlen).expand_as(labelled)[labelled]
        self._totals[dataloader_idx, :, 0].index_add_(0, buckets, losses[labelled].double())
        self._totals[dataloader_idx, :, 1].index_add_(0, buckets, torch.ones_like(buckets, dtype=torch.float64))

    def on_validation_epoch_end(self) -> None:
        """Log each loader's mean loss over the tokens of all ranks, in total and by `position_buckets`."""
        dist.all_reduce(self._totals)
        self.eval_losses, self.eval_losses_by_position = {}, {}
        for name, totals in zip(self._eval_names(), self._totals, strict=True):
            loss, tokens = totals.sum(0)
            self.eval_losses[name] = (loss / tokens).item()
            self.log(f"eval_loss/{name}", loss / tokens, sync_dist=True)
            by_position = {i: (x / n).item() for i, (x, n) in enumerate(totals) if n > 0}
            self.eval_losses_by_position[name] = by_position
            for bucket, value in by_position.items():
                self.log(f"eval_loss_by_position/{name}/{bucket}", value, sync_dist=True)

    def _eval_names(self) -> list[str]:
        """Return the names of the validation loaders, in their order."""
        loaders = self.trainer.val_dataloaders
        if not isinstance(loaders, dict):
            raise ValueError(
                f"val_dataloader must return loaders by name, got {type(loaders).__name__}; "
                "return {'held_out': loader}."
            )
        return list(loaders)


class LearningRateSchedule(LambdaLR):
    """LambdaLR that keeps the requested rate, decay and betas when it loads a checkpoint with other ones."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> None:
        super().__init__(optimizer, factor)
        names = ("initial_lr", "weight_decay", "betas")
        self.asked = [{name: group[name] for name in names} for group in optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore only the position in the schedule."""
        own = {"asked": self.asked, "base_lrs": self.base_lrs}
        super().load_state_dict({**state_dict, **own})
        for group, asked, factor in zip(self.optimizer.param_groups, self.asked, self.lr_lambdas, strict=True):
            group.update(asked, lr=asked["initial_lr"] * factor(self.last_epoch))


def empty_model(
    config: dict[str, Any], group: dist.ProcessGroup | None, memory: Memory, layout: str = "zigzag", impl: str = "auto"
) -> huggingface.CausalLMWithLoss:
    """Build a transformers model with ring attention over `group` on the meta device, whose forward returns the loss.

    `draw_weights` or `load_weights` gives it values.

    Args:
        config, memory: as `model` and `memory` of `CausalLM`.
    """
    huggingface.register()  # raises if transformers is missing
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), attn_implementation="ringflash", dtype=torch.get_default_dtype()
        )
    huggingface.set_group(model, group, layout=layout, impl=impl)
    save_memory(model, memory)
    return huggingface.CausalLMWithLoss(model, group)


def position_buckets(position_ids: Tensor, cu_seqlens: Tensor | None, seqlen: int) -> Tensor:
    """Return the bucket of each token, by the number of preceding tokens of its document; int64, as position_ids.

    Losses by bucket show if a model uses distant context.

        bucket   0        1            ...   NUM_BUCKETS - 2   NUM_BUCKETS - 1
        from     0        seqlen/128         seqlen / 4        seqlen / 2        preceding tokens

    Args:
        position_ids: (1, tokens), global, as `ringflash.huggingface.prepare_batch` returns them.
        cu_seqlens: bounds of the documents in the whole sequence, or a table of `ringflash.document_table`, whose
            documents count on from those that they continue; None is one document.
        seqlen: tokens of the whole sequence.
    """
    before = position_ids if cu_seqlens is None else within_documents(position_ids[0], cu_seqlens)[None]
    return torch.bucketize(before, torch.tensor(bucket_bounds(seqlen)[1:], device=before.device), right=True)


def bucket_bounds(seqlen: int) -> list[int]:
    """Return the lower bound of each bucket, in preceding tokens."""
    return [0, *(-(-seqlen // (1 << (NUM_BUCKETS - i))) for i in range(1, NUM_BUCKETS))]
