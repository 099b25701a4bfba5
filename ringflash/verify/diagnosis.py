"""Diagnosis of failed checks: known patterns of differences, and the mistakes that cause them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torch import Tensor

from ringflash.sequence.layout import chunks, local_positions
from ringflash.verify import compare, layer_masks
from ringflash.verify.compare import Check, Runs


@dataclass(frozen=True)
class ShardedPositions:
    """Positions that each rank holds."""

    seqlen: int
    cp_size: int
    layout: str

    def describe(self, position: int) -> str:
        """Return the text of a position with its chunk and rank."""
        for rank in range(self.cp_size):
            for chunk in chunks(self.seqlen, self.cp_size, rank, self.layout):
                if chunk.start <= position < chunk.stop:
                    number = position // chunk.size
                    return f"position {position} (chunk {number}, held by rank {rank})"
        raise AssertionError(position)

    def positions(self, rank: int) -> list[int]:
        """Return the positions that a rank holds."""
        return local_positions(self.seqlen, self.cp_size, rank, self.layout).tolist()

    @property
    def chunk_ends(self) -> set[int]:
        """The last position of every chunk."""
        return {c.stop - 1 for r in range(self.cp_size) for c in chunks(self.seqlen, self.cp_size, r, self.layout)}


@dataclass(frozen=True)
class Reach:
    """Positions that a perturbed position reaches through one layer, at cp=N and at cp=1."""

    position: int
    got: list[int]
    want: list[int]


def explain(check: Check, runs: Runs, probes: list[Reach], sharded: ShardedPositions) -> tuple[str, str]:
    """Return (the first difference with its position, its likely cause) of a failed check."""
    name, seen, want = check.failed[0], runs.got, runs.want
    where = "" if check.position is None else f" at {sharded.describe(check.position)}"
    first = f"{check.name}: {name}{where}"
    if check.name == compare.LAYERS:
        if not seen.layers[name].isfinite().all():
            return first, infinite_hint(name, runs)
        index = next((part for part in name.split(".") if part.isdigit()), "0")
        assert check.position is not None
        return first, layer_hint(check.position, probes, sharded, int(index) > 0)
    hints = {
        compare.WEIGHTS: lambda: (
            "the models differ before the first step: build them from one seed or one checkpoint on every rank."
        ),
        compare.BATCH: lambda: batch_hint(name, runs, sharded),
        compare.LOSS: lambda: loss_hint(runs, sharded),
        compare.LOSS_GRADIENT: lambda: loss_hint(runs, sharded),
        compare.EVALUATION: lambda: _value_hint(name, seen.eval_losses.get(name), want.eval_losses[name], sharded),
        compare.GRADIENTS: lambda: gradient_hint(check.failed, runs, sharded),
        compare.AGREEMENT: lambda: gradient_hint(check.failed, runs, sharded),
    }
    if check.name in (compare.MASK, layer_masks.NAME):  # perhaps not even applied at cp=1
        return first, f"{check.note}; does the batch carry cu_seqlens, and does the layer use its window?"
    return first, hints.get(check.name, lambda: "")()


def batch_hint(name: str, runs: Runs, sharded: ShardedPositions) -> str:
    """Explain why a tensor of the batch is not the shard of the whole tensor."""
    wrong = (runs.got.inputs[name] != runs.want.inputs[name]).any(0).nonzero().flatten().tolist()
    if set(wrong) <= sharded.chunk_ends:
        return "only last tokens of chunks differ: labels are shifted after sharding; shift the whole sequence first."
    if "position" in name:
        return "positions are counted from the shard's start; pass ringflash.local_positions."
    return "the batch is not cut as its layout says; use ringflash.shard_sequence on every tensor of it."


def infinite_hint(name: str, runs: Runs) -> str:
    """Describe a layer whose output is NaN or infinite, which rules out a probe of what it sees."""
    where = "only at cp=N" if runs.baseline.layers[name].isfinite().all() else "at cp=1 as well, in this dtype"
    return f"{name} puts out NaN or infinity, {where}: look for a division by 0 or an overflow in it."


def layer_hint(position: int, probes: list[Reach], sharded: ShardedPositions, earlier_agree: bool) -> str:
    """Name the mistake of an attention layer whose output differs from `position` on, from probes of what it sees."""
    for probe in probes:
        own = next(set(p) for p in map(sharded.positions, range(sharded.cp_size)) if probe.position in p)
        got, want = set(probe.got), set(probe.want)
        if want - own and got & want <= own and got <= own:
            text = "attention sees the rank's own shard only"
            if earlier_agree:
                return f"{text}, and the layers before agree: this layer was missed when the attention was replaced."
            return f"{text}: the attention does not go round the ring."
        if got - want:
            seen = sharded.describe(min(got - want))
            return f"a mask is dropped at cp=N: position {probe.position} is seen from {seen}, as it is not at cp=1."
    if probes and all(set(p.got) == set(p.want) for p in probes):
        if position <= min(sharded.chunk_ends):  # in the first chunk, local and global positions are equal
            return "every position sees what it should, with other numbers: look for what else the layer has at cp=N."
        return "every position sees what it should, with other numbers: look for positions (RoPE) of the shard's own."
    return ""


def loss_hint(runs: Runs, sharded: ShardedPositions) -> str:
    """Name the mistake of a loss whose logits are correct."""
    if not runs.got.loss_gradient:
        return _value_hint("the loss", runs.got.loss, runs.want.loss, sharded)
    (got,), (want,) = (x.loss_gradient.values() for x in (runs.got, runs.want))
    scales = [_scale(got, want, sharded.positions(rank)) for rank in range(sharded.cp_size)]
    tolerance = runs.eps**0.5
    wrong = {
        p
        for rank, scale in enumerate(scales)
        for p in sharded.positions(rank)
        if _norm(got[:, p] - scale * want[:, p]) > tolerance * max(_norm(got[:, p]), _norm(want[:, p]))
    }
    if wrong and wrong <= sharded.chunk_ends:
        shown = ", ".join(map(str, sorted(wrong)[:4]))
        return f"only last tokens of chunks differ (positions {shown}): labels are shifted after sharding."
    if not wrong and any(abs(a - b) > tolerance * abs(a) for a, b in pairwise(scales)):
        shown = ", ".join(f"{s:.4g}" for s in scales)
        return (
            f"the ranks scale their tokens by {shown} of what is right: each averages over its own tokens; "
            "divide by the labelled tokens of the whole sequence, times cp_size."
        )
    return _scale_hint("the loss", scales[0], sharded.cp_size)


def _scale(got: Tensor, want: Tensor, positions: list[int]) -> float:
    """Return the median factor between two gradients at a rank's positions."""
    pairs = ((got[:, p].double(), want[:, p].double()) for p in positions)
    factors = [(g * w).sum().item() / w.square().sum().item() for g, w in pairs if w.any()]
    return median(factors) if factors else 1.0


def _norm(x: Tensor) -> float:
    return x.double().norm().item()


def _value_hint(what: str, got: float | None, want: float, sharded: ShardedPositions) -> str:
    """Name the mistake in a loss from its value only; `got` is None if cp=N reports no loss."""
    if got is None:
        return f"{what} is not reported at cp=N."
    return _scale_hint(what, got / want if want else float("inf"), sharded.cp_size)


def _scale_hint(what: str, scale: float, cp_size: int) -> str:
    if abs(scale - cp_size) < 0.01 * cp_size:
        return f"{what} is {cp_size}x: cp_size times the truth, as if ranks were summed instead of averaged."
    if abs(scale * cp_size - 1) < 0.01:
        return f"{what} is 1/{cp_size} of the truth: the factor cp_size is missing, or it is averaged twice."
    return f"{what} is {scale:.4g} times the truth: look at what it is divided by."


def gradient_hint(failed: list[str], runs: Runs, sharded: ShardedPositions) -> str:
    """Name the mistake of gradients whose loss is correct."""
    if runs.got.disagreement:
        return "the ranks have different gradients: they are averaged over the wrong ranks; reduce over all of them."
    missing = [name for name in failed if name not in runs.got.gradients]
    if missing:
        return f"{missing[0]} has no gradient at cp=N."
    got, want = runs.got.gradients, runs.want.gradients
    dots = [((got[n].double() * want[n].double()).sum(), want[n].double().square().sum()) for n in want]
    scale = float(sum(a for a, _ in dots) / sum(b for _, b in dots))
    rest = max(_norm(got[n] - scale * want[n]) / max(_norm(got[n]), 1e-300) for n in want)
    if rest < runs.eps**0.5 and abs(scale - 1) > runs.eps**0.5:
        return _scale_hint("every gradient", scale, sharded.cp_size)
    layer = failed[0].rsplit(".", 2)[0]
    same = [name for name in failed if name.startswith(f"{layer}.")]
    if all(any(part in name for part in ("k_proj", "v_proj", "k_norm")) for name in same):
        error = _norm(got[failed[0]] - want[failed[0]]) / max(_norm(want[failed[0]]), 1e-300)
        return (
            f"in {layer} the gradients of keys and values differ (by {error:.1e}) and those of queries agree: "
            "dK/dV are lost or rounded on their way round the ring; sum them in fp32."
        )
    return ""
