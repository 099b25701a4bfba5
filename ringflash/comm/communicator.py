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
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ringflash.comm.group import store_of

_BACKENDS = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}
_communicators: dict[tuple[str, str], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
_peers: list[_Peers] = []
_registered: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_names = itertools.count()
_process = os.getpid()  # a forked child lacks the threads of these communicators, and their peers belong to its parent
_interrupted = False
_GRACE_S = 10.0  # limit of the wait for the other ranks to end, too: longer than healthy ranks drift apart
_PAUSE_S = 0.1  # time between two questions to their store
_NOTICE_AFTER_S = 2.0  # at exit, a notice is printed if the GPU needs longer than this


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
    entry = _communicators.get(key)
    if entry is None or entry[0] is not group:
        _free_destroyed()
        entry = _communicators[key] = (group, _make(group, purpose, backend, timeout))
    return entry[1]


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


class _Peers:
    """Ranks of a group that use memory and communicators of this process until all of them are idle."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.rank, self.size = group, device, group.rank(), group.size()
        self.nccl: list[dist.ProcessGroupNCCL] = []
        number = next(_registered[group.group_name])  # a later group may have the same name
        self._store = dist.PrefixStore(f"ringflash/end {number}", _get_process_group_store(group))
        self._announced: set[str] = set()

    def announce(self, what: str) -> None:
        """Tell the other ranks that this one is "idle" or has "left"."""
        if what not in self._announced and self._store.add(what, 1) >= self.size:
            self._store.set(f"all {what}", "yes")
        self._announced.add(what)

    def all_announced(self, what: str) -> bool:
        """Return True if all ranks have announced it."""
        return self._store.check([f"all {what}"])

    def wait(self, what: str, deadline: float) -> None:
        """Wait until all ranks have announced it, or until the deadline."""
        while not self.all_announced(what) and time.monotonic() < deadline:  # torch warns if a wait of its own fails
            time.sleep(_PAUSE_S)


def register_peers(group: dist.ProcessGroup, device: torch.device) -> _Peers:
    """Register the ranks of a group, which use memory of this process: at its end it waits for them."""
    peers_of_group = next((peers for peers in _peers if peers.group is group), None)
    if peers_of_group is None:
        peers_of_group = _Peers(group, device)
        _peers.append(peers_of_group)
    return peers_of_group


def synchronize_at_exit() -> None:
    """Wait until the device has finished its ring calls, which peers may still be in; do not wait after an error.

    Call this at the end of the process while the watchdog runs, which ends the wait if a peer is dead.
    """
    if os.getpid() != _process or not _peers or _ended_by_error():
        return
    thread = Thread(target=_synchronize, name="ringflash-end", daemon=True)
    thread.start()
    thread.join(_NOTICE_AFTER_S)
    if thread.is_alive():
        print_notice("the program has ended, but its GPU has not finished its ring calls; waiting for them")
        thread.join()


def _synchronize() -> None:
    """Wait for all devices that peers use. Print errors of the devices, because the program has ended."""
    try:
        for device in {peers.device for peers in _peers}:
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        record_call_end(error)
        print_notice(f"the program has ended, but ring calls that it did not wait for have failed: {error}")


def print_notice(text: str) -> None:
    """Print a message of this process, bypassing loggers and replaced streams."""
    print(f"ringflash: {text}", file=sys.__stderr__, flush=True)


def _ended_by_error() -> bool:
    return _interrupted or getattr(sys, "last_value", None) is not None


def record_call_end(error: BaseException | None) -> None:
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
def _abort_nccl_at_exit() -> None:
    """End the communicators of NCCL while the interpreter still runs; keep memory that peers use until they end.

    Destroying a communicator is a collective call, for which one rank that ends by itself (`sys.exit`) would wait for
    ever. Aborting one needs no peer, and loses nothing if all ranks are idle. So a rank waits some seconds until all
    are, and then aborts; after an error it does so at once.
    """
    if os.getpid() != _process or not _peers:
        return
    synchronize_at_exit()
    if not _ended_by_error():
        thread = Thread(target=_await_peers, name="ringflash-end", daemon=True)  # the store may not answer
        thread.start()
        thread.join(_GRACE_S + 1)
    _abort([transport for peers in _peers for transport in peers.nccl])


def _await_peers() -> None:
    """Wait until all ranks are idle. Rank 0 of a group may keep its store, so it also waits until the others left."""
    deadline = time.monotonic() + _GRACE_S
    firsts = [peers for peers in _peers if peers.rank == 0]
    for what, waiting in (("idle", _peers), ("left", firsts)):
        for peers in _peers:
            with suppress(RuntimeError):  # the store is gone
                peers.announce(what)
        for peers in waiting:
            with suppress(RuntimeError):  # the store is gone
                peers.wait(what, deadline)


def _free_destroyed() -> None:
    """Free the communicators of destroyed groups; those of NCCL once all ranks know that the group is destroyed."""
    for key, (group, _) in list(_communicators.items()):
        if store_of(group) is None:
            del _communicators[key]
    for peers in [peers for peers in _peers if store_of(peers.group) is None]:
        torch.cuda.synchronize(peers.device)
        with suppress(RuntimeError):
            peers.announce("idle")
            if peers.all_announced("idle"):
                _abort(peers.nccl)
                _peers.remove(peers)


def _abort(transports: list[dist.ProcessGroupNCCL]) -> None:
    """Abort communicators in one group, as torch does."""
    if transports:
        transports[0]._group_start()
        for transport in transports:
            transport.abort()
        transports[0]._group_end()


def _make(group: dist.ProcessGroup, purpose: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Create a communicator over the store of a group, under a prefix of its purpose."""
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
        register_peers(group, device).nccl.append(transport)
    made._set_default_backend(_BACKENDS[backend])
    made._register_backend(device, _BACKENDS[backend], transport)
    return made
