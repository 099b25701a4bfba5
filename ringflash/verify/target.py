"""The target of a verification: a model, its training, and the tokens."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash import huggingface
from ringflash import loss as token_loss
from ringflash.comm.seeding import seeded
from ringflash.huggingface.flops import layer_windows
from ringflash.sequence.layout import document_table
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.testing.dense import visible

Batch = dict[str, Any]
LEARNING_RATE = 0.01  # learning rate of the SGD step that is compared


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the default optimizer: SGD, since Adam's first step depends only on the signs of the gradients."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def default_prepare(input_ids: Tensor, *, cu_seqlens: Tensor | None, **options: Any) -> Batch:
    """Return `huggingface.prepare_batch`; documents that continue others have positions along their paths."""
    positions = "global" if cu_seqlens is None or cu_seqlens.dim() == 1 else "document"
    return huggingface.prepare_batch(input_ids, cu_seqlens=cu_seqlens, position_ids=positions, **options)


@dataclass
class Training:
    """A model and how to train it, by default as ringflash's docs say.

    Args:
        module: `module(**batch)` returns the loss of this rank, scaled so that the average over the ranks is the loss
            (`ringflash.loss`). It must not be wrapped yet: its parameters are first cast to the dtype under test.
        prepare: `prepare(input_ids, group=, cu_seqlens=, labels=)` returns this rank's batch for whole tensors.
        evaluate: `evaluate(module, batch)` returns the evaluation loss that would be reported, on every rank; None is
            the average of `module(**batch)` over the group.
        wrap: `wrap(module, group)` returns the module in DDP or sharded by FSDP2, at cp=N; the wrapper averages the
            gradients. If None, verify averages them over the group.
        optimizer: `optimizer(parameters)` returns the optimizer of the step.
        layout: layout in which `prepare` shards the sequence.
    """

    module: nn.Module
    prepare: Callable[..., Batch] = default_prepare
    evaluate: Callable[[nn.Module, Batch], Tensor | float] | None = None
    wrap: Callable[[nn.Module, dist.ProcessGroup], nn.Module] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    layout: str = "zigzag"


Factory = Callable[[dist.ProcessGroup | None], Training]


@dataclass(frozen=True)
class Data:
    """One whole sequence, equal on all ranks; the first quarter has no labels, like a prompt.

    Args:
        input_ids, labels: (1, seqlen), int64; labels shifted.
        cu_seqlens: (num_documents + 1,), int32, a table of `ringflash.document_table`, or None for one document.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None

    @property
    def documents(self) -> list[tuple[int, int]]:
        """Bounds of each document."""
        if self.cu_seqlens is None:
            return [(0, self.seqlen)]
        return list(pairwise(self.cu_seqlens.reshape(-1, self.cu_seqlens.shape[-1])[0].tolist()))

    def queries_of(self, position: int, window: int | None, causal: bool) -> Tensor:
        """Return which queries see the key at a position: (seqlen,), bool.

        Args:
            window: keys that a query sees to either side, its own included; None is unlimited.
        """
        side, everything = -1 if window is None else window - 1, torch.arange(self.seqlen, device="cpu")
        rows = None if self.cu_seqlens is None else self.cu_seqlens.tolist()
        key = everything[position : position + 1]
        return visible(everything, key, causal=causal, window_size=(side, side), cu_seqlens=rows)[:, 0]

    @property
    def seqlen(self) -> int:
        """Number of tokens of the whole sequence."""
        return self.input_ids.shape[1]


def draw_data(
    vocab_size: int,
    seqlen: int,
    bounds: list[int] | None,
    seed: int,
    device: torch.device,
    parents: list[int] | None = None,
    bidirectional: list[bool] | None = None,
    global_tokens: int = 0,
) -> Data:
    """Draw a sequence of random tokens, in documents; see `ringflash.document_table`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    input_ids = torch.randint(0, vocab_size, (1, seqlen), generator=generator, device="cpu").to(device)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device="cpu")
    labels = token_loss.shift_labels(input_ids, cu_seqlens)
    labels[:, : seqlen // 4] = IGNORE_INDEX
    if cu_seqlens is not None and (global_tokens or not parents is bidirectional is None):
        above, both = (None if x is None else torch.tensor(x, device="cpu") for x in (parents, bidirectional))
        cu_seqlens = document_table(cu_seqlens, above, both, global_tokens)
    return Data(input_ids, labels, cu_seqlens)


def load(target: str, num_layers: int | None, seed: int, impl: str | None = None) -> Factory:
    """Return the factory that the command's argument names.

    Args:
        impl: as `ring_attention`, for a Hugging Face model.
        target: folder or file of a Hugging Face configuration, with or without weights; or "package.module:factory".
        num_layers: number of decoder layers of a Hugging Face model; default: as configured.
    Raises:
        ValueError: the target is neither of the two.
    """
    path = Path(target)
    if path.exists():
        return _from_folder(path, num_layers, seed, impl or "auto")
    if target.count(":") != 1:
        raise ValueError(
            f"target must be a folder with config.json or 'package.module:factory', got {target!r}; "
            "check the path, or name the factory after a colon."
        )
    if num_layers is not None:
        raise ValueError(f"layers must be left out for a factory, got {num_layers}; let the factory build fewer.")
    if impl is not None:
        raise ValueError(f"impl must be left out for a factory, got {impl!r}; let the factory set it.")
    module_name, name = target.split(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for the user's modules, however the command was started
    function = getattr(_imported(module_name), name, None)
    if function is None:
        raise ValueError(f"target must name a function of {module_name}, got {name!r}; check its spelling.")
    return lambda group: _seeded(function, group, seed)


def _imported(name: str) -> ModuleType:
    """Import the module of a factory; an error in it is a ValueError that says how to see it."""
    try:
        return import_module(name)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(
            f"target must name a module that can be imported, got {type(error).__name__}: {error}; "
            f"python -c 'import {name}' shows where."
        ) from error


def _seeded(function: Callable[..., Any], group: dist.ProcessGroup | None, seed: int) -> Training:
    """Call a factory with the same random numbers on every rank and in every run."""
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


def _from_folder(path: Path, num_layers: int | None, seed: int, impl: str) -> Factory:
    """Return the factory of a transformers model over the ring; weights are only read from safetensors."""
    huggingface.register()
    from transformers import AutoModelForCausalLM

    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    if path.is_dir() and not has_weights and any(path.glob("*.bin")):
        raise ValueError(f"weights must be safetensors, got .bin files in {path}; save_pretrained writes safetensors.")

    _config(path, num_layers)  # raises its errors before the ranks build the model

    def build(group: dist.ProcessGroup | None) -> Training:
        """Build the folder's model on a ring, or on one device for None."""
        config = _config(path, num_layers)
        # grouped matmuls of experts do not support fp64, which one of the runs uses
        options = {"attn_implementation": "ringflash", "experts_implementation": "eager", "dtype": torch.float32}
        if has_weights:
            with _transformers_quiet(cut=num_layers is not None):
                model, read = AutoModelForCausalLM.from_pretrained(
                    path, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True,
                    **options,
                )  # fmt: skip
            if num_layers is not None and read["missing_keys"]:
                warnings.warn(f"{path} lacks {sorted(read['missing_keys'])}, which were drawn", stacklevel=2)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
        huggingface.set_group(model, group, impl=impl)
        return Training(huggingface.CausalLMWithLoss(model, group))

    return lambda group: _seeded(build, group, seed)


def _config(path: Path, num_layers: int | None) -> Any:
    """Read the configuration of a model's folder, for its first layers only if `num_layers` is given."""
    from transformers import AutoConfig

    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"target must be a folder with config.json, got {path} without it; name the model's folder.")
    if path.is_file() and path.suffix != ".json":
        raise ValueError(
            f"target must be a folder with config.json or 'package.module:factory', got the file {path}; name a "
            "model's folder. For a recipe, python -m recipes.lightning.export writes one from a checkpoint."
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers' errors, and Python's if the file has another form
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"config.json must be one that transformers reads, got {type(error).__name__} ({said}) in {path}; "
            "write it with save_pretrained, or install the transformers that knows the model."
        ) from error
    _cut_layers(config, num_layers)
    return config


@contextmanager
def _transformers_quiet(*, cut: bool) -> Iterator[None]:
    """Suppress what every rank would print at every load: progress bars, and a list of the layers that were cut off."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    if cut:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _cut_layers(config: Any, num_layers: int | None) -> None:
    """Change a configuration to the first `num_layers` layers."""
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
    """Return the window of each decoder layer (the query's own key included; None is unlimited).

    The list is empty unless the model is transformers'.
    """
    config = next((m.config for m in module.modules() if hasattr(m, "config")), None)
    if not hasattr(config, "num_hidden_layers"):
        return []
    return [w + 1 if isinstance(w, int) else None for w in layer_windows(config)]


def vocab_size_of(module: nn.Module) -> int:
    """Return the number of rows of the first embedding."""
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            return child.num_embeddings
    raise ValueError(f"the model must have an embedding, got none in {type(module).__name__}; verify draws token ids.")
