"""ringflash plan: its search against itself, and its command. One process, no GPU."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.commands.cli import main
from ringflash.commands.plan.command import MODEL_KEYS, visible_fraction
from ringflash.commands.plan.job import GIB, Float8, TrainingJob
from ringflash.commands.plan.memory import worst_moment
from ringflash.commands.plan.ring import ring_of
from ringflash.commands.plan.search import CHANGES, cheapest_change, fastest_split, fewest_gpus, fits, longest_sequence
from ringflash.commands.plan.timing import step_time
from ringflash.huggingface.flops import ChunkedAttention
from ringflash.lightning import float8
from ringflash.lightning.module import CausalLM
from tests.helpers.jobs import EXPERTS, HOST, JOB, LLAMA4, QWEN3_8B, small
from tests.helpers.plans import model_of, read_once  # noqa: F401, a fixture
from tests.recipes.launching import ROOT

RECIPES = ROOT / "recipes" / "lightning"
TO_PRETRAIN = str(RECIPES / "qwen3_8b_pretrain.yaml")

pytestmark = pytest.mark.usefixtures("read_once")


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
        ({"model": {"fp8_backward": "fp8"}}, "got ['fp8_backward']; correct them"),
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
    config = small("llama4_text", **LLAMA4)
    job, printed = (plan(config, "--seqlen", "128k", *json) for json in (["--json"], []))
    model = job.said["job"]["model"]
    others = 2 * 3 * 3 * 64 * 160  # in two layers three experts of three matrices; and rotary angles
    assert model["computed_parameters"] - model["matmul_parameters"] == pytest.approx(others, rel=1e-4)
    chunked = (visible_fraction(1 << 17, [ChunkedAttention(40)]) + 1) / 2
    assert job.said["job"]["visible_fraction"] == pytest.approx(chunked)
    assert "its code computes experts also for tokens that are not sent to them" in printed.out
