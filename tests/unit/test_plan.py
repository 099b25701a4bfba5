"""ringflash plan: its counts against real models, its search against itself, its command. One process, no GPU.

Memory and time are compared with steps that were measured, too, as the committed results have them.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.train_steps import document_bounds
from ringflash import huggingface
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
from ringflash.commands.cli import main
from ringflash.commands.plan.command import MODEL_KEYS, visible_fraction
from ringflash.commands.plan.job import GIB, GPUS, Float8, Machine, TrainingJob
from ringflash.commands.plan.memory import (
    activation_bytes,
    attention_work_bytes,
    checkpoint_bytes,
    host_bytes,
    layer_bytes,
    layer_input_bytes,
    worst_moment,
)
from ringflash.commands.plan.ring import Ring, buffer_bytes, pipeline_seconds, ring_of
from ringflash.commands.plan.search import CHANGES, cheapest_change, fastest_split, fewest_gpus, fits, longest_sequence
from ringflash.commands.plan.timing import step_time
from ringflash.commands.plan.trace import TrafficCounter
from ringflash.huggingface.flops import ChunkedAttention, layer_windows, matmul_sizes
from ringflash.lightning import float8
from ringflash.lightning.module import CausalLM
from ringflash.memory import Memory
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.api import rounds
from tests.helpers.plans import model_of, read_once  # noqa: F401, a fixture
from tests.helpers.recipe_model import build_model
from tests.recipes.launching import ROOT

SMALL = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 8, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "head_dim": 8,
}  # fmt: skip
HOST, TWO_HOSTS = Machine(GPUS["H200"], 8), Machine(GPUS["H200"], 16)
RECIPES = ROOT / "recipes" / "lightning"
TO_PRETRAIN = str(RECIPES / "qwen3_8b_pretrain.yaml")

pytestmark = pytest.mark.usefixtures("read_once")
JOB = TrainingJob(
    model=model_of(QWEN3_8B)[0], seqlen=1 << 20, cp_size=8, checkpointing="attention_kept", mlp_tile_tokens=8192
)
IN_FP8 = replace(JOB, impl="hopper_fp8_all")
NARROW_VALUES = replace(JOB, model=replace(JOB.model, head_dim=192, value_dim=128))
LINK = HOST.gpu.nvlink_gbytes * HOST.rates.copies * 1e9


def small(family: str, **options: Any) -> dict[str, Any]:
    """Keywords of a small model."""
    return {"model_type": family, **SMALL, **options}


# The transport's buffers.


def peer_areas(rank: int, num_buffers: int) -> mock.Mock:
    """Return areas without memory, over which nothing moves."""
    areas = mock.Mock(spec=GroupAreas, rank=rank, num_buffers=num_buffers)
    areas.view.side_effect = lambda name, rank, shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    areas.cached.side_effect = lambda key, names, make: make()
    areas.run_in_lane.side_effect = lambda lane, work, *_, **options: work()
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
    kv_format = KVFormat.of(k, v, rounded=rounds(job.impl), for_backward=True)
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


def flat(job: TrainingJob, on_network: float = 1.0) -> Ring:
    """Return a ring without an exchange of heads."""
    return replace(ring_of(job, replace(HOST, num_gpus=job.cp_size, gpus_per_host=job.cp_size)), on_network=on_network)


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


# Measured steps.


def _is_run(result: Any) -> bool:
    """Return whether a file of results is of benchmarks/train_steps.py."""
    return isinstance(result, dict) and {"steps", "ranks", "memory", "model"} <= result.keys()


MEASURED = [
    (path.stem, run, step)
    for path in sorted((ROOT / "benchmarks" / "results").glob("*_*xh200.json"))
    if _is_run(run := json.loads(path.read_text()))
    for step in {step["seqlen"]: step for step in run["steps"]}.values()  # the last of each length
]


def _is_settled(name: str, step: dict[str, Any]) -> bool:
    """Return False for a short step that was the first of its run, one tile, or waited for a host."""
    unsettled = (
        "fp8_steps_float8_1xh200", "fp8_steps_eight_layers_2xh200", "fp8_steps_eight_layers_float8_2xh200",
    )  # fmt: skip
    return name not in unsettled or step["seqlen"] > 100_000


def _waited_for_copies(run: dict[str, Any]) -> bool:
    """Return whether checkpoints left and returned one at a time, with no work meanwhile, as they did once."""
    return run["memory"]["offload_checkpoints"] and "document_tokens" not in run


def _no_longer(run: dict[str, Any], step: dict[str, Any]) -> float:
    """Seconds of a step that its commit spent on what is left out or hidden since.

    These are copies of checkpoints, and products of tiles, by their part of all, in millions of parameters by layer.
    """
    parts, layers = step["parts"], run["model"]["num_hidden_layers"]
    if parts["idle"] > 0.15 * step["seconds"] and step["seqlen"] < 100_000:
        return 0.0  # the host's pace, with work left over
    if not _waited_for_copies(run):
        return 0.0
    mlp, others = 151, 4 * 42 + 3 * 622 / layers
    return parts["host copies"] + parts["linear"] * (mlp + mlp / 3) / (5 * mlp + others)


def _planned(run: dict[str, Any], step: dict[str, Any]) -> tuple[TrainingJob, Machine]:
    seqlen = step["seqlen"]
    named = step.get("attention") or "auto"
    impl = named.replace(":fp8_", "_").replace(":fp8", "_all")  # "hopper_fp8:fp8" in earlier results
    bounds = document_bounds(seqlen, run.get("document_tokens", 0))
    job = TrainingJob(
        model=model_of(run["model"])[0], seqlen=seqlen, cp_size=run["ranks"], precision=run["precision"],
        visible_fraction=visible_fraction(seqlen, [None], bounds), impl=impl,
        float8="tensorwise" if "--model.float8 tensorwise" in run["command"] else None,
        **{**run["memory"], "liger": bool(run["memory"]["liger"]) and run.get("liger-kernel") != "none"},
    )  # fmt: skip
    return job, replace(HOST, num_gpus=run["ranks"])


def _held_gib(run: dict[str, Any], step: dict[str, Any]) -> float:
    """Memory of torch's allocator and the transport, by the plan."""
    job, machine = _planned(run, step)
    moment, parts = worst_moment(job, machine)
    planned = sum(value for name, value in parts.items() if name not in ("fragmentation", "CUDA and libraries"))
    if moment in ("the loss", "the last layer's backward") and _waited_for_copies(run):
        planned -= layer_input_bytes(job)  # which waits for its copy, or arrives early
    return planned / GIB


def _seconds(run: dict[str, Any], step: dict[str, Any]) -> float:
    """Measured seconds without what is left out since, and in long steps without what the device was idle."""
    return step["seconds"] - _no_longer(run, step) - (step["parts"]["idle"] if step["seqlen"] >= 100_000 else 0.0)


@pytest.mark.parametrize(
    ("name", "run", "step"), [pytest.param(*case, id=f"{case[0]}-{case[2]['seqlen']}") for case in MEASURED]
)
def test_memory_and_time_are_those_of_measured_steps(name: str, run: dict[str, Any], step: dict[str, Any]) -> None:
    """Within 4% of what was held at the peak of a step on H200s, and within 15% of its time."""
    assert _held_gib(run, step) == pytest.approx(step["allocated_gib"] + step["areas_gib"], rel=0.04)
    if not _is_settled(name, step):
        return
    planned = step_time(*_planned(run, step))
    assert planned.step == pytest.approx(_seconds(run, step), rel=0.15)
    idle, waits = step["parts"]["idle"] / step["seconds"], planned.parts["waiting for the host"] > 0
    assert waits if step["seqlen"] < 100_000 and idle > 0.15 else not waits or idle > 0.05


def test_page_compares_steps_with_present_plans() -> None:
    """Planned over measured: the range of each kind of step."""
    apart: dict[str, list[tuple[float, float]]] = {}
    for name, run, step in MEASURED:
        if _is_settled(name, step):
            layers, experts = run["model"]["num_hidden_layers"], "num_experts" in run["model"]
            kind = "layers of Qwen3-30B-A3B" if experts else f"{layers} layers of Qwen3-8B"
            held, seconds = _held_gib(run, step), step_time(*_planned(run, step)).step
            measured = step["allocated_gib"] + step["areas_gib"], _seconds(run, step)
            apart.setdefault(kind, []).append((held / measured[0] - 1, seconds / measured[1] - 1))
    rows = [
        f"| {kind} | "
        + " | ".join(f"{100 * min(x):+.0f} to {100 * max(x):+.0f}%" for x in zip(*found, strict=True))
        + " |"
        for kind, found in apart.items()
    ]
    page = (ROOT / "docs" / "plan.md").read_text()
    assert len(rows) == 3 and [row for row in rows if row not in page] == []


def test_the_page_says_what_fits() -> None:
    """Thousands of tokens by number and kind of GPU, and precision."""
    page, best = (ROOT / "docs" / "plan.md").read_text(), replace(JOB, offload_checkpoints=True, liger=True)
    rows = []
    for num_gpus in (1, 2, 4, 8, 16, 32, 64):
        lengths = [
            longest_sequence(replace(best, cp_size=num_gpus, precision=precision), Machine(GPUS[gpu], num_gpus)) // 1000
            for precision in ("bf16-mixed", "bf16-true")
            for gpu in ("H100", "H200")
        ]
        rows.append(f"| {num_gpus} | {' | '.join(f'{length:,}' if length else 'none' for length in lengths)} |")
    missing = [row for row in rows if row not in page]
    assert not missing, "\n".join(["put these rows into docs/plan.md", *rows])


# What a plan counts.


def test_bytes_between_products_are_of_operators() -> None:
    """Counted by hand: bf16, 5 tokens of width 8."""
    x, w = (torch.empty(n, 8, dtype=torch.bfloat16, device="meta") for n in (5, 8))
    scale, rows = (torch.empty(8, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.long))
    for compute, num_bytes in (
        (lambda: x @ w, 0),  # a product
        (lambda: x.t().view(8, 5).unsqueeze(0).detach(), 0),  # views
        (lambda: torch.empty_like(x), 0),
        (lambda: x + x, 2 * 80),  # read once, written once
        (lambda: x * scale, 2 * 80 + 16),
        (lambda: x * scale.expand(5, 8), 2 * 80 + 16),  # of what is expanded, what is there
        (lambda: x.float(), 80 + 160),
        (lambda: x.add_(1), 2 * 80),  # in place
        (lambda: torch.zeros_like(x), 80),
        (lambda: torch.cat([x, x]), 80 + 160),
        (lambda: torch.nn.functional.embedding(rows, w), 0),
    ):
        with TrafficCounter() as passes:
            compute()
        assert passes.num_bytes == num_bytes


def test_what_is_computed_again_takes_time_again() -> None:
    """Layers with checkpoints; tiles by themselves, and their sums once a tile."""
    job = TrainingJob(model=model_of(small("qwen3_moe", **EXPERTS))[0], seqlen=1 << 20, cp_size=8)
    tiles, layers, passed = 1 << 17 >> 13, job.model.num_layers, job.layers
    whole, checkpointed, in_tiles, both = (
        step_time(replace(job, checkpointing=checkpointing, mlp_tile_tokens=tile), HOST).parts["between products"]
        for tile in (0, 1 << 13)
        for checkpointing in ("none", "attention_kept")
    )  # fmt: skip
    per_byte = 1 / (GPUS["H200"].memory_gbytes * 1e9 * HOST.rates.expert_passes)
    assert checkpointed - whole == pytest.approx(layers * job.local_tokens * passed.forward * per_byte)
    assert both - checkpointed == pytest.approx(layers * tiles * job.model.tiled_parameters * 10 * per_byte, rel=1e-6)
    assert in_tiles - whole == pytest.approx(both - checkpointed + layers * job.local_tokens * passed.mlp * per_byte)
    assert 0 < passed.mlp < passed.forward < passed.backward
    times = [step_time(replace(job, mlp_tile_tokens=tile), HOST).parts for tile in (0, 1 << 13)]
    routed = 2 * 2 * 3 * 64 * 48 / job.model.matmul_parameters  # in two layers two experts of three matrices
    assert times[0]["linear again"] == 0
    assert times[1]["linear again"] == pytest.approx(routed * times[1]["linear"] / 3, rel=0.02)


def test_what_is_there_at_each_moment() -> None:
    """AdamW makes a tensor as large as the weights; gradients of earlier sequences exist with the backward's."""
    weights = JOB.model.parameters * 4 // 8
    name, parts = worst_moment(replace(JOB, seqlen=1 << 12, cp_size=2), HOST)
    assert name == "the optimizer's step" and sum(parts[x] for x in list(parts)[:3]) == 20 * weights
    name, parts = worst_moment(JOB, HOST)
    assert name == "the last layer's backward" and parts["gradients"] == JOB.model.embedding_parameters * 2
    assert worst_moment(replace(JOB, accumulates=True), HOST)[1]["gradients"] - parts["gradients"] == weights
    alone = replace(JOB, cp_size=1, accumulates=True)
    assert worst_moment(alone, HOST)[1]["gradients"] == 8 * weights


def test_dq_is_summed_for_two_sections() -> None:
    """Sums of 8 query heads in place of 32 at a head a section; of all where a section has all heads."""
    long = replace(JOB, seqlen=1 << 23)
    rest = 4 * long.model.q_size + 4 * long.model.kv_size
    for job, heads in ((long, 8), (replace(JOB, seqlen=1 << 12), 32), (replace(long, cp_size=1), 32)):
        assert attention_work_bytes(flat(job, 0.0)) == job.local_tokens * (heads * 128 * 4 + rest)


def test_tile_of_all_tokens_is_none_in_checkpoints() -> None:
    def work(tile: int, checkpointing: Any = "attention_kept") -> int:
        job = replace(JOB, mlp_tile_tokens=tile, checkpointing=checkpointing)
        return layer_bytes(job, ring_of(job, HOST))

    assert work(JOB.local_tokens) == work(0) > work(8192)
    assert work(JOB.local_tokens, "none") != work(0, "none")


def test_offloaded_checkpoints_take_powers_of_two() -> None:
    """1.25 times the tokens take twice the host's memory; of 1,048,576 over 8 GPUs a layer takes a GiB on each."""
    job = replace(JOB, offload_checkpoints=True)
    layers = job.model.num_layers
    assert host_bytes(JOB, HOST) == 0
    kept = [host_bytes(replace(job, seqlen=n << 18), HOST) for n in (2, 4, 5, 8)]
    assert kept == [8 * layers * n << 29 for n in (1, 2, 4, 4)]
    assert 2 * host_bytes(job, replace(HOST, gpus_per_host=4)) == host_bytes(job, HOST)


def test_flops_are_counted_by_hand() -> None:
    """FLOPs of one GPU: 6 for each parameter that multiplies a token; 4 * head_dim for each pair a head sees."""
    job = TrainingJob(model=model_of(small("llama"))[0], seqlen=256, cp_size=2)
    products = 6 * (2 * (64 * 128 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + 100 * 64) * 128
    attention = 4 * 8 * 16 * (256 * 257 / 2) / 2 * 2
    time, peak = step_time(job, HOST), HOST.gpu.peak_tflops * 1e12
    assert time.parts["linear"] * peak * HOST.rates.products == pytest.approx(products, rel=1e-3)
    assert time.parts["attention forward"] * peak * HOST.rates.attention_forward == pytest.approx(attention)
    assert time.parts["attention backward"] * peak * HOST.rates.attention_backward == pytest.approx(2.5 * attention)
    assert time.model_flops * time.step == pytest.approx(products + 3 * attention)


def test_recomputing_attention_costs_its_forward() -> None:
    """And saves its output; no part of a step or of the memory is negative."""
    full = replace(JOB, checkpointing="full")
    kept, recomputed = (step_time(x, HOST) for x in (JOB, full))
    assert recomputed.step - kept.step == pytest.approx(kept.parts["attention forward"])
    model = JOB.model
    saved = JOB.local_tokens * (model.num_heads * model.head_dim * 2 + model.num_heads * 4)
    assert checkpoint_bytes(JOB) - checkpoint_bytes(full) == saved
    for job in (JOB, replace(full, offload_checkpoints=True)):
        assert min(*step_time(job, HOST).parts.values(), *worst_moment(job, HOST)[1].values()) >= 0


# What a plan reads off a model.


def saved_bytes(config: dict[str, Any], seqlen: int, mlp_tile_tokens: int = 0) -> int:
    """Bytes that autograd keeps of one bf16 layer's forward on one process.

    Not counted: parameters, and the record of attention, which is in the host's memory.
    """
    memory = Memory(mlp_tile_tokens=mlp_tile_tokens)
    model = build_model({**config, "num_hidden_layers": 1}, None, memory=memory, dtype=torch.bfloat16)
    (layer,) = model.get_submodule("model.model.layers").children()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.int64 or x.numel() > 2:
            kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage())
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    layer.register_forward_pre_hook(lambda *_: hooks.__enter__())
    layer.register_forward_hook(lambda *_: hooks.__exit__())
    model(**huggingface.prepare_batch(torch.randint(0, 100, (1, seqlen)), group=None))
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in parameters)


READ: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
    ("mistral", {"sliding_window": 9}),
    ("mixtral", EXPERTS),
    ("qwen3_moe", EXPERTS),
    ("gpt_oss", {**EXPERTS, "rope_parameters": None, "sliding_window": 32}),
    ("granitemoe", EXPERTS),
    ("deepseek_v3", {**EXPERTS, **LATENT}),
    ("gemma3_text", {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    ("llama4_text", {**EXPERTS, "num_experts_per_tok": 1, "attention_chunk_size": 40, "no_rope_layers": [1, 0],
                     "intermediate_size_mlp": 96}),
    ("phi3", {"pad_token_id": 0, "sliding_window": 32}),
    ("glm4", {"pad_token_id": 0}),
    ("cohere2", {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    ("starcoder2", {"use_bias": True}),
    ("olmo2", {"tie_word_embeddings": True}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options"), READ, ids=[family for family, _ in READ])
def test_what_is_read_off_a_model_is_right(family: str, options: dict[str, Any]) -> None:
    """Parameters, what multiplies a token, windows; and, compared with a forward with numbers, what its layers keep."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = small(family, **options)
    shape, windows = model_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.matmul_parameters, shape.mean_size) == matmul_sizes(model)
    assert windows == layer_windows(model.config)
    of_one = {name: config[name][:1] for name in ("layer_types", "no_rope_layers") if name in config}
    first, _ = model_of({**config, "num_hidden_layers": 1, **of_one})
    seqlen = 96
    for tile in (0, 40) if first.tiled_parameters else (0,):
        job = TrainingJob(model=first, seqlen=seqlen, cp_size=1, mlp_tile_tokens=tile)
        kept = activation_bytes(job, first.plain.kept)
        rotary = saved_bytes({**config, **of_one}, seqlen, tile) - kept
        assert 0 <= rotary <= seqlen * 2 * shape.head_dim * 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dense_layers_keep_what_the_page_says(family: str) -> None:
    """The first line of the table in docs/plan.md, and for each norm of a token a number in fp32; with Liger less."""
    model, _ = model_of(small(family))
    h, q, kv, f, heads = model.hidden_size, model.q_size, model.kv_size, SMALL["intermediate_size"], model.num_heads
    normed = heads + model.num_kv_heads if family == "qwen3" else 0
    page = 16 * h + 4 * q + 4 * kv + 8 * f + 4 * heads + (6 * (q + kv) if normed else 0)
    assert model.plain.kept.layer == page + 4 * (2 + normed)
    assert model.liger is not None
    fused = 8 * h + 4 * q + 4 * kv + 6 * f + 4 * heads + (2 * (q + kv) if normed else 0)
    assert model.liger.kept.layer == fused and model.liger.kept.input == 2 * h


# The search.


@settings(max_examples=30, deadline=None)
@given(
    cp_size=st.sampled_from([1, 2, 8, 64]),
    checkpointing=st.sampled_from(["none", "attention_kept", "full"]),
    offload=st.booleans(),
)
def test_longest_sequence_fits_and_the_next_does_not(cp_size: int, checkpointing: Any, offload: bool) -> None:
    machine = replace(HOST, num_gpus=cp_size)
    offload = offload and checkpointing != "none"
    job = replace(JOB, cp_size=cp_size, checkpointing=checkpointing, offload_checkpoints=offload)
    longest, unit = longest_sequence(job, machine), 2 * cp_size * 128
    assert longest % unit == 0
    assert longest == 0 or fits(replace(job, seqlen=longest), machine)
    assert not fits(replace(job, seqlen=longest + unit), machine)


STARCODER = TrainingJob(model=model_of(small("starcoder2"))[0], seqlen=1 << 10, cp_size=8)  # no Liger, no tiles


@pytest.mark.parametrize(
    ("job", "longest", "least"),
    [
        (replace(JOB, seqlen=5 << 18, mlp_tile_tokens=0), None, 1),
        (replace(JOB, checkpointing="none"), replace(JOB, checkpointing="full", offload_checkpoints=True), 2),
        (STARCODER, replace(STARCODER, checkpointing="full"), 1),
    ],
    ids=["JOB", "changes that only help together", "not all changes are possible"],
)
def test_cheapest_change_fits_and_no_cheaper_one(job: TrainingJob, longest: TrainingJob | None, least: int) -> None:
    """Without a change of precision, which changes the training."""
    job = job if longest is None else replace(job, seqlen=longest_sequence(longest, HOST))
    assert not fits(job, HOST)
    cheapest = cheapest_change(job, HOST)
    assert cheapest is not None
    names, changed = cheapest
    assert fits(changed, HOST) and changed.precision == job.precision and len(names) >= least
    for change in CHANGES.values():
        with suppress(ValueError, NotImplementedError):
            other = replace(job, **change)  # type: ignore[arg-type]
            if fits(other, HOST) and other.precision == job.precision:
                assert least == 1 and step_time(changed, HOST).step <= step_time(other, HOST).step


def test_the_fastest_split_fits_and_no_faster_one_does() -> None:
    """At a million tokens that is a ring inside each host, since one GPU cannot hold a sequence."""
    machine = replace(HOST, num_gpus=64)
    split = fastest_split(replace(JOB, cp_size=64), machine)
    assert split is not None and fits(split, machine) and (split.cp_size, split.dp_size) == (8, 8)
    for cp_size in (1, 2, 4, 16, 32, 64):
        other = replace(JOB, cp_size=cp_size, dp_size=64 // cp_size)
        if fits(other, machine):
            assert other.dp_size / step_time(other, machine).step < split.dp_size / step_time(split, machine).step
    assert fastest_split(replace(JOB, seqlen=1 << 30), machine) is None


def test_nics_receive_the_keys_of_other_hosts_once() -> None:
    job, machine = replace(JOB, cp_size=64), replace(HOST, num_gpus=64)
    numbers = 2 * job.seqlen * 7 // 8 * job.model.kv_size  # K and V of the seven other hosts
    of_all_nics = 8 * ring_of(job, machine).network_bytes
    assert of_all_nics == numbers * (2 + 2 + 4)  # bf16 in both passes, gradients in fp32
    assert ring_of(JOB, HOST).network_bytes == 0


def test_more_gpus_are_named_only_where_they_suffice() -> None:
    """And each of more hosts needs less memory."""
    job = replace(JOB, seqlen=1 << 22)
    gpus = fewest_gpus(job, HOST)
    assert gpus is not None and gpus > 8
    assert fits(replace(job, cp_size=gpus), replace(HOST, num_gpus=gpus))
    assert not fits(replace(job, cp_size=gpus // 2), replace(HOST, num_gpus=gpus // 2))
    assert fewest_gpus(replace(job, seqlen=1 << 40), HOST) is None
    moments = [worst_moment(replace(JOB, cp_size=n), replace(HOST, num_gpus=n))[1] for n in (8, 16, 64, 512)]
    sizes = [sum(parts.values()) for parts in moments]
    assert sizes == sorted(sizes, reverse=True)


# The command.

Plan = Callable[..., SimpleNamespace]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Run the command on a configuration, or on recipes; return its status, output and errors, and what JSON says."""

    def run(files: dict[str, Any] | list[str], *options: str) -> SimpleNamespace:
        if isinstance(files, dict):
            (tmp_path / "config.json").write_text(json.dumps(files))
            files = [str(tmp_path)]
        status = main(["plan", *files, *options])
        out, err = capsys.readouterr()
        return SimpleNamespace(status=status, out=out, err=err, said=json.loads(out) if out.startswith("{") else None)

    return run


@pytest.mark.parametrize(("seqlen", "status"), [("128k", 0), ("16m", 1)], ids=["fits", "does-not-fit"])
def test_command_says_whether_it_fits(plan: Plan, seqlen: str, status: int) -> None:
    said, printed = (plan(QWEN3_8B, "--seqlen", seqlen, *json) for json in (["--json"], []))
    assert said.status == printed.status == status and said.said["fits"] is (status == 0)
    needed = sum(said.said["memory_bytes"].values())
    assert (needed <= said.said["machine"]["gpu"]["memory_bytes"]) is (status == 0)
    assert f"{needed / GIB:.2f}" in printed.out and ("It fits." in printed.out) is (status == 0)
    assert said.said["transport"] == "copy_engine" and "transport copy_engine" in printed.out
    unmeasured = "no run over several hosts has been measured"
    assert unmeasured not in printed.out
    assert unmeasured in plan(QWEN3_8B, "--seqlen", seqlen, "--gpus", "16").out


def test_the_remedies_are_flags_to_paste(plan: Plan) -> None:
    """With those printed it fits, as over as many GPUs as printed."""
    command = (QWEN3_8B, "--seqlen", "2m", "--gpus", "8")
    found = plan(*command)
    change, gpus = (re.search(f"{words} *(--.*)", found.out) for words in ("it, add:", "GPUs:"))
    assert change is not None and gpus is not None and change[1].startswith("--model.memory.")
    assert "and needs 576 GiB of a host" in found.out
    assert plan(*command, *change[1].split()).status == 0 == plan(*command, *gpus[1].split()).status
    assert found.status == 1 == plan(*command, *change[1].split(), "--model.memory.offload_checkpoints", "false").status


def test_model_that_no_length_fits_is_told_so(plan: Plan) -> None:
    found = plan({**QWEN3_8B, "intermediate_size": 1 << 27}, "--seqlen", "128k", "--gpus", "1")
    assert found.status == 1
    assert "no change known here makes it fit; take more GPUs, or a smaller model" in found.out


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        (["qwen3_8b_pretrain", "1m_cp64_8hosts"], [], {"cp_size": 64, "dp_size": 1, "precision": "bf16-mixed"}),
        (["qwen3_8b_pretrain", "1m_cp64_8hosts"], ["--cp", "8"], {"cp_size": 8, "dp_size": 8}),
        (["qwen3_8b_pretrain", "128k_cp8_8gpus"], ["--gpus", "16"], {"cp_size": 8, "dp_size": 2, "seqlen": 1 << 17}),
        (["qwen3_8b_pretrain", "trainer: {strategy: {init_args: {data_parallel_size: 2}}}"], [], {"cp_size": 4}),
        (["qwen3_8b_pretrain", "trainer: {strategy: auto}"], [], {"cp_size": 8}),
        (["qwen3_8b_pretrain", "trainer: {strategy: {init_args: null}}"], [], {"cp_size": 8}),
        (["qwen3_8b_pretrain", "trainer: null"], [], {"cp_size": 8}),
        (["quickstart"], ["--gpus", "2"], {"seqlen": 1536, "checkpointing": "none"}),
        (
            ["quickstart"],
            "--gpus 2 --model.memory.checkpointing full --model.memory.offload_checkpoints true".split(),
            {"checkpointing": "full", "offload_checkpoints": True},
        ),
    ],
)
def test_job_is_that_of_recipes_and_flags(
    plan: Plan, tmp_path: Path, files: list[str], options: list[str], expected: dict[str, object]
) -> None:
    (tmp_path / "over.yaml").write_text(files[-1])
    paths = [str(tmp_path / "over.yaml" if ":" in name else RECIPES / f"{name}.yaml") for name in files]
    job = plan(paths, *options, "--json").said["job"]
    assert expected.items() <= job.items()


def test_fp8_of_the_recipe_or_the_flag(plan: Plan) -> None:
    """The overlay's backward is planned; attention is faster by the rates, everything else as without."""
    flags = ["--model.impl", "hopper_fp8_all"]
    plain, overlaid, asked = (
        plan([TO_PRETRAIN, *more], "--gpus", "8", "--json", *options).said["step_seconds"]
        for more, options in (([], []), ([str(RECIPES / "fp8.yaml")], []), ([], flags))
    )
    for found, backward in ((overlaid, 0.68), (asked, 0.80)):
        assert found["attention forward"] == pytest.approx(plain["attention forward"] * 0.64 / 1.02)
        assert found["attention backward"] == pytest.approx(plain["attention backward"] * 0.59 / backward)
        assert found["linear"] == plain["linear"]
    linear = plan([TO_PRETRAIN], "--gpus", "8", "--json", "--model.float8", "tensorwise").said["step_seconds"]
    assert linear["linear again"] == pytest.approx(plain["linear again"] * 0.68 / 0.95)
    head = plain["linear"] - 3 * plain["linear again"]  # stays in bf16
    assert linear["linear"] == pytest.approx(head + 3 * linear["linear again"])
    assert linear["attention forward"] == plain["attention forward"]


def test_plan_takes_the_keys_of_training() -> None:
    assert get_args(Float8) == float8.RECIPES
    assert signature(CausalLM).parameters.keys() == MODEL_KEYS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--seqlen must be given with a configuration, got none"),
        (["--seqlen", "many"], "--seqlen must be a number of tokens, got 'many'"),
        (["--seqlen", "²"], "--seqlen must be a number of tokens, got '²'"),
        (["--seqlen", "0"], "seqlen must be an integer of 1 or more, got 0"),
        (["--seqlen", "1001"], "seqlen must be divisible by 2 * cp_size (16), got 1001; pad to 1008."),
        (["--seqlen", "1200", "--cp", "3"], "--cp must divide --gpus (8), got 3"),
        (["--seqlen", "1k", "--cp", "0"], "context_parallel_size must be 'auto' or a positive integer, got 0"),
        (["--seqlen", "1k", "--gpus", "0"], "cp_size must be an integer of 1 or more, got 0"),
        (["--seqlen", "1k", "--gpus_per_host", "0"], "gpus_per_host must be positive, got 0"),
        (["--seqlen", "1k", "--rates.products", "0"], "rate products must be positive, got 0"),
        (["--seqlen", "1k", "--rates", '{"products": 0}'], "rate products must be positive, got 0"),
        (["--seqlen", "1k", "--visible", "2"], "visible_fraction must be above 0 and at most 1, got 2"),
        (["--seqlen", "1k", "--model.memory.mlp_tile_tokens", "-5"], "mlp_tile_tokens must be an integer of 0"),
        (["--seqlen", "1k", "--model.memory.mlp_tile_tokens", "8k"], "mlp_tile_tokens must be an integer of 0 or more"),
        (["--seqlen", "1k", "--model.memory.checkpointing", "half"], "checkpointing must be one of none, "),
        (["--seqlen", "1k", "--trainer.precision", "32-true"], "for a plan, got '32-true'"),
        (["--seqlen", "1k", "--model.float8", "perhaps"], "float8 must be one of ('tensorwise', "),
        (["--seqlen", "1k", "--model.impl", "flash9"], "impl must be 'auto' or one of "),
        (["config.json", "--seqlen", "1k"], "files must be one configuration or recipes, got 2 files"),
    ],
)
def test_command_refuses(plan: Plan, options: list[str], message: str) -> None:
    found = plan(QWEN3_8B, *options)
    assert found.status == 2 and message in found.err


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"data": {"init_args": {"seqlen": "64k"}}}, "seqlen must be an integer of 1 or more, got '64k'"),
        ({"model": {"memory": {"checkpoints": "full"}}}, "a recipe with model.model and data, got TypeError"),
        ({"model": {"memory": {"liger": "yes"}}}, "liger must be true, false or 'auto', got 'yes'"),
        ({"model": {"fp8_backward": "fp8"}}, "model.fp8_backward must be left out, got 'fp8'; write model.impl: "),
        ({"model": {"imlp": "hopper_fp8"}}, "got ['imlp']; correct them"),
        ({"trainer": {"strategy": "deepspeed"}}, "strategy must be ContextParallelStrategy for a plan, got deepspeed"),
        (
            {"trainer": {"strategy": {"init_args": {"data_parallel_size": "two", "context_parallel_size": 4}}}},
            "data_parallel_size must be 'auto' or a positive integer, got 'two'",
        ),
        ({"trainer": {"strategy": {"init_args": {"replicate_size": 2}}}}, "replicate_size must be 1 for a plan, got 2"),
        (["model"], "recipe.yaml must be a recipe, got"),
    ],
)
def test_a_recipe_that_would_not_run_is_not_planned(plan: Plan, tmp_path: Path, recipe: Any, message: str) -> None:
    """ZeRO below stage 3 has the weights whole on every GPU: 30 GiB of 8 B parameters, planned as 4."""
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    found = plan([TO_PRETRAIN, str(tmp_path / "recipe.yaml")])
    assert found.status == 2 and message in found.err


def test_an_overlay_without_its_recipe_is_named(plan: Plan) -> None:
    found = plan([str(RECIPES / "1m_cp8_8gpus.yaml")])
    assert found.status == 2 and "must have model.model or model.pretrained, got neither" in found.err


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            small("starcoder2"),
            ["--model.memory.mlp_tile_tokens", "8"],
            "mlp_tile_tokens must be 0 for starcoder2, got 8",
        ),
        (small("mixtral", **EXPERTS), ["--model.memory.liger", "true"], "liger must be false for a plan of mixtral"),
        (small("qwen3"), ["--model.impl", "hopper_fp8"], "got head_dim 16 (one of 64, 128, 256)"),
        (small("gemma2"), [], "logits of Gemma2ForCausalLM must be those of lm_head times a number"),
        (small("persimmon"), [], "model_type must be one whose parameters can be placed, got 'persimmon'"),
        ({"model_type": "mamba"}, [], "model_type must be one of a text model with model.layers, got 'mamba'"),
        ({"model_type": "nothing"}, [], "config must be one that transformers builds a causal model from, got"),
        (small("mixtral", hidden_size="many"), [], "config must be one that transformers builds a causal model from"),
    ],
)
def test_models_that_no_plan_counts_are_refused(plan: Plan, config: Any, options: list[str], message: str) -> None:
    found = plan(config, "--seqlen", "1k", *options)
    assert found.status == 2 and message in found.err


def test_status_1_is_a_finding_not_an_accident(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 says that the job does not fit; Python's own status for an error that nobody expected is 1 as well."""
    (tmp_path / "config.json").write_text("[1]")
    found = plan([str(tmp_path)], "--seqlen", "1k")
    assert found.status == 2 and "must be a transformers configuration" in found.err
    monkeypatch.setattr("ringflash.commands.plan.command.make_plan", lambda job, machine: {}["fits"])
    found = plan(QWEN3_8B, "--seqlen", "1k")
    assert found.status == 2 and "KeyError" in found.err


def test_plan_of_a_window_counts_what_layers_see(plan: Plan) -> None:
    """Half of the layers see 4096 keys of a million: half of the pairs."""
    windowed = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 18}
    fraction = plan(QWEN3_8B | windowed, "--seqlen", "1m", "--json").said["job"]["visible_fraction"]
    assert fraction == pytest.approx((1 + visible_fraction(1 << 20, [4095])) / 2)


def test_all_experts_take_memory_the_active_time(plan: Plan) -> None:
    """Twice as many experts, as many a token; and the other way round."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 2}
    base = small("qwen3_moe", **sizes)
    more, busier = base | {"num_experts": 128}, base | {"num_experts_per_tok": 4}
    plans = [plan(config, "--seqlen", "128k", "--json").said for config in (base, more, busier)]
    weights, at_work = ([x["memory_bytes"][name] for x in plans] for name in ("weights", "one layer at work"))
    linear = [x["step_seconds"]["linear"] for x in plans]
    assert weights[1] > 1.9 * weights[0] == 1.9 * weights[2]
    assert linear[1] < 1.1 * linear[0] < linear[2] and at_work[1] < 1.1 * at_work[0] < at_work[2]


def test_computed_experts_take_their_time(plan: Plan) -> None:
    """Llama 4's of transformers; MFU counts those that a token is sent to."""
    config = small("llama4_text", **dict(READ)["llama4_text"])
    job, printed = (plan(config, "--seqlen", "128k", *json) for json in (["--json"], []))
    model = job.said["job"]["model"]
    others = 2 * 3 * 3 * 64 * 160  # in two layers three experts of three matrices; and rotary angles
    assert model["computed_parameters"] - model["matmul_parameters"] == pytest.approx(others, rel=1e-4)
    chunked = (visible_fraction(1 << 17, [ChunkedAttention(40)]) + 1) / 2
    assert job.said["job"]["visible_fraction"] == pytest.approx(chunked)
    assert "its code computes experts also for tokens that are not sent to them" in printed.out
