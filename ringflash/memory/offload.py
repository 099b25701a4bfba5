"""Offloading of checkpoints to the host's memory; both copies overlap with the layers' work.

forward    compute layer i        copy the input of layer i to the host
backward   compute layer i        prefetch the input of layer i - 1 to the GPU
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, cuda
from torch.autograd.graph import saved_tensors_hooks


class HostCopies:
    """Saved-tensor hooks for the layers of a model, in the order of the layers.

    One tensor at a time is copied to the host, which waits for it before the next copy. In the backward, one tensor is
    prefetched. Tensors that are not on a GPU are saved as they are.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, cuda.Stream] = {}
        self._outgoing: tuple[Tensor, int, cuda.Event] | None = None  # tensor, its version, end of its copy
        self._last: weakref.ref[_HostTensor] | None = None

    def __reduce__(self) -> tuple[type[HostCopies], tuple[()]]:
        """Copy as a new object: a copy of a model offloads independently."""
        return HostCopies, ()

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which tensors are saved on the host."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Any:
        """Start the copy of a saved tensor to the host, and return what autograd keeps instead of it."""
        if not _is_offloaded(x):
            return x
        self._finish_outgoing()
        stream = self._stream(x.device)
        on_host = _pinned_like(x)
        stream.wait_stream(cuda.current_stream(x.device))
        with cuda.stream(stream):
            on_host.copy_(x.detach(), non_blocking=True)
        self._outgoing = x.detach(), x._version, stream.record_event()
        saved = _HostTensor(on_host, x.device, self._last)
        self._last = weakref.ref(saved)
        return saved

    def _unpack(self, saved: Any) -> Tensor:
        """Return a saved tensor on its device, and start to fetch the one that the backward needs next."""
        if isinstance(saved, Tensor):
            return saved
        self._finish_outgoing()
        stream = self._stream(saved.device)
        x = saved.take(stream)
        previous = saved.previous and saved.previous()
        if previous is not None:
            previous.fetch(stream)
        return x

    def _finish_outgoing(self) -> None:
        """Wait until the outgoing tensor is on the host, and free its memory on the GPU.

        Raises:
            RuntimeError: a layer changed its input in place, perhaps while it was copied.
        """
        if self._outgoing is None:
            return
        (x, version, event), self._outgoing = self._outgoing, None
        event.synchronize()
        if x._version != version:
            raise RuntimeError(
                "inputs of layers must not be changed in place with offload_checkpoints, got a changed input of shape "
                f"{tuple(x.shape)}; let the layer write to a new tensor."
            )

    def _stream(self, device: torch.device) -> cuda.Stream:
        if device not in self._streams:
            self._streams[device] = cuda.Stream(device)
        return self._streams[device]


def _is_offloaded(x: Tensor) -> bool:
    return x.is_cuda and x.numel() > 0


def _pinned_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=True, requires_grad=False)


class _HostTensor:
    """A tensor on the host, and its copy back to the GPU.

    Args:
        previous: the tensor that was saved before this one.
    """

    def __init__(self, on_host: Tensor, device: torch.device, previous: weakref.ref[_HostTensor] | None) -> None:
        self.on_host, self.device, self.previous = on_host, device, previous
        self._incoming: tuple[Tensor, cuda.Event] | None = None

    def fetch(self, stream: cuda.Stream) -> None:
        """Start the copy to the GPU, concurrently with the work that runs there."""
        if self._incoming is not None:
            return
        x = torch.empty_like(self.on_host, device=self.device)
        stream.wait_stream(cuda.current_stream(self.device))  # queued work may still use the memory of x
        with cuda.stream(stream):
            x.copy_(self.on_host, non_blocking=True)
        self._incoming = x, stream.record_event()

    def __del__(self) -> None:
        """Let later work reuse the memory of a prefetched copy that was never taken, once the copy has ended.

        record_stream would hold the memory also for layers that are queued, but that the GPU has not reached.
        """
        if self._incoming is not None:
            cuda.current_stream(self.device).wait_event(self._incoming[1])

    def take(self, stream: cuda.Stream) -> Tensor:
        """Return the tensor on its GPU; work that is queued from now on runs after the copy."""
        self.fetch(stream)
        assert self._incoming is not None
        (x, event), self._incoming = self._incoming, None
        cuda.current_stream(self.device).wait_event(event)
        return x
