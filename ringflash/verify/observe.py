"""One training step and one evaluation, and everything about them that must not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ringflash.verify.capture import HIDDEN, Capture, embedding_head, plain_name, whole
from ringflash.verify.subject import Batch, Data, Factory, Training

Tensors = dict[str, Tensor]
_WRAPPED = (nn.parallel.DistributedDataParallel, FSDPModule)


@dataclass
class Observation:
    """Whole tensors on the CPU.

    Args:
        weights: before the step.  stepped: after it.
        inputs: the tensors of the batch that run along the sequence.
        layers: outputs in the order of computation, (1, seqlen, ...).
        loss_gradient: of the training loss, at the last layer's output.
        disagreement: parameters whose averaged gradient is not the same on all ranks.
        apart_before, apart_after: parameters that are not, before and after the step.
    """

    weights: Tensors = field(default_factory=dict)
    inputs: Tensors = field(default_factory=dict)
    layers: Tensors = field(default_factory=dict)
    logits: Tensors = field(default_factory=dict)
    loss: float = 0.0
    loss_gradient: Tensors = field(default_factory=dict)
    eval_losses: dict[str, float] = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    disagreement: list[str] = field(default_factory=list)
    stepped: Tensors = field(default_factory=dict)
    apart_before: list[str] = field(default_factory=list)
    apart_after: list[str] = field(default_factory=list)


def build(
    factory: Factory, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device, weights: Tensors | None
) -> Training:
    """The model on its device with parameters of `dtype`; buffers, such as RoPE's frequencies, keep theirs.

    Args:
        weights: the parameters' values; None leaves what the factory drew.
    """
    training = factory(group)
    training.module.to(device)
    wrapped = [type(m).__name__ for m in training.module.modules() if isinstance(m, _WRAPPED)]
    if wrapped:
        raise ValueError(f"module must not be wrapped yet, got {wrapped[0]} in it; do that in Training's wrap.")
    for name, parameter in training.module.named_parameters():
        parameter.data = parameter.data.to(dtype)
        if weights is not None:
            assign(parameter, weights[plain_name(name)])
    if training.wrap is not None and group is not None:
        training.module = training.wrap(training.module, group)
    return training


@torch.no_grad()
def assign(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter, sharded or not, the values of a whole tensor."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def observe(training: Training, group: dist.ProcessGroup | None, data: Data) -> Observation:
    """Run the step; every rank of the group calls it together. `training` is used up."""
    module, size = training.module, 1 if group is None else group.size()
    seen, order = Observation(weights=parameters_of(module)), gradient_order(module)
    seen.apart_before = disagreement_of(seen.weights, group)
    batch = prepared(training, group, data)
    length = data.seqlen // size
    seen.inputs = whole_inputs(batch, group, data.seqlen, training.layout)
    seen.eval_losses = {"eval loss": evaluate(training, group, batch)}
    module.train()  # after the evaluation: FSDP2 leaves the parameters of a root whole until a backward
    with Capture(module, length, keep_gradient=True) as capture:
        states = generator_states(data.input_ids.device)
        loss = module(**batch)
        check_not_random(states)
    loss.backward()
    seen.loss = average(loss, group)
    seen.layers = {name: whole(x, group, training.layout) for name, x in capture.outputs.items()}
    gradient = capture.gradient()
    if gradient is not None:
        seen.loss_gradient = {"d loss / d hidden": whole(gradient, group, training.layout) / size}
    seen.logits = logits_of(module, seen.layers)
    if training.wrap is None:
        _reduce(module, group)
    gradients = gradients_of(module)
    seen.gradients = {name: gradients[name] for name in dict.fromkeys([*order, *gradients])}
    seen.disagreement = disagreement_of(seen.gradients, group)
    training.optimizer([p for p in module.parameters() if p.requires_grad]).step()
    seen.stepped = parameters_of(module)
    seen.apart_after = disagreement_of(seen.stepped, group)
    return seen


def generator_states(device: torch.device) -> dict[torch.device, Tensor]:
    """Of the generators that a forward on the device may draw from."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    return states | ({device: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def check_not_random(before: dict[torch.device, Tensor]) -> None:
    """Raise ValueError where a forward has drawn random numbers: two runs then differ, and that is no rounding."""
    if any(not torch.equal(state, generator_states(device)[device]) for device, state in before.items()):
        raise ValueError("the forward must draw no random numbers, got some; set every dropout and jitter to 0.")


def prepared(training: Training, group: dist.ProcessGroup | None, data: Data) -> Batch:
    """This rank's batch."""
    return training.prepare(data.input_ids, group=group, cu_seqlens=data.cu_seqlens, labels=data.labels)


def whole_inputs(batch: Any, group: dist.ProcessGroup | None, seqlen: int, layout: str) -> Tensors:
    """The integer tensors of a batch, a dict or a tuple, that run along the sequence."""
    length = seqlen // (1 if group is None else group.size())
    if isinstance(batch, tuple | list):
        batch = {f"batch[{i}]": x for i, x in enumerate(batch)}
    return {
        name: whole(x, group, layout)
        for name, x in batch.items()
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == length and not x.is_floating_point()
    }


def average(loss: Tensor, group: dist.ProcessGroup | None) -> float:
    """Mean over the ranks of the group."""
    total = loss.detach().double().clone()
    if group is None:
        return total.item()
    dist.all_reduce(total, group=group)
    return total.item() / group.size()


@torch.no_grad()
def evaluate(training: Training, group: dist.ProcessGroup | None, batch: Batch) -> float:
    """The evaluation loss that the training would report."""
    module = training.module.eval()
    if training.evaluate is None:
        return average(module(**batch), group)
    return float(training.evaluate(module, batch))


def parameters_of(module: nn.Module) -> Tensors:
    """Whole parameters by name."""
    return {plain_name(name): _full(p.detach()) for name, p in module.named_parameters()}


def gradients_of(module: nn.Module) -> Tensors:
    """Whole gradients by name, of the parameters that have one."""
    return {plain_name(name): _full(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def gradient_order(module: nn.Module) -> list[str]:
    """Fills, in the backward to come, with the names of the parameters in the order of their gradients."""
    order: list[str] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            short = plain_name(name)
            parameter.register_post_accumulate_grad_hook(lambda _, short=short: order.append(short))
    return order


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).cpu().clone()


def _reduce(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Average the gradients, as DDP does."""
    if group is None:
        return
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()


def disagreement_of(tensors: Tensors, group: dist.ProcessGroup | None) -> list[str]:
    """Tensors that differ between the ranks of the group."""
    if group is None:
        return []
    norms: list[object] = [None] * group.size()
    dist.all_gather_object(norms, {name: x.double().norm().item() for name, x in tensors.items()}, group=group)
    return [name for name in tensors if len({n.get(name) for n in norms}) > 1]  # type: ignore[attr-defined]


@torch.no_grad()
def logits_of(module: nn.Module, layers: Tensors) -> Tensors:
    """From the last hidden states, for models whose loss never makes them; empty where the head is not known."""
    found = embedding_head(module)
    if found is None or HIDDEN not in layers:
        return {}
    weight = _full(found[1].weight.detach())  # type: ignore[union-attr,operator]
    return {"logits": layers[HIDDEN].to(weight.dtype) @ weight.T}
