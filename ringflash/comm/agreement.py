"""Agreement of the ranks of a group on a call, reached before anything is sent.

If only one rank raises, or posts messages of another size, the others wait for it forever. So the ranks first compare
the signatures of their calls, and an error if a rank has one. Then either every rank raises or none does. They
exchange checksums of 16 bytes; only if these differ, each also sends its signature or error, for the message.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from ringflash.comm import call_numbers
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.communicator import communicator
from ringflash.comm.group import Group, backend_of, resolve
from ringflash.comm.timeouts import describe_timeout
from ringflash.comm.timeouts import timeout as ring_timeout
from ringflash.version import __version__

Policy = Literal["changed", "always", "never"]

MESSAGE_BYTES = 2048
REMEMBERED = 8  # number of compared signatures that are kept: a model alternates between few kinds of layers
TIMEOUT = timedelta(seconds=120)  # limit of the wait for a rank that never joins: longer than ranks drift apart
READ_TIMEOUT = timedelta(minutes=30)  # the same limit after reading files, which takes some hosts longer than others

_ERROR_TYPES: dict[str, type[Exception]] = {x.__name__: x for x in (ValueError, NotImplementedError, RuntimeError)}

_CPU = torch.device("cpu")
_ERRORS_IN_CALLS = "errors in calls"  # an entry of each signature

_policy: Policy = "changed"


class _Errors(NamedTuple):
    """Errors in calls of a group on this rank: how many there were, and the place of the last one."""

    num_errors: int = 0
    place: str = ""

    def __str__(self) -> str:
        return f"{self.num_errors}, the last {self.place}" if self.num_errors else "none"


class _Compared(NamedTuple):
    """A kind of call that the ranks of a group have compared."""

    signature: dict[str, object]
    errors: _Errors
    checksum: int


_compared: WeakKeyDictionary[dist.ProcessGroup, deque[_Compared]] = WeakKeyDictionary()
_errors_of_groups: WeakKeyDictionary[dist.ProcessGroup, _Errors] = WeakKeyDictionary()
_NO_ERRORS = _Errors()


def set_agreement_check(policy: Policy) -> None:
    """Set when ranks compare their calls.

    Args:
        policy: "changed" (default) compares a call that differs from the last 8 kinds of call that this rank has
            compared, and every call with tensors on CPUs. "always" also compares a repeated call on GPUs before it
            sends, at the cost of one exchange between hosts per call. "never" trusts the caller.
    """
    global _policy
    if policy not in ("changed", "always", "never"):
        raise ValueError(f"policy must be 'changed', 'always' or 'never', got {policy!r}; the default is 'changed'.")
    _policy = policy


def agree(
    group: Group,
    signature: dict[str, object],
    error: Exception | None = None,
    device: torch.device = _CPU,
    timeout: timedelta | None = None,
    call: CallNumber | None = None,
    remedy: str = "give every rank the same arguments",
) -> int:
    """Compare a call with those of the other ranks; raise on every rank if they differ or if one has an error.

    Args:
        signature: JSON values that must be equal on all ranks. The dictionary is kept, and must not be changed.
        error: the error that this rank would raise.
        device: device of the call's tensors. A call on a GPU that repeats one of the last kinds that were compared is
            not compared again, since its host would wait for the other hosts every time. Any other call is compared.
        timeout: limit of the wait for the other ranks, default 120 s. The ring's own timeout
            (`ringflash.set_timeout`) applies if it is longer.
        call: number of the call, if this is a ring call. Whenever signatures are compared, the ranks also compare this
            number and the version of ringflash. A new number alone does not cause a comparison: every call has one.
        remedy: end of the message if signatures differ.
    Returns:
        A checksum of the signature, 16 bits; 0 if calls are not compared.
    Raises:
        The error of the first rank that has one, as ValueError, NotImplementedError or RuntimeError; ValueError if
        signatures differ; RuntimeError if a rank does not join within the timeout.
    """
    group = resolve(group)
    if error is None and call is None:
        # Not a ring call but, for example, a checkpoint, which must not save results of ring calls that were mixed up.
        error = call_numbers.find_problem()
    if group is None or _policy == "never":
        if error is not None:
            raise error
        return 0
    errors = _errors_of_groups.get(group, _NO_ERRORS)
    checksum = _known_checksum(group, signature, errors)
    if device.type == "cpu" or _policy == "always" or error is not None or checksum is None:
        extra = {"call": str(call or f"none, before {call_numbers.next_number(group)}"), "ringflash": __version__}
        try:
            content: dict[str, object] = {**signature, _ERRORS_IN_CALLS: str(errors), **extra}
            answers = _exchange_if_different(group, _encode(content, error), timeout)
        except RuntimeError as unanswered:
            _record_error(group, "before its first message")  # the other ranks may already be in the call
            if error is not None:
                raise error from unanswered
            raise
        _compare(answers, error, remedy)
    if checksum is None:
        checksum = zlib.crc32(json.dumps({**signature, _ERRORS_IN_CALLS: str(errors)}).encode()) & 0xFFFF
        _compared.setdefault(group, deque(maxlen=REMEMBERED)).append(_Compared(signature, errors, checksum))
    return checksum


@contextmanager
def raising_together(
    group: Group, signature: dict[str, object], device: torch.device = _CPU, **options: Any
) -> Iterator[None]:
    """Do work in which only this rank may fail, then `agree`, with its error if it has one.

    Args:
        signature: may still be filled by the work.
        options: timeout and remedy, as `agree`.
    """
    error = None
    try:
        yield
    except Exception as problem:
        if group is None:
            raise
        error = problem
    if group is not None:
        agree(group, signature, error, device, **options)


def _known_checksum(group: dist.ProcessGroup, signature: dict[str, object], errors: _Errors) -> int | None:
    """Return the checksum of a kind of call that was compared; None if it was not."""
    for compared in _compared.get(group, ()):
        if (compared.signature is signature or compared.signature == signature) and compared.errors == errors:
            return compared.checksum
    return None


def agree_on_backward(
    group: dist.ProcessGroup | None, call: CallNumber, error: Exception | None, device: torch.device
) -> None:
    """Run `agree` for a backward, whose forward was compared. On a GPU only the policy "always" compares it.

    Raises:
        The errors of `agree`; on a GPU without comparison, `error` on this rank only.
    """
    if device.type == "cpu" or _policy == "always":
        agree(group, {}, error, device, call=call)
    elif error is not None:
        raise error


class TrackedCall:
    """A call that sends. After an error in it, the next call is compared, and refused unless all failed alike.

    A caller may catch the error (for example, out of memory) and call again. Messages of the first call that this rank
    or its peers have not received would then be received as those of the new call. An error before the first message of
    this rank is recorded, too, because its peers may already have sent messages of the call that it has left.
    """

    __slots__ = ("_before", "_count", "_group", "_number")

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._count: Callable[[], int] = int  # 0, until `count_by`
        self._before = 0

    def __enter__(self) -> Self:
        self._number = call_numbers.begin(self._group)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._group is not None:
            call_numbers.end_failed(self._group, self._number)
            posted = self._count() - self._before
            _record_error(self._group, f"in call {self._number} after {posted} messages")

    def count_by(self, count: Callable[[], int]) -> None:
        """Start counting.

        Args:
            count: returns the number of message batches, or barriers, that this rank has posted so far in all calls.
        """
        self._count, self._before = count, count()


def _record_error(group: dist.ProcessGroup, place: str) -> None:
    """Record an error, so that the next call of the group is compared."""
    _errors_of_groups[group] = _Errors(_errors_of_groups.get(group, _NO_ERRORS).num_errors + 1, place)


def gather(group: dist.ProcessGroup, value: object) -> list:
    """Return the JSON value of every rank, in rank order. A collective call.

    Args:
        value: at most MESSAGE_BYTES as JSON text.
    """
    message = json.dumps(value).encode().ljust(MESSAGE_BYTES)
    return [json.loads(answer) for answer in _exchange(group, message)]


def _encode(signature: dict[str, object], error: Exception | None) -> bytes:
    content: dict[str, object] = {"signature": signature}
    if error is not None:
        kind = next((name for name, kind in _ERROR_TYPES.items() if isinstance(error, kind)), "RuntimeError")
        content = {"error": kind, "text": _truncate(str(error))}
    return json.dumps(content).encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES)


def _truncate(text: str) -> str:
    """Return the beginning of a text, short enough for a message: JSON writes one letter in up to 12 bytes."""
    text = text[: MESSAGE_BYTES // 4]
    while len(json.dumps(text)) > MESSAGE_BYTES // 2:
        text = text[: len(text) // 2]
    return text


def _exchange_if_different(group: dist.ProcessGroup, message: bytes, timeout: timedelta | None) -> list[bytes]:
    """Return only this rank's message if all ranks have the same one, otherwise the message of every rank."""
    checksums = _exchange(group, hashlib.sha256(message).digest()[:16], timeout)
    return [message] if len(set(checksums)) == 1 else _exchange(group, message, timeout)


def _exchange(group: dist.ProcessGroup, message: bytes, timeout: timedelta | None = None) -> list[bytes]:
    """Return the message of every rank, in rank order."""
    options = AllgatherOptions()
    options.timeout = limit = max(timeout or TIMEOUT, ring_timeout(group))
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    begun = time.monotonic()
    try:
        _channel(group, limit).allgather([gathered], [mine], options).wait()
    except RuntimeError as cause:
        after = describe_timeout(limit, begun)
        raise RuntimeError(
            f"some of the {group.size()} ranks of the group did not join the call{after} ({cause}); "
            "look for a rank that has stopped, or that made another call."
        ) from cause
    return [x.numpy().tobytes() for x in gathered]


def _compare(messages: list[bytes], error: Exception | None, remedy: str) -> None:
    """Raise if any rank has an error, or if signatures differ; the same on every rank.

    Args:
        messages: messages of all ranks, or only this rank's if all are equal.
        error: this rank's own error, raised as it is if it is the first one.
    """
    if len(set(messages)) == 1 and error is None:
        return
    contents = [json.loads(m) for m in messages]
    failed = [rank for rank, content in enumerate(contents) if "error" in content]
    if failed:
        first = contents[failed[0]]
        if error is not None and _truncate(str(error)) == first["text"]:
            raise error
        raise _ERROR_TYPES[first["error"]](f"{first['text']} (raised on ranks {failed})")
    calls = [content["signature"] for content in contents]
    names = dict.fromkeys(name for call in calls for name in call)
    fields = [name for name in names if len({json.dumps(call.get(name)) for call in calls}) > 1]
    if "call" in fields:  # different layers, or a forward and a backward: their arguments tell nothing
        fields = [name for name in fields if name in ("call", _ERRORS_IN_CALLS)]
    table = "; ".join(f"{name} {_list_ranks([call.get(name) for call in calls])}" for name in fields)
    if _ERRORS_IN_CALLS in fields:
        remedy = "start the processes again: messages are left over from a call that did not end alike"
    elif "call" in fields:
        remedy = "run the same layers, forward and backward, in one order and mode (train or eval) on every rank"
    elif "ringflash" in fields:
        remedy = "install one version of ringflash on all hosts"
    elif fields == ["kernel"]:
        remedy = "install the same packages on all hosts, or name an impl that each can run (ringflash.explain)"
    raise ValueError(f"all ranks of the group must make the same call, got {table}; {remedy}.")


def _list_ranks(values: list[object]) -> str:
    """List the ranks that hold each value: "True (rank 0, 2), False (rank 1)"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} (rank {', '.join(map(str, holders))})" for value, holders in ranks.items())


def _channel(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks, so that comparing does not wait for the device."""
    return group if backend_of(group, _CPU) == "gloo" else communicator(group, "agreement", "gloo", timeout)
