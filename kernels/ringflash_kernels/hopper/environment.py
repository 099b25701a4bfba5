"""Check of triton and its C compiler before the first launch, with a clear error if one is missing."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

UNTESTED = "RINGFLASH_UNTESTED_TRITON"  # environment variable: the release, such as 3.10, to try untested


class TritonRelease(NamedTuple):
    """A release of triton that the kernels were tested with.

    Args:
        torch: releases of torch that install it.
        tested: tests of the kernels that passed on GPUs with it.
        speed: speed of the kernels, relative to triton 3.6.
    """

    torch: str
    tested: str
    speed: str


# docs/index.md has the same table; docs/decisions/0001-environment.md has the runs.
TRITON_RELEASES = {
    "3.6": TritonRelease("2.11", "all, on H100 and H200", "1: the documents' figures"),
    "3.7": TritonRelease("2.12, 2.13", "backward and FP8, half of the forward, on an H100", "not measured"),
    "3.8": TritonRelease("2.14", "all of bf16, most of fp16, on an H200", "0.89 to 1.04, FP8 0.95 to 1.09"),
    "3.9": TritonRelease(
        "2.15",
        "forward, backward and FP8's backward, on H200s, in part with torch 2.15; 51 cases of every kernel, on an H100",
        "0.96 to 1.06, deterministic 0.98 to 1.11; FP8 0.96 to 1.01",
    ),  # fmt: skip
}
_OLDEST, _NEWEST = list(TRITON_RELEASES)[0], list(TRITON_RELEASES)[-1]


@functools.cache
def check_environment() -> None:
    """Raise RuntimeError unless triton was tested with the kernels, or may be tried, and has the compiler it needs."""
    release = triton_release()
    newer = release is not None and _parts(release) > _parts(_NEWEST)
    may_try = newer and release == os.environ.get(UNTESTED)
    if release not in TRITON_RELEASES and not may_try:
        trial = f" set {UNTESTED}={release} to try this one," if newer else ""
        raise RuntimeError(
            f"triton must be a release that the kernels were tested with ({_OLDEST} to {_NEWEST}) for impl='hopper', "
            f"got {'none' if release is None else version('triton')}; install such a release,{trial} or use "
            "impl='flash2'."
        )
    _check_compiler()


def triton_release() -> str | None:
    """Return the installed release of triton, such as "3.6", or None if there is none."""
    try:
        return ".".join(version("triton").split(".")[:2])
    except PackageNotFoundError:
        return None


def _parts(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


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
