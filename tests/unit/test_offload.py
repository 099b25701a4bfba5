"""Checkpoints on the host: copies that run late change nothing. One process, no GPU.

Streams are stood in for by queues: a copy on the side stream runs when somebody waits for it, and no sooner.
tests/multi_gpu/test_training_on_gpus.py has the streams of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ringflash.memory import offload
from ringflash.memory.offload import HostCopies

LAYERS = 5


class Queue:
    """A side stream: copies that were given to it, and how many have run."""

    def __init__(self) -> None:
        self.work: list[Any] = []
        self.done = 0

    def run(self, until: int) -> None:
        """All previous work."""
        while self.done < until:
            self.work[self.done]()
            self.done += 1

    def wait_stream(self, other: Any) -> None:
        """Return at once: what runs on the CPU has run."""
        assert isinstance(other, Current)

    def record_event(self) -> Event:
        """Return an event behind what is in the queue by now."""
        return Event(self, len(self.work))


class Event:
    """A place in a queue."""

    def __init__(self, queue: Queue, place: int) -> None:
        self.queue, self.place = queue, place

    def synchronize(self) -> None:
        self.queue.run(self.place)


class Current:
    """The stream of the layers, whose work runs at once."""

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Late(TorchDispatchMode):
    """Copies go into a queue."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.queue.work.append(lambda: func(*args))
            return args[0]
        return func(*args, **(kwargs or {}))


class StandIn:
    """torch.cuda, as the module uses it."""

    def __init__(self) -> None:
        self.queues: list[Queue] = []

    def Stream(self, device: torch.device) -> Queue:
        self.queues.append(Queue())
        return self.queues[-1]

    def stream(self, queue: Queue) -> Late:
        return Late(queue)

    def current_stream(self, device: torch.device) -> Current:
        return Current()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Streams of this file; memory that was not written holds NaN."""
    found = StandIn()
    monkeypatch.setattr(offload, "cuda", found)
    monkeypatch.setattr(offload, "_is_offloaded", lambda x: x.numel() > 0)
    monkeypatch.setattr(offload, "_pinned_like", torch.empty_like)
    torch.use_deterministic_algorithms(True)
    yield found
    torch.use_deterministic_algorithms(False)


def network() -> nn.ModuleList:
    """Layers with the same parameters every time."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(LAYERS)).double()


def loss_of(layers: nn.ModuleList, x: torch.Tensor, host: HostCopies | None) -> torch.Tensor:
    """Loss of a forward with checkpoints."""
    for layer in layers:
        with nullcontext() if host is None else host.hooks():
            x = x + checkpoint(layer, x, use_reentrant=False)
    return x.square().sum()


def gradients(layers: nn.ModuleList) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]


def test_late_copies_change_no_bit(cuda: StandIn) -> None:
    """Two steps, a loss that goes back twice, and two forwards before both backwards."""
    x, host = torch.randn(6, 8, dtype=torch.float64), HostCopies()
    layers, other = network(), network()
    for _ in range(2):
        for found, where in ((layers, host), (other, None)):
            loss_of(found, x, where).backward()
        for found, where in ((layers, host), (other, None)):
            loss = loss_of(found, 2 * x, where)
            loss.backward(retain_graph=True)
            loss.backward()
            first, second = loss_of(found, x, where), loss_of(found, 3 * x, where)
            first.backward()
            second.backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(layers), gradients(other), strict=True))
    (queue,) = cuda.queues
    assert queue.done >= 2 * 5 * LAYERS


def test_one_leaves_and_one_arrives_at_a_time(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each input that a layer takes back: copies that were begun, and those that have run."""
    seen: list[tuple[int, int]] = []

    def unpack(self: HostCopies, saved: Any, plain: Any = HostCopies._unpack) -> torch.Tensor:
        x = plain(self, saved)
        seen.append((len(queue.work), queue.done))
        return x

    monkeypatch.setattr(HostCopies, "_unpack", unpack)
    host, layers = HostCopies(), network()
    loss = loss_of(layers, torch.randn(6, 8, dtype=torch.float64), host)
    (queue,) = cuda.queues
    assert (len(queue.work), queue.done) == (LAYERS, LAYERS - 1)  # the last is on its way
    loss.backward()
    begun = [*range(LAYERS + 2, 2 * LAYERS + 1), 2 * LAYERS]
    assert seen == list(zip(begun, range(LAYERS + 1, 2 * LAYERS + 1), strict=True))


def test_what_is_no_longer_needed_is_free(cuda: StandIn) -> None:
    """A graph without a backward, or with half of one; a copy of the hooks, as of a model, is independent."""
    host, layers = HostCopies(), network()
    x = torch.randn(6, 8, dtype=torch.float64)
    loss_of(layers, x, host)
    loss = loss_of(layers, x, host)
    mine, theirs = deepcopy(host), host
    assert mine is not theirs and mine._streams == {} and mine._outgoing is None
    loss.backward()
    assert theirs._outgoing is None and theirs._last is not None and theirs._last() is None
    half = layers[2].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(layers, x, host).backward()
    half.remove()
    assert cuda.queues[0].done == len(cuda.queues[0].work)  # what arrived early and was not taken has been waited for


def test_an_input_that_is_changed_in_place_is_refused(cuda: StandIn) -> None:
    """The copy would have read either."""
    host, layers = HostCopies(), network()
    x = torch.randn(6, 8, dtype=torch.float64) * layers[0][0].weight.sum()
    with host.hooks():
        out = checkpoint(layers[0], x, use_reentrant=False)
    x += 1
    with pytest.raises(
        RuntimeError, match=r"not be changed in place with offload_checkpoints, got a changed input of shape \(6, 8\)"
    ):
        out.sum().backward()


def test_what_is_not_on_a_gpu_stays() -> None:
    x = torch.ones(3, requires_grad=True)
    with HostCopies().hooks():
        out = x.exp()
    out.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.exp())
