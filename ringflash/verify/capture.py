"""Capture of layer outputs, and their assembly from all ranks into whole sequences in position order."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ringflash.sequence.layout import unshard_sequence

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
HIDDEN = "last hidden state"


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the names of its wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def watched_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules to watch, by name: items of every outermost ModuleList and their direct children.

    If the model has no ModuleList, all modules are watched. If no transformers accessor gives the last hidden state,
    the modules outside the lists are watched as well, since one of them may produce it.
    """
    found: dict[str, nn.Module] = {}
    lists: list[str] = []
    for name, child in module.named_modules():
        if not isinstance(child, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in lists):
            continue
        lists.append(name)
        for index, layer in enumerate(child):
            found |= {f"{name}.{index}.{part}": m for part, m in layer.named_children()}
            found[f"{name}.{index}"] = layer
    if found and embedding_head(module) is None:
        found |= _modules_outside(module, lists)
    found = found or {name: child for name, child in module.named_modules() if name}
    return {plain_name(name): m for name, m in found.items()}


def _modules_outside(module: nn.Module, lists: list[str]) -> dict[str, nn.Module]:
    """Return the outermost modules that neither contain a list nor are in one."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        holds = any(f"{inner}.".startswith(f"{name}." if name else "") for inner in lists)
        if not holds and not any(name.startswith(f"{outer}.") for outer in (*lists, *found)):
            found[name] = child
    return found


def tensor_of(output: Any, length: int) -> Tensor | None:
    """Return the (batch, length, ...) tensor of a module's output, if there is one."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    output = getattr(output, "last_hidden_state", output)
    if isinstance(output, Tensor) and output.dim() > 2 and output.shape[1] == length and output.is_floating_point():
        return output
    return None


class Capture:
    """Context manager that keeps the outputs of the watched modules, in the order in which the modules finish.

    Args:
        length: number of tokens of this rank.
    """

    def __init__(self, module: nn.Module, length: int) -> None:
        self.length = length
        self.outputs: dict[str, Tensor] = {}
        self._modules = watched_modules(module)
        head = embedding_head(module)
        if head is not None:
            self._modules[HIDDEN] = head[0]
        self._last: Tensor | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Capture:
        self._handles = [m.register_forward_hook(partial(self._keep, name)) for name, m in self._modules.items()]
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the first output of a module that has the length of the sequence."""
        tensor = tensor_of(output, self.length)
        if tensor is None or name in self.outputs:
            return
        self.outputs[name] = tensor.detach().clone()
        if tensor.requires_grad:
            tensor.retain_grad()
            self._last = tensor

    def gradient(self) -> Tensor | None:
        """Return the gradient of the loss at the last output, after the backward; None without one."""
        return None if self._last is None else self._last.grad


def embedding_head(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return the body of a causal language model and its output embedding, if transformers' accessors name them."""
    for child in module.modules():
        read = getattr(child, "get_output_embeddings", None)
        if read is not None and read() is not None and hasattr(child, "base_model"):
            base = child.base_model
            return (base if base is not child else child.model), read()  # type: ignore[return-value]  # Llama 4
    return None


def gather_whole(x: Tensor, group: dist.ProcessGroup | None, layout: str) -> Tensor:
    """Gather the whole sequence on the CPU, in position order."""
    return unshard_sequence(x.detach(), group, 1, layout).cpu()
