"""Communicators at the end of the interpreter."""

from __future__ import annotations

import subprocess
import sys

ENDS = """
import atexit, os, sys
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
for backend, own_end in (("gloo", False), ("gloo", True), ("fake", False)):
    if os.fork():
        os.wait()
        continue
    atexit.register(lambda: print("left:", dist.is_initialized(), flush=True))  # before ringflash's: runs after it
    import ringflash
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if own_end:
        dist.destroy_process_group()
    sys.exit()
"""


def test_gloo_ends_before_the_interpreter() -> None:
    """The user may have ended it before; another backend is left to its own ways."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "left: False\nleft: False\nleft: True\n"), ended.stderr[-2000:]


MAKE = """
import os, sys
from datetime import timedelta
from unittest import mock
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from ringflash.comm import communicator
from ringflash.comm.watchdog.calls import CallInFlight

class Transport:
    Options = mock.Mock()
    _set_sequence_number_for_group = _group_start = _group_end = lambda self: None
    def __init__(self, *place): pass
    def shutdown(self): print(end, "destroyed", flush=True)
    def abort(self): print(end, "aborted", flush=True)

def call(error):
    try:
        with CallInFlight(0, 0, "forward", 0.0):
            if error: raise error
    except MemoryError:
        pass

dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)  # has no threads to fork
with (
    mock.patch.object(dist, "ProcessGroupNCCL", Transport, create=True),
    mock.patch.object(dist, "ProcessGroup"),
    mock.patch("torch.cuda.current_device", return_value=0),
):
    communicator.communicator(dist.group.WORLD, "ring", "nccl", timedelta(seconds=1))
for end in ("returns", "raises", "raised in a ring", "went on after it", "child"):
    if os.fork():
        os.wait()
        continue
    if end != "child":
        communicator._process = os.getpid()
    if end == "raises":
        raise ValueError("mine")
    if end in ("raised in a ring", "went on after it"):
        call(MemoryError())
    if end == "went on after it":
        call(None)
    sys.exit(end == "raised in a ring")
os._exit(0)
"""


def test_nccl_waits_for_no_peer_after_an_error() -> None:
    """Destroying a communicator is a collective call, which only the rank that failed would make.

    Each way to end in a process of its own, forked to save the imports; a child that a rank has forked ends nothing.
    """
    ended = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == [
        "returns destroyed",
        "raises aborted",
        "raised in a ring aborted",
        "went on after it destroyed",
    ], ended.stderr[-2000:]
