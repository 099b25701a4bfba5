"""Numbers of ring calls, which detect ranks that make their calls in different orders.

A rank that skips a call, or runs two backwards in another order than its peers, exchanges well-formed tensors of
different layers. So every call has a number, a backward also has that of its forward, and a forward the name of its
layer, if the caller knows one (`in_layer`). With tensors on CPUs ranks compare them before they send. On GPUs both
numbers and a checksum of the call's arguments and layer are packed into one int64, the *word* of the call, which
travels with its first K/V. When the host makes a later call, it compares the words that have arrived by then. It does
not wait for the others, so an error may be raised one or more calls late (docs/decisions/0004-agreement.md).
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.comm.cuda_graphs import capturing
from ringflash.comm.driver_commands import Command, copy_command, write_command
from ringflash.comm.group import store_of

HEADER_BYTES = 256  # at the start of an area: the word of the call, and padding that aligns the tensors after it


class CallNumber(NamedTuple):
    """Number of a call among all forward and backward calls of its group, counted from 1.

    Args:
        value: 0 if there is none, as in a single process.
        forward: number of the forward that a backward belongs to; 0 for a forward.
        checksum: checksum of the arguments and the layer of a forward, 16 bits; 0 for a backward.
        layer: name of the layer of a forward; "" if unknown.
    """

    value: int = 0
    forward: int = 0
    checksum: int = 0
    layer: str = ""

    @property
    def word(self) -> int:
        """The lowest 23 bits of `value`, 24 bits of `forward` and the checksum, packed into one int64."""
        return (self.value & 0x7FFFFF) << 40 | (self.forward & 0xFFFFFF) << 16 | self.checksum

    def with_arguments(self, checksum: int) -> CallNumber:
        """Return the number of a forward with the checksum of its arguments, 16 bits, and of its layer."""
        return CallNumber(self.value, 0, (checksum ^ zlib.crc32(self.layer.encode())) & 0xFFFF, self.layer)

    def __str__(self) -> str:
        if self.forward:
            return f"{self.value} (backward of call {self.forward})"
        return f"{self.value} (forward{self.layer and f' of {self.layer}'})"


NO_NUMBER = CallNumber()  # for a single process


class Marker(Protocol):
    """Point in the work of a stream, for which other streams and the watchdog can wait."""

    def query(self) -> bool:
        """Return True if the work before it has finished."""


class _Unread(NamedTuple):
    """Words of a call that the host has not compared yet."""

    arrival: Marker
    call: CallNumber
    words: Tensor  # on the host
    senders: Sequence[int]
    unused: list[Tensor] | None  # list to which `words` is appended after the comparison


class _Calls:
    """Calls that this rank has made in one group."""

    def __init__(self) -> None:
        self.count = 0
        self.unread: deque[_Unread] = deque()
        self.problem = ""


_of_groups: WeakKeyDictionary[dist.ProcessGroup, _Calls] = WeakKeyDictionary()


def _calls(group: dist.ProcessGroup) -> _Calls:
    calls = _of_groups.get(group)
    if calls is None:
        calls = _of_groups[group] = _Calls()
    return calls


def next_number(group: dist.ProcessGroup | None, forward: int = 0) -> CallNumber:
    """Return the number of this rank's next call.

    Args:
        forward: number of the forward, if the next call is a backward.
    """
    if group is None:
        return CallNumber()
    return CallNumber(_calls(group).count + 1, forward, layer="" if forward else _layer)


_layer = ""  # name of the layer of the next call


def is_eager() -> bool:
    """Return False within a function that was given to torch.compile, even if this rank runs it uncompiled.

    Calls there have no name of a layer, because torch.compile would compile a graph for each name.
    """
    return not torch.compiler.is_compiling() and torch._C._dynamo.eval_frame.get_eval_frame_callback() is None


@contextmanager
def in_layer(name: str, training: bool) -> Iterator[None]:
    """Give the calls inside the name of a layer and its mode, unless an outer context has given them one."""
    global _layer
    outer, _layer = _layer, _layer or (name if training else f"{name} in evaluation mode")
    try:
        yield
    finally:
        _layer = outer


@contextmanager
def in_batch_row(index: int, count: int) -> Iterator[None]:
    """Add "row i of n" to the layer's name, so that ranks in different sequences of a batch are found."""
    global _layer
    outer, _layer = _layer, f"{_layer or 'a layer'}, row {index} of {count}"
    try:
        yield
    finally:
        _layer = outer


def begin(group: dist.ProcessGroup | None) -> int:
    """Count a call that starts now, and return its number."""
    if group is None:
        return 0
    calls = _calls(group)
    calls.count += 1
    return calls.count


def call_word_of(area: Tensor) -> Tensor:
    """Return the word of the call in the header of an area, as a view: (1,), int64."""
    return area[:8].view(torch.int64)


# Host memory for words, by their number and the kind of device. It is used again once its call has been compared.
# This memory is never given back to torch, which does not know of the driver's copies to it.
_unused_words: defaultdict[tuple[int, str], list[Tensor]] = defaultdict(list)
_host_words: list[Tensor] = []


class CallWords:
    """Call numbers of one rank and its peers, exchanged along with K/V.

    Args:
        own: (1,), int64; peers read it, or it is sent to them.
        senders: ranks whose words arrive here.
        device: device of K/V.
    """

    def __init__(self, own: Tensor, senders: Sequence[int], device: torch.device) -> None:
        self.own, self.senders = own, tuple(senders)
        self.arrived = torch.zeros(len(self.senders), dtype=torch.int64, device=device)
        self.unused = _unused_words[len(self.senders), device.type]

    def arrival_of(self, sender: int) -> Tensor:
        """Return the memory at which a peer's word arrives: (1,)."""
        index = self.senders.index(sender)
        return self.arrived[index : index + 1]

    def write(self, call: CallNumber) -> None:
        """Set this rank's word on the current stream, except in a CUDA graph, whose replays do not count as calls."""
        if not capturing(self.own.device):
            self.own.fill_(call.word)

    def write_commands(self, stream: int, _: object) -> list[Command]:
        """Return `write` as commands for the driver."""
        return [write_command(stream, self.own.data_ptr())]

    def for_host(self, call: CallNumber) -> Tensor | None:
        """Return host memory for the arriving words; None if there are none to compare."""
        device = self.arrived.device
        if not self.senders or not call.value or capturing(device):
            return None
        if self.unused:
            return self.unused.pop()
        made = torch.empty_like(self.arrived, device="cpu", pin_memory=device.type == "cuda")
        _host_words.append(made)
        return made

    def send_to_host(self, on_host: Tensor) -> None:
        """Copy the arrived words to the host, on the current stream."""
        on_host.copy_(self.arrived, non_blocking=True)

    def compare_later(
        self, group: dist.ProcessGroup, members: Sequence[int], call: CallNumber, arrival: Marker, on_host: Tensor
    ) -> None:
        """Queue the words that `send_to_host` has copied for comparison; they can be used again afterwards.

        Args:
            members: the senders' ranks in the group; empty if `senders` are ranks in the group already.
        """
        senders = [members[sender] for sender in self.senders] if members else self.senders
        compare_later(group, arrival, call, on_host, senders, self.unused)

    def send_commands(self, on_host: Tensor, stream: int, index_of: Callable[[object], int]) -> list[Command]:
        """Return `send_to_host` as commands for the driver."""
        return [copy_command(stream, 0, self.arrived.data_ptr(), self.arrived.nbytes, index_of(on_host))]


def compare_later(
    group: dist.ProcessGroup,
    arrival: Marker,
    call: CallNumber,
    words: Tensor,
    senders: Sequence[int],
    unused: list[Tensor] | None = None,
) -> None:
    """Queue the words of a call for comparison once they have arrived.

    Args:
        words: one word per sender, in host memory; written before `arrival`.
        unused: list to which `words` are appended after the comparison.
    """
    _calls(group).unread.append(_Unread(arrival, call, words, senders, unused))


def end_failed(group: dist.ProcessGroup, number: int) -> None:
    """Compare the words of a call that ended with an error as far as they have arrived, and drop the others.

    Words that have not arrived must not be compared later, because a peer's next call overwrites its word. Now it is
    safe to read the others: a peer makes its next call only after all ranks have compared their errors, and this rank
    does so after this function.
    """
    calls = _calls(group)
    if calls.unread and calls.unread[-1].call.value == number:
        with suppress(RuntimeError):  # from a device that failed; the first error is the cause
            _problem(calls)
        while calls.unread and calls.unread[-1].call.value == number:
            calls.unread.pop()


def check(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare the words that have arrived so far. During a CUDA graph capture, do nothing: events cannot be queried.

    Raises:
        RuntimeError: a rank was in another call; raised again by every later check of the group.
    """
    if group is not None and not capturing(device) and (problem := _problem(_calls(group))):
        raise RuntimeError(problem)


def find_problem() -> RuntimeError | None:
    """Return the error that `check` would raise for any present group of this process, to share it with other ranks."""
    present = [calls for group, calls in list(_of_groups.items()) if store_of(group) is not None]
    problem = next(filter(None, map(_problem, present)), "")
    return RuntimeError(problem) if problem else None


def _problem(calls: _Calls) -> str:
    """Compare the words that have arrived, oldest call first; return the first difference, or ""."""
    unread = calls.unread
    while not calls.problem and unread and unread[0].arrival.query():
        oldest = unread.popleft()
        calls.problem = _compare(oldest)
        if oldest.unused is not None:
            oldest.unused.append(oldest.words)
    return calls.problem


def _describe(word: int, own: CallNumber) -> str:
    """Name the call of a peer whose word differs from this rank's."""
    theirs = CallNumber(word >> 40, word >> 16 & 0xFFFFFF, word & 0xFFFF)
    same_number = theirs.word >> 16 == own.word >> 16
    return f"call {theirs}" + (" of another layer or with other arguments" if same_number else "")


def _compare(unread: _Unread) -> str:
    """Return the error text if a peer was in another call than this rank; "" if all were in the same one."""
    words, own = unread.words.tolist(), unread.call.word
    if words.count(own) == len(words):
        return ""
    theirs = [
        f"rank {rank} in {_describe(word, unread.call)}"
        for rank, word in zip(unread.senders, words, strict=True)
        if word != own
    ]
    return (
        f"ranks were in different attention calls: this rank in call {unread.call}, "
        f"{', '.join(theirs)}; their K/V were mixed, so results since then are wrong: restart from the last "
        "checkpoint, and run the same layers, forward and backward, in the same order on every rank."
    )
