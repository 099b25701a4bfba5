"""Posted messages: one coalesced batch on NCCL, sends before receives, nothing without a peer. CPU."""

import gc
import weakref
from unittest import mock

import pytest
import torch

from ringflash.attention import plan
from ringflash.attention.gather_by_heads import GatherAttention
from ringflash.attention.inputs import CallShape
from ringflash.attention.options import Algorithm, CallOptions
from ringflash.attention.ulysses import Ulysses
from ringflash.comm.call_numbers import NO_NUMBER
from ringflash.comm.group import HostSplit
from ringflash.comm.transport import Message, PointToPoint
from ringflash.comm.transport.point_to_point import TAG
from ringflash.sequence.mask import SequenceMask


@pytest.fixture
def channel() -> mock.Mock:
    """A communicator that records what is asked of it."""
    return mock.Mock()


@pytest.fixture
def transport(channel: mock.Mock) -> PointToPoint:
    """Rank 1 over NCCL, without a GPU: opening is skipped."""
    made = object.__new__(PointToPoint)
    made.name, made.rank, made._channel = "nccl", 1, channel
    return made


def test_a_batch_is_coalesced(transport: PointToPoint, channel: mock.Mock) -> None:
    """One without a message is none."""
    transport.post([], []).wait()
    assert channel.mock_calls == []
    x, y = torch.zeros(2), torch.ones(2)
    pending = transport.post([Message(x, 2, "K/V of section 1")], [Message(y, 0, "K/V of section 1")])
    device = torch.device("cpu")
    assert channel.mock_calls == [
        mock.call._start_coalescing(device),
        mock.call.send([x], 2, TAG),
        mock.call.recv([y], 0, TAG),
        mock.call._end_coalescing(device),
    ]
    pending.wait()
    channel._end_coalescing.return_value.wait.assert_called_once_with()  # a timeout would block the host


def test_a_failure_names_the_messages(transport: PointToPoint, channel: mock.Mock) -> None:
    channel._end_coalescing.return_value.wait.side_effect = RuntimeError("broken")
    pending = transport.post(
        [Message(torch.zeros(2), 2, "K/V of section 1")], [Message(torch.zeros(2), 0, "dK/dV of section 0")]
    )
    names = "K/V of section 1 of rank 1 to rank 2 over nccl; dK/dV of section 0 .*"
    with pytest.raises(RuntimeError, match=rf"{names} did not finish \(broken\)"):
        pending.wait()


@pytest.mark.parametrize("name, failing", [("gloo", "recv"), ("nccl", "_end_coalescing")])
def test_batch_that_fails_halfway_counts(transport: PointToPoint, channel: mock.Mock, name: str, failing: str) -> None:
    """The peer may have its message: a rank that calls again by itself would send another."""
    transport.name = name
    getattr(channel, failing).side_effect = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        transport.post([Message(torch.zeros(2), 2, "K/V")], [Message(torch.zeros(2), 0, "K/V")])
    assert transport.num_posted == 1


@mock.patch("ringflash.comm.transport.point_to_point._unawaited", [])
def test_messages_over_gloo_are_kept_until_awaited(transport: PointToPoint, channel: mock.Mock) -> None:
    """Also by a call that raises and forgets them: torch would block the connection of a receive that it frees."""
    transport.name, transport.group = "gloo", None
    forgotten = weakref.ref(work := WeakWork())
    channel.recv.return_value = work
    transport.post([], [Message(torch.zeros(2), 0, "K/V")])
    awaited = weakref.ref(work := WeakWork())
    channel.recv.return_value = work
    transport.post([], [Message(torch.zeros(2), 0, "K/V")]).wait()
    channel.recv.return_value = work = None
    transport.post([], []).wait()
    gc.collect()
    assert forgotten() is not None and awaited() is None


class WeakWork:
    """A message that arrives at once."""

    def wait(self, timeout: object) -> None:
        """Return."""


@pytest.mark.parametrize("split", [HostSplit(2, 2), HostSplit(4, 1), HostSplit(1, 4)], ids=str)
def test_a_call_counts_its_messages_between_hosts(split: HostSplit) -> None:
    """Over gloo, whose channels are made anew. Ranks that fail go on if they have posted equally many."""
    group = mock.Mock(rank=lambda: 0, size=lambda: 4, _device_types=[])
    options = CallOptions(group, softmax_scale=1.0, transport="by_host")
    mask = SequenceMask(16, True, (-1, -1), None)
    made = plan.CallPlan(mask, "reference", "", Algorithm.BY_HOST, "gloo", options)
    q = torch.empty(1, 4, 4, 8)
    with mock.patch.object(plan, "split_of", lambda *_: split):
        call = made.open(CallShape.of(q, q, q), NO_NUMBER)
    ring = call.attention if isinstance(call, Ulysses) else call
    before = call.num_posted()
    moved = [ring.areas.channel if isinstance(ring, GatherAttention) else None]
    moved += [call.areas.channel] if isinstance(call, Ulysses) else []
    for channel in filter(None, moved):
        channel.post([], [])
    assert call.num_posted() - before == len([*filter(None, moved)]) > 0
