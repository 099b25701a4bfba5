"""The command `ringflash doctor`: is this machine, and every host of the job, fit for a long run?"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich.table import Table

from ringflash.commands.console import console
from ringflash.commands.doctor.facts import collect
from ringflash.commands.doctor.gather import RankMessages, tell_apart, world
from ringflash.commands.doctor.judge import Facts, Finding, differences, fault, judge, ok, warning

_SLOW_GBYTES = {"nccl": 50.0, "copy_engine": 50.0}  # a slower link between GPUs of one host is not NVLink
_SLOW_NIC_GBYTES = 10.0
_SLOW_LANE = 0.7  # as a fraction of the median of all GPUs
_STYLE = {"ok": "green", "warning": "yellow", "fault": "red"}
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]*Error\b")  # last line of a traceback; its source lines are indented


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="time limit of each probe, and for a rank to answer"
    )
    parser.add_argument(
        "--no_probes", action="store_true", help="read versions and settings only; run no kernel and no ring"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> int:
    """Print the findings on the first rank, and return 1 there if one is a fault. Other ranks return 0."""
    if options.seconds <= 0:
        raise ValueError(f"--seconds must be positive, got {options.seconds}; 120 is the default.")
    facts, messages, rank = collect(), RankMessages(options.seconds), world()[0]
    ranks, missing = messages.gather(facts)
    if rank != 0:
        told = messages.instructions()
        join_ring(told.get("ring", {}), rank, options.seconds)
        if rank in told.get("probing", ()):
            messages.send_report([asdict(finding) for finding in probes(facts, options.seconds)])
        return 0
    ranks = tell_apart(ranks)
    findings = examine(ranks, missing)
    ring = {} if options.no_probes or missing else ring_of_hosts(ranks)
    probing = [] if options.no_probes else first_with_their_gpus(ranks)
    messages.send_instructions({"ring": ring, "probing": probing})
    if ring:
        findings += _between_hosts(*join_ring(ring, 0, options.seconds), ring)
    if probing:
        findings += probes_of_all(messages, ranks, probing, options.seconds)
    _print(findings, options.json)
    return int(any(finding.level == "fault" for finding in findings))


def examine(ranks: dict[int, Facts], missing: list[int]) -> list[Finding]:
    """Return the findings from the facts of all ranks: once per host, labelled if there are several hosts."""
    findings: list[Finding] = []
    if missing:
        named = ", ".join(map(str, missing))
        findings = [fault("ranks", f"rank {named} did not answer", "see its log; can its host be reached?")]
    by_host = {facts["host"]: facts for _, facts in sorted(ranks.items(), reverse=True)}
    for host, facts in sorted(by_host.items()):
        label = f"{host}: " if len(by_host) > 1 else ""
        findings += [Finding(x.level, label + x.what, x.found, x.remedy) for x in judge(facts)]
    return findings + (differences(ranks) if len(ranks) > 1 else [])


def first_with_their_gpus(ranks: dict[int, Facts]) -> list[int]:
    """Return, for each host and each set of visible GPUs, the first rank with that set."""
    seen = {
        (facts["host"], facts["environment"].get("CUDA_VISIBLE_DEVICES")): rank
        for rank, facts in sorted(ranks.items(), reverse=True)
    }
    return sorted(seen.values())


def probes_of_all(messages: RankMessages, ranks: dict[int, Facts], probing: list[int], seconds: float) -> list[Finding]:
    """Run the probes of this rank and collect the findings of all probing ranks, labelled if there are several."""
    of_ranks = {0: probes(ranks[0], seconds)}
    hosts = [ranks[rank]["host"] for rank in probing]
    for rank in probing[1:]:
        reported = messages.report_of(rank, seconds * (2 + len(ranks[rank]["gpus"])))
        missing = [fault("probes", f"rank {rank} did not report", "see its log; can its host be reached?")]
        of_ranks[rank] = missing if reported is None else [Finding(**finding) for finding in reported]
    findings = []
    for rank, host in zip(probing, hosts, strict=True):
        alone = hosts.count(host) == 1
        label = "" if len(hosts) == 1 else f"{host}: " if alone else f"{host}, rank {rank}: "
        findings += [Finding(x.level, label + x.what, x.found, x.remedy) for x in of_ranks[rank]]
    for host in sorted({host for host in hosts if hosts.count(host) > 1}):
        remedy = "let a rank see all GPUs of its host, and run doctor again"
        findings.append(warning(f"{host}: ring", "not tried: its ranks see different GPUs", remedy))
    return findings


def probes(facts: Facts, seconds: float) -> list[Finding]:
    """Probe a kernel on every visible GPU, or on the CPU, and a ring over the visible GPUs or two CPU processes."""
    devices = [f"cuda:{i}" for i in range(len(facts["gpus"]))] or ["cpu"]
    return [*(_kernel(device, seconds) for device in devices), *_ring(facts, seconds)]


def ring_of_hosts(ranks: dict[int, Facts]) -> dict[str, Any]:
    """Return the rendezvous for an exchange between hosts; empty on a single host.

    The n-th rank of each host exchanges with the n-th rank of the next host, all at the same time, as rings do that
    span hosts. Hosts with more ranks than the others leave the last ones out.
    """
    of_hosts: dict[str, list[int]] = {}
    for rank, facts in sorted(ranks.items()):
        of_hosts.setdefault(facts["host"], []).append(rank)
    if len(of_hosts) < 2:
        return {}
    lanes = min(map(len, of_hosts.values()))
    with socket.socket() as free:
        free.bind(("", 0))
        return {
            "ranks": [rank for of_host in of_hosts.values() for rank in of_host[:lanes]], "lanes": lanes,
            "hosts": list(of_hosts), "address": os.environ["MASTER_ADDR"], "port": free.getsockname()[1],
        }  # fmt: skip


def join_ring(ring: dict[str, Any], rank: int, seconds: float) -> tuple[dict[str, Any], str]:
    """Take part in the exchange between hosts if this rank is in it; return the result of the probe and its error."""
    if rank not in ring.get("ranks", ()):
        return {}, ""
    place = ring["ranks"].index(rank)
    environment = {
        "RANK": str(place), "WORLD_SIZE": str(len(ring["ranks"])), "LOCAL_RANK": str(place % ring["lanes"]),
        "MASTER_ADDR": ring["address"], "MASTER_PORT": str(ring["port"]),
    }  # fmt: skip
    probe = [sys.executable, "-m", "ringflash.commands.doctor.probe", "ring", str(ring["lanes"])]
    return _probe(probe, seconds, **environment)


def _between_hosts(found: dict[str, Any], error: str, ring: dict[str, Any]) -> Iterator[Finding]:
    """Yield the findings of the ring between hosts: its speed, whether data arrived intact, and slow GPUs."""
    hosts, lanes = ring["hosts"], ring["lanes"]
    what = f"ring over {len(hosts)} hosts"
    if error:
        remedy = "NCCL_DEBUG=INFO prints what NCCL uses; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose it (docs/launch.md)"
        yield fault(what, error, remedy)
        return
    who = f"{lanes} GPUs of each host at once" if lanes > 1 else "one GPU of each host"
    remedy = "a NIC of 100 Gb/s gives 12 GB/s: set NCCL_IB_HCA, check GPUDirect RDMA (docs/hosts.md)"
    yield from _exchanges(found, what, who, {"nccl": _SLOW_NIC_GBYTES}, remedy)
    for transport, exchange in found["exchanges"].items():
        slow = [
            f"GPU {place % lanes} of {hosts[place // lanes]} {speed:.1f}"
            for place, speed in enumerate(exchange["each"])
            if speed < _SLOW_LANE * statistics.median(exchange["each"])
        ]
        if slow:
            shown = f"receive more slowly than the others, GB/s: {', '.join(slow)}"
            yield warning(f"{what}, {transport}, slow", shown, "test its NIC, cable and PCIe link, and the sender's")


def _exchanges(found: dict[str, Any], what: str, who: str, slow: dict[str, float], remedy: str) -> Iterator[Finding]:
    """Yield a finding for each transport: a fault for wrong values, a warning if it is slow."""
    for transport, exchange in found["exchanges"].items():
        shown = f"{exchange['gbytes_per_second']:.1f} GB/s each way{', ' if who else ''}{who}"
        if not exchange["right"]:
            yield fault(f"{what}, {transport}", "the data arrived changed", "do not train here: test links and memory")
        elif exchange["gbytes_per_second"] < slow.get(transport, 0.0):
            yield warning(f"{what}, {transport}", shown, remedy)
        else:
            yield ok(f"{what}, {transport}", shown)


def _kernel(device: str, seconds: float) -> Finding:
    """Run the probe of one device's kernel, and return its finding."""
    what = f"kernel on {device}"
    found, error = _probe([sys.executable, "-m", "ringflash.commands.doctor.probe", "kernel", device], seconds)
    if error:
        return fault(what, error, "run only the probe: python -m ringflash.commands.doctor.probe kernel " + device)
    shown = f"{found['impl']}, error at {found['spent']:.2f} of its budget"
    if not found["spent"] <= 1:
        return fault(what, shown, "this device computes wrongly: try another driver or device, and report it")
    return ok(what, shown)


def _ring(facts: Facts, seconds: float) -> Iterator[Finding]:
    """Probe a ring over gloo on CPUs, NCCL and the copy engine on GPUs; skipped on a single GPU."""
    size = len(facts["gpus"]) or 2
    if size < 2:
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
    found, error = _probe([*launch, "-m", "ringflash.commands.doctor.probe", "ring"], seconds)
    if error:
        remedy = "run only this probe: torchrun ... -m ringflash.commands.doctor.probe ring"
        yield fault(f"ring over {size} ranks", error, remedy)
        return
    remedy = "NVLink gives 200 GB/s and more: check nvidia-smi nvlink --status and NCCL_P2P_*"
    yield from _exchanges(found, f"ring over {size} ranks", "", _SLOW_GBYTES, remedy)
    if found["missing"]:
        what = f"ring over {size} ranks, copy_engine"
        yield warning(what, found["missing"], "transport 'auto' uses NCCL, which is slower while kernels run")


def _probe(command: list[str], seconds: float, **place: str) -> tuple[dict[str, Any], str]:
    """Run a probe and return (its result, its error); all its processes have ended on return.

    Args:
        place: environment variables that make the probe a rank among others.
    """
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    with subprocess.Popen(
        command, env={**clean, **place}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException as stopped:
            for pid in [process.pid, *_descendants(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if isinstance(stopped, subprocess.TimeoutExpired):
                return {}, f"no answer in {seconds:.0f} s"
            raise
    if process.returncode != 0:
        lines = errors.splitlines()
        said = [line for line in lines if _ERROR.match(line)] or lines or ["nothing"]
        return {}, f"exit status {process.returncode}: {said[0].strip()[:300]}"
    results = [line for line in output.splitlines() if line.startswith("{")]  # NCCL_DEBUG=INFO prints other lines
    if not results:  # ranks other than the first print none
        return {}, "exit status 0, and nothing printed"
    return json.loads(results[-1]), ""


def _descendants(pid: int) -> list[int]:
    """Return the descendants of a process; torchrun starts its own in new sessions, so a group signal misses them."""
    children: list[int] = []
    with suppress(OSError):  # the process has ended in the meantime
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, file.read_text().split())
    return [*children, *(below for child in children for below in _descendants(child))]


def _print(findings: list[Finding], as_json: bool) -> None:
    """Print the findings and the verdict, as a table or as JSON."""
    worst = next((level for level in ("fault", "warning") if any(x.level == level for x in findings)), "ok")
    if as_json:
        print(json.dumps({"verdict": worst, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return
    table = Table("", "what", "found", "remedy")
    for finding in findings:
        style = _STYLE[finding.level]
        table.add_row(f"[{style}]{finding.level}[/]", finding.what, finding.found, finding.remedy)
    out = console()
    out.print(table)
    out.print(f"[{_STYLE[worst]}]{worst}[/]")
