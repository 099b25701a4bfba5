"""Lightning strategy on a data x context mesh: sequences are sharded over one axis, parameters (FSDP2) over both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ringflash.comm.mesh import DataContextRanks, Size, data_context_mesh, mesh_sizes, set_group_timeouts
from ringflash.comm.modules.fsdp_units import UnitOrder
from ringflash.lightning.checkpoint_loading import Folder, SingleFile, check_fits, first_undamaged
from ringflash.lightning.checkpoints import CheckpointWriter, check_local, check_same_state
from ringflash.lightning.stop import add_stop_on_signal
from ringflash.lightning.trainer_checks import TrainerChecks
from ringflash.sequence.layout import granularity


class ContextParallelStrategy(TrainerChecks, DataContextRanks, ModelParallelStrategy):
    """FSDP2 over all ranks, with each sequence sharded over `context_parallel_size` of them.

    Lightning's sampler splits the data over the data axis only, so that the ranks of one ring draw the same
    sequences; the module shards them (`ringflash.huggingface.prepare_batch`) and calls `shard_parameters` in
    its `configure_model`. Gradients are averaged over all ranks: the loss needs the scale of `ringflash.loss`.

    Args:
        context_parallel_size: ranks that share one sequence; "auto" is all that data_parallel_size leaves.
        data_parallel_size: number of sequences processed in parallel; "auto" is all that is left.
        layout: which tokens of a sequence a rank holds: "zigzag", or for packed documents "balanced" (docs/masks.md).
        replicate_size: copies of the parameters (HSDP). Each copy is sharded over consecutive ranks, for example a few
            hosts, and parameters travel only among these. Gradients are averaged over all ranks. A checkpoint has one
            copy, and can be loaded with any number of copies.
        save_distributed_checkpoint: True writes a directory with a part from each rank, loadable on any number of
            ranks; False gathers everything into one file.
        async_checkpoint: True continues training while a checkpoint is written from a copy in host memory, and waits
            for it at the next checkpoint and at the end of training; default as save_distributed_checkpoint.
        process_group_backend: default gloo on CPU and NCCL on CUDA.
        timeout: how long a collective waits for a missing rank.
    Raises:
        ValueError: an unknown layout, sizes that do not multiply to the number of ranks, a number of copies that does
            not divide it, or an asynchronous checkpoint in one file; before any communication.
    """

    handles_gradient_clipping = False

    def __init__(
        self,
        context_parallel_size: Size = "auto",
        data_parallel_size: Size = "auto",
        layout: str = "zigzag",
        save_distributed_checkpoint: bool = True,
        async_checkpoint: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        replicate_size: int = 1,
    ) -> None:
        if async_checkpoint and not save_distributed_checkpoint:
            raise ValueError(
                "async_checkpoint must be False if save_distributed_checkpoint is False, got True; leave it out, or "
                "write distributed checkpoints."
            )
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        granularity(1, layout)  # raises for an unknown layout
        self._context_parallel_size, self.layout = context_parallel_size, layout
        self._shard_mesh: DeviceMesh | None = None
        self.unit_order: UnitOrder | None = None
        self._replicate_size = replicate_size
        self._async_checkpoint = save_distributed_checkpoint if async_checkpoint is None else async_checkpoint
        self._writer: CheckpointWriter | None = None
        self._training = False

    def setup_environment(self) -> None:
        """Check the trainer and the sizes, join the process group, and lay out the mesh."""
        self.check_trainer(copies_module=False)
        add_stop_on_signal(self._trainer)
        world_size = self.num_nodes * self.num_processes
        sizes = mesh_sizes(self._data_parallel_size, self._context_parallel_size, world_size)
        copies = self._replicate_size
        if copies < 1 or world_size % copies:
            raise ValueError(
                f"replicate_size must divide the number of ranks ({world_size}), got {copies}; 1 shards parameters "
                "over all of them."
            )
        self._setup_distributed()
        if self._shard_mesh is None:  # validate() and fit() of one trainer share a mesh and the model on it
            mesh = data_context_mesh(self.root_device.type, *sizes)
            self._device_mesh, self._shard_mesh = mesh, mesh._flatten("data_context")
            if copies > 1:
                self._shard_mesh = init_device_mesh(
                    self.root_device.type, (copies, world_size // copies), mesh_dim_names=("replicate", "shard")
                )
            for each in (mesh, self._shard_mesh):
                set_group_timeouts(each, self._timeout)
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Mesh of all ranks: parameters are sharded over its last axis, and replicated over its first of two."""
        if self._shard_mesh is None:
            raise RuntimeError(
                "shard_mesh must be read after the processes have joined, got a strategy without a mesh; "
                "read it in configure_model or later."
            )
        return self._shard_mesh

    def shard_parameters(
        self, module: nn.Module, layers: Iterable[nn.Module], *, in_fp32: Iterable[nn.Module] = ()
    ) -> None:
        """Shard each of `layers` as one FSDP2 unit, then the remaining parameters of `module`, in place.

        Parameters are sharded by rows. If the ranks do not divide the number of stacked experts, each expert is
        sharded along a later dim, provided that the ranks divide one. The loss must be computed in the forward of
        `module`: outside it the output embedding is not gathered.

        Args:
            in_fp32: submodules that no precision casts; each becomes a separate unit, which must have one dtype.
        Raises:
            ValueError: a parameter is tied across two units, which would each train their own copy.
        """
        policy = mixed_precision_policy(self.precision_plugin.precision)
        with check_ties(module):
            for exact in in_fp32:
                fully_shard(exact, mesh=self.shard_mesh, shard_placement_fn=self._placement)
            for layer in layers:
                fully_shard(layer, mesh=self.shard_mesh, mp_policy=policy, shard_placement_fn=self._placement)
            fully_shard(module, mesh=self.shard_mesh, mp_policy=policy, shard_placement_fn=self._placement)
        module.register_forward_hook(_reshard_without_backward)
        assert dist.group.WORLD is not None
        self.unit_order = self.unit_order or UnitOrder(dist.group.WORLD)
        self.unit_order.watch(module)

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        """Choose the dim to shard, None for rows: of 8 experts on 64 ranks, 8 ranks would hold one and 56 none."""
        num_ranks = self.shard_mesh.shape[-1]
        if parameter.dim() < 3 or parameter.shape[0] % num_ranks == 0:
            return None
        return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % num_ranks == 0), None)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's shards on their device: the writer copies them to the host."""
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return this rank's shards of the optimizer's state on their device; none before the optimizer's first step.

        torch would make a step with zeros for it, which counts.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)
        assert self.model is not None
        has_stepped, gathered = bool(optimizer.state), not self._save_distributed_checkpoint
        state = super().optimizer_state(optimizer) if gathered else get_optimizer_state_dict(self.model, optimizer)
        if has_stepped:
            return state
        optimizer.state.clear()
        return {**state, "state": {}}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint, which takes its name once it is complete; during training return before that.

        Raises:
            ValueError: the address of a bucket, or state of callbacks, loops or data that differs between ranks.
            RuntimeError: this checkpoint or the previous one, if that was still being written, failed; on every rank.
        """
        check_local(filepath)
        check_same_state(checkpoint, self._trainer)
        if not self._save_distributed_checkpoint or storage_options is not None:  # Lightning refuses storage_options
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        optimizers = enumerate(checkpoint.pop("optimizer_states", []))
        state = {"state_dict": checkpoint.pop("state_dict"), **{f"optimizer_{i}": each for i, each in optimizers}}
        self._writer = self._writer or CheckpointWriter(self._timeout)
        self._writer.save(state, checkpoint, Path(self.broadcast(filepath)))
        if not (self._async_checkpoint and self._training):
            self.finish_checkpoints()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of this model, on all ranks or none, if it is undamaged and holds only data.

        A damaged checkpoint is replaced by the newest undamaged one of those that a callback names in
        `older_checkpoints(path)`, as the recipes' automatic resume does.

        Args:
            weights_only: applies to a single file; a directory is always read as data only.
        Raises:
            ValueError: a file is damaged or would run code, the checkpoint is another model's and the module's
                strict_loading is True, or its optimizer has other parameter groups.
        """
        path = Path(self.broadcast(checkpoint_path))
        weights_only = True if weights_only is None else weights_only
        if path.is_dir():
            callbacks: list[Any] = [x for x in self._trainer.callbacks if hasattr(x, "older_checkpoints")]
            older = callbacks[0].older_checkpoints(path) if callbacks and self.is_global_zero else []
            path = first_undamaged([path, *self.broadcast(older)], self._start_from)
        checkpoint = Folder(path) if path.is_dir() else SingleFile(path, weights_only)
        assert self.lightning_module is not None and self.model is not None
        module = self.lightning_module if self.lightning_module.strict_loading else None
        check_fits(checkpoint, module, len(self.optimizers))
        optimizers = self.optimizers
        self._optimizers: list[torch.optim.Optimizer] = []  # Lightning would load them by the order of parameters
        rest = super().load_checkpoint(path, weights_only=weights_only)
        self._optimizers = optimizers
        for i, optimizer in enumerate(optimizers):
            checkpoint.load_optimizer(i, self.model, optimizer)
        return rest

    def _start_from(self, path: Path) -> None:
        """Let the trainer continue from another checkpoint, which ModelCheckpoint then does not delete."""
        self._trainer._checkpoint_connector._ckpt_path = path

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint once the checkpoints that replace it are complete."""
        if self._writer is None:
            return super().remove_checkpoint(filepath)
        self._writer.remove(Path(filepath))

    def finish_checkpoints(self) -> None:
        """Wait until all requested checkpoints are on disk; all ranks call this together.

        Raises:
            RuntimeError: a checkpoint was not written; on every rank.
        """
        if self._writer is None:
            return
        try:
            self._writer.finish()
        finally:
            if not self._training:
                self._close_writer()

    def on_train_start(self) -> None:
        """Let saves return early from now on: the next save, or the end of training, waits for them."""
        super().on_train_start()
        self._training = True

    def on_train_end(self) -> None:
        """Wait for the last checkpoint, which callbacks have requested by now."""
        self._training = False
        self.finish_checkpoints()

    def teardown(self) -> None:
        """Wait for a checkpoint that is being written, also after an error."""
        self._training = False
        self._close_writer()
        super().teardown()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        failed = writer.close() if writer is not None else None
        if failed:
            rank_zero_warn(f"A checkpoint was not written: {failed}")

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the 2-norm of the whole model's gradient, equal on every rank, fp32 (fp64 for fp64).

        One all-reduce for all parameters, which `shard_parameters` must have sharded.
        """
        shards = [cast(DTensor, p.grad).to_local() for p in parameters if p.grad is not None]
        dtype = torch.promote_types(shards[0].dtype, torch.float32) if shards else torch.float32
        total = torch.zeros((), dtype=dtype, device=self.root_device)
        for shard in shards:
            total += torch.linalg.vector_norm(shard, dtype=dtype).square()
        dist.all_reduce(total, group=self.shard_mesh.get_group(self.shard_mesh.ndim - 1))
        return total.sqrt()


def _reshard_without_backward(module: nn.Module, *_: Any) -> None:
    """Reshard the parameters of an outermost module after a forward without gradients.

    FSDP2 keeps them gathered for the backward. An evaluation has none: callbacks would see plain tensors, and the
    whole embedding and head would stay in memory.
    """
    if not torch.is_grad_enabled():
        cast(FSDPModule, module).reshard()


@contextmanager
def check_ties(module: nn.Module) -> Iterator[None]:
    """Raise ValueError if tied parameters are no longer tied at the end: FSDP2 separates them in different units."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    yield
    for first, *others in names.values():
        for other in others:
            if module.get_parameter(other) is not module.get_parameter(first):
                raise ValueError(
                    f"{other} must be in the same unit as {first}, to which it is tied, got two units, which would "
                    "shard and train separate copies; put both into one module with a forward, which is sharded as a "
                    "whole, or do not tie them."
                )


def mixed_precision_policy(precision: str) -> MixedPrecisionPolicy:
    """Return the dtypes in which FSDP2 gathers and reduces, for one of Lightning's precisions.

    Numerics: gradients are summed over ranks in fp32, also if parameters are bf16.
    """
    if precision == "bf16-mixed":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if precision in ("bf16-true", "16-true"):
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


class OneProcess:
    """Mesh coordinates of the only rank of Lightning's default strategy: a data x context mesh of 1 x 1."""

    cp_group = None
    cp_size = dp_size = 1
    dp_rank = 0
    layout = "zigzag"


def ranks_of(trainer: Any) -> Any:
    """Return the trainer's strategy, or `OneProcess` for Lightning's default one, which has no mesh.

    Raises:
        ValueError: a strategy of several processes without a context axis.
    """
    return OneProcess() if isinstance(trainer.strategy, SingleDeviceStrategy) else strategy_of(trainer)


def strategy_of(trainer: Any) -> Any:
    """Return the trainer's strategy after checking that it has a context axis.

    Raises:
        ValueError: a strategy without one.
    """
    if not isinstance(trainer.strategy, DataContextRanks):
        raise ValueError(
            f"strategy must be a ContextParallelStrategy, got {type(trainer.strategy).__name__}; "
            "pass Trainer(strategy=ContextParallelStrategy(context_parallel_size=...))."
        )
    return trainer.strategy
