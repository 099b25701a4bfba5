"""Launch of compiled kernels without triton's inspection of every argument, in a quarter of the host time.

A launch is the call that triton's `JITFunction.run` makes after its inspection, the same in triton 3.6 to 3.9.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton.knobs import runtime
from triton.runtime import driver

_OPTIONS = {
    "enable_fp_fusion": True,  # triton 3.10 will not fuse by default
    # triton asks for level 2, with which the ptxas of 3.9 (13.4) spills registers in loops; earlier ones ignore it.
    "ptx_options": "--regAllocOptLevel=4",
}


class Launch(NamedTuple):
    """A launch: triton's launcher of the compiled kernel, its first arguments, and those of the kernel."""

    run: Any
    head: tuple[Any, ...]
    args: tuple[Any, ...]

    @property
    def is_readable(self) -> bool:
        """True if the launch passes only its arguments to the kernel: triton allocates no scratch memory for it."""
        sizes = (getattr(self.run, name, 1) for name in ("global_scratch_size", "profile_scratch_size"))
        return not any(sizes)

    @property
    def stream(self) -> int:
        """Handle of the stream."""
        return self.head[3]

    def repeat(self, args: Sequence[Any], stream: int | None = None) -> None:
        """Launch with other arguments, by default on the same stream."""
        self.run(*self.head[:3], self.stream if stream is None else stream, *self.head[4:], *args)


class Observer(threading.local):
    """Observer of the launches of a thread; `tell` is given None for the first one of a variant, which triton makes."""

    tell: Callable[[Launch | None], None] | None = None


observer = Observer()


def is_traced() -> bool:
    """Return True if a profiler observes launches."""
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


class Launcher:
    """Callable that launches one kernel and keeps its compiled variants.

    Args:
        kernel: a Gluon or Triton function.
        specialised: let triton specialise on the values of integers and pointers (equal to 1, multiples of 16).
        num_warps: warps of a program.
        max_registers: of a thread, if fewer than ptxas takes.
        ptx_options: further options of ptxas.
    """

    def __init__(
        self,
        kernel: Any,
        *,
        specialised: bool = False,
        num_warps: int = 4,
        max_registers: int | None = None,
        ptx_options: str = "",
    ) -> None:
        self._kernel, self._specialised = kernel, specialised
        self._options = {"num_warps": num_warps, **_OPTIONS}
        if max_registers is not None:
            self._options["maxnreg"] = max_registers
        if ptx_options:
            self._options["ptx_options"] = f"{_OPTIONS['ptx_options']} {ptx_options}"
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, variant: Hashable, num_programs: int, *args: Any, **constants: Any) -> None:
        """Launch on the current stream of the current device, which must be that of the tensors.

        Args:
            variant: key that differs whenever triton would compile differently: dtypes, boxes of descriptors, which
                arguments are None, constants. Integers beyond 32 bits are distinguished here, and the dtypes of
                tensors too if the kernel is specialised.
            args: the kernel's arguments without its constants, which are its last parameters. The first is a tensor or
                a descriptor.
        """
        first = args[0]
        device = (first if isinstance(first, Tensor) else first.base).device.index
        key = (device, variant, _forms(args) if self._specialised else _are_wide(args))
        known = self._compiled.get(key)
        if known is not None:
            compiled, run, constant_values, stream_of = known
            stream = stream_of(device)
            if is_traced():
                compiled[num_programs, 1, 1](*args, *constant_values, stream=stream)
                return
            head = num_programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None
            run(*head, *args, *constant_values)
            if observer.tell is not None:
                observer.tell(Launch(run, head, (*args, *constant_values)))
            return
        if observer.tell is not None:
            observer.tell(None)
        compiled = self._kernel[num_programs,](*args, **constants, **self._options)
        if hasattr(compiled, "packed_metadata"):  # false for the recorder and the emulator of the tests
            names = [parameter.name for parameter in self._kernel.params][len(args) :]
            constant_values = [constants[name] for name in names]
            self._compiled[key] = compiled, compiled.run, constant_values, driver.active.get_current_stream


def _are_wide(args: tuple[Any, ...]) -> bool:
    """Return True if any integer needs more than 32 bits."""
    integers = [x for x in args if type(x) is int]
    return not -(1 << 31) <= min(integers) <= max(integers) < 1 << 31


def _forms(args: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """Return the properties of arguments on which triton specialises. A 1 becomes a constant."""
    return tuple(
        [
            (x == 1, x % 16 == 0, -(1 << 31) <= x < 1 << 31)
            if type(x) is int
            else (x.dtype, x.data_ptr() % 16 == 0)
            if isinstance(x, Tensor)
            else type(x)
            for x in args
        ]
    )
