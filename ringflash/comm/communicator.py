"""Further communicators over the ranks of a group, made by those ranks alone when they are first needed.

`dist.new_group` is no help: without `use_local_synchronization` every rank of the world must join, and with it the
group's name contains how many groups a rank already knows, so that ranks which know different numbers of groups
wait for one another for ever (seen with torch 2.11 and 2.13).
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

_BACKENDS = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}
_made: dict[tuple[str, str], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
_nccl: list[dist.ProcessGroupNCCL] = []
_process = os.getpid()  # a child by os.fork has no threads of these communicators, and its peers are its parent's
_interrupted = False


def communicator(group: dist.ProcessGroup, purpose: str, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A communicator of its own over the ranks of `group`; all of them call this together, the first time.

    Args:
        purpose: name of the communicator; the same purpose and group give the same one again.
        backend: "gloo", for CPU tensors, or "nccl", for CUDA tensors, on a high-priority stream.
        timeout: how long an operation may wait for its peers.
    Returns:
        communicator: addressed by ranks within the group; not known to `torch.distributed`'s functions.
    """
    key = (group.group_name, purpose)
    known = _made.get(key)
    if known is None or known[0] is not group:
        known = _made[key] = (group, _make(group, purpose, backend, timeout))
    return known[1]


def note_end(error: BaseException | None) -> None:
    """Note how this process's last ring ended; if it was by an error, no peer is waited for at exit."""
    global _interrupted
    _interrupted = error is not None


@atexit.register
def _end_gloo() -> None:
    """End gloo's threads, these communicators' and torch's own, with the interpreter still there.

    Such a thread still holds the tensors of an operation for a moment after a rank has its result. If it gives them
    back to an interpreter that is ending, the whole process aborts ("terminate called without an active exception",
    in 1 of 12 processes that end right after a collective) and torchrun reports a run that has succeeded as failed.
    """
    if os.getpid() != _process:
        return
    _made.clear()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
    gc.collect()  # what still refers to a group in a cycle of references, as a trainer and its module do


@atexit.register  # after `_end_gloo`, and so called before it
def _end_nccl() -> None:
    """End NCCL's communicators with the interpreter still there.

    To destroy them is a collective call: a rank that fails by itself would wait for peers that wait for its next ring,
    and the job would stand still behind a traceback. So after an error they are aborted, together, as torch does it.
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
    place = (group.rank(), group.size())
    made = dist.ProcessGroup(store, *place)
    transport: dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    if backend == "gloo":
        device = torch.device("cpu")
        transport = dist.ProcessGroupGloo(store, *place, timeout)
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        transport = dist.ProcessGroupNCCL(store, *place, options)
        transport._set_sequence_number_for_group()
        _nccl.append(transport)
    made._set_default_backend(_BACKENDS[backend])
    made._register_backend(device, _BACKENDS[backend], transport)
    return made
