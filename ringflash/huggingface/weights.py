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
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor, distribute_tensor

from ringflash import agreement
from ringflash.generators import seeded


def read_config(directory: Path) -> dict[str, Any]:
    """The configuration in a checkpoint directory, or in a file of that form.

    Raises:
        ValueError: no such file, or one that is not a JSON object with a model_type.
    """
    file = directory / "config.json" if directory.is_dir() else directory
    try:
        content = json.loads(file.read_text())
        content["model_type"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} must be a transformers configuration, got {error!r}; name its directory.") from error
    return dict(content)


def laid_over(saved: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's configuration with what differs from it.

    transformers prefers the older rope_scaling to rope_parameters, and takes a rotary base that is in neither to be
    10,000: rope_parameters here take the place of both, and what they leave out of the rotation is the checkpoint's.

    Raises:
        ValueError: the rotation changed by its older keys.
    """
    older = sorted({"rope_scaling", "rope_theta"} & changes.keys())
    if saved and older:
        raise ValueError(
            f"model must change a checkpoint's rotary embedding by rope_parameters, got {' and '.join(older)}; "
            "move them there."
        )
    merged = {**saved, **changes}
    rotation = changes.get("rope_parameters")
    if saved and rotation:
        merged.pop("rope_scaling", None)
        if not any(isinstance(value, dict) for value in rotation.values()):  # else one for each kind of layer
            before = {**saved, **(saved.get("rope_scaling") or {}), **(saved.get("rope_parameters") or {})}
            kept = {x: before[x] for x in ("rope_theta", "partial_rotary_factor") if before.get(x) is not None}
            merged["rope_parameters"] = {**kept, **rotation}
    return merged


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files that from_pretrained reads; others may lie beside them, such as another form of the same.

    Raises:
        ValueError: no such file, or an index of files that are not in the directory.
    """
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        found = sorted(directory.glob("*.safetensors"))
        if not found:
            raise ValueError(
                f"{directory} must hold a checkpoint in *.safetensors, got none; save the model with save_pretrained."
            )
        return found
    try:
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} must be the index of a checkpoint, got {error!r}; copy it again.") from error
    for file in files:
        if file.parent != directory or not file.is_file():
            raise ValueError(f"{directory} must hold every file of its index, got no {file}; copy it again.")
    return files


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
    drawn_on = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for name, module in model.named_modules():
        if name in tied or not module._parameters:
            continue
        with seeded(_seed_of(seed, name)):
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
    dcp.load(state, storage_reader=_HuggingFaceStorageReader(directory), no_dist=not dist.is_initialized())


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
    from safetensors import SafetensorError

    reader = _HuggingFaceStorageReader(directory)
    try:
        found = reader.read_metadata().state_dict_metadata
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{directory} must hold whole safetensors files, got {error}; copy them again.") from error
    return {name: tuple(tensor.size) for name, tensor in found.items()}  # type: ignore[union-attr]


class _HuggingFaceStorageReader(HuggingFaceStorageReader):
    """torch's, of `checkpoint_files` instead of all that lie there: of two tensors of a name it reads the last."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.fs = _Listed([str(file) for file in checkpoint_files(directory)])


class _Listed(FileSystem):
    """A directory that holds these files."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return self._files


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
                "give the configuration that the checkpoint was saved with, or a copy with the model's own names: "
                "from_pretrained(...).save_pretrained(..., save_original_format=False)."
            )


def _misshapen(wanted: dict[str, nn.Parameter], found: dict[str, tuple[int, ...]]) -> Iterator[str]:
    for name, parameter in wanted.items():
        if name in found and found[name] != tuple(parameter.shape):
            yield f"{name} {found[name]} for {tuple(parameter.shape)}"
