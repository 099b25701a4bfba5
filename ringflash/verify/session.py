"""One verification: the three runs, the checks, and the search for the first difference. All ranks run it together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.comm.comparison import gather_values
from ringflash.sequence.layout import chunks_of_rank
from ringflash.verify.attention import attention_checks
from ringflash.verify.capture import HIDDEN, watched_modules
from ringflash.verify.compare import LAYERS, MASK, Check, Runs, check_beside_exact, compare, errors_of
from ringflash.verify.diagnosis import Reach, ShardedPositions, explain
from ringflash.verify.layer_masks import LayerMasks, ReachReader, declared_masks, ranges_of
from ringflash.verify.observation import Observation, Tensors, attends_in_fp8, build, observe
from ringflash.verify.probe import MakeReader, OutputReader, Touch, changed_positions, read_forward, replace_tokens
from ringflash.verify.report import Report
from ringflash.verify.rounding import MOST_BASELINES, may_be_rounding, round_again, rounding_hint, step_from
from ringflash.verify.target import Data, Factory, Training, draw_data, vocab_size_of, windows_of
from ringflash.wrap.wrapper import check_norms
from ringflash_kernels.api import keys_in_pieces

T = TypeVar("T")
_MIN_CHANGE = 1e-6  # relative to the largest value, in fp64; transformers' norms are computed in fp32 nevertheless


@dataclass(frozen=True)
class Settings:
    """Settings of a verification.

    Args:
        bounds: cu_seqlens of packed documents; None is one document.
        parents, bidirectional, global_tokens: of the documents, as for `ringflash.document_table`.
        window: window of every layer, the query's own key included; None reads the model's configuration.
        causal: False for attention and windows in both directions.
    """

    seqlen: int
    dtype: torch.dtype
    device: torch.device
    bounds: list[int] | None = None
    window: int | None = None
    seed: int = 0
    causal: bool = True
    parents: list[int] | None = None
    bidirectional: list[bool] | None = None
    global_tokens: int = 0


class Session:
    """Verification of one factory over one group.

    Attributes:
        cp1_on_all_ranks: a run at cp=1 needs all ranks; if False, rank 0 makes it.
    """

    cp1_on_all_ranks = False

    def __init__(self, factory: Factory, group: dist.ProcessGroup, settings: Settings) -> None:
        self.factory, self.group, self.settings = factory, group, settings
        self.is_first, self.in_fp8 = group.rank() == 0, False
        self.data: Data
        self.layout: str
        self.windows: list[int | None]
        self.layer_names: list[str]
        self.masks: LayerMasks

    def run(self) -> Report:
        """Run everything and return the verdict.

        Raises:
            RuntimeError: the model does not run at cp=1.
        """
        s = self.settings
        described = f"{s.seqlen} tokens, {len(s.bounds or [0, 0]) - 1} document(s), {s.dtype}, {s.device.type}"
        report = Report(self.group.size(), described.replace("torch.", ""))
        got, error = self._try_ring()
        if got is None or error:
            self._run_cp1(lambda: self._observe_cp1(Observation()))  # raises if cp=1 fails as well
            report.checks = [Check("cp=N run", None, [error])]
            report.first = f"cp={report.cp_size} does not run: {error}"
            report.hint = "cp=1 runs; the message says what a ring needs."
            return report
        runs = self._run_cp1(lambda: self._observe_cp1(got))  # None on other ranks than the first
        report.checks = self._on_first(lambda: compare(runs) + (check_beside_exact(runs) if self.in_fp8 else []))
        runs = self._add_baselines(report, runs)
        report.checks += [self._mask_check(), self._layer_mask_check()]
        report.checks += attention_checks(self.group, self.data, set(self.windows) or {None}, s.causal, s.dtype)
        self._explain(report, runs)
        return report

    def observe(self, *, ring: bool, wide: bool = False, weights: Tensors | None = None) -> Observation:
        """Observe one run; at cp=1 only rank 0 calls it.

        Args:
            wide: run in fp64 instead of the dtype under test.
            weights: values of the parameters.
        """
        training = self._build(ring=ring, wide=wide, weights=weights)
        if ring:
            self.inspect(training)
        return observe(training, self.group if ring else None, self.data)

    def inspect(self, training: Training) -> None:
        """Read layout, layer names, windows and masks from the model, and draw the data.

        Raises:
            NotImplementedError: the model has a norm over tokens, which differ between cp=1 and cp=N.
        """
        s, module = self.settings, training.module
        check_norms(module)
        self.in_fp8 = attends_in_fp8(module)
        self.layout, self.layer_names = training.layout, list(watched_modules(module))
        self.data = draw_data(
            vocab_size_of(module), s.seqlen, s.bounds, s.seed, s.device, s.parents, s.bidirectional, s.global_tokens
        )
        self.windows = windows_of(module)
        if s.window is not None:
            self.windows = [s.window] * max(1, len(self.windows))
        self.masks = LayerMasks(declared_masks(module, s.window), self.data, s.causal)

    def _build(self, *, ring: bool, wide: bool = False, weights: Tensors | None = None) -> Training:
        group = self.group if ring else None
        return build(self.factory, group, torch.float64 if wide else self.settings.dtype, self.settings.device, weights)

    def _try_ring(self) -> tuple[Observation | None, str]:
        """Return the run over the ring and the error of the first rank that has one."""
        seen, error = None, ""
        try:
            seen = self.observe(ring=True)
        except Exception as problem:  # the model is the user's code
            error = f"{type(problem).__name__}: {problem}"
            # printed immediately, since the other ranks may be waiting for this one
            print(f"rank {self.group.rank()}: {error}", file=sys.stderr)
        error = next((e for e in gather_values(self.group, error) if e), "")
        if error and not hasattr(self, "data"):
            raise RuntimeError(f"the model must be built on every rank, got {error}; call the factory without verify.")
        return seen, error

    def _observe_cp1(self, got: Observation) -> Runs:
        baseline = self.observe(ring=False)
        want = self.observe(ring=False, wide=True, weights=baseline.weights)
        num_chunks = self.group.size() * chunks_of_rank(self.layout)
        return Runs(got, want, baseline, num_chunks, torch.finfo(self.settings.dtype).eps)

    def _add_baselines(self, report: Report, runs: Any) -> Any:
        """Add baselines and compare again, as long as the failures of the report may be rounding; return all runs."""
        for seed in range(MOST_BASELINES - 1):
            if self.in_fp8 or not may_be_rounding(report.checks, torch.finfo(self.settings.dtype).eps):
                break
            runs = self._run_cp1(partial(self._add_baseline, runs, seed))
            report.checks = self._on_first(partial(compare, runs))
        return runs

    def _add_baseline(self, runs: Runs, seed: int) -> Runs:
        weights = runs.baseline.weights
        with keys_in_pieces(runs.num_chunks):
            seen = self.observe(ring=False, weights=round_again(weights, seed))
        return replace(runs, more=(*runs.more, errors_of(step_from(weights, seen), runs)))

    def _run_cp1(self, make: Callable[[], Any], *, share: bool = False) -> Any:
        """Call `make`, which runs at cp=1, and return its result where it runs, or, if `share`, on all ranks."""
        return make() if self.cp1_on_all_ranks else self._on_first(make, share=share)

    def _on_first(self, make: Callable[[], Any], *, share: bool = True) -> Any:
        """Call `make` on rank 0 and return its result there, or, if `share`, on all ranks; all raise its error."""
        made, error = None, ""
        if self.is_first:
            try:
                made = make()
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
        error = self._broadcast(error)
        if error:
            raise RuntimeError(f"the model must run at cp=1, got {error}; docs/verify.md says what is called.")
        return self._broadcast(made) if share else made

    def _broadcast(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self.group, 0), group=self.group)
        return box[0]

    def _mask_check(self) -> Check:
        """Check that some tokens reach no position that the declared mask hides, at cp=N and at cp=1."""
        check, may_reach = Check(MASK, 0.0), self._may_reach()
        want = self._run_cp1(lambda: self._beyond(may_reach, ring=False), share=True)
        for run, beyond in (("cp=1", want), ("cp=N", self._beyond(may_reach, ring=True))):
            if beyond:
                check.failed.append(run)
                check.ratio, check.position = float("inf"), beyond[0]
        if check.position is not None:
            start = max((p for p in may_reach if p <= check.position), default=min(may_reach))
            runs = " and ".join(check.failed)
            check.note = f"position {start} reaches {check.position} at {runs}, outside {ranges_of(may_reach[start])}"
        return check

    def _layer_mask_check(self) -> Check:
        """Check the mask of every attention layer against the configuration, at cp=N and at cp=1."""
        make_reader = partial(ReachReader, positions=self.masks.positions)
        return self.masks.check(
            lambda wide: self._run_cp1(partial(self.read, self.data, make_reader, ring=False, wide=wide), share=True),
            lambda wide: self.read(self.data, make_reader, ring=True, wide=wide),
        )

    def _beyond(self, may_reach: dict[int, Tensor], *, ring: bool) -> list[int]:
        """Return the positions beyond `may_reach` that the changed tokens reach.

        If any bit changes, the test is repeated in fp64, because the rounding of a token in an expert depends on the
        number of tokens of that expert.
        """
        pair = self.data, replace_tokens(self.data, list(may_reach))
        seen = set(torch.stack(list(may_reach.values())).any(0).nonzero().flatten().tolist())

        def beyond(wide: bool, least: float) -> list[int]:
            reached = self._reached(lambda x: self.layer_outputs(x, ring=ring, wide=wide), pair, least=least)
            return [p for p in reached if p not in seen]

        return beyond(False, 0.0) and beyond(True, _MIN_CHANGE)

    def _may_reach(self) -> dict[int, Tensor]:
        """Return the positions to change, each with those that it may reach: (seqlen,), bool.

        With a causal mask: the last token of every document, which no other token sees, and the middle token of the
        first. None in documents that others continue: most of the sequence may see these. Without a causal mask: the
        middle token of every second document; the documents between them must not change.
        """
        documents, reach = self.data.documents, None
        beyond = self.settings.bidirectional and self.settings.global_tokens  # a global token may see later ones
        if self.windows and None not in self.windows and not beyond:
            reach = 1 + sum(w - 1 for w in self.windows if w is not None)
        if self.settings.causal:
            continued = set(self.settings.parents or ())
            changed = [stop - 1 for index, (_, stop) in enumerate(documents) if index not in continued]
            changed += [] if 0 in continued else [documents[0][1] // 2]
        else:
            changed = [(start + stop) // 2 for start, stop in documents[::2]]
        return {position: self.data.queries_of(position, reach, self.settings.causal) for position in changed}

    def _explain(self, report: Report, runs: Any) -> None:
        """Add the first failure in the order of the data path, and its likely cause, to the report."""
        check = next((check for check in report.checks if check.failed), None)
        if check is None:
            return
        probes = self._probe(check) if check.name == LAYERS and check.failed[0] != HIDDEN else []
        sharded = ShardedPositions(self.settings.seqlen, self.group.size(), self.layout)
        report.first, report.hint = self._on_first(lambda: explain(check, runs, probes, sharded))
        if not self.in_fp8:
            report.hint = rounding_hint(report.checks, torch.finfo(self.settings.dtype).eps) or report.hint

    def _probe(self, check: Check) -> list[Reach]:
        """Probe the first layer that differs, just before the first different position and at position 0.

        A layer that processes each token separately (such as a projection after hand-written attention) only passes a
        difference on. Then the input of the enclosing layer is perturbed instead, and finally the input of the model.
        """
        name, found = check.failed[0], []
        assert check.position is not None
        positions = sorted({0, max(0, check.position - 1)}, reverse=True)
        enclosing = sorted((n for n in self.layer_names if f"{name}.".startswith(f"{n}.")), key=len, reverse=True)
        for touched in (*enclosing, None):
            found = [self._probe_at(position, touched, name) for position in positions]
            if any(probe.got != [probe.position] or probe.want != [probe.position] for probe in found):
                break
        return found

    def _probe_at(self, position: int, touched: str | None, name: str) -> Reach:
        """Return the reach of a position from the input of one layer (or the model) to the output of another."""
        touch = None if touched is None else Touch(touched, position)
        other = replace_tokens(self.data, [position]) if touch is None else self.data

        def reached(*, ring: bool) -> list[int]:
            return self._reached(
                lambda run: self.layer_outputs(*run, ring=ring), ((self.data, None), (other, touch)), name
            )

        return Reach(position, reached(ring=True), self._run_cp1(partial(reached, ring=False), share=True))

    def layer_outputs(self, data: Data, touch: Touch | None = None, *, ring: bool, wide: bool = False) -> Tensors:
        """Return the layer outputs of one forward."""
        return self.read(data, partial(OutputReader, touch=touch), ring=ring, wide=wide)

    def read(self, data: Data, make_reader: MakeReader, *, ring: bool, wide: bool = False) -> Tensors:
        """Return the tensors that a reader collects in one forward; at cp=1 only rank 0 calls it."""
        return read_forward(self._build(ring=ring, wide=wide), self.group if ring else None, data, make_reader)

    @staticmethod
    def _reached(
        outputs: Callable[[Any], Tensors], pair: tuple[Any, Any], name: str | None = None, least: float = 0.0
    ) -> list[int]:
        """Return the positions at which the output of a module (default: the last) differs between two forwards."""
        before, after = (outputs(x) for x in pair)
        if not before:
            raise RuntimeError("a layer must return (1, seqlen, ...), got none; see Limits in docs/verify.md.")
        name = name or list(before)[-1]
        return changed_positions(before[name], after[name], least)
