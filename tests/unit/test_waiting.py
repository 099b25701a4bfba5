"""Waits of a rank in its rings: counted while they are asked for, by the callback too. One process on the CPU."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch

from recipes.lightning import exposed_communication
from recipes.lightning.exposed_communication import ExposedCommunication
from ringflash.comm import wait_timer
from ringflash.comm.transport import Pending, PointToPoint
from ringflash.comm.transport.message_gather import GlooGather
from ringflash.comm.wait_timer import measured, waiting
from tests.unit.test_stream_lifetimes import passes

CPU = torch.device("cpu")


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with mock.patch.object(wait_timer, "time", clock):
        yield clock


def test_a_gather_over_gloo_counts_what_it_waits_for(clock: Clock) -> None:
    """Each batch of messages is waited for: K/V of two sections in both passes, and their gradients."""

    class Late(Pending):
        def wait(self) -> None:
            clock.now += 2.0

    channel = SimpleNamespace(name="gloo", rank=0, group=None, members=(), post=lambda *_: Late([]), num_posted=0)
    with measured() as waits:
        passes(GlooGather(cast(PointToPoint, channel), CPU), num_sections=2)
    assert waits.seconds() == 6 * 2.0


def test_nothing_is_counted_unasked(clock: Clock) -> None:
    with measured() as waits:
        pass
    with waiting(CPU):
        clock.now += 1.0
    assert waits.seconds() == 0
    with pytest.raises(RuntimeError, match="one context at a time"), measured(), measured():
        pass
    with measured():  # the refusal left nothing behind
        pass


def test_callback_logs_the_longest_wait(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints the rank that waited least, as the one that the others waited for."""
    others = [["near", 7000.0, 10.0], ["far", -1.0, 7010.0]]
    monkeypatch.setattr(exposed_communication, "gather", lambda group, mine: [mine, *others])
    monkeypatch.setattr(exposed_communication, "dist", mock.Mock())
    callback, trainer, module = ExposedCommunication(every_n_steps=2), mock.Mock(), mock.Mock()
    for trainer.global_step in (0, 1):
        callback.on_train_batch_start(trainer, module, None, 0)
        callback.on_train_batch_end(trainer, module, None, None, 0)
    module.log.assert_called_once_with("exposed_communication_ms", 7000.0)
    assert "ranks waited -1.0 to 7000.0 ms; the least, rank 2 on far, was busy for 7010.0 ms" in capsys.readouterr().out
    assert [rank.host for rank in callback.ranks[1:]] == ["near", "far"]
    trainer.global_step = 2
    callback.on_train_batch_start(trainer, module, None, 0)
    callback.on_exception(trainer, module, RuntimeError())
    with measured():
        pass
    with pytest.raises(ValueError, match="every_n_steps must be 1 or more, got 0"):
        ExposedCommunication(0)
