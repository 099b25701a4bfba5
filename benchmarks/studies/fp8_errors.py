"""Errors of FP8 attention against fp64, on normal numbers and on outliers: the specification, on a CPU.

    python -m benchmarks.fp8_errors [--impl reference_fp8] [--json results.json]

Outliers are those of FlashAttention-3's test: normal numbers, one in a thousand with ten times a normal number added.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.environment import describe
from benchmarks.studies.fp8_layers import EXACT, forward, gradients
from ringflash_kernels.fp8_reference import HEAD_DIMS

SEQLEN, NUM_HEADS, NUM_KV_HEADS = 2048, 4, 2


def draw(head_dim: int, num_heads: int, *, outliers: bool, generator: torch.Generator) -> Tensor:
    """Random numbers in bf16: (1, SEQLEN, num_heads, head_dim)."""
    shape = (1, SEQLEN, num_heads, head_dim)
    x = torch.randn(shape, generator=generator)
    if outliers:
        x += 10 * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 1e-3)
    return x.bfloat16()


def measure(head_dim: int, *, outliers: bool, impl: str, device: str) -> dict[str, float]:
    """Return the errors of causal attention.

    Returns:
        out, dq, dk, dv: norm of the error by that of the exact result.  out_rms: root mean square of the error of out.
        lse_rms, lse_max: root mean square and largest error of lse.
    """
    generator = torch.Generator().manual_seed(head_dim)
    q, k, v, dout = (
        draw(head_dim, heads, outliers=outliers and i < 3, generator=generator).to(device)
        for i, heads in enumerate((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS))
    )
    found = []
    for choice in (impl, EXACT):
        state = forward(q, k, v, choice)
        found.append([x.double() for x in (*state[:2], *gradients(dout, q, k, v, *state, choice))])
    (out, lse, *grads), (exact, exact_lse, *exact_grads) = found
    errors = {"out": relative(out, exact), "out_rms": rms(out - exact)}
    errors |= {"lse_rms": rms(lse - exact_lse), "lse_max": (lse - exact_lse).abs().max().item()}
    return errors | {n: relative(*pair) for n, *pair in zip(("dq", "dk", "dv"), grads, exact_grads, strict=True)}


def relative(x: Tensor, exact: Tensor) -> float:
    """Norm of the error by the norm of the exact result."""
    return ((x - exact).norm() / exact.norm()).item()


def rms(x: Tensor) -> float:
    """Root of the mean square."""
    return x.square().mean().sqrt().item()


def main() -> None:
    """Measure every head_dim with both kinds of numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", default="reference_fp8", help="implementation whose errors are measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where to write the errors")
    options = parser.parse_args()
    cases = []
    for head_dim in HEAD_DIMS:
        for numbers in ("normal", "outliers"):
            found = measure(head_dim, outliers=numbers == "outliers", impl=options.impl, device=options.device)
            cases.append({"head_dim": head_dim, "numbers": numbers, **found})
            print(head_dim, numbers, {name: f"{error:.2e}" for name, error in found.items()}, flush=True)
    result = {**describe(), "impl": options.impl, "seqlen": SEQLEN, "num_heads": NUM_HEADS, "cases": cases}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
