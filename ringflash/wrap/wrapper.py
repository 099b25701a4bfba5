"""Wrapping of a module, whose attention then runs on a ring without a change to its layers.

    wrap_attention(module, group)  ->  module(local tokens, global positions)

Each layer's forward runs inside a mode (`ringflash.wrap.interception`) that replaces torch's
scaled_dot_product_attention. transformers models get attn_implementation="ringflash"; `RingAttention` gets the group.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash import huggingface
from ringflash.attention.api import RingAttention
from ringflash.comm.group import Group, resolve
from ringflash.comm.modules.buffers import ChangedBuffers
from ringflash.comm.modules.fsdp_units import align_during_forward
from ringflash.comm.modules.gradients import GradientFiller
from ringflash.comm.modules.parameters import ParameterCheck, named_whole
from ringflash.huggingface.generation import is_generating
from ringflash.huggingface.options import NAME, ModelRing, inputs_of
from ringflash.sequence.layout import find_cut, granularity
from ringflash.wrap.interception import Interception, WrappedState

Module = TypeVar("Module", bound=nn.Module)

# Methods that run inside the interception. Lightning calls the steps of a LightningModule without its forward.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
ENTRIES = ("forward", *STEPS)

_NORMS: dict[type[nn.Module], str] = dict.fromkeys(
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),  # not SyncBatchNorm, which sees all ranks
    "its statistics are of the rank's own tokens; normalise each token separately",
)
_REFUSED: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "call scaled_dot_product_attention on its projections",
    nn.TransformerEncoderLayer: "write the layer with scaled_dot_product_attention",
    nn.TransformerDecoderLayer: "write the layer with scaled_dot_product_attention",
    nn.RNNBase: "a recurrent layer needs the whole sequence; leave it out",
    **_NORMS,
}


def wrap_attention(
    module: Module,
    group: Group,
    *,
    layout: str = "zigzag",
    impl: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
) -> Module:
    """Make every attention of `module` attend over the whole sequence, which is sharded over the ranks, in place.

    Call it before torch.compile, DDP and FSDP. All other layers must treat each token separately, at its global
    position (`local_positions`); `check_wrapped` compares the module with its result on the whole sequence.

    Args:
        module: holds layers that call torch.nn.functional.scaled_dot_product_attention on (batch, heads, seqlen,
            head_dim), transformers models, and `RingAttention`, in any mixture.
        group, layout, impl, transport, deterministic: as `ring_attention`.
    Returns:
        module: the same object; parameters and their names are untouched.
    Raises:
        NotImplementedError: a layer that cannot be wrapped exactly, by its name; here, or when it is called.
        ValueError: wrapped already. RuntimeError: at the end of the first forward that called no attention.
    """
    granularity(1, layout)
    options = ModelRing(resolve(group), layout=layout, impl=impl, transport=transport, deterministic=deterministic)
    for name, layer in module.named_modules():
        _check(name or type(module).__name__, layer, layout)
    for name, model in _transformers_models(module).items():
        _switch(name or type(module).__name__, model, options)
    for layer in module.modules():
        if isinstance(layer, RingAttention):
            layer.group = options.group
    state = WrappedState(options, type(module).__name__)
    module._ringflash_checks = _ForwardChecks()  # type: ignore[assignment]
    for name, layer in list(module.named_modules()):
        if name == "" or _may_call_attention(layer):
            layer._ringflash_state, layer._ringflash_name = state, name  # type: ignore[assignment]
            layer._ringflash_is_root = name == ""  # type: ignore[assignment]
            layer.__class__ = _intercepted_class(type(layer))  # type: ignore[arg-type]
    return module


def wrapped_state(module: nn.Module) -> WrappedState:
    """Return the state shared by the layers of a wrapped module.

    Raises:
        ValueError: a module that was not given to `wrap_attention`.
    """
    state = getattr(module, "_ringflash_state", None)
    if not isinstance(state, WrappedState):
        raise ValueError(
            f"module must be wrapped, got {type(module).__name__}, which is not; call ringflash.wrap_attention first."
        )
    return state


@contextmanager
def disable_ring(module: nn.Module) -> Iterator[None]:
    """Attend within this process, as the module did before wrapping, for example to a prompt that is not sharded.

    Each rank then gives the module whole sequences and their positions, counted from 0. Compiled layers run eagerly.
    Parameters that FSDP2 or ZeRO-3 shards are gathered in every forward, so that all ranks must make the same calls.

    Args:
        module: from `wrap_attention`, or a LightningModule with `SequenceSharding`.
    Raises:
        ValueError: a module that was not wrapped, or a part of one.
    """
    state = wrapped_state(module)
    if not module._ringflash_is_root:
        raise ValueError(
            f"module must be the one that was wrapped, {state.root}, got its {state.name_of(module)}; pass the root."
        )
    changes: list[tuple[Any, str, Any]] = [(state, "whole", True)]
    local = ModelRing(layout="contiguous")  # contiguous: sequences of any length
    for layer in module.modules():
        if (inputs := inputs_of(layer)) is not None:
            changes.append((inputs, "options", local))
        elif isinstance(layer, RingAttention):
            changes.append((layer, "options", layer.options._replace(group=None, layout="contiguous")))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        with not_compiled():
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def not_compiled() -> AbstractContextManager[Any]:
    """Run compiled code eagerly.

    Compiled attention over the whole sequence is an operator that wrapping rejects, and a graph for these few tokens
    would make torch treat later lengths as dynamic.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def refuse_between_steps(module: nn.Module) -> None:
    """Refuse attention of a wrapped LightningModule outside its steps and `in_step`."""
    state = wrapped_state(module)
    state.outside = True
    for layer in module.modules():
        if isinstance(layer, RingAttention) or hasattr(layer, "set_attn_implementation"):  # may be called on their own
            layer.register_forward_pre_hook(state.check_in_step)


@contextmanager
def in_step(module: nn.Module | None) -> Iterator[None]:
    """Run a part of a step, such as its backward, in which checkpointed layers attend again."""
    state = getattr(module, "_ringflash_state", None)
    before = state is not None and state.outside
    try:
        if before:
            state.outside = False  # type: ignore[union-attr]
        yield
    finally:
        if before:
            state.outside = True  # type: ignore[union-attr]


def check_norms(module: nn.Module) -> None:
    """Raise NotImplementedError for a layer that normalises tokens by statistics of the rank's own tokens."""
    for name, layer in module.named_modules():
        _refuse(name or type(module).__name__, layer, _NORMS)


def _refuse(name: str, layer: nn.Module, refused: dict[type[nn.Module], str]) -> None:
    for kind, remedy in refused.items():
        if isinstance(layer, kind):
            raise NotImplementedError(f"{name} must not be nn.{kind.__name__}, got {type(layer).__name__}; {remedy}.")


def _check(name: str, layer: nn.Module, layout: str) -> None:
    """Raise for a layer that cannot be on a ring: it mixes tokens, is compiled or wrapped, or has another layout."""
    _refuse(name, layer, _REFUSED)
    if isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.max_norm is not None):
        raise NotImplementedError(
            f"{name} must not have scale_grad_by_freq or max_norm, got scale_grad_by_freq={layer.scale_grad_by_freq}, "
            f"max_norm={layer.max_norm}, which depend on all tokens of a batch, not those of a shard; leave them out."
        )
    if hasattr(layer, "_orig_mod"):
        raise NotImplementedError(
            f"{name} must not be compiled yet, got a module of torch.compile; compile it after wrapping, or its layers "
            "in place by layer.compile()."
        )
    if "forward" in vars(layer):
        raise NotImplementedError(
            f"{name}.forward must be the method of its class, got a function that was set on the object; wrap the "
            "module before it is set."
        )
    if hasattr(layer, "_ringflash_state"):
        raise ValueError(f"{name} must not be wrapped twice, got a wrapped {type(layer).__name__}; wrap the root once.")
    if isinstance(layer, RingAttention) and layer.layout != layout:
        raise ValueError(
            f"layout must be that of {name} ({layer.layout!r}), got {layout!r}; give both the layout of the shards."
        )


def _transformers_models(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost transformers models in a module, by name."""
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, layer in module.named_modules():
        if hasattr(layer, "set_attn_implementation") and layer not in inside:
            found[name] = layer
            inside |= set(layer.modules())
    return found


def _switch(name: str, model: Any, options: ModelRing) -> None:
    """Put a transformers model on the ring, or raise an error that names it."""
    huggingface.register()
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:  # transformers warns, and leaves it as it was
            raise ValueError(
                f"{type(model).__name__}, whose layers do not follow attn_implementation; use another model."
            )
        huggingface.set_group(
            model, options.group, layout=options.layout, impl=options.impl, transport=options.transport,
            deterministic=options.deterministic,
        )  # fmt: skip
        for layer in model.modules():
            if (inputs := inputs_of(layer)) is not None:
                inputs.is_wrapped = True
    except (ValueError, NotImplementedError) as error:
        raise NotImplementedError(f"{name} must take attn_implementation={NAME!r}, got: {error}") from error


def _may_call_attention(layer: nn.Module) -> bool:
    """Return False for layers of torch (see `_REFUSED`) and of transformers, which `_switch` handles."""
    return not type(layer).__module__.startswith(("torch.nn.", "transformers.", "ringflash."))


@functools.cache
def _intercepted_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose entry methods run inside an interception. FSDP2 changes a module's class the same way."""
    entries = {name: _intercepted(cls, name) for name in ENTRIES if hasattr(cls, name)}
    return type(cls.__name__, (cls,), {**entries, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _is_on_ring(state: WrappedState) -> bool:
    """Return True in an eager forward of all ranks; transforms of torch.func are refused by the ring."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return not (traced or state.whole or is_generating())


class _ForwardChecks:
    """Comparisons of parameters, sequences, buffers and gradients between the ranks, at each forward of a module."""

    def __init__(self) -> None:
        self._aligned = False  # FSDP2's units
        self._parameters, self._buffers, self._gradients = ParameterCheck(), ChangedBuffers(), GradientFiller()

    def begin(self, module: nn.Module, options: ModelRing, given: tuple[Any, ...]) -> None:
        """Compare the parameters and sequences of a forward, and note the buffers."""
        if torch.is_grad_enabled() and not self._aligned:
            self._aligned = True
            align_during_forward(module)
        cuts = functools.partial(_find_cuts, given)
        self._parameters.compare(named_whole(module), options.group, cuts, options.layout)
        if torch.is_grad_enabled():
            self._buffers.begin(module)

    def end(self, module: nn.Module, group: dist.ProcessGroup | None, result: object) -> None:
        """Compare the buffers that a forward has changed, and its gradients at the end of the backward."""
        if torch.is_grad_enabled():
            self._buffers.end(module, group)
            self._gradients.begin(module, group, result)


def _find_cuts(given: tuple[Any, ...]) -> list[tuple[int, str]]:
    """Return the cuts of those arguments of a forward that are known to be shards."""
    found = (find_cut(x) for x in given if isinstance(x, Tensor))
    return [cut for cut in found if cut is not None]


def _intercepted(cls: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return a method that runs the present method of the class inside an interception."""

    @functools.wraps(getattr(cls, name))
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the class's own method inside the interception, and compare ranks before and after a root's forward."""
        state: WrappedState = self._ringflash_state
        compared = name == "forward" and self._ringflash_is_root and _is_on_ring(state)  # steps: by the strategy
        if compared:
            self._ringflash_checks.begin(self, state.options, (*args, *kwargs.values()))
        with in_step(self) if name in STEPS else nullcontext(), Interception(state, self):
            result = getattr(cls, name)(self, *args, **kwargs)
        if self._ringflash_is_root:
            state.check_called()
        if compared:
            self._ringflash_checks.end(self, state.options.group, result)
        return result

    return entry
