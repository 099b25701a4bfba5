"""Slots, where a repeated call finds the tensors of the recorded one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ringflash.attention.recording.steps import Tensors


class Slots:
    """The *slots* of a call: its inputs, then its allocations. A tensor is addressed by a slot and an offset in bytes.

    All other tensors belong to the group or the mask. They keep their addresses as long as the tape exists, which is
    dropped with the areas.

    Args:
        give_up: called with the reason if the call cannot be repeated.
    Attributes:
        kept: tensors without a slot.
    """

    def __init__(self, tensors: Tensors, give_up: Callable[[str], None]) -> None:
        self.kept: list[Tensor] = []
        self._give_up = give_up
        self._addresses = [0 if x is None else x.data_ptr() for x in tensors]
        self._dtypes = [None if x is None else x.dtype for x in tensors]
        # Inputs and their views. Inputs may share a storage, so they are found by id; the caller keeps them alive.
        self._inputs = {id(x): (x, slot) for slot, x in enumerate(tensors) if x is not None}
        self._input_storages = {x.untyped_storage()._cdata for x in tensors if x is not None}
        self._allocated: dict[int, tuple[int, StorageWeakRef, torch.cuda.Stream]] = {}  # slots, by storage

    def __len__(self) -> int:
        return len(self._addresses)

    def add_views(self, x: Tensor, views: Any) -> None:
        """Remember views of an input as parts of its slot; other views need no slot."""
        entry = self._inputs.get(id(x))
        if entry is not None:
            self._inputs |= {id(view): (view, entry[1]) for view in tree_leaves(views)}

    def is_new(self, out: Any) -> bool:
        """True if an operator returned one new tensor."""
        if not isinstance(out, Tensor):
            return False
        storage = out.untyped_storage()._cdata
        return storage not in self._allocated and storage not in self._input_storages

    def add(self, x: Tensor, stream: torch.cuda.Stream) -> int:
        """Give the next slot to a new tensor, whose memory belongs to a stream, and return it."""
        storage, slot = x.untyped_storage(), len(self._addresses)
        self._allocated[storage._cdata] = slot, StorageWeakRef(storage), stream
        self._addresses.append(x.data_ptr())
        self._dtypes.append(x.dtype)
        return slot

    def freed(self) -> Iterator[tuple[int, torch.cuda.Stream]]:
        """Yield slot and stream of each tensor that was freed since the previous call of this method."""
        for storage, (slot, alive, stream) in list(self._allocated.items()):
            if alive.expired():
                del self._allocated[storage]
                yield slot, stream

    def place(self, x: Tensor) -> tuple[int | None, int]:
        """Return the slot of a tensor and its offset there; None and its address if it has no slot."""
        storage = x.untyped_storage()._cdata
        if not x.numel():
            return None, 0
        if id(x) in self._inputs:
            slot = self._inputs[id(x)][1]
        elif storage in self._allocated:
            slot = self._allocated[storage][0]
        else:
            if storage in self._input_storages:
                self._give_up("an unknown view of an input")
            self.kept.append(x)
            return None, x.data_ptr()
        return slot, x.data_ptr() - self._addresses[slot]

    def has_dtype(self, slot: int, x: Tensor) -> bool:
        """True if a tensor has the dtype of the tensor of its slot."""
        return x.dtype == self._dtypes[slot]

    def of_result(self, x: Tensor) -> int:
        """Return the slot of a result, which must be an allocation."""
        slot, offset = self.place(x)
        if slot is None or offset or id(x) in self._inputs:
            self._give_up("a result that the call did not allocate")
            return 0
        return slot
