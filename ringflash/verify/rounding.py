"""Further baselines for float32, in which correct rounding may exceed twice the error of a single baseline.

The error of a run is its roundings, amplified by the model. Trained weights amplify the roundings of a few tokens far
more than others. The largest error of a chunk is then the error of one token, which is a random number: the baseline is
one sample, and cp=N another. Twice one sample is no bound: of two independent normal numbers, one exceeds
twice the other in 30% of cases. So if cp=N exceeds its budget a little, further baselines are drawn until it does not,
up to `MOST_BASELINES`. The budget is twice the largest error of all baselines, which a normal number exceeds in 1 of
7,000 cases.

A further baseline is a run at cp=1, in the dtype under test, of weights that were rounded once more: each is moved to a
neighbouring number with a probability of 1/12, the variance of rounding in units of the last place. From then on no
operation rounds as it did before. Attention merges at least as many pieces of the keys as at cp=N, near ones first.
Each merge rounds lse, and these errors add up if the first piece outweighs the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ringflash.verify.compare import ROUNDED, Check
from ringflash.verify.observation import Observation, Tensors

MOST_BASELINES = 33
_MOST = 1000.0  # error over the budget of one baseline: right models had up to 17, planted mistakes over 2,000
_LITTLE = 2.0  # error over the budget of all baselines: one right run in 100 had 1.25, the others at most 1


def may_be_rounding(checks: Iterable[Check], eps: float, most: float = _MOST) -> bool:
    """Return True if something failed that rounding explains. Only in float32 do mistakes differ from it that much.

    Args:
        most: limit of error over budget.
    """
    failed = [check for check in checks if check.failed]
    ratios = [check.ratio for check in failed if check.ratio is not None and check.name in ROUNDED]
    return eps < 1e-6 and len(ratios) == len(failed) > 0 and max(ratios) < most


def rounding_hint(checks: Iterable[Check], eps: float) -> str:
    """Say that what failed by all baselines may still be rounding; "" if it exceeds them by more than a little."""
    if not may_be_rounding(checks, eps, _LITTLE):
        return ""
    return (
        f"errors are slightly larger than those of {MOST_BASELINES} runs on one device. Repeat with other values of "
        "--seed: a mistake fails with each of them, rounding with about 1 in 100."
    )


def round_again(weights: Tensors, seed: int) -> Tensors:
    """Return weights with one in twelve, drawn at random, replaced by the next number above or below."""
    generator = torch.Generator("cpu").manual_seed(seed)
    rounded = {}
    for name, weight in weights.items():
        draw = torch.rand(weight.shape, dtype=torch.float64, generator=generator, device="cpu")
        infinite = torch.full_like(weight, torch.inf).copysign((draw - 1 / 24).to(weight.dtype))
        rounded[name] = torch.where(draw < 1 / 12, weight.nextafter(infinite), weight)
    return rounded


def step_from(weights: Tensors, seen: Observation) -> Observation:
    """Let an observed step start from other weights, which were `seen.weights` before they were rounded again."""
    for name, weight in seen.weights.items():
        seen.stepped[name] = weights[name].double() + (seen.stepped[name].double() - weight.double())
    return seen
