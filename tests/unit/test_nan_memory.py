"""The NaN that all tests find in new memory. CPU, one process."""

import torch
from torch import nn


def test_new_memory_is_nan() -> None:
    x = torch.empty(2, 3)
    for new in (x, torch.empty_like(x), x.new_empty(4), torch.empty_strided((2, 2), (2, 1), dtype=torch.bfloat16)):
        assert new.isnan().all()
    assert torch.empty(3, dtype=torch.int32).dtype == torch.int32


def test_new_memory_is_on_the_device_of_the_context() -> None:
    """Without it, models of billions of parameters that tests plan on meta would be drawn on the CPU."""
    with torch.device("meta"):
        assert all(x.is_meta for x in (torch.empty(2), torch.empty_strided((2,), (1,)), *nn.Linear(2, 3).parameters()))
