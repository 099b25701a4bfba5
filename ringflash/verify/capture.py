"""What the layers of a model put out, rank by rank, joined to whole sequences in the order of positions."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ringflash.sequence.layout import unshard_sequence

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
HIDDEN = "last hidden state"


def plain_name(name: str) -> str:
    """A parameter's or module's name without those of the wrappers round it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def watched(module: nn.Module) -> dict[str, nn.Module]:
    """The layers and their direct children, by name: the items of every outermost ModuleList, else every module.

    Where no accessor of transformers' names the last hidden state, also what stands beside the lists: the layers may.
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
        found |= _beside(module, lists)
    found = found or {name: child for name, child in module.named_modules() if name}
    return {plain_name(name): m for name, m in found.items()}


def _beside(module: nn.Module, lists: list[str]) -> dict[str, nn.Module]:
    """The outermost modules that neither hold a list nor lie in one."""
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        holds = any(f"{inner}.".startswith(f"{name}." if name else "") for inner in lists)
        if not holds and not any(name.startswith(f"{outer}.") for outer in (*lists, *found)):
            found[name] = child
    return found


def tensor_of(output: Any, length: int) -> Tensor | None:
    """The (batch, length, ...) tensor of a module's output, if it has one."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    output = getattr(output, "last_hidden_state", output)
    if isinstance(output, Tensor) and output.dim() > 2 and output.shape[1] == length and output.is_floating_point():
        return output
    return None


class Capture:
    """Keeps what the watched modules put out while it is entered, in the order in which they finish.

    Args:
        length: tokens of this rank.
        keep_gradient: also keep the loss's gradient at the last of them, read by `gradient`.
    """

    def __init__(self, module: nn.Module, length: int, *, keep_gradient: bool = False) -> None:
        self.length, self.keep_gradient = length, keep_gradient
        self.outputs: dict[str, Tensor] = {}
        self._modules = watched(module)
        head = embedding_head(module)
        if head is not None:
            self._modules[HIDDEN] = head[0]
        self._last: Tensor | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> Capture:
        self._handles = [m.register_forward_hook(self._hook(name)) for name, m in self._modules.items()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            tensor = tensor_of(output, self.length)
            if tensor is None or name in self.outputs:
                return
            self.outputs[name] = tensor.detach().clone()
            if self.keep_gradient and tensor.requires_grad:
                tensor.retain_grad()
                self._last = tensor

        return keep

    def gradient(self) -> Tensor | None:
        """The loss's gradient at the last output, after the backward."""
        return None if self._last is None else self._last.grad


def embedding_head(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The body of a causal language model and its output embedding, where transformers' accessors name them."""
    for child in module.modules():
        read = getattr(child, "get_output_embeddings", None)
        if read is not None and read() is not None and hasattr(child, "base_model"):
            base = child.base_model
            return (base if base is not child else child.model), read()  # type: ignore[return-value]  # Llama 4
    return None


def whole(x: Tensor, group: dist.ProcessGroup | None, layout: str) -> Tensor:
    """The whole sequence, on the CPU, in the order of positions."""
    return unshard_sequence(x.detach(), group, 1, layout).cpu()
