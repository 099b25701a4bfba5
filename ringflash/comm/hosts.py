"""Discovery of the hosts of a group: a collective call, made once per group."""

from __future__ import annotations

from itertools import groupby
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ringflash.comm.agreement import gather
from ringflash.comm.group import HostSplit, known_split, remember_split, this_host

_refusals: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def find_split(group: dist.ProcessGroup) -> HostSplit:
    """Return how a group is split into hosts. Collective until it has succeeded.

    Raises:
        NotImplementedError: as `split_hosts`, on every rank.
    """
    split = known_split(group)
    if split is None:
        try:
            split = split_hosts(gather(group, str(this_host())))
        except NotImplementedError as refusal:
            _refusals[group] = str(refusal)
            raise
        remember_split(group, split)
    return split


def refusal_of(group: dist.ProcessGroup) -> str:
    """Return the message with which `find_split` refused a group; empty if it has not."""
    return _refusals.get(group, "")


def split_hosts(hosts: list[str]) -> HostSplit:
    """Return the split of a group.

    Args:
        hosts: name of the host of each rank.
    Raises:
        NotImplementedError: hosts with different numbers of ranks, or not numbered host by host.
    """
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(runs) > len(set(hosts)) or len(set(runs)) > 1:
        raise NotImplementedError(
            "all hosts of the group must have the same number of ranks, numbered host by host, to exchange heads "
            f"inside hosts, got {runs} consecutive ranks on {len(set(hosts))} hosts; start the same number of "
            "processes on each host, or use transport='nccl'."
        )
    return HostSplit(len(runs), runs[0])
