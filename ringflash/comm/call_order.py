"""Comparison of the order in which ranks do what needs all of them, such as gathering the parameters of a layer."""

from __future__ import annotations

import zlib

import torch.distributed as dist

from ringflash.comm.agreement import agree


class CallOrder:
    """Names of calls, in the order in which this rank makes them; `kind` says in errors what they are names of."""

    def __init__(self, group: dist.ProcessGroup, kind: str, remedy: str) -> None:
        self.group, self._kind, self._remedy = group, kind, remedy
        self._previous = ""
        self._followers: dict[str, set[str]] = {}
        self._checksum = 0  # of all names since `end`

    def enter(self, name: str, device_type: str) -> None:
        """Compare a call that this rank is about to make: on CPUs always, on GPUs unless its predecessor announced it.

        A predecessor announces a call that has followed it each time so far, and more than no time. Hosts then need not
        wait for each other in every layer; `end` finds what remains.

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
