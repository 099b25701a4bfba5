"""Compiles for sm_90a what the launchers would launch, without a GPU.

`recorded_launches` lets the production launchers run on CPU tensors and notes each kernel launch: the very
signature, constants and alignments that a launch on the device would compile. `compile_launch` then takes one
through Triton and the bundled ptxas.
"""

from __future__ import annotations

import contextlib
import gc
import io
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.compile.sass import Program
from tests.emulator.host import cuda_properties

TARGET = GPUTarget("cuda", 90, 32)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass
class Launch:
    """One kernel as it would be compiled for a launch."""

    kernel: JITFunction
    variant: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same code."""
        return repr((self.name, self.signature, self.constants, self.attributes, self.options))


@dataclass
class Compiled:
    """Result of a compilation."""

    name: str
    variant: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    warnings: list[str]
    sass: str = field(repr=False)
    ttgir: str = field(repr=False)
    seconds: float

    @cached_property
    def program(self) -> Program:
        """The SASS, read."""
        return Program(self.sass)


class Recorder:
    """Collects launches; `variant` labels those that follow."""

    def __init__(self) -> None:
        self.launches: dict[str, Launch] = {}
        self.variant = ""
        self._backend = make_backend(TARGET)

    def record(self, kernel: JITFunction, *args, grid=None, warmup=False, **kwargs) -> SimpleNamespace:
        """Stands in for JITFunction.run."""
        kwargs["debug"] = kwargs.get("debug", False)
        bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        bound, specialization, options = bind(*args, **kwargs)
        _, signature, constants, attributes = kernel._pack_args(self._backend, kwargs, bound, specialization, options)
        launch = Launch(kernel, self.variant, signature, constants, attributes, dict(options))
        self.launches.setdefault(launch.key, launch)
        return SimpleNamespace()


@contextlib.contextmanager
def recorded_launches() -> Iterator[Recorder]:
    """Note kernel launches instead of running them; CPU tensors pass for device tensors."""
    recorder = Recorder()
    driver = SimpleNamespace(
        get_current_target=lambda: TARGET, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    triton.runtime.driver.set_active(driver)

    def run(kernel, *args, **kwargs):
        return recorder.record(kernel, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", run), cuda_properties(132):
        yield recorder
    triton.runtime.driver._active = None


def compile_launch(launch: Launch) -> Compiled:
    """Compile one launch for sm_90a, afresh, and disassemble it."""
    source_type = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = source_type(launch.kernel, launch.signature, launch.constants, launch.attributes)
    output = io.StringIO()
    started = time.perf_counter()
    with (
        _without_collecting_garbage(),  # which takes a seventh of the time
        tempfile.TemporaryDirectory() as cache,
        mock.patch.object(triton.knobs.cache, "dir", cache),
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
        contextlib.redirect_stdout(output),
    ):
        compiled = triton.compile(source, target=TARGET, options=launch.options)
    seconds = time.perf_counter() - started
    log = output.getvalue()
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert spills and registers, f"no resource usage in the log of ptxas: {log!r}"
    return Compiled(
        launch.name,
        launch.variant,
        compiled.metadata.shared,
        int(registers[1]),
        int(spills[1]) + int(spills[2]),
        sorted({line.strip() for line in log.splitlines() if re.search(r"\(C75\d\d\)|wgmma", line)}),
        disassemble(compiled.asm["cubin"]),
        compiled.asm["ttgir"],
        seconds,
    )


@contextlib.contextmanager
def _without_collecting_garbage() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin, by Triton's disassembler."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_TOOLS / "nvdisasm", "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
