"""Check of triton and its C compiler before the first launch, with a clear error if one is missing."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FIRST_TRITON, END_TRITON = (3, 6), (3, 10)


@functools.cache
def check_environment() -> None:
    """Raise RuntimeError unless triton is a release that the kernels were verified on and has the compiler it needs."""
    release = _triton_release()
    if release is None or not FIRST_TRITON <= release < END_TRITON:
        got = "none" if release is None else version("triton")
        raise RuntimeError(
            f"triton must be at least {_dotted(FIRST_TRITON)} and below {_dotted(END_TRITON)} for impl='hopper', "
            f"got {got}; install such a release or use impl='flash2'."
        )
    _check_compiler()


def _check_compiler() -> None:
    """Raise RuntimeError unless triton can compile its access to the driver, and with 3.6 the launcher of a kernel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler is None or shutil.which(compiler) is None:
        raise RuntimeError(
            f"triton {version('triton')} must find a C compiler to launch kernels, got CC={compiler!r} and neither gcc "
            "nor clang on PATH; install gcc, set CC, or use impl='flash2'."
        )
    if not header.exists():
        raise RuntimeError(
            f"triton {version('triton')} must find Python's C header to launch kernels, got no {header}; install "
            "python3-dev (python3-devel), or use impl='flash2'."
        )


def _triton_release() -> tuple[int, ...] | None:
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return None


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
