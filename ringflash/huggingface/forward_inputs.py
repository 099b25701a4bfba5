"""State of a model's forward, which hooks of the model save and its first attention layer reads.

Errors are raised in that layer and not in the hooks, because the ranks compare their calls only there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ringflash.comm import cuda_graphs
from ringflash.comm.modules.buffers import ChangedBuffers, persistent_buffers
from ringflash.comm.modules.fsdp_units import align_during_forward
from ringflash.comm.modules.gradients import GradientFiller
from ringflash.comm.modules.parameters import ParameterCheck, named_whole
from ringflash.comm.seeding import seeded_by_rank
from ringflash.huggingface.global_length import depends_on_length, use_global_length
from ringflash.huggingface.options import NAME, ModelRing, inputs_of
from ringflash.huggingface.rank_errors import raise_on_every_rank, raise_together
from ringflash.huggingface.reached_layers import ReachedLayers
from ringflash.huggingface.shard_loss import find_labels_error, find_logits_error
from ringflash.huggingface.spans import mark_layers_without_spans
from ringflash.huggingface.validation import find_noise_error

# Beginnings of arguments' names.
_MEDIA = ("pixel_", "image", "video", "audio", "input_features", "input_values", "mm_encoder_outputs")


class ForwardInputs:
    """Arguments of a model's current forward, saved at its start and removed when the first layer reads them.

    So a layer that checkpointing runs again in the backward finds none, even if another forward has begun.

    Args:
        names: parameters of the model's forward.
        options: those given to `set_group`; during `generate` and `disable_ring`, options with group=None.
        configs: the configurations by which transformers chooses the attention and the masks.
    Attributes:
        takes_whole_batches: the model's forward shifts labels itself, before it cuts them.
        counts_positions: a layer counts the positions of its tokens, which may be given to it as `columns`.
        is_wrapped: `wrap_attention` intercepts the model's attention.
        reached: layers that have called ring attention.
        length: length of the sequence in the current forward, for rotations that depend on it; None: the length of the
            padded sequence.
        next_length: `length` of the next forward.
        next_model: model whose parameters the next forward compares, if that is a model around the decoder; None: the
            decoder.
    """

    takes_whole_batches = False
    counts_positions = False
    is_wrapped = False
    length: int | None = None
    next_length: int | None = None
    next_model: nn.Module | None = None

    def __init__(self, names: tuple[str, ...], options: ModelRing, configs: list[Any]) -> None:
        self._names = names
        self.options, self.configs = options, configs
        self.first_layer: str | None = None  # class and index of the recurrent layer that checks, if there is one
        self._documents_given_to: str | None = None  # class of the model that was given cu_seqlens
        self._position_ids: Tensor | None = None
        self._mask: Tensor | None = None  # in the dtype of the caller; transformers' masks are bool
        self._errors: dict[str, Exception] = {}
        self._seeding: AbstractContextManager[None] | None = None  # seeding of the current forward
        self._aligned = False  # True once the first training forward has aligned FSDP2's units
        self._parameters = ParameterCheck()
        self.reached = ReachedLayers()
        self._compared: ParameterCheck | None = None  # parameters of the current forward, until they are compared

    @classmethod
    def watch(cls, model: nn.Module, attention: list[nn.Module], options: ModelRing) -> ForwardInputs:
        """Register the hooks of a model and return its state; if it has hooks, keep its state with new options."""
        configs = list({id(c): c for m in (model, *attention) if (c := getattr(m, "config", None))}.values())
        for hook in model._forward_pre_hooks.values():
            if isinstance(hook, cls):
                hook.options, hook.configs = options, configs
                return hook
        notes = cls(tuple(signature(type(model).forward).parameters)[1:], options, configs)
        model.register_forward_pre_hook(notes, with_kwargs=True)
        model.register_forward_hook(notes.end, always_call=True)
        model.register_forward_hook(notes._check_reached)
        model.register_forward_hook(partial(notes._fill_gradients, GradientFiller()))
        if any(True for _ in persistent_buffers(model)):
            buffers = ChangedBuffers()
            model.register_forward_pre_hook(partial(notes._compare, buffers.begin))
            model.register_forward_hook(partial(notes._compare, buffers.end))
        return notes

    @torch.compiler.disable(reason="layers are listed")
    def _check_reached(self, model: nn.Module, *_: Any) -> None:
        """Raise an error on every rank for layers that have not called ring attention; a hook of the forward."""
        if self.options.group is not None and not self.is_wrapped:
            if (error := self.reached.find_error(model)) is not None:
                raise_on_every_rank(self.options.group, error)

    @torch.compiler.disable(reason="ranks compare which parameters have gradients")
    def _fill_gradients(self, filled: GradientFiller, model: nn.Module, args: Any, output: object) -> None:
        """Give zeros to parameters that other ranks have used; a hook of the model's forward."""
        if torch.is_grad_enabled():
            filled.begin(model, self.options.group, output)

    @torch.compiler.disable(reason="ranks compare the buffers that a forward changes")
    def _compare(self, step: Callable[[nn.Module, Any], None], model: nn.Module, *_: Any) -> None:
        """Make a step of `ChangedBuffers`; a hook of the model's forward, with gradients on a ring."""
        if torch.is_grad_enabled() and self.options.group is not None:
            step(model, self.options.group)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note the arguments, and mark layers without spans; a forward pre-hook of the model."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._documents_given_to = None if given.get("cu_seqlens") is None else type(model).__name__
        self._position_ids = given.get("position_ids")
        self._mask = given.get("attention_mask")
        self.length, self.next_length = self.next_length, None
        whole, self.next_model = self.next_model or model, None
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = mark_layers_without_spans(kwargs["attention_mask"])
        self.note("cross", _find_cross_error(given))
        if self.options.group is not None:
            self._restore_implementation()
            for child in model.children():
                if depends_on_length(child) and inputs_of(child) is None:  # added after set_group
                    use_global_length(child, self)
            self._compared = self._note_parameters(whole)
            if model.training:
                self._begin_training(model, given)
        return args, kwargs

    def take_parameters(self) -> ParameterCheck | None:
        """Return the parameters that a forward has noted, once, to be compared in its first layer."""
        noted, self._compared = self._compared, None
        return noted

    @torch.compiler.disable(reason="parameters are read")
    def _note_parameters(self, model: nn.Module) -> ParameterCheck:
        assert self.options.group is not None
        self._parameters.begin(named_whole(model), self.options.group)
        return self._parameters

    @torch.compiler.disable(reason="generators are seeded, and FSDP2's units aligned")
    def _begin_training(self, model: nn.Module, given: dict[str, Any]) -> None:
        """Let dropout draw a different mask on each rank, and align FSDP2's units in the first training forward.

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
        """Note the model with the head, and labels that it would shift inside the shard; its forward pre-hook."""
        self.next_model = model
        checked = self.options.group is not None and not self.takes_whole_batches
        labelled = checked and kwargs.get("labels") is not None
        self.note("labels", find_labels_error(model, kwargs) if labelled else None)
        self.note("logits", find_logits_error(kwargs.get("logits_to_keep")) if checked else None)

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


def _find_cross_error(given: dict[str, Any]) -> Exception | None:
    """Return the error for documents with an encoder's states, which the documents' mask would cut, or None."""
    states = [name for name in ("encoder_hidden_states", "cross_attention_states") if given.get(name) is not None]
    if not states or given.get("cu_seqlens") is None:
        return None
    return NotImplementedError(
        f"cu_seqlens must not be given together with {states[0]}, got both: cross-attention would see the part of the "
        "encoder's states at a document's positions; give each document its own sequence."
    )


def refuse_media(model: nn.Module, base: nn.Module, inputs: ForwardInputs) -> None:
    """Have every model around the decoder `base` refuse images, videos and sounds, whose tokens a shard may cut."""
    for module in model.modules():
        names = list(signature(type(module).forward).parameters)
        if base not in set(module.modules()) or not any(name.startswith(_MEDIA) for name in names):
            continue
        if inputs.refuse_media not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(inputs.refuse_media, with_kwargs=True)
