"""MLPs and experts that work on a few tokens at a time: tensors of their width never exist for all tokens of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import get_device_states, set_device_states

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ROUTED = (  # what transformers' stacked experts take
    ["hidden_states", "top_k_index", "top_k_weights"],
    ["hidden_states", "router_indices", "routing_weights"],
)


def tile_mlps(model: nn.Module, tile_tokens: int, *, checkpointed: bool = False) -> None:
    """Tile every gated MLP of a transformers model and its stacked experts, in place; names of parameters stay.

    Args:
        tile_tokens: tokens of a tile.
        checkpointed: their layers are computed again in the backward. One tile of all tokens would then save nothing,
            so calls of no more than tile_tokens go without.
    Raises:
        ValueError: a tile without tokens; tiled already.
        NotImplementedError: a model without such a module, or one whose results for tokens depend on others.
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
            raise ValueError(f"MLPs must be tiled once, got {type(module).__name__}; leave the second call out.")
        if _is_gated(module) and any(not isinstance(getattr(module, name), nn.Linear) for name in _PROJECTIONS):
            raise NotImplementedError(
                f"projections of {type(module).__name__} must be linear layers, got others; set mlp_tile_tokens to 0."
            )
        patched = vars(module).pop("forward", None)  # where a library has patched this one module
        module.__class__ = type(f"Tiled{type(module).__name__}", (_Tiled, type(module)), {})
        vars(module).update(_untiled=patched, tile_tokens=tile_tokens, _checkpointed=checkpointed)


def modules_to_tile(model: nn.Module) -> list[nn.Module]:
    """The gated MLPs of a model, and the experts that it stacks."""
    return [module for module in model.modules() if _is_gated(module) or _is_stack_of_experts(module)]


def _is_gated(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _PROJECTIONS)


def _is_stack_of_experts(module: nn.Module) -> bool:
    """Whether it is called as transformers' are: a token's result is then of that token and its experts alone."""
    stacked = any(x.dim() == 3 for x in module.parameters(recurse=False))
    return stacked and (isinstance(module, _Tiled) or list(signature(type(module).forward).parameters)[1:] in _ROUTED)


class _Tiled:
    """The forward of a module's class, tile by tile."""

    tile_tokens: int
    ends_with_down_proj = True  # until seen to be otherwise
    _checkpointed: bool
    _untiled: Any

    def forward(self, x: Tensor, *routing: Tensor) -> Tensor:
        """Output for x: (..., tokens, hidden_size); routing is (..., tokens, k): each token's experts, and weights."""
        assert isinstance(self, nn.Module)
        if any(of_tokens.shape[:-1] != x.shape[:-1] for of_tokens in routing):
            flat = (y.flatten(0, -2) for y in (x, *routing))
            return self.forward(*flat).view(x.shape)
        parameters = _parameters(self)
        if any(hasattr(parameter, "ds_id") for parameter in parameters):
            raise NotImplementedError(
                "mlp_tile_tokens must be 0 under DeepSpeed's ZeRO-3, which gives parameters away between forward and "
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
        first, kept = _Keep.apply(x.new_empty(0, requires_grad=needed), *inputs)
        return _Tiles.apply(self, kept, first, len(inputs), *inputs, *parameters)

    def whole(self, *inputs: Tensor) -> Tensor:
        """Output as without tiles."""
        return self._untiled(*inputs) if self._untiled is not None else super().forward(*inputs)  # type: ignore[misc]

    def graph(self, *inputs: Tensor) -> Tensor:
        """`whole` for its gradients alone: where the output is what `down_proj` puts out, that is not computed."""
        last: Any = getattr(self, "down_proj", None)
        plain = type(last) is nn.Linear and "forward" not in vars(last) and not last._forward_hooks
        if not (plain and self.ends_with_down_proj) or _draws(self):  # type: ignore[arg-type]
            return self.whole(*inputs)
        found: list[Tensor] = []

        def forward(x: Tensor) -> Tensor:
            with _WithoutProducts():
                found.append(nn.Linear.forward(last, x))
            return found[-1]

        last.forward = forward
        try:
            out = self.whole(*inputs)
        finally:
            del last.forward
        self.ends_with_down_proj = bool(found) and out is found[-1]
        return out if self.ends_with_down_proj else self.whole(*inputs)


class _WithoutProducts(TorchDispatchMode):
    """Matrix products give zeros of the right shape, for autograd to build its graph on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            if {type(left), type(right)} <= {Tensor, nn.Parameter}:
                return left.new_zeros(left.shape[0], right.shape[1])
        return func(*args, **(kwargs or {}))


class _Keep(torch.autograd.Function):
    """Keeps the inputs of a module that `_Tiles` computes next, and before that.

    A checkpoint computes a layer again until all is there that its forward kept. Of a layer that ends with tiles, that
    is here, and the tiles are not computed once for the layer and once more for themselves.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, *inputs: Tensor) -> tuple[Tensor, Any]:
        """An empty tensor by which the tiles come after this, and what holds the inputs."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return first.new_empty(0), ctx

    @staticmethod
    def backward(ctx: Any, *grads: None) -> tuple[None, ...]:
        """Nothing: gradients of the inputs go from the tiles to where they came from."""
        return (None,) * len(ctx.needs_input_grad)


class _Tiles(torch.autograd.Function):
    """Computes tile by tile. Parameters are inputs, too, so that autograd brings their gradients where they belong.

    Where there is dropout, such as LoRA's, the backward draws what the forward drew.

    Numerics: gradients of the parameters are summed over tiles in fp32 (fp64 for fp64), and cast once.
    """

    @staticmethod
    def forward(ctx: Any, module: Any, kept: Any, first: Tensor, num_inputs: int, *tensors: Tensor) -> Tensor:
        inputs = tensors[:num_inputs]
        kind = inputs[0].device.type
        ctx.module, ctx.kept = module, kept
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.random = (torch.get_rng_state(), *get_device_states(inputs[0])) if _draws(module) else None
        return torch.cat([module.whole(*tile) for tile in _tiles(inputs, module)], dim=-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, module = ctx.kept.saved_tensors, ctx.module
        needed = ctx.needs_input_grad[4:]
        wanted, of_inputs = needed[len(inputs) :], needed[: len(inputs)]
        parameters = [p for p, want in zip(_parameters(module), wanted, strict=True) if want]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        parts: list[tuple[Tensor, ...]] = []
        with _drawing_again(ctx.random, grad.device.type):
            for tile, (grad_tile,) in zip(_tiles(inputs, module), _tiles((grad,), module), strict=True):
                leaves = [x.detach().requires_grad_(want) for x, want in zip(tile, of_inputs, strict=True)]
                with torch.enable_grad(), torch.autocast(*ctx.autocast):
                    out = module.graph(*leaves)
                asked = [x for x in leaves if x.requires_grad]
                grads = torch.autograd.grad(out, (*asked, *parameters), grad_tile)
                parts.append(grads[: len(asked)])
                for total, part in zip(sums, grads[len(asked) :], strict=True):
                    total += part
        found = [torch.cat(tiles, dim=-2) for tiles in zip(*parts, strict=True)]
        found += [total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)]
        whole = iter(found)
        return None, None, None, None, *(next(whole) if need else None for need in needed)


def _parameters(mlp: nn.Module) -> tuple[Tensor, ...]:
    """Its parameters, by name; under FSDP1, at work, the views of a flat one that are attributes in their place."""
    found: dict[str, Tensor] = {}
    for place, module in mlp.named_modules():
        views = {name: x for name, x in vars(module).items() if isinstance(x, Tensor) and _is_flat(x._base)}
        own = {name: x for name, x in module._parameters.items() if x is not None and not _is_flat(x)}
        found |= {f"{place}.{name}": x for name, x in (views | own).items()}
    return tuple(dict.fromkeys(found[name] for name in sorted(found)))


def _is_flat(x: Tensor | None) -> bool:
    return getattr(x, "_is_flat_param", False)


def _draws(mlp: nn.Module) -> bool:
    """Whether a dropout is at work in it."""
    return any(x.training and x.p > 0 for x in mlp.modules() if isinstance(x, _DropoutNd))


@contextmanager
def _drawing_again(state: tuple[Tensor, list[int], list[Tensor]] | None, kind: str) -> Iterator[None]:
    """Random numbers as from the state on; the generators are left as they were."""
    if state is None:
        yield
        return
    host, devices, states = state
    with torch.random.fork_rng(devices, device_type=kind):
        torch.set_rng_state(host)
        set_device_states(devices, states, device_type=kind)
        yield


def _tiles(tensors: Sequence[Tensor], module: Any) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of each tile's tokens."""
    return zip(*(x.split(module.tile_tokens, dim=-2) for x in tensors), strict=True)
