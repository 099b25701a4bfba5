"""A call over NCCL in a CUDA graph: refused with memory that NCCL would register. One process, no GPU."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from ringflash.comm.transport import Message, PointToPoint, point_to_point, registry
from ringflash.comm.transport.point_to_point import check_capture


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
