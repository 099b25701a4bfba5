"""What tells the hosts of a job apart."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Host(NamedTuple):
    """A host, or a container on one.

    Hosts made from one image may all have one name, and containers of a host have one boot: it takes both.
    """

    name: str
    boot: str

    def __str__(self) -> str:
        return f"{self.name} ({self.boot})" if self.boot else self.name


def this_host() -> Host:
    """The host of this process; `boot` is the start of its boot's id, empty where the system tells none."""
    try:
        boot = _BOOT_ID.read_text()[:8]
    except OSError:
        boot = ""
    return Host(platform.node(), boot)
