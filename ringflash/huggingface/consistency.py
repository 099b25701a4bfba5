"""Checks of a model's inputs that need their values or the other ranks.

`ForwardInputs` notes the arguments of a model's forward. Layer 0 calls `check_consistency` once a forward, where all
ranks are in step: an error on one rank is raised on every rank. `ShardLoss` guards transformers' own loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash.comm import agreement, cuda_graphs
from ringflash.comm.modules.buffers import ChangedBuffers, persistent_buffers
from ringflash.comm.modules.fsdp_units import align_during_forward
from ringflash.comm.modules.gradients import FilledGradients
from ringflash.comm.modules.parameters import EqualParameters, named_whole
from ringflash.comm.seeding import seeded_by_rank
from ringflash.huggingface.batch import within_documents
from ringflash.huggingface.global_length import depends_on_length, use_global_length
from ringflash.huggingface.options import NAME, ModelRing
from ringflash.huggingface.spans import LayerSpans, say_of_other_layers, spans_fit
from ringflash.huggingface.validation import check_adapters, find_noise_error, find_shape_error
from ringflash.sequence.layout import read_documents

# Beginnings of arguments' names.
_MEDIA = ("pixel_", "image", "video", "audio", "input_features", "input_values", "mm_encoder_outputs")


class ForwardInputs:
    """Arguments of a model's current forward, noted at its start and read once, by its first layer.

    Checkpointed layers read again in the backward, when another forward may have begun: the notes are then empty.

    Args:
        names: parameters of the model's forward.
        options: of `set_group`; options without a group while the model runs off the ring on purpose.
        configs: the configurations by which transformers chooses the attention and the masks.
    Attributes:
        takes_whole_batches: the model's forward shifts labels itself, before it cuts them.
        counts_positions: a layer counts the positions of its tokens, which may be given to it as `columns`.
        length: length of the sequence in the current forward, for rotations that depend on it; None is that of the
            padded sequence.
        next_length: `length` of the next forward.
        next_model: the model around the decoder, whose parameters the next forward compares; None is the decoder's.
    """

    takes_whole_batches = False
    counts_positions = False
    length: int | None = None
    next_length: int | None = None
    next_model: nn.Module | None = None

    def __init__(self, names: tuple[str, ...], options: ModelRing, configs: list[Any]) -> None:
        self._names = names
        self.options, self.configs = options, configs
        self.first_layer: str | None = None  # class and index of the recurrent layer that checks, if there is one
        self._documents_given_to: str | None = None  # class of the model that was given cu_seqlens
        self._position_ids: Tensor | None = None
        self._mask: Tensor | None = None  # as it was given: transformers' masks are bool
        self._errors: dict[str, Exception] = {}
        self._seeding: AbstractContextManager[None] | None = None  # of the current forward
        self._aligned = False  # FSDP2's units, in the first training forward
        self._parameters = EqualParameters()
        self._compared: EqualParameters | None = None  # those of the current forward, until they are compared

    @classmethod
    def watch(cls, model: nn.Module, attention: list[nn.Module], options: ModelRing) -> ForwardInputs:
        """Return the notes of a model's forwards; a model that is watched already keeps its notes, with new options."""
        configs = list({id(c): c for m in (model, *attention) if (c := getattr(m, "config", None))}.values())
        for hook in model._forward_pre_hooks.values():
            if isinstance(hook, cls):
                hook.options, hook.configs = options, configs
                return hook
        notes = cls(tuple(signature(type(model).forward).parameters)[1:], options, configs)
        model.register_forward_pre_hook(notes, with_kwargs=True)
        model.register_forward_hook(notes.end, always_call=True)
        model.register_forward_hook(partial(notes._fill_gradients, FilledGradients()))
        if any(True for _ in persistent_buffers(model)):
            buffers = ChangedBuffers()
            model.register_forward_pre_hook(partial(notes._compare, buffers.begin))
            model.register_forward_hook(partial(notes._compare, buffers.end))
        return notes

    @torch.compiler.disable(reason="ranks compare which parameters have gradients")
    def _fill_gradients(self, filled: FilledGradients, model: nn.Module, args: Any, output: object) -> None:
        """Give zeros to parameters that other ranks have used; a hook of the model's forward."""
        if model.training and torch.is_grad_enabled():
            filled.begin(model, self.options.group, output)

    @torch.compiler.disable(reason="ranks compare the buffers that a forward changes")
    def _compare(self, step: Callable[[nn.Module, Any], None], model: nn.Module, *_: Any) -> None:
        """Make a step of `ChangedBuffers`; a hook of the model's forward, in training on a ring."""
        if model.training and torch.is_grad_enabled() and self.options.group is not None:
            step(model, self.options.group)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note the arguments, and tell all layers of spans; a forward pre-hook of the model."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._documents_given_to = None if given.get("cu_seqlens") is None else type(model).__name__
        self._position_ids = given.get("position_ids")
        self._mask = given.get("attention_mask")
        self.length, self.next_length = self.next_length, None
        whole, self.next_model = self.next_model or model, None
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = say_of_other_layers(kwargs["attention_mask"])
        if self.options.group is not None:
            self._restore_implementation()
            for child in model.children():
                if depends_on_length(child) and not hasattr(child, "_ringflash_inputs"):  # added after set_group
                    use_global_length(child, self)
            self._compared = self._noted_parameters(whole) if torch.is_grad_enabled() else None
            if model.training:
                self._begin_training(model, given)
        return args, kwargs

    def take_parameters(self) -> EqualParameters | None:
        """Return the parameters that a forward with gradients has noted, once, to be compared in its first layer."""
        noted, self._compared = self._compared, None
        return noted

    @torch.compiler.disable(reason="parameters are read")
    def _noted_parameters(self, model: nn.Module) -> EqualParameters:
        assert self.options.group is not None
        self._parameters.begin(named_whole(model), self.options.group)
        return self._parameters

    @torch.compiler.disable(reason="generators are seeded, and FSDP2's units aligned")
    def _begin_training(self, model: nn.Module, given: dict[str, Any]) -> None:
        """Let dropout draw another mask on each rank, also if all are seeded alike; at first align FSDP2's units.

        Trainer's noise in the embeddings is noted as an error: its size depends on the length of the shard.

        Raises:
            NotImplementedError: the model has dropout, and a CUDA graph is captured, in which nothing can be seeded.
        """
        if not self._aligned:
            self._aligned = True
            align_during_forward(model)
        self.note("noise", find_noise_error(model))
        device = next((x.device for x in given.values() if isinstance(x, Tensor)), torch.device("meta"))
        if cuda_graphs.capturing(device):
            drops = [name for name, x in model.named_modules() if isinstance(x, nn.Dropout) and x.training and x.p > 0]
            if drops:
                raise NotImplementedError(
                    f"dropout must be 0 while a CUDA graph is captured, got {drops[0]} with dropout, which would draw "
                    "the same mask on ranks that are seeded alike; set it to 0, or capture the attention calls only."
                )
        elif device.type != "meta":
            self._seeding = seeded_by_rank(self.options.group, device)
            self._seeding.__enter__()

    @torch.compiler.disable(reason="generators are seeded")
    def end(self, *_: Any) -> None:
        """Restore the generators; a forward hook of the model, also after an error."""
        seeding, self._seeding = self._seeding, None
        if seeding is not None:
            seeding.__exit__(None, None, None)

    def note_labels(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the model, and labels that it would shift inside the shard; a forward pre-hook of that with the head."""
        self.next_model = model
        checked = self.options.group is not None and not self.takes_whole_batches
        labelled = checked and kwargs.get("labels") is not None
        self.note("labels", _find_labels_error(model, kwargs) if labelled else None)
        self.note("logits", _find_logits_error(kwargs.get("logits_to_keep")) if checked else None)

    def refuse_media(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise NotImplementedError on every rank for an image, video or sound; a forward pre-hook."""
        given = {**dict(zip(tuple(signature(type(model).forward).parameters)[1:], args, strict=False)), **kwargs}
        found = {name: x for name, x in given.items() if name.startswith(_MEDIA) and isinstance(x, Tensor | dict)}
        if self.options.group is None or not found:
            return
        name, x = next(iter(found.items()))
        shown = f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else f"those of {[*x]}"
        error = NotImplementedError(
            f"{name} must not be given to a model on a ring, whose shards hold only a part of its tokens, got {shown}; "
            "pass text, or inputs_embeds of the shard."
        )
        raise_together(self.options.group, error, next(model.parameters()).device)

    def note(self, name: str, error: Exception | None) -> None:
        """Note an error, which the first layer raises on every rank, or that there is none any more."""
        self._errors.pop(name, None)
        if error is not None:
            self._errors[name] = error

    def _restore_implementation(self) -> None:
        """Undo a change of attn_implementation and note it as an error, which layer 0 raises on every rank."""
        for config in self.configs:
            if (used := config._attn_implementation) != NAME:
                config._attn_implementation = NAME
                self._errors["choice"] = ValueError(
                    f"attn_implementation must stay {NAME!r} after set_group, got {used!r}, with which each rank would "
                    "attend to its own shard; give each model its own configuration (copy.deepcopy(config)), or "
                    "take the model off the ring first by set_group(model, None)."
                )

    def take_positions(self) -> Tensor | None:
        """Return the model's positions once, for attention modules that are not passed any."""
        positions, self._position_ids = self._position_ids, None
        return positions

    def take_mask(self) -> Tensor | None:
        """Return the model's 2-D attention_mask once."""
        mask, self._mask = self._mask, None
        return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def find_error(self, cu_seqlens: Tensor | None) -> Exception | None:
        """Return the first error that was noted, or one for document bounds that did not reach the first layer."""
        given_to, self._documents_given_to = self._documents_given_to, None
        errors, self._errors = self._errors, {}
        if errors:
            return next(iter(errors.values()))
        if given_to is None or cu_seqlens is not None:
            return None
        return NotImplementedError(
            f"cu_seqlens must reach the attention, got None there from {given_to}, which drops it; give each document "
            "its own sequence, or use another model."
        )


@torch.compiler.disable(reason="ranks compare their inputs, and raise together by the values")
def check_consistency(
    options: ModelRing,
    query: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    checksum: Tensor | None,
    inputs: ForwardInputs | None,
    error: Exception | None,
    spans: LayerSpans | None = None,
) -> None:
    """Raise on every rank if any rank has an error: once a forward, in layer 0, by one all-reduce of seven numbers.

    Args:
        error: of this rank, found before the call.
        spans: those of the model's own mask, if it has any.
    """
    noted = None if inputs is None else inputs.find_error(cu_seqlens)
    if position_ids is None and inputs is not None:
        position_ids = inputs.take_positions()
        if position_ids is None and error is None and _is_recomputed():
            return  # checked in the forward, which had the positions
    error = error or noted or find_shape_error(query, mask, position_ids)
    if inputs is not None and (given := inputs.take_mask()) is not None:
        mask = given
    if query.is_meta:  # no values to compare
        if error is not None:
            raise error
        return
    # Three error flags, and checksums with both signs: the maxima over the ranks cancel only if all are equal.
    found = torch.zeros(7, dtype=torch.int64, device=query.device)
    if error is None:
        try:
            found[:3] = _find_value_errors(options, query, mask, position_ids, cu_seqlens, spans)
        except ValueError as problem:
            error = problem
    if checksum is not None:
        found[3], found[4] = checksum, -checksum
    parameters = None if inputs is None else inputs.take_parameters()
    if parameters is not None:
        found[5], found[6] = parameters.checksum, -parameters.checksum
    *wrong, highest, lowest, high, low = _maxima(options.group, found, error)
    if any(wrong):
        _raise_on_every_rank(options.group, error or _value_error(found.tolist(), options))
    if options.group is not None and highest != -lowest:
        raise ValueError(
            "input_ids and labels given to prepare_batch must be the same on all ranks of the group, because each "
            "takes a part of them, got different ones; split data over groups, not over all ranks (as the loaders of "
            "Trainer and accelerate, and DistributedSampler by default, do), and seed random draws alike on the ranks "
            "of a group."
        )
    if options.group is not None and high != -low:
        (parameters or EqualParameters()).raise_for(options.group)


def raise_together(group: dist.ProcessGroup | None, error: Exception, device: torch.device) -> None:
    """Raise an error of a rank whose model is not on the ring, and let the others raise it in `check_consistency`."""
    if device.type == "meta":
        raise error
    _maxima(group, torch.zeros(7, dtype=torch.int64, device=device), error)
    _raise_on_every_rank(group, error)


def _maxima(group: dist.ProcessGroup | None, found: Tensor, error: Exception | None) -> list[int]:
    """Return the maxima over the ranks, with all flags set if a rank has an error."""
    worst = found.clone()
    worst[:3] |= int(error is not None)
    if group is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return worst.tolist()


def _find_value_errors(
    options: ModelRing,
    query: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    spans: LayerSpans | None,
) -> Tensor:
    """Return (3,), int32: a mask that is not 1 everywhere, wrong positions, wrong spans. The host reads nothing."""
    assert position_ids is not None
    none = query.new_zeros((), dtype=torch.bool)
    hidden = none if mask is None else (mask != 1).any()
    misplaced = ~_positions_fit(options, query.shape[2], position_ids, cu_seqlens)
    other_spans = none
    if spans is not None:
        positions = options.positions(query.shape[2], spans.ids.device, cu_seqlens)
        other_spans = ~spans_fit(spans.ids, positions, cu_seqlens)
    return torch.stack([x.to(query.device) for x in (hidden, misplaced, other_spans)]).int()


def _positions_fit(options: ModelRing, length: int, position_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return a bool scalar: positions are the shard's global ones or, with documents, those within each document.

    Of M-RoPE's positions, the text's are checked: the first of four parts, or all three parts if they are the same.
    """
    if position_ids.dim() == 3:
        first = _positions_fit(options, length, position_ids[0], cu_seqlens)
        return first if len(position_ids) == 4 else first | (position_ids != position_ids[:1]).any()
    positions = options.positions(length, position_ids.device, cu_seqlens)
    fit = (position_ids == positions).all()
    if cu_seqlens is None:
        return fit
    along_path = (position_ids == within_documents(positions, cu_seqlens)).all()
    return along_path if cu_seqlens.dim() == 2 and read_documents(cu_seqlens).have_branches else fit | along_path


def _value_error(flags: list[int], options: ModelRing) -> Exception | None:
    rules = (
        "attention_mask must be None or all ones, got others; pack documents with cu_seqlens, or pad with "
        "ringflash.pad_sequence.",
        f"position_ids must be the shard's global positions (layout {options.layout!r}, rank "
        f"{options.size_and_rank[1]} of {options.size_and_rank[0]}) or, with cu_seqlens, those within each "
        "document, got others; use ringflash.huggingface.prepare_batch or ringflash.local_positions.",
        "token_type_ids (mm_token_type_ids) must be the shard of those whose spans are the bidirectional documents "
        "of cu_seqlens, got others; give prepare_batch both, and block_sequence_ids.",
    )
    return next((ValueError(rule) for flag, rule in zip(flags, rules, strict=False) if flag), None)


@torch.compiler.disable(reason="ranks tell one another")
def _raise_on_every_rank(group: dist.ProcessGroup | None, error: Exception | None) -> NoReturn:
    agreement.agree(group, {"huggingface": "refused on a rank"}, error)
    raise error or ValueError("inputs must be right on every rank of the group, got an error on another; see its log.")


def _is_recomputed() -> bool:
    """Return True inside a backward, where a checkpointed layer runs a second time."""
    return torch._C._current_graph_task_id() != -1


class ShardLoss:
    """A model's `loss_function`: transformers' own, guarded against labels and adapters that are wrong on a shard.

    Hooks do not suffice: a wrapper may call a model's forward directly, and some models drop `shift_labels` on the way.

    Attributes:
        compute: the function that is guarded.
    """

    def __init__(self, model: nn.Module, compute: Callable[..., Any], inputs: ForwardInputs) -> None:
        self._model, self.compute, self._inputs = ref(model), compute, inputs  # a cycle would keep the model's memory

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardLoss, (self._model(), self.compute, self._inputs)  # of a copied model, the copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of logits and labels."""
        if self._inputs.options.group is not None:
            model = self._model()
            assert model is not None
            if (error := _find_labels_error(model, kwargs)) is None:
                try:
                    check_adapters(model)  # added after set_group
                except NotImplementedError as found:
                    error = found
            if error is not None:
                _raise_on_every_rank(self._inputs.options.group, error)
        return self.compute(*args, **kwargs)


def guard_losses(model: nn.Module, inputs: ForwardInputs) -> None:
    """Have every model with a loss within `model` refuse labels from which it would compute that of a shard."""
    for module in model.modules():
        if not hasattr(type(module), "loss_function") or "labels" not in signature(type(module).forward).parameters:
            continue
        compute: Any = module.loss_function if module.get_output_embeddings() is not None else None  # type: ignore[operator]
        takes_shifted = compute is not None and "shift_labels" in signature(compute).parameters
        if takes_shifted and not isinstance(compute, ShardLoss):
            module.loss_function = ShardLoss(module, compute, inputs)  # type: ignore[assignment]
        if inputs.note_labels not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(inputs.note_labels, with_kwargs=True)


def refuse_media(model: nn.Module, base: nn.Module, inputs: ForwardInputs) -> None:
    """Have every model around the decoder `base` refuse images, videos and sounds, whose tokens a shard may cut."""
    for module in model.modules():
        names = list(signature(type(module).forward).parameters)
        if base not in set(module.modules()) or not any(name.startswith(_MEDIA) for name in names):
            continue
        if inputs.refuse_media not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(inputs.refuse_media, with_kwargs=True)


def name_of_layer(module: nn.Module) -> str:
    """Return the class of a layer, and its index in the model if it has one."""
    return f"{type(module).__name__} {getattr(module, 'layer_idx', '')}"


def _find_logits_error(kept: Any) -> Exception | None:
    """Return the error for a number of last tokens, which would be those of each shard."""
    if not isinstance(kept, int) or not kept:
        return None
    return NotImplementedError(
        f"logits_to_keep must be 0 on a ring, or a tensor of rows of the shard, got {kept}: the last tokens of each "
        "shard are not those of the sequence; gather the hidden states that you need (ringflash.unshard_sequence)."
    )


def _find_labels_error(model: nn.Module, given: dict[str, Any]) -> Exception | None:
    """Return the error for labels that a model would shift or count inside a shard."""
    if not isinstance(model.loss_function, ShardLoss):
        return NotImplementedError(
            f"labels must not be given to {type(model).__name__} on a ring, whose loss would be a mean over the shard; "
            "compute it from the logits: the sum over this rank's tokens * cp_size / number of labels in the whole "
            "sequence."
        )
    if coefficient := getattr(model, "z_loss_coefficient", 0):  # Bamba
        return NotImplementedError(
            f"z_loss_coefficient must be 0 with labels on a ring, got {coefficient}, of which each rank would add a "
            "mean over its shard; set it to 0, or compute the loss from the logits."
        )
    for name in ("shift_labels", "num_items_in_batch"):
        if given.get(name) is None:
            return ValueError(
                f"{name} must be given with labels on a ring, got none, which transformers would shift and count "
                "inside each shard; pass the batch of prepare_batch with labels=batch['shift_labels'], or use "
                "CausalLMWithLoss."
            )
    return None
