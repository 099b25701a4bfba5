"""Observation of one training step and one evaluation: everything that must not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ringflash.attention.options import CallOptions
from ringflash.comm.comparison import gather_values
from ringflash.comm.modules.buffers import persistent_buffers
from ringflash.comm.modules.gradients import average_gradients
from ringflash.huggingface.forward_inputs import ForwardInputs
from ringflash.verify.capture import HIDDEN, Capture, embedding_head, gather_whole, plain_name
from ringflash.verify.target import Batch, Data, Factory, Training
from ringflash.wrap.interception import WrappedState
from ringflash_kernels.api import rounds

Tensors = dict[str, Tensor]
_WRAPPED = (nn.parallel.DistributedDataParallel, FSDPModule)
_HOLDERS = (WrappedState, ForwardInputs)  # of options that several layers share


@dataclass
class Observation:
    """Results of a step and an evaluation, gathered to whole tensors on the CPU.

    Args:
        weights: parameters before the step.
        inputs: tensors of the batch that have a sequence dim.
        layers: outputs in the order of computation, (1, seqlen, ...).
        loss_gradient: gradient of the training loss at the last layer's output.
        disagreement: names of the parameters whose averaged gradient differs between ranks.
        stepped: parameters and persistent buffers after the step.
        apart_before, apart_after: names of the tensors that differ between ranks, before and after the step.
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

    def record_weights(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Record the parameters before the step."""
        self.weights = parameters_of(module)
        self.apart_before = disagreement_of(self.weights, group)

    def record_outputs(self, module: nn.Module, capture: Capture, group: dist.ProcessGroup | None, layout: str) -> None:
        """Record the layer outputs, the logits, and the gradient of the loss, after the backward."""
        size = 1 if group is None else group.size()
        self.layers = {name: gather_whole(x, group, layout) for name, x in capture.outputs.items()}
        gradient = capture.gradient()
        if gradient is not None:
            self.loss_gradient = {"d loss / d hidden": gather_whole(gradient, group, layout) / size}
        self.logits = logits_of(module, self.layers)

    def record_gradients(self, module: nn.Module, order: list[str], group: dist.ProcessGroup | None) -> None:
        """Record the averaged gradients, in the order in which the backward computed them."""
        gradients = gradients_of(module)
        self.gradients = {name: gradients[name] for name in dict.fromkeys([*order, *gradients])}
        self.disagreement = disagreement_of(self.gradients, group)

    def record_step(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        """Record the parameters and the persistent buffers after the step."""
        self.stepped = parameters_of(module) | buffers_of(module)
        self.apart_after = disagreement_of(self.stepped, group)


def build(
    factory: Factory, group: dist.ProcessGroup | None, dtype: torch.dtype, device: torch.device, weights: Tensors | None
) -> Training:
    """Build the model on its device with parameters of `dtype`; buffers, such as RoPE's frequencies, keep their dtype.

    In fp64 attention is exact, also if the model attends in FP8.

    Args:
        weights: values of the parameters; None keeps the factory's values.
    """
    training = factory(group)
    if dtype == torch.float64:
        attend_exactly(training.module)
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


def attends_in_fp8(module: nn.Module) -> bool:
    """Return True if any attention of a module rounds to e4m3."""
    return any(_is_fp8(value) for part in module.modules() for value in vars(part).values())


def attend_exactly(module: nn.Module) -> None:
    """Replace the FP8 kernels of a module's attention by exact ones, chosen automatically."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if not _is_fp8(value):
                continue
            if isinstance(value, _HOLDERS):
                value.options = _exact(value.options)
            else:
                setattr(part, name, _exact(value) if isinstance(value, CallOptions) else "auto")


def _is_fp8(value: object) -> bool:
    options: object = value.options if isinstance(value, _HOLDERS) else value
    impl = options.impl if isinstance(options, CallOptions) else options
    return isinstance(impl, str) and rounds(impl)


def _exact(options: Any) -> Any:
    return options._replace(impl="auto")


@torch.no_grad()
def assign(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy the values of a whole tensor into a parameter, which may be sharded."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def observe(training: Training, group: dist.ProcessGroup | None, data: Data) -> Observation:
    """Run the step on every rank of the group; `training` cannot be used again."""
    module, size = training.module, 1 if group is None else group.size()
    seen, order = Observation(), gradient_order(module)
    seen.record_weights(module, group)
    batch = prepare_batch(training, group, data)
    length = data.seqlen // size
    seen.inputs = whole_inputs(batch, group, data.seqlen, training.layout)
    seen.eval_losses = {"eval loss": evaluate(training, group, batch)}
    module.train()  # after the evaluation, because FSDP2 keeps a root's parameters unsharded until a backward
    with Capture(module, length) as capture:
        states = generator_states(data.input_ids.device)
        loss = module(**batch)
        check_not_random(states)
    loss.backward()
    seen.loss = average(loss, group)
    seen.record_outputs(module, capture, group, training.layout)
    if training.wrap is None:
        average_gradients(module.parameters(), group)
    seen.record_gradients(module, order, group)
    training.optimizer([p for p in module.parameters() if p.requires_grad]).step()
    seen.record_step(module, group)
    return seen


def generator_states(device: torch.device) -> dict[torch.device, Tensor]:
    """Return the states of the generators that a forward on the device may use."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    return states | ({device: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def check_not_random(before: dict[torch.device, Tensor]) -> None:
    """Raise ValueError if a forward has drawn random numbers, since runs would then differ by more than rounding."""
    if any(not torch.equal(state, generator_states(device)[device]) for device, state in before.items()):
        raise ValueError("the forward must draw no random numbers, got some; set every dropout and jitter to 0.")


def prepare_batch(training: Training, group: dist.ProcessGroup | None, data: Data) -> Batch:
    """Return this rank's batch."""
    return training.prepare(data.input_ids, group=group, cu_seqlens=data.cu_seqlens, labels=data.labels)


def whole_inputs(batch: Any, group: dist.ProcessGroup | None, seqlen: int, layout: str) -> Tensors:
    """Gather the integer tensors of a batch (a dict or a tuple) that have a sequence dim."""
    length = seqlen // (1 if group is None else group.size())
    if isinstance(batch, tuple | list):
        batch = {f"batch[{i}]": x for i, x in enumerate(batch)}
    return {
        name: gather_whole(x, group, layout)
        for name, x in batch.items()
        if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == length and not x.is_floating_point()
    }


def average(loss: Tensor, group: dist.ProcessGroup | None) -> float:
    """Return the mean of a loss over the ranks of the group."""
    total = loss.detach().double().clone()
    if group is None:
        return total.item()
    dist.all_reduce(total, group=group)
    return total.item() / group.size()


@torch.no_grad()
def evaluate(training: Training, group: dist.ProcessGroup | None, batch: Batch) -> float:
    """Return the evaluation loss that the training would report."""
    module = training.module.eval()
    if training.evaluate is None:
        return average(module(**batch), group)
    return float(training.evaluate(module, batch))


def parameters_of(module: nn.Module) -> Tensors:
    """Return the whole parameters by name."""
    return {plain_name(name): _full(p.detach()) for name, p in module.named_parameters()}


def buffers_of(module: nn.Module) -> Tensors:
    """Return the persistent buffers by name, which layers may compute from their tokens."""
    return {plain_name(name): x.detach().cpu().clone() for name, x in persistent_buffers(module)}


def gradients_of(module: nn.Module) -> Tensors:
    """Return the whole gradients by name."""
    return {plain_name(name): _full(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def gradient_order(module: nn.Module) -> list[str]:
    """Return a list that the next backward fills with the names of parameters, in the order of their gradients."""
    order: list[str] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            short = plain_name(name)
            parameter.register_post_accumulate_grad_hook(lambda _, short=short: order.append(short))
    return order


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).cpu().clone()


def disagreement_of(tensors: Tensors, group: dist.ProcessGroup | None) -> list[str]:
    """Return the names of the tensors that differ between the ranks of the group."""
    if group is None:
        return []
    norms = gather_values(group, {name: x.double().norm().item() for name, x in tensors.items()})
    return [name for name in tensors if len({n.get(name) for n in norms}) > 1]


@torch.no_grad()
def logits_of(module: nn.Module, layers: Tensors) -> Tensors:
    """Compute the logits from the last hidden states, since a loss may not; empty if the head is not known."""
    found = embedding_head(module)
    if found is None or HIDDEN not in layers:
        return {}
    weight = _full(found[1].weight.detach())  # type: ignore[union-attr,operator]
    return {"logits": layers[HIDDEN].to(weight.dtype) @ weight.T}
