"""The three runs, the checks, and the search for the first thing that differs; all ranks walk it together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ringflash.verify import diagnosis
from ringflash.verify.attention import attention_checks
from ringflash.verify.compare import Check, Runs, compare
from ringflash.verify.diagnosis import Place, Reach
from ringflash.verify.observe import Observation, build, observe
from ringflash.verify.probe import reached_by_token, reached_through
from ringflash.verify.subject import Data, Factory, Training, draw_data, vocab_size_of, windows_of

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How to look.

    Args:
        bounds: cu_seqlens of packed documents; None is one document.
        window: of every layer, itself included; None asks the model's configuration.
    """

    seqlen: int
    dtype: torch.dtype
    device: torch.device
    bounds: list[int] | None = None
    window: int | None = None
    seed: int = 0


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

    def run(self) -> Report:
        """The verdict.

        Raises:
            RuntimeError: the model does not run at cp=1 either.
        """
        s = self.settings
        described = f"{s.seqlen} tokens, {len(s.bounds or [0, 0]) - 1} document(s), {s.dtype}, {s.device.type}"
        report = Report(self.group.size(), described.replace("torch.", ""))
        training = self._build(ring=True)
        data = draw_data(vocab_size_of(training.module), s.seqlen, s.bounds, s.seed, s.device)
        windows = windows_of(training.module)
        if s.window is not None:
            windows = [s.window] * max(1, len(windows))
        got, error = self._try(training, data)
        if error:
            report.checks = [Check("cp=N run", 2.0, [error])]
            report.first, report.hint = f"cp={report.cp_size} does not run: {error}", "cp=1 was not tried."
            return report
        assert got is not None
        runs = self._on_first(lambda: self._runs(got, data))
        report.checks = self._shared(lambda: compare(runs))
        report.checks.append(self._mask_check(data, windows))
        report.checks += attention_checks(self.group, data, set(windows) or {None}, s.dtype)
        self._explain(report, runs, data)
        return report

    def _build(self, *, ring: bool, wide: bool = False, weights: Any = None) -> Training:
        group = self.group if ring else None
        return build(self.factory, group, torch.float64 if wide else self.settings.dtype, self.settings.device, weights)

    def _try(self, training: Training, data: Data) -> tuple[Observation | None, str]:
        """The run over the ring, or the first rank's error."""
        seen, error = None, ""
        try:
            seen = observe(training, self.group, data)
        except (ValueError, RuntimeError, NotImplementedError, TypeError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        errors: list[str] = [""] * self.group.size()
        dist.all_gather_object(errors, error, group=self.group)
        return seen, next((e for e in errors if e), "")

    def _runs(self, got: Observation, data: Data) -> Runs:
        training = self._build(ring=False)
        layout = training.layout
        baseline = observe(training, None, data)
        want = observe(self._build(ring=False, wide=True, weights=baseline.weights), None, data)
        num_chunks = self.group.size() * (2 if layout == "zigzag" else 1)
        return Runs(got, want, baseline, num_chunks, torch.finfo(self.settings.dtype).eps)

    def _on_first(self, make: Any) -> Any:
        """What `make` returns on rank 0 and None elsewhere; an error of its reaches all ranks."""
        made, error = None, ""
        if self.is_first:
            try:
                made = make()
            except Exception as problem:
                error = f"{type(problem).__name__}: {problem}"
        error = self._broadcast(error)
        if error:
            raise RuntimeError(
                f"the model must run at cp=1, got {error}; see the factory's protocol in docs/verify.md."
            )
        return made

    def _shared(self, make: Any) -> Any:
        """What `make` returns on rank 0, on all ranks."""
        return self._broadcast(self._on_first(make))

    def _broadcast(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self.group, 0), group=self.group)
        return box[0]

    def _mask_check(self, data: Data, windows: list[int | None]) -> Check:
        """One token reaches no position that the declared mask hides, at cp=N and at cp=1."""
        document = data.seqlen if data.cu_seqlens is None else int(data.cu_seqlens[1])
        position = document // 2
        stop = document
        if windows and None not in windows:
            stop = min(stop, position + 1 + sum(w - 1 for w in windows if w is not None))
        got = reached_by_token(self._build(ring=True), self.group, data, position)
        want = self._shared(lambda: reached_by_token(self._build(ring=False), None, data, position))
        check = Check("mask", 0.0)
        for run, reached in (("cp=1", want), ("cp=N", got)):
            beyond = [p for p in reached if not position <= p < stop]
            if beyond:
                check.failed.append(run)
                check.ratio, check.position = float("inf"), beyond[0]
                check.note = f"position {position} reaches position {beyond[0]} ({run}), outside [{position}, {stop})"
        return check

    def _explain(self, report: Report, runs: Runs, data: Data) -> None:
        """Name the first failure in the order of the data, and its likely cause."""
        check = next((check for check in report.checks if check.failed), None)
        if check is None:
            return
        probes = self._probe(check, data) if check.name == "layer outputs" else []
        report.first, report.hint = self._shared(lambda: _explanation(check, runs, probes, self._place(data)))

    def _place(self, data: Data) -> Place:
        return Place(data.seqlen, self.group.size(), self._build(ring=False).layout)

    def _probe(self, check: Check, data: Data) -> list[Reach]:
        """The first layer that differs, perturbed at the first position and just before where it differs."""
        name, found = check.failed[0], []
        assert check.position is not None
        for position in sorted({0, max(0, check.position - 1)}, reverse=True):
            got = reached_through(self._build(ring=True), self.group, data, name, position)
            want = self._shared(lambda p=position: reached_through(self._build(ring=False), None, data, name, p))
            found.append(Reach(position, got, want))
        return found


def _explanation(check: Check, runs: Runs, probes: list[Reach], place: Place) -> tuple[str, str]:
    """(what differs first and where, likely cause)."""
    where = "" if check.position is None else f" at {place.describe(check.position)}"
    first = f"{check.name}: {check.failed[0]}{where}"
    if check.name == "layer outputs":
        index = next((part for part in check.failed[0].split(".") if part.isdigit()), "0")
        return first, diagnosis.layer_hint(check.failed[0], probes, place, int(index) > 0)
    hints = {
        "weights before": diagnosis.weights_hint,
        "batch": lambda: diagnosis.batch_hint(check.failed[0], runs, place),
        "loss": lambda: diagnosis.loss_hint(runs, place),
        "loss gradient by position": lambda: diagnosis.loss_hint(runs, place),
        "evaluation loss": lambda: diagnosis.eval_hint(check.failed[0], runs, place),
        "gradients": lambda: diagnosis.gradient_hint(check.failed, runs, place),
        "gradients equal on all ranks": lambda: diagnosis.gradient_hint(check.failed, runs, place),
        "mask": lambda: diagnosis.mask_hint(check),
    }
    return first, hints.get(check.name, lambda: "")()
