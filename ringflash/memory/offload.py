"""Checkpoints that wait in the host's memory; both copies run beside the layers' work.

forward    layer i        beside it: its input to the host
backward   layer i        beside it: the input of layer i - 1 to the GPU
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, cuda
from torch.autograd.graph import saved_tensors_hooks


class HostCopies:
    """Hooks for what the layers of a model save, in the order of the layers.

    Of tensors that leave, one at a time is kept for its copy: the host waits for it before the next. Of those that
    come back, one comes early. What does not lie on a GPU stays where it is.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, cuda.Stream] = {}
        self._leaving: tuple[Tensor, int, cuda.Event] | None = None  # and its version
        self._last: weakref.ref[_Waiting] | None = None

    def __reduce__(self) -> tuple[type[HostCopies], tuple[()]]:
        """A copy of a model has its own."""
        return HostCopies, ()

    def hooks(self) -> saved_tensors_hooks:
        """A context in which tensors are saved on the host."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Any:
        if not _leaves(x):
            return x
        self._arrived()
        stream = self._stream(x.device)
        on_host = _pinned_like(x)
        stream.wait_stream(cuda.current_stream(x.device))
        with cuda.stream(stream):
            on_host.copy_(x.detach(), non_blocking=True)
        self._leaving = x.detach(), x._version, stream.record_event()
        waiting = _Waiting(on_host, x.device, self._last)
        self._last = weakref.ref(waiting)
        return waiting

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._arrived()
        stream = self._stream(saved.device)
        x = saved.take(stream)
        before = saved.before and saved.before()
        if before is not None:
            before.fetch(stream)
        return x

    def _arrived(self) -> None:
        """What has left is on the host, and its memory on the GPU is free.

        Raises:
            RuntimeError: a layer changed its input in place, perhaps while it was copied.
        """
        if self._leaving is None:
            return
        (x, version, event), self._leaving = self._leaving, None
        event.synchronize()
        if x._version != version:
            raise RuntimeError(
                f"inputs of layers must stay as they are for offload_checkpoints, got one of {tuple(x.shape)} that was "
                "changed in place; let the layer make a tensor of its own."
            )

    def _stream(self, device: torch.device) -> cuda.Stream:
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        return self._streams[device]


def _leaves(x: Tensor) -> bool:
    return x.is_cuda and x.numel() > 0


def _pinned_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=True, requires_grad=False)


class _Waiting:
    """A tensor on the host.

    Args:
        before: the one that was saved before it.
    """

    def __init__(self, on_host: Tensor, device: torch.device, before: weakref.ref[_Waiting] | None) -> None:
        self.on_host, self.device, self.before = on_host, device, before
        self._coming: tuple[Tensor, cuda.Event] | None = None

    def fetch(self, stream: cuda.Stream) -> None:
        """Begin to copy it to its GPU, beside what runs there."""
        if self._coming is not None:
            return
        x = torch.empty_like(self.on_host, device=self.device)
        stream.wait_stream(cuda.current_stream(self.device))  # its memory may be in use by work given out before
        with cuda.stream(stream):
            x.copy_(self.on_host, non_blocking=True)
        self._coming = x, stream.record_event()

    def __del__(self) -> None:
        """Nobody takes it: its memory is free for work after the copy. (record_stream would hold memory of layers that
        the host has given out, but the GPU has not reached.)"""
        if self._coming is not None:
            cuda.current_stream(self.device).wait_event(self._coming[1])

    def take(self, stream: cuda.Stream) -> Tensor:
        """It, on its GPU; work given out from now on comes after the copy."""
        self.fetch(stream)
        assert self._coming is not None
        (x, event), self._coming = self._coming, None
        cuda.current_stream(self.device).wait_event(event)
        return x
