"""The helper that judges errors: what it lets pass and what not. CPU, one process."""

import pytest
import torch

from ringflash.testing import dense
from ringflash.testing.tolerance import assert_close, ratios


def problem() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """fp64 oracle and bf16 baseline of a causal sequence of 128 tokens."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 128, 2, 16, generator=generator).bfloat16() for _ in range(4)]
    return dense.attention(*(x.double() for x in inputs), causal=True), dense.attention(*inputs, causal=True)


def test_the_baseline_passes_against_itself() -> None:
    want, baseline = problem()
    assert max(ratio.maximum for ratio in assert_close(baseline, want, baseline, num_chunks=4)) <= 0.5


def test_zeroed_last_rows_fail() -> None:
    """Causal rows shrink: over the whole tensor the last rows are small compared with the first."""
    want, baseline = problem()
    got = {"out": baseline["out"].clone()}
    got["out"][:, 96:] = 0
    with pytest.raises(AssertionError, match="out of chunk 3"):
        assert_close(got, want, baseline, num_chunks=4)


def test_a_shift_below_the_maximum_fails_by_the_mean() -> None:
    want, baseline = problem()
    got = {"out": (want["out"] + 1.5 * (baseline["out"] - want["out"]).abs().max())}
    (ratio,) = ratios("out", got["out"], want["out"], baseline["out"])
    assert ratio.maximum <= 1 < ratio.mean
    with pytest.raises(AssertionError, match="out of chunk 0"):
        assert_close(got, want, baseline)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_fails(value: float) -> None:
    want, baseline = problem()
    got = {"out": baseline["out"].clone()}
    got["out"][0, 5, 1, 3] = value
    with pytest.raises(AssertionError, match="out must be finite exactly where"):
        assert_close(got, want, baseline)


def test_an_empty_row_must_be_empty_in_both() -> None:
    lse = torch.tensor([[[1.0, float("-inf")]]], dtype=torch.float64)
    assert_close({"lse": lse.clone()}, {"lse": lse})
    for other in (0.0, float("inf"), float("nan")):
        with pytest.raises(AssertionError, match="lse must be finite exactly where"):
            assert_close({"lse": torch.tensor([[[1.0, other]]], dtype=torch.float64)}, {"lse": lse})


def test_fp64_is_held_to_eleven_digits() -> None:
    want = {"out": torch.ones(1, 4, 1, 2, dtype=torch.float64)}
    assert_close({"out": want["out"] + 9e-12}, want)
    with pytest.raises(AssertionError, match="errors must stay within"):
        assert_close({"out": want["out"] + 1.1e-11}, want)


def test_shapes_must_agree() -> None:
    with pytest.raises(AssertionError, match="out must be"):
        assert_close({"out": torch.ones(1, 2)}, {"out": torch.ones(2, 1, dtype=torch.float64)})
