"""Prints what every production kernel compiles to, for CI.

python -m tests.compile.report [--jobs N] [--only TEXT]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterable, Iterator

from tests.compile.compiler import Compiled, Launch, compile_launch
from tests.compile.variants import production_launches

_OPCODES = ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "MUFU", "BAR", "LDL", "STL")


def compile_all(launches: list[Launch], jobs: int | None = None) -> Iterator[Compiled]:
    """Compile in parallel; results in the order of `launches`."""
    jobs = min(len(launches), jobs or len(os.sched_getaffinity(0)))
    if jobs == 1:
        yield from map(compile_launch, launches)
        return
    global _pending
    _pending = launches  # inherited by the workers: kernels cannot be pickled
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_compile_pending, range(len(launches)))


_pending: list[Launch] = []


def _compile_pending(index: int) -> Compiled:
    return compile_launch(_pending[index])


def table(compiled: Iterable[Compiled]) -> Iterator[str]:
    """Lines of the report: resources, spilled bytes, spills of the worst loop without mask, opcode counts, seconds."""
    yield (
        f"{'kernel':<18} {'variant':<40} {'smem':>7} {'regs':>4} {'spill':>6} {'loop':>5} "
        + " ".join(f"{name:>8}" for name in _OPCODES)
        + f" {'seconds':>8}"
    )
    for result in compiled:
        in_loops = max((loop.spills_off_the_mask for loop in result.program.unmasked_loops), default=0)
        yield (
            f"{result.name:<18} {result.variant:<40} {result.shared_bytes:>7} {result.registers:>4} "
            f"{result.spill_bytes:>6} {in_loops:>5} "
            + " ".join(f"{result.program.counts[name]:>8}" for name in _OPCODES)
            + f" {result.seconds:>8.1f}"
        )
        yield from (f"    ptxas: {warning}" for warning in result.warnings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, help="compilations at a time; default one for each CPU")
    parser.add_argument("--only", default="", help="compile the variants whose name contains this text")
    arguments = parser.parse_args()
    launches = [x for x in production_launches() if arguments.only in f"{x.name} {x.variant}"]
    for line in table(compile_all(launches, arguments.jobs)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
