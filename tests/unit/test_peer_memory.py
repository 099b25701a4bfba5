"""Where the copy engine may run, from what ranks told one another, and that "auto" does not take it. One process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ringflash import transport
from ringflash.transport import peer_memory

GPU = torch.device("cuda")


class Messages:
    """PointToPoint without NCCL."""

    def __init__(self, name: str, group: object) -> None:
        self.name = name


NO_NCCL = mock.patch.object(transport, "PointToPoint", Messages)
HERE = ["host0", "gpu0", []], ["host0", "gpu1", []]


def test_one_host_with_peer_access() -> None:
    peer_memory._check_places([*HERE, ["host0", "gpu2", ["gpu7"]]])  # gpu7 is not in the group


@pytest.mark.parametrize(
    "place, got",
    [
        (["host1", "gpu2", []], "hosts ['host0', 'host1']"),
        (["host0", "gpu1", []], "3 ranks with 2 GPUs"),
        (["host0", "gpu2", ["gpu0"]], "no access from ranks [2]"),
    ],
)
def test_refused_elsewhere(place: list, got: str) -> None:
    with pytest.raises(RuntimeError, match="copy_engine.* must have all ranks .*use 'nccl'") as error:
        peer_memory._check_places([*HERE, place])
    assert got in str(error.value)


def test_a_rank_without_memory_stops_all() -> None:
    peer_memory._raise_together(["", ""])
    with pytest.raises(RuntimeError, match="got {1: 'out of memory'}"):
        peer_memory._raise_together(["", "out of memory"])


@pytest.fixture(autouse=True)
def nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_open", {})


@pytest.mark.parametrize(
    "problem, chosen", [(None, "copy_engine"), (peer_memory.OutOfReach("two hosts"), "nccl")], ids=["reach", "no reach"]
)
def test_auto_takes_the_copy_engine_where_memory_is_in_reach(problem: Exception | None, chosen: str) -> None:
    group, memory = mock.Mock(), mock.Mock(side_effect=problem)
    with (
        mock.patch.object(transport, "backend_of", lambda group, device: "nccl"),
        mock.patch.object(transport, "SymmetricMemory", memory),
        NO_NCCL,
    ):
        names = [transport.choose_transport(name, group, GPU) for name in ("auto", "nccl", "copy_engine")]
        assert names == [transport.UNDECIDED, "nccl", "copy_engine"]
        opened = transport.open_transport(transport.UNDECIDED, group)
        assert transport.transport_name(opened) == chosen
        assert transport.choose_transport("auto", group, GPU) == chosen
        assert transport.open_transport(chosen, group) is opened


def test_auto_says_why_it_does_without_the_copy_engine() -> None:
    group, memory = mock.Mock(), mock.Mock()
    memory.return_value.reserve.side_effect = peer_memory.NoPeerMemory("pidfd_getfd: not permitted")
    patched = mock.patch.object(transport, "SymmetricMemory", memory)
    with patched, NO_NCCL, pytest.warns(UserWarning, match="pidfd_getfd"):
        opened = transport.open_transport(transport.UNDECIDED, group)
        assert transport.transport_name(opened) == "nccl"


def test_barriers_give_up_after_the_watch_has_reported() -> None:
    with mock.patch.object(transport, "SymmetricMemory") as memory:
        transport.open_transport("copy_engine", mock.Mock())
    (_, timeout_ms), _ = memory.call_args
    assert timeout_ms > transport.timeout().total_seconds() * 1000 == 600_000


def test_auto_hides_no_other_error() -> None:
    """A rank that does not answer, or a call that is captured before its first: not a matter of the transport."""
    memory = mock.Mock()
    memory.return_value.reserve.side_effect = RuntimeError("no answer from some of 4 ranks")
    group = mock.Mock()
    with mock.patch.object(transport, "SymmetricMemory", memory), pytest.raises(RuntimeError, match="no answer"):
        transport.open_transport(transport.UNDECIDED, group)
    assert group not in transport._decided
