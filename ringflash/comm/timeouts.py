"""Limits of the time that a rank waits for another one."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=10)  # torch's default for NCCL
_GRACE = timedelta(seconds=15)

_set: timedelta | None = None


def set_timeout(seconds: float) -> None:
    """Set how long a rank waits for another one before it fails.

    The default is the process group's own timeout (`init_process_group(timeout=...)`, the strategy's `timeout=`), but
    at least 600 seconds; the value set here replaces both. Ranks that compare their calls wait at least 120 seconds.

    After the timeout every rank of the group ends with an error that names the ranks and what each is waiting for. Over
    gloo, the call raises it. Over NCCL and the copy engine, where a host may be stuck in a synchronisation, it is
    printed, and the process ends up to 30 seconds later.

    Takes effect immediately over gloo. Over NCCL and the copy engine, it applies to groups that have not made a ring
    call yet.

    Args:
        seconds: limit for all groups of this process; give every rank the same one.
    Raises:
        ValueError: a limit that is not positive and finite.
    """
    global _set
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds must be positive and finite, got {seconds}; the default is 600.")
    _set = timedelta(seconds=seconds)


def timeout(group: dist.ProcessGroup | None = None) -> timedelta:
    """Return how long a rank of `group` waits for the others (see `set_timeout`)."""
    return _set or max([DEFAULT_TIMEOUT, *_own_timeouts(group)])


def describe_timeout(limit: timedelta | None, begun: float) -> str:
    """Return " within 600 s" for an error if that time has passed since `begun`, and "" for a peer lost earlier.

    Args:
        begun: by time.monotonic().
    """
    seconds = float("inf") if limit is None else limit.total_seconds()
    return f" within {seconds:.0f} s" if time.monotonic() - begun >= seconds else ""


def device_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the limit after which a wait on the device itself fails.

    It leaves the watchdog time to report first, since errors of CUDA and NCCL name no rank.
    """
    return timeout(group) + _GRACE


def _own_timeouts(group: dist.ProcessGroup | None) -> list[timedelta]:
    """Return the timeouts of the group's backends; a backend for tests may have none."""
    if group is None:
        return []
    options = [group._get_backend(device).options for device in group._device_types]
    return [each._timeout for each in options if each is not None]
