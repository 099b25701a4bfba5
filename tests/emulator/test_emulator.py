"""The emulator itself: it computes what the device computes, and it raises where the device would fail. CPU."""

from pathlib import Path

import pytest
import torch

from ringflash_kernels.hopper.compat import gl
from tests.emulator.emulator import EmulationError, Emulator, TensorDescriptor

_TOYS = Path(__file__).with_name("toy_kernels.py")
_STAGES = 2


def _toys(seed: int = 0, *, fault: tuple[str, str] | None = None):
    faults = [] if fault is None else [("toys", *fault)]
    return Emulator(seed, faults=faults).load("toys", _TOYS)


def _descriptor(tensor: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))


def _matmul(toys, rows: int = 64, depth: int = 320, blocks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, depth, generator=generator).bfloat16()
    b = torch.randn(depth, 64, generator=generator).bfloat16()
    out = torch.ones(64 * blocks, 64)
    toys.matmul[(blocks,)](_descriptor(a), _descriptor(b), _descriptor(out), -(-depth // 64), STAGES=_STAGES)
    return out[:rows], 1 + a.double() @ b.double()


@pytest.mark.parametrize("seed", range(4))
def test_pipelined_matmul(seed):
    out, expected = _matmul(_toys(seed), blocks=3)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)


def test_tma_fills_with_zeros_and_clips_stores():
    out, expected = _matmul(_toys(), rows=40, depth=264)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(i // STAGES) & 1)\n", "((i // STAGES) & 1) ^ 1)\n", None),  # a phase bit the wrong way round
        ("mbarrier.init(empty.index(s), count=1)", "mbarrier.init(empty.index(s), count=2)", "deadlock"),
        ("mbarrier.arrive(empty.index(s), count=1)", "mbarrier.arrive(empty.index(s), count=2)", "over-arrival"),
        ("b_desc.block_type.nbytes)", "0)", None),  # too few bytes announced
        ("    fence_async_shared()\n", "", "proxy fence"),
        ("        total = warpgroup_mma_wait(0, deps=(total,))\n", "", "before warpgroup_mma_wait"),
        ("    tma_store_wait(0)\n    smem_out", "    smem_out", "still reads"),
        ("gl.program_id(0) * 64, 0], smem_out", "gl.program_id(0) * 64 - 64, 0], smem_out", "illegal instruction"),
        ("smem_a.index(s), smem_b.index(s), total", "smem_a.index(s), smem_b, total", None),
    ],
)
def test_faults_are_seen(old, new, message):
    """Each fault raises, or gives a wrong result, for at least one interleaving."""
    failures = []
    for seed in range(4):
        try:
            out, expected = _matmul(_toys(seed, fault=(old, new)))
        except (EmulationError, ValueError) as error:
            failures.append(str(error))
        else:
            if not torch.allclose(out.double(), expected, atol=1e-4):
                failures.append("wrong result")
    assert failures
    assert message is None or any(message in failure for failure in failures), failures


def test_deadlock_says_who_waits_for_what():
    with pytest.raises(EmulationError, match=r"worker 0 \(load_tiles\) waits for parity 0 of empty\[0\] .*1 arrivals"):
        _matmul(_toys(fault=("mbarrier.init(empty.index(s), count=1)", "mbarrier.init(empty.index(s), count=2)")))


def test_shared_memory_is_undefined_until_loaded():
    a, out = torch.ones(64, 64).bfloat16(), torch.zeros(64, 64).bfloat16()
    _toys().early_read[(1,)](_descriptor(a), _descriptor(out))
    assert torch.equal(out, a)
    for seed in range(20):
        unwaited = _toys(seed, fault=("    mbarrier.wait(full.index(0), 0)\n", ""))
        unwaited.early_read[(1,)](_descriptor(a), _descriptor(out))
        if out.isnan().all():
            return
    pytest.fail("no interleaving showed the missing wait")


def test_store_reads_its_source_as_late_as_allowed():
    wait, overwrite = "    tma_store_wait(0)\n", "    smem_out.store(total * 0.0)\n"
    out, _ = _matmul(_toys(fault=(wait + overwrite, overwrite + wait)))
    assert torch.equal(out, torch.ones(64, 64))


def test_named_barrier_orders_partitions():
    for seed in range(8):
        counter = torch.zeros(2, dtype=torch.int32)
        _toys(seed).ping_pong[(1,)](counter)
        assert counter.tolist() == [1, 1]
    with pytest.raises(EmulationError, match="named barrier 8"):
        _toys(fault=("(ping, (counter, 8))", "(ping, (counter, 9))")).ping_pong[(1,)](torch.zeros(2).int())
    with pytest.raises(EmulationError, match="left at named barriers"):
        _toys(fault=("named_barrier(0, ID, 256, False)", "pass")).ping_pong[(1,)](torch.zeros(2).int())


def test_integers_are_the_devices():
    out = torch.zeros(3, dtype=torch.int32)
    _toys().integers[(1,)](out, -1, 2**27)
    assert out.tolist() == [0, -1, 64]  # truncated, not floored
    with pytest.raises(EmulationError, match="int32 overflow"):
        _toys(fault=("big.to(gl.int64)", "big")).integers[(1,)](out, -1, 2**27)


def test_pointers_are_checked():
    x = torch.arange(200, dtype=torch.float32)
    out = torch.zeros(1)
    _toys().sums[(2,)](out, x, 200, BLOCK=128)
    assert out.item() == x.sum().item()
    with pytest.raises(EmulationError, match="access at element"):
        _toys(fault=(", mask=offsets < n, other=0.0", "")).sums[(2,)](out, x, 200, BLOCK=128)


def test_descriptors_are_checked_as_the_driver_does():
    with pytest.raises(AssertionError, match="16 bytes"):
        _descriptor(torch.zeros(64, 68).bfloat16())
    with pytest.raises(AssertionError, match="last stride"):
        _descriptor(torch.zeros(64, 64).bfloat16().t().contiguous().t()[:, ::1])
