"""The facts of every rank on the first one, within a deadline: a rank that does not answer is named, not waited for."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringflash.comm.host import Host

_PREFIX = "ringflash/doctor"


def world() -> tuple[int, int]:
    """(rank, number of ranks) as torchrun has set them; one process without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Meeting:
    """Where ranks tell the first one what they found, and it tells them what to do. No collective: torchrun's store.

    Args:
        seconds: how long the first rank waits for all, and the others twice as long for it.
    """

    def __init__(self, seconds: float) -> None:
        self._rank, self._size = world()
        self._seconds = seconds
        self._store = dist.PrefixStore(_PREFIX, _store(seconds)) if self._size > 1 else None

    def gather(self, facts: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Facts by rank, and the ranks that did not answer; on other ranks than the first their own facts alone."""
        if self._store is None:
            return {0: facts}, []
        self._store.set(str(self._rank), json.dumps(facts))
        if self._rank != 0:
            return {self._rank: facts}, []
        deadline = time.monotonic() + self._seconds
        answered = [other for other in range(self._size) if _wait(self._store, str(other), deadline)]
        ranks = {other: json.loads(self._store.get(str(other))) for other in answered}
        return ranks, [other for other in range(self._size) if other not in answered]

    def tell(self, what: dict[str, Any]) -> None:
        """From the first rank to all."""
        if self._store is not None:
            self._store.set("told", json.dumps(what))

    def hear(self) -> dict[str, Any]:
        """What the first rank told; nothing where it does not in time."""
        assert self._store is not None
        if not _wait(self._store, "told", time.monotonic() + 2 * self._seconds):
            return {}
        return json.loads(self._store.get("told"))

    def report(self, what: Any) -> None:
        """From another rank to the first."""
        assert self._store is not None
        self._store.set(f"report{self._rank}", json.dumps(what))

    def reported(self, rank: int, seconds: float) -> Any:
        """What another rank reports; None where it does not in so many seconds from now."""
        assert self._store is not None
        if not _wait(self._store, f"report{rank}", time.monotonic() + seconds):
            return None
        return json.loads(self._store.get(f"report{rank}"))


def tell_apart(ranks: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Facts by rank, in which hosts of one name have names of their own, with their boots."""
    hosts = {rank: Host(facts["host"], facts["boot"]) for rank, facts in ranks.items()}
    names = [name for name, _ in set(hosts.values())]
    return {
        rank: facts if names.count(facts["host"]) == 1 else {**facts, "host": str(hosts[rank])}
        for rank, facts in ranks.items()
    }


def _store(seconds: float) -> dist.Store:
    """The store of torchrun's own agent, or one on the first rank where there is none."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=not agent and world()[0] == 0,
        timeout=timedelta(seconds=seconds), wait_for_workers=False,
    )  # fmt: skip


def _wait(store: dist.Store, key: str, deadline: float) -> bool:
    """Whether the key is there before the deadline."""
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except (dist.DistStoreError, RuntimeError):
        return False
    return True
