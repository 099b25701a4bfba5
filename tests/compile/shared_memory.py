"""Places that the compiler gives to what a kernel allocates in shared memory.

It gives the place of what is no longer used to something else. For an mbarrier that is wrong: the hardware keeps what
it knows of an initialised one and may write it back, which it was seen to do when processes take turns on a GPU. Eight
elements of Q were then not those of Q (docs/decisions/kernels-backward.md).
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
from typing import NamedTuple

from triton._C.libtriton import ir, nvidia, passes

_BYTES = {"f8E4M3FN": 1, "i64": 8, "i32": 4, "f32": 4, "bf16": 2, "f16": 2}
_ALLOCATION = re.compile(r"%(\w+) = ttg\.local_alloc .*?offset = (\d+) : i32.*? -> !ttg\.memdesc<([\dx]+)x(\w+),")
_CAPTURES = re.compile(r"(ttg\.warp_specialize)\(.*?allocation\.offset = (\d+) : i32")


class Allocation(NamedTuple):
    """Bytes [start, stop) of shared memory."""

    name: str
    start: int
    stop: int

    def overlaps(self, other: Allocation) -> bool:
        return self.start < other.stop and other.start < self.stop


def allocations(ttgir: str) -> list[Allocation]:
    """Places in a compiled kernel's TTGIR, as triton's own passes choose them; captures of partitions as one byte."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 86)
    manager.run(module, "allocate_shared_memory")
    text = str(module)
    found = [
        Allocation(name, int(start), int(start) + math.prod(map(int, shape.split("x"))) * _BYTES[dtype])
        for name, start, shape, dtype in _ALLOCATION.findall(text)
    ]
    return found + [Allocation(name, int(start), int(start) + 1) for name, start in _CAPTURES.findall(text)]


def overlaps(found: list[Allocation]) -> list[tuple[Allocation, Allocation]]:
    """Pairs that have bytes in common."""
    return [(a, b) for a, b in itertools.combinations(found, 2) if a.overlaps(b)]
