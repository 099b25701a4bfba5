"""Evaluation of facts: pure functions that return findings, so that tests can simulate every fault."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ringflash.commands.doctor.facts import PACKAGES
from ringflash_kernels.api import TRITON_RELEASES

Facts = dict[str, Any]

_CORE = ("torch", "triton")
_PROJECT = Path(__file__).parents[3] / "pyproject.toml"  # of a clone
NEWEST_TESTED = {  # on CPUs: by CI, but torch by hand
    "torch": "2.15.0", "transformers": "5.24.0", "accelerate": "1.15.0", "trl": "1.16.0", "lightning": "2.6.6",
    "pytorch-lightning": "2.6.6", "deepspeed": "0.19.8", "liger-kernel": "0.8.5",
}  # fmt: skip
_GIB = 1 << 30

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        level: "fault" if training would fail or be wrong, "warning" if it would be slow or nothing can be said.
        remedy: advice for the user; "" for ok.
    """

    level: Level
    what: str
    found: str
    remedy: str = ""


ok, warning, fault = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "fault")


def judge(facts: Facts) -> list[Finding]:
    """Return all findings about the machine of one rank."""
    judges: Sequence[Callable[[Facts], Iterator[Finding]]] = (versions, gpus, links, environment, limits)
    return [finding for each in judges for finding in each(facts)]


def versions(facts: Facts) -> Iterator[Finding]:
    """Compare the versions of packages with the ranges that ringflash declares."""
    for name, allowed in declared_ranges().items():
        found = facts["packages"].get(name)
        if found is None and name in _CORE:
            yield fault(name, "not installed", f"pip install '{name}{allowed}'")
        elif found is None:
            yield ok(name, "not installed; needed only for what uses it")
        elif not allowed.contains(found, prereleases=True):
            yield fault(name, f"{found}, outside {allowed}", f"pip install '{name}{allowed}'")
        elif name == "triton":
            yield _triton(found)
        elif name in NEWEST_TESTED and _minor(found) > _minor(NEWEST_TESTED[name]):
            what = f"{found}, newer than {NEWEST_TESTED[name]}, the newest that was tested"
            yield warning(name, what, "compare a run with one process: ringflash verify")
        else:
            yield ok(name, found)


def _minor(found: str) -> tuple[int, ...]:
    return Version(found).release[:2]


def _triton(found: str) -> Finding:
    """Say what was tested with a release of triton, and its speed. Only Hopper GPUs need it: see `gpus`."""
    known = TRITON_RELEASES.get(".".join(found.split(".")[:2]))
    if known is None:
        return warning("triton", f"{found}, not tested with our kernels", f"use one of {', '.join(TRITON_RELEASES)}")
    return ok("triton", f"{found}; tested on GPUs: {known.tested}; speed relative to 3.6: {known.speed}")


def declared_ranges() -> dict[str, SpecifierSet]:
    """Return the version ranges that the clone it runs from, or the installed ringflash, declares.

    The metadata of an editable installation may be old, and are not read.
    """
    if _PROJECT.exists():
        project = tomllib.loads(_PROJECT.read_text())["project"]
        lines = [*project["dependencies"], *(x for extra in project["optional-dependencies"].values() for x in extra)]
    else:
        lines = requires("ringflash") or []
    requirements = [Requirement(line) for line in lines]
    return {requirement.name: requirement.specifier for requirement in requirements if requirement.name in PACKAGES}


def gpus(facts: Facts) -> Iterator[Finding]:
    """Check the kind and capability of the GPUs, and the requirements of the kernels."""
    if not facts["gpus"]:
        if facts["driver"] is not None:
            built = facts["cuda"] is not None
            remedy = "check CUDA_VISIBLE_DEVICES and the driver" if built else "install a CUDA build of torch"
            yield fault("GPUs", f"driver {facts['driver']}, but torch sees none", remedy)
        else:
            yield warning("GPUs", "none", "the reference kernel on CPUs is for tests; train on Hopper GPUs")
        return
    yield ok("driver", f"{facts['driver']}, CUDA {facts['cuda']}, NCCL {facts['nccl']}")
    names = sorted({gpu["name"] for gpu in facts["gpus"]})
    if len(names) > 1:
        yield warning("GPUs", ", ".join(names), "a ring waits for its slowest rank; use GPUs of one kind")
    lowest = min(tuple(gpu["capability"]) for gpu in facts["gpus"])
    shown = f"{len(facts['gpus'])} x {names[0]}, capability {lowest[0]}.{lowest[1]}"
    if lowest < (8, 0):
        yield fault("GPUs", shown, "flash2 and hopper need capability 8.0 and 9.0; use newer GPUs")
    elif lowest != (9, 0):
        yield warning("GPUs", shown, "impl='hopper' is for capability 9.0; impl='flash2' runs here")
    elif facts["kernel_environment"]:
        yield fault("GPUs", shown, facts["kernel_environment"])
    else:
        yield ok("GPUs", f"{shown}: impl='hopper'")


def links(facts: Facts) -> Iterator[Finding]:
    """Check that the GPUs of this host can access each other's memory; the probe of a ring measures how fast."""
    if len(facts["gpus"]) < 2:
        return
    cut = [(i, j) for i, row in enumerate(facts["peers"]) for j, reached in enumerate(row) if not reached]
    if cut:
        shown = ", ".join(f"{i}-{j}" for i, j in cut[:4]) + (" ..." if len(cut) > 4 else "")
        yield warning(
            "peer access", f"none between GPUs {shown}", "messages go over host memory: check NVLink and IOMMU"
        )
    else:
        yield ok("peer access", "between all GPUs of this host")


_HURTS: dict[str, tuple[Callable[[str], bool], str]] = {
    "NCCL_P2P_DISABLE": (lambda x: x != "0", "messages do not use NVLink; unset it"),
    "NCCL_SHM_DISABLE": (lambda x: x != "0", "messages between GPUs without peer access go over the network; unset it"),
    "NCCL_IB_DISABLE": (
        lambda x: x != "0",
        "messages between hosts go over sockets; unset it where there is InfiniBand",
    ),
    "NCCL_ALGO": (lambda x: True, "NCCL would choose by message size; unset it"),
    "NCCL_PROTO": (lambda x: True, "NCCL would choose by message size; unset it"),
    "NCCL_DEBUG": (lambda x: x.upper() == "TRACE", "every call is written; use INFO or WARN"),
    "CUDA_LAUNCH_BLOCKING": (lambda x: x != "0", "the host waits for every kernel, so that nothing overlaps; unset it"),
    "TORCH_DISTRIBUTED_DEBUG": (lambda x: x.upper() == "DETAIL", "a second collective checks each one; use INFO"),
    "TORCH_NCCL_BLOCKING_WAIT": (lambda x: x != "0", "the host waits for every message; unset it"),
}


def environment(facts: Facts) -> Iterator[Finding]:
    """Check for environment variables that slow training down."""
    here: dict[str, str] = facts["environment"]
    found = [name for name, (hurts, _) in _HURTS.items() if name in here and hurts(here[name])]
    for name in found:
        yield warning("environment", f"{name}={here[name]}", _HURTS[name][1])
    allocator = here.get("PYTORCH_ALLOC_CONF", "") + here.get("PYTORCH_CUDA_ALLOC_CONF", "")  # new and old name
    if facts["gpus"] and "expandable_segments:True" not in allocator:
        remedy = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; long sequences leave large holes"
        yield warning("environment", "no expandable segments", remedy)
    elif not found:
        yield ok("environment", "no harmful variable")
    if int(here.get("WORLD_SIZE", "1")) > 1 and "OMP_NUM_THREADS" not in here:
        remedy = "torchrun sets it to 1; set it to a rank's share of the cores"
        yield warning("environment", "OMP_NUM_THREADS unset", remedy)


def limits(facts: Facts) -> Iterator[Finding]:
    """Check the limits of the operating system."""
    shared = facts["shared_memory_bytes"]
    if shared < _GIB:
        remedy = "NCCL and data loaders need 1 GiB or more: use docker run --shm-size 16g"
        yield warning("/dev/shm", f"{shared / _GIB:.2f} GiB", remedy)
    else:
        yield ok("/dev/shm", f"{shared / _GIB:.0f} GiB")
    if 0 <= facts["open_files"] < 4096:
        remedy = "run ulimit -n 65536: token files and sockets count as files"
        yield warning("open files", str(facts["open_files"]), remedy)
    else:
        yield ok("open files", str(facts["open_files"]))


def differences(ranks: dict[int, Facts]) -> list[Finding]:
    """Report facts that differ between ranks although they should be equal."""
    findings = []
    for what in ("python", "packages", "cuda", "nccl", "driver", "gpus"):
        seen: dict[str, list[int]] = {}
        for rank, facts in sorted(ranks.items()):
            seen.setdefault(repr(facts[what]), []).append(rank)
        if len(seen) > 1:
            shown = "; ".join(f"{value} on {_hosts(ranks, members)}" for value, members in seen.items())
            findings.append(fault(f"{what} of the ranks", shown, "install the same on every host"))
    return findings or [ok("hosts", f"{len({facts['host'] for facts in ranks.values()})}, alike")]


def _hosts(ranks: dict[int, Facts], members: list[int]) -> str:
    names = sorted({ranks[rank]["host"] for rank in members})
    return f"{', '.join(names)} (rank {', '.join(map(str, members))})"
