"""The implementation by torch's flash attention: what it leaves as it was. One process on the CPU."""

from collections.abc import Iterator

import pytest
import torch

from ringflash_kernels.flash2 import _deterministic

SWITCHES = [(False, False), (True, False), (True, True)]


def switches() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("enabled", "warn_only"), SWITCHES)
def test_torchs_switches_are_left_as_they_were(enabled: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    with pytest.raises(MemoryError), _deterministic(True):
        assert switches() == (True, False)
        raise MemoryError
    assert switches() == (enabled, warn_only)
