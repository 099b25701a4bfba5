"""Gather of the facts of all ranks on the first rank, with a deadline: a rank that does not answer is reported."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringflash.comm.group import Host

_PREFIX = "ringflash/doctor"


def world() -> tuple[int, int]:
    """Return (rank, number of ranks) from torchrun's environment; (0, 1) without torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class RankMessages:
    """Messages between the first rank and the others over torchrun's store, because collectives could hang.

    Args:
        seconds: how long the first rank waits for all others; these wait twice as long for it.
    """

    def __init__(self, seconds: float) -> None:
        self._rank, self._size = world()
        self._seconds = seconds
        self._store = dist.PrefixStore(_PREFIX, _store(seconds)) if self._size > 1 else None

    def gather(self, facts: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """Return (facts by rank, ranks that did not answer); ranks other than the first get only their own facts."""
        if self._store is None:
            return {0: facts}, []
        self._store.set(str(self._rank), json.dumps(facts))
        if self._rank != 0:
            return {self._rank: facts}, []
        deadline = time.monotonic() + self._seconds
        answered = [other for other in range(self._size) if _wait(self._store, str(other), deadline)]
        ranks = {other: json.loads(self._store.get(str(other))) for other in answered}
        return ranks, [other for other in range(self._size) if other not in answered]

    def send_instructions(self, what: dict[str, Any]) -> None:
        """Send instructions from the first rank to all others."""
        if self._store is not None:
            self._store.set("told", json.dumps(what))

    def instructions(self) -> dict[str, Any]:
        """Return the instructions of the first rank; empty if they do not arrive in time."""
        assert self._store is not None
        if not _wait(self._store, "told", time.monotonic() + 2 * self._seconds):
            return {}
        return json.loads(self._store.get("told"))

    def send_report(self, what: Any) -> None:
        """Send a report from another rank to the first one."""
        assert self._store is not None
        self._store.set(f"report{self._rank}", json.dumps(what))

    def report_of(self, rank: int, seconds: float) -> Any:
        """Return the report of another rank; None if it does not arrive within `seconds`."""
        assert self._store is not None
        if not _wait(self._store, f"report{rank}", time.monotonic() + seconds):
            return None
        return json.loads(self._store.get(f"report{rank}"))


def tell_apart(ranks: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the facts by rank with distinct host names: hosts of the same name are told apart by their boot id."""
    hosts = {rank: Host(facts["host"], facts["boot"]) for rank, facts in ranks.items()}
    names = [name for name, _ in set(hosts.values())]
    return {
        rank: facts if names.count(facts["host"]) == 1 else {**facts, "host": str(hosts[rank])}
        for rank, facts in ranks.items()
    }


def _store(seconds: float) -> dist.Store:
    """Return the store of torchrun's agent; without an agent, one on the first rank."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=not agent and world()[0] == 0,
        timeout=timedelta(seconds=seconds), wait_for_workers=False,
    )  # fmt: skip


def _wait(store: dist.Store, key: str, deadline: float) -> bool:
    """Wait for a key; False if the deadline passes first."""
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except (dist.DistStoreError, RuntimeError):
        return False
    return True
