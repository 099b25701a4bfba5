"""SMs left to NCCL: which calls leave any, and that the kernel is told. One process, no GPU: the kernel is a mock."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import ringflash
from ringflash.attention import gather_units
from ringflash.attention.gather_units import ForwardUnits, GatherCall
from ringflash.attention.sections import Unit
from ringflash.comm.transport import Message, PointToPoint, point_to_point, registry
from ringflash.comm.transport.point_to_point import check_capture, comm_sms


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    yield
    ringflash.set_comm_sms(0)


def test_only_our_kernels_over_nccl_leave_any() -> None:
    assert comm_sms("hopper", "nccl") == 0
    ringflash.set_comm_sms(8)
    assert comm_sms("hopper", "nccl") == comm_sms("hopper_fp8", "nccl") == 8
    for impl, name in (("hopper", "copy_engine"), ("hopper", None), ("flash2", "nccl"), ("reference", "gloo")):
        assert comm_sms(impl, name) == 0


@pytest.mark.parametrize("num_sms", [-1, 1.5, None])
def test_no_number_is_refused(num_sms: Any) -> None:
    with pytest.raises(ValueError, match=f"num_sms must be 0 or more multiprocessors, got {num_sms}; the default"):
        ringflash.set_comm_sms(num_sms)


@pytest.mark.parametrize("left, told", [(8, {"num_sms": 124}), (500, {"num_sms": 1}), (0, {})])
def test_the_kernel_is_told(left: int, told: dict[str, int]) -> None:
    ringflash.set_comm_sms(left)
    q, block, gathered = torch.zeros(1, 4, 2, 16), mock.Mock(), mock.MagicMock()
    call = GatherCall((block,), mock.Mock(), "hopper", 1.0, False)
    with (
        mock.patch.object(gather_units, "kernels_of", mock.Mock()),
        mock.patch.object(gather_units, "transport_name", lambda _: "nccl"),
        mock.patch("torch.cuda.get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)),
    ):
        work, unit = ForwardUnits(call, gathered, q, q, torch.zeros(1, 2, 4), None), Unit(0, 0, 0)
        work.prepare(unit)
        work._launch(0, unit)
    options = gathered.sizes.kv_format.forward_kernel.return_value.call_args.kwargs
    assert {name: value for name, value in options.items() if name == "num_sms"} == told


@pytest.mark.parametrize("setting, segment", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("register", [None, "1", "0"])
def test_capture_with_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, register: str | None, setting: bool, segment: bool
) -> None:
    """Programs switch them on and off at run time, and memory stays what it is."""
    memory = {"allocator_settings": {"expandable_segments": setting}, "segments": [{"is_expandable": segment}]}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: memory)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if register is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    refused = register != "0" and (setting or segment)
    with pytest.raises(RuntimeError, match="NCCL_GRAPH_REGISTER must be 0") if refused else nullcontext():
        check_capture()


def test_captured_call_reads_the_allocator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    group, looked = mock.Mock(group_name="0"), mock.Mock()
    with (
        mock.patch.object(registry, "_open", {}),
        mock.patch.object(PointToPoint, "__init__", lambda self, name, group: setattr(self, "_channel", mock.Mock())),
        mock.patch.object(point_to_point, "capturing", lambda _: True),
        mock.patch.object(point_to_point, "check_capture", looked),
    ):
        for _ in range(2):
            channel = registry.open_transport("nccl", group)
            channel.name, channel.rank = "nccl", 0
            for part in (channel, channel.among((0, 1))):
                part.post([Message(torch.empty(1), 1, "keys")], [])
    assert looked.call_count == 2
