"""Gradients that a value which is not finite reaches in exact arithmetic, for tests of the backward."""

import math

import torch

from ringflash_kernels.mask import Mask

PLACES = [(name, value) for name in ("q", "k", "v", "dout") for value in (math.nan, math.inf)]


def plant(place: tuple[str, float], row: int, q, k, v, dout) -> None:
    """Write the value into one column of a row, in the last head of the first sequence."""
    name, value = place
    {"q": q, "k": k, "v": v, "dout": dout}[name][0, row, -1, 3] = value


def reached(mask: Mask, name: str, row: int) -> dict[str, torch.Tensor]:
    """Return which rows of dq, dk and dv, in the heads concerned, depend on row `row` of an input.

    q and k spoil the scores of the rows that see them, and so their probabilities, which every gradient is made of; v
    and dout spoil delta and dP, which dq and dk are made of, and dout the values of which dv is the sum.
    """
    visible = mask.dense("cpu")
    rows = visible[:, row] if name in ("k", "v") else torch.arange(mask.seqlen_q) == row
    keys = visible[rows].any(0)
    return {"dq": rows & visible.any(1), "dk": keys, "dv": keys & (name != "v")}


def check_reach(mask: Mask, name: str, row: int, gradients: dict[str, torch.Tensor]) -> None:
    """Assert that every gradient which the value reaches is NaN or infinite, in all columns or, for dv, in one.

    Of several query heads only the last has the value, unless keys hold it.
    """
    for gradient, expected in reached(mask, name, row).items():
        broken = ~gradients[gradient][0, :, -1].isfinite()
        broken = broken[:, 3] if gradient == "dv" and name == "dout" else broken.all(-1)
        assert broken.cpu()[expected].all(), gradient
