"""Comparison of cp=N with cp=1: checks in the order of the data path, each with the error budget that rounding allows.

    max|got - want| <= 2 max|baseline - want| + eps max|want|          (and the same with means)

`want` is cp=1 in fp64, `baseline` is cp=1 in the dtype under test, `got` is cp=N in that dtype; positions are compared
chunk by chunk. This is the rule of the tests (`ringflash.testing.tolerance`) with one addition: if the baseline of a
chunk or parameter happens to be more accurate than is usual for its kind, the usual relative error (the upper quartile)
replaces it. If there are several baselines (`rounding.py`), the largest of their errors counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringflash.verify.observation import Observation

Extent = tuple[float, float]  # maximum and mean
Errors = dict[tuple[str, str, int], Extent]  # by check, name and chunk

# Names of the checks that others ask for.
WEIGHTS, BATCH, LAYERS, LOGITS, LOSS = "weights before", "batch", "layer outputs", "logits", "loss"
LOSS_GRADIENT, EVALUATION, GRADIENTS = "loss gradient by position", "evaluation loss", "gradients"
AGREEMENT, STEP, MASK = "gradients equal on all ranks", "optimizer step", "mask"

# Checks whose values rounding changes, and what they compare, by name; those of `_POSITIONED` chunk by chunk.
ROUNDED: dict[str, Callable[[Observation], dict[str, Any]]] = {
    LAYERS: lambda seen: seen.layers,
    LOGITS: lambda seen: seen.logits,
    LOSS: lambda seen: {"loss": seen.loss},
    LOSS_GRADIENT: lambda seen: seen.loss_gradient,
    EVALUATION: lambda seen: seen.eval_losses,
    GRADIENTS: lambda seen: seen.gradients,
    STEP: lambda seen: seen.stepped,
}
_POSITIONED, _SCALARS = (LAYERS, LOGITS, LOSS_GRADIENT), (LOSS, EVALUATION)

# Largest relative differences of FP8 from exact attention. The limit of the gradients is for the attention of one layer
# with outliers; models that trained had 3 to 5% (docs/fp8.md).
FP8_LOSS, FP8_GRADIENTS = 0.01, 0.12


@dataclass
class Check:
    """Result of one comparison.

    Args:
        name: name of the check.
        ratio: the largest error over budget; correct if at most 1. None if nothing could be compared.
        failed: names that exceed their budget, in the order of computation (gradients: of the backward).
        position: the first wrong position of the first failed name, if it has positions.
        note: explanation shown next to the verdict.
    """

    name: str
    ratio: float | None = None
    failed: list[str] = field(default_factory=list)
    position: int | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """ok, FAILED or not compared."""
        if self.failed:
            return "FAILED"
        return "not compared" if self.ratio is None else "ok"

    def add(self, name: str, ratio: float, position: int | None = None) -> bool:
        """Add the error over budget of one name; return False if it exceeds the budget for the first time."""
        self.ratio = max(self.ratio or 0.0, ratio)
        if ratio <= 1 or name in self.failed:
            return True
        if not self.failed:
            self.position = position
        self.failed.append(name)
        return False

    def as_json(self) -> dict[str, Any]:
        """Return the check as plain values."""
        return {"verdict": self.verdict, **asdict(self)}


@dataclass(frozen=True)
class Runs:
    """The three runs, and the number of chunks of the sequence in the layout.

    Args:
        more: errors of further baselines.
    """

    got: Observation
    want: Observation
    baseline: Observation
    num_chunks: int
    eps: float
    more: tuple[Errors, ...] = ()


def compare(runs: Runs) -> list[Check]:
    """Run all checks, in the order in which a mistake would propagate."""
    return [
        _weights(runs),
        _inputs(runs),
        _compare_by_position(LAYERS, runs),
        _compare_by_position(LOGITS, runs),
        _compare_by_name(LOSS, runs),
        _compare_by_position(LOSS_GRADIENT, runs),
        _compare_by_name(EVALUATION, runs),
        _compare_by_name(GRADIENTS, runs),
        Check(AGREEMENT, 2.0 if runs.got.disagreement else 0.0, runs.got.disagreement),
        _stepped(runs),
    ]


def errors_of(baseline: Observation, runs: Runs) -> Errors:
    """Return the errors of a run at cp=1."""
    errors: Errors = {}
    for check, read in ROUNDED.items():
        seen, want = read(baseline), read(runs.want)
        for key in (key for key in want if key in seen and _shape(seen[key]) == _shape(want[key])):
            for index, (x, reference) in enumerate(_parts(check, runs, seen[key], want[key])):
                errors[check, key, index] = _error(x, reference)
    return errors


def check_beside_exact(runs: Runs) -> list[Check]:
    """Compare loss and gradients of FP8 over the ring with exact attention, by `FP8_LOSS` and `FP8_GRADIENTS`.

    The other checks allow FP8 twice the error of the baseline, which uses FP8 on one device.
    """
    got, want = runs.got, runs.want
    names = [name for name in want.gradients if name in got.gradients]
    g, w = (torch.cat([seen.gradients[name].double().flatten() for name in names]) for seen in (got, want))
    return [
        _check_difference("FP8 against exact: loss", abs(got.loss / want.loss - 1), FP8_LOSS),
        _check_difference("FP8 against exact: gradients", ((g - w).norm() / w.norm()).item(), FP8_GRADIENTS),
    ]


def _check_difference(name: str, apart: float, limit: float) -> Check:
    """Return the check of a relative difference."""
    within = apart <= limit  # false for NaN
    ratio = apart / limit if apart == apart else float("inf")
    return Check(
        name, ratio, [] if within else ["relative difference"], note=f"{100 * apart:.2g}% apart, at most {limit:.0%}"
    )


def _weights(runs: Runs) -> Check:
    got, want = runs.got.weights, runs.baseline.weights
    apart = runs.got.apart_before
    wrong = [name for name in want if name not in got or name in apart or not torch.equal(got[name], want[name])]
    return Check(WEIGHTS, float(bool(wrong)) * 2, wrong, note="not equal on all ranks" if apart else "")


def _inputs(runs: Runs) -> Check:
    """Check that the gathered tensors of the batch are bitwise equal."""
    names = [name for name in runs.want.inputs if name in runs.got.inputs]
    check = Check(BATCH, 0.0 if names else None)
    for name in names:
        wrong = (runs.got.inputs[name] != runs.want.inputs[name]).movedim(1, 0).flatten(1).any(1)
        if wrong.any():
            check.add(name, float("inf"), int(wrong.nonzero()[0]))
    return check


def _compare_by_position(name: str, runs: Runs) -> Check:
    """Compare the tensors of one check position by position."""
    got, want, baseline = (ROUNDED[name](seen) for seen in (runs.got, runs.want, runs.baseline))
    names = [key for key in got if key in want and got[key].shape == want[key].shape]
    check = Check(name)
    if name == LOGITS and not names:
        check.note = "computed only for transformers models, whose last hidden state and head are known"
    usual = _usual_error(pair for key in names for pair in _parts(name, runs, baseline[key], want[key]))
    return _add_ratios(check, runs, names, usual)


def _compare_by_name(name: str, runs: Runs) -> Check:
    """Compare scalars or whole tensors; one that is missing at cp=N has failed.

    Scalars have the usual relative error of the last layer's output.
    """
    got, want = (ROUNDED[name](seen) for seen in (runs.got, runs.want))
    missing = [key for key in want if key not in got]
    read, names = (ROUNDED[LAYERS], list(runs.want.layers)[-1:]) if name in _SCALARS else (ROUNDED[name], list(want))
    usual = _usual_error((read(runs.baseline)[key], read(runs.want)[key]) for key in names)
    check = Check(name, float("inf") if missing else None, missing)
    return _add_ratios(check, runs, [key for key in want if key in got], usual)


def _add_ratios(check: Check, runs: Runs, names: list[str], usual: float) -> Check:
    """Add the errors over budget of the named values, chunk by chunk if they have positions."""
    got, want, baseline = (ROUNDED[check.name](seen) for seen in (runs.got, runs.want, runs.baseline))
    for key in names:
        for index, (x, base, reference) in enumerate(_parts(check.name, runs, got[key], baseline[key], want[key])):
            largest = _largest_errors(runs, (check.name, key, index), base, reference)
            ratio, row = _budget_used(x, largest, reference, usual, runs.eps)
            place = index * (want[key].shape[1] // runs.num_chunks) + row if check.name in _POSITIONED else None
            if not check.add(key, ratio, place) and check.name in _SCALARS:
                check.note = f"{got[key]:.6g} at cp=N, {want[key]:.6g} at cp=1"
    return check


def _parts(check: str, runs: Runs, *values: Any) -> Iterator[Any]:
    """Iterate over the chunks of tensors with positions, or over one part of others; numbers become tensors."""
    if check in _POSITIONED:
        return zip(*(x.chunk(runs.num_chunks, 1) for x in values), strict=True)
    return iter([tuple(torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in values)])


def _shape(x: Tensor | float) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Tensor) else ()


def _stepped(runs: Runs) -> Check:
    check, apart = _compare_by_name(STEP, runs), runs.got.apart_after
    if apart:
        check.failed += [name for name in apart if name not in check.failed]
        check.ratio, check.note = float("inf"), "not equal on all ranks"
    return check


def _usual_error(pairs: Any) -> float:
    """Return the upper quartile of the baseline's largest errors, relative to the largest values."""
    sizes = [(_error(base, want)[0], want.double().abs().max().item()) for base, want in pairs]
    errors = [error / size if size > 0 else 0.0 for error, size in sizes]
    return float(torch.tensor(errors, dtype=torch.float64).quantile(0.75)) if errors else 0.0


def _largest_errors(runs: Runs, key: tuple[str, str, int], base: Tensor, want: Tensor) -> Extent:
    """Return the largest errors of all baselines; NaN if one is."""
    errors = [_error(base, want), *(more[key] for more in runs.more if key in more)]
    maximum, mean = torch.tensor(errors, dtype=torch.float64, device="cpu").amax(0).tolist()
    return maximum, mean


def _error(x: Tensor, want: Tensor) -> Extent:
    return _extent((x.double() - want.double()).abs())


def _budget_used(got: Tensor, allowed: Extent, want: Tensor, usual: float, eps: float) -> tuple[float, int]:
    """Return error over budget (the worse of maximum and mean) and the first row (dim 1) that exceeds it."""
    want = want.double()
    error = (got.double() - want).abs()
    if not torch.isfinite(error).all():
        error = error.nan_to_num(float("inf"), float("inf"))
    limits = [2 * max(a, usual * b) + eps * b for a, b in zip(allowed, _extent(want.abs()), strict=True)]
    ratios = [_error_over_limit(e, limit) for e, limit in zip(_extent(error), limits, strict=True)]
    rows = error.movedim(1, 0).flatten(1).amax(1) > limits[0] if error.dim() > 1 else torch.zeros(1, dtype=torch.bool)
    return max(ratios), int(rows.nonzero()[0]) if rows.any() else 0


def _extent(x: Tensor) -> Extent:
    """Return (maximum, mean)."""
    return x.max().item(), x.mean().item()


def _error_over_limit(error: float, limit: float) -> float:
    """Return error over limit: infinity if the limit is 0, or infinite because the baseline is."""
    return 0.0 if error == 0 else error / limit if 0 < limit < float("inf") else float("inf")
