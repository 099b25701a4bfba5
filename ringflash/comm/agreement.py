"""Ranks of a group compare what they were asked to do before anything is sent.

A rank that raises alone, or that posts messages of another size, leaves the others waiting. So a call
first exchanges its signature and its own error, if it has one, and then every rank raises or none does.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from ringflash.comm import call_numbers
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.communicator import communicator
from ringflash.comm.group import Group, backend_of, resolve
from ringflash.comm.timeouts import timeout as ring_timeout

Policy = Literal["changed", "always", "never"]

MESSAGE_BYTES = 2048
TIMEOUT = timedelta(seconds=120)  # a rank that never joins: longer than ranks drift apart, shorter than a coffee
READ_TIMEOUT = timedelta(minutes=30)  # where files are read before: some hosts read faster than others

_ERRORS: dict[str, type[Exception]] = {x.__name__: x for x in (ValueError, NotImplementedError, RuntimeError)}

_CPU = torch.device("cpu")

_policy: Policy = "changed"
_last: WeakKeyDictionary[dist.ProcessGroup, dict[str, object]] = WeakKeyDictionary()  # the last call compared
_interrupted: WeakKeyDictionary[dist.ProcessGroup, tuple[int, str]] = WeakKeyDictionary()  # how often, where last


def set_agreement_check(policy: Policy) -> None:
    """When ranks compare their calls.

    Args:
        policy: "changed" (default) compares whenever this rank's call differs from its last one, and every call
            with tensors on CPUs, which are sent the same way; "always" also catches one rank alone repeating its
            last call on GPUs, for an exchange between hosts a call; "never" trusts the caller.
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
) -> None:
    """Return if every rank of `group` made the same call and none has an error; raise on every rank otherwise.

    Args:
        signature: JSON values that must be equal on all ranks.
        error: what this rank would raise.
        device: of the call's tensors. A call of a GPU, which this rank made before, is not compared again: its host
            would wait for the others' every time. Anything else is.
        timeout: how long to wait for the others; default 120 s. A ring's own timeout (`ringflash.set_timeout`) holds if
            it is longer.
        call: its number, if this is a ring call. Compared like the signature and the version of ringflash, but a new
            number is no reason to compare.
    Raises:
        The first rank's error, as the ValueError, NotImplementedError or else RuntimeError that it is; ValueError where
        signatures differ; RuntimeError where a rank does not join within that time.
    """
    group = resolve(group)
    if error is None and call is None:  # a checkpoint, say: no later time is better
        error = call_numbers.find_problem()
    if group is None or _policy == "never":
        if error is not None:
            raise error
        return
    times, place = _interrupted.get(group, (0, ""))
    signature = {**signature, "errors in calls": f"{times}, the last {place}" if times else "none"}
    if device.type == "cpu" or _policy == "always" or error is not None or _last.get(group) != signature:
        beside = {"call": str(call or f"none, before {call_numbers.next_number(group)}"), "ringflash": _version()}
        try:
            answers = _exchange(group, _encode({**signature, **beside}, error), timeout)
        except RuntimeError as unanswered:
            _interrupt(group, "before its first message")  # the others may be in the call
            if error is not None:
                raise error from unanswered
            raise
        _compare(answers, error)
        _last[group] = signature


def agree_on_backward(
    group: dist.ProcessGroup | None, call: CallNumber, error: Exception | None, device: torch.device
) -> None:
    """As `agree`, for a backward, whose forward was compared. A GPU's is compared under the policy "always" only.

    Raises:
        As `agree`; on a GPU, `error` on this rank.
    """
    if device.type == "cpu" or _policy == "always":
        agree(group, {}, error, device, call=call)
    elif error is not None:
        raise error


class Posted:
    """The number of messages that this rank has posted in one call."""

    def __init__(self) -> None:
        self._count: Callable[[], int] = lambda: 0
        self._before = 0

    def count_by(self, count: Callable[[], int]) -> None:
        """Count from now on.

        Args:
            count: batches of messages, or barriers, that this rank has posted by now in all calls.
        """
        self._count, self._before = count, count()

    def __str__(self) -> str:
        return f"after {self._count() - self._before} messages"


@contextmanager
def under_way(group: dist.ProcessGroup | None) -> Iterator[Posted]:
    """A call that sends. If it ends with an error, the next call is compared, and refused unless all stopped alike.

    A caller may catch the error, out of memory say, and call again. Messages of the peers, or of this rank, that are
    left over from the first call would be taken for messages of the new one. That holds for an error before the first
    message, too: the peers may be in the call that this rank has left.
    """
    number, posted = call_numbers.next_number(group), Posted()
    call_numbers.begin(group)
    try:
        yield posted
    except BaseException:
        if group is not None:
            _interrupt(group, f"in call {number.number} {posted}")
        raise


def _interrupt(group: dist.ProcessGroup, place: str) -> None:
    """Have the next call of the group compared."""
    times, _ = _interrupted.get(group, (0, ""))
    _interrupted[group] = times + 1, place


def gather(group: dist.ProcessGroup, value: object, timeout: timedelta | None = None) -> list:
    """Every rank's JSON value, in rank order; at most MESSAGE_BYTES of text each. All ranks call this together.

    Args:
        timeout: as for `agree`.
    """
    message = json.dumps(value).encode().ljust(MESSAGE_BYTES)
    return [json.loads(answer) for answer in _exchange(group, message, timeout)]


def _encode(signature: dict[str, object], error: Exception | None) -> bytes:
    content: dict[str, object] = {"signature": signature}
    if error is not None:
        kind = next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "RuntimeError")
        content = {"error": kind, "text": _that_fits(str(error))}
    return json.dumps(content).encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES)


def _that_fits(text: str) -> str:
    """The beginning of a text that fits into a message; JSON writes one letter in up to 12 bytes."""
    text = text[: MESSAGE_BYTES // 4]
    while len(json.dumps(text)) > MESSAGE_BYTES // 2:
        text = text[: len(text) // 2]
    return text


def _exchange(group: dist.ProcessGroup, message: bytes, timeout: timedelta | None = None) -> list[bytes]:
    """Every rank's message, in rank order."""
    options = AllgatherOptions()
    options.timeout = limit = max(timeout or TIMEOUT, ring_timeout(group))
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    try:
        _channel(group, limit).allgather([gathered], [mine], options).wait()
    except RuntimeError as cause:
        raise RuntimeError(
            f"every rank of the group must make the call, got no answer from some of {group.size()} ranks ({cause}); "
            "look for a rank that stopped, or that made another call."
        ) from cause
    return [x.numpy().tobytes() for x in gathered]


def _compare(messages: list[bytes], error: Exception | None) -> None:
    if len(set(messages)) == 1 and error is None:
        return
    contents = [json.loads(m) for m in messages]
    failed = [rank for rank, content in enumerate(contents) if "error" in content]
    if failed:
        first = contents[failed[0]]
        if error is not None and _that_fits(str(error)) == first["text"]:
            raise error
        raise _ERRORS[first["error"]](f"{first['text']} (raised on ranks {failed})")
    calls = [content["signature"] for content in contents]
    names = dict.fromkeys(name for call in calls for name in call)
    fields = [name for name in names if len({json.dumps(call.get(name)) for call in calls}) > 1]
    if "call" in fields:  # other layers, or one forward and one backward: their arguments say nothing
        fields = [name for name in fields if name in ("call", "errors in calls")]
    table = "; ".join(f"{name} {_by_value([call.get(name) for call in calls])}" for name in fields)
    remedy = "give every rank the same arguments"
    if "errors in calls" in fields:
        remedy = "start the processes again: messages are left over from a call that did not end alike"
    elif "call" in fields:
        remedy = "run the same layers, forward and backward, in one order on every rank"
    elif "ringflash" in fields:
        remedy = "install one version of ringflash on all hosts"
    raise ValueError(f"all ranks of the group must make the same call, got {table}; {remedy}.")


def _by_value(values: list[object]) -> str:
    """Which ranks hold which value: "True (rank 0, 2), False (rank 1)"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} (rank {', '.join(map(str, holders))})" for value, holders in ranks.items())


@functools.cache
def _version() -> str:
    from ringflash import __version__

    return __version__


def _channel(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """The group's ranks on CPU tensors: comparing must not wait for the device."""
    return group if backend_of(group, _CPU) == "gloo" else communicator(group, "agreement", "gloo", timeout)
