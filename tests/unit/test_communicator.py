"""Communicators at the end of the interpreter."""

import subprocess
import sys
from collections import defaultdict

import pytest

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


ENDINGS = """
import atexit, os, sys, tempfile, threading
from datetime import timedelta
from unittest import mock
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from ringflash.comm import communicator
from ringflash.comm.watchdog import Watchdog
from ringflash.comm.watchdog.calls import CallInFlight

class Transport:
    Options = mock.Mock()
    _set_sequence_number_for_group = _group_start = _group_end = lambda self: None
    def __init__(self, *place): pass
    def shutdown(self): threading.Event().wait()  # a collective call
    def abort(self): say("aborts")

def say(*text): print(end, *text, sep=": ", flush=True)

def join(rank=0, size=1, store=None):
    dist.init_process_group("fake", store=store or dist.HashStore(), rank=rank, world_size=size)  # no threads to fork
    with (
        mock.patch.object(dist, "ProcessGroupNCCL", Transport, create=True),
        mock.patch.object(dist, "ProcessGroup"),
        mock.patch("torch.cuda.current_device", return_value=0),
    ):
        communicator.communicator(dist.group.WORLD, "ring", "nccl", timedelta(seconds=1))
    torch.cuda.synchronize = lambda device: say("waits for its device")
    if end != "child":
        communicator._process = os.getpid()
    communicator._GRACE_S = 0.1 if end == "exits alone" else 30.0

def call(error):
    try:
        with CallInFlight(0, 0, "forward", 0.0):
            if error: raise error
    except MemoryError:
        pass

def returns(): join()
def child(): join()
def raises():
    join()
    raise ValueError("mine")

def raised_in_a_ring():
    join()
    call(MemoryError())

def went_on_after_it():
    join()
    call(MemoryError())
    call(None)

def exits_alone():
    join(rank=1, size=2)
    try:
        raise ValueError("a bad batch on this rank")
    except ValueError:
        sys.exit(3)

def ends_first():
    path = tempfile.mktemp()
    rank = int(os.fork() == 0)
    join(rank, 2, dist.FileStore(path, 2))
    if rank:
        dist.FileStore(path, 2).wait(["waits"])
        say("works on")
        return
    wait = communicator._Peers.wait
    def patiently(*how):
        dist.FileStore(path, 2).set("waits", "")
        wait(*how)
    communicator._Peers.wait = patiently

def slow_device():
    global watch
    join()
    watch, told = Watchdog(), threading.Event()
    watch.start()
    communicator._NOTICE_AFTER_S = 0.1
    communicator.print_notice = lambda text: (say(text), told.set())
    torch.cuda.synchronize = lambda _: (told.wait(), say("waits, watched", watch._thread.is_alive()))

def destroys():
    store = dist.HashStore()
    join(size=2, store=store)
    peers = communicator._peers[0]
    dist.destroy_process_group()
    communicator._free_destroyed()
    say("kept", len(communicator._peers), len(communicator._communicators))
    peers._store.set("all idle", "yes")  # by the other rank
    communicator._free_destroyed()
    say("kept", len(communicator._peers), len(communicator._communicators))
    join(size=2, store=store)  # another group of that name, whose other rank goes on
    communicator._peers[0].announce("idle")
    say("all idle", communicator._peers[0].all_announced("idle"))
    os._exit(0)

ways = returns, child, raises, raised_in_a_ring, went_on_after_it, exits_alone, ends_first, slow_device, destroys
for way in ways:
    end = way.__name__.replace("_", " ")
    if os.fork():
        os.wait()
        continue
    way()
    atexit._run_exitfuncs()  # as at the end of the interpreter, which takes longer
    os._exit(0)
os._exit(0)
"""
DEVICE = "waits for its device"


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """Lines of a rank by the way it ends, each in a new process, forked to save the imports."""
    ended = subprocess.run([sys.executable, "-c", ENDINGS], capture_output=True, text=True, timeout=120)
    said = defaultdict[str, list[str]](list)
    for line in ended.stdout.splitlines():
        way, _, text = line.partition(": ")
        said[way].append(text)
    said["errors"] = ended.stderr.splitlines()
    return said


def test_nccl_waits_for_no_peer_after_an_error(said: dict[str, list[str]]) -> None:
    assert said["raises"] == said["raised in a ring"] == ["aborts"], said["errors"]
    assert said["returns"] == said["went on after it"] == [DEVICE, "aborts"], said["errors"]
    assert "child" not in said  # of a rank: ends nothing


def test_a_single_rank_that_exits_does_not_hang(said: dict[str, list[str]]) -> None:
    """Destroying a communicator is a collective call: the peers, which wait for this rank's next call, do not join."""
    assert said["exits alone"] == [DEVICE, "aborts"], said["errors"]


def test_a_rank_that_ends_first_waits_for_the_others(said: dict[str, list[str]]) -> None:
    """They may still read its memory and its messages."""
    lines = [line for line in said["ends first"] if line != DEVICE]
    assert lines == ["works on", "aborts", "aborts"], said["errors"]


def test_the_end_waits_for_the_device_with_a_word(said: dict[str, list[str]]) -> None:
    """Its calls are the peers', too. The watchdog ends a wait for a peer that is dead."""
    assert said["slow device"] == [
        "the program has ended, but its GPU has not finished its ring calls; waiting for them",
        "waits, watched: True",
        "waits, watched: False",  # nothing is left by then
        "aborts",
    ], said["errors"]


def test_communicators_of_destroyed_groups_are_freed(said: dict[str, list[str]]) -> None:
    """NCCL is freed once the other rank has found the group destroyed, too."""
    lines = [line for line in said["destroys"] if line != DEVICE]
    assert lines == ["kept: 1: 0", "aborts", "kept: 0: 0", "all idle: False"], said["errors"]
