"""Put a module's attention on a ring, without a change to its layers.

    wrap_attention(module, group)  ->  module(local tokens, global positions)

A layer's forward runs inside a mode (`ringflash.wrap.interception`) that answers its calls of torch's
scaled_dot_product_attention. transformers models get attn_implementation="ringflash"; `RingAttention` its group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ringflash import huggingface
from ringflash.attention.api import RingAttention
from ringflash.comm.group import Group, resolve
from ringflash.huggingface.options import NAME, Options
from ringflash.sequence.layout import granularity
from ringflash.wrap.interception import Calls, Interception

Module = TypeVar("Module", bound=nn.Module)

# Where a module is entered. The steps are LightningModule's, which runs them without forward.
ENTRIES = ("forward", "training_step", "validation_step", "test_step", "predict_step")

_NORMS: dict[type[nn.Module], str] = dict.fromkeys(
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),  # SyncBatchNorm sees all ranks
    "its statistics are of the rank's own tokens; normalise each token by itself",
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
    """Make every attention of `module` one over the whole sequence, of which each rank holds a shard; in place.

    Call it before torch.compile, DDP and FSDP. Everything else in the module must treat tokens one by one, by their
    global positions (`local_positions`): `check_wrapped` compares it with the whole sequence.

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
    options = Options(resolve(group), layout, impl, transport, deterministic)
    for name, layer in module.named_modules():
        _check(name or type(module).__name__, layer, layout)
    for name, model in _transformers_models(module).items():
        _switch(name or type(module).__name__, model, options)
    for layer in module.modules():
        if isinstance(layer, RingAttention):
            layer.group = options.group
    calls = Calls(options, type(module).__name__)
    for name, layer in list(module.named_modules()):
        if name == "" or _may_call_attention(layer):
            layer._ringflash_calls, layer._ringflash_name = calls, name  # type: ignore[assignment]
            layer._ringflash_is_root = name == ""  # type: ignore[assignment]
            layer.__class__ = _entered(type(layer))  # type: ignore[arg-type]
    return module


def calls_of(module: nn.Module) -> Calls:
    """What the attention calls of a wrapped module share.

    Raises:
        ValueError: a module that was not given to `wrap_attention`.
    """
    calls = getattr(module, "_ringflash_calls", None)
    if not isinstance(calls, Calls):
        raise ValueError(
            f"module must be wrapped, got {type(module).__name__} as it was; call ringflash.wrap_attention first."
        )
    return calls


def check_norms(module: nn.Module) -> None:
    """Return if no layer normalises tokens by the others that the rank happens to hold.

    Raises:
        NotImplementedError: one that does, by its name.
    """
    for name, layer in module.named_modules():
        _refuse(name or type(module).__name__, layer, _NORMS)


def _refuse(name: str, layer: nn.Module, refused: dict[type[nn.Module], str]) -> None:
    for kind, remedy in refused.items():
        if isinstance(layer, kind):
            raise NotImplementedError(f"{name} must not be nn.{kind.__name__}, got {type(layer).__name__}; {remedy}.")


def _check(name: str, layer: nn.Module, layout: str) -> None:
    _refuse(name, layer, _REFUSED)
    if "forward" in vars(layer):
        raise NotImplementedError(
            f"{name}.forward must be that of its class, got one set on the object; wrap before that is set."
        )
    if hasattr(layer, "_orig_mod"):
        raise NotImplementedError(
            f"{name} must not be compiled yet, got {type(layer).__name__}; compile after wrapping."
        )
    if hasattr(layer, "_ringflash_calls"):
        raise ValueError(f"{name} must not be wrapped twice, got a wrapped {type(layer).__name__}; wrap the root once.")
    if isinstance(layer, RingAttention) and layer.layout != layout:
        raise ValueError(
            f"layout must be that of {name} ({layer.layout!r}), got {layout!r}; give both the layout of the shards."
        )


def _transformers_models(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost transformers models in a module, by name."""
    found: dict[str, nn.Module] = {}
    inside: set[nn.Module] = set()
    for name, layer in module.named_modules():
        if hasattr(layer, "set_attn_implementation") and layer not in inside:
            found[name] = layer
            inside |= set(layer.modules())
    return found


def _switch(name: str, model: Any, options: Options) -> None:
    """A transformers model to the ring, or an error that names it."""
    huggingface.register()
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:  # transformers warns, and leaves it as it was
            raise ValueError(f"{type(model).__name__}, whose layers attend by themselves; use another model.")
        huggingface.set_group(
            model, options.group, layout=options.layout, impl=options.impl, transport=options.transport,
            deterministic=options.deterministic,
        )  # fmt: skip
    except (ValueError, NotImplementedError) as error:
        raise NotImplementedError(f"{name} must take attn_implementation={NAME!r}, got: {error}") from error


def _may_call_attention(layer: nn.Module) -> bool:
    """All but torch's own layers, of which `_REFUSED` are those that attend, and transformers', which are switched."""
    return not type(layer).__module__.startswith(("torch.nn.", "transformers.", "ringflash."))


@functools.cache
def _entered(cls: type[nn.Module]) -> type[nn.Module]:
    """A class like `cls` whose entries run inside the interception; as FSDP2 changes a module's class."""
    entries = {name: _entry(getattr(cls, name)) for name in ENTRIES if hasattr(cls, name)}
    return type(cls.__name__, (cls,), {**entries, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _entry(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls: Calls = self._ringflash_calls
        with Interception(calls, self):
            result = method(self, *args, **kwargs)
        if self._ringflash_is_root:
            calls.check_called()
        return result

    return entry
