"""Where the copy engine may run, from what ranks told one another, and that "auto" does not take it. One process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ringflash import transport
from ringflash.transport import peer_memory

HERE = ["host0", "gpu0", []], ["host0", "gpu1", []]


def test_one_host_with_peer_access() -> None:
    peer_memory._check_places([*HERE, ["host0", "gpu2", ["gpu7"]]])  # gpu7 is not in the group


@pytest.mark.parametrize(
    "place, got",
    [
        (["host1", "gpu2", []], "hosts ['host0', 'host1']"),
        (["host0", "gpu1", []], "3 ranks with 2 GPUs"),
        (["host0", "gpu2", ["gpu0"]], "no access from ranks [2]"),
    ],
)
def test_refused_elsewhere(place: list, got: str) -> None:
    with pytest.raises(RuntimeError, match="copy_engine.* must have all ranks .*use 'nccl'") as error:
        peer_memory._check_places([*HERE, place])
    assert got in str(error.value)


def test_a_rank_without_memory_stops_all() -> None:
    peer_memory._raise_together(["", ""])
    with pytest.raises(RuntimeError, match="got {1: 'out of memory'}"):
        peer_memory._raise_together(["", "out of memory"])


def test_auto_takes_nccl() -> None:
    with mock.patch.object(transport, "backend_of", lambda group, device: "nccl"):
        chosen = [
            transport.choose_transport(name, mock.Mock(), torch.device("cuda")) for name in ("auto", "copy_engine")
        ]
    assert chosen == ["nccl", "copy_engine"]
