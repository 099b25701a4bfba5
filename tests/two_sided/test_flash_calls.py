"""FlashAttention-2 and 4 take two-sided masks as regions, whose results are merged. CPU, only the list of calls."""

import pytest
import torch

from ringflash_kernels.mask import Mask
from tests.two_sided.kernel_masks import MASKS
from tests.unit.test_calls import covered


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_calls_cover_the_mask(mask: Mask) -> None:
    assert mask.is_two_sided
    assert torch.equal(covered(mask), mask.dense().int())
