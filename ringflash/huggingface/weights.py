"""The parameters of a transformers model that was built without any: drawn from a seed, or read from a checkpoint.

    with torch.device("meta"): model = AutoModelForCausalLM.from_config(...)
    fully_shard(...)                          each rank's parameters are its shards
    draw_weights(model, device, seed)         or    load_weights(model, device, directory)

No rank ever holds the whole model: a parameter is drawn whole and cut, one at a time, and a file is read where it
holds this rank's rows.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, distribute_tensor

from ringflash import agreement


def read_config(directory: Path) -> dict[str, Any]:
    """The configuration in a checkpoint directory, or in a file of that form.

    Raises:
        ValueError: no such file, or one that is not a JSON object.
    """
    file = directory / "config.json" if directory.is_dir() else directory
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{file} must be a transformers configuration, got {error}; name its directory.") from error


def draw_weights(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give a transformers model on the meta device its first values, by the model's own rules, in place.

    A parameter's values depend on the seed and its name alone: equal for every number of ranks, sharded or not. They
    are drawn on the GPU where there is one, since billions of them would take minutes on the CPU; on another kind of
    device they are others.

    Args:
        device: where the parameters, or this rank's shards of them, will be.
        seed: the caller's generators are left as they were.
    """
    materialize(model, device)
    tied = _tied(model)
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    drawn_on = torch.device("cuda", gpus[0]) if gpus else torch.device("cpu")
    for name, module in model.named_modules():
        if name in tied or not module._parameters:
            continue
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(_seed_of(seed, name))
            whole = _drawn(model, module, drawn_on)
        for key, parameter in module.named_parameters(recurse=False):
            _fill(parameter, whole[key])


def load_weights(model: nn.Module, device: torch.device, directory: Path) -> None:
    """Read a transformers model on the meta device from a checkpoint directory of safetensors, in place.

    All ranks call it together; each reads its own rows. Values are cast to the dtype of the model's parameters.

    Args:
        device: as `draw_weights`.
    Raises:
        ValueError: files that are missing, or tensors that are missing, unknown or of another shape; on every rank.
    """
    wanted = {name: parameter for name, parameter in model.named_parameters() if name not in tied_names(model)}
    error = None
    try:
        _check_tensors(wanted, _sizes(directory), directory, known=set(model.state_dict(keep_vars=True)))
    except ValueError as problem:
        error = problem
    if dist.is_initialized():
        agreement.agree(dist.group.WORLD, {"checkpoint": str(directory)}, error)
    elif error is not None:
        raise error
    materialize(model, device)
    tied = tied_names(model)
    state = {name: parameter.detach() for name, parameter in model.named_parameters() if name not in tied}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=not dist.is_initialized())


def materialize(model: nn.Module, device: torch.device) -> None:
    """Memory for parameters and buffers; values for the buffers, which no checkpoint holds, and ties as they were."""
    model.to_empty(device=device)
    for module in model.modules():
        if module._buffers:
            model._init_weights(module)  # type: ignore[operator]
    model.tie_weights()  # type: ignore[operator]


def tied_names(model: nn.Module) -> set[str]:
    """Parameters that are another one under a second name."""
    keys = getattr(model, "_tied_weights_keys", None) or {}
    return set(keys) if getattr(model.config, "tie_word_embeddings", False) else set()  # type: ignore[union-attr]


def _tied(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[0] for name in tied_names(model)}


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


def _drawn(model: nn.Module, module: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Whole parameters of one module, initialised by the model's rules."""
    twin = copy.copy(module)
    twin._parameters = {
        key: None
        if p is None
        else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), requires_grad=False)
        for key, p in module._parameters.items()
    }
    model._init_weights(twin)  # type: ignore[operator]
    return {key: p.detach() for key, p in twin._parameters.items() if p is not None}


@torch.no_grad()
def _fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        whole = whole.to(parameter.to_local().device)
        sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(sharded.to_local())
    else:
        parameter.copy_(whole)


def _sizes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in the safetensors files of a directory."""
    if not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"{directory} must hold a checkpoint in *.safetensors, got none; save the model with save_pretrained."
        )
    from safetensors import SafetensorError

    try:
        found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{directory} must hold whole safetensors files, got {error}; copy them again.") from error
    return {name: tuple(tensor.size) for name, tensor in found.items()}  # type: ignore[union-attr]


def _check_tensors(
    wanted: dict[str, nn.Parameter], found: dict[str, tuple[int, ...]], directory: Path, known: set[str]
) -> None:
    for what, names in (
        ("every tensor of the model", sorted(set(wanted) - set(found))),
        ("tensors of the model alone", sorted(x for x in set(found) - known if not x.endswith("rotary_emb.inv_freq"))),
        ("tensors of the model's shapes", list(_misshapen(wanted, found))),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{directory} must hold {what}, got a difference in {', '.join(names[:3])}{more}; "
                "give the configuration that the checkpoint was saved with."
            )


def _misshapen(wanted: dict[str, nn.Parameter], found: dict[str, tuple[int, ...]]) -> Iterator[str]:
    for name, parameter in wanted.items():
        if name in found and found[name] != tuple(parameter.shape):
            yield f"{name} {found[name]} for {tuple(parameter.shape)}"
