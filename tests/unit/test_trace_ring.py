"""benchmarks/trace_ring.py: sections of a made-up trace of a GPU, and of a real one of two CPU processes over gloo."""

import json
from pathlib import Path

from benchmarks.trace_ring import Section, after_mark, sections, timeline
from tests.recipes import launching


def event(category: str, name: str, begin: float, end: float) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


def test_made_up_trace() -> None:
    """Copies overlap each other and a kernel; of the gap from 10 to 20 they cover 12 to 18."""
    range_, host, copy = "gpu_user_annotation", "user_annotation", "gpu_memcpy"
    trace = [
        {"ph": "M", "name": "process_name"},
        event(host, "ringflash::forward_section0", 0, 1),
        event(range_, "ringflash::forward_section1", 20, 50),
        event(range_, "ringflash::forward_section0", 0, 10),
        event(copy, "Memcpy PtoP (Device -> Device)", 12, 17),
        event("kernel", "ncclDevKernel_SendRecv", 15, 18),
        event(copy, "Memcpy DtoD (Device -> Device)", 10, 20),
        event(copy, "Memcpy PtoP (Device -> Device)", 30, 40),
        event(range_, "ringflash::backward_section0", 60, 90),
    ]
    assert sections(trace) == [
        Section("forward", 0, 10, 0, 0), Section("forward", 1, 30, 6, 4), Section("backward", 0, 30, 0, 0)
    ]  # fmt: skip


def test_timeline_names_what_the_device_did() -> None:
    trace = [
        event("kernel", "backward_keys", 30, 70),
        event("kernel", "c10d::symmetric_memory::barrier_kernel(unsigned int**)", 28, 30),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 12, 17),
        event("kernel", "forward_kernel", 10, 28),
        event("kernel", "at::native::vectorized_elementwise_kernel", 71, 72),
        event("user_annotation", "ringflash::forward_section0", 0, 100),
    ]
    assert timeline(trace) == [
        {"kind": "forward", "start_us": 0, "us": 18}, {"kind": "message", "start_us": 2, "us": 5},
        {"kind": "wait", "start_us": 18, "us": 2}, {"kind": "backward", "start_us": 20, "us": 40},
        {"kind": "other", "start_us": 61, "us": 1},
    ]  # fmt: skip


def test_work_before_the_spin_is_left_out() -> None:
    host = event("user_annotation", "ringflash::forward_section0", 0, 1)
    section = event("gpu_user_annotation", "ringflash::forward_section0", 30, 40)
    work = [event("kernel", "forward_kernel", 30, 40), section]
    before = [event("kernel", "forward_kernel", 0, 5), event("kernel", "at::cuda::spin_kernel(long)", 5, 30)]
    assert after_mark([host, *before, *work]) == [host, *work]
    assert after_mark([host, *work]) == [host, *work]


def test_real_trace(tmp_path: Path) -> None:
    arguments = ("--toy", "--folder", tmp_path)
    output = launching.run_ranks("benchmarks.trace_ring", *arguments, num_ranks=2, timeout_s=100)
    assert "exposed us" in output
    assert json.loads((tmp_path / "timeline.json").read_text())["spans"] == []  # CPUs have no device
    for rank in range(2):
        found = sections(json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"])
        assert [(x.direction, x.number) for x in found] == [("forward", 0), ("backward", 0)]
        assert all(x.kernel_us > 0 and x.exposed_us >= 0 and x.idle_us >= 0 for x in found)
