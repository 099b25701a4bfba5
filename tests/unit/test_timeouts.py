"""Timeouts of ranks: `set_timeout`, else the process group's own, and never less than 600 s. One process."""

from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from ringflash import set_timeout
from ringflash.comm import timeouts
from ringflash.comm.timeouts import timeout
from ringflash.comm.transport import point_to_point, registry
from ringflash.comm.watchdog import Watchdog

OWN_S = 7200.0
CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A group of one rank whose creator asked for two hours."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=OWN_S))
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def nothing_set() -> Iterator[None]:
    with mock.patch.object(timeouts, "_set", None):
        yield


def test_the_default_is_the_longer_one(group: dist.ProcessGroup) -> None:
    assert (timeout().total_seconds(), timeout(group).total_seconds()) == (600, OWN_S)
    group._get_backend(CPU)._set_default_timeout(timedelta(seconds=60))
    assert timeout(group).total_seconds() == 600


def test_what_is_set_takes_the_place_of_both(group: dist.ProcessGroup) -> None:
    set_timeout(30)
    assert timeout().total_seconds() == timeout(group).total_seconds() == 30


def test_a_backend_without_a_timeout(group: dist.ProcessGroup) -> None:
    del group
    other = dist.new_group([0], backend="fake")
    assert fake_pg and timeout(other).total_seconds() == 600


def test_all_waits_are_as_long_as_the_groups(group: dist.ProcessGroup) -> None:
    over_gloo = registry.PointToPoint("gloo", group)
    assert over_gloo.post([], [])._timeout == timedelta(seconds=OWN_S)
    assert Watchdog().add(mock.Mock(spec=registry.GroupAreas, group=group), CPU).queue.timeout == OWN_S
    with mock.patch.object(registry, "CopyEngine") as memory:
        registry._create_transport("copy_engine", group)
    memory.assert_called_once_with(group, int(OWN_S + 15) * 1000, None)
    with (
        mock.patch.object(point_to_point, "communicator", side_effect=StopIteration) as made,
        pytest.raises(StopIteration),
    ):
        registry.PointToPoint("nccl", group)
    made.assert_called_once_with(group, "ring", "nccl", timedelta(seconds=OWN_S + 15))
