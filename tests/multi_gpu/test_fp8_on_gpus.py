"""FP8 rings on GPUs: records over the copy engine and NCCL, within the tolerance of the CPU tier.

One GPU serves several ranks with `--ranks 4 --share-gpus`. `--backend gloo` runs the specification.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from ringflash.attention.gathered_buffers import GatheredKV
from tests.distributed.test_fp8 import ALIGNED, compared
from tests.helpers.cases import Case
from tests.helpers.pool import Context, Pool
from tests.multi_gpu.conftest import Setup
from tests.multi_gpu.test_ring_on_gpus import over

pytestmark = pytest.mark.multi_gpu

CASES = [
    Case(head_dim=128, num_heads=4, num_kv_heads=2),
    Case(head_dim=64, num_heads=4, num_kv_heads=4, window="left", documents="crossing"),
    Case(head_dim=128, num_heads=2, num_kv_heads=1, causal=False, layout="contiguous", batch=2),
    Case(head_dim=64, num_heads=4, num_kv_heads=1, documents="mixed"),
]


def check(ctx: Context, transport: str, chunk: int, impl: str) -> set[bool]:
    """Assert that every case keeps within the tolerance; return whether its K and V travelled as records."""
    rounded: set[bool] = set()
    published = GatheredKV.publish

    def publish(self: GatheredKV, *args: Any) -> Any:
        rounded.add(self.sizes.kv_format.fp8)
        return published(self, *args)

    with ExitStack() as patches:
        patches.enter_context(over(transport))
        spies = patches.enter_context(pytest.MonkeyPatch.context())
        spies.setattr(GatheredKV, "publish", publish)
        for case in CASES:
            compared(ctx, case, chunk, impl)
    return rounded


@pytest.mark.parametrize("products", ["", "_scores", "_all"])
@pytest.mark.parametrize("transport", ["copy_engine", "nccl"])
def test_records_travel(pool: Pool, setup: Setup, transport: str, products: str) -> None:
    """In chunks of whole records."""
    if setup.backend == "gloo":
        transport, impl = "gloo", "reference_fp8"
    else:
        impl = "hopper_fp8"
    seen = pool.run(check, transport, ALIGNED, impl + products, timeout_s=300)  # a minute of it compiles kernels
    assert seen == [{True}] * setup.ranks


@pytest.mark.parametrize("transport", ["copy_engine", "nccl"])
def test_other_chunks(pool: Pool, setup: Setup, transport: str) -> None:
    """In chunks of 160 tokens, K and V travel in bf16."""
    if setup.backend == "gloo":
        transport, impl = "gloo", "reference_fp8_all"
    else:
        impl = "hopper_fp8_all"
    assert pool.run(check, transport, 160, impl) == [{False}] * setup.ranks
