"""The ranks as a mesh of data x context: sequences are spread over one axis, parameters over both.

Six ranks, context_parallel_size 2; a row shares one sequence, all six share the parameters:

                        context_parallel
    data_parallel  0       r0  r1
                   1       r2  r3
                   2       r4  r5
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

DATA_AXIS, CONTEXT_AXIS = "data_parallel", "context_parallel"

Size = int | Literal["auto"]


def mesh_sizes(data_parallel_size: Size, context_parallel_size: Size, world_size: int) -> tuple[int, int]:
    """Both sizes as numbers.

    Args:
        data_parallel_size, context_parallel_size: "auto" is what the other leaves; both "auto" is one sequence
            over all ranks.
    Raises:
        ValueError: sizes whose product is not the world size.
    """
    dp, cp = data_parallel_size, context_parallel_size
    for name, size in (("data_parallel_size", dp), ("context_parallel_size", cp)):
        if size != "auto" and (not isinstance(size, int) or size < 1):
            raise ValueError(f"{name} must be 'auto' or a positive integer, got {size!r}; 'auto' takes what is left.")
    if dp == "auto":
        dp = 1 if cp == "auto" else world_size // cp
    if cp == "auto":
        cp = world_size // dp
    if dp * cp != world_size:
        raise ValueError(
            f"data_parallel_size * context_parallel_size must be the number of ranks ({world_size}), "
            f"got {data_parallel_size} * {context_parallel_size}; start {max(dp, 1) * max(cp, 1)} ranks, "
            "or set one of the sizes to 'auto'."
        )
    return dp, cp


class ContextParallelStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks, and each sequence cut over `context_parallel_size` of them.

    Lightning's sampler splits the data over the data axis only, so that the ranks of one ring draw the same
    sequences; the module shards them (`ringflash.huggingface.prepare_batch`) and calls `shard_parameters` in
    its `configure_model`. Gradients are averaged over all ranks: the loss needs the scale of `ringflash.loss`.

    Args:
        context_parallel_size: ranks that share one sequence; "auto" is all that data_parallel_size leaves.
        data_parallel_size: groups of ranks with sequences of their own; "auto" is all that is left.
        save_distributed_checkpoint: True writes a directory, every rank its part, loadable on any number of
            ranks; False gathers everything into one file.
        process_group_backend: default gloo on CPU and NCCL on CUDA.
        timeout: how long a collective waits for a missing rank.
    Raises:
        ValueError: sizes that do not multiply to the number of ranks; before any communication.
    """

    def __init__(
        self,
        context_parallel_size: Size = "auto",
        data_parallel_size: Size = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._context_parallel_size = context_parallel_size
        self._shard_mesh: DeviceMesh | None = None

    def setup_environment(self) -> None:
        """Check the sizes, join the process group, and lay out the mesh."""
        world_size = self.num_nodes * self.num_processes
        sizes = mesh_sizes(self._data_parallel_size, self._context_parallel_size, world_size)
        self._setup_distributed()
        if self._shard_mesh is None:  # validate() and fit() of one trainer share the mesh, and the model on it
            mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=(DATA_AXIS, CONTEXT_AXIS))
            self._device_mesh, self._shard_mesh = mesh, mesh._flatten("data_context")
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def shard_mesh(self) -> DeviceMesh:
        """All ranks in one axis, over which parameters are sharded."""
        if self._shard_mesh is None:
            raise RuntimeError(
                "shard_mesh must be read after the processes have joined, got a strategy without a mesh; "
                "read it in configure_model or later."
            )
        return self._shard_mesh

    @property
    def cp_mesh(self) -> DeviceMesh:
        """The ranks that share this rank's sequence."""
        return self.device_mesh[CONTEXT_AXIS]

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The process group of `cp_mesh`."""
        return self.cp_mesh.get_group()

    @property
    def cp_size(self) -> int:
        """Ranks that share one sequence."""
        return self.cp_mesh.size()

    @property
    def dp_size(self) -> int:
        """Sequences in work at a time."""
        return self.device_mesh[DATA_AXIS].size()

    @property
    def dp_rank(self) -> int:
        """Which of these sequences is this rank's."""
        return self.device_mesh[DATA_AXIS].get_local_rank()

    def shard_parameters(self, module: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Shard `layers`, each as a unit that is gathered at once, then what remains of `module`, in place.

        The loss must be computed in the forward of `module`: outside it the output embedding is not whole.
        """
        policy = mixed_precision_policy(self.precision_plugin.precision)
        for layer in layers:
            fully_shard(layer, mesh=self.shard_mesh, mp_policy=policy)
        fully_shard(module, mesh=self.shard_mesh, mp_policy=policy)

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        """2-norm of the gradients of the whole model, equal on every rank, fp32 (fp64 for fp64).

        One message for all parameters, which `shard_parameters` has sharded.
        """
        shards = [cast(DTensor, p.grad).to_local() for p in parameters if p.grad is not None]
        dtype = torch.promote_types(shards[0].dtype, torch.float32) if shards else torch.float32
        total = torch.zeros((), dtype=dtype, device=self.root_device)
        for shard in shards:
            total += torch.linalg.vector_norm(shard, dtype=dtype).square()
        dist.all_reduce(total, group=self.shard_mesh.get_group())
        return total.sqrt()


def mixed_precision_policy(precision: str) -> MixedPrecisionPolicy:
    """What FSDP2 gathers and reduces in, for one of Lightning's precisions.

    Numerics: gradients are summed over ranks in fp32, also where parameters are bf16.
    """
    if precision == "bf16-mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if precision in ("bf16-true", "16-true"):
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def strategy_of(trainer: Any) -> ContextParallelStrategy:
    """The trainer's strategy, once it is known to be ours.

    Raises:
        ValueError: a strategy without a context axis.
    """
    if not isinstance(trainer.strategy, ContextParallelStrategy):
        raise ValueError(
            f"strategy must be a ContextParallelStrategy, got {type(trainer.strategy).__name__}; "
            "pass Trainer(strategy=ContextParallelStrategy(context_parallel_size=...))."
        )
    return trainer.strategy
