"""Callback that watches what FP8 attention rounds, or would round."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import lightning
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash.lightning.strategy import strategy_of
from ringflash_kernels import measure_fp8_rounding


class Fp8Monitor(lightning.Callback):
    """Callback that logs the largest |q|, |k| and |v| of all layers, and the share of them that rounding to e4m3 loses.

        fp8/amax_q, fp8/amax_k, fp8/amax_v   largest absolute values
        fp8/saturated                        share of values that are not finite, or beyond 448 times their scale
        fp8/flushed                          share of values that are rounded to 0

    Each is that of the worst layer and rank. It watches any kernel: a run with an exact one shows what FP8 would round.
    A measured batch costs one synchronisation with the device.

    Args:
        every_n_steps: measure the batches whose step is a multiple of this.
        num_tokens: measure the shares of the first of each rank's tokens.
    """

    def __init__(self, every_n_steps: int = 100, num_tokens: int = 2048) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("num_tokens", num_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}; leave it out for its default.")
        self.every_n_steps, self.num_tokens = every_n_steps, num_tokens
        self._stack = ExitStack()
        self._calls: _RoundingOfCalls | None = None

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        """Start watching if this step is due."""
        if trainer.global_step % self.every_n_steps == 0:
            self._calls = self._stack.enter_context(_RoundingOfCalls(self.num_tokens))

    def on_before_backward(self, *_: Any) -> None:
        """Stop watching: the backward of checkpointed layers repeats their calls."""
        self._stack.close()

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        """Log what was found.

        Raises:
            RuntimeError: no call of ring attention was seen.
        """
        if self._calls is None:
            return
        found, self._calls = self._calls.found, None
        if not found:
            raise RuntimeError("Fp8Monitor must see a call of ring_attention in each step, got none; leave it out.")
        worst = torch.stack([torch.stack(list(call.values())) for call in found]).nan_to_num(torch.inf).amax(0)
        worst = worst.to(strategy_of(trainer).root_device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        pl_module.log_dict({f"fp8/{name}": x for name, x in zip(found[0], worst.tolist(), strict=True)})

    def on_exception(self, *_: Any) -> None:
        """Stop watching."""
        self._calls = None
        self._stack.close()


class _RoundingOfCalls(TorchDispatchMode):
    """Mode that measures the operands of every call of ring attention."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.found: list[dict[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.ringflash.ring_attention.default:
            q, k, v = (x.detach() for x in args[:3])
            whole = {f"amax_{name}": x.abs().amax().float() for name, x in (("q", q), ("k", k), ("v", v))}
            self.found.append({**measure_fp8_rounding(*(x[:, : self.num_tokens] for x in (q, k, v))), **whole})
        return func(*args, **(kwargs or {}))
