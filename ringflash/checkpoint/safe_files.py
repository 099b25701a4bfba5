"""Checks that a distributed checkpoint is undamaged and holds only data, made before torch loads it.

torch unpickles parts of a checkpoint without restriction. `FileSystemReader` reads .metadata with `pickle.load`, and
the default planner reads values that are not tensors (e.g. of the optimizer) with `torch.load(weights_only=False)`. A
malicious file would run code there.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ringflash.checkpoint.checksums import CHECKSUMS, check_sums
from ringflash.comm.agreement import READ_TIMEOUT, raising_together

_TORCH_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_TORCH_METADATA, name)
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}  # fmt: skip
_VALUES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks up a layout by name
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),  # the directory it was saved to
    ("pathlib._local", "PosixPath"),  # the same, written by Python 3.13
}


def check_checkpoint(directory: Path, rank: int = 0, num_ranks: int = 1) -> None:
    """Check that a distributed checkpoint is undamaged and holds only data; call it before torch loads the directory.

    Reads .metadata, meta.pt if it exists, and the values that are not tensors with restricted unpickling; torch never
    unpickles tensors. Then compares the checksums of all files. A checkpoint without checksums (of another writer)
    passes with a warning. There is no protection if others can write to the directory between this check and the load.

    Args:
        directory: the checkpoint.
        rank, num_ranks: this process, and the number of processes that divide the checksums among them.
    Raises:
        ValueError: a file would run code, cannot be read, or differs from the file that was written.
    """
    metadata = _metadata(directory)
    try:
        _read_values(directory, metadata)
    except Exception as error:  # damaged or malicious files can make the reader raise anything
        raise _refusal(directory, "values that are data only", error) from error
    try:
        if (directory / "meta.pt").exists():
            torch.load(directory / "meta.pt", map_location="cpu", weights_only=True)
    except Exception as error:
        raise _refusal(directory, "a whole meta.pt of data only", error) from error
    if (directory / CHECKSUMS).exists():
        check_sums(directory, rank, num_ranks)
    elif rank == 0:
        warnings.warn(f"{directory} has no {CHECKSUMS}: damaged tensors in it would not be found.", stacklevel=2)


def check_together(directory: Path) -> None:
    """Run `check_checkpoint` on all ranks of the job, which divide the checksums; every rank raises or none does.

    Raises:
        ValueError: as `check_checkpoint`. RuntimeError: a rank does not join within 30 minutes.
    """
    with raising_together(dist.group.WORLD, {"checkpoint": str(directory)}, timeout=READ_TIMEOUT):
        check_checkpoint(directory, dist.get_rank(), dist.get_world_size())


class _Records(pickle.Unpickler):
    """Unpickler restricted to the classes of torch's .metadata."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._before: dict[type, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that metadata may name; refuse any other before it is imported."""
        if (module, name) in _RECORDS:
            record = super().find_class(module, name)
            self._before.setdefault(record, dict(vars(record)))
            return record
        if (module, name) in _VALUES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")

    def check_classes(self) -> None:
        """Raise UnpicklingError if the pickle changed attributes of the classes, which the later load would use."""
        for record, before in self._before.items():
            if dict(vars(record)) != before:
                raise pickle.UnpicklingError(f"a change of the class {record.__qualname__}")


def _metadata(directory: Path) -> Metadata:
    """Return the metadata of a distributed checkpoint, unpickling only known classes."""
    try:
        with (directory / ".metadata").open("rb") as file:
            records = _Records(file)
            metadata = records.load()
        records.check_classes()
    except Exception as error:
        raise _refusal(directory, "a whole .metadata of torch's own records", error) from error
    if not isinstance(metadata, Metadata):
        raise _refusal(directory, "a Metadata in .metadata", TypeError(type(metadata).__name__))
    return metadata


class _DataOnly(DefaultLoadPlanner):
    """Planner that loads values as data and drops them."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        torch.load(value, map_location="cpu", weights_only=True)


def _read_values(directory: Path, metadata: Metadata) -> None:
    """Read the values that are not tensors, at the offsets that torch's load will read."""
    kinds = metadata.state_dict_metadata.items()
    indices = [MetadataIndex(name) for name, kind in kinds if isinstance(kind, BytesStorageMetadata)]
    none = torch.Size([0])
    reader = FileSystemReader(directory)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    items = [ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none) for index in indices]
    reader.read_data(LoadPlan(items), _DataOnly()).wait()


def _refusal(directory: Path, must: str, error: Exception) -> ValueError:
    """Return the ValueError for a directory that does not hold what it must, with the first useful line of `error`."""
    lines = str(error).strip().split("\n")
    got = next((line.strip() for line in lines if "unsupported" in line.lower()), lines[0])[:300] or "nothing"
    return ValueError(
        f"{directory} must hold {must}, got {type(error).__name__}: {got}; it is damaged, or holds more than data "
        "and would run code: take a checkpoint that your own run wrote."
    )
