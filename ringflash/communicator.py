"""Further communicators over the ranks of a group, made by those ranks alone when they are first needed.

`dist.new_group` is no help: without `use_local_synchronization` every rank of the world must join, and with it the
group's name contains how many groups a rank already knows, so that ranks which know different numbers of groups
wait for one another for ever (seen with torch 2.11 and 2.13).
"""

from __future__ import annotations

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

_BACKENDS = {"gloo": dist.ProcessGroup.BackendType.GLOO, "nccl": dist.ProcessGroup.BackendType.NCCL}
_made: dict[tuple[str, str], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


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


@atexit.register
def _forget() -> None:
    """Let the communicators end with the interpreter still there: gloo's threads may hold tensors of its own."""
    _made.clear()


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
        atexit.register(transport.shutdown)
    made._set_default_backend(_BACKENDS[backend])
    made._register_backend(device, _BACKENDS[backend], transport)
    return made
