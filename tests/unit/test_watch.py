"""Stalls by the watch, its report of each rank, and what it does not judge. One process, no real time.

The ranks of a group are watches side by side with one clock and one store; tokens end when the test says so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from ringflash.comm.transport import PointToPoint
from ringflash.comm.watchdog import RingStalled, Watchdog, thread, watching
from ringflash.comm.watchdog.calls import CallInFlight, Unwatched
from ringflash.comm.watchdog.cuda_events import DeviceLost, Events
from ringflash.comm.watchdog.store import StoreGone, WatchdogStore

CPU = torch.device("cpu")
TIMEOUT_S = 600.0


class Token:
    """Ends when it is told to, or raises what a failed device answers."""

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done


class Group:
    """A process group; `store` is None once it was destroyed."""

    _device_types = ()

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.place, self.store = (rank, size), store

    def rank(self) -> int:
        return self.place[0]

    def size(self) -> int:
        return self.place[1]


class Memory:
    """A transport that is neither gloo nor NCCL."""

    def __init__(self, group: Group) -> None:
        self.group = group


class Messages(PointToPoint):
    """Over NCCL, as far as a watch sees it."""

    def __init__(self, group: Any) -> None:
        self.name, self.rank, self.group, self.broken = "nccl", group.rank(), group, False

    def is_broken(self) -> bool:
        return self.broken


class Rank:
    """A process of the world."""

    def __init__(self, world: World, rank: int, size: int, store: Any) -> None:
        self.said: list[str] = []
        self.ends: list[float] = []
        self.looking = False
        self.watch = Watchdog(lambda: world.now, world.pass_time, self.said.append, self.ends.append)
        self.memory = Memory(Group(rank, size, store))
        self.watch.add(self.memory, CPU)  # type: ignore[arg-type]

    def over_nccl(self) -> Messages:
        """Its messages in the same group."""
        messages = Messages(self.memory.group)
        self.watch.add(messages, CPU)
        return messages

    def begin(self, way: str = "forward", memory: Memory | Messages | None = None) -> CallInFlight:
        return self.watch.begin(memory or self.memory, way, CPU)  # type: ignore[arg-type]

    def issue(self, sections: int, way: str = "forward", memory: Memory | Messages | None = None) -> list[Token]:
        """A call as `GatherAttention` issues it: the tokens of its beginning and of its sections."""
        tokens = [Token() for _ in range(sections + 1)]
        with self.begin(way, memory) as call:
            call.reach(tokens[0], "for all ranks to begin")
            for section, token in enumerate(tokens[1:]):
                call.reach(token, "for section {}", section)
        return tokens

    def look(self) -> None:
        if not self.looking and not self.watch.stalled:
            self.looking = True
            self.watch.poll()
            self.looking = False


class World:
    """Ranks that look whenever time passes, but for those that died."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.store: Any = dist.HashStore()
        self.ranks = [Rank(self, rank, size, self.store) for rank in range(size)]
        self.living = list(self.ranks)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for rank in self.living:
            rank.look()

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.pass_time(1.0)

    def is_quiet(self) -> bool:
        return not any(rank.said or rank.ends for rank in self.ranks)


@pytest.fixture(autouse=True)
def groups_without_torch() -> Iterator[None]:
    with (
        mock.patch("ringflash.comm.watchdog.store.store_of", lambda group: group and group.store),
        mock.patch.object(dist, "get_process_group_ranks", lambda group: range(group.size())),
    ):
        yield


def finish(*calls: list[Token]) -> None:
    for tokens in calls:
        for token in tokens:
            token.done = True


def stalled_world() -> World:
    """Make four ranks: 0 waits in a section of its second call, 1 made one call, 2 waits to begin, 3 died."""
    world = World(4)
    for rank in world.ranks[:3]:
        finish(rank.issue(2))
    world.run(3)
    world.living.pop()
    first = world.ranks[0].issue(4, "backward")
    world.ranks[2].issue(4, "backward")
    world.run(10)
    finish(first[:3])
    world.run(TIMEOUT_S + 10)
    return world


def test_every_rank_names_who_waits_for_what() -> None:
    """Its process is ended once, and its next call raises the report."""
    world = stalled_world()
    for rank in world.living:
        assert rank.watch.stalled == rank.said[-1]
        text = rank.watch.stalled
        assert "ring attention over copy_engine made no progress for 600 s: rank 0 has been waiting" in text
        assert "s for section 2 in backward call 2; " in text
        assert "; rank 1 has not begun call 2 (its previous call, forward call 1, has ended); " in text
        assert " s for all ranks to begin in backward call 2; " in text
        assert "; rank 3 does not answer: it has died, or its host is stuck; " in text
        assert "ringflash.set_timeout raises the limit" in text
    assert world.ranks[3].said == []

    first = world.ranks[2].said  # who found it says so before it asks
    assert len(first) == 2
    assert "rank 2 has been waiting 600 s for all ranks to begin in backward call 2; it asks" in first[0]
    assert [rank.ends for rank in world.ranks] == [[thread.END_S]] * 3 + [[]]
    with pytest.raises(RingStalled, match="rank 3 does not answer"):
        world.ranks[1].begin()


def test_rank_outside_the_ring_has_two_numbers() -> None:
    with mock.patch.object(dist, "get_process_group_ranks", lambda group: [4, 5]):
        world = World(2)
    world.ranks[0].issue(1)
    world.run(TIMEOUT_S + 5)
    assert "rank 0 (4) has been waiting" in world.ranks[1].watch.stalled
    assert "rank 1 (5) has not begun call 1 (it has made no call)" in world.ranks[0].watch.stalled


def test_progress_is_no_stall() -> None:
    """Five calls, and then the sections of one, each take most of the timeout; then there is nothing to do."""
    world = World(2)
    queues = [[rank.issue(1) for _ in range(5)] for rank in world.ranks]
    for calls in zip(*queues, strict=True):
        world.run(TIMEOUT_S - 5)
        finish(*calls)
        world.run(2)
    for tokens in zip(*(rank.issue(5) for rank in world.ranks), strict=True):
        world.run(TIMEOUT_S - 5)
        finish(list(tokens))
    world.run(10 * TIMEOUT_S)
    assert world.is_quiet()


def test_a_host_that_compiles_is_no_stall() -> None:
    world = World(1)
    with world.ranks[0].begin() as call:
        start = Token()
        call.reach(start, "for all ranks to begin")
        start.done = True
        world.run(2 * TIMEOUT_S)
        last = Token()
        call.reach(last, "for section 0")
    world.run(TIMEOUT_S - 5)
    assert world.is_quiet()
    last.done = True
    world.run(TIMEOUT_S)
    assert world.is_quiet()


def test_busy_host_of_another_rank_is_named() -> None:
    world = World(2)
    world.ranks[0].issue(1)
    with world.ranks[1].begin():
        world.run(TIMEOUT_S + 5)
    assert "rank 1 is still issuing forward call 1, so its host is busy" in world.ranks[0].watch.stalled


def test_what_is_gone_is_not_judged() -> None:
    """A call that raised, a group that was destroyed, and a transport that was dropped."""
    raised, destroyed, dropped = (World(2) for _ in range(3))
    with pytest.raises(MemoryError), raised.ranks[0].begin() as call:
        call.reach(Token(), "for all ranks to begin")
        raise MemoryError
    for rank in (*destroyed.ranks, *dropped.ranks):
        rank.issue(1)
    for rank in destroyed.ranks:
        rank.memory.group.store = None
    for i, rank in enumerate(dropped.ranks):
        rank.memory = Memory(Group(i, 2, dropped.store))
    for world in (raised, destroyed, dropped):
        world.run(2 * TIMEOUT_S)
        assert world.is_quiet()


def test_time_without_a_look_does_not_count() -> None:
    """Processes that were stopped and go on later."""
    world = World(2)
    calls = [rank.issue(1) for rank in world.ranks]
    world.run(5)
    world.pass_time(2 * TIMEOUT_S)
    world.run(TIMEOUT_S - 5)
    finish(*calls)
    world.run(5)
    assert world.is_quiet()


def test_calls_of_two_groups_wait_for_one_another() -> None:
    """The second group's call is behind one of the first, which moves on; then it is stuck itself."""
    world = World(1)
    rank, other = world.ranks[0], Memory(Group(0, 1, dist.HashStore()))
    first = rank.issue(3)
    rank.issue(1, memory=other)
    for token in first:
        world.run(TIMEOUT_S - 5)
        token.done = True
    world.run(TIMEOUT_S - 5)
    assert world.is_quiet()
    world.run(10)
    assert "for all ranks to begin in forward call 1" in rank.watch.stalled


def test_later_calls_of_another_group_hide_no_stall() -> None:
    world = World(1)
    rank, other = world.ranks[0], Memory(Group(0, 1, dist.HashStore()))
    rank.issue(1)
    for _ in range(6):
        finish(rank.issue(1, memory=other))
        world.run(100)
    assert "rank 0 has been waiting 600 s" in rank.watch.stalled


@pytest.mark.parametrize("seconds", range(3))
def test_of_two_transports_the_waiting_one_answers(seconds: int) -> None:
    """Attention over the copy engine, and recurrent layers over NCCL; whichever asks the store first."""
    world = World(3)
    for rank in world.ranks:
        finish(rank.issue(1))
    world.run(3 + seconds)
    world.living.pop()
    messages = [rank.over_nccl() for rank in world.living]
    for rank, channel in zip(world.living, messages, strict=True):
        rank.issue(1, memory=channel)
        world.run(10)
    world.run(TIMEOUT_S)
    for rank in world.living:
        assert "rank 1 has been waiting" in rank.watch.stalled and "has not begun call" not in rank.watch.stalled


def lost_store() -> mock.Mock:
    return mock.Mock(**{"clone.side_effect": RuntimeError("connection reset\nframe #0")})


def test_a_lost_store_ends_no_rank() -> None:
    """It is asked no more, unless there is a stall to report."""
    world, gone = World(2), lost_store()
    for rank in world.ranks:
        finish(rank.issue(1))
        rank.memory.group.store = gone
    world.run(3 * TIMEOUT_S)
    assert world.is_quiet() and gone.clone.call_count == 2
    world = World(2)
    rank = world.ranks[0]
    rank.issue(1)
    rank.memory.group.store = lost_store()
    world.run(TIMEOUT_S + 5)
    assert "rank 0 has been waiting 600 s for all ranks to begin in forward call 1; no other rank" in rank.watch.stalled
    assert "could be asked (connection reset): the process that keeps the group's store" in rank.watch.stalled
    assert rank.ends == [thread.END_S]


class CountingStore:
    """A store that counts its requests."""

    def __init__(self, store: Any, counts: list[int]) -> None:
        self.store, self.counts = store, counts

    def clone(self) -> CountingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        self.counts[0] += 1
        return getattr(self.store, name)


def exchanged(size: int, collector: int | None) -> tuple[list[Any], int]:
    """Ranks that exchange one after the other, with one that was elected before; return answers and requests."""
    counts, store = [0], dist.HashStore()
    with mock.patch.object(dist, "PrefixStore", lambda _, store: store):
        shared = CountingStore(store, counts)
        stores = [WatchdogStore(Group(rank, size, shared), f"GPU {rank} of node") for rank in range(size)]  # type: ignore[arg-type]
        if collector is not None:
            store.set("collector", str(collector))
        counts[0], answers = 0, []
        for store in stores[:-1]:  # the last one is silent
            clock = mock.Mock(side_effect=[0.0, *[60.0] * size])
            answers.append(store.exchange("why", f"state {store.rank}", clock, lambda _: None))
    return answers, counts[0]


def test_one_rank_collects_for_all() -> None:
    """Requests grow with the number of ranks. The first to ask collects, and others read what it found."""
    answers, requests = exchanged(33, collector=None)
    assert all(found == answers[0] for found in answers) and requests < 9 * 33
    states, places = answers[0]
    assert states == {0: "state 0"} and places[32] == "GPU 32 of node" and len(places) == 33


def test_a_collector_that_stops_is_not_waited_for() -> None:
    answers, _ = exchanged(3, collector=2)
    assert answers[0][0] == {0: "state 0"} and answers[1] == answers[0]


def test_report_begins_with_ranks_at_fault() -> None:
    names = [f"rank {rank}" for rank in range(64)]
    answers = {rank: "has been waiting 9 s" for rank in range(64) if rank != 50} | {40: "has not begun call 2"}
    states = thread._states(names, answers, {50: "GPU 2 of node6"})
    assert states[0] == "rank 40 has not begun call 2"
    assert states[1] == "rank 50 on GPU 2 of node6 does not answer: it has died, or its host is stuck"
    assert len(states) == 33 and states[-1] == "and 32 more ranks; 62 of all 64 wait for others"


def test_a_store_that_never_answers_is_given_up() -> None:
    never = threading.Event()
    group = Group(0, 2, mock.Mock(**{"clone.side_effect": never.wait}))
    store = WatchdogStore(group, patience=0.01)  # type: ignore[arg-type]
    with mock.patch("ringflash.comm.watchdog.store.ANSWER_S", 0.0), pytest.raises(StoreGone, match="no answer"):
        store.exchange("why", "waits", lambda: 0.0, never.wait)
    assert store.asked(0.0) == ""
    never.set()


def test_a_store_that_answers_late_is_asked_again() -> None:
    """Over a new connection: the old one may belong to a request that never ends."""
    late, store = threading.Event(), dist.HashStore()
    dist.PrefixStore("ringflash/watch", store).set("asked", "why")
    group = Group(0, 2, mock.Mock(**{"clone.return_value": store}))
    store = WatchdogStore(group, patience=0.01)  # type: ignore[arg-type]
    store._store = mock.Mock(**{"check.side_effect": lambda _: late.wait()})
    assert store.asked(0.0) == ""
    store._patience = 60.0
    assert [store.asked(29.0), store.asked(30.0)] == ["", "why"]
    late.set()


def test_long_call_over_nccl_asks_the_store_seldom() -> None:
    world = World(2)
    channels = [rank.over_nccl() for rank in world.ranks]
    calls = [rank.issue(1, memory=channel) for rank, channel in zip(world.ranks, channels, strict=True)]
    with mock.patch.object(WatchdogStore, "_question", return_value="") as question:
        world.run(62)
    assert 2 * 10 <= question.call_count <= 2 * 25
    finish(*calls)
    world.run(5)
    assert world.is_quiet()


def test_failed_device_is_said_once() -> None:
    world = World(2)
    broken, waiting = world.ranks
    for rank in world.ranks:
        finish(rank.issue(1))
    world.run(2)
    broken.issue(1)[0].error = DeviceLost("CUDA error 719")
    world.run(5)
    assert len(broken.said) == 1 and not broken.ends
    waiting.issue(1)
    world.run(TIMEOUT_S + 5)
    told = "rank 0 lost its device (CUDA error 719) while it waited for all ranks to begin in forward call 2"
    assert told in waiting.watch.stalled
    assert broken.watch.stalled == waiting.watch.stalled


def test_a_device_may_fail_between_two_places() -> None:
    """The host has issued no more than what the device has done."""
    rank = World(1).ranks[0]
    with rank.begin() as call:
        start = Token()
        call.reach(start, "for all ranks to begin")
        start.done = True
        rank.look()
    start.error = DeviceLost("CUDA error 700")
    rank.look()
    assert rank.said == [
        "ring attention over copy_engine: rank 0 lost its device (CUDA error 700) while it waited in forward call 1"
    ]


def broken_world() -> tuple[World, list[Messages]]:
    """Make four ranks over NCCL: 3 died, which only the connections of 0 and 1 show; all wait in a call."""
    world = World(4)
    channels = [rank.over_nccl() for rank in world.ranks]
    world.living.pop()
    for rank, channel in zip(world.living, channels, strict=False):
        rank.issue(2, memory=channel)
    world.run(1)
    return world, channels


def test_what_nccl_lost_is_named_at_once() -> None:
    world, channels = broken_world()
    assert world.is_quiet()
    channels[0].broken = channels[1].broken = True
    world.run(8)
    lost = "lost its NCCL connection (see NCCL's log) while it waited for all ranks to begin in forward call 1"
    for rank in world.living:
        report = rank.said[-1]
        assert report.startswith("ring attention over nccl lost the connection to a rank: rank 0 " + lost), report
        assert f"; rank 1 {lost}; rank 2 has been waiting " in report, report
        assert "; rank 3 does not answer: it has died" in report, report
        assert len(rank.ends) == 1


def test_nccl_may_be_lost_between_two_calls() -> None:
    world = World(2)
    channels = [rank.over_nccl() for rank in world.ranks]
    finish(*(rank.issue(1, memory=channel) for rank, channel in zip(world.ranks, channels, strict=True)))
    world.run(3)
    channels[0].broken = True
    world.run(8)
    report = world.ranks[0].said[-1]
    assert "rank 0 lost its NCCL connection (see NCCL's log) while it waited before call 2; " in report
    assert "; rank 1 does not answer: it has died" in report and "or it is in no call; " in report


def test_error_of_nccl_names_the_ranks() -> None:
    world, channels = broken_world()
    caller = world.living.pop(0)  # its thread that looks would wait for the report of the one that works
    cause = dist.DistBackendError("NCCL error in: file\nLast error:\nConnection closed by remote peer there<1>")
    with pytest.raises(RingStalled, match="rank 3 does not answer: it has died") as caught:
        with caller.begin("backward", channels[0]):
            raise cause
    lost = (
        "rank 0 lost its NCCL connection (Connection closed by remote peer there<1>) while it waited for all ranks to "
    )
    lost += "begin in forward"
    assert lost in str(caught.value) and caught.value.__cause__ is cause
    assert caller.said[-1] == str(caught.value) and len(caller.ends) == 1
    assert all(lost in rank.said[-1] for rank in world.living)
    with pytest.raises(RingStalled):
        caller.begin("forward", channels[0])


def test_other_errors_of_a_call_are_the_callers() -> None:
    world, channels = broken_world()
    with pytest.raises(ValueError, match="mine"), world.ranks[0].begin("backward", channels[0]):
        raise ValueError("mine")
    assert world.is_quiet()


def test_store_is_asked_only_if_nccl_is_awaited() -> None:
    world = World(2)
    with mock.patch.object(WatchdogStore, "asked", side_effect=AssertionError):
        world.ranks[0].issue(1)
        finish(world.ranks[1].issue(1, memory=world.ranks[1].over_nccl()))
        world.run(TIMEOUT_S / 2 - 20)
    assert world.is_quiet()


@pytest.mark.parametrize("error, broken", [("SUCCESS", 0), ("TIMEOUT", 0), ("COMM_ERROR", 1), ("REMOTE_ERROR", 1)])
def test_which_answers_of_nccl_are_a_broken_connection(error: str, broken: int) -> None:
    channel = Messages(Group(0, 2, None))
    channel._channel = mock.Mock()
    channel._channel._get_backend.return_value.get_error.return_value = getattr(ErrorType, error)
    assert PointToPoint.is_broken(channel) == bool(broken)
    channel.name = "gloo"
    assert not PointToPoint.is_broken(channel)


def test_a_fault_of_the_watch_ends_only_it(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watchdog(say=pytest.fail, end=pytest.fail)
    watch.poll = mock.Mock(side_effect=ValueError("a mistake"))  # type: ignore[method-assign]
    watch._wake.set()
    watch._run()
    assert "a rank that stalls may go unnoticed" in caplog.text


def test_the_thread_looks_until_it_is_stopped() -> None:
    looked = threading.Event()
    watch = Watchdog()
    watch.poll = looked.set  # type: ignore[method-assign]
    watch._wake.set()
    watch.start()
    assert looked.wait(10)
    watch.stop()
    assert watch._thread is not None and not watch._thread.is_alive()


def test_many_calls_are_looked_at_early() -> None:
    """Or a fast device would leave thousands of events."""
    rank = World(1).ranks[0]
    for _ in range(thread._EARLY_POLL_CALLS - 1):
        rank.issue(1)
    assert not rank.watch._wake.is_set()
    rank.issue(1)
    assert rank.watch._wake.is_set()


def test_a_new_call_frees_the_tokens_of_ended_calls() -> None:
    rank = World(1).ranks[0]
    calls = [rank.issue(1) for _ in range(3)]
    finish(*calls[:2])
    queue = rank.watch._watched[rank.memory].queue  # type: ignore[index]
    calls.append(rank.issue(1))
    assert [len(call.markers) for call in queue.calls] == [0, 0, 2, 2]
    rank.look()
    assert queue.describe_wait() == "for all ranks to begin in forward call 3"
    held = list(queue.calls)
    finish(*calls)
    rank.look()
    assert [len(call.markers) for call in held] == [0, 0]


def test_few_tokens_are_asked_however_many_calls_wait() -> None:
    rank = World(1).ranks[0]
    calls = [rank.issue(8) for _ in range(200)]
    finish(*calls[:150])
    asked = mock.Mock(side_effect=lambda token: token.done)
    rank.watch._events[CPU] = asked
    rank.look()
    assert asked.call_count < 15
    assert [call.number for call in rank.watch._watched[rank.memory].queue.calls] == list(range(151, 201))  # type: ignore[index]


@pytest.fixture
def the_watch(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """In place of this process's."""
    watch = mock.Mock()
    monkeypatch.setattr(thread, "_watchdog", watch)
    return watch


def test_what_raises_by_itself_is_not_watched(the_watch: mock.Mock) -> None:
    gloo = object.__new__(PointToPoint)
    gloo.name = "gloo"
    for transport in (None, gloo):
        with watching(transport, "forward", CPU) as call:
            call.reach(Token(), "for section {}", 0)
            call.mark("for the last messages")
        assert isinstance(call, Unwatched)
    assert the_watch.mock_calls == []


@pytest.mark.parametrize("capturing", [True, False])
def test_captured_calls_are_not_watched(the_watch: mock.Mock, capturing: bool) -> None:
    memory, device = Memory(Group(0, 2, None)), torch.device("cuda", 0)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: capturing):
        call = watching(memory, "forward", device)  # type: ignore[arg-type]
    assert isinstance(call, Unwatched) == capturing
    assert the_watch.begin.called != capturing


def test_a_forked_process_starts_its_own(the_watch: mock.Mock) -> None:
    child = os.fork()
    if not child:
        os._exit(0 if thread._watchdog is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert thread._watchdog is the_watch


class Driver:
    """libcuda, as far as it is asked: events by their handle, other functions by what they return."""

    def __init__(self, answers: dict[int, int], codes: dict[str, int]) -> None:
        self.answers, self.codes = answers, codes
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*args: Any) -> int:
            self.called.append(name)
            return self.answers[args[0].value] if name == "cuEventQuery" else self.codes.get(name, 0)

        return function


def events(answers: dict[int, int], **codes: int) -> tuple[Events, Driver]:
    driver = Driver(answers, codes)
    with mock.patch("ctypes.CDLL", lambda name: driver):
        return Events(torch.device("cuda", 0)), driver


def test_events_are_asked_of_the_driver() -> None:
    """Out of the way of captures."""
    found, driver = events({1: 0, 2: 600, 3: 719})
    begun = ["cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuThreadExchangeStreamCaptureMode"]
    assert driver.called == begun
    assert [found.ended(SimpleNamespace(cuda_event=event)) for event in (1, 2)] == [True, False]  # type: ignore[arg-type]
    with pytest.raises(DeviceLost, match="CUDA error 719"):
        found.ended(SimpleNamespace(cuda_event=3))  # type: ignore[arg-type]
    with pytest.raises(DeviceLost, match="CUDA error 3"):
        events({}, cuDevicePrimaryCtxRetain=3)
