"""Errors of our kernels, flash-attn-4 and flash2 on one GPU, each as a fraction of the same budget.

    python -m benchmarks.kernel_errors [--processes 8] [--json results.json]

Every case is drawn from a seed and compared with fp64 in 16 chunks by ringflash/testing/tolerance.py: a ratio of 1 is
twice the error of eager attention in the same dtype, plus one rounding. Means and maxima are over the chunks.
Contenders that are not installed are skipped. Several processes share the GPU, because flash-attn-4's kernels take
longer to compile than to run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import zlib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

import torch

from benchmarks.environment import describe
from ringflash.testing import dense, tolerance
from ringflash_kernels.api import attention_backward, attention_forward, implementation
from ringflash_kernels.mask import Mask

OURS, OTHERS = "hopper", ("fa4", "flash2")
TENSORS = ("out", "lse", "dq", "dk", "dv")
NUM_CHUNKS = 16
DOCUMENTS = (0.0, 0.01, 0.11, 0.35, 0.36, 1.0)  # bounds, as fractions of the sequence

Spent = dict[str, dict[str, float]]  # by tensor: mean and max


class Case(NamedTuple):
    """One sequence. `kind`: causal, full, window (causal, an eighth of the sequence) or documents (causal)."""

    head_dim: int
    kind: str
    seqlen: int = 4096
    dtype: str = "bfloat16"
    num_heads: int = 8
    num_kv_heads: int = 2

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}"
        return f"hd{self.head_dim} {self.seqlen}, {heads}, {self.kind}, {self.dtype}"

    @property
    def cu_seqlens(self) -> list[int] | None:
        """Bounds of the documents."""
        return [int(part * self.seqlen) for part in DOCUMENTS] if self.kind == "documents" else None

    @property
    def window_size(self) -> tuple[int, int]:
        """Number of visible keys before and after a query; -1 is unlimited."""
        return (self.seqlen // 8, 0) if self.kind == "window" else (-1, -1)

    @property
    def mask(self) -> Mask:
        """Mask that the kernels receive."""
        if self.cu_seqlens is not None:
            return Mask.documents(self.cu_seqlens)
        causal = self.kind != "full"
        return Mask.band(self.seqlen, self.seqlen, causal=causal, window_size=self.window_size)


CASES = (
    *(Case(size, kind) for size in (64, 96, 128, 192, 256) for kind in ("causal", "full", "window", "documents")),
    *(Case(128, kind, dtype="float16") for kind in ("causal", "full")),
    *(Case(128, kind, num_kv_heads=8) for kind in ("causal", "full")),
    Case(128, "causal", 3999),
    Case(128, "causal", 32768, num_heads=4, num_kv_heads=1),
)


def measure(case: Case, device: str = "cuda", impls: tuple[str, ...] = (OURS, *OTHERS)) -> dict[str, Spent]:
    """Return the share of the budget that each contender uses, by tensor."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (
        torch.randn(1, case.seqlen, n, case.head_dim, generator=generator).to(device, dtype) for n in heads
    )
    attention = partial(
        dense.attention, causal=case.kind != "full", window_size=case.window_size, cu_seqlens=case.cu_seqlens
    )
    want, baseline = attention(*(x.double() for x in (q, k, v, dout))), attention(q, k, v, dout)
    found = {}
    for impl in impls:
        try:
            implementation(impl, q, k, v)
        except NotImplementedError:
            continue
        out, lse = attention_forward(q, k, v, impl=impl, mask=case.mask)
        dq, dk, dv = attention_backward(dout, q, k, v, out, lse, impl=impl, mask=case.mask)
        got = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        spent = tolerance.measure(got, want, baseline, num_chunks=NUM_CHUNKS)
        found[impl] = {
            name: {
                "mean": fmean(ratio.mean for ratio in spent if ratio.name == name),
                "max": max(ratio.maximum for ratio in spent if ratio.name == name),
            }
            for name in TENSORS
        }
    return found


def main() -> None:
    """Measure every case and print the ratio of our errors to each peer's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8, help="that share the GPU")
    parser.add_argument("--json", type=Path, help="where to write the errors")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        cases = dict(zip(map(str, CASES), pool.map(measure, CASES), strict=True))
    result = {**describe("flash-attn-4"), "cases": cases}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    for other in OTHERS:
        both = [found for found in cases.values() if other in found]
        for name in TENSORS if both else ():
            means = [found[OURS][name]["mean"] / found[other][name]["mean"] for found in both]
            print(f"{name} over {other}'s: {min(means):.3f} to {max(means):.3f}, mean {geometric_mean(means):.3f}")


if __name__ == "__main__":
    main()
