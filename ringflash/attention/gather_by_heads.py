"""Attention over an all-gather of K/V by groups of heads: over the copy engine, NCCL, or gloo on CPUs.

    pull       K/V: copies from the owners, without SMs, or messages
    even, odd  kernels of alternate sections: the first tiles of one run on SMs that the last tiles of the other leave
    begin      (backward) row sums of dO and O, zeros for dQ
    end        (backward) gradients return to the owners, who add them up; dQ is cast

These are CUDA streams; docs/how-it-works.md draws them over time.

README.md defines sections, blocks and units. A rank gathers the keys that it sees in the order of their positions, so
each section is one launch, as on one device, and no state passes between launches. No kernel runs during the first
pull, nor during the last return of gradients. So the first section is small, and in a backward the last one, too. Long
sequences are double-buffered (triple-buffered over NCCL). If a call is long but all its K/V fit into one area,
gradients return in batches of several sections, so that NVLink can fall idle in between.
docs/decisions/0005-copy-engine.md says what waits for what, and why, 0008-nccl-by-heads.md how NCCL differs, and
0011-blocks-of-keys.md when there are several blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringflash.attention import sections
from ringflash.attention.gather_units import BackwardUnits, ForwardUnits, GatherCall, UnitKernels
from ringflash.attention.gathered_buffers import GatheredKV
from ringflash.attention.gradient_return import GradientReturn
from ringflash.attention.inputs import BackwardInputs, KVShape
from ringflash.attention.kv_format import KVFormat
from ringflash.attention.recording.steps import Tensors
from ringflash.attention.recording.tape import Tape, can_repeat, form_of
from ringflash.attention.sections import GatherSizes, Unit
from ringflash.comm.transport import transport_name
from ringflash.comm.transport.areas import JoinAfterError
from ringflash.comm.transport.gpu_areas import GpuAreas, Marker
from ringflash.comm.wait_timer import measuring, waiting
from ringflash.comm.watchdog import CallInFlight, Unwatched, watching
from ringflash_kernels.api import out_shape, state_dtype

T = TypeVar("T")


class GatherAttention(GatherCall):
    """One attention call that gathers K/V by heads, without its tensors."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, row_max: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute attention as `LocalAttention.forward` does, with one launch per unit."""
        out, lse = self._issue("forward", self._forward, (q, k, v, row_max))
        return out, lse

    def _forward(self, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> tuple[Tensor, ...]:
        """Compute attention without a tape; a tape may record this call."""
        q, k, v, row_max = inputs
        out = q.new_empty(out_shape(q, v))
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=state_dtype(q.dtype), device=q.device)
        gathered = self._gathered("forward", k, v, q.shape[2])
        self._run(ForwardUnits(self, gathered, q, out, lse, row_max), k, v)
        return out, lse

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gradients as `LocalAttention.backward` does; dk and dv are summed in the order of the ranks."""
        dq, dk, dv = self._issue("backward", self._backward, inputs)
        return dq, dk, dv

    def _backward(self, inputs: BackwardInputs) -> tuple[Tensor, ...]:
        """Compute gradients without a tape; a tape may record this call."""
        q, k, v = inputs.q, inputs.k, inputs.v
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        gathered = self._gathered("backward", k, v, q.shape[2])
        gradient_return = self._cached(
            "return", ("kv", "dkv"), k, v, q.shape[2], lambda: GradientReturn.of(gathered, k)
        )
        self._run(BackwardUnits(self, gathered, gradient_return, inputs, (dq, dk, dv)), k, v)
        return dq, dk, dv

    def num_posted(self) -> int:
        """Return the number of barriers or batches of messages that this rank has posted in this and earlier calls."""
        return self.areas.num_posted

    def _gathered(self, pass_name: str, k: Tensor, v: Tensor, num_heads: int) -> GatheredKV:
        """Return the memory and transfers of a pass; cached with the areas."""

        def make() -> GatheredKV:
            kv_format = KVFormat.of(k, v, fp8=self.fp8, for_backward=pass_name == "backward")
            sizes = GatherSizes.of(self.blocks, KVShape.of(k, v), num_heads, kv_format.dtype)
            chosen = sections.choose_sections(sizes, len(self.blocks), transport_name(self.areas))
            return GatheredKV.of(self.areas, self.blocks, k, num_heads, getattr(chosen, pass_name), kv_format)

        return self._cached(pass_name, ("kv",), k, v, num_heads, make)

    def _cached(
        self, name: str, names: tuple[str, ...], k: Tensor, v: Tensor, num_heads: int, make: Callable[[], T]
    ) -> T:
        return self.areas.cached(
            (name, *map(id, self.blocks), num_heads, k.shape, v.shape, k.dtype, self.fp8), names, make
        )

    def _issue(
        self, pass_name: str, issue: Callable[[Any], tuple[Tensor, ...]], tensors: Tensors
    ) -> tuple[Tensor, ...]:
        """Run a pass by `issue(tensors)`; repeat its tape once there is one."""
        assert tensors[0] is not None
        areas, device = self.areas, tensors[0].device
        with areas.on_one_stream():
            if self.queries_arrived or not can_repeat(self.impl, device):
                return issue(tensors)
            assert isinstance(areas, GpuAreas)
            options = self.impl, self.softmax_scale, self.deterministic, self.fp8
            key = pass_name, *map(id, self.blocks), options, form_of(tensors), areas.current().cuda_stream
            tape = areas.kept(key, ("kv", "dkv"), lambda: Tape(self.blocks))
            if not tape.steps:
                return tape.record(areas, tensors, issue)
            with watching(areas, pass_name, device) as watched, JoinAfterError(areas):
                return tape.repeat(areas, tensors, self.number, watched)

    def _run(self, kernels: UnitKernels, k: Tensor, v: Tensor) -> None:
        """Publish k and v, and compute all units, under the watchdog.

        The first pass with a mask computes its sections one after another, because the first kernel builds tables of
        the mask that the others read.
        """
        masks, device = [block.mask for block in self.blocks], kernels.gathered.device
        key = (
            "gather_by_heads",
            kernels.pass_name,
            self.impl,
            self.deterministic,
            *kernels.sizes.kv_format.head_dims,
            device,
        )
        seen_before = all(mask.is_cached(key) for mask in masks)
        in_order = not seen_before or measuring()
        with watching(self.areas, kernels.pass_name, device) as watched, JoinAfterError(self.areas):
            with waiting(device):
                markers = kernels.gathered.publish(k, v, self.impl, self.number)
            run_units(kernels, *markers, watched, in_order)
        if not seen_before:
            for mask in masks:
                mask.cached(key, lambda: True)


def run_units(
    kernels: UnitKernels, start: Marker, arrived: Marker, watched: CallInFlight | Unwatched, in_order: bool
) -> None:
    """Compute all units, each as soon as its K/V have arrived; two sections run concurrently, on two streams.

    For each unit, in this order: the kernel, the pull of the next unit, and in a backward the return of its gradients,
    which comes after that pull because messages keep their order.

    Args:
        start, arrived: from `GatheredKV.publish`.
        watched: the call as the watchdog sees it.
        in_order: start a unit only after the previous one has ended.
    """
    units, last = kernels.sizes.units, len(kernels.sizes.units) - 1
    pipeline = UnitPipeline(kernels, start, arrived, watched, in_order)
    for index, unit in enumerate(units):
        needed = pipeline.prerequisites(index, unit)
        if index == last:  # the barrier is a kernel, too: after the last kernel it might wait until that frees an SM
            pulled = kernels.gathered.all_pulled(kernels.call.number)
        pipeline.compute(index, unit, needed)
        if unit.transfer is not None:
            pipeline.pull_next()
            if isinstance(kernels, BackwardUnits):
                pipeline.return_gradients(kernels, index, unit)
    pipeline.join(pulled)


class UnitPipeline:
    """Work of one pass on its streams, and the markers that order it.

    Streams "even" and "odd" run the kernels of alternate sections, and stream "pull" brings the K/V. In a backward,
    streams "begin" and "end" run the small kernels before and after the kernel of a unit. All streams but "even" and
    "odd" are urgent: otherwise their work would queue behind all tiles of the next unit.

    Attributes:
        start: the point at which the call began.
        arrived: arrival of the K/V that were pulled last.
        computed: by unit: end of its kernel.
        last_on_stream: by stream: end of its last kernel.
        returns: by transfer: end of the return of its gradients.
        section_ends: by section of a backward: its gradients have been returned, and its dQ has been cast unless it is
            one of the last two sections.
        dq_casts: of the last two sections: the dQ has been cast. This is done on streams "even" and "odd" instead of
            "end", because no other section waits for it.
    """

    def __init__(
        self, kernels: UnitKernels, start: Marker, arrived: Marker, watched: CallInFlight | Unwatched, in_order: bool
    ) -> None:
        self.kernels, self.gathered, self.areas, self.watched = kernels, kernels.gathered, kernels.call.areas, watched
        self.start, self.arrived, self.in_order = start, arrived, in_order
        self.to_pull = iter(kernels.sizes.travelling[1:])
        self.computed: list[Marker] = []
        self.last_on_stream: dict[str, Marker] = {}
        self.returns: list[Marker] = []
        self.section_ends: dict[int, Marker] = {}
        self.dq_casts: list[Marker] = []
        self.has_barriers = transport_name(self.areas) == "copy_engine"  # messages order the ranks without barriers
        if self.has_barriers:
            self.reach(arrived, "for all ranks to begin")
        else:
            self.reach(self.start, "for its device to begin")

    def reach(self, marker: Marker, what: str, *values: object) -> None:
        """Tell the watchdog of a marker; arguments as `CallInFlight.reach`."""
        self.areas.run_on_host(_reach, self.watched, marker, what, *values)

    def prerequisites(self, index: int, unit: Unit) -> list[Marker]:
        """Return the markers that the kernel of a unit waits for; in a backward, begin the section with its first unit.

        Section s begins after section s - 2 has ended, because `begin` frees the dQ of that section.
        """
        kernels, queries = self.kernels, self.kernels.call.queries_arrived
        needed = [self.start if unit.transfer is None else self.arrived, *queries]
        if isinstance(kernels, BackwardUnits):
            if unit.block == 0:
                freed = [self.section_ends[unit.section - 2]] if unit.section > 1 else []
                after = [self.start, *queries, *freed]
                needed.append(
                    self.areas.run_on_stream("begin", partial(kernels.begin, unit.section), after, urgent=True)
                )
            needed += kernels.gradient_return.freed(index, self.returns)
        return needed

    def compute(self, index: int, unit: Unit, needed: list[Marker]) -> None:
        """Launch the kernel of a unit on the stream of its section."""
        stream = _stream_of(unit)
        after = [self.start, *(self.computed[-1:] if self.in_order else [])]
        end = self.areas.run_on_stream(stream, partial(self.kernels.compute, index, *needed), after)
        self.computed.append(end)
        self.last_on_stream[stream] = end
        self.reach(end, "for {}", self.kernels.sizes.name(unit))

    def pull_next(self) -> None:
        """Start to pull the next unit that travels, if there is one."""
        index = next(self.to_pull, None)
        if index is not None:
            self.arrived = self.gathered.pull(index, self.start, self.computed)

    def return_gradients(self, kernels: BackwardUnits, index: int, unit: Unit) -> None:
        """Return the gradients of a unit; with the last unit of a section, cast its dQ."""
        final, last_section = unit.block == len(kernels.sizes.blocks) - 1, len(kernels.sizes.heads) - 1
        cast_here = unit.section >= last_section - 1
        finish = kernels.finish if final and not cast_here else kernels.return_gradients
        end = self.areas.run_on_stream("end", partial(finish, index), self.computed[-1:], urgent=True)
        self.returns.append(end)
        self.reach(end, "for the gradients of {}", kernels.sizes.name(unit))
        if final:
            self.section_ends[unit.section] = end
            if cast_here:
                cast = self.areas.run_on_stream(_stream_of(unit), partial(kernels.finish_queries, unit.section), [])
                self.dq_casts.append(cast)

    def join(self, pulled: Marker) -> None:
        """Order the caller's stream after all work of the call, and after the last pull of every rank."""
        if self.has_barriers:
            self.reach(pulled, "for all ranks to have their keys")
        markers = [pulled]
        if isinstance(self.kernels, BackwardUnits):
            # dQ and the statistics were allocated on stream "begin" and are freed on return. Torch may then give their
            # memory to later work of that stream, so the stream waits for the last work that uses them.
            after = [*self.dq_casts, *self.returns[-1:]]
            markers.append(self.areas.run_on_stream("begin", _do_nothing, after, urgent=True))
        self.areas.wait(*(self.dq_casts or self.last_on_stream.values()))
        with waiting(self.gathered.device):
            self.areas.wait(*markers)


def _stream_of(unit: Unit) -> str:
    return "odd" if unit.section % 2 else "even"


def _reach(watched: CallInFlight | Unwatched, *arguments: Any) -> None:
    watched.reach(*arguments)


def _do_nothing() -> None:
    """Do nothing: work for a stream that only waits."""
