"""Check of each layer's attention mask against the kind of attention in the configuration.

Layers are checked one by one, because the output of the model does not show a dropped window if other layers have full
attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.huggingface.options import inputs_of
from ringflash.huggingface.validation import attention_modules, layer_type
from ringflash.sequence.layout import shard_sequence
from ringflash.verify.capture import gather_whole, plain_name, tensor_of
from ringflash.verify.compare import Check
from ringflash.verify.observation import Tensors
from ringflash.verify.target import Data

NAME = "masks of layers"
_MIN_CHANGE = 1e-12  # relative to the largest value, in fp64


@dataclass(frozen=True)
class LayerMask:
    """Mask of a layer in the configuration: a window (the token itself included) or a chunk; None is unlimited."""

    window: int | None = None
    chunk: int | None = None

    def queries_of(self, position: int, data: Data, causal: bool) -> Tensor:
        """Return which queries see the key at a position: (seqlen,), bool."""
        seen = data.queries_of(position, self.window, causal)
        if self.chunk is not None:
            first = next(start for start, stop in data.documents if start <= position < stop)
            start = position - (position - first) % self.chunk
            seen[:start] = seen[start + self.chunk :] = False
        return seen

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window}"
        return "full attention" if self.chunk is None else f"chunks of {self.chunk}"


def declared_masks(module: nn.Module, window: int | None = None) -> dict[str, LayerMask]:
    """Return the mask of each attention layer, by name; empty unless the model is transformers'.

    Args:
        window: window of every layer; None reads the configuration.
    """
    return {name: LayerMask(window) if window else _mask_of(m) for name, m in _attentions(module).items()}


def _attentions(module: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules of transformers' decoder layers, by name."""
    found = set(attention_modules(module))
    return {plain_name(name): m for name, m in module.named_modules() if m in found and hasattr(m, "config")}


def _mask_of(attention: Any) -> LayerMask:
    kind = layer_type(attention)
    if kind == "chunked_attention":
        return LayerMask(chunk=attention.config.attention_chunk_size)
    windowed = kind in (None, "sliding_attention")
    return LayerMask(getattr(attention.config, "sliding_window", None) if windowed else None)


class ReachReader:
    """Measure how much the output of each attention changes with its input at single positions.

    Each attention is called again for each position. Results by name are (1, seqlen, 1 + positions), fp64: the largest
    value of every row, then its largest change for each position.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup | None, data: Data, layout: str, *, positions: Sequence[int]
    ) -> None:
        self.group, self.layout = group, layout
        marks = torch.arange(data.seqlen)[None] == torch.tensor(positions)[:, None]
        self._rows = shard_sequence(marks, group, 1, layout).to(data.input_ids.device)
        self._found: Tensors = {}
        self._busy = False
        self._handles: list[Any] = []
        for name, attention in _attentions(module).items():
            call = RecordedCall(attention)
            self._handles.append(attention.register_forward_pre_hook(call.note, prepend=True, with_kwargs=True))
            self._handles.append(attention.register_forward_hook(partial(self._read, name, call)))

    def close(self) -> Tensors:
        """Remove the hooks and return the changes by name."""
        for handle in self._handles:
            handle.remove()
        return {name: gather_whole(x, self.group, self.layout) for name, x in self._found.items()}

    @torch.compiler.disable(reason="calls the module again")
    def _read(self, name: str, call: RecordedCall, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Run a layer's attention again with each changed input, and keep how its output changes at each position."""
        before = tensor_of(output, self._rows.shape[1])
        if self._busy or name in self._found or before is None:
            return
        self._busy = True
        try:
            others = [tensor_of(call.repeat_with_change(row), before.shape[1]) for row in self._rows]
        finally:
            self._busy = False
        changes = [(x - before).double() for x in others if x is not None]
        self._found[name] = torch.stack([x.abs().flatten(2).amax(-1) for x in (before.double(), *changes)], -1)


class RecordedCall:
    """First call of an attention module, which can be repeated; the model's notes are restored to what they were."""

    def __init__(self, attention: nn.Module) -> None:
        self.attention, notes = attention, inputs_of(attention)
        self.notes: dict[str, Any] = {} if notes is None else vars(notes)
        self.first: tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]] | None = None

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the arguments: a pre-hook that runs before all others, which may change them."""
        self.first = self.first or (args, kwargs, dict(self.notes))

    def repeat_with_change(self, row: Tensor) -> Any:
        """Repeat the call with the features of the marked row of the hidden states rotated by one."""
        assert self.first is not None
        args, kwargs, notes = self.first
        self.notes.update(notes)
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        other = torch.where(row[None, :, None], hidden.roll(1, -1), hidden)
        if "hidden_states" in kwargs:
            return self.attention(*args, **(kwargs | {"hidden_states": other}))
        return self.attention(other, *args[1:], **kwargs)


class Wrong(NamedTuple):
    """A layer that sees a hidden position, or misses a visible one."""

    name: str
    position: int
    text: str


@dataclass(frozen=True)
class LayerMasks:
    """Check of the masks of all layers."""

    masks: dict[str, LayerMask]
    data: Data
    causal: bool

    @property
    def positions(self) -> list[int]:
        """Positions to change.

        - of the longest document: the token before it, its first and last tokens, two in the middle (at least one of
          which does not start a chunk), and one after these;
        - of the last document: the token before it and its first token.
        """
        start, stop = max(self.data.documents, key=lambda x: x[1] - x[0])
        middle, last = (start + stop) // 2, self.data.documents[-1][0]
        inside = start, middle, min(middle + 1, stop - 1), (middle + stop) // 2, stop - 1
        return sorted({max(0, start - 1), *inside, max(0, last - 1), last})

    def check(self, at_cp1: Callable[[bool], Tensors], at_cpn: Callable[[bool], Tensors]) -> Check:
        """Return the verdict from the results of `ReachReader` in the dtype under test or, for True, in fp64."""
        if not self.masks:
            return Check(NAME, note="no configuration of transformers says what a layer sees")
        check, wrong = Check(NAME, 0.0), dict[str, list[Wrong]]()
        for run, read in (("cp=1", at_cp1), ("cp=N", at_cpn)):
            reaches = read(False)
            if not any(name in reaches for name in self.masks):
                return Check(NAME, note=f"no attention puts out (1, seqlen, ...) at {run}")
            found = self._wrong(reaches, 0.0)
            if found:
                again = {(x.name, x.position) for x in self._wrong(read(True), _MIN_CHANGE)}
                found = [x for x in found if (x.name, x.position) in again]
            if found:
                wrong[run] = found
        named = {x.name for found in wrong.values() for x in found}
        check.failed = [name for name in self.masks if name in named]
        if check.failed:
            first = {run: x for run, found in wrong.items() for x in found if x.name == check.failed[0]}
            shown = next(iter(first.values()))
            runs = " and ".join(run for run, x in first.items() if x == shown)
            check.ratio, check.position = float("inf"), shown.position
            check.note = f"{shown.text} at {runs}; the configuration gives this layer {self.masks[shown.name]}"
        elif blind := self._blind():
            check.ratio, check.note = None, f"{blind} hides nothing from the positions that are changed; raise --seqlen"
        return check

    def _wrong(self, reaches: Tensors, least: float) -> list[Wrong]:
        """Return the first error of each layer."""
        found = []
        for name, table in ((name, reaches[name][0]) for name in self.masks if name in reaches):
            size, changes = table[:, 0].max().item(), table[:, 1:].T
            wrong = self._beyond(name, changes > least * size) or self._short(name, changes > 0)
            found += [] if wrong is None else [wrong]
        return found

    def _beyond(self, name: str, reached: Tensor) -> Wrong | None:
        """Return a hidden position that is reached."""
        for position, seen in zip(self.positions, reached, strict=True):
            shown = self._queries_of(name, position)
            beyond = (seen & ~shown.to(seen.device)).nonzero().flatten().tolist()
            if beyond:
                return Wrong(name, beyond[0], f"position {position} reaches {beyond[0]}, outside {ranges_of(shown)}")
        return None

    def _short(self, name: str, reached: Tensor) -> Wrong | None:
        """Return the last visible position, if it is not reached."""
        if reached.sum() <= len(self.positions):  # this layer uses the keys of another layer
            return None
        for position, seen in zip(self.positions, reached, strict=True):
            shown = self._queries_of(name, position)
            last = int(shown.nonzero().max())
            if not seen[last]:
                return Wrong(name, last, f"position {position} does not reach {last}, inside {ranges_of(shown)}")
        return None

    def _queries_of(self, name: str, position: int) -> Tensor:
        return self.masks[name].queries_of(position, self.data, self.causal)

    def _hides(self, name: str, position: int) -> bool:
        """Return True if the layer's mask hides a later position that full attention shows."""
        shown, everything = (x.queries_of(position, self.data, self.causal) for x in (self.masks[name], LayerMask()))
        return bool((everything & ~shown)[position:].any())

    def _blind(self) -> str:
        """Name the masks whose bound none of the changed positions can show."""
        masks = {mask: name for name, mask in self.masks.items() if mask != LayerMask()}
        blind = [str(m) for m, name in masks.items() if not any(self._hides(name, p) for p in self.positions)]
        return " and ".join(blind)


def ranges_of(shown: Tensor) -> str:
    """Return the positions of a mask as text."""
    inside = torch.nn.functional.pad(shown.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return " and ".join(f"[{first}, {stop})" for first, stop in zip(inside[::2], inside[1::2], strict=True))
