"""One clipped step of SGD in one process, as the reference of a step on many ranks, and what their step spends.

    want, baseline = (one_process(model, loss_of, batches, dtype, ...) for dtype in (torch.float64, torch.bfloat16))
    worst(got, want, baseline)

fp64 is the truth; what the same step loses in the lower dtype of the ranks, in one process, is the budget
(ringflash/testing/tolerance.py).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import nn

from ringflash.testing.tolerance import RTOL_FP64, ratios

Tensors = dict[str, torch.Tensor]
Step = dict[str, Tensors]  # gradient, weight, ... by parameter
Found = dict[str, Any]


def one_process(
    model: nn.Module,
    loss_of: Callable[[Any, Any], torch.Tensor],
    batches: Sequence[Any],
    dtype: torch.dtype,
    *,
    clipping: float,
    learning_rate: float,
) -> Step:
    """Gradients before clipping, weights before and after the step, and the loss: of the mean over the batches.

    As FSDP2 does it in mixed precision: bf16 parameters are rounded from fp32 ones, whose step it is. Buffers are left
    as they are.

    Args:
        model: in fp32, or fp64 for fp64; it is not changed.
    """
    master, rounded = deepcopy(model), deepcopy(model)
    _cast(master, torch.promote_types(dtype, torch.float32))
    _cast(rounded, dtype)
    total = 0.0
    for batch in batches:
        rounded.zero_grad()
        device = next(rounded.parameters()).device.type
        with torch.autocast(device, dtype, enabled=dtype.itemsize < 4):
            loss = loss_of(rounded, batch) / len(batches)
        loss.backward()
        total += loss.item()
        for p, q in zip(master.parameters(), rounded.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad.to(p.dtype) + (0 if p.grad is None else p.grad)
    named = dict(master.named_parameters())
    found = {"gradient": {name: p.grad.to(dtype, copy=True) for name, p in named.items() if p.grad is not None}}
    nn.utils.clip_grad_norm_(master.parameters(), clipping)
    torch.optim.SGD(master.parameters(), lr=learning_rate).step()
    found["start"] = {name: p.detach().double() for name, p in model.named_parameters()}
    found["weight"] = {name: p.detach() for name, p in named.items()}
    found["loss"] = {"loss": torch.tensor(total, dtype=torch.float64)}
    return found


def parts(got: Tensors, want: Tensors, baseline: Tensors | None) -> dict[str, float]:
    """The part of its budget that each parameter spends, at the maximum or in the mean; without a baseline fp64's."""
    spent = {}
    for name in want:
        low = None if baseline is None else baseline[name].reshape(1, -1)
        each = ratios(name, got[name].reshape(1, -1), want[name].reshape(1, -1), low)
        spent[name] = max(max(ratio.maximum, ratio.mean) for ratio in each)
    return spent


def worst(got: Step, want: Step, baseline: Step | None) -> dict[str, tuple[float, str]]:
    """The largest of `parts`, and whose it is, for what `got` has of gradient and weight."""
    spent = {key: parts(x, want[key], None if baseline is None else baseline[key]) for key, x in got.items()}
    return {key: max((part, name) for name, part in each.items()) for key, each in spent.items()}


def loss_part(got: float, want: Step, baseline: Step | None, dtype: torch.dtype, num_ranks: int) -> float:
    """The part of its budget that a loss spends: the house's, and half an eps for each rank's part of the mean."""
    exact = want["loss"]["loss"].item()
    if baseline is None:
        return abs(got - exact) / (RTOL_FP64 * abs(exact))
    lost = abs(baseline["loss"]["loss"].item() - exact)
    return abs(got - exact) / (2 * lost + (1 + num_ranks / 2) * torch.finfo(dtype).eps * abs(exact))


def judged(
    got: Step, want: Step, baseline: Step | None, loss: float | None, dtype: torch.dtype, num_ranks: int
) -> Found:
    """Return what each quantity spends of its budget, and what the median gradient of half the size would."""
    if baseline is not None and dtype.itemsize < 4 and "weight" in got:  # an eps of a weight is more than its step
        start = want["start"]
        got, want, baseline = (
            x | {"weight": {name: p.double() - start[name] for name, p in x["weight"].items()}}
            for x in (got, want, baseline)
        )
        baseline["weight"] = {name: p.to(dtype) for name, p in baseline["weight"].items()}
    spent = worst(got, want, baseline)
    if loss is not None:
        spent["loss"] = loss_part(loss, want, baseline, dtype, num_ranks), "loss"
    half = {name: x / 2 for name, x in got["gradient"].items()}
    control = median(parts(half, want["gradient"], baseline and baseline["gradient"]).values())
    return {"spent": spent, "half_a_gradient": control, "loss": loss, "true_loss": want["loss"]["loss"].item()}


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for p in model.parameters():
        p.data = p.data.to(dtype)
