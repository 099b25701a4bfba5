"""Kernels of a call that gathers K/V by heads, by unit: a section of heads over a block of keys.

`gather_by_heads` decides their order and streams, and what each launch waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringflash.attention import sections
from ringflash.attention.gathered_buffers import GatheredKV
from ringflash.attention.gradient_return import GradientReturn
from ringflash.attention.inputs import BackwardInputs
from ringflash.attention.schedule import KeyBlock
from ringflash.attention.sections import Unit
from ringflash.comm.call_numbers import NO_NUMBER, CallNumber
from ringflash.comm.profiling import profiler_range
from ringflash.comm.transport import buffer
from ringflash.comm.transport.areas import GroupAreas
from ringflash.comm.transport.gpu_areas import Marker
from ringflash.comm.wait_timer import waiting
from ringflash_kernels.api import BackwardPass, begin_checked_backward, kernels_of


@dataclass
class GatherCall:
    """One attention call that gathers K/V by heads, without its tensors. Not frozen, since that costs 1 µs per call.

    Args:
        blocks: keys that this rank needs, a block at a time.
        areas: memory areas of the group.
        impl: kernel implementation, chosen and checked.
        number: number of the call in its group.
        fp8: K and V travel as records in FP8; all segments of `blocks` are whole records.
        queries_arrived: markers for which a kernel must wait before it reads q, and in a backward dout and out.
    """

    blocks: tuple[KeyBlock, ...]
    areas: GroupAreas
    impl: str
    softmax_scale: float
    deterministic: bool
    number: CallNumber = NO_NUMBER
    fp8: bool = False
    queries_arrived: tuple[Marker, ...] = ()


class UnitKernels:
    """Kernels of one pass, by unit.

    Args:
        call: the call of the pass.
        gathered: K/V of the pass.
        q: (batch, seqlen_local, num_heads, head_dim).
    Attributes:
        visible_blocks: indices of the blocks with keys that this rank sees; only units of these blocks have a kernel.
    """

    pass_name = ""

    def __init__(self, call: GatherCall, gathered: GatheredKV, q: Tensor) -> None:
        self.call, self.gathered, self.sizes = call, gathered, gathered.sizes
        self.q = self.sizes.by_section(q, 2)
        self.visible_blocks = [index for index, block in enumerate(call.blocks) if block.mask.regions]

    def compute(self, index: int, *needed: Marker) -> None:
        """Launch the kernel of a unit on the current stream, after its K/V have arrived.

        Args:
            needed: markers of the arrival of K/V, and in a backward of the end of `begin`.
        """
        unit = self.sizes.units[index]
        self.prepare(unit)
        with waiting(self.gathered.device):
            self.call.areas.wait(*needed)
        if unit.block in self.visible_blocks:
            with profiler_range(f"ringflash::{self.pass_name}_section{unit.section}"):
                self._launch(index, unit)

    def prepare(self, unit: Unit) -> None:
        """Launch, on the current stream, work for the kernel of a unit that does not need its K/V."""

    def _launch(self, index: int, unit: Unit) -> None:
        raise NotImplementedError


class ForwardUnits(UnitKernels):
    """Kernels of one forward: each section writes its heads of `out` and `lse`.

    Between the blocks of a section the output is carried in fp32 (fp64 for fp64).
    """

    pass_name = "forward"

    def __init__(
        self, call: GatherCall, gathered: GatheredKV, q: Tensor, out: Tensor, lse: Tensor, row_max: Tensor | None
    ) -> None:
        super().__init__(call, gathered, q)
        self.out, self.lse = self.sizes.by_section(out, 2), self.sizes.by_section(lse, 1)
        self.row_max = None if row_max is None else self.sizes.by_section(row_max, 1)
        self.kernel, self.queries = kernels_of(call.impl), dict[int, object]()  # by section, until its last kernel
        self.forward = self.sizes.kv_format.forward_kernel(self.kernel)
        single = len(self.visible_blocks) == 1 or q.dtype == lse.dtype
        self.carried = [] if single else self._states(out.shape, lse.dtype)

    def prepare(self, unit: Unit) -> None:
        """Round the queries of a section, once for all its blocks."""
        if unit.block == 0:
            with waiting(self.gathered.device):
                self.call.areas.wait(*self.call.queries_arrived)
            self.queries[unit.section] = self.sizes.kv_format.pack_queries(self.q[unit.section], self.kernel)

    def _launch(self, index: int, unit: Unit) -> None:
        section, out, last = unit.section, self.out[unit.section], unit.block == self.visible_blocks[-1]
        carried = self.carried[section] if self.carried else out
        queries = self.queries.pop(section) if last else self.queries[section]
        with_row_max = {} if self.row_max is None else {"row_max": self.row_max[section]}
        keys_values, mask = self.gathered.keys_values[index], self.call.blocks[unit.block].mask
        self.forward(
            queries, *keys_values, mask, self.call.softmax_scale,
            out=out if last else carried, lse=self.lse[section],
            acc=None if unit.block == self.visible_blocks[0] else carried, **with_row_max,
        )  # fmt: skip

    def _states(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Return memory for the output of each section: (batch, seqlen_local, heads of the section, head_dim).

        Args:
            shape: shape of the whole output.
        """
        batch, rows, _, head_dim = shape
        heads = [count * self.sizes.heads_per_kv_head for count in self.sizes.heads]
        states = [
            buffer(f"out.{index}", (batch * rows * most * head_dim,), dtype, self.gathered.device)
            for index, most in enumerate(sections.buffer_sizes(tuple(heads)))
        ]
        return [
            states[section % 2][: batch * rows * count * head_dim].view(batch, rows, count, head_dim)
            for section, count in enumerate(heads)
        ]


class BackwardUnits(UnitKernels):
    """Kernels of one backward: each section writes its heads of `grads`, which are dq, dk and dv."""

    pass_name = "backward"

    def __init__(
        self,
        call: GatherCall,
        gathered: GatheredKV,
        gradient_return: GradientReturn,
        inputs: BackwardInputs,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        super().__init__(call, gathered, inputs.q)
        self.gradient_return, self.dq = gradient_return, self.sizes.by_section(grads[0], 2)
        self.dk, self.dv = (x.split_with_sizes(self.sizes.heads, 2) for x in grads[1:])
        self.dout, self.out = (self.sizes.by_section(x, 2) for x in (inputs.dout, inputs.out))
        self.lse = self.sizes.by_section(inputs.lse, 1)
        self.dlse, self.row_max = (
            (None,) * len(self.sizes.heads) if x is None else self.sizes.by_section(x, 1)
            for x in (inputs.dlse, inputs.row_max)
        )
        self.passes: dict[int, BackwardPass] = {}

    def begin(self, section: int) -> None:
        """Compute the row sums of dO and O, make zeros for dQ, and with FP8 round the queries and dO.

        All memory of a section is allocated here, on the stream "begin". Once it is freed, torch may give it to
        later work of that stream, so the next `begin` that frees it first waits for the section's end.
        """
        call, parity = self.call, section % 2
        self.passes.pop(parity, None)  # free the fp32 dQ of section - 2, which has ended, before allocating the next
        self.passes[parity] = begin_checked_backward(
            self.dout[section], self.q[section], self.out[section], self.lse[section], impl=call.impl,
            num_kv_heads=self.sizes.heads[section], softmax_scale=call.softmax_scale, dlse=self.dlse[section],
            deterministic=call.deterministic, row_max=self.row_max[section],
            num_keys=sum(call.blocks[block].mask.seqlen_k for block in self.visible_blocks),
        )  # fmt: skip

    def _launch(self, index: int, unit: Unit) -> None:
        mask, grads = self.call.blocks[unit.block].mask, self.gradient_return.kernel_grads[index]
        add = self.sizes.kv_format.backward_kernel(self.passes[unit.section % 2])
        add(*self.gathered.keys_values[index], mask, *grads, accumulate=False)

    def finish_queries(self, section: int) -> None:
        """Cast the dQ of a section."""
        self.passes[section % 2].finish(self.dq[section])

    def return_gradients(self, index: int) -> None:
        """Return dK and dV of a unit to their owners; add up the gradients that arrive for this rank's keys."""
        self.gradient_return.collect(index, self.dk, self.dv, self.call.impl)

    def finish(self, index: int) -> None:
        """Return dK and dV of the last unit of a section, and cast the dQ of the section, which no rank waits for."""
        self.return_gradients(index)
        self.finish_queries(self.sizes.units[index].section)
