"""Interface of the copy engine and of message transports: named memory areas whose contents travel between ranks.

    reserve        every rank allocates an area of the same size
    barrier        order the streams of all ranks: work issued before it on any rank precedes work issued after it
    run_on_stream  run work on a separate stream

`CopyEngine` copies from areas of other ranks, which it maps. `NcclGather` and `GlooGather` send messages, which order
the ranks without barriers. Only `reserve` blocks the host, and only if an area grows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.comm.transport.gpu_areas import Commands, Marker, T

# Channels of barriers. In a call that gathers K/V, when a stream has passed the barrier of
#   BEGIN:      every rank has published K/V of this call (of large K/V, those of its first section)
#   PUBLISHED:  every rank has published the rest of large K/V
#   PULLED:     every rank has pulled all keys that it needs: no other rank reads this rank's area any more
#   READY:      the kernels of every rank have written the gradients that return now
#   FREE:       every rank has pulled these gradients: their buffer may be overwritten
# An exchange of heads uses BEGIN only: every rank of the host has written its tensors.
BEGIN, PUBLISHED, PULLED, READY, FREE = range(5)


class Incoming(NamedTuple):
    """A tensor to receive from a rank. `source` is the memory to copy from if this rank maps it, else None."""

    target: Tensor
    rank: int
    source: Tensor | None


class Outgoing(NamedTuple):
    """A tensor to send to a rank that cannot map our memory."""

    tensor: Tensor
    rank: int


class JoinAfterError:
    """Context that makes the caller's stream wait for all other streams after an error.

    After an error, such as out of memory, streams may still write to memory that the caller is about to free. They may
    also write to a buffer that the next call uses, even a call of another group.
    """

    def __init__(self, areas: GroupAreas) -> None:
        self._areas = areas

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with suppress(RuntimeError):  # from a device that failed; the first error is the cause
                self._areas.join()


class GroupAreas(Protocol):
    """Named memory areas of one group and process. All ranks reserve the same areas in the same order.

    `rank`: this process's rank among `members`, the ranks of the group that share the areas (empty: all).
    `num_buffers`: number of buffers to use in rotation, so that transfers run ahead of kernels.
    """

    rank: int
    group: dist.ProcessGroup
    members: tuple[int, ...]
    num_buffers: int

    @property
    def num_posted(self) -> int:
        """Number of barriers or message batches that this rank issued; equal on all ranks after the same calls."""

    def reserve(self, name: str, num_bytes: int) -> None:
        """Grow the area to at least `num_bytes`; a collective call if it is smaller."""

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return a tensor at the start of a rank's area; None if this rank cannot map it."""

    def make_transfer(
        self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], what: str
    ) -> Callable[[], None]:
        """Return a function that performs these transfers on the current stream.

        Two ranks must list the transfers between them in the same order.
        """

    def cached(self, key: Hashable, areas: Collection[str], make: Callable[[], T]) -> T:
        """Return the result of `make` for this key, cached until one of these areas grows."""

    def barrier(self, channel: int) -> None:
        """Order the current streams of all ranks. Barriers of one channel must not overlap."""

    def mark(self) -> Marker:
        """Return a marker for the work that the current stream holds so far."""

    def wait(self, *markers: Marker) -> None:
        """Order the current stream after these markers."""

    def run(self, work: Callable[..., None], *args: Any, commands: Commands | None = None) -> None:
        """Run `work(*args)`, which uses the current stream.

        If the call is recorded, each repetition runs `work` again, or issues commands that do the same. A repetition
        has its own call number, watched call, markers and results of `run_on_host`.

        Args:
            commands: returns these commands. Its arguments are a stream, and a function that finds the index of a
                result of `run_on_host`. There are no commands if it is None or returns None.
        """

    def run_on_host(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` as `run` does, but without using the device, and return its result."""

    def on_one_stream(self) -> AbstractContextManager[None]:
        """Return a context that asks torch for the current stream once; inside it only `run_on_stream` changes it."""

    def run_on_stream(
        self, name: str, work: Callable[[], None], after: Sequence[Marker], *, urgent: bool = False
    ) -> Marker:
        """Run `work` on the stream `name`, after these markers; the current stream does not wait for it.

        Urgent work has priority for free SMs. Either all work of a stream is urgent or none is.
        """

    def join(self) -> None:
        """Order the current and all named streams after all named ones, including work that raised and has no marker.

        Afterwards it is safe to free memory that one stream allocated and another one used.
        """

    def num_bytes(self) -> int:
        """Return the bytes of this rank's areas."""

    def release(self) -> None:
        """Free the areas. Every rank must do so, or the next `reserve` never returns."""
