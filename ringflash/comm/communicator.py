"""Additional communicators over the ranks of a group, created by only those ranks on first use.

`dist.new_group` does not work here. Without `use_local_synchronization` every rank of the world must join. With it,
the group's name contains the number of groups that a rank already knows, so ranks that know different numbers of groups
wait for each other forever (seen with torch 2.11 and 2.13).
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

_BACKENDS = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}
_communicators: dict[tuple[str, str], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
_nccl: list[dist.ProcessGroupNCCL] = []
_names = itertools.count()
_process = os.getpid()  # a forked child lacks the threads of these communicators, and their peers belong to its parent
_interrupted = False


def communicator(group: dist.ProcessGroup, purpose: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Return a separate communicator over the ranks of `group`. The first call is collective over the group.

    Args:
        purpose: name of the communicator; the same purpose and group return the same communicator.
        backend: "gloo", for CPU tensors, or "nccl", for CUDA tensors, on a high-priority stream.
        timeout: how long an operation may wait for its peers.
    Returns:
        communicator: addressed by ranks within the group; unknown to the functions of `torch.distributed`.
    """
    key = (group.group_name, purpose)
    known = _communicators.get(key)
    if known is None or known[0] is not group:
        known = _communicators[key] = (group, _make(group, purpose, backend, timeout))
    return known[1]


def register_members(group: dist.ProcessGroup, members: tuple[int, ...]) -> tuple[str, dist.ProcessGroup]:
    """Register a group of some ranks, by which C++ code finds their store; return its name and the group.

    Args:
        members: ranks of `group`, this one among them. No other set of members begins with the same rank.
    """
    store = dist.PrefixStore(f"ringflash/members from {members[0]}", _get_process_group_store(group))
    made = dist.ProcessGroup(store, members.index(group.rank()), len(members))
    name = f"{group.group_name} members {next(_names)}"  # of this process only
    torch._C._distributed_c10d._register_process_group(name, made)  # type: ignore[arg-type]
    return name, made


def note_end(error: BaseException | None) -> None:
    """Record how this process's last ring call ended. After an error, exit does not wait for the peers."""
    global _interrupted
    _interrupted = error is not None


@atexit.register
def _end_gloo() -> None:
    """End the threads of gloo, torch's own included, while the interpreter still runs.

    A thread of gloo holds the tensors of an operation for a moment after a rank has its result. If it frees them while
    the interpreter shuts down, the whole process aborts ("terminate called without an active exception", in 1 of 9
    processes that end right after a collective), and torchrun reports a successful run as failed. Threads of a group
    that a user's variable keeps alive do not end, so they are waited for until they sleep.
    """
    if os.getpid() != _process:
        return
    _communicators.clear()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
    gc.collect()  # free groups in reference cycles, such as a trainer and its module
    deadline, states = time.monotonic() + 1.0, _gloo_states()
    while states and time.monotonic() < deadline:
        time.sleep(0.01)  # lets a thread that waits for the interpreter go on
        if set(states := _gloo_states()) <= {"S"}:
            break


def _gloo_states() -> list[str]:
    """Return the state of each thread of gloo, "S" if it sleeps; none where the system does not list them in /proc."""
    states = []
    for stat in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
            if "gloo" in name:
                states.append(fields.split()[0])
    return states


@atexit.register  # after `_end_gloo`, and so called before it
def _end_nccl() -> None:
    """End the NCCL communicators while the interpreter still runs.

    Destroying them is a collective call. If only one rank fails, it would wait for peers that wait for its next ring
    call, and the job would hang after the traceback. So after an error all communicators are aborted in one group, as
    torch does.
    """
    if os.getpid() != _process or not _nccl:
        return
    if not _interrupted and getattr(sys, "last_value", None) is None:
        for transport in _nccl:
            transport.shutdown()
        return
    _nccl[0]._group_start()
    for transport in _nccl:
        transport.abort()
    _nccl[0]._group_end()


def _make(group: dist.ProcessGroup, purpose: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    store = dist.PrefixStore(f"ringflash/{purpose}", _get_process_group_store(group))
    rank_and_size = (group.rank(), group.size())
    made = dist.ProcessGroup(store, *rank_and_size)
    transport: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    if backend == "gloo":
        device = torch.device("cpu")
        transport = dist.ProcessGroupGloo(store, *rank_and_size, timeout)
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        transport = dist.ProcessGroupNCCL(store, *rank_and_size, options)
        transport._set_sequence_number_for_group()
        _nccl.append(transport)
    made._set_default_backend(_BACKENDS[backend])
    made._register_backend(device, _BACKENDS[backend], transport)
    return made
