"""The facts of every rank on the first one, within a deadline: a rank that does not answer is named, not waited for."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PREFIX = "ringflash/doctor"


def world() -> tuple[int, int]:
    """(rank, number of ranks) as torchrun has set them; one process without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def gather(facts: dict[str, Any], seconds: float) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """Facts by rank, and the ranks that did not answer; on other ranks than the first their own facts alone.

    No collective: ranks write to torchrun's store, and the first reads what is there.

    Args:
        seconds: how long the first rank waits for all, and the others for the first.
    """
    rank, size = world()
    if size == 1:
        return {0: facts}, []
    store = dist.PrefixStore(_PREFIX, _store(seconds))
    store.set(str(rank), json.dumps(facts))
    if rank != 0:
        _wait(store, "read", time.monotonic() + seconds)
        return {rank: facts}, []
    deadline = time.monotonic() + seconds
    answered = [other for other in range(size) if _wait(store, str(other), deadline)]
    ranks = {other: json.loads(store.get(str(other))) for other in answered}
    store.set("read", "yes")
    return ranks, [other for other in range(size) if other not in answered]


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
