"""MLPs that work on a few tokens at a time: the tensors of their width never exist for all tokens of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import get_device_states, set_device_states

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def tile_mlps(model: nn.Module, tile_tokens: int) -> None:
    """Tile every gated MLP of a transformers model, in place; names of parameters stay.

    Args:
        tile_tokens: tokens of a tile.
    Raises:
        ValueError: a tile without tokens; tiled already.
        NotImplementedError: a model without such an MLP, or one whose results for tokens depend on others.
    """
    if tile_tokens < 1:
        raise ValueError(f"mlp_tile_tokens must be positive, got {tile_tokens}; leave it at 0 for no tiles.")
    mlps = [module for module in model.modules() if all(hasattr(module, name) for name in _PROJECTIONS)]
    if not mlps:
        raise NotImplementedError(
            f"model must have MLPs with {', '.join(_PROJECTIONS)}, got none in {type(model).__name__}; "
            "set mlp_tile_tokens to 0."
        )
    for mlp in mlps:
        if isinstance(mlp, _TiledMLP):
            raise ValueError(f"MLPs must be tiled once, got {type(mlp).__name__}; leave the second call out.")
        if any(not isinstance(getattr(mlp, name), nn.Linear) for name in _PROJECTIONS):
            raise NotImplementedError(
                f"projections of {type(mlp).__name__} must be linear layers, got others; set mlp_tile_tokens to 0."
            )
        patched = vars(mlp).pop("forward", None)  # where a library has patched this one module
        mlp.__class__ = type(f"Tiled{type(mlp).__name__}", (_TiledMLP, type(mlp)), {})
        vars(mlp).update(_untiled=patched, tile_tokens=tile_tokens)


class _TiledMLP:
    """The forward of an MLP's class, tile by tile."""

    tile_tokens: int
    _untiled: Any

    def forward(self, x: Tensor) -> Tensor:
        """Output for x: (..., tokens, hidden_size)."""
        assert isinstance(self, nn.Module)
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
        return _Tiles.apply(self, x, *parameters)

    def whole(self, x: Tensor) -> Tensor:
        """Output as without tiles."""
        return self._untiled(x) if self._untiled is not None else super().forward(x)  # type: ignore[misc]


class _Tiles(torch.autograd.Function):
    """Keeps the input alone. Parameters are inputs, so that autograd brings their gradients where they belong.

    Where there is dropout, such as LoRA's, the backward draws what the forward drew.

    Numerics: gradients of the parameters are summed over tiles in fp32 (fp64 for fp64), and cast once.
    """

    @staticmethod
    def forward(ctx: Any, mlp: Any, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        kind = x.device.type
        ctx.mlp, ctx.autocast = mlp, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.random = (torch.get_rng_state(), *get_device_states(x)) if _draws(mlp) else None
        ctx.save_for_backward(x)
        return torch.cat([mlp.whole(tile) for tile in _tiles(x, mlp)], dim=-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        mlp, wanted = ctx.mlp, ctx.needs_input_grad[2:]
        parameters = [p for p, want in zip(_parameters(mlp), wanted, strict=True) if want]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        grad_x = []
        with _drawing_again(ctx.random, x.device.type):
            for tile, grad_tile in zip(_tiles(x, mlp), _tiles(grad, mlp), strict=True):
                tile = tile.detach().requires_grad_()
                with torch.enable_grad(), torch.autocast(*ctx.autocast):
                    out = mlp.whole(tile)
                grads = torch.autograd.grad(out, (tile, *parameters), grad_tile)
                grad_x.append(grads[0])
                for total, part in zip(sums, grads[1:], strict=True):
                    total += part
        whole = iter([total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)])
        return None, torch.cat(grad_x, dim=-2), *(next(whole) if want else None for want in wanted)


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


def _tiles(x: Tensor, mlp: Any) -> tuple[Tensor, ...]:
    return x.split(mlp.tile_tokens, dim=-2)
