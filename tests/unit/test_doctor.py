"""doctor's judgements on planted facts, its probes, and its command where it must say ok and where not.

One process, and two gloo processes for the ring and for ranks that answer, or do not. No GPU.
"""

import json
import os
import platform
import select
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ringflash.comm import group as comm_group
from ringflash.comm.group import this_host
from ringflash.commands.cli import main
from ringflash.commands.doctor import command, probe
from ringflash.commands.doctor.command import _kernel, _probe, _ring, examine
from ringflash.commands.doctor.facts import collect
from ringflash.commands.doctor.gather import tell_apart
from ringflash.commands.doctor.judge import declared_ranges, differences, judge
from ringflash_kernels.api import TRITON_RELEASES
from tests.helpers.ranks import run_ranks

GPU = {"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 150 << 30}
HEALTHY: dict[str, Any] = {
    "host": "a", "boot": "1a", "python": "3.12.3", "cuda": "13.0", "nccl": "2.28.9", "driver": "580.1",
    "gpus": [GPU] * 2,
    "packages": {
        "torch": "2.11.0", "triton": "3.6.0", "lightning": "2.6.6", "pytorch-lightning": "2.6.6",
        "deepspeed": "0.19.8", "transformers": "5.17.0", "accelerate": "1.15.0", "trl": "1.16.0",
        "liger-kernel": "0.8.5", "megatron-core": "0.19.2", "torchtitan": "0.3.0",
    },
    "peers": [[True, True], [True, True]], "kernel_environment": "",
    "shared_memory_bytes": 16 << 30,
    "environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "open_files": 65536,
}  # fmt: skip


def said(**changed: Any) -> list[tuple[str, str, str]]:
    """Return what is not ok about a healthy machine with these changes."""
    findings = judge({**HEALTHY, **changed})
    assert all(bool(x.remedy) == (x.level != "ok") for x in findings)
    return [(x.level, x.what, x.found) for x in findings if x.level != "ok"]


def packages(**versions: str) -> dict[str, str]:
    return {**HEALTHY["packages"], **{name.replace("_", "-"): version for name, version in versions.items()}}


def test_a_healthy_machine_is_ok() -> None:
    assert said() == []
    assert {x.what for x in judge(HEALTHY)} >= {"torch", "GPUs", "peer access", "environment", "/dev/shm", "open files"}


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch", "2.9.0"), ("triton", "3.5.1"), ("lightning", "2.6.2"),
        ("pytorch_lightning", "2.6.3"), ("deepspeed", "0.18.0"), ("transformers", "4.57.0"), ("liger_kernel", "0.7.0"),
    ],
)  # fmt: skip
def test_a_version_outside_its_range_is_a_fault(name: str, version: str) -> None:
    ((level, what, found),) = said(packages=packages(**{name: version}))
    assert (level, what) == ("fault", name.replace("_", "-")) and found.startswith(f"{version}, outside")


def test_version_newer_than_tested_is_a_warning() -> None:
    """Not a patch of one (transformers 5.24 was wrong within the declared range), a local or a development version."""
    assert said(packages=packages(torch="2.15.9+cu132", transformers="5.24.1")) == []
    assert said(packages=packages(torch="2.13.0+cpu", triton="3.7.0.dev1")) == []
    (line,) = said(packages=packages(transformers="5.99.0"))
    assert line == ("warning", "transformers", "5.99.0, newer than 5.24.0, the newest that was tested")


def test_triton_is_shown_with_what_is_known_of_it() -> None:
    ((level, what, found),) = said(packages=packages(triton="3.99.0"))
    assert (level, what, found) == ("warning", "triton", "3.99.0, not tested with our kernels")
    (line,) = (x.found for x in judge(HEALTHY) if x.what == "triton")
    assert line == "3.6.0; tested on GPUs: {}; speed relative to 3.6: {}".format(*TRITON_RELEASES["3.6"][1:])


def test_only_a_missing_core_package_is_a_fault() -> None:
    rest = {k: v for k, v in HEALTHY["packages"].items() if k not in ("torch", "deepspeed")}
    assert said(packages=rest) == [("fault", "torch", "not installed")]


@pytest.mark.parametrize(
    ("changed", "level", "what", "found"),
    [
        ({"gpus": [], "peers": [], "driver": None, "cuda": None}, "warning", "GPUs", "none"),
        ({"gpus": [], "peers": [], "cuda": None}, "fault", "GPUs", "torch sees none"),
        ({"gpus": [GPU, {**GPU, "name": "NVIDIA H100"}]}, "warning", "GPUs", "NVIDIA H100, NVIDIA H200"),
        ({"gpus": [{**GPU, "capability": [7, 5]}] * 2}, "fault", "GPUs", "capability 7.5"),
        ({"gpus": [{**GPU, "capability": [8, 0]}] * 2}, "warning", "GPUs", "capability 8.0"),
        ({"gpus": [{**GPU, "capability": [10, 0]}] * 2}, "warning", "GPUs", "capability 10.0"),
        ({"kernel_environment": "triton 3.6.0 must find a C compiler"}, "fault", "GPUs", "capability 9.0"),
        ({"peers": [[True, False], [True, True]]}, "warning", "peer access", "none between GPUs 0-1"),
        ({"environment": {}}, "warning", "environment", "no expandable segments"),
        ({"shared_memory_bytes": 64 << 20}, "warning", "/dev/shm", "0.06 GiB"),
        ({"open_files": 1024}, "warning", "open files", "1024"),
    ],
)
def test_each_fault_is_seen(changed: dict[str, Any], level: str, what: str, found: str) -> None:
    ((got_level, got_what, got_found),) = said(**changed)
    assert (got_level, got_what) == (level, what) and found in got_found


@pytest.mark.parametrize(
    ("name", "value", "hurts"),
    [
        ("NCCL_P2P_DISABLE", "1", True), ("NCCL_P2P_DISABLE", "0", False), ("NCCL_ALGO", "Ring", True),
        ("NCCL_DEBUG", "TRACE", True), ("NCCL_DEBUG", "WARN", False), ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True), ("NCCL_SOCKET_IFNAME", "eth0", False),
    ],
)  # fmt: skip
def test_variables_that_hurt(name: str, value: str, hurts: bool) -> None:
    """The newer name of the allocator's variable counts, too."""
    for allocator in (*HEALTHY["environment"], "PYTORCH_ALLOC_CONF"):
        got = said(environment={allocator: "expandable_segments:True", name: value})
        assert got == ([("warning", "environment", f"{name}={value}")] if hurts else [])


def test_ranges_are_those_of_the_project() -> None:
    ranges = declared_ranges()
    assert "2.6.6" in ranges["lightning"] and "2.6.2" not in ranges["lightning"]
    assert ranges.keys() == HEALTHY["packages"].keys()


def test_ranges_of_a_clone_go_before_those_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An editable installation of an older commit had older ranges."""
    lines = [f"{name}>=1" for name in HEALTHY["packages"]]
    monkeypatch.setattr("ringflash.commands.doctor.judge.requires", Mock(return_value=lines))
    test_ranges_are_those_of_the_project()
    monkeypatch.setattr("ringflash.commands.doctor.judge._PROJECT", tmp_path / "pyproject.toml")  # as of a wheel
    assert {str(x) for x in declared_ranges().values()} == {">=1"}


def test_hosts_that_differ_are_named() -> None:
    other = {**HEALTHY, "host": "b", "packages": packages(torch="2.12.0")}
    (finding,) = differences({0: HEALTHY, 1: other, 2: other})
    assert finding.level == "fault" and finding.what == "packages of the ranks"
    assert "on a (rank 0)" in finding.found and "on b (rank 1, 2)" in finding.found
    (finding,) = differences({0: HEALTHY, 1: {**HEALTHY, "host": "b"}})
    assert (finding.level, finding.found) == ("ok", "2, alike")


def test_hosts_of_one_name_differ_by_their_boots() -> None:
    """Hosts made from one image; and containers of one host, whose names differ."""
    told = tell_apart({0: {**HEALTHY, "host": "node", "boot": "1a"}, 1: {**HEALTHY, "host": "node", "boot": "2b"}})
    assert [facts["host"] for facts in told.values()] == ["node (1a)", "node (2b)"]
    (finding,) = differences(told)
    assert finding.found == "2, alike"
    names = ("a", "b", "b")
    told = tell_apart({rank: {**HEALTHY, "host": name, "boot": "1a"} for rank, name in enumerate(names)})
    assert tuple(facts["host"] for facts in told.values()) == names


def test_a_system_without_a_boots_id_has_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert len(this_host().boot) == 8 and str(this_host()) == f"{platform.node()} ({this_host().boot})"
    monkeypatch.setattr(comm_group, "_BOOT_ID", tmp_path / "none")
    assert str(this_host()) == platform.node()


def test_hosts_are_judged_once_missing_ranks_named() -> None:
    sick = {**HEALTHY, "host": "b", "open_files": 10}
    findings = examine({0: HEALTHY, 1: sick, 2: sick}, missing=[3, 5])
    assert findings[0].level == "fault" and findings[0].found == "rank 3, 5 did not answer"
    assert [x.what for x in findings if x.level == "warning"] == ["b: open files"]


def test_this_machine_has_facts_of_the_same_form() -> None:
    facts = collect()
    assert facts.keys() == HEALTHY.keys() and json.loads(json.dumps(facts)) == facts
    assert torch.__version__.startswith(facts["packages"]["torch"])  # which may leave out "+cu130"


def test_command_exits_with_1_for_a_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--no_probes", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] in ("ok", "warning") and all(x["level"] != "fault" for x in said["findings"])
    monkeypatch.setattr(command, "collect", lambda: {**HEALTHY, "packages": packages(lightning="2.6.2")})
    assert main(["doctor", "--no_probes"]) == 1
    assert "2.6.2" in capsys.readouterr().out
    assert main(["doctor", "--seconds", "0"]) == 2
    assert "--seconds must be positive, got 0.0" in capsys.readouterr().err


def test_probes_try_a_kernel_and_a_ring(capsys: pytest.CaptureFixture[str]) -> None:
    """The user's command on CPUs: the reference kernel, and two gloo ranks."""
    assert main(["doctor", "--json"]) == 0
    said = {x["what"]: x for x in json.loads(capsys.readouterr().out)["findings"]}
    assert said["kernel on cpu"]["found"].startswith("reference, error at 0.")
    assert said["ring over 2 ranks, gloo"]["found"].endswith("GB/s each way")


@pytest.mark.parametrize("spent", [40.0, float("nan")])
def test_a_kernel_that_computes_wrongly_is_a_fault(monkeypatch: pytest.MonkeyPatch, spent: float) -> None:
    monkeypatch.setattr(command, "_probe", lambda *_: ({"impl": "hopper", "spent": spent}, ""))
    assert _kernel("cuda:3", 1.0).level == "fault"


def test_rings_are_judged_by_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges = {
        "nccl": {"gbytes_per_second": 12.0, "right": True}, "copy_engine": {"gbytes_per_second": 360.0, "right": False},
    }  # fmt: skip
    monkeypatch.setattr(command, "_probe", lambda *_: ({"exchanges": exchanges, "missing": ""}, ""))
    assert [(x.what, x.level) for x in _ring({"gpus": ["H200"] * 4}, 1.0)] == [
        ("ring over 4 ranks, nccl", "warning"), ("ring over 4 ranks, copy_engine", "fault"),
    ]  # fmt: skip
    found = {"exchanges": {"nccl": {"gbytes_per_second": 170.0, "right": True}}, "missing": "pidfd_getfd refused"}
    monkeypatch.setattr(command, "_probe", lambda *_: (found, ""))
    assert [(x.level, x.found) for x in _ring({"gpus": ["H200"] * 2}, 1.0)] == [
        ("ok", "170.0 GB/s each way"), ("warning", "pidfd_getfd refused"),
    ]  # fmt: skip


def test_a_probe_measures_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with a wrong scale spends far more than its budget."""
    attention = probe.ringflash.ring_attention
    monkeypatch.setattr(probe.ringflash, "ring_attention", lambda *a, **k: attention(*a, **k, softmax_scale=0.05))
    assert probe.kernel(torch.device("cpu"))["spent"] > 10


RANK = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(3600)"
SPAWN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RANK!r}, sys.argv[1]], start_new_session=True)"
LOGS = "print('NCCL INFO cudaDriverVersion'); print('{\"a\": 1}'); print('NCCL INFO comm 0x1 - Destroy COMPLETE')"


@pytest.mark.parametrize("code", [RANK, SPAWN])
def test_a_probe_that_hangs_is_ended(code: str, tmp_path: Path) -> None:
    """With processes in other sessions, as torchrun starts them: they hold the pipe, and the GPU."""
    seconds = 4.0  # in which the process that hangs writes its number
    assert _probe([sys.executable, "-c", code, str(tmp_path / "pid")], seconds) == ({}, "no answer in 4 s")
    with suppress(ProcessLookupError):
        left = os.pidfd_open(int((tmp_path / "pid").read_text()))
        assert select.select([left], [], [], 10.0)[0] == [left]  # ready when the process has ended


def test_a_probe_is_heard(tmp_path: Path) -> None:
    """Errors, silence, and a result among the logs that NCCL writes to stdout under NCCL_DEBUG=INFO."""
    program = tmp_path / "fails.py"  # whose lines are in the traceback
    program.write_text("raise RuntimeError('no device')")
    assert _probe([sys.executable, str(program)], 30.0)[1] == "exit status 1: RuntimeError: no device"
    assert _probe([sys.executable, "-c", "pass"], 30.0) == ({}, "exit status 0, and nothing printed")
    assert _probe([sys.executable, "-c", LOGS], 30.0) == ({"a": 1}, "")


HOSTS = """
import os, runpy, sys
from ringflash.commands.doctor import command
facts = command.collect()
command.collect = lambda: {**facts, "host": f"host{int(os.environ['RANK']) // 2}"}
command.probes = lambda facts, seconds: [command.ok("kernel", facts["host"])]
sys.argv = ["ringflash", "doctor", "--json", "--seconds", "60"]
runpy.run_module("ringflash", run_name="__main__")
"""


def test_hosts_exchange_under_torchrun(tmp_path: Path) -> None:
    """Four ranks that say they are on two hosts: all exchange, the first of each probe, only the first rank prints."""
    (tmp_path / "hosts.py").write_text(HOSTS)
    output = run_ranks(tmp_path / "hosts.py", num_ranks=4)
    found = {x["what"]: x for x in json.loads(output[output.index("{") : output.rindex("}") + 1])["findings"]}
    assert found["ring over 2 hosts, gloo"]["found"].endswith("GB/s each way, 2 GPUs of each host at once")
    assert found["ring over 2 hosts, gloo"]["level"] == "ok"  # and the values were those of the other host
    assert [found[f"{host}: kernel"]["found"] for host in ("host0", "host1")] == ["host0", "host1"]
    assert found["hosts"]["found"] == "2, alike" and "ranks" not in found


def test_every_gpu_of_every_host_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of a host that see a GPU each, two of another that see all, and one of a third, which is silent."""

    def rank(host: str, **environment: str) -> dict[str, Any]:
        return {"host": host, "gpus": [GPU], "environment": environment}

    ranks = {0: rank("a", CUDA_VISIBLE_DEVICES="0"), 1: rank("a", CUDA_VISIBLE_DEVICES="1"), 2: rank("b")}
    ranks |= {3: rank("b"), 4: rank("c")}
    probing = command.first_with_their_gpus(ranks)
    assert probing == [0, 1, 2, 4]

    class RankMessages:
        def report_of(self, rank: int, seconds: float) -> Any:
            assert seconds == 30
            return None if rank == 4 else [asdict(command.fault("kernel", f"by {rank}", "x"))]

    monkeypatch.setattr(command, "probes", lambda facts, seconds: [command.ok("kernel", "by 0")])
    found = command.probes_of_all(RankMessages(), ranks, probing, 10)  # type: ignore[arg-type]
    assert [(x.level, x.what, x.found) for x in found] == [
        ("ok", "a, rank 0: kernel", "by 0"), ("fault", "a, rank 1: kernel", "by 1"), ("fault", "b: kernel", "by 2"),
        ("fault", "c: probes", "rank 4 did not report"),
        ("warning", "a: ring", "not tried: its ranks see different GPUs"),
    ]  # fmt: skip


def test_rings_of_hosts_are_judged() -> None:
    ring = {"hosts": ["a", "b", "c", "d"], "lanes": 2}

    def judged(gbytes: float, right: bool = True, error: str = "", slow: float = 0.0) -> list[tuple[str, str]]:
        each = [gbytes] * 5 + [slow or gbytes] + [gbytes] * 2
        exchange = {"gbytes_per_second": min(each), "each": each, "right": right}
        found = list(command._between_hosts({"exchanges": {"nccl": exchange}}, error, ring))
        assert all(("GPU 1 of c" in x.found) == ("slow" in x.what) for x in found)
        return [(x.what, x.level) for x in found]

    assert judged(40.0) == [("ring over 4 hosts, nccl", "ok")]
    assert judged(4.0) == [("ring over 4 hosts, nccl", "warning")]
    assert judged(40.0, slow=20.0) == [("ring over 4 hosts, nccl", "ok"), ("ring over 4 hosts, nccl, slow", "warning")]
    assert judged(40.0, right=False) == [("ring over 4 hosts, nccl", "fault")]
    assert judged(40.0, error="no answer in 120 s") == [("ring over 4 hosts", "fault")]


def test_one_host_has_no_ring_of_hosts() -> None:
    assert command.ring_of_hosts({0: {"host": "a"}, 1: {"host": "a"}}) == {}
    assert command.join_ring({}, 1, 1.0) == ({}, "")


SILENT = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(6)
else:
    from ringflash.commands.cli import main
    print("status", main(["doctor", "--no_probes", "--json", "--seconds", "3"]))
"""


def test_silent_ranks_are_named_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(SILENT)
    printed = run_ranks(tmp_path / "silent.py", num_ranks=2)
    assert "rank 1 did not answer" in printed and "status 1" in printed
