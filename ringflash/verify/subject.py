"""What is verified: a model together with how it is trained, and the tokens it is shown."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash import huggingface
from ringflash import loss as token_loss
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.training.seeding import seeded

Batch = dict[str, Any]
LEARNING_RATE = 0.01  # of the one step that is compared: as linear in the gradient as the gradient itself


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer. Adam's first step divides each gradient by its own size and so compares only signs."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


@dataclass
class Training:
    """A model and what a training does with it; every field but the model has the default that ringflash's docs use.

    Args:
        module: `module(**batch)` is the loss of this rank, scaled so that its average over the ranks is the loss
            (`ringflash.loss`). Not wrapped yet: its parameters get the dtype under test first.
        prepare: `prepare(input_ids, group=, cu_seqlens=, labels=)`, whole tensors in, this rank's batch out.
        evaluate: `evaluate(module, batch)`, the evaluation loss that would be reported, on every rank; None is the
            average of `module(**batch)` over the group.
        wrap: `wrap(module, group)`, the module in DDP or sharded by FSDP2, at cp=N; it then averages the gradients.
            None averages them here, over the group.
        optimizer: `optimizer(parameters)`, for one step.
        layout: how `prepare` cuts the sequence.
    """

    module: nn.Module
    prepare: Callable[..., Batch] = huggingface.prepare_batch
    evaluate: Callable[[nn.Module, Batch], Tensor | float] | None = None
    wrap: Callable[[nn.Module, dist.ProcessGroup], nn.Module] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    layout: str = "zigzag"


Factory = Callable[[dist.ProcessGroup | None], Training]


@dataclass(frozen=True)
class Data:
    """One whole sequence, equal on all ranks; the first quarter has no labels, as a prompt has none.

    Args:
        input_ids, labels: (1, seqlen), int64; labels shifted.
        cu_seqlens: (num_documents + 1,), int32, or None for one document.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None

    @property
    def seqlen(self) -> int:
        """Tokens of the whole sequence."""
        return self.input_ids.shape[1]


def draw_data(vocab_size: int, seqlen: int, bounds: list[int] | None, seed: int, device: torch.device) -> Data:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, vocab_size, (1, seqlen), generator=generator).to(device)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    labels = token_loss.shift_labels(input_ids, cu_seqlens)
    labels[:, : seqlen // 4] = IGNORE_INDEX
    return Data(input_ids, labels, cu_seqlens)


def load(target: str, num_layers: int | None, seed: int) -> Factory:
    """The factory behind the command's argument.

    Args:
        target: folder or file of a Hugging Face configuration, with weights or without; or "package.module:factory".
        num_layers: decoder layers of a Hugging Face model; default its own.
    Raises:
        ValueError: neither of the two.
    """
    path = Path(target)
    if path.exists():
        return _from_folder(path, num_layers, seed)
    if target.count(":") != 1:
        raise ValueError(
            f"target must be a folder with config.json or 'package.module:factory', got {target!r}; "
            "check the path, or name the factory after a colon."
        )
    if num_layers is not None:
        raise ValueError(f"layers must be left out for a factory, got {num_layers}; let the factory build fewer.")
    module_name, name = target.split(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where the user's modules are, whichever way the command was started
    function = getattr(_imported(module_name), name, None)
    if function is None:
        raise ValueError(f"target must name a function of {module_name}, got {name!r}; check its spelling.")
    return lambda group: _seeded(function, group, seed)


def _imported(name: str) -> ModuleType:
    try:
        return import_module(name)
    except Exception as error:  # whatever the user's own code raises
        raise ValueError(
            f"target must name a module that can be imported, got {type(error).__name__}: {error}; "
            f"python -c 'import {name}' shows where."
        ) from error


def _seeded(function: Callable[..., Any], group: dist.ProcessGroup | None, seed: int) -> Training:
    """What a factory builds, with the same random numbers on every rank and in every run."""
    with seeded(seed):
        made = function(group)
    if isinstance(made, nn.Module):
        return Training(made)
    if not isinstance(made, Training):
        raise ValueError(
            f"the factory must return a module or ringflash.verify.Training, got {type(made).__name__}; "
            "return the module whose forward is the loss."
        )
    return made


def _from_folder(path: Path, num_layers: int | None, seed: int) -> Factory:
    """A transformers model over the ring; weights are read from safetensors alone."""
    huggingface.register()
    from transformers import AutoModelForCausalLM

    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    if path.is_dir() and not has_weights and any(path.glob("*.bin")):
        raise ValueError(f"weights must be safetensors, got .bin files in {path}; save_pretrained writes safetensors.")

    _config(path, num_layers)  # what is wrong with it is said before the ranks build the model

    def build(group: dist.ProcessGroup | None) -> Training:
        config = _config(path, num_layers)
        # grouped products of experts know no fp64, in which cp=1 is run as well
        options = {"attn_implementation": "ringflash", "experts_implementation": "eager", "dtype": torch.float32}
        if has_weights:
            with nullcontext() if num_layers is None else _transformers_quiet():
                model, read = AutoModelForCausalLM.from_pretrained(
                    path,
                    config=config,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                    **options,
                )
            if num_layers is not None and read["missing_keys"]:
                warnings.warn(f"{path} lacks {sorted(read['missing_keys'])}, which were drawn", stacklevel=2)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
        huggingface.set_group(model, group)
        return Training(huggingface.CausalLMWithLoss(model, group))

    return lambda group: _seeded(build, group, seed)


def _config(path: Path, num_layers: int | None) -> Any:
    from transformers import AutoConfig

    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"target must be a folder with config.json, got {path} without; name the model's own folder.")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers' own, and Python's for a file of another form
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"config.json must be one that transformers reads, got {type(error).__name__} ({said}) in {path}; "
            "write it with save_pretrained, or install the transformers that knows the model."
        ) from error
    _cut_layers(config, num_layers)
    return config


@contextmanager
def _transformers_quiet() -> Iterator[None]:
    """Without its list, for every rank and load, of the layers that were cut off."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _cut_layers(config: Any, num_layers: int | None) -> None:
    if num_layers is None:
        return
    if not 1 <= num_layers <= config.num_hidden_layers:
        raise ValueError(
            f"layers must be from 1 to the model's {config.num_hidden_layers}, got {num_layers}; leave it out for all."
        )
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def windows_of(module: nn.Module) -> list[int | None]:
    """The window of each decoder layer of a transformers model, itself included; None is unlimited. Else empty."""
    config = next((m.config for m in module.modules() if hasattr(m, "config")), None)
    layers: int = getattr(config, "num_hidden_layers", 0)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in types]  # type: ignore[misc]


def vocab_size_of(module: nn.Module) -> int:
    """Rows of the first embedding."""
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            return child.num_embeddings
    raise ValueError(f"the model must have an embedding, got {type(module).__name__} without; verify draws token ids.")
