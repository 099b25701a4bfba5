"""A CPU emulator of Hopper Gluon kernels: the kernels' own source, run on numpy, with the hardware's rules checked.

How to use it:

    emulator = Emulator(seed=0)                    # the seed decides how partitions and copies interleave
    forward = emulator.load("forward.host")        # ringflash_kernels/hopper/forward/host.py, on emulated names
    with cuda_properties(num_sms=2):               # tests.emulator.host: answers what launchers ask of CUDA
        forward.forward(q, k, v, mask, scale, out=out, lse=lse)    # CPU torch tensors, the real launcher

    emulator.load("forward.kernel").some_kernel[(grid,)](descriptor, tensor, 3, BLOCK=64, num_warps=4)  # one kernel

    Emulator(faults=[("forward.kernel", "row < stop", "row <= stop")])    # plant a fault in a module's source

`load` executes a module of the hopper package, and whatever it imports from that package, with `triton` replaced
by `tests.emulator.language`; nothing else about the module changes. `TensorDescriptor` is emulated too, so that
launchers build their real arguments. A kernel that does what is undefined on the device, or hangs, raises
`EmulationError` with the partition in which it happened and, for a hang, what every partition waits for.

What is modelled, and what is not: docs/decisions/emulator.md.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace

import torch
import triton

from ringflash_kernels.hopper.compat import gl as real_gl
from tests.emulator import language, memory
from tests.emulator.memory import Block, TensorDescriptor
from tests.emulator.scheduler import Scheduler
from tests.emulator.values import EmulationError, Pointer, Tensor

_PACKAGE = "ringflash_kernels.hopper"
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "ptx_options")
# compat's own wrappers of compiler operations
_BUILTINS = {"tma_reduce_add": memory.tma_reduce_add, "reinterpret": memory.SharedMemory.reinterpret}

__all__ = ["EmulationError", "Emulator", "TensorDescriptor"]


class Kernel:
    """A function under `gluon.jit`: called from device code, or launched as `kernel[grid](...)`."""

    def __init__(self, emulator: Emulator, function) -> None:
        self.emulator, self.fn, self.__name__ = emulator, function, function.__name__
        code = function.__code__
        self.arg_names = list(code.co_varnames[: code.co_argcount])
        annotations = function.__annotations__
        self._constexpr = [_is_constexpr(annotations.get(name)) for name in self.arg_names]

    def __call__(self, *args, **kwargs):
        for value, name, is_constexpr in zip(args, self.arg_names, self._constexpr, strict=False):
            if is_constexpr and isinstance(value, Tensor):
                raise EmulationError(f"{self.__name__}: the constexpr {name} gets the run-time value {value}")
        return self.fn(*args, **kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, **kwargs) -> None:
            self.emulator.launch(self, grid, *args, **kwargs)

        return launch

    def host_arguments(self, args, kwargs) -> list:
        """Launch arguments in order, run-time numbers and tensors as the device sees them."""
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        defaults = self.fn.__defaults__ or ()
        values = dict(zip(self.arg_names[len(self.arg_names) - len(defaults) :], defaults, strict=True)) | values
        missing = [name for name in self.arg_names if name not in values]
        unknown = [name for name in values if name not in self.arg_names]
        assert not missing and not unknown, f"{self.__name__}: missing {missing}, unknown {unknown}"
        pairs = zip(self.arg_names, self._constexpr, strict=True)
        return [values[name] if is_constexpr else _to_device(values[name]) for name, is_constexpr in pairs]


def _is_constexpr(annotation) -> bool:
    return annotation is language.constexpr or (isinstance(annotation, str) and annotation.endswith("constexpr"))


def _to_device(value):
    if isinstance(value, torch.Tensor):
        return Pointer.to_tensor(value)
    if isinstance(value, bool):
        return Tensor(value, real_gl.int1)
    if isinstance(value, int):
        return Tensor(value, real_gl.int32 if -(2**31) <= value < 2**31 else real_gl.int64)
    if isinstance(value, float):
        return Tensor(value, real_gl.float32)
    if isinstance(value, tuple):
        items = [_to_device(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class Emulator:
    """Loads hopper modules on emulated names and runs their kernels.

    Args:
        seed: of the interleaving; a correct kernel gives the same result for every seed, up to the order of
            reductions.
        resident: thread blocks that run at the same time.
        faults: (module, old, new) substitutions in the source of a module, each of which must apply.
    """

    def __init__(self, seed: int = 0, *, resident: int = 2, faults: Iterable[tuple[str, str, str]] = ()) -> None:
        self.seed, self.resident, self.faults = seed, resident, list(faults)
        self._modules: dict[str, ModuleType] = {}
        self._builtins = dict(vars(builtins), __import__=self._import, range=_range)
        self._triton = self._emulated_triton()

    def load(self, name: str, path: Path | None = None) -> ModuleType:
        """Execute module `name` of the hopper package (or the file at `path`) on emulated names."""
        if name not in self._modules:
            path = path or Path(_package_path(), *name.split(".")).with_suffix(".py")
            module = ModuleType(f"emulated_{name}")
            module.__file__ = str(path)
            module.__package__ = _PACKAGE
            module.__builtins__ = self._builtins
            self._modules[name] = sys.modules[module.__name__] = module  # dataclasses look their module up
            exec(_code(self._source(name, path), str(path)), module.__dict__)
        return self._modules[name]

    def launch(self, kernel: Kernel, grid, *args, **kwargs) -> None:
        """Run `kernel` over `grid` on CPU tensors."""
        num_warps = kwargs.get("num_warps", 4)
        meta = {name: value for name, value in kwargs.items() if name not in _LAUNCH_OPTIONS}
        grid = grid(meta) if callable(grid) else grid
        grid = (*grid, 1, 1)[:3]
        arguments = kernel.host_arguments(args, meta)
        scheduler = Scheduler(self.seed)
        coordinates = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        blocks = [
            language.partition_body(Block(scheduler, where, grid), num_warps, kernel, arguments)
            for where in coordinates
        ]
        scheduler.run(blocks, self.resident)

    def _source(self, name: str, path: Path) -> str:
        source = path.read_text()
        for module, old, new in self.faults:
            if module == name:
                if old not in source:
                    raise ValueError(f"fault does not apply: {old!r} is not in {path.name}; plant what is there now")
                source = source.replace(old, new)
        return source

    def _jit(self, function=None, **_):
        return Kernel(self, function) if function is not None else lambda f: Kernel(self, f)

    def _emulated_triton(self) -> dict[str, object]:
        """Emulated modules by name; compat.py and plain Triton kernels import from these."""
        gluon = SimpleNamespace(jit=self._jit, language=language.gl, constexpr_function=lambda f: f)
        hopper = SimpleNamespace(
            tma=language.tma, mbarrier=language.mbarrier, fence_async_shared=language.fence_async_shared,
            warpgroup_mma=language.warpgroup_mma, warpgroup_mma_wait=language.warpgroup_mma_wait,
        )  # fmt: skip
        base = "triton.experimental.gluon"
        return {
            "triton": SimpleNamespace(
                jit=self._jit, language=language.gl, cdiv=triton.cdiv, next_power_of_2=triton.next_power_of_2,
                __version__=triton.__version__,
            ),
            "triton.language": language.gl,
            "triton.language.core": SimpleNamespace(_aggregate=lambda cls: cls),
            "triton.experimental": SimpleNamespace(gluon=gluon),
            base: gluon,
            f"{base}.language": language.gl,
            f"{base}.language._core": SimpleNamespace(builtin=lambda f: _BUILTINS.get(f.__name__, f)),
            f"{base}.language.nvidia.hopper": hopper,
            f"{base}.nvidia.hopper": SimpleNamespace(TensorDescriptor=TensorDescriptor),
        }  # fmt: skip

    def _import(self, name, globals=None, locals=None, fromlist=(), level=0):
        if level:
            name = importlib.util.resolve_name("." * level + name, _PACKAGE)
        if name == _PACKAGE and fromlist:
            return SimpleNamespace(**{item: self.load(item) for item in fromlist})
        if name.startswith(_PACKAGE + "."):
            module = name.removeprefix(_PACKAGE + ".")
            if Path(_package_path(), *module.split(".")).is_dir():
                return SimpleNamespace(**{item: self.load(f"{module}.{item}") for item in fromlist})
            return self.load(module)
        if name in self._triton:
            return self._triton[name if fromlist else name.split(".")[0]]
        return builtins.__import__(name, globals, locals, fromlist, 0)


@functools.cache
def _code(source: str, path: str) -> CodeType:
    return compile(source, path, "exec")


def _package_path() -> str:
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    return next(iter(spec.submodule_search_locations))


def _range(*bounds):
    """`range` as emulated modules see it: run-time counters in device code, Python's own on the host."""
    on_device = hasattr(threading.current_thread(), "partition")
    return language.device_range(*bounds) if on_device else range(*bounds)
