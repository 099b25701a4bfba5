"""The three runs, the checks, and the search for the first thing that differs; all ranks walk it together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ringflash.comm.agreement import agree
from ringflash.sequence.layout import chunks_of_rank
from ringflash.verify import diagnosis, layer_masks
from ringflash.verify.attention import attention_checks
from ringflash.verify.capture import HIDDEN, watched
from ringflash.verify.compare import Check, Runs, compare
from ringflash.verify.diagnosis import Place, Reach
from ringflash.verify.layer_masks import LayerMasks, Reaches
from ringflash.verify.observe import Observation, Tensors, build, observe
from ringflash.verify.probe import Look, Touch, Watch, changed, watched_forward, with_other_tokens
from ringflash.verify.subject import Data, Factory, Training, draw_data, vocab_size_of, windows_of
from ringflash.wrap.wrapper import check_norms

T = TypeVar("T")
_REACH = 1e-6  # of the largest value: what a token does to another in fp64, though norms may be computed in fp32


@dataclass(frozen=True)
class Settings:
    """How to look.

    Args:
        bounds: cu_seqlens of packed documents; None is one document.
        window: of every layer, itself included; None asks the model's configuration.
        causal: otherwise attention goes both ways, and so do its windows.
    """

    seqlen: int
    dtype: torch.dtype
    device: torch.device
    bounds: list[int] | None = None
    window: int | None = None
    seed: int = 0
    causal: bool = True


@dataclass
class Report:
    """The verdict, equal on all ranks."""

    cp_size: int
    settings: str
    checks: list[Check] = field(default_factory=list)
    first: str = ""
    hint: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not any(check.failed for check in self.checks)


class Session:
    """One verification of one factory over one group."""

    def __init__(self, factory: Factory, group: dist.ProcessGroup, settings: Settings) -> None:
        self.factory, self.group, self.settings = factory, group, settings
        self.is_first = group.rank() == 0
        self.data: Data
        self.layout: str
        self.windows: list[int | None]
        self.layer_names: list[str]
        self.masks: LayerMasks

    def run(self) -> Report:
        """The verdict.

        Raises:
            RuntimeError: the model does not run at cp=1.
        """
        s = self.settings
        described = f"{s.seqlen} tokens, {len(s.bounds or [0, 0]) - 1} document(s), {s.dtype}, {s.device.type}"
        report = Report(self.group.size(), described.replace("torch.", ""))
        got, error = self._try_ring()
        if got is None or error:
            self._runs(Observation())  # raises where cp=1 fails as well
            report.checks = [Check("cp=N run", None, [error])]
            report.first = f"cp={report.cp_size} does not run: {error}"
            report.hint = "cp=1 runs; the message says what a ring needs."
            return report
        runs = self._runs(got)
        report.checks = self._shared(lambda: compare(runs))
        report.checks += [self._mask_check(), self._layer_mask_check()]
        report.checks += attention_checks(self.group, self.data, set(self.windows) or {None}, s.causal, s.dtype)
        self._explain(report, runs)
        return report

    def observe(self, *, ring: bool, wide: bool = False, weights: Tensors | None = None) -> Observation:
        """One run; at cp=1 rank 0 alone calls it.

        Args:
            wide: in fp64 instead of the dtype under test.  weights: the parameters' values.
        """
        training = self._build(ring=ring, wide=wide, weights=weights)
        if ring:
            self._see(training)
        return observe(training, self.group if ring else None, self.data)

    def _see(self, training: Training) -> None:
        """Take from the model what the rest depends on.

        Raises:
            NotImplementedError: a norm over tokens, which at cp=1 and cp=N is over others.
        """
        s, module = self.settings, training.module
        check_norms(module)
        self.layout, self.layer_names = training.layout, list(watched(module))
        self.data = draw_data(vocab_size_of(module), s.seqlen, s.bounds, s.seed, s.device)
        self.windows = windows_of(module)
        if s.window is not None:
            self.windows = [s.window] * max(1, len(self.windows))
        self.masks = LayerMasks(layer_masks.declared_masks(module, s.window), self.data, s.causal)

    def _build(self, *, ring: bool, wide: bool = False, weights: Tensors | None = None) -> Training:
        group = self.group if ring else None
        return build(self.factory, group, torch.float64 if wide else self.settings.dtype, self.settings.device, weights)

    def _try_ring(self) -> tuple[Observation | None, str]:
        """The run over the ring, or the first rank's error."""
        seen, error = None, ""
        try:
            seen = self.observe(ring=True)
        except Exception as problem:  # the model is the user's code
            error = f"{type(problem).__name__}: {problem}"
            print(f"rank {self.group.rank()}: {error}", file=sys.stderr)  # the other ranks may wait for this one
        errors: list[str] = [""] * self.group.size()
        dist.all_gather_object(errors, error, group=self.group)
        error = next((e for e in errors if e), "")
        if error and not hasattr(self, "data"):
            raise RuntimeError(f"the model must be built on every rank, got {error}; call the factory by itself.")
        return seen, error

    def _runs(self, got: Observation) -> Any:
        """All runs together, on rank 0; None elsewhere."""
        return self._on_first(lambda: self._with_cp1(got))

    def _with_cp1(self, got: Observation) -> Runs:
        baseline = self.observe(ring=False)
        want = self.observe(ring=False, wide=True, weights=baseline.weights)
        num_chunks = self.group.size() * chunks_of_rank(self.layout)
        return Runs(got, want, baseline, num_chunks, torch.finfo(self.settings.dtype).eps)

    def _on_first(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0 and None elsewhere; an error of its reaches all ranks."""
        made, error = None, ""
        if self.is_first:
            try:
                made = make()
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
        error = self._broadcast(error)
        if error:
            raise RuntimeError(f"the model must run at cp=1, got {error}; docs/verify.md says what is called.")
        return made

    def _at_cp1(self, make: Callable[[], Any]) -> Any:
        """What `make` finds at cp=1, on all ranks."""
        return self._shared(make)

    def _shared(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, on all ranks."""
        return self._broadcast(self._on_first(make))

    def _broadcast(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self.group, 0), group=self.group)
        return box[0]

    def _mask_check(self) -> Check:
        """Some tokens reach no position that the declared mask hides, at cp=N and at cp=1."""
        check, spans = Check("mask", 0.0), self._spans()
        want = self._at_cp1(lambda: self._beyond(spans, ring=False))
        for run, beyond in (("cp=1", want), ("cp=N", self._beyond(spans, ring=True))):
            if beyond:
                check.failed.append(run)
                check.ratio, check.position = float("inf"), beyond[0]
        if check.position is not None:
            start = max((p for p in spans if p <= check.position), default=min(spans))
            runs, (first, stop) = " and ".join(check.failed), spans[start]
            check.note = f"position {start} reaches {check.position} at {runs}, outside [{first}, {stop})"
        return check

    def _layer_mask_check(self) -> Check:
        """The attention of every layer sees what the configuration says of it, at cp=N and at cp=1."""
        look = partial(Reaches, positions=self.masks.positions)
        return self.masks.check(
            lambda wide: self._at_cp1(lambda: self.read(self.data, look, ring=False, wide=wide)),
            lambda wide: self.read(self.data, look, ring=True, wide=wide),
        )

    def _beyond(self, spans: dict[int, tuple[int, int]], *, ring: bool) -> list[int]:
        """Positions outside of all spans that what is changed reaches.

        Bits that change are looked at again in fp64: how an expert rounds a token depends on how many others it has.
        """
        pair = self.data, with_other_tokens(self.data, list(spans))
        seen = {p for span in spans.values() for p in range(*span)}

        def beyond(wide: bool, least: float) -> list[int]:
            reached = self._reached(lambda x: self.layer_outputs(x, ring=ring, wide=wide), pair, least=least)
            return [p for p in reached if p not in seen]

        return beyond(False, 0.0) and beyond(True, _REACH)

    def _spans(self) -> dict[int, tuple[int, int]]:
        """The positions that are changed, and where each may reach to.

        Under a causal mask the first document's middle, and every document's last, which no other sees. In both
        directions the middle of every second document: what lies between these must not change.
        """
        bounds = [0, self.data.seqlen] if self.data.cu_seqlens is None else self.data.cu_seqlens.tolist()
        reach = self.data.seqlen
        if self.windows and None not in self.windows:
            reach = sum(w - 1 for w in self.windows if w is not None)
        if not self.settings.causal:
            middles = {(start + stop) // 2: (start, stop) for start, stop in list(pairwise(bounds))[::2]}
            return {p: (max(start, p - reach), min(stop, p + reach + 1)) for p, (start, stop) in middles.items()}
        middle = bounds[1] // 2
        return {middle: (middle, min(bounds[1], middle + 1 + reach))} | {p - 1: (p - 1, p) for p in bounds[1:]}

    def _explain(self, report: Report, runs: Any) -> None:
        """Name the first failure in the order of the data, and its likely cause."""
        check = next((check for check in report.checks if check.failed), None)
        if check is None:
            return
        probes = self._probe(check) if check.name == "layer outputs" and check.failed[0] != HIDDEN else []
        place = Place(self.settings.seqlen, self.group.size(), self.layout)
        report.first, report.hint = self._shared(lambda: _explanation(check, runs, probes, place))

    def _probe(self, check: Check) -> list[Reach]:
        """The first layer that differs, perturbed just before where it differs and at the first position.

        A layer that treats tokens one by one only passes on what it was given, a projection after an attention
        written out by hand for example: then the input of the enclosing layer is perturbed instead, in the end that of
        the model.
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
        """Reach of a position from the input of one layer, or of the model, to the output of another."""
        touch = None if touched is None else Touch(touched, position)
        other = with_other_tokens(self.data, [position]) if touch is None else self.data

        def reached(*, ring: bool) -> list[int]:
            return self._reached(
                lambda run: self.layer_outputs(*run, ring=ring), ((self.data, None), (other, touch)), name
            )

        return Reach(position, reached(ring=True), self._at_cp1(partial(reached, ring=False)))

    def layer_outputs(self, data: Data, touch: Touch | None = None, *, ring: bool, wide: bool = False) -> Tensors:
        """What the layers put out."""
        return self.read(data, partial(Watch, touch=touch), ring=ring, wide=wide)

    def read(self, data: Data, look: Look, *, ring: bool, wide: bool = False) -> Tensors:
        """What `look` reads in a forward; at cp=1 rank 0 alone calls it."""
        return watched_forward(self._build(ring=ring, wide=wide), self.group if ring else None, data, look)

    @staticmethod
    def _reached(
        outputs: Callable[[Any], Tensors], pair: tuple[Any, Any], name: str | None = None, least: float = 0.0
    ) -> list[int]:
        """Positions at which a module's output (default the last one's) differs between two forwards."""
        before, after = (outputs(x) for x in pair)
        if not before:
            raise RuntimeError("a layer must put out (1, seqlen, ...), got none; see Limits in docs/verify.md.")
        name = name or list(before)[-1]
        return changed(before[name], after[name], least)


def _explanation(check: Check, runs: Runs, probes: list[Reach], place: Place) -> tuple[str, str]:
    """(what differs first and where, likely cause)."""
    where = "" if check.position is None else f" at {place.describe(check.position)}"
    first = f"{check.name}: {check.failed[0]}{where}"
    if check.name == "layer outputs":
        if not runs.got.layers[check.failed[0]].isfinite().all():
            return first, diagnosis.infinite_hint(check.failed[0], runs)
        index = next((part for part in check.failed[0].split(".") if part.isdigit()), "0")
        assert check.position is not None
        return first, diagnosis.layer_hint(check.failed[0], check.position, probes, place, int(index) > 0)
    hints = {
        "weights before": diagnosis.weights_hint,
        "batch": lambda: diagnosis.batch_hint(check.failed[0], runs, place),
        "loss": lambda: diagnosis.loss_hint(runs, place),
        "loss gradient by position": lambda: diagnosis.loss_hint(runs, place),
        "evaluation loss": lambda: diagnosis.eval_hint(check.failed[0], runs, place),
        "gradients": lambda: diagnosis.gradient_hint(check.failed, runs, place),
        "gradients equal on all ranks": lambda: diagnosis.gradient_hint(check.failed, runs, place),
        "mask": lambda: diagnosis.mask_hint(check),
        layer_masks.NAME: lambda: diagnosis.mask_hint(check),
    }
    return first, hints.get(check.name, lambda: "")()


def session_for(factory: Factory, group: dist.ProcessGroup, settings: Settings) -> Session:
    """A session for what the factory builds: Lightning's Trainer runs its modules."""
    if "lightning" in sys.modules:
        from lightning import LightningModule

        from ringflash.verify.lightning import LightningSession

        made, problem = None, None
        try:
            made = factory(group)
        except Exception as error:  # the model is the user's code
            text = f"the model must be built on every rank, got {type(error).__name__}: {error}; call it by itself."
            problem = RuntimeError(text)
        agree(group, {}, problem)
        if made is not None and isinstance(made.module, LightningModule):
            return LightningSession(factory, group, settings)
    return Session(factory, group, settings)
