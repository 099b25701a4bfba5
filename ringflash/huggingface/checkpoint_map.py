"""Map from a checkpoint's tensors to boxes in a model's tensors, by transformers' own conversion tables.

A checkpoint may have other tensors than the model. Qwen3-MoE's checkpoint has one for each expert and projection:

    model.layers.0.mlp.experts.7.up_proj.weight    (768, 2048)
    model.layers.0.mlp.experts.gate_up_proj        (128, 1536, 2048) in the model: rows 768 to 1535 of expert 7

Two kinds of conversion are supported: renaming, and stacking of experts, with gate and up concatenated. A tensor that a
table converts in another way counts as unknown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

Shape = tuple[int, ...]


class TensorBox(NamedTuple):
    """A tensor of a checkpoint as a box in a tensor of the model.

    Args:
        name: name in the checkpoint.
        target: parameter or buffer of the model.
        offsets: offset of the box in each dim of the target.
        shape: shape in the checkpoint. That of an expert lacks the target's first dim, in which the box has size 1.
    """

    name: str
    target: str
    offsets: Shape
    shape: Shape


class CheckpointMap:
    """Boxes in a model for all tensors of a checkpoint, and the names of tensors that do not fit.

    Args:
        model: a transformers model, which may be on the meta device, sharded or not.
        shapes: shape of each tensor of the checkpoint.
    Attributes:
        boxes: tensors to read.
        copies: second copies of tied tensors, which must be equal to the first.
        missing, unknown, repeated, misshapen: names of tensors that do not fit.
    """

    def __init__(self, model: nn.Module, shapes: dict[str, Shape]) -> None:
        self.boxes: list[TensorBox] = []
        self.missing: list[str] = []
        self.unknown: list[str] = []
        self.repeated: list[str] = []
        tensors, ties = model.state_dict(keep_vars=True), ties_of(model)
        sources, converters = _sources(model, list(shapes))
        for target, by_pattern in sources.items():
            if target not in tensors:
                self.unknown += [] if _ignored(model, target) else chain(*by_pattern.values())
            elif set(by_pattern) == {None}:
                shape = tuple(tensors[target].shape)
                self.boxes.append(TensorBox(by_pattern[None][0], target, (0,) * len(shape), shape))
                self.repeated += by_pattern[None][1:]
            elif None in by_pattern:  # experts may be stacked, or stored one by one
                self.repeated += by_pattern[None]
            else:
                converter = converters[next(pattern for pattern in by_pattern if pattern)]
                self._stack(target, tuple(tensors[target].shape), converter, by_pattern)
        stored = {ties.get(target, target) for target in sources}
        self.missing += (name for name in tensors if name not in ties and name not in stored)
        wrong = (box for box in self.boxes if shapes[box.name] != box.shape)
        self.misshapen = [f"{box.name} {shapes[box.name]} for {box.shape}" for box in wrong]
        second = [box for box in self.boxes if ties.get(box.target) in sources]
        self.copies = [box._replace(target=ties[box.target]) for box in second]  # names of tied tensors
        first = (box for box in self.boxes if box not in second)
        self.boxes = [box._replace(target=ties.get(box.target, box.target)) for box in first]

    def _stack(self, target: str, shape: Shape, converter: Any, by_pattern: dict[str | None, list[str]]) -> None:
        """Add the boxes of stacked experts. Several patterns (gate and up) each fill an equal part of the target."""
        parts, dim = len(converter.source_patterns), _concatenated(converter.operations)
        if dim is None or not 0 <= dim < len(shape) or (parts > 1 and (dim == 0 or shape[dim] % parts)):
            self.unknown += chain(*by_pattern.values())
            return
        part_shape = [1, *shape[1:]]
        part_shape[dim] //= parts
        for part, pattern in enumerate(converter.source_patterns):
            experts = self._numbered(pattern, by_pattern.get(pattern, []), shape[0])
            written = target.replace(converter.target_patterns[0], pattern.replace("\\", "")).replace("*", "{}")
            self.missing += [written.format(i) for i in range(shape[0]) if i not in experts]
            offsets = [0] * len(shape)
            offsets[dim] = part * part_shape[dim]
            self.boxes += (
                TensorBox(name, target, (i, *offsets[1:]), tuple(part_shape[1:])) for i, name in experts.items()
            )

    def _numbered(self, pattern: str, names: list[str], num_experts: int) -> dict[int, str]:
        """Return names by the number of their expert."""
        experts = {}
        for name in names:
            number = re.search(pattern.replace("*.", r"(\d+)\."), name)
            if number is None or int(number[1]) >= num_experts:
                self.unknown.append(name)
            else:
                experts[int(number[1])] = name
        return experts


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return tied parameters: second name to first name."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))  # type: ignore[operator]


def _sources(model: Any, names: list[str]) -> tuple[dict[str, dict[str | None, list[str]]], dict[str, Any]]:
    """Group a checkpoint's names by target and conversion pattern, as transformers' own loading does.

    Returns:
        sources: for each target its names by pattern; the pattern is None for names that are only renamed.
        converters: by pattern.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    tensors, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    sources: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, tensors)
        if target not in tensors and name in tensors:
            target, pattern = rename_source_key(name, [], [], prefix, tensors)
        sources[target][pattern].append(name)
    return sources, {pattern: entry for entry in converters for pattern in entry.source_patterns}


def _concatenated(operations: list[Any]) -> int | None:
    """Return the dim in which a converter concatenates its patterns, 0 for one pattern, None if it is not supported."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if type(operations[0]) is not MergeModulelist or operations[0].dim != 0 or len(operations) > 2:
        return None
    if len(operations) == 1:
        return 0
    concatenate = operations[1]
    known = type(concatenate) is Concatenate and concatenate.num_shards_attribute is None
    return concatenate.dim if known and concatenate.dim > 0 else None


def _ignored(model: Any, target: str) -> bool:
    """Return True for tensors that from_pretrained skips as well, such as saved rotary angles."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return any(re.search(pattern, target) for pattern in patterns)
