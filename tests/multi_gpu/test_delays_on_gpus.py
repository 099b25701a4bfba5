"""Calls with random delays, on two streams and in two groups, while memory is given back to the driver. Two GPUs.

An order of streams, calls or ranks that is missing shows as other bits, NaN or an illegal memory access. Behind every
call, and where a section of a backward begins, free memory is unmapped (expandable segments) or filled with NaN. Some
calls end with an error on all ranks alike. tests/unit/test_happens_before.py looks at all orders on the CPU, without
kernels.

`--backend gloo --impl reference` runs this file over emulated peer memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ringflash
from ringflash.attention.gather_units import BackwardUnits
from ringflash.attention.recording.tape import Tape
from ringflash.attention.ulysses import Ulysses
from ringflash.comm.driver import CommandList
from ringflash.comm.transport.copy_engine import CopyEngine
from ringflash.comm.transport.gpu_areas import GpuAreas
from tests.helpers.peer_memory import SharedMemory, copy_engine
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup
from tests.multi_gpu.test_ring_on_gpus import in_sections

pytestmark = pytest.mark.multi_gpu

DELAYS_CYCLES = (300_000, 3_000_000, 12_000_000)  # up to 7 ms


@dataclass
class Disorder:
    """Delays and frees that differ between ranks.

    Args:
        chance: that work is delayed, or that memory is given back.
    """

    device: torch.device
    random: random.Random
    chance: float = 0.0

    def delay(self) -> None:
        """Let the current stream stand still, perhaps."""
        if self.random.random() < self.chance and self.device.type == "cuda":
            torch.cuda._sleep(self.random.choice(DELAYS_CYCLES))

    def give_back(self) -> None:
        """Unmap free memory, perhaps, and fill free blocks of the current stream with NaN."""
        if self.random.random() < 2 * self.chance and self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.chance:
            for _ in range(4):
                torch.full((1 << self.random.choice((12, 18, 22)),), math.nan, device=self.device)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Delay streams and copies between GPUs, and give memory back when a section of a backward begins."""
        memory = GpuAreas if self.device.type == "cuda" else SharedMemory
        run_on_stream, begin, make_transfer = memory.run_on_stream, BackwardUnits.begin, CopyEngine.make_transfer
        repeat, issue = Tape.repeat, CommandList.issue

        def delayed(work: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                self.delay()
                work()

            return run

        def on_stream(memory: Any, stream: str, work: Callable[[], None], *args: Any, **options: Any) -> Any:
            return run_on_stream(memory, stream, delayed(work), *args, **options)

        def begin_without_memory(units: BackwardUnits, section: int) -> None:
            units.passes.pop(section % 2, None)
            self.give_back()
            begin(units, section)

        def repeat_slowly(tape: Tape, areas: Any, *args: Any) -> Any:
            def slow(step: Callable[[Any], None]) -> Callable[[Any], None]:
                def run(now: Any) -> None:
                    self.give_back()
                    with torch.cuda.stream(self.random.choice(list(areas._named_streams.values()))):
                        self.delay()
                    step(now)

                return run

            def issue_slowly(made: CommandList, *values: Any) -> None:
                for command in made.commands:
                    part = CommandList(made.driver, [command])
                    slow(lambda _, part=part: issue(part, *values))(None)

            with (
                mock.patch.object(tape, "steps", [slow(step) for step in tape.steps]),
                mock.patch.object(CommandList, "issue", issue_slowly),
            ):
                return repeat(tape, areas, *args)

        with (
            mock.patch.object(Tape, "repeat", repeat_slowly),
            mock.patch.object(memory, "run_on_stream", on_stream),
            mock.patch.object(CopyEngine, "make_transfer", lambda *args: delayed(make_transfer(*args))),
            mock.patch.object(BackwardUnits, "begin", begin_without_memory),
        ):
            yield


@dataclass
class Layer:
    """A kind of call, and its results (out, dq, dk, dv) without disorder."""

    inputs: list[torch.Tensor]
    dout: torch.Tensor
    options: dict[str, Any]
    expected: list[torch.Tensor]

    def forward(self) -> torch.Tensor:
        return ringflash.ring_attention(*self.inputs, **self.options)  # type: ignore[return-value, arg-type]

    def backward(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Return (out, dq, dk, dv)."""
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.dout)]

    def fails(self) -> None:
        """Leave a forward behind the exchange of heads, if there is one."""
        full = mock.Mock(side_effect=MemoryError("no memory left"))
        with mock.patch.object(Ulysses, "_attention", full), pytest.raises(MemoryError):
            self.forward()

    def is_right(self, got: list[torch.Tensor]) -> bool:
        """Compare bits, or within the reach of sums in another order if those of an FP8 backward have none."""
        if self.options["deterministic"]:
            return all(map(torch.equal, got, self.expected))
        pairs = ((x.float(), y.float()) for x, y in zip(got, self.expected, strict=True))
        return all(bool((x - y).norm() < 0.02 * y.norm()) for x, y in pairs)


def layers(ctx: Context, second: dist.ProcessGroup, impl: str, number: int, draw: random.Random) -> list[Layer]:
    """Layers of several transports, groups, lengths and masks; on CPUs all go over the emulated copy engine."""
    group = ctx.group
    ways: list[tuple[str, Any]] = [
        ("copy_engine", group),
        ("copy_engine", second),
        ("nccl", group),
        ("ulysses", second),
    ]
    if ctx.size == 4:
        mesh = DeviceMesh(ctx.device.type, torch.arange(4).view(2, 2), mesh_dim_names=("host", "gpu"))
        ways.append(("by_host", mesh))
    made = []
    for index in range(number):
        transport, place = (
            ways[index % len(ways)] if ctx.device.type == "cuda" else ("auto", (group, second)[index % 2])
        )
        rows = 256 * (draw.choice((1, 2, 3, 5, 8)) if ctx.device.type == "cuda" else 1)
        heads = (8, draw.choice((4, 8)))
        q, k, v, dout = (
            torch.randn(1, rows, heads[x], 128, device=ctx.device, dtype=torch.bfloat16) for x in (0, 1, 1, 0)
        )
        products = draw.choice(("", "_all", "_scores")) if impl.endswith("fp8") else ""
        options = {
            "group": place, "transport": transport, "impl": impl + products,
            "window_size": (200, 0) if draw.random() < 0.3 else (-1, -1), "deterministic": products == "",
        }  # fmt: skip
        layer = Layer([x.requires_grad_() for x in (q, k, v)], dout, options, [])
        layer.expected = [x.clone() for x in layer.backward(layer.forward())]
        made.append(layer)
    return made


def calls(ctx: Context, impl: str, turns: bool, seed: int, rounds: int) -> list[str]:
    """Make the same calls on all ranks, whose backwards follow in any order; return the options of wrong ones."""
    torch.manual_seed(ctx.rank)
    on_gpu, draw = ctx.device.type == "cuda", random.Random(seed)
    disorder = Disorder(ctx.device, random.Random(1000 * seed + ctx.rank))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()] if on_gpu else []
    wrong = []
    with ExitStack() as stack:
        if on_gpu:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
            stack.callback(torch.cuda.memory._set_allocator_settings, "expandable_segments:False")
        for context in (nullcontext() if on_gpu else copy_engine(), in_sections(turns), disorder.planted()):
            stack.enter_context(context)
        second = dist.new_group(list(range(ctx.size)))
        assert second is not None
        made = layers(ctx, second, impl, 15 if on_gpu else 4, draw)
        if on_gpu:
            torch.cuda.synchronize()  # other streams read the inputs
        disorder.chance = 0.15
        for _ in range(rounds):
            pending: list[tuple[Layer, torch.Tensor]] = []
            results: list[tuple[Layer, list[torch.Tensor]]] = []
            for step in range(12):
                with torch.cuda.stream(draw.choice(streams)) if on_gpu else nullcontext():
                    disorder.delay()
                    if pending and (step > 6 or draw.random() < 0.4):
                        layer, out = pending.pop(draw.randrange(len(pending)))
                        results.append((layer, layer.backward(out)))
                    elif step <= 6:
                        layer = draw.choice(made)
                        if layer.options["transport"] in ("ulysses", "by_host") and draw.random() < 0.3:
                            layer.fails()
                        pending.append((layer, layer.forward()))
                    disorder.give_back()
            if on_gpu:
                torch.cuda.synchronize()
            wrong += [str(layer.options) for layer, got in results if not layer.is_right(got)]
        disorder.chance = 0.0  # transfers are kept for later calls
        dist.destroy_process_group(second)
    return wrong


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_random_delays(pool: Pool, setup: Setup, fp8: bool, turns: bool) -> None:
    if fp8 and setup.impl not in ("hopper", "reference"):
        pytest.skip("needs an FP8 implementation: --impl hopper")
    impl, rounds = setup.impl + "_fp8" * fp8, 2 if setup.backend == "gloo" else 25
    assert pool.run(calls, impl, turns, 1 + turns, rounds, timeout_s=480) == [[]] * setup.ranks
