"""The comparison of `ringflash verify`: what passes, what fails, and where. One process, no model."""

from dataclasses import replace

import pytest
import torch

from ringflash.verify.compare import Check, Runs, compare, errors_of
from ringflash.verify.diagnosis import Reach, ShardedPositions, explain, infinite_hint, layer_hint
from ringflash.verify.observation import Observation
from ringflash.verify.rounding import may_be_rounding, round_again, rounding_hint, step_from

SEQLEN, NUM_CHUNKS = 32, 4


def observation(dtype: torch.dtype = torch.float64) -> Observation:
    """Rows that shrink along the sequence, as causal attention's do, and three parameters."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(4, 1, SEQLEN, 8, generator=generator, dtype=torch.float64) / torch.arange(1, SEQLEN + 1)[:, None]
    low = draw.to(dtype)
    weights = {f"w{i}": x[0].clone() for i, x in enumerate(low[:3])}
    return Observation(
        weights={name: x.float() for name, x in weights.items()}, inputs={"ids": torch.arange(SEQLEN)[None]},
        layers={"layers.0": low[0].clone(), "layers.1": low[1].clone()}, logits={"logits": low[2].clone()}, loss=2.0,
        loss_gradient={"d loss / d hidden": low[3].clone()}, eval_losses={"eval loss": 3.0},
        gradients=weights, stepped={name: 2 * x for name, x in weights.items()},
    )  # fmt: skip


def runs_of(got: Observation, want: Observation | None = None, baseline: Observation | None = None) -> Runs:
    """The run, the truth and the baseline in bf16."""
    baseline = baseline or observation(torch.bfloat16)
    return Runs(got, want or observation(), baseline, NUM_CHUNKS, torch.finfo(torch.bfloat16).eps)


def failed(got: Observation, baseline: Observation | None = None) -> list[Check]:
    return [check for check in compare(runs_of(got, baseline=baseline)) if check.failed]


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_the_baseline_passes(default: torch.dtype) -> None:
    """Also if the model's code has set torch's default dtype."""
    torch.set_default_dtype(default)
    try:
        assert failed(observation(torch.bfloat16)) == []
    finally:
        torch.set_default_dtype(torch.float32)


def test_zeroed_last_rows_fail_where_they_start() -> None:
    """Small compared with the first rows, but judged in another chunk."""
    got = observation(torch.bfloat16)
    got.layers["layers.1"][:, -6:] = 0
    (check,) = failed(got)
    assert (check.name, check.failed, check.position) == ("layer outputs", ["layers.1"], SEQLEN - 6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_fails(value: float) -> None:
    got = observation(torch.bfloat16)
    got.gradients["w1"][3, 2] = value
    (check,) = failed(got)
    assert (check.name, check.failed) == ("gradients", ["w1"])


def test_a_baseline_that_overflows_lets_nothing_pass() -> None:
    """Its error would be an infinite budget: for what is finite and wrong, and for what overflows as well."""
    for value in (7.0, float("inf")):
        baseline, got = observation(torch.bfloat16), observation(torch.bfloat16)
        baseline.layers["layers.1"][:, 3] = float("inf")
        got.layers["layers.1"][:, 3] = value
        assert [(c.name, c.failed) for c in failed(got, baseline)] == [("layer outputs", ["layers.1"])]


def test_logits_that_no_run_has_say_why() -> None:
    seen = observation()
    seen.logits = {}
    (check,) = (c for c in compare(Runs(seen, seen, seen, NUM_CHUNKS, 1e-9)) if c.verdict == "not compared")
    assert check.name == "logits" and check.note.startswith("computed only for transformers models")


def test_a_missing_gradient_and_a_missing_loss_fail() -> None:
    got = observation(torch.bfloat16)
    del got.gradients["w2"]
    assert [(c.name, c.failed, c.ratio) for c in failed(replace(got, eval_losses={}))] == [
        ("evaluation loss", ["eval loss"], float("inf")), ("gradients", ["w2"], float("inf")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("got", "want", "hint"),
    [
        ({}, 3.0, "eval loss is not reported at cp=N"),
        ({"eval loss": 1.0}, 0.0, "eval loss is inf times the truth"),
        ({"eval loss": 6.0}, 3.0, "eval loss is 2x: cp_size times the truth"),
    ],
)
def test_a_loss_that_fails_is_explained(got: dict[str, float], want: float, hint: str) -> None:
    """Also one that cp=N does not report, and one that is 0 at cp=1."""
    seen, truth = replace(observation(), eval_losses=got), replace(observation(), eval_losses={"eval loss": want})
    runs = runs_of(seen, truth, truth)
    (check,) = (check for check in compare(runs) if check.failed)
    first, found = explain(check, runs, [], ShardedPositions(SEQLEN, 2, "zigzag"))
    assert first == "evaluation loss: eval loss" and found.startswith(hint)


@pytest.mark.parametrize(("factor", "passes"), [(1 + 2e-3, True), (1.1, False)])
def test_a_loss_may_be_as_wrong_as_rounding_explains(factor: float, passes: bool) -> None:
    got = replace(observation(torch.bfloat16), loss=2.0 * factor)
    assert [c.name for c in failed(got)] == ([] if passes else ["loss"])


def test_parameter_of_lucky_rounding_passes() -> None:
    """Its baseline happens to be exact; the usual error of the others is its budget."""
    baseline, got = observation(torch.bfloat16), observation(torch.bfloat16)
    baseline.gradients["w0"] = observation().gradients["w0"]
    assert not failed(got, baseline)


@pytest.mark.parametrize(("factor", "passes"), [(1.8, True), (2.5, False), (float("nan"), False)])
def test_the_largest_error_of_all_baselines_counts(factor: float, passes: bool) -> None:
    """At a position whose error is a matter of luck, of which the first baseline had much."""
    got, first, *more = (observation(torch.bfloat16) for _ in range(4))
    got.layers["layers.1"][:, 9] += 0.02 * factor
    more[1].layers["layers.1"][:, 9] += 0.02
    runs = runs_of(got, baseline=first)
    assert [check.failed for check in compare(runs) if check.failed] == [["layers.1"]]
    errors = tuple(errors_of(seen, runs) for seen in more)
    assert not any(check.failed for check in compare(replace(runs, more=errors))) == passes


def test_weights_that_are_rounded_again() -> None:
    """One in twelve is a neighbour, above or below; a step then starts where it did."""
    weights = {"w": torch.linspace(-2, 2, 120_000), "v": torch.ones(0)}
    other = round_again(weights, 1)
    moved = other["w"] != weights["w"]
    assert 9_500 < int(moved.sum()) < 10_500
    assert (other["w"] > weights["w"]).sum().item() == pytest.approx(int(moved.sum()) / 2, rel=0.05)
    near = [weights["w"].nextafter(torch.tensor(end)) for end in (-9.0, 9.0)]
    assert ((other["w"] == near[0]) | (other["w"] == near[1]))[moved].all()
    assert not torch.equal(round_again(weights, 2)["w"], other["w"])
    seen = step_from(weights, Observation(weights=other, stepped={"w": other["w"] + 0.5, "v": other["v"]}))
    assert (seen.stepped["w"] - weights["w"].double() - 0.5).abs().max() < 2e-7


def test_positions_are_named_with_chunk_and_rank() -> None:
    place = ShardedPositions(SEQLEN, 2, "zigzag")
    assert place.describe(8) == "position 8 (chunk 1, held by rank 1)"
    assert place.describe(31) == "position 31 (chunk 3, held by rank 0)"
    assert place.chunk_ends == {7, 15, 23, 31}


def test_shard_positions_are_suspected_if_they_differ() -> None:
    place = ShardedPositions(SEQLEN, 2, "zigzag")
    probes = [Reach(0, [0, 1, 30], [0, 1, 30])]
    assert "(RoPE) of the shard's own" in layer_hint(8, probes, place, False)
    assert "what else the layer has at cp=N" in layer_hint(7, probes, place, False)


@pytest.mark.parametrize(
    ("checks", "dtype", "rounding"),
    [
        ([("layer outputs", 1.3), ("gradients", 2.4)], torch.float32, True),
        ([("layer outputs", 1.3)], torch.float32, True),
        ([("gradients", 2.4)], torch.bfloat16, False),
        ([("layer outputs", 1.3), ("gradients", 2600.0)], torch.float32, False),
        ([("gradients", 2.4), ("gradients equal on all ranks", 2.0)], torch.float32, False),
        ([("cp=N run", None)], torch.float32, False),
        ([], torch.float32, False),
    ],
)
def test_only_small_errors_in_float32_may_be_rounding(
    checks: list[tuple[str, float | None]], dtype: torch.dtype, rounding: bool
) -> None:
    failed = [Check(name, ratio, ["a tensor"]) for name, ratio in checks]
    eps = torch.finfo(dtype).eps
    assert may_be_rounding(failed, eps) == rounding
    little = rounding and max(ratio or 0.0 for _, ratio in checks) < 2
    assert ("Repeat with other values" in rounding_hint(failed, eps)) == little


@pytest.mark.parametrize(("everywhere", "where"), [(False, "only at cp=N"), (True, "at cp=1 as well")])
def test_what_is_not_finite_is_no_mask_that_is_dropped(everywhere: bool, where: str) -> None:
    """NaN differs from itself, and would seem to be reached by every token."""
    baseline = observation(torch.bfloat16)
    if everywhere:
        baseline.layers["layers.1"][:, 3] = float("nan")
    assert where in infinite_hint("layers.1", Runs(observation(), observation(), baseline, NUM_CHUNKS, 0.0))
