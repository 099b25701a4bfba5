"""Comparison of the order in which ranks make calls that need all ranks, such as gathering a layer's parameters."""

from __future__ import annotations

import zlib

import torch.distributed as dist

from ringflash.comm.agreement import agree


class CallOrder:
    """Names of calls, in the order in which this rank makes them.

    Args:
        kind: what the names stand for, such as "layer"; used in errors.
        remedy: end of the errors' messages.
    """

    def __init__(self, group: dist.ProcessGroup, kind: str, remedy: str) -> None:
        self.group, self._kind, self._remedy = group, kind, remedy
        self._previous = ""
        self._followers: dict[str, set[str]] = {}
        self._checksum = 0  # checksum of all names since `end`

    def enter(self, name: str, device_type: str) -> None:
        """Compare a call that this rank is about to make: on CPUs always, on GPUs only if it is not the expected one.

        The expected call is the one that has followed the previous call every time so far. Without a comparison hosts
        need not wait for each other in every layer. `end` finds the differences that remain.

        Raises:
            ValueError: the ranks are about to make different calls; on every rank.
        """
        followers = self._followers.setdefault(self._previous, set())
        if device_type == "cpu" or followers != {name}:
            agree(self.group, {self._kind: name}, remedy=self._remedy)
        followers.add(name)
        self._previous, self._checksum = name, zlib.crc32(name.encode(), self._checksum)

    def end(self) -> None:
        """Compare the order of all calls since the last `end`.

        Raises:
            ValueError: the orders differ; on every rank.
        """
        checksum, self._checksum = self._checksum, 0
        agree(self.group, {self._kind: "none left", "order": checksum}, remedy=self._remedy)
