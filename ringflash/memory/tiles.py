"""Tiled MLPs and experts: a few tokens are computed at a time, so wide intermediates never exist for all tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash.comm.cuda_graphs import capturing
from ringflash.comm.seeding import generators_of

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ROUTED = (  # parameters of the forward of transformers' stacked experts
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
)


def tile_mlps(model: nn.Module, tile_tokens: int, *, checkpointed: bool = False) -> None:
    """Tile every gated MLP and all stacked experts of a transformers model, in place; parameters keep their names.

    Args:
        tile_tokens: tokens of a tile.
        checkpointed: the layers are recomputed in the backward. A single tile would then save nothing, so calls with
            no more than tile_tokens tokens are not tiled.
    Raises:
        ValueError: a tile without tokens; a model that is tiled already.
        NotImplementedError: a model without such modules, or gated MLPs whose projections are not linear layers.
    """
    if tile_tokens < 1:
        raise ValueError(f"mlp_tile_tokens must be positive, got {tile_tokens}; leave it at 0 for no tiles.")
    tiled = modules_to_tile(model)
    if not tiled:
        raise NotImplementedError(
            f"model must have MLPs with {', '.join(_PROJECTIONS)}, or experts that are called with the weights of "
            f"their tokens, got none in {type(model).__name__}; set mlp_tile_tokens to 0."
        )
    for module in tiled:
        if isinstance(module, _Tiled):
            raise ValueError(f"MLPs must be tiled only once, got {type(module).__name__}; remove the second call.")
        if _is_gated(module) and any(not isinstance(getattr(module, name), nn.Linear) for name in _PROJECTIONS):
            raise NotImplementedError(
                f"projections of {type(module).__name__} must be linear layers, got others; set mlp_tile_tokens to 0."
            )
        patched = vars(module).pop("forward", None)  # set on this module by a library
        module.__class__ = type(f"Tiled{type(module).__name__}", (_Tiled, type(module)), {})
        vars(module).update(_untiled=patched, tile_tokens=tile_tokens, _checkpointed=checkpointed)


def modules_to_tile(model: nn.Module) -> list[nn.Module]:
    """Return the gated MLPs and the stacked experts of a model."""
    return [module for module in model.modules() if _is_gated(module) or _is_stack_of_experts(module)]


def _is_gated(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _PROJECTIONS)


def _is_stack_of_experts(module: nn.Module) -> bool:
    """Return True for experts with the call of transformers' experts, which treats each token separately."""
    stacked = any(x.dim() == 3 for x in module.parameters(recurse=False))
    return stacked and (isinstance(module, _Tiled) or list(signature(type(module).forward).parameters)[1:] in _ROUTED)


class _Tiled:
    """Mixin that runs the forward of a module's class tile by tile."""

    tile_tokens: int
    ends_with_down_proj = True  # until a run shows otherwise
    _checkpointed: bool
    _untiled: Any

    def forward(self, x: Tensor, *routing: Tensor) -> Tensor:
        """Return the output for x.

        Args:
            x: (..., tokens, hidden_size).
            routing: two tensors (..., tokens, k) for experts: each token's experts, and their weights.
        """
        assert isinstance(self, nn.Module)
        if any(of_tokens.shape[:-1] != x.shape[:-1] for of_tokens in routing):
            flat = (y.flatten(0, -2) for y in (x, *routing))
            return self.forward(*flat).view(x.shape)
        parameters = _parameters(self)
        if any(hasattr(parameter, "ds_id") for parameter in parameters):
            raise NotImplementedError(
                "mlp_tile_tokens must be 0 under DeepSpeed's ZeRO-3, which frees parameters between forward and "
                "backward of a tile, got a tiled MLP; use ZeRO-2, or no tiles."
            )
        lent = any(not isinstance(x, nn.Parameter) and not _is_flat(x._base) for x in parameters)
        if lent and torch.is_grad_enabled():
            raise NotImplementedError(
                "mlp_tile_tokens must be 0 under torch.func.functional_call, whose tensors are gone in the backward of "
                "a tile, got a tiled MLP; use no tiles."
            )
        if parametrize.is_parametrized(self):
            raise NotImplementedError(
                f"parameters of {type(self).__name__} must be its own, got parametrized ones (as by LoRA on experts), "
                "whose gradients a tile would lose; set mlp_tile_tokens to 0."
            )
        inputs = (x, *routing)
        if self._checkpointed and x.shape[-2] <= self.tile_tokens:
            return self.whole(*inputs)
        needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *parameters))
        run = _run_uncompiled if torch.compiler.is_compiling() and needed else _run
        return run(self, needed, inputs, parameters)

    def whole(self, *inputs: Tensor) -> Tensor:
        """Return the output without tiling."""
        return self._untiled(*inputs) if self._untiled is not None else super().forward(*inputs)  # type: ignore[misc]

    def graph(self, *inputs: Tensor) -> Tensor:
        """Return a result of `whole` that is only used for gradients: the product of a final `down_proj` is skipped."""
        last: Any = getattr(self, "down_proj", None)
        plain = type(last) is nn.Linear and "forward" not in vars(last) and not last._forward_hooks
        if not (plain and self.ends_with_down_proj):
            return self.whole(*inputs)
        found: list[tuple[Tensor, list[int]]] = []

        def forward(x: Tensor) -> Tensor:
            with _WithoutProducts():
                product = nn.Linear.forward(last, x)
            found.append((product, _versions([product])))
            return product

        last.forward = forward
        try:
            out = self.whole(*inputs)
        finally:
            del last.forward
        self.ends_with_down_proj = len(found) == 1 and found[0][0] is out and found[0][1] == _versions([out])
        return out if self.ends_with_down_proj else self.whole(*inputs)


def _run(module: Any, needed: bool, inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...]) -> Tensor:
    """Compute a module tile by tile, so that `needed` gradients can be computed."""
    first, saved = _SaveInputs.apply(inputs[0].new_empty(0, requires_grad=needed), *inputs)
    return _Tiles.apply(module, saved, first, len(inputs), *inputs, *parameters)


_run_uncompiled = torch.compiler.disable(
    _run,
    reason="fullgraph must be False for a tiled MLP in training, whose backward runs its forward again; leave "
    "fullgraph out, or set mlp_tile_tokens to 0",
)


class _WithoutProducts(TorchDispatchMode):
    """A mode in which matrix products return zeros of the right shape, on which autograd builds its graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            if {type(left), type(right)} <= {Tensor, nn.Parameter}:
                return left.new_zeros(left.shape[0], right.shape[1])
        return func(*args, **(kwargs or {}))


class _SaveInputs(torch.autograd.Function):
    """Save the inputs of a module before `_Tiles` computes it.

    A checkpoint recomputes a layer only until it has recomputed the last tensor that the layer's forward saved. If the
    layer ends with tiles, these inputs are the last tensors, because they are saved before the tiles are computed. So
    the checkpoint does not compute the tiles; only the backward of `_Tiles` computes them again.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, *inputs: Tensor) -> tuple[Tensor, Any]:
        """Return an empty tensor that orders the tiles after this, and the context that holds the inputs."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return first.new_empty(0), ctx

    @staticmethod
    def backward(ctx: Any, *grads: None) -> tuple[None, ...]:
        """Return no gradients: the inputs get theirs through the tiles."""
        return (None,) * len(ctx.needs_input_grad)


class _Tiles(torch.autograd.Function):
    """Compute a module tile by tile. Parameters are also inputs, so that autograd accumulates their gradients.

    If the module draws random numbers, as LoRA's dropout does, the backward draws the same ones.

    Numerics: gradients of the parameters are summed over tiles in fp32 (fp64 for fp64), and cast once.
    """

    @staticmethod
    def forward(ctx: Any, module: Any, saved: Any, first: Tensor, num_inputs: int, *tensors: Tensor) -> Tensor:
        inputs = tensors[:num_inputs]
        kind = inputs[0].device.type
        ctx.module, ctx.saved = module, saved
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        device, trains = inputs[0].device, ctx.needs_input_grad[2]  # `first` requires grad if any input does
        before = _states(device) if trains and (not capturing(device) or _draws(module)) else None
        out = torch.cat([module.whole(*tile) for tile in _tiles(inputs, module)], dim=-2)
        ctx.random = None if before is None or all(map(torch.equal, before, _states(device))) else before
        ctx.versions = _versions(tensors[num_inputs:]) if trains else []
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "create_graph must be False with mlp_tile_tokens, got True: the gradients of a tile would be "
                "constants; set mlp_tile_tokens to 0."
            )
        inputs, module = ctx.saved.saved_tensors, ctx.module
        if _versions(_parameters(module)) != ctx.versions:
            raise RuntimeError(
                f"weights of {type(module).__name__} must not change between its forward and its backward, got changed "
                "ones: gradients would be of other weights than the outputs; step the optimizer after the backward."
            )
        needed = ctx.needs_input_grad[4:]
        wanted, of_inputs = needed[len(inputs) :], needed[: len(inputs)]
        parameters = [p for p, want in zip(_parameters(module), wanted, strict=True) if want]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        parts: list[tuple[Tensor, ...]] = []
        compute = module.graph if ctx.random is None else module.whole
        with _repeat_random(ctx.random, grad.device), _without_hooks(parameters):
            for tile, (grad_tile,) in zip(_tiles(inputs, module), _tiles((grad,), module), strict=True):
                leaves = [x.detach().requires_grad_(want) for x, want in zip(tile, of_inputs, strict=True)]
                with torch.enable_grad(), torch.autocast(*ctx.autocast):
                    out = compute(*leaves)
                asked = [x for x in leaves if x.requires_grad]
                grads = torch.autograd.grad(out, (*asked, *parameters), grad_tile)
                parts.append(grads[: len(asked)])
                for total, part in zip(sums, grads[len(asked) :], strict=True):
                    total += part
        joined = [torch.cat(tiles, dim=-2) for tiles in zip(*parts, strict=True)]
        joined += [total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)]
        whole = iter(joined)
        return None, None, None, None, *(next(whole) if need else None for need in needed)


def _parameters(mlp: nn.Module) -> tuple[Tensor, ...]:
    """Return the parameters of an MLP by name; under FSDP1, the views of the flat parameter that stand in for them."""
    found: dict[str, Tensor] = {}
    for prefix, module in mlp.named_modules():
        views = {name: x for name, x in vars(module).items() if isinstance(x, Tensor) and _is_flat(x._base)}
        own = {name: x for name, x in module._parameters.items() if x is not None and not _is_flat(x)}
        found |= {f"{prefix}.{name}": x for name, x in (views | own).items()}
    return tuple(dict.fromkeys(found[name] for name in sorted(found)))


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the numbers of writes to tensors, as autograd counts them."""
    return [x._version for x in tensors]


def _is_flat(x: Tensor | None) -> bool:
    return getattr(x, "_is_flat_param", False)


def _draws(mlp: nn.Module) -> bool:
    """Return True if a forward names what draws random numbers, where the states of generators cannot be compared."""
    return any(x.training and (x.p > 0 if isinstance(x, _DropoutNd) else _calls_random(x)) for x in mlp.modules())


def _calls_random(module: nn.Module) -> bool:
    """Return True if a forward names a function that draws random numbers, and that is no layer of the module."""
    return any(not isinstance(getattr(module, name, None), nn.Module) for name in _random_names(type(module)))


def _random_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names in the forwards of a class that are dropouts, or operators that draw random numbers."""
    codes = (getattr(vars(base).get("forward"), "__code__", None) for base in cls.__mro__)
    names = (name for code in codes if code is not None for name in code.co_names)
    return tuple(name for name in names if "dropout" in name and hasattr(nn.functional, name) or _is_random(name))


def _is_random(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, x).tags for x in packet.overloads())


def _states(device: torch.device) -> list[Tensor]:
    return [x.get_state() for x in generators_of(device)]


@contextmanager
def _repeat_random(states: list[Tensor] | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from saved states on; the generators keep their states."""
    if states is None:
        yield
        return
    before = _states(device)
    try:
        for generator, state in zip(generators_of(device), states, strict=True):
            generator.set_state(state)
        yield
    finally:
        for generator, state in zip(generators_of(device), before, strict=True):
            generator.set_state(state)


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep gradient hooks from the parts of a gradient: autograd calls them with the sum."""
    hooked = [(x, x._backward_hooks) for x in parameters if x._backward_hooks]
    for x, _ in hooked:
        x._backward_hooks = None
    try:
        yield
    finally:
        for x, hooks in hooked:
            x._backward_hooks = hooks


def _tiles(tensors: Sequence[Tensor], module: Any) -> Iterator[tuple[Tensor, ...]]:
    """Yield the slices of the tensors for each tile."""
    return zip(*(x.split(module.tile_tokens, dim=-2) for x in tensors), strict=True)
