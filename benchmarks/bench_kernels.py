"""Speed of attention kernels on one GPU: ours (bf16 and FP8), flash-attn-4's and cuDNN's, in TFLOP/s.

    python benchmarks/bench_kernels.py [--rows hd128] [--rounds 5] [--json results.json]

All contenders of a row run in one process, in random order. Each sample follows a warm-up (burn) of the same kernel and
length: the chip is power-bound, its limit acts with a delay, and a sample after a cooler kernel reads up to 10% high.
Figures are medians; compare the ratios rather than the absolute figures.

FLOPs: 4 * head_dim per visible pair and head forward, 2.5 times as many backward (FlashAttention's convention; a causal
mask of S x S counts as S * S / 2 pairs); with narrower values, each product by its own columns. Memory: peak of one
call in addition to earlier allocations; our kernels write into given outputs, the peers allocate theirs. Contenders
that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from benchmarks.environment import describe, result_text  # noqa: E402
from ringflash_kernels.mask import Mask  # noqa: E402

Run = Callable[[], object]
_BURN_FLOPS_PER_S = 500e12  # assumed speed of a burn, to choose its length


@dataclass(frozen=True)
class Row:
    """One line of the table. `kind`: causal, full, hop (resumes in place), documents or window."""

    head_dim: int
    seqlen: int
    batch: int
    num_heads: int
    num_kv_heads: int
    kind: str
    value_dim: int | None = None  # head_dim of v, if it is narrower

    def __str__(self) -> str:
        length = f"{self.seqlen:,}" if self.seqlen % 1024 else f"{self.seqlen // 1024}k"
        width = f"{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim else "")
        return f"hd{width} {length} x {self.batch}, {self.num_heads}/{self.num_kv_heads}, {self.kind}"

    @cached_property
    def mask(self) -> Mask:
        """Mask of the visible pairs."""
        if self.kind == "documents":
            return Mask.documents(document_bounds(self.seqlen))
        window = (4096, 0) if self.kind == "window" else (-1, -1)
        return Mask.band(self.seqlen, self.seqlen, causal=self.kind in ("causal", "window"), window_size=window)

    def flops(self, direction: str) -> float:
        """Number of floating-point operations of a pass: two or five products."""
        pairs = self.seqlen**2 / 2 if self.kind == "causal" else self.mask.num_visible
        keys, values = self.head_dim, self.value_dim or self.head_dim
        columns = keys + values if direction == "forward" else 3 * keys + 2 * values
        return 2 * columns * self.batch * self.num_heads * pairs


def document_bounds(num_tokens: int, shortest: int = 128, longest: int = 32768) -> list[int]:
    """Packed documents with log-uniform lengths, the same on every run."""
    draw, bounds = random.Random(3), [0]
    while bounds[-1] < num_tokens:
        length = int(math.exp(draw.uniform(math.log(shortest), math.log(longest))))
        bounds.append(min(num_tokens, bounds[-1] + length))
    return bounds


def _rows() -> tuple[Row, ...]:
    rows: list[Row] = []
    for kind in ("causal", "full"):
        rows += [Row(128, 2048, 8, 16, 16, kind), Row(128, 8192, 2, 16, 16, kind), Row(128, 16384, 1, 16, 16, kind)]
        rows += [Row(128, 32768, 1, 32, 8, kind), Row(64, 8192, 2, 32, 32, kind), Row(64, 16384, 1, 32, 32, kind)]
        rows += [Row(64, 32768, 1, 32, 8, kind), Row(256, 8192, 2, 8, 8, kind), Row(256, 16384, 1, 8, 8, kind)]
        rows += [Row(96, 16384, 1, 16, 16, kind), Row(192, 16384, 1, 16, 16, kind)]
    rows += [Row(128, 131072, 1, 32, 8, "causal"), Row(128, 8192, 1, 32, 8, "full"), Row(128, 8192, 1, 32, 8, "hop")]
    rows += [Row(128, 65536, 1, 16, 4, "causal"), Row(128, 65536, 1, 16, 4, "documents")]
    rows += [Row(128, 131072, 1, 16, 4, "window")]
    # One section of the all-gather by heads: all keys, few heads.
    rows += [Row(128, 262144, 1, 4, 1, "causal"), Row(128, 262144, 1, 1, 1, "full")]
    # Latent attention: keys of 192 columns, values of 128.
    for seqlen, batch, heads in ((2048, 4, 128), (8192, 1, 128), (32768, 1, 32)):
        rows.append(Row(192, seqlen, batch, heads, heads, "causal", 128))
    # Lengths and numbers of heads that are no powers of two, and a batch of short sequences.
    rows += [Row(128, 6000, 1, 40, 8, "causal"), Row(64, 6000, 1, 24, 3, "causal")]
    rows += [Row(128, 10240, 1, 40, 8, "full"), Row(128, 49152, 1, 24, 3, "causal")]
    rows += [Row(128, 1024, 16, 16, 16, "causal"), Row(128, 1024, 16, 16, 16, "full")]
    # Lengths at which FP8 is judged.
    return (*rows, Row(128, 16384, 1, 32, 8, "causal"), Row(128, 65536, 1, 32, 8, "causal"))


ROWS = _rows()


class Inputs:
    """Tensors of one row: random normal, bf16."""

    def __init__(self, row: Row) -> None:
        self.row, self.mask, self.scale = row, row.mask, row.head_dim**-0.5
        self.q, self.k, self.v, self.dout = (
            torch.randn(row.batch, row.seqlen, heads, width or row.head_dim, device="cuda", dtype=torch.bfloat16)
            for heads, width in (
                (row.num_heads, None), (row.num_kv_heads, None),
                (row.num_kv_heads, row.value_dim), (row.num_heads, row.value_dim),
            )
        )  # fmt: skip
        self.lse = torch.zeros(row.batch, row.num_heads, row.seqlen, device="cuda")


class Contender(NamedTuple):
    """A kernel to time. A builder returns the call to time, or None if the contender does not support the row."""

    name: str
    build: dict[str, Callable[[Inputs], Run | None]]  # by pass: forward, backward


def ours(deterministic: bool = False) -> Contender:
    """This package's Hopper kernels; with `deterministic` only their backward."""
    from ringflash_kernels.hopper.backward.host import HopperBackward
    from ringflash_kernels.hopper.forward.host import forward

    def build_forward(x: Inputs) -> Run:
        hop = x.row.kind == "hop"
        acc = torch.zeros(x.q.shape, device="cuda") if hop else None
        out = acc if hop else torch.empty_like(x.dout)
        return lambda: forward(x.q, x.k, x.v, x.mask, x.scale, out=out, lse=x.lse, acc=acc)

    def build_backward(x: Inputs) -> Run | None:
        if x.row.kind == "hop":
            return None
        out, dq, dk, dv = (torch.empty_like(t) for t in (x.dout, x.q, x.k, x.v))
        forward(x.q, x.k, x.v, x.mask, x.scale, out=out, lse=x.lse)

        def run() -> torch.Tensor:
            options = {"softmax_scale": x.scale, "deterministic": deterministic, "only_dq": dq}
            backward = HopperBackward(x.dout, x.q, out, x.lse, **options)
            backward.add(x.k, x.v, x.mask, dk, dv, accumulate=False)
            return backward.finish(dq)

        return run

    if deterministic:
        return Contender("ringflash, deterministic", {"backward": build_backward})
    return Contender("ringflash", {"forward": build_forward, "backward": build_backward})


def ours_without_state() -> Contender:
    """The same work as a hop without resuming from (out, lse), to show the cost of resuming."""
    from ringflash_kernels.hopper.forward.host import forward

    def build_forward(x: Inputs) -> Run | None:
        if x.row.kind != "hop":
            return None
        out, lse = torch.empty_like(x.q), torch.empty_like(x.lse)
        return lambda: forward(x.q, x.k, x.v, x.mask, x.scale, out=out, lse=lse)

    return Contender("ringflash, fresh", {"forward": build_forward})


def ours_in_fp8(with_quantiser: bool) -> Contender:
    """Our FP8 forward, with or without the two launches that round q, k and v."""
    from ringflash_kernels.fp8_reference import HEAD_DIMS
    from ringflash_kernels.hopper.fp8.forward import forward
    from ringflash_kernels.hopper.fp8.quantise import quantise_kv, quantise_q

    def build_forward(x: Inputs) -> Run | None:
        if x.row.head_dim not in HEAD_DIMS:
            return None
        hop = x.row.kind == "hop"
        acc = torch.zeros(x.q.shape, device="cuda") if hop else None
        out = acc if hop else torch.empty_like(x.q)
        rounded = quantise_q(x.q), quantise_kv(x.k, x.v, for_backward=False)

        def run() -> None:
            operands = rounded
            if with_quantiser:
                operands = quantise_q(x.q), quantise_kv(x.k, x.v, for_backward=False)
            forward(*operands, x.mask, x.scale, out=out, lse=x.lse, acc=acc)

        return run

    name = "ringflash FP8 with quantiser" if with_quantiser else "ringflash FP8"
    return Contender(name, {"forward": build_forward})


def ours_in_fp8_backward(products: str) -> Contender:
    """Our FP8 backward with the rounding of its operands, by its choice of products."""
    from ringflash_kernels.fp8_reference import HEAD_DIMS
    from ringflash_kernels.hopper.fp8.backward import Fp8Backward
    from ringflash_kernels.hopper.fp8.forward import forward
    from ringflash_kernels.hopper.fp8.quantise import quantise_kv, quantise_q

    def build_backward(x: Inputs) -> Run | None:
        largest_head_dim = 128 if products == "fp8_scores" else 256
        if x.row.kind == "hop" or x.row.head_dim not in HEAD_DIMS or x.row.head_dim > largest_head_dim:
            return None
        out, dq, dk, dv = (torch.empty_like(t) for t in (x.dout, x.q, x.k, x.v))
        row_max = torch.empty_like(x.lse)
        operands = quantise_q(x.q), quantise_kv(x.k, x.v, for_backward=False)
        forward(*operands, x.mask, x.scale, out=out, lse=x.lse, row_max=row_max)

        def run() -> torch.Tensor:
            options = {"softmax_scale": x.scale, "products": products, "row_max": row_max}
            options["num_keys"] = x.k.shape[1]
            backward = Fp8Backward(x.dout, x.q, out, x.lse, num_kv_heads=x.k.shape[2], **options)
            backward.add(x.k, x.v, x.mask, dk, dv, accumulate=False)
            return backward.finish(dq)

        return run

    return Contender(f"ringflash FP8, {products}", {"backward": build_backward})


def flash_attn_4() -> Contender:
    """flash-attn-4's CuTe DSL kernels; causal and full only."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def build_forward(x: Inputs) -> Run | None:
        if x.row.kind not in ("causal", "full"):
            return None
        return lambda: _flash_attn_fwd(x.q, x.k, x.v, causal=x.row.kind == "causal", return_lse=True)

    def build_backward(x: Inputs) -> Run | None:
        run = build_forward(x)
        if run is None:
            return None
        out, lse = run()[:2]
        dq, dk, dv = (torch.empty_like(t) for t in (x.q, x.k, x.v))
        causal = x.row.kind == "causal"
        return lambda: _flash_attn_bwd(x.q, x.k, x.v, out, x.dout, lse, causal=causal, dq=dq, dk=dk, dv=dv)

    return Contender("flash-attn-4", {"forward": build_forward, "backward": build_backward})


def cudnn() -> Contender:
    """cuDNN through torch's scaled_dot_product_attention; causal and full only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Row) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=row.kind == "causal", enable_gqa=row.num_heads != row.num_kv_heads
            )

    def build_forward(x: Inputs) -> Run | None:
        return (lambda: attention(x.q, x.k, x.v, x.row)) if x.row.kind in ("causal", "full") else None

    def build_backward(x: Inputs) -> Run | None:
        if x.row.kind not in ("causal", "full"):
            return None
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
        out, dout = attention(*leaves, row=x.row), x.dout.transpose(1, 2)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return Contender("cuDNN", {"forward": build_forward, "backward": build_backward})


def contenders() -> Iterator[Contender]:
    """Return the contenders that can be imported."""
    makers: dict[str, Callable[[], Contender]] = {
        "ours": ours,
        "ours, deterministic": lambda: ours(deterministic=True),
        "ours_without_state": ours_without_state,
        "ours_in_fp8": lambda: ours_in_fp8(with_quantiser=False),
        "ours_in_fp8, quantiser": lambda: ours_in_fp8(with_quantiser=True),
        "ours_in_fp8_backward, bf16": lambda: ours_in_fp8_backward("bf16"),
        "ours_in_fp8_backward, fp8_scores": lambda: ours_in_fp8_backward("fp8_scores"),
        "ours_in_fp8_backward, fp8": lambda: ours_in_fp8_backward("fp8"),
        "flash_attn_4": flash_attn_4,
        "cudnn": cudnn,
    }
    for name, make in makers.items():
        try:
            yield make()
        except ImportError as error:
            print(f"left out: {name} ({error})", flush=True)


def measure(runs: dict[str, Run], flops: float, *, rounds: int, sample_ms: float) -> dict[str, list[float]]:
    """Return the TFLOP/s of every sample: in random order, each after a burn."""
    repeats = max(1, round(sample_ms * 1e-3 * _BURN_FLOPS_PER_S / flops))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            timed_ms(runs[name], repeats)
            samples[name].append(flops / timed_ms(runs[name], repeats) / 1e9)
    return samples


def timed_ms(run: Run, repeats: int) -> float:
    """Return the milliseconds of one call, from events around `repeats` calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def peak_bytes(run: Run) -> int:
    """Return the peak device memory of a call, in addition to earlier allocations."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def bench(row: Row, direction: str, teams: list[Contender], *, rounds: int, sample_ms: float) -> dict | None:
    """Return one line of the table; None if no contender supports the row."""
    inputs = Inputs(row)
    runs: dict[str, Run] = {}
    for team in teams:
        run = team.build[direction](inputs) if direction in team.build else None
        if run is not None:
            try:
                run()
                torch.cuda.synchronize()
                runs[team.name] = run
            except Exception as error:  # a peer that fails on a row must not end the run
                print(f"{row}: {team.name} failed: {type(error).__name__}: {str(error)[:120]}", flush=True)
    if not runs:
        return None
    flops = row.flops(direction)
    samples = measure(runs, flops, rounds=rounds, sample_ms=sample_ms)
    return {
        "row": str(row),
        "pass": direction,
        "tflops": {name: statistics.median(values) for name, values in samples.items()},
        "samples": samples,
        "peak_bytes": {name: peak_bytes(run) for name, run in runs.items()},
    }


def line(result: dict) -> str:
    """Return a result as a row of a Markdown table: our figure, and its ratio to each peer's."""
    tflops = result["tflops"]
    mine = tflops.get("ringflash")
    others = [
        f"{name} {value:.0f}" + (f" ({mine / value:.2f})" if mine else "")
        for name, value in tflops.items()
        if name != "ringflash"
    ]
    return f"| {result['row']} | {result['pass']} | {mine or 0:.0f} | {', '.join(others)} |"


def main() -> None:
    """Print and save the table after every row, so that an interrupted run keeps its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows in whose name this pattern is found")
    parser.add_argument("--passes", default="forward,backward", help="comma separated")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each contender")
    parser.add_argument("--sample-ms", type=float, default=30, help="length of a sample, and of the burn before it")
    parser.add_argument("--json", type=Path, help="where to write every sample")
    options = parser.parse_args()
    random.seed(5)
    torch.manual_seed(0)
    teams, about = list(contenders()), describe("flash-attn-4", "nvidia-cutlass-dsl")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print("| row | pass | ringflash TFLOP/s | peers (ratio) |\n|---|---|---|---|", flush=True)
    results = []
    asked = [(row, d) for row in ROWS for d in options.passes.split(",") if re.search(options.rows, f"{row}, {d}")]
    for row, direction in asked:
        result = bench(row, direction, teams, rounds=options.rounds, sample_ms=options.sample_ms)
        torch.cuda.empty_cache()
        if result is not None:
            print(line(result), flush=True)
            results.append(result)
        if options.json:
            options.json.write_text(result_text({"environment": about, "results": results}))


if __name__ == "__main__":
    main()
