"""ringflash plan: its counts against real models, its search against itself, its command. One process, no GPU.

Memory is compared with steps that were measured, too, as the committed results have them; docs/plan.md says of time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.train_steps import document_bounds
from ringflash import huggingface
from ringflash.attention.gather_by_heads import ForwardUnits
from ringflash.attention.gathered_buffers import GatheredKV, GradientReturn
from ringflash.attention.inputs import with_mean_head_dim
from ringflash.attention.operands import Operands
from ringflash.attention.options import RingOptions
from ringflash.attention.plan import CallPlan
from ringflash.attention.schedule import build
from ringflash.attention.sections import choose_sections
from ringflash.attention.ulysses import Ulysses
from ringflash.comm.call_numbers import NO_NUMBER
from ringflash.comm.transport.buffers import buffer_bytes, release_buffers
from ringflash.comm.watchdog import Unwatched
from ringflash.commands.cli import main
from ringflash.commands.plan.command import visible_fraction
from ringflash.commands.plan.job import GIB, GPUS, Machine, TrainingJob
from ringflash.commands.plan.memory import (
    activation_bytes,
    attention_work_bytes,
    block_sizes,
    checkpoint_bytes,
    host_bytes,
    layer_bytes,
    layer_input_bytes,
    sections_at_a_time,
    transport_bytes,
    worst_moment,
)  # fmt: skip
from ringflash.commands.plan.search import CHANGES, cheapest_change, fewest_gpus, fits, longest_sequence, total_bytes
from ringflash.commands.plan.timing import attention_flops, linear_flops, pipeline_seconds, step_time
from ringflash.commands.plan.trace import TrafficCounter
from ringflash.flops import ChunkedAttention, layer_windows, matmul_sizes
from ringflash.lightning.module import build_model
from ringflash.memory import Memory
from ringflash.sequence.mask import SequenceMask
from tests.helpers.plans import model_of, read_once  # noqa: F401, a fixture
from tests.recipes.launching import ROOT

SMALL = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
HOST = Machine(GPUS["H200"], 8)


pytestmark = pytest.mark.usefixtures("read_once")
JOB = TrainingJob(model_of(QWEN3_8B)[0], 1 << 20, cp_size=8, mlp_tile_tokens=8192)


def _runs(result: Any) -> list[dict[str, Any]]:
    """Runs of benchmarks/train_steps.py in a file of results."""
    found = [result, *result.values()] if isinstance(result, dict) else []
    return [run for run in found if isinstance(run, dict) and {"steps", "ranks", "memory", "model"} <= run.keys()]


def small(family: str, **options: Any) -> dict[str, Any]:
    """Keywords of a small model."""
    return {"model_type": family, **SMALL, **options}


def saved_bytes(config: dict[str, Any], seqlen: int, mlp_tile_tokens: int = 0) -> int:
    """Bytes that autograd keeps of one bf16 layer's forward on one process.

    Not counted: parameters, and the record of attention, which is in the host's memory.
    """
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model({**config, "num_hidden_layers": 1}, None, 0, Memory(mlp_tile_tokens=mlp_tile_tokens))
    finally:
        torch.set_default_dtype(torch.float32)
    (layer,) = model.get_submodule("model.model.layers").children()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.int64 or x.numel() > 1:
            kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage())
        return x

    unhooked = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            return unhooked(*args, **kwargs)

    layer.forward = forward  # type: ignore[method-assign]
    model(**huggingface.prepare_batch(torch.randint(0, 100, (1, seqlen)), group=None))
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in parameters)


def test_one_rank_has_no_transport_buffers() -> None:
    assert transport_bytes(replace(JOB, cp_size=1)) == 0


class Areas:
    """A peer memory that only notes how large its areas are."""

    def __init__(self, rank: int, turns: int) -> None:
        self.rank, self.num_buffers, self.sizes = rank, turns, dict[str, int]()

    def reserve(self, name: str, num_bytes: int) -> None:
        self.sizes[name] = num_bytes

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def make_transfer(self, *what: object) -> Callable[[], None]:
        """Move nothing."""
        return lambda: None

    def keep(self, key: object, areas: object, make: Callable[[], Any]) -> Any:
        return make()

    def run_in_lane(self, lane: str, work: Callable[[], None], *_: object, **options: object) -> None:
        work()

    def do_nothing(self, *_: object) -> None:
        """Wait for nothing."""

    barrier = mark = wait = do_nothing


def gathered_bytes(job: TrainingJob, rank: int, turns: int) -> int:
    """Bytes of a rank's areas and buffers, made without memory."""
    model, name = job.model, "copy_engine" if turns == 2 else "nccl"
    widths = (
        (model.num_heads, model.head_dim),
        (model.num_kv_heads, model.head_dim),
        (model.num_kv_heads, model.value_dim),
    )
    q, k, v = (torch.empty(1, job.local_tokens, *x, dtype=torch.bfloat16, device="meta") for x in widths)
    out = q[..., : model.value_dim]
    group = mock.Mock(**{"size.return_value": job.cp_size, "rank.return_value": rank})
    impl = "reference" if job.fp8_backward is None else "reference_fp8"
    call = CallPlan(SequenceMask(job.seqlen), impl, "", name, 1.0, RingOptions(group))
    areas, blocks = Areas(rank, turns), call.key_blocks(q, with_mean_head_dim(k, v), name)
    operands = Operands.of(k, v, rounded=job.fp8_backward is not None, for_backward=True)
    keys = max(block.capacity for block in blocks)
    release_buffers()
    for sections in choose_sections(with_mean_head_dim(k, v).shape, model.num_heads, keys, operands.dtype, len(blocks)):
        gathered = GatheredKV(areas, blocks, k, model.num_heads, sections, operands)  # type: ignore[arg-type]
    GradientReturn(gathered, k)
    carrying = mock.Mock(blocks=blocks, impl=impl, memory=None)
    ForwardUnits(carrying, gathered, q, out, q.new_empty((), dtype=torch.float32), None)
    held = sum(areas.sizes.values()) + buffer_bytes()
    release_buffers()
    return held


IN_FP8 = replace(JOB, fp8_backward="fp8")
NARROW_VALUES = replace(JOB, model=replace(JOB.model, head_dim=192, value_dim=128))


@pytest.mark.parametrize("seqlen", [1 << 12, 1 << 17, 1 << 18, 1 << 19, 1 << 20], ids=str)
@pytest.mark.parametrize(
    ("job", "cp_size"),
    [(JOB, 2), (JOB, 4), (JOB, 8), (IN_FP8, 4), (NARROW_VALUES, 4)],
    ids=["2", "4", "8", "4, FP8", "4, narrow values"],
)
def test_transport_buffers_are_those_that_gather_by_heads(job: TrainingJob, seqlen: int, cp_size: int) -> None:
    """On the rank with most, from one section of all heads to sections that take turns; copy engine and NCCL."""
    job = replace(job, seqlen=seqlen, cp_size=cp_size)
    for one_host, turns in ((True, 2), (False, 3)):
        held = max(gathered_bytes(job, rank, turns) for rank in range(cp_size))
        assert transport_bytes(replace(job, one_host=one_host)) == held


@pytest.mark.parametrize(
    ("seqlen", "cp_size", "gib"), [(1 << 20, 16, 3), (1 << 20, 64, 3), (1 << 22, 8, 8), (1 << 23, 64, 4)]
)
def test_transport_buffers_are_those_of_blocks(seqlen: int, cp_size: int, gib: int) -> None:
    """Buffers of many ranks, and of keys for which one block would need more than 12 GiB: up to 36 for 8M tokens."""
    for job in (IN_FP8, NARROW_VALUES) if cp_size == 16 else ():
        job = replace(job, seqlen=seqlen, cp_size=cp_size)
        held = max(gathered_bytes(job, rank, 3) for rank in range(cp_size))
        assert transport_bytes(job) == held
    job = replace(JOB, seqlen=seqlen, cp_size=cp_size)
    held = max(gathered_bytes(job, rank, 3) for rank in range(0, cp_size, max(1, cp_size // 8)))
    assert transport_bytes(job) == held
    assert gib - 1 < held / (1 << 30) <= gib


def test_dq_is_summed_for_two_sections() -> None:
    """Sums of 8 query heads in place of 32 at a head a section; of all where a section has all heads."""
    long = replace(JOB, seqlen=1 << 23)
    rest = 4 * long.model.q_size + 4 * long.model.kv_size
    for job, heads in ((long, 8), (replace(JOB, seqlen=1 << 12), 32), (replace(long, cp_size=1), 32)):
        assert attention_work_bytes(job) == job.local_tokens * (heads * 128 * 4 + rest)


def test_a_tile_of_all_tokens_is_none_in_checkpointed_layers() -> None:
    whole = replace(JOB, mlp_tile_tokens=JOB.local_tokens)
    assert layer_bytes(whole) == layer_bytes(replace(JOB, mlp_tile_tokens=0)) > layer_bytes(JOB)
    kept = [layer_bytes(replace(x, checkpointing="none")) for x in (replace(JOB, mlp_tile_tokens=0), whole)]
    assert kept[0] != kept[1]


MEASURED = [
    (path.stem, run, step)
    for path in sorted((ROOT / "benchmarks" / "results").glob("*_*xh200.json"))
    for run in _runs(json.loads(path.read_text()))
    for step in {step["seqlen"]: step for step in run["steps"]}.values()  # the last of each length
    if not (run["memory"]["liger"] and "num_experts" in run["model"])  # which no plan counts
]


SETTLED = [  # of the first file one short step, the first of its run; of the other one in a tile of all tokens
    x for x in MEASURED if x[0] not in ("liger_2xh200", "experts_tiled_2xh200") or x[2]["seqlen"] > 100_000
]


def _waited_for_copies(run: dict[str, Any]) -> bool:
    """Return whether checkpoints left and came one at a time, with nothing beside them, as they did once."""
    return run["memory"]["offload_checkpoints"] and ("document_tokens" not in run or "copies_not_hidden" in run)


def _no_longer(run: dict[str, Any], step: dict[str, Any]) -> float:
    """Seconds of a step that its commit spent on what is left out or hidden since: copies of checkpoints, and
    products of tiles, by their part of all, in millions of parameters by layer."""
    parts, layers, experts = step["parts"], run["model"]["num_hidden_layers"], "num_experts" in run["model"]
    if parts["idle"] > 0.15 * step["seconds"] and step["seqlen"] < 100_000:
        return 0.0  # the host's pace, with work left over
    first = "document_tokens" not in run  # before 9f0f252
    seconds = parts["host copies"] if _waited_for_copies(run) else 0.0
    if not run["memory"]["mlp_tile_tokens"]:
        return seconds
    if experts:  # which are tokens' own products, and most of all
        return seconds + (parts["linear"] / 5 if first else 0.0)
    mlp, others = 151, 4 * 42 + 3 * 622 / layers
    if first or run.get("tiles_computed_twice"):
        return seconds + parts["linear"] * (mlp + mlp / 3) / (5 * mlp + others)
    if run["commit"].startswith("9f0f252"):
        return seconds + parts["linear"] * mlp / 3 / (4 * mlp + others)
    return seconds


def _of(measured: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> pytest.MarkDecorator:
    ids = [f"{name}-{step['seqlen']}" for name, _, step in measured]
    return pytest.mark.parametrize(("run", "step"), [x[1:] for x in measured], ids=ids)


def _planned(run: dict[str, Any], step: dict[str, Any]) -> tuple[TrainingJob, Machine]:
    seqlen, products = step["seqlen"], step.get("attention", "").partition(":")[2]
    bounds = document_bounds(seqlen, run.get("document_tokens", 0))
    job = TrainingJob(
        model_of(run["model"])[0], seqlen, run["ranks"], precision=run["precision"],
        visible_fraction=visible_fraction(seqlen, [None], bounds), fp8_backward=products or None,
        **{**run["memory"], "liger": bool(run["memory"]["liger"])},
    )  # fmt: skip
    return job, replace(HOST, num_gpus=run["ranks"])


def _held_gib(run: dict[str, Any], step: dict[str, Any]) -> float:
    """Memory of torch's allocator and the transport, by the plan."""
    job, machine = _planned(run, step)
    moment, parts = worst_moment(job, machine)
    planned = sum(value for name, value in parts.items() if name not in ("fragmentation", "CUDA and libraries"))
    if moment in ("the loss", "the last layer's backward") and _waited_for_copies(run):
        planned -= layer_input_bytes(job)  # which waits for its copy, or comes early
    return planned / GIB


@_of(MEASURED)
def test_memory_is_that_of_measured_steps(run: dict[str, Any], step: dict[str, Any]) -> None:
    """Within 4% of what was held at the peak of a step on H200s."""
    assert _held_gib(run, step) == pytest.approx(step["allocated_gib"] + step["areas_gib"], rel=0.04)


@_of(SETTLED)
def test_time_is_that_of_measured_steps(run: dict[str, Any], step: dict[str, Any]) -> None:
    """Within 15%. Long steps without what their device was idle, which is of the first of a length."""
    short = step["seqlen"] < 100_000
    job, machine = _planned(run, step)
    planned = step_time(job, machine)
    excess = _no_longer(run, step) + (0.0 if short else step["parts"]["idle"])
    assert planned.step == pytest.approx(step["seconds"] - excess, rel=0.15)
    idle, waits = step["parts"]["idle"] / step["seconds"], planned.parts["waiting for the host"] > 0
    assert waits if short and idle > 0.15 else not waits or idle > 0.05


def _row(run: dict[str, Any], step: dict[str, Any]) -> str:
    """A line of docs/plan.md: what was measured, without what is left out since, and what is planned."""
    job, machine = _planned(run, step)
    held, time = _held_gib(run, step), step_time(job, machine).step
    got, seconds = step["allocated_gib"] + step["areas_gib"], step["seconds"] - _no_longer(run, step)
    seconds -= step["parts"]["idle"] if step["seqlen"] >= 100_000 else 0.0
    words = [str(run["model"]["num_hidden_layers"]), "of experts" if "num_experts" in run["model"] else "dense"]
    words += [f"documents of {run['document_tokens']:,}"] if run.get("document_tokens") else []
    words += [f"tiles of {job.mlp_tile_tokens:,}"] if "num_experts" in run["model"] and job.mlp_tile_tokens else []
    words += [word for word, is_so in (("bf16-true", job.precision == "bf16-true"), ("offloaded",
              job.offload_checkpoints), ("Liger", job.liger)) if is_so]  # fmt: skip
    return (
        f"| {', '.join(words)} | {job.cp_size} | {job.seqlen:,} | {got:.1f} | {held:.1f} ({held / got - 1:+.0%}) "
        f"| {seconds:.2f} | {time:.2f} ({time / seconds - 1:+.0%}) |"
    )


def test_the_page_compares_the_steps_with_the_plans_of_this_code() -> None:
    """The last measurement of each."""
    page = (ROOT / "docs" / "plan.md").read_text()
    rows = {row.partition(" |")[0] + "".join(row.split("|")[2:4]): row for row in (_row(x[1], x[2]) for x in SETTLED)}
    missing = [row for row in rows.values() if row not in page]
    assert not missing, "\n".join(["put these rows into docs/plan.md", *rows.values()])


def test_bytes_between_products_are_those_of_its_operators() -> None:
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


def test_what_is_computed_again_passes_again() -> None:
    """Layers with checkpoints; tiles by themselves, and their sums once a tile."""
    job = TrainingJob(model_of(small("qwen3_moe", **EXPERTS))[0], 1 << 20, 8, checkpointing="none")
    tiles, layers = 1 << 17 >> 13, job.model.num_layers
    passed, tiled = job.layers.passed, job.model.tiled_parameters
    whole, checkpointed, in_tiles, both = (
        step_time(replace(job, checkpointing=checkpointing, mlp_tile_tokens=tile), HOST).parts["between products"]
        for tile in (0, 1 << 13)
        for checkpointing in ("none", "attention_kept")
    )  # fmt: skip
    per_byte = 1 / (GPUS["H200"].memory_gbytes * 1e9 * HOST.rates.passes)
    assert checkpointed - whole == pytest.approx(layers * job.local_tokens * passed.forward * per_byte)
    assert both - checkpointed == pytest.approx(layers * tiles * tiled * 10 * per_byte, rel=1e-6)
    assert in_tiles - whole == pytest.approx(both - checkpointed + layers * job.local_tokens * passed.tiled * per_byte)
    assert 0 < passed.tiled < passed.forward < passed.backward


def test_what_is_there_at_each_moment() -> None:
    """AdamW makes a tensor as large as the weights; gradients of earlier sequences lie beside the backward's."""
    weights = JOB.model.parameters * 4 // 8
    name, parts = worst_moment(replace(JOB, seqlen=1 << 12, cp_size=2), HOST)
    assert name == "the optimizer's step" and sum(parts[x] for x in list(parts)[:3]) == 20 * weights
    name, parts = worst_moment(JOB, HOST)
    assert name == "the last layer's backward" and parts["gradients"] == JOB.model.embedding_parameters * 2
    assert worst_moment(replace(JOB, accumulates=True), HOST)[1]["gradients"] - parts["gradients"] == weights
    alone = replace(JOB, seqlen=1 << 12, cp_size=1, accumulates=True)
    assert worst_moment(replace(alone, seqlen=1 << 20), HOST)[1]["gradients"] == 8 * weights


def test_what_is_offloaded_must_fit_into_the_host() -> None:
    """torch pins powers of two: 1.25 times the tokens take twice the memory. Two hosts have half of it each."""
    job = replace(JOB, offload_checkpoints=True)  # 1,048,576 tokens over 8 GPUs: a GiB for each layer
    layers = job.model.num_layers
    assert host_bytes(JOB) == 0
    assert [host_bytes(replace(job, seqlen=n << 18)) for n in (2, 4, 5, 8)] == [layers * n << 29 for n in (1, 2, 4, 4)]
    enough = replace(HOST, host_memory_bytes=8 * host_bytes(job))
    assert fits(job, HOST) and fits(job, enough) and not fits(job, replace(enough, host_memory_bytes=1))
    assert fits(job, replace(enough, gpus_per_host=4, host_memory_bytes=4 * host_bytes(job)))
    assert longest_sequence(job, enough) == 1 << 20 < longest_sequence(job, HOST)
    longer = cheapest_change(replace(job, seqlen=3 << 19, liger=True), enough)
    assert longer is not None
    assert longer[0] == ("keep only each layer's input", "leave the checkpoints on the GPU")


def test_flops_are_counted_by_hand() -> None:
    """FLOPs of one GPU: 6 for each parameter that multiplies a token; 4 * head_dim for each pair a head sees."""
    job = TrainingJob(model_of(small("llama"))[0], 256, cp_size=2)
    matrices = 2 * (64 * 128 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + 100 * 64
    assert linear_flops(job) == 6 * matrices * 128
    assert attention_flops(job) == 4 * 8 * 16 * (256 * 257 / 2) / 2 * 2


@pytest.mark.parametrize("window", [None, 0, 1, 17, 62, 63, 100])
def test_visible_pairs_are_those_of_the_schedule(window: int | None) -> None:
    seqlen = 64
    mask = SequenceMask(seqlen, window_size=(-1 if window is None else window, -1))
    pairs = sum(build(mask, 4, rank, "zigzag").num_visible for rank in range(4))
    job = TrainingJob(JOB.model, seqlen, cp_size=4, visible_fraction=visible_fraction(seqlen, [window]))
    assert job.visible_pairs == pytest.approx(pairs, rel=1e-12)


def test_the_parts_of_a_step_add_up_and_none_is_negative() -> None:
    for job in (JOB, replace(JOB, checkpointing="full", offload_checkpoints=True)):
        time = step_time(job, HOST)
        assert min(time.parts.values()) >= 0 and time.step == sum(time.parts.values())
        assert 0 < time.mfu < HOST.rates.attention_forward
        assert min(worst_moment(job, HOST)[1].values()) >= 0


def test_recomputing_attention_costs_its_forward() -> None:
    kept, recomputed = (step_time(replace(JOB, checkpointing=x), HOST) for x in ("attention_kept", "full"))
    assert recomputed.step - kept.step == pytest.approx(kept.parts["attention forward"])
    model, tokens = JOB.model, JOB.local_tokens
    saved = checkpoint_bytes(JOB) - checkpoint_bytes(replace(JOB, checkpointing="full"))
    assert saved == tokens * (model.num_heads * model.head_dim * 2 + model.num_heads * 4)


@settings(max_examples=30, deadline=None)
@given(
    cp_size=st.sampled_from([1, 2, 8, 64]),
    checkpointing=st.sampled_from(["none", "attention_kept", "full"]),
    offload=st.booleans(),
)
def test_the_longest_sequence_fits_and_the_next_does_not(cp_size: int, checkpointing: Any, offload: bool) -> None:
    machine = replace(HOST, num_gpus=cp_size)
    offload = offload and checkpointing != "none"
    job = replace(JOB, cp_size=cp_size, checkpointing=checkpointing, offload_checkpoints=offload)
    longest, unit = longest_sequence(job, machine), 2 * cp_size * 128
    assert longest % unit == 0
    assert longest == 0 or fits(replace(job, seqlen=longest), machine)
    assert not fits(replace(job, seqlen=longest + unit), machine)


def test_the_cheapest_change_fits_and_no_cheaper_one_does() -> None:
    job = replace(JOB, seqlen=5 << 18, mlp_tile_tokens=0)
    assert not fits(job, HOST)
    cheapest = cheapest_change(job, HOST)
    assert cheapest is not None
    names, changed = cheapest
    assert fits(changed, HOST) and changed.precision == job.precision and set(names) <= set(CHANGES)
    for change in CHANGES.values():
        other = replace(job, **change)  # type: ignore[arg-type]
        if fits(other, HOST) and other.precision == job.precision:
            assert step_time(changed, HOST).step <= step_time(other, HOST).step


def test_changes_that_only_help_together_are_named() -> None:
    """Checkpoints that a job does not have yet, and the host for them."""
    offloaded = replace(JOB, checkpointing="full", offload_checkpoints=True)
    job = replace(JOB, checkpointing="none", seqlen=longest_sequence(offloaded, HOST))
    cheapest = cheapest_change(job, HOST)
    assert cheapest is not None and cheapest[1].offload_checkpoints and cheapest[1].precision == job.precision


def test_more_gpus_are_named_only_where_they_suffice() -> None:
    job = replace(JOB, seqlen=1 << 22)
    gpus = fewest_gpus(job, HOST)
    assert gpus is not None and gpus > 8
    assert fits(replace(job, cp_size=gpus), replace(HOST, num_gpus=gpus))
    assert not fits(replace(job, cp_size=gpus // 2), replace(HOST, num_gpus=gpus // 2))
    assert fewest_gpus(replace(job, seqlen=1 << 40), HOST) is None


def exposed(job: TrainingJob, machine: Machine = HOST) -> float:
    """Seconds a layer that attention waits for messages."""
    return step_time(job, machine).parts["ring exposed"] / job.model.num_layers


def test_first_keys_and_last_gradients_have_no_kernel_beside_them() -> None:
    """A head a section of eight at a million tokens; the other seven are hidden behind kernels."""
    keys = 2 * 7 / 8 * JOB.seqlen * JOB.model.kv_size * 2
    link = HOST.gpu.nvlink_gbytes * HOST.rates.copies * 1e9
    assert [len(heads) for heads in sections_at_a_time(JOB.on(HOST))] == [8, 8]
    assert exposed(JOB) == pytest.approx((keys + keys + 2 * keys) / 8 / link)
    assert exposed(replace(JOB, cp_size=1), replace(HOST, num_gpus=1)) == 0


def test_keys_that_take_longer_than_their_kernel_are_exposed() -> None:
    """All keys of few pairs, but for what kernels of seven sections take."""
    sparse = replace(JOB, visible_fraction=1e-9)
    assert exposed(sparse) == pytest.approx(8 * exposed(JOB), rel=1e-3)


def on_network(machine: Machine, gbytes: float) -> Machine:
    """Return the machine with GB/s of a NIC."""
    return replace(machine, rates=replace(machine.rates, network_gbytes=gbytes))


def test_a_nic_has_a_rate_of_its_own() -> None:
    """Eight of 11 other ranks lie behind it; a network without end leaves the links of the host."""
    job, two_hosts = replace(JOB, seqlen=3 << 15, cp_size=12), replace(HOST, num_gpus=12)
    by_rate = [exposed(job, on_network(two_hosts, gbytes)) for gbytes in (15, 30)]
    assert by_rate[0] > 1.5 * by_rate[1]
    fast = [exposed(job, on_network(two_hosts, gbytes)) for gbytes in (1e6, 1e9)]
    assert 0 < fast[0] == pytest.approx(fast[1])


def test_blocks_expose_the_gradients_of_the_last_one() -> None:
    job, two_hosts = replace(JOB, seqlen=3 << 22, cp_size=12), replace(HOST, num_gpus=12)
    sizes, heads = block_sizes(job), sections_at_a_time(job).backward
    assert len(sizes) > 1 and len(heads) == 8
    gradients = 2 * 11 / 12 * job.seqlen * job.model.kv_size * 4
    last = sizes[-1] / 11 / 8 * gradients * 8 / 11 / (HOST.rates.network_gbytes * 1e9)
    assert exposed(job, two_hosts) == pytest.approx(last)
    assert exposed(job, on_network(two_hosts, 0.06)) > 100 * exposed(job, two_hosts)


def test_heads_are_exchanged_inside_whole_hosts() -> None:
    """Two hosts: a rank has the rows of eight, with four of 32 query heads and one KV head, and one rank to talk to."""
    job, two_hosts = replace(JOB, seqlen=1 << 20, cp_size=16), replace(HOST, num_gpus=16)
    rail = job.on(two_hosts).rail
    assert (rail.cp_size, rail.world_size, rail.local_tokens) == (2, 16, 1 << 19)
    assert (rail.model.num_heads, rail.model.num_kv_heads) == (4, 1)
    assert worst_moment(job, two_hosts)[1]["transport buffers"] == transport_bytes(rail) + exchanged_bytes(job)
    exchanged = 6 * (32 + 8) * 128 * 2 * job.local_tokens * 7 / 8
    seconds = exchanged / (HOST.gpu.nvlink_gbytes * HOST.rates.copies * 1e9)
    assert exposed(job, on_network(two_hosts, 1e9)) == pytest.approx(seconds, rel=1e-3)
    uneven = replace(job.model, num_heads=36, num_kv_heads=12)
    assert replace(job, model=uneven).on(two_hosts).exchanging == replace(job, cp_size=4).on(two_hosts).exchanging == 1


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


def exchanged_bytes(job: TrainingJob) -> int:
    """Bytes of the areas and the buffer of a rank that exchanges heads of a backward with seven others."""
    areas = Areas(0, 2)
    q, k = (
        torch.empty(1, job.local_tokens, heads, 128, dtype=torch.bfloat16, device="meta")
        for heads in (job.model.num_heads, job.model.num_kv_heads)
    )
    lse = torch.empty(1, job.model.num_heads, job.local_tokens, device="meta")
    rail = SimpleNamespace(backward=lambda dout, dlse, q, k, v, *_: (q, k, v))
    call = Ulysses(lambda q, k: rail, areas, tuple(range(8)), areas, "zigzag", NO_NUMBER)  # type: ignore[arg-type, return-value]
    release_buffers()
    with mock.patch("ringflash.attention.head_exchange.watching", lambda *_: Unwatched()):
        grads = call.backward(q, None, q, k, k, q, lse)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    held = sum(areas.sizes.values()) + buffer_bytes()
    release_buffers()
    return held


def test_rings_that_lie_across_two_hosts_are_planned_so() -> None:
    """The second six of 24 ranks are the last two of a host of eight and four of the next; two fours are not."""
    job = replace(JOB, seqlen=3 << 15, cp_size=6, dp_size=4)
    machine = on_network(replace(HOST, num_gpus=24), 0.6)
    assert exposed(job, machine) > 10 * exposed(job, on_network(machine, 1e6))
    for inside, gpus in ((replace(job, cp_size=4, dp_size=6), 24), (replace(job, dp_size=1), 6)):
        slow, fast = (exposed(inside, on_network(replace(machine, num_gpus=gpus), x)) for x in (0.6, 1e6))
        assert slow == fast
    assert worst_moment(job, machine)[1]["transport buffers"] == transport_bytes(job)


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--seqlen", "128k"], 0), (["--seqlen", "16m"], 1)], ids=["fits", "does-not-fit"]
)
def test_command_says_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert main(["plan", str(tmp_path), *arguments, "--json"]) == status
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is (status == 0)
    needed = sum(plan["memory_bytes"].values())
    assert (needed <= plan["machine"]["gpu"]["memory_bytes"]) is plan["fits"]
    assert main(["plan", str(tmp_path), *arguments]) == status
    printed = capsys.readouterr().out
    assert f"{needed / GIB:.2f}" in printed and ("It fits." in printed) is (status == 0)


def test_the_remedies_are_flags_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With those printed it fits, as over as many GPUs as printed."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    command = ["plan", str(tmp_path), "--seqlen", "2m", "--gpus", "8"]
    assert main(command) == 1
    printed = capsys.readouterr().out
    change, gpus = (re.search(f"{words} *(--.*)", printed) for words in ("so, add:", "GPUs:"))
    assert change is not None and gpus is not None and change[1].startswith("--model.memory.")
    assert main([*command, *change[1].split()]) == 0 == main([*command, *gpus[1].split()])
    assert main([*command, *change[1].split(), "--model.memory.offload_checkpoints", "false"]) == 1


@pytest.mark.parametrize(
    "name, options, cp_size, dp_size",
    [
        ("1m_cp64_8hosts", [], 64, 1),
        ("128k_cp8_8gpus", ["--gpus", "16"], 8, 2),
        ("1m_cp64_8hosts", ["--cp", "8"], 8, 8),
    ],
)
def test_a_recipe_says_who_shares_a_sequence(
    name: str, options: list[str], cp_size: int, dp_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = [str(ROOT / "recipes" / "lightning" / f"{name}.yaml") for name in ("qwen3_8b_pretrain", name)]
    main(["plan", *recipes, *options, "--json"])
    job = json.loads(capsys.readouterr().out)["job"]
    assert (job["cp_size"], job["dp_size"], job["precision"]) == (cp_size, dp_size, "bf16-mixed")


@pytest.mark.parametrize(
    "text", ["trainer: {strategy: auto}", "trainer: {strategy: {init_args: null}}", "trainer: null"]
)
def test_a_recipe_need_not_say_who_shares_a_sequence(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "over.yaml").write_text(text)
    main(
        ["plan", str(ROOT / "recipes" / "lightning" / "qwen3_8b_pretrain.yaml"), str(tmp_path / "over.yaml"), "--json"]
    )
    assert json.loads(capsys.readouterr().out)["job"]["cp_size"] == 8


def test_a_precision_that_no_plan_knows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fp32.yaml").write_text("trainer: {precision: 32-true}")
    recipe = ROOT / "recipes" / "lightning" / "quickstart.yaml"
    assert main(["plan", str(recipe), str(tmp_path / "fp32.yaml")]) == 2
    assert "for a plan, got '32-true'" in capsys.readouterr().err


def test_recipes_of_deepspeed_are_not_planned_as_fsdp(capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO below stage 3 has the weights whole on every GPU: 30 GiB of 8 B parameters, planned as 4."""
    recipes = [str(ROOT / "recipes" / x) for x in ("lightning/qwen3_8b_pretrain.yaml", "deepspeed/quickstart.yaml")]
    assert main(["plan", *recipes]) == 2
    assert (
        "trainer.strategy must be ContextParallelStrategy for a plan, got recipes.deepspeed" in capsys.readouterr().err
    )


def test_command_reads_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ROOT / "recipes" / "lightning" / "quickstart.yaml"
    assert main(["plan", str(recipe), "--gpus", "2", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert (job["seqlen"], job["checkpointing"]) == (1536, "none")
    flags = ["--model.memory.checkpointing", "full", "--model.memory.offload_checkpoints", "true"]
    assert main(["plan", str(recipe), "--gpus", "2", "--json", *flags]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert (job["checkpointing"], job["offload_checkpoints"]) == ("full", True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--seqlen must be given with a configuration, got none"),
        (["--seqlen", "many"], "--seqlen must be a number of tokens, got 'many'"),
        (["--seqlen", "1001"], "seqlen must be divisible by 2 * cp_size (16), got 1001; pad to 1008."),
        (["--seqlen", "1200", "--cp", "3"], "--cp must divide --gpus (8), got 3"),
        (["--seqlen", "1k", "--rates.products", "0"], "rate products must be positive, got 0"),
        (["--seqlen", "1k", "--rates", '{"products": 0}'], "rate products must be positive, got 0"),
        (["--seqlen", "1k", "--gpus", "0"], "cp_size must be an integer of 1 or more, got 0"),
        (["--seqlen", "1k", "--cp", "0"], "cp_size must be an integer of 1 or more, got 0"),
        (["--seqlen", "1k", "--gpus_per_host", "0"], "gpus_per_host must be positive, got 0"),
        (["--seqlen", "1k", "--host_memory_gib", "0"], "--host_memory_gib must be positive, got 0"),
        (["--seqlen", "1k", "--visible", "2"], "visible_fraction must be above 0 and at most 1, got 2"),
        (["--seqlen", "1k", "--model.memory.mlp_tile_tokens", "-5"], "mlp_tile_tokens must be an integer of 0"),
        (["--seqlen", "0"], "seqlen must be an integer of 1 or more, got 0"),
        (["--seqlen", "²"], "--seqlen must be a number of tokens, got '²'"),
        (["config.json", "--seqlen", "1k"], "files must be one configuration or recipes, got 2 files"),
    ],
)
def test_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert main(["plan", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_status_1_is_a_finding_and_never_an_accident(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 says that the job does not fit; Python's own status for an error that nobody expected is 1 as well."""
    (tmp_path / "config.json").write_text("[1]")
    assert main(["plan", str(tmp_path), "--seqlen", "1k"]) == 2
    assert "must be a transformers configuration" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    monkeypatch.setattr("ringflash.commands.plan.command.make_plan", lambda job, machine: {}["fits"])
    assert main(["plan", str(tmp_path), "--seqlen", "1k"]) == 2
    assert "KeyError" in capsys.readouterr().err


def test_the_plan_of_a_windowed_model_counts_what_its_layers_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the layers see 4096 keys of a million: half of the pairs."""
    windowed = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 18}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B | windowed))
    main(["plan", str(tmp_path), "--seqlen", "1m", "--json"])
    fraction = json.loads(capsys.readouterr().out)["job"]["visible_fraction"]
    assert fraction == pytest.approx((1 + visible_fraction(1 << 20, [4095])) / 2)


def test_a_model_that_no_length_fits_is_not_told_to_be_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, "intermediate_size": 1 << 27}))
    assert main(["plan", str(tmp_path), "--seqlen", "128k", "--gpus", "1"]) == 1
    assert "no change known here makes it fit; take more GPUs, or a smaller model" in capsys.readouterr().out


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 8, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "head_dim": 8,
}  # fmt: skip
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
def test_what_is_read_off_a_model_is_its_own(family: str, options: dict[str, Any]) -> None:
    """Parameters, what multiplies a token, windows; and, beside a forward with numbers, what its layers keep."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = small(family, **options)
    shape, windows = model_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.matmul_parameters, shape.mean_size) == matmul_sizes(model)
    assert windows == layer_windows(model.config)
    first, _ = model_of({**config, "num_hidden_layers": 1, **_of_one_layer(config)})
    seqlen = 96
    for tile in (0, 40) if first.tiled_parameters else (0,):
        kept = activation_bytes(TrainingJob(first, seqlen, 1, mlp_tile_tokens=tile))
        rotary = saved_bytes({**config, **_of_one_layer(config)}, seqlen, tile) - kept
        assert 0 <= rotary <= seqlen * 2 * shape.head_dim * 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dense_layers_keep_what_the_page_says(family: str) -> None:
    """The first line of docs/memory.md, and for each norm of a token a number in fp32; with Liger less."""
    model, _ = model_of(small(family))
    h, q, kv, f, heads = model.hidden_size, model.q_size, model.kv_size, SMALL["intermediate_size"], model.num_heads
    normed = heads + model.num_kv_heads if family == "qwen3" else 0
    page = 16 * h + 4 * q + 4 * kv + 8 * f + 4 * heads + (6 * (q + kv) if normed else 0)
    assert model.plain.kept.layer == page + 4 * (2 + normed)
    assert model.liger is not None
    fused = 8 * h + 4 * q + 4 * kv + 6 * f + 4 * heads + (2 * (q + kv) if normed else 0)
    assert model.liger.kept.layer == fused and model.liger.kept.input == 2 * h


def _of_one_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Lists by layer, of the first one alone."""
    return {name: config[name][:1] for name in ("layer_types", "no_rope_layers") if name in config}


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], *options: str) -> Any:
    """Return what the command says of a configuration."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    main(["plan", str(tmp_path), "--seqlen", "128k", "--gpus", "8", "--json", *options])
    return json.loads(capsys.readouterr().out)


def test_experts_take_memory_all_and_time_by_the_active(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as many experts, as many a token; and the other way round."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 2}
    base = small("qwen3_moe", **sizes)
    more, busier = base | {"num_experts": 128}, base | {"num_experts_per_tok": 4}
    plans = [planned(tmp_path, capsys, config) for config in (base, more, busier)]
    weights, linear, at_work = (
        [plan[table][name] for plan in plans]
        for table, name in (
            ("memory_bytes", "weights"), ("step_seconds", "linear"), ("memory_bytes", "one layer at work")
        )
    )  # fmt: skip
    assert weights[1] > 1.9 * weights[0] == 1.9 * weights[2]
    assert linear[1] < 1.1 * linear[0] < linear[2] and at_work[1] < 1.1 * at_work[0] < at_work[2]


def test_a_model_that_computes_all_experts_takes_their_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 4's of transformers; MFU counts those that a token is sent to."""
    options = next(options for family, options in READ if family == "llama4_text")
    config = small("llama4_text", **options)
    plan = planned(tmp_path, capsys, config)
    model = plan["job"]["model"]
    others = 2 * 3 * 3 * 64 * 160  # in two layers three experts of three matrices; beside them rotary angles
    assert model["computed_parameters"] - model["matmul_parameters"] == pytest.approx(others, rel=1e-4)
    chunked = (visible_fraction(1 << 17, [ChunkedAttention(40)]) + 1) / 2
    assert plan["job"]["visible_fraction"] == pytest.approx(chunked)
    main(["plan", str(tmp_path), "--seqlen", "128k"])
    assert "its code also computes experts for tokens of others" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            small("starcoder2"),
            ["--model.memory.mlp_tile_tokens", "8"],
            "mlp_tile_tokens must be 0 for starcoder2, got 8; MLPs of",
        ),
        (
            small("mixtral", **EXPERTS),
            ["--model.memory.liger", "true"],
            "liger must be false for a plan of mixtral, got true",
        ),
        (small("gemma2"), [], "logits of Gemma2ForCausalLM must be those of lm_head times a number"),
        (small("persimmon"), [], "model_type must be one whose parameters can be placed, got 'persimmon'"),
        ({"model_type": "mamba"}, [], "model_type must be one of a text model with model.layers, got 'mamba'"),
        ({"model_type": "nothing"}, [], "config must be one that transformers builds a causal model from, got"),
        (small("mixtral", hidden_size="many"), [], "config must be one that transformers builds a causal model from"),
    ],
)
def test_models_that_no_plan_counts_are_refused(
    config: dict[str, Any], options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--seqlen", "1k", *options]) == 2
    assert message in capsys.readouterr().err


def test_changes_that_a_model_does_not_take_are_not_proposed() -> None:
    shape, _ = model_of(small("starcoder2"))
    job = TrainingJob(shape, 1 << 10, cp_size=8, checkpointing="none")
    job = replace(job, seqlen=longest_sequence(replace(job, checkpointing="full"), HOST))
    cheapest = cheapest_change(job, HOST)
    assert cheapest is not None and not cheapest[1].liger and not cheapest[1].mlp_tile_tokens


def test_a_host_more_needs_less_memory_each() -> None:
    sizes = [total_bytes(replace(JOB, cp_size=n), replace(HOST, num_gpus=n)) for n in (8, 16, 64, 512)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("memory", "seqlen", "message"),
    [
        ({}, "64k", "seqlen must be an integer of 1 or more, got '64k'"),
        ({"mlp_tile_tokens": "8k"}, 4096, "mlp_tile_tokens must be an integer of 0 or more, got '8k'"),
        ({"checkpoints": "full"}, 4096, "must be a recipe with model.model and data, got TypeError: .*'checkpoints'"),
        ({"liger": "yes"}, 4096, "liger must be true, false or 'auto', got 'yes'"),
        ({"checkpointing": "half"}, 4096, "checkpointing must be one of none, .*, got 'half'"),
    ],
)
def test_a_recipe_that_would_not_run_is_not_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: dict[str, Any], seqlen: object, message: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"model": {"model": QWEN3_8B, "memory": memory}, "data": {"seqlen": seqlen}}))
    assert main(["plan", str(recipe)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_fp8_of_the_recipe_or_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """The overlay's backward is planned; attention is faster by the rates, everything else as without."""
    recipes = ROOT / "recipes" / "lightning"

    def planned(*more: object) -> dict[str, Any]:
        arguments = [str(recipes / "qwen3_8b_pretrain.yaml"), *map(str, more), "--gpus", "8", "--json"]
        assert main(["plan", *arguments]) in (0, 1)
        return json.loads(capsys.readouterr().out)["step_seconds"]

    flags = ["--model.impl", "hopper_fp8", "--model.fp8_backward", "fp8"]
    plain, overlaid, asked = planned(), planned(recipes / "fp8.yaml"), planned(*flags)
    for found, backward in ((overlaid, 0.64), (asked, 0.69)):
        assert found["attention forward"] == pytest.approx(plain["attention forward"] * 0.64 / 0.88)
        assert found["attention backward"] == pytest.approx(plain["attention backward"] * 0.59 / backward)
        assert found["linear"] == plain["linear"]
