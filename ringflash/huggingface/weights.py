"""Parameters for a transformers model on the meta device: drawn from a seed, or read from a checkpoint.

    with torch.device("meta"): model = AutoModelForCausalLM.from_config(...)
    fully_shard(...)                          each rank's parameters are its shards
    draw_weights(model, device, seed)         or    load_weights(model, device, directory)

No rank ever holds the whole model: parameters are drawn whole and cut one module at a time, and of the files each rank
reads only its own rows.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ringflash.comm.agreement import READ_TIMEOUT, raising_together
from ringflash.comm.seeding import seeded
from ringflash.huggingface.checkpoint_map import CheckpointMap, TensorBox, ties_of


def read_config(directory: Path) -> dict[str, Any]:
    """Return the configuration in a checkpoint directory, or in a file of that form.

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


def merge_config(saved: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's configuration with changes.

    transformers prefers the older rope_scaling to rope_parameters, and assumes a rotary base of 10,000 if neither has
    one. Here rope_parameters in `changes` replace both, and keep the checkpoint's base and partial rotation if they
    name none.

    Raises:
        ValueError: a rotation that is changed by its older keys.
    """
    older = sorted({"rope_scaling", "rope_theta"} & changes.keys())
    if saved and older:
        raise ValueError(
            f"model must change a checkpoint's rotary embedding through rope_parameters, got {' and '.join(older)}; "
            "move them there."
        )
    merged = {**saved, **changes}
    rotation = changes.get("rope_parameters")
    if saved and rotation:
        merged.pop("rope_scaling", None)
        if not any(isinstance(value, dict) for value in rotation.values()):  # else one set per layer type
            before = {**saved, **(saved.get("rope_scaling") or {}), **(saved.get("rope_parameters") or {})}
            kept = {x: before[x] for x in ("rope_theta", "partial_rotary_factor") if before.get(x) is not None}
            merged["rope_parameters"] = {**kept, **rotation}
    return merged


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the safetensors files that from_pretrained reads; the directory may hold others, such as another format.

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
    """Initialise a transformers model on the meta device by the model's own rules, in place.

    A parameter's values depend only on the seed and its name: they are equal for every number of ranks, sharded or not.
    They are drawn on the GPU if there is one, since billions of them would take minutes on the CPU; CPU and GPU draw
    different values.

    Args:
        device: device of the parameters, or of this rank's shards.
        seed: seed of all draws; the caller's generators keep their state.
    Raises:
        NotImplementedError: a parameter or buffer that the model's rules leave without values, on every rank.
    """
    _check_set(model, materialize(model, device))
    tied = {name.rpartition(".")[0] for name in ties_of(model)}
    drawn_on = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for name, module in model.named_modules():
        if name in tied or not module._parameters:
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        with seeded(int.from_bytes(digest[:8], "little") >> 1):
            whole = _drawn(model, module, drawn_on)
        _check_set(model, [f"{name}.{key}" for key, values in whole.items() if values.isnan().any()])
        for key, parameter in module.named_parameters(recurse=False):
            _fill(parameter, whole[key])


def load_weights(model: nn.Module, device: torch.device, directory: Path) -> None:
    """Load a transformers model on the meta device from a checkpoint directory of safetensors, in place.

    A collective call: each rank reads its own rows, or experts, tensor by tensor. Values are those of
    `from_pretrained`, cast to the dtype of the model's parameters. Buffers that a checkpoint holds (the router's
    e_score_correction_bias of DeepSeek-V3) are also read.

    Args:
        device: as for `draw_weights`.
    Raises:
        ValueError: files that are missing, or tensors that are missing, unknown or of another shape; on every rank.
        NotImplementedError: a buffer that is in no checkpoint and gets no values from the model's rules; on every rank.
    """
    from safetensors import SafetensorError

    with raising_together(dist.group.WORLD, {"checkpoint": str(directory)}, timeout=READ_TIMEOUT):
        _check_plain(model, directory)
        files, shapes = _headers(directory)
        mapping = CheckpointMap(model, shapes)
        _check_map(mapping, directory)
    _check_set(model, set(materialize(model, device)) - set(model.state_dict()))
    with raising_together(dist.group.WORLD, {"read": str(directory)}, timeout=READ_TIMEOUT):
        try:
            _read(mapping, files, saved_tensors(model))
        except (SafetensorError, OSError) as problem:
            raise _damaged(directory, problem) from problem


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that a checkpoint holds, each once, in the dtypes that transformers loads.

    Buffers that transformers keeps in fp32 are cast to fp32 in the model.
    """
    ties, names = ties_of(model), set(model.state_dict(keep_vars=True))
    for name, buffer in list(model.named_buffers()):
        if name in names and buffer.dtype in (torch.float16, torch.bfloat16) and _kept_in_fp32(model, name):
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = buffer.float()
    return {name: x.detach() for name, x in model.state_dict(keep_vars=True).items() if name not in ties}


def modules_in_fp32(module: nn.Module) -> list[nn.Module]:
    """Return modules that transformers keeps in fp32 whatever the model's dtype, such as Ernie 4.5's routers."""
    found: dict[str, nn.Module] = {}
    for name, _ in module.named_parameters():
        owner = name.rpartition(".")[0]
        if _kept_in_fp32(module, name) and not any(owner.startswith(f"{outer}.") for outer in found):
            found[owner] = module.get_submodule(owner)
    return list(found.values())


def _kept_in_fp32(model: Any, name: str) -> bool:
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def materialize(model: nn.Module, device: torch.device) -> list[str]:
    """Allocate parameters and buffers, compute the buffers (most are in no checkpoint), and tie weights again.

    Returns:
        names: buffers that get no values from the model's rules.
    """
    model.to_empty(device=device)
    for module in model.modules():
        if module._buffers:
            for buffer in module._buffers.values():
                _unset(buffer)
            model._init_weights(module)  # type: ignore[operator]
    model.tie_weights()  # type: ignore[operator]
    return [name for name, buffer in model.named_buffers() if buffer.isnan().any()]


def _unset(tensor: Tensor | None) -> None:
    """Fill with NaN, so that values that are never set can be found."""
    if tensor is not None and tensor.is_floating_point():
        tensor.fill_(math.nan)


def _check_set(model: nn.Module, missing: Iterable[str]) -> None:
    if names := sorted(missing):
        raise NotImplementedError(
            f"_init_weights of {type(model).__name__} must give every tensor its initial values, got none for "
            f"{', '.join(names[:3])}; start from a checkpoint, or correct the model's rules."
        )


def _drawn(model: nn.Module, module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return the whole parameters of one module, initialised by the model's rules."""
    twin = copy.copy(module)
    twin._parameters = {
        key: None
        if p is None
        else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device), requires_grad=False)
        for key, p in module._parameters.items()
    }
    for p in twin._parameters.values():
        _unset(p)
    model._init_weights(twin)  # type: ignore[operator]
    return {key: p.detach() for key, p in twin._parameters.items() if p is not None}


@torch.no_grad()
def _fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor to a parameter; of a DTensor only this rank's shard."""
    if isinstance(parameter, DTensor):
        whole = whole.to(parameter.to_local().device)
        sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(sharded.to_local())
    else:
        parameter.copy_(whole)


def _headers(directory: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """Return files and shapes of the tensors in a directory, by name."""
    from safetensors import SafetensorError, safe_open

    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in checkpoint_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                of_file = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise _damaged(directory, error) from error
        if twice := sorted(of_file.keys() & files.keys()):
            raise _difference(directory, "each tensor once", twice)
        shapes |= of_file
        files |= dict.fromkeys(of_file, path)
    return files, shapes


def _damaged(directory: Path, error: Exception) -> ValueError:
    return ValueError(f"{directory} must hold whole safetensors files, got {error}; copy them again.")


def _check_plain(model: Any, directory: Path) -> None:
    if quantized := getattr(model.config, "quantization_config", None):
        raise ValueError(
            f"{directory} must hold plain weights, got quantization_config {quantized}; dequantize it by "
            "from_pretrained, with dequantize=True in its quantization_config, and save_pretrained."
        )


def _check_map(mapping: CheckpointMap, directory: Path) -> None:
    """Raise ValueError unless a checkpoint has the tensors of the model."""
    for what, names in (
        ("every tensor of the model", mapping.missing),
        ("only tensors of the model", mapping.unknown),
        ("each tensor once", mapping.repeated),
        ("tensors of the model's shapes", mapping.misshapen),
    ):
        if names:
            raise _difference(directory, what, sorted(names))


def _difference(directory: Path, what: str, names: list[str]) -> ValueError:
    """Return the ValueError for tensors of a checkpoint that differ from the model's, with three of their names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ValueError(
        f"{directory} must hold {what}, got a difference in {', '.join(names[:3])}{more}; "
        "give the configuration that the checkpoint was saved with, or a copy with the model's own names: "
        "from_pretrained(...).save_pretrained(..., save_original_format=False)."
    )


@torch.no_grad()
def _read(mapping: CheckpointMap, files: dict[str, Path], tensors: dict[str, Tensor]) -> None:
    """Copy this rank's shard of every tensor.

    Raises:
        ValueError: tied tensors that differ.
    """
    for _, part, values in _local_parts(mapping.boxes, files, tensors):
        part.copy_(values)
    for box, part, values in _local_parts(mapping.copies, files, tensors):
        if not torch.equal(part, values.to(part)):
            raise ValueError(
                "tensors tied by tie_word_embeddings must be equal in the checkpoint, got different values of "
                f"{box.name} and {box.target}; set tie_word_embeddings to false."
            )


def _local_parts(
    boxes: list[TensorBox], files: dict[str, Path], tensors: dict[str, Tensor]
) -> Iterator[tuple[TensorBox, Tensor, Tensor]]:
    """Yield each box that overlaps this rank's shard: the box, the overlap in the shard, and its values in the file."""
    from safetensors import safe_open

    shards = {target: _shard_of(tensors[target]) for target in {box.target for box in boxes}}
    for path, in_file in groupby(sorted(boxes, key=lambda box: files[box.name]), lambda box: files[box.name]):
        with safe_open(path, framework="pt") as file:
            for box in in_file:
                shard, offsets = shards[box.target]
                sizes = (1,) * (len(box.offsets) - len(box.shape)) + box.shape
                starts = [max(a, b) for a, b in zip(box.offsets, offsets, strict=True)]
                ends = [min(a + n, b + m) for a, n, b, m in zip(box.offsets, sizes, offsets, shard.shape, strict=True)]
                if all(start < end for start, end in zip(starts, ends, strict=True)):
                    in_shard = [slice(x - b, y - b) for x, y, b in zip(starts, ends, offsets, strict=True)]
                    in_box = [slice(x - a, y - a) for x, y, a in zip(starts, ends, box.offsets, strict=True)]
                    in_tensor = in_box[len(sizes) - len(box.shape) :]
                    yield box, shard[tuple(in_shard)], file.get_slice(box.name)[tuple(in_tensor)]


def _shard_of(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of a tensor, and its offsets in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()
    return tensor.to_local(), tuple(chunk.offsets)
