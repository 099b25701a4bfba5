"""Speed of kernels under two-sided masks, relative to the causal kernel with as many visible pairs.

    python benchmarks/bench_two_sided.py [--json out.json] [--seconds 200] [--dry] [--beside [MASK ...]]
    python benchmarks/bench_two_sided.py --only MASK ...

One Hopper GPU. TFLOP/s count visible pairs only; the two kernels are timed in turns. Each part stops at its own limit,
and each line is printed as it is measured. `--dry` needs no GPU: it prints which share of the computed tiles is
visible, and the host time for a new mask. tests/kernels compares the results with fp64.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from benchmarks.environment import describe, result_text  # noqa: E402
from ringflash.attention import schedule  # noqa: E402
from ringflash.sequence.mask import SequenceMask  # noqa: E402
from ringflash_kernels.mask import Mask  # noqa: E402

HEADS, KV_HEADS = 32, 8
START = time.time()
Run = Callable[[], object]


# --------------------------------------------------------------------------------------------------------- masks


def forest(
    lengths: list[int],
    parents: list[int],
    both: list[bool] | None = None,
    left: int = -1,
    global_tokens: int = 0,
) -> SequenceMask:
    """Return documents that continue others."""
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    both = both or [False] * len(lengths)
    counts = (global_tokens,) * len(lengths) if global_tokens else None
    return SequenceMask(bounds[-1], True, (left, -1), tuple(bounds), tuple(parents), tuple(both), counts)


def rollouts(groups: int, prompt: int, answers: int, length: int, left: int = -1) -> SequenceMask:
    """Return groups of answers to a prompt each."""
    lengths: list[int] = []
    parents: list[int] = []
    for _ in range(groups):
        root = len(lengths)
        lengths += [prompt, *[length] * answers]
        parents += [-1, *[root] * answers]
    return forest(lengths, parents, left=left)


def agents(total: int, shortest: int = 256, longest: int = 4096) -> SequenceMask:
    """Return trunks of 12 turns; at a third of the turns, another continuation; the heaviest tree first."""
    rng = random.Random(0)
    lengths: list[int] = []
    parents: list[int] = []

    def grow(parent: int, depth: int) -> None:
        chain = []
        for d in range(depth, 12):
            n = min(int(math.exp(rng.uniform(math.log(shortest), math.log(longest)))), total - sum(lengths))
            if n <= 0:
                break
            lengths.append(n)
            parents.append(parent)
            parent = len(lengths) - 1
            chain.append((parent, d))
        for node, d in reversed(chain[:-1]):
            if rng.random() < 0.33 and sum(lengths) < total:
                grow(node, d + 1)

    while sum(lengths) < total:
        grow(-1, 0)
    return forest(lengths, parents)


def documents(total: int, shortest: int, longest: int, seed: int = 0) -> SequenceMask:
    """Return packed documents of log-uniform lengths."""
    rng = random.Random(seed)
    bounds = [0]
    while bounds[-1] < total:
        n = int(math.exp(rng.uniform(math.log(shortest), math.log(longest))))
        bounds.append(min(total, bounds[-1] + n))
    return SequenceMask(total, True, (-1, -1), tuple(bounds))


def images(count: int, text: int, image: int) -> SequenceMask:
    """Return text with spans that see both ways."""
    return forest([text, image] * count, list(range(-1, 2 * count - 1)), [False, True] * count)


def block_diffusion(blocks: int, size: int) -> SequenceMask:
    """Return the clean copy, then the noisy blocks, last one first."""
    parents = [*range(-1, blocks - 1), *range(blocks - 2, -2, -1)]
    return forest([size] * 2 * blocks, parents, [True] * 2 * blocks)


def whole(mask: SequenceMask) -> Mask:
    """Return the mask of a sequence on one rank."""
    return schedule.plan_own_keys(mask, "contiguous")


def gathered(mask: SequenceMask, cp_size: int, rank: int, layout: str) -> Mask:
    """Return the mask of a rank's queries and the keys that it gathers."""
    return schedule.plan_single_block(mask, cp_size, rank, layout).mask


CASES: dict[str, Callable[[], Mask]] = {
    "16 answers of 4k after 2k": lambda: whole(rollouts(1, 2048, 16, 4096)),
    "8 answers of 4k after 32k": lambda: whole(rollouts(1, 32768, 8, 4096)),
    "32 answers of 2k after 2k": lambda: whole(rollouts(1, 2048, 32, 2048)),
    "8 x (8 answers of 900 after 1k)": lambda: whole(rollouts(8, 1000, 8, 900)),
    "16 answers of 4k after 2k, window 2k": lambda: whole(rollouts(1, 2048, 16, 4096, left=2047)),
    "8 documents of 16k, window 2k, 128 global tokens": lambda: whole(
        forest([16384] * 8, [-1] * 8, left=2047, global_tokens=128)
    ),
    "512 answers of 96 after 16k": lambda: whole(rollouts(1, 16384, 512, 96)),
    "agent trees": lambda: whole(agents(65536)),
    "rank 5 of 8, balanced, agent trees of 512k": lambda: gathered(agents(524288), 8, 5, "balanced"),
    "rank 5 of 8, zigzag, 16 x 30k after 32k": lambda: gathered(rollouts(1, 32768, 16, 30720), 8, 5, "zigzag"),
    "block diffusion, blocks of 32": lambda: whole(block_diffusion(1024, 32)),
    "prefix-LM, 16k of 64k": lambda: whole(forest([16384, 49152], [-1, 0], [True, False])),
    "image spans (one-sided)": lambda: whole(images(45, 1200, 256)),
}


def cost(mask: Mask) -> dict[str, float]:
    """Return what the walks compute, and the host time for a new mask."""
    from ringflash_kernels.hopper.walks import walks

    began = time.perf_counter()
    _ = mask.is_two_sided, mask.ends(), mask.begins()
    side = mask.cached("transposed", mask.transposed)
    side.bounds()
    forward = walks(mask, torch.device("cpu"), mask.q_span, 64, 128, near=True, shifted=True)
    backward = walks(side, torch.device("cpu"), (0, side.seqlen_q), 128, 64, near=True)
    found: dict[str, float] = {"host_ms": 1e3 * (time.perf_counter() - began), "pairs": mask.num_visible}
    for name, walk, area in (("forward", forward, 64 * 128), ("backward", backward, 128 * 64)):
        blocks = (walk.stretches[:, 1] - walk.stretches[:, 0]).double()
        found[f"{name}_visible"] = mask.num_visible / (float(blocks.sum()) * area)
        found[f"{name}_masked"] = float((blocks * walk.stretches[:, 2]).sum() / blocks.sum())
        found[f"{name}_stretches"] = len(walk.stretches) / len(walk.tiles)
    return found


# -------------------------------------------------------------------------------------------------------- timing


def timed_in_turns(runs: dict[str, Run], rounds: int = 5) -> dict[str, float]:
    """Return the median seconds of each run, in random order.

    A sample follows 30 ms of the same kernel, since power limits lag: a kernel after one that needs little is fast.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    for _ in range(rounds + 1):  # the first tells how long a run takes
        for name, run in random.sample(list(runs.items()), len(runs)):
            for _ in range(math.ceil(0.03 / seconds[name][-1]) if seconds[name] else 1):
                run()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def draw(rows: int, heads: int, dim: int) -> torch.Tensor:
    """Return a random operand."""
    return torch.randn(1, rows, heads, dim, device="cuda", dtype=torch.bfloat16)


class Ours:
    """Forward and backward of our kernels under a mask."""

    def __init__(self, mask: Mask, dim: int, value_dim: int | None = None, **options: bool) -> None:
        from ringflash_kernels.api import attention_forward

        self.mask, self.options = mask, options
        self.q, self.k = draw(mask.seqlen_q, HEADS, dim), draw(mask.seqlen_k, KV_HEADS, dim)
        self.v = draw(mask.seqlen_k, KV_HEADS, value_dim or dim)
        self.out, self.lse = attention_forward(self.q, self.k, self.v, impl="hopper", mask=mask)
        self.dout = torch.randn_like(self.out)
        self.dq, self.dk, self.dv = (torch.empty_like(x) for x in (self.q, self.k, self.v))
        flops = 2 * HEADS * mask.num_visible / 1e12
        columns = self.q.shape[3], self.v.shape[3]
        self.flops = flops * sum(columns), flops * (3 * columns[0] + 2 * columns[1])

    def forward(self) -> None:
        """Launch the forward."""
        from ringflash_kernels.api import attention_forward

        attention_forward(self.q, self.k, self.v, impl="hopper", mask=self.mask, out=self.out, lse=self.lse)

    def backward(self) -> None:
        """Launch the backward."""
        from ringflash_kernels.api import begin_backward

        run = begin_backward(self.dout, self.q, self.out, self.lse, impl="hopper", only_dq=self.dq, **self.options)
        run.add(self.k, self.v, self.mask, self.dk, self.dv, accumulate=False)
        run.finish(self.dq)


def causal_of_equal_pairs(mask: Mask) -> Mask:
    """Return the causal mask with about as many visible pairs."""
    tokens = int((2 * mask.num_visible) ** 0.5) // 128 * 128
    return Mask.band(tokens, tokens, causal=True)


def speeds(contenders: Mapping[str, Ours | Rival]) -> dict[str, tuple[float, float]]:
    """Return TFLOP/s of forward and backward of each contender."""
    forward = timed_in_turns({name: x.forward for name, x in contenders.items()})
    backward = timed_in_turns({name: x.backward for name, x in contenders.items()})
    return {name: (x.flops[0] / forward[name], x.flops[1] / backward[name]) for name, x in contenders.items()}


# -------------------------------------------------------------------------------------------------------- rivals


class Rival(ABC):
    """Forward and backward of another library on the tensors of ours."""

    out: torch.Tensor

    @abstractmethod
    def prepare(self) -> None:
        """Make what the launches need."""

    @abstractmethod
    def forward(self) -> None:
        """Launch the forward, which writes `out`."""

    @abstractmethod
    def backward(self) -> None:
        """Launch the backward."""

    def __init__(self, ours: Ours) -> None:
        self.ours, self.flops = ours, ours.flops
        (start, stop), ends = ours.mask.bounds("cuda"), ours.mask.ends().cuda()
        # Tiles past the end read them, too.
        self.limits = [torch.nn.functional.pad(x, (0, 256)).contiguous() for x in (start, stop, ends)]
        self.prepare()
        self.forward()
        wrong = (self.out.float() - ours.out.float()).norm() / ours.out.float().norm()
        assert wrong < 0.02, f"another mask: {float(wrong)}"

    def block_mask(self):
        """Return torch's lists of blocks of 128 x 128."""
        from torch.nn.attention.flex_attention import create_block_mask

        start, stop, ends = self.limits
        mask = self.ours.mask

        def visible(b, h, i, j):
            return (j >= start[i]) & (j < stop[i]) & (i < ends[j])

        make = torch.compile(create_block_mask, dynamic=True)
        return make(visible, None, None, mask.seqlen_q, mask.seqlen_k, device="cuda")


class Flex(Rival):
    """flex_attention of torch with its Triton kernels."""

    def prepare(self) -> None:
        """Compile for this mask."""
        import torch._functorch.config
        from torch.nn.attention.flex_attention import flex_attention

        torch._functorch.config.donated_buffer = False  # the backward is called again and again
        x = self.ours
        self.operands = [t.detach().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v)]
        self.attend = torch.compile(partial(flex_attention, block_mask=self.block_mask(), enable_gqa=True))
        self.graph = self.attend(*self.operands)

    def forward(self) -> None:
        """Launch the forward."""
        with torch.no_grad():
            self.out = self.attend(*self.operands).transpose(1, 2)

    def backward(self) -> None:
        """Launch the backward."""
        torch.autograd.grad(self.graph, self.operands, self.ours.dout.transpose(1, 2), retain_graph=True)


class Flash4(Rival):
    """flash-attn-4 with a mask_mod and lists of blocks."""

    def prepare(self) -> None:
        """Make the lists of blocks: of keys for the forward, of queries for the backward."""
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        _, _, *lists = self.block_mask().as_tuple()[:10]
        lists = [x.int().contiguous() for x in lists]
        self.blocks = [BlockSparseTensorsTorch(*x, block_size=(128, 128)) for x in (lists[:4], lists[4:])]
        self.mask_mod = _mask_mod()

    def forward(self) -> None:
        """Launch the forward."""
        from flash_attn.cute.interface import _flash_attn_fwd

        x = self.ours
        self.out, self.lse, *_ = _flash_attn_fwd(
            x.q, x.k, x.v, mask_mod=self.mask_mod, aux_tensors=self.limits, block_sparse_tensors=self.blocks[0],
            return_lse=True,
        )  # fmt: skip

    def backward(self) -> None:
        """Launch the backward."""
        from flash_attn.cute.interface import _flash_attn_bwd

        x = self.ours
        self.gradients = _flash_attn_bwd(
            x.q, x.k, x.v, self.out, x.dout, self.lse, mask_mod=self.mask_mod, aux_tensors=self.limits,
            block_sparse_tensors=self.blocks[1],
        )  # fmt: skip


@cache
def _mask_mod():
    """Return the mask as a function of flash-attn-4: of its limits, which are `aux_tensors`."""
    from cutlass import Int32, cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def visible(batch, head, i, j, seqlen_info, aux):
        start = scalar_to_ssa(aux[0][i[0]], Int32)
        stop = scalar_to_ssa(aux[1][i[0]], Int32)
        end = scalar_to_ssa(aux[2][j[0]], Int32)
        return (j >= start) & (j < stop) & (i < end)

    return visible


RIVALS = {"flex_attention": Flex, "flash_attn_4": Flash4}
BESIDE = (
    "8 x (8 answers of 900 after 1k)",
    "16 answers of 4k after 2k, window 2k",
    "16 answers of 4k after 2k",
    "block diffusion, blocks of 32",
    "prefix-LM, 16k of 64k",
    "image spans (one-sided)",
    "agent trees",
)


def beside(note: Callable[..., None], name: str) -> None:
    """Time one mask with ours and the other libraries in turns, on the same tensors."""
    ours = Ours(CASES[name](), 128)
    contenders: dict[str, Ours | Rival] = {"ringflash": ours}
    for rival, make in RIVALS.items():
        try:
            contenders[rival] = make(ours)
            contenders[rival].backward()
        except Exception as error:  # not installed, or it refuses the mask: say which
            contenders.pop(rival, None)
            note(case=name, contender=rival, error=f"{type(error).__name__}: {str(error)[:300]}")
    found = speeds(contenders)
    note(case=name, beside={rival: [round(x) for x in figures] for rival, figures in found.items()})


def main() -> None:
    """Run the parts in the order of their importance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--beside", nargs="*", help="only time these masks beside other libraries; default the main")
    parser.add_argument("--only", nargs="+", help="only time these masks beside the causal kernel")
    options = parser.parse_args()
    results: list[dict] = []

    def note(**row) -> None:
        row = {key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}
        results.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            about = {"environment": describe("flash-attn-4"), "heads": [HEADS, KV_HEADS], "results": results}
            Path(options.json).write_text(result_text(about))

    if options.dry:
        for name, make in CASES.items():
            note(case=name, **cost(make()))
        return
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    note(device=properties.name, torch=torch.__version__)
    if options.beside is not None:
        for name in options.beside or BESIDE:
            beside(note, name)
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        return

    def late(seconds: float = options.seconds) -> bool:
        return time.time() - START > min(seconds, options.seconds)

    for name in options.only or CASES:
        if late(options.seconds * 0.75):
            break
        mask = CASES[name]()
        (mine, causal) = speeds({"ours": Ours(mask, 128), "causal": Ours(causal_of_equal_pairs(mask), 128)}).values()
        note(case=name, forward=mine[0], backward=mine[1], causal_forward=causal[0], causal_backward=causal[1],
             forward_share=mine[0] / causal[0], backward_share=mine[1] / causal[1])  # fmt: skip
    if options.only:
        return
    mask = CASES["16 answers of 4k after 2k"]()
    others = {
        "head_dim 64": {"dim": 64}, "deterministic": {"dim": 128, "deterministic": True}, "head_dim 96": {"dim": 96},
        "head_dim 256": {"dim": 256}, "head_dim 192/128": {"dim": 192, "value_dim": 128},
    }  # fmt: skip
    for name, arguments in others.items():
        if late(options.seconds * 0.8):
            break
        pair = {"ours": Ours(mask, **arguments), "causal": Ours(causal_of_equal_pairs(mask), **arguments)}
        (mine, causal) = speeds(pair).values()
        note(case=f"16 answers of 4k after 2k, {name}", forward=mine[0], backward=mine[1],
             forward_share=mine[0] / causal[0], backward_share=mine[1] / causal[1])  # fmt: skip
    # May the two-sided kernels replace those of packed documents? The same masks by both.
    for shortest, longest in ((128, 32768), (1024, 16384)):
        if late(options.seconds * 0.85):
            break
        mask = whole(documents(65536, shortest, longest))
        forced = Mask(mask.seqlen_q, mask.seqlen_k, mask.regions)
        forced.__dict__["is_two_sided"] = True
        (bounds, ends) = speeds({"bounds": Ours(mask, 128), "ends": Ours(forced, 128)}).values()
        note(case=f"documents of {shortest} to {longest}", bounds_forward=bounds[0], bounds_backward=bounds[1],
             ends_forward=ends[0], ends_backward=ends[1])  # fmt: skip
    note(seconds=time.time() - START)


if __name__ == "__main__":
    main()
