"""FSDP2 units whose parameters not every rank uses: lists of experts, modalities, layers that some tokens skip.

FSDP2 packs the gradients that a rank has. If ranks lack different gradients, its reduce-scatter adds gradients of
different parameters. If ranks call units in different orders, its all-gathers combine different units. Neither raises
an error. So, on all ranks of a group:

    all-gather of a unit  the ranks first compare its name: on CPUs always, on GPUs unless it has always followed the
                          previous call
    its reduce-scatter    the same comparison; parameters without a gradient get zeros
    end of a backward     the ranks compare the order of all units; zeros of parameters that no rank used are removed,
                          since optimizers skip parameters without a gradient
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ringflash.comm.agreement import gather
from ringflash.comm.call_order import CallOrder
from ringflash.comm.group import Group, resolve

_REMEDY = (
    "shard the layer that calls it as one unit, so that its parts are gathered together, or call each unit on every "
    "rank, with an empty input if the rank has no tokens for it"
)


def align_units(module: nn.Module, group: Group) -> None:
    """Let ranks use different parameters inside an FSDP2 unit, and refuse ranks that call different units.

    Gradients then equal those of one process: a parameter that only some ranks have used is averaged with zeros, and a
    parameter that no rank has used keeps no gradient. Wrapped modules, transformers models and Lightning's strategy do
    this themselves, except on a 2-D mesh that lacks some ranks.

    Args:
        module: sharded by `fully_shard`; call this before the first forward.
        group: all ranks over which the parameters are sharded or replicated.
    Raises:
        ValueError: later, in a forward or at the end of a backward, on every rank: ranks called different units.
    """
    if (resolved := resolve(group)) is not None:
        UnitOrder(resolved).watch(module)


@torch.compiler.disable(reason="it looks at FSDP2's state")
def align_during_forward(module: nn.Module) -> None:
    """Align the units in and around a module, which is in a forward, unless they are aligned already.

    The group has the ranks of the units' mesh. A 2-D mesh that lacks some ranks has no such group: it is left out.
    """
    orders: dict[Any, UnitOrder] = {}
    for unit in _outermost_units(module):
        state = unit._get_fsdp_state()
        root = next((x for x in state._state_ctx.all_states if x._is_root), state)
        mesh = next((part.mesh_info.mesh for x in (root, state) for part in _param_groups(x)), None)
        if mesh is None or (mesh.ndim > 1 and mesh.size() != dist.get_world_size()):
            continue
        group: Any = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
        order = orders.setdefault(group, UnitOrder(group))
        order.watch(root._modules[0])
        for label, running in order.labels.items():
            if running._training_state.name == "FORWARD":
                order.note_forward(label)


def _outermost_units(module: nn.Module) -> list[Any]:
    if isinstance(module, FSDPModule):
        return [module]
    return [unit for child in module.children() for unit in _outermost_units(child)]


class UnitOrder(CallOrder):
    """Order in which the units of one or more outermost FSDP2 modules are called and reduced."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group, "FSDP2 unit", _REMEDY)
        self._num_modules = 0
        self.labels: dict[str, Any] = {}  # states of the units, by their names in errors
        self._ran: set[str] = set()  # units that have run a forward for the next backwards
        self._has_reduced = False  # since the last forward
        self._used: dict[Any, bool] = {}  # reduced parameters: True if this rank or an earlier backward had a gradient

    def watch(self, module: nn.Module) -> None:
        """Watch the units of an outermost FSDP2 module, once."""
        if any(getattr(hook, "func", None) is _note_forward for hook in module._forward_pre_hooks.values()):
            return
        root = f"{type(module).__name__.removeprefix('FSDP')} {self._num_modules}"
        units: dict[str, Any] = {name: x for name, x in module.named_modules() if isinstance(x, FSDPModule)}
        for name, unit in units.items():
            state = unit._get_fsdp_state()
            label = f"{root}, {name}" if name else root
            self.labels[label] = state
            unit.register_forward_pre_hook(partial(_note_forward, self, label))
            _extend(state, "_root_post_backward_final_callback", after=self._end)
            for part in _param_groups(state):
                _extend(part, "unshard", before=partial(self.gather, label, part))
                _extend(part, "post_backward", before=partial(self.reduce, label, part))
        self._num_modules += 1

    def note_forward(self, label: str) -> None:
        """Note that a unit has run a forward, and so takes part in the next backwards."""
        if not torch.is_grad_enabled():
            return
        if self._has_reduced and torch._C._current_graph_task_id() == -1:  # not a recomputation inside a backward
            self._ran, self._has_reduced = set(), False
        self._ran.add(label)

    def gather(self, label: str, part: Any) -> None:
        """Compare a unit before its all-gather; do nothing if it is gathered already."""
        if not part.is_unsharded and part._all_gather_result is None:
            self.enter(label, part.device.type)

    def reduce(self, label: str, part: Any) -> None:
        """Give zeros to parameters of a unit that have no gradient on this rank, before the reduce-scatter."""
        gathered = [x for x in part.fsdp_params if hasattr(x, "_unsharded_param")]
        trained = [x for x in gathered if x._unsharded_param.requires_grad]
        if label not in self._ran or not part.reduce_grads or not trained:
            return
        self.enter(f"gradients of {label}", part.device.type)
        # gradients that earlier backwards have left unreduced; from torch 2.15 on they are in the parameter's grad
        kept = [vars(x).get("unsharded_accumulated_grad") for x in trained]
        for x, accumulated in zip(trained, kept, strict=True):
            used = accumulated is not None or x._unsharded_param.grad is not None
            self._used[x] = used or self._used.get(x, x.sharded_param.grad is not None)
            if used:
                continue
            if all(y is None for y in kept):
                dtype = getattr(x._unsharded_param, "grad_dtype", None)
                x._unsharded_param.grad = torch.zeros_like(x._unsharded_param, dtype=dtype)
            else:  # in the dtype of accumulated gradients
                x.unsharded_accumulated_grad = torch.zeros_like(x._unsharded_param, dtype=part._reduce_dtype)

    def _end(self) -> None:
        """Compare the ranks after a backward, once the last outermost module has reduced its gradients."""
        if any(state._state_ctx.post_backward_final_callback_queued for state in self.labels.values()):
            return
        used, self._used = self._used, {}
        self._has_reduced = any(part.reduce_grads for state in self.labels.values() for part in _param_groups(state))
        self.end()
        if not used:
            return
        by_any_rank = torch.tensor(list(used.values()), dtype=torch.uint8)
        if len(set(gather(self.group, zlib.crc32(bytes(used.values()))))) > 1:
            by_any_rank = by_any_rank.to(next(iter(used)).device)
            dist.all_reduce(by_any_rank, dist.ReduceOp.MAX, group=self.group)
        for x, is_used in zip(used, by_any_rank.tolist(), strict=True):
            if not is_used:
                x.sharded_param.grad = None


@torch.compiler.disable(reason="it notes names")
def _note_forward(order: UnitOrder, label: str, *_: Any) -> None:
    order.note_forward(label)


def _param_groups(state: Any) -> list[Any]:
    """Return a unit's groups of parameters; torch 2.13 may make several."""
    one = getattr(state, "_fsdp_param_group", None)
    return list(getattr(state, "_fsdp_param_groups", [] if one is None else [one]))


def _extend(
    owner: Any, name: str, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    """Let a method of one object call another function before or after it."""
    original = getattr(owner, name)

    def extended(*args: Any, **options: Any) -> None:
        if before is not None:
            before()
        original(*args, **options)
        if after is not None:
            after()

    setattr(owner, name, extended)
