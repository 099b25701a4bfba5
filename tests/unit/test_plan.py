"""ringflash plan: the transport's buffers and the waiting of attention, against the areas of real calls. One process.

No GPU; no memory is allocated. Other tests of plans are in test_plan_measured.py, test_plan_counts.py and
test_plan_command.py.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ringflash.attention.gather_units import ForwardUnits
from ringflash.attention.gathered_buffers import GatheredKV
from ringflash.attention.gradient_return import GradientReturn
from ringflash.attention.inputs import BackwardInputs, CallShape
from ringflash.attention.kv_format import KVFormat
from ringflash.attention.options import Algorithm, CallOptions
from ringflash.attention.plan import CallPlan
from ringflash.attention.sections import GatherSizes, choose_sections
from ringflash.attention.ulysses import Ulysses
from ringflash.comm.call_numbers import NO_NUMBER
from ringflash.comm.transport import GroupAreas, buffers
from ringflash.comm.watchdog import Unwatched
from ringflash.commands.plan.job import GIB, Machine, TrainingJob
from ringflash.commands.plan.memory import worst_moment
from ringflash.commands.plan.ring import buffer_bytes, pipeline_seconds, ring_of
from ringflash.commands.plan.timing import step_time
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.api import rounds
from tests.helpers.jobs import HOST, JOB, TWO_HOSTS, flat

IN_FP8 = replace(JOB, impl="hopper_fp8_all")
NARROW_VALUES = replace(JOB, model=replace(JOB.model, head_dim=192, value_dim=128))
LINK = HOST.gpu.nvlink_gbytes * HOST.rates.copies * 1e9


def peer_areas(rank: int, num_buffers: int) -> mock.Mock:
    """Return areas without memory, over which nothing moves."""
    areas = mock.Mock(spec=GroupAreas, rank=rank, num_buffers=num_buffers)
    areas.view.side_effect = lambda name, rank, shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    areas.cached.side_effect = lambda key, names, make: make()
    areas.run_on_stream.side_effect = lambda stream, work, *_, **options: work()
    return areas


def held_bytes(areas: mock.Mock, use: Callable[[], object]) -> int:
    """Return the bytes of the areas and buffers that are made meanwhile."""
    buffers.release_buffers()
    use()
    held = sum(dict(call.args for call in areas.reserve.call_args_list).values()) + buffers.buffer_bytes()
    buffers.release_buffers()
    return held


def gathered_bytes(job: TrainingJob, rank: int, turns: int) -> int:
    """Bytes of the areas and buffers of a rank that gathers by heads, made without memory."""
    model, name = job.model, "copy_engine" if turns == 2 else "nccl"
    q, k, v = (
        torch.empty(1, job.local_tokens, heads, width, dtype=torch.bfloat16, device="meta")
        for heads, width in (
            (model.num_heads, model.head_dim),
            (model.num_kv_heads, model.head_dim),
            (model.num_kv_heads, model.value_dim),
        )
    )
    group = mock.Mock(**{"size.return_value": job.cp_size, "rank.return_value": rank})
    impl = "reference_fp8" if rounds(job.impl) else "reference"
    call = CallPlan(SequenceMask(job.seqlen), impl, "", Algorithm.GATHER, name, CallOptions(group))
    shape = CallShape.of(q, k, v)
    areas, blocks = peer_areas(rank, turns), call.key_blocks(shape)
    kv_format = KVFormat.of(k, v, fp8=rounds(job.impl), for_backward=True)
    sizes = GatherSizes.of(blocks, shape.kv, model.num_heads, kv_format.dtype)

    def gather() -> None:
        for sections in choose_sections(sizes, len(blocks)):
            gathered = GatheredKV.of(areas, blocks, k, model.num_heads, sections, kv_format)
        GradientReturn.of(gathered, k)
        carrying = mock.Mock(blocks=blocks, impl=impl, areas=None)
        out, lse = q[..., : model.value_dim], torch.empty(1, model.num_heads, job.local_tokens, device="meta")
        ForwardUnits(carrying, gathered, q, out, lse, None)

    return held_bytes(areas, gather)


def exchanged_bytes(job: TrainingJob) -> int:
    """Bytes of the areas and the buffer of a rank that exchanges heads of a backward with seven others."""
    areas, model = peer_areas(0, 2), job.model
    q, k = (
        torch.empty(1, job.local_tokens, heads, 128, dtype=torch.bfloat16, device="meta")
        for heads in (model.num_heads, model.num_kv_heads)
    )
    lse = torch.empty(1, model.num_heads, job.local_tokens, device="meta")
    rail: Any = SimpleNamespace(backward=lambda inputs: inputs[2:5])
    call = Ulysses(rail, areas, tuple(range(8)), areas, "zigzag", NO_NUMBER)

    def exchange() -> None:
        grads = call.backward(BackwardInputs(q, None, q, k, k, q, lse))
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]

    with mock.patch("ringflash.attention.head_exchange.watching", lambda *_: Unwatched()):
        return held_bytes(areas, exchange)


LENGTHS = [1 << 12, 1 << 17, 1 << 18, 1 << 19, 1 << 20]  # from one section of all heads to sections that take turns


@pytest.mark.parametrize(
    ("job", "cp_size", "lengths"),
    [
        (JOB, 2, LENGTHS),
        (JOB, 4, LENGTHS),
        (JOB, 8, LENGTHS),
        (IN_FP8, 4, LENGTHS),
        (NARROW_VALUES, 4, LENGTHS),
        (JOB, 16, [1 << 20]),
        (IN_FP8, 16, [1 << 20]),
        (NARROW_VALUES, 16, [1 << 20]),
        (JOB, 64, [1 << 20, 1 << 23]),
        (JOB, 8, [1 << 22]),
    ],
)
def test_transport_buffers_are_those_of_the_gather(job: TrainingJob, cp_size: int, lengths: list[int]) -> None:
    """On the rank with most; the last cases are in blocks, of many ranks and of keys that one block cannot hold."""
    for seqlen in lengths:
        job = replace(job, seqlen=seqlen, cp_size=cp_size)
        for on_network, turns in ((0.0, 2), (1.0, 3)):
            ring = flat(job, on_network)
            held = max(gathered_bytes(job, rank, turns) for rank in range(0, cp_size, 1 if cp_size <= 16 else 16))
            assert buffer_bytes(ring) == held
            assert held < 12 * GIB or len(ring.blocks) == 1
    assert (len(ring.blocks) > 1) is (lengths is not LENGTHS)


def test_heads_are_exchanged_inside_whole_hosts() -> None:
    """Two hosts: a rank has the rows of eight, with four of 32 query heads and one KV head, and one rank to talk to."""
    job = replace(JOB, cp_size=16)
    rail = ring_of(job, TWO_HOSTS)
    assert (rail.cp_size, rail.rows, rail.transport) == (2, 1 << 19, "by_host")
    assert (rail.model.num_heads, rail.model.num_kv_heads) == (4, 1)
    buffers_in_all = worst_moment(job, TWO_HOSTS)[1]["transport buffers"]
    assert buffers_in_all == buffer_bytes(replace(rail, exchanging=1)) + exchanged_bytes(job)
    exchanged = 6 * (32 + 8) * 128 * 2 * job.local_tokens * 7 / 8
    assert exposed(job, with_network(TWO_HOSTS, 1e9)) == pytest.approx(exchanged / LINK, rel=1e-3)
    uneven = replace(job.model, num_heads=36, num_kv_heads=12)
    for other in (replace(job, model=uneven), replace(job, cp_size=4)):
        assert ring_of(other, TWO_HOSTS).exchanging == 1


# The waiting of attention.


def exposed(job: TrainingJob, machine: Machine = HOST) -> float:
    """Seconds a layer that attention waits for messages."""
    return step_time(job, machine).parts["ring exposed"] / job.model.num_layers


def with_network(machine: Machine, gbytes: float) -> Machine:
    """Return the machine with GB/s of a NIC."""
    return replace(machine, rates=replace(machine.rates, network_gbytes=gbytes))


def test_first_keys_and_last_gradients_are_exposed() -> None:
    """A head a section of eight at a million tokens; the other seven are hidden, if their kernels are longer."""
    keys = 2 * 7 / 8 * JOB.seqlen * JOB.model.kv_size * 2
    assert [len(heads) for heads in ring_of(JOB, HOST).sections] == [8, 8]
    assert exposed(JOB) == pytest.approx((keys + keys + 2 * keys) / 8 / LINK)
    assert exposed(replace(JOB, visible_fraction=1e-9)) == pytest.approx(8 * exposed(JOB), rel=1e-3)
    alone = replace(JOB, cp_size=1), replace(HOST, num_gpus=1)
    assert exposed(*alone) == buffer_bytes(ring_of(*alone)) == 0 and ring_of(*alone).transport is None


def test_a_nic_has_a_separate_rate() -> None:
    """Eight of 11 other ranks are on other hosts, and their keys take eight elevenths of the time of all."""
    job, two_hosts = replace(JOB, seqlen=3 << 15, cp_size=12), replace(HOST, num_gpus=12)
    keys = 2 * 11 / 12 * job.seqlen * job.model.kv_size * (2 + 2 + 4)
    assert ring_of(job, two_hosts).transport == "nccl"
    assert exposed(job, with_network(two_hosts, 1e-3)) == pytest.approx(keys * 8 / 11 / 1e6, rel=1e-3)


def test_blocks_expose_the_gradients_of_the_last_one() -> None:
    job, two_hosts = replace(JOB, seqlen=3 << 22, cp_size=12), replace(HOST, num_gpus=12)
    ring = ring_of(job, two_hosts)
    assert len(ring.blocks) > 1 and len(ring.sections.backward) == 8
    gradients = 2 * 11 / 12 * job.seqlen * job.model.kv_size * 4
    last = ring.blocks[-1] / 11 / 8 * gradients * 8 / 11 / (HOST.rates.network_gbytes * 1e9)
    assert exposed(job, two_hosts) == pytest.approx(last)
    assert exposed(job, with_network(two_hosts, 0.06)) > 100 * exposed(job, two_hosts)


def test_a_pipeline_waits_for_the_longer() -> None:
    """Two blocks, of which the first does not travel, and two sections that do: keys, gradients, kernels, queries."""
    blocks: dict[str, Any] = {"heads": (1,), "blocks": (1, 1), "kernels": 10.0}
    assert pipeline_seconds(**blocks, arrive=5.0, leave=0.0) == 10
    assert pipeline_seconds(**blocks, arrive=8.0, leave=0.0) == 8 + 5
    assert pipeline_seconds(**blocks, arrive=5.0, leave=2.0) == 10 + 2
    assert pipeline_seconds(**blocks, arrive=5.0, leave=0.0, queries=1.0) == 1 + 10
    sections: dict[str, Any] = {"heads": (1, 3), "blocks": (2,), "kernels": 8.0}
    assert pipeline_seconds(**sections, arrive=4.0, leave=0.0) == 1 + 2 + 1 + 6  # 3 heads take 3 to arrive
    assert pipeline_seconds(**sections, arrive=0.0, leave=4.0) == 8 + 3


def test_rings_across_two_hosts_are_planned_so() -> None:
    """The second six of 24 ranks are the last two of a host of eight and four of the next; two fours are not."""
    job = replace(JOB, seqlen=3 << 15, cp_size=6, dp_size=4)
    machine = with_network(replace(HOST, num_gpus=24), 0.6)
    assert exposed(job, machine) > 10 * exposed(job, with_network(machine, 1e6))
    for inside, gpus in ((replace(job, cp_size=4, dp_size=6), 24), (replace(job, dp_size=1), 6)):
        assert ring_of(inside, replace(machine, num_gpus=gpus)).transport == "copy_engine"
