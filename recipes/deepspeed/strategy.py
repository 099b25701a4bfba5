"""Lightning's DeepSpeed strategy over a data x context mesh, on CUDA and on CPUs."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

try:
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import GradClipAlgorithmType
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ModuleNotFoundError as missing:
    raise ImportError(
        f"lightning must be installed for recipes.deepspeed.strategy, got {missing}; "
        "pip install 'ringflash[deepspeed,lightning]'."
    ) from missing

from ringflash.comm.agreement import agree
from ringflash.comm.mesh import DataContextRanks, Size, data_context_mesh, mesh_sizes, set_group_timeouts
from ringflash.deepspeed.engine import initialize, skip_shared_memory_op
from ringflash.deepspeed.refusals import check, parse, read
from ringflash.lightning.checkpoints import COMPLETE, check_local, check_same_state, note_time
from ringflash.lightning.stop import add_stop_on_signal
from ringflash.lightning.trainer_checks import TrainerChecks
from ringflash.sequence.layout import granularity

_BESIDE_A_CONFIG = {
    "accelerator", "parallel_devices", "cluster_environment", "precision_plugin", "process_group_backend", "timeout",
    "logging_level", "load_full_weights", "exclude_frozen_parameters", "loss_scale", "initial_scale_power",
    "loss_scale_window", "hysteresis", "min_loss_scale",
}  # fmt: skip
_AVERAGE = "average"  # key for averaged weights in a checkpoint: DeepSpeed drops Lightning's own key, state_dict


class DeepSpeedContextParallelStrategy(TrainerChecks, DataContextRanks, DeepSpeedStrategy):
    """ZeRO over all ranks, with each sequence sharded over `context_parallel_size` of them.

    Modules use it like `ringflash.lightning.ContextParallelStrategy`: the sampler splits the data over the data axis
    only, and gradients are averaged over all ranks, so that the loss needs the scale of `ringflash.loss`. DeepSpeed
    clips gradients in its step, by the trainer's gradient_clip_val; their norm is logged as grad_norm.

    Every rank builds the whole model before stage 3 shards it: with `deepspeed.zero.Init` a Hugging Face model would
    lose its initial values, and its parameters their dims, which tell matrices from vectors.

    Args:
        context_parallel_size: ranks that share one sequence; "auto" is all that data_parallel_size leaves.
        data_parallel_size: number of sequences processed in parallel; "auto" is all that is left.
        layout: which tokens of a sequence a rank holds: "zigzag", or for packed documents "balanced" (docs/masks.md).
        config: DeepSpeed config, a dictionary or the path of a JSON file; default one built from the options.
        options: further arguments of DeepSpeedStrategy, such as stage.
    Raises:
        ValueError: a config with gradient_clipping or that `check` refuses; a config together with options that build
            one; an unknown layout; sizes that do not multiply to the number of ranks. Before any communication.
    """

    handles_gradient_clipping = True

    def __init__(
        self,
        context_parallel_size: Size = "auto",
        data_parallel_size: Size = "auto",
        layout: str = "zigzag",
        config: str | dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _check_options(config, options)
        super().__init__(config=None if config is None else read(config), **options)
        _check_config(self.config)
        granularity(1, layout)  # raises for an unknown layout
        self.layout = layout
        self._context_parallel_size, self._data_parallel_size = context_parallel_size, data_parallel_size
        self._device_mesh: DeviceMesh | None = None
        self._local_norm: torch.Tensor | None = None

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: DeepSpeed steps when Lightning tells it to, also after the last batch of an epoch."""
        return False

    @property
    def device_mesh(self) -> DeviceMesh:  # type: ignore[override]
        """Mesh of all ranks, data x context."""
        if self._device_mesh is None:
            raise RuntimeError(
                "device_mesh must be read after the processes have joined, got a strategy without a mesh; "
                "read it in configure_model or later."
            )
        return self._device_mesh

    @property
    def root_device(self) -> torch.device:
        """Device of this rank, with an index even on the CPU, because DeepSpeed requires one."""
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Size and rank of the data axis: ranks of one ring draw the same sequences."""
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    def setup_environment(self) -> None:
        """Check the trainer, sizes and device, join the process group, and lay out the mesh."""
        self.check_trainer(copies_module=not self.zero_stage_3)
        add_stop_on_signal(self._trainer)
        _check_precision(self.config, self.precision_plugin.precision)
        sizes = mesh_sizes(self._data_parallel_size, self._context_parallel_size, self.num_nodes * self.num_processes)
        _check_device(self.root_device.type)
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_environment()
        else:  # past DeepSpeedStrategy's refusal of CPUs
            super(DeepSpeedStrategy, self).setup_environment()
        if self._device_mesh is None:
            self._device_mesh = data_context_mesh(self.root_device.type, *sizes)
            set_group_timeouts(self._device_mesh, self._timeout)

    def setup_distributed(self) -> None:
        """Join the process group."""
        skip_shared_memory_op()
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_distributed()
        else:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does; gradients are clipped in DeepSpeed's step."""
        super().setup(trainer)
        self.precision_plugin.clip_gradients = self._clip_in_step  # type: ignore[method-assign]

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Leave parameters whole until DeepSpeed shards them."""
        self._init_config_if_needed()
        yield

    def shard_parameters(
        self, module: nn.Module, layers: Iterable[nn.Module], *, in_fp32: Iterable[nn.Module] = ()
    ) -> None:
        """Do nothing: DeepSpeed shards the whole LightningModule, in one dtype, once it has the optimizer."""

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **keywords: Any) -> None:
        """Run DeepSpeed's backward without its division by the batches of a step: Lightning has divided already."""
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization and self.deepspeed_engine.managed_gradient_accumulation():
            last = not self.lightning_module.trainer.fit_loop._should_accumulate()
            self.deepspeed_engine.set_gradient_accumulation_boundary(last)
        super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **keywords)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do nothing: `backward` tells DeepSpeed if the step ends with it."""
        yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save as DeepSpeed does, then mark the checkpoint as complete, which `--ckpt_path auto` requires."""
        check_local(filepath)
        check_same_state(checkpoint, self._trainer)
        if "averaging_state" in checkpoint:  # WeightAveraging has put its average in place of the weights
            checkpoint = {**checkpoint, _AVERAGE: checkpoint["state_dict"]}
        mark = Path(self.broadcast(filepath), COMPLETE)
        if self.is_global_zero:
            mark.unlink(missing_ok=True)  # mark of a checkpoint of the same name, which is overwritten
        super().save_checkpoint(checkpoint, filepath, storage_options)  # ranks wait for each other at both ends
        if self.is_global_zero:
            note_time(mark.parent)
            mark.touch()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **keywords: Any) -> Any:
        """Run DeepSpeed's step, and log the norm of the whole gradient before clipping as grad_norm."""

        def measured() -> Any:
            result = closure()
            self._local_norm = _replicated_norm(self.deepspeed_engine)
            return result

        output = super().optimizer_step(optimizer, measured, model, **keywords)
        norm = self.deepspeed_engine.get_global_grad_norm() if self._local_norm is None else self._local_norm
        if norm is not None:
            self.lightning_module.log("grad_norm", torch.as_tensor(norm, dtype=torch.float32))
        self._set_clipping(self.config["gradient_clipping"])
        return output

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load as DeepSpeed does, but keep this run's gradient_clip_val.

        Evaluations use averaged weights (WeightAveraging) if the checkpoint has them, as with other strategies.

        Raises:
            ValueError: the checkpoint was written at another stage, or on a number of ranks that this run cannot read;
                on every rank.
        """
        continued = self._trainer.state.fn == TrainerFn.FITTING
        writes_optimizer = self.deepspeed_engine.save_zero_checkpoint if continued else None
        path = Path(checkpoint_path)
        error = _stage_error(path, self.zero_stage_3, writes_optimizer)
        if error is None and not self.deepspeed_engine.load_universal_checkpoint():
            error = _num_ranks_error(path, self.world_size, continued)
        agree(dist.group.WORLD, {"ckpt_path": str(checkpoint_path)}, error)
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._set_clipping(self.config["gradient_clipping"])
        if _AVERAGE in checkpoint:
            checkpoint["state_dict"] = checkpoint.pop(_AVERAGE)
            if not continued:
                assert self.lightning_module is not None
                self.lightning_module.load_state_dict(checkpoint["state_dict"])
        return checkpoint

    def _clip_in_step(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM
    ) -> None:
        """Set the norm by which the engine clips in its next step; replaces the precision plugin's method, a no-op.

        Raises:
            NotImplementedError: clipping by value.
        """
        if clip_val and gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise NotImplementedError(
                f"gradient_clip_algorithm must be 'norm' with DeepSpeed, got {gradient_clip_algorithm}; clip by norm."
            )
        self._set_clipping(clip_val)

    def _set_clipping(self, norm: float) -> None:
        engine = self.deepspeed_engine
        engine._config.gradient_clipping = norm
        if hasattr(engine.optimizer, "clip_grad"):
            engine.optimizer.clip_grad = norm

    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        """Build the engine from a model that is not sharded: optimizers tell matrices from vectors by their dims."""
        if any(hasattr(p, "ds_id") for p in model.parameters()):
            raise ValueError(
                "model must be whole before stage 3 trains it, got one that an earlier validate() or fit() has "
                "sharded; call fit() first, or give it a new module."
            )
        if "optimizer" in self.config and is_overridden("configure_optimizers", model):
            raise ValueError(
                "optimizer must not be in the config of a module that has configure_optimizers, got "
                f"{self.config['optimizer']}, which Lightning would take, and ignore the module's; set the module's "
                "(in recipes: model.learning_rate, weight_decay and betas)."
            )
        stage = (self.config.get("zero_optimization") or {}).get("stage", 0)
        if stage and not model.automatic_optimization:  # a manual step may follow any number of backwards
            self.config.setdefault("managed_gradient_accumulation", False)
            if stage == 1:
                self.config["zero_optimization"] = {**self.config["zero_optimization"], "overlap_comm": False}
        super()._initialize_deepspeed_train(model)

    def _auto_select_batch_size(self) -> int:
        """Return Lightning's choice, or 1 if the loader has no batch size; only DeepSpeed's speed figures use it."""
        try:
            return super()._auto_select_batch_size()
        except AttributeError:
            return 1

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """Build an engine without an optimizer; at stage 3 it can also read the checkpoints of trainings."""
        self.config.setdefault("zero_allow_untested_optimizer", True)  # Lightning wants it there
        super()._initialize_deepspeed_inference(model)
        if self.zero_stage_3:  # DeepSpeed 0.19.8 wants to make an optimizer's weights of those that it has read
            self.deepspeed_engine.optimizer._restore_from_bit16_weights = lambda: None

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        """Return the engine of `initialize`, and its optimizer."""
        engine, wrapped, _, _ = initialize(
            model=model, config=self.config, optimizer=optimizer, lr_scheduler=lr_scheduler,
            args=argparse.Namespace(device_rank=self.root_device.index), dist_init_required=False,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
        )  # fmt: skip
        return engine, wrapped


def _check_options(config: Any, options: dict[str, Any]) -> None:
    """Refuse options that Lightning would ignore, because it builds a config from them only if none is given."""
    parameters = inspect.signature(DeepSpeedStrategy).parameters
    for name, value in options.items():
        if name in parameters and value != parameters[name].default:  # a command line passes defaults, too
            if config is not None and name not in _BESIDE_A_CONFIG:
                raise ValueError(f"{name} must not be given together with config, got {value}; set it in the config.")
            if name == "remote_device":
                raise ValueError(f"remote_device must be None, got {value}; every rank builds the whole model.")


def _check_config(config: dict[str, Any]) -> None:
    """Check the config before Lightning adds its own keys."""
    if "gradient_clipping" in config:
        raise ValueError(
            f"gradient_clipping must not be in the config, got {config['gradient_clipping']}; "
            "set Trainer(gradient_clip_val=...), which DeepSpeed then clips by."
        )
    check(config, {})


def _check_precision(config: dict[str, Any], precision: str) -> None:
    """Refuse a config that enables another precision than the trainer's: DeepSpeed would train in it."""
    content = parse(config)
    for name, number, enabled in (
        ("bf16", "bf16", content.bfloat16_config.enabled),
        ("bfloat16", "bf16", content.bfloat16_config.enabled),
        ("fp16", "16", content.float16_config.enabled),
    ):
        if name in config and enabled != (precision.split("-")[0] == number):
            raise ValueError(
                f"precision must be that of the config, got {precision} and {name}.enabled {enabled}; leave {name} out "
                f"of the config, and set Trainer(precision=...), of which '{number}-mixed' enables it."
            )
    if content.torch_autocast_enabled:
        raise ValueError(
            f"precision must be that of the config, got {precision} and torch_autocast.enabled true; leave "
            "torch_autocast out of the config, and set Trainer(precision=...)."
        )


def _stage_error(path: Path, shards_model: bool, writes_optimizer: bool | None) -> ValueError | None:
    """Return the error for a checkpoint whose parts are those of another stage; DeepSpeed's own is unclear.

    Args:
        writes_optimizer: True if this run's checkpoints have optimizer parts; None if that does not matter.
    """
    names = [file.name for file in (path / "checkpoint").glob("*_states.pt")]
    sharded = any(name.startswith("zero_pp_rank_") and name.endswith("_model_states.pt") for name in names)
    parts = any(name.endswith("_optim_states.pt") for name in names)
    if not names or (sharded == shards_model and writes_optimizer in (None, parts)):
        return None
    found = "3" if sharded else "1 or 2" if parts else "0"
    return ValueError(
        f"ckpt_path must be a checkpoint of this run's ZeRO stage, got {path}, which has the parts of stage {found}; "
        "train at that stage, or begin with its weights (for stages 1 to 3 there is zero_to_fp32.py in it)."
    )


def _num_ranks_error(path: Path, num_ranks: int, continued: bool) -> ValueError | None:
    """Return the error for a checkpoint of another number of ranks; at stage 3 only some ranks would find no part.

    Args:
        continued: True if the optimizer is restored, whose parts belong to one rank each; False for weights only.
    """
    written = len(list((path / "checkpoint").glob("*_optim_states.pt")))
    whole = (path / "checkpoint" / "mp_rank_00_model_states.pt").is_file()
    if not written or num_ranks == written or (not continued and (whole or num_ranks < written)):
        return None
    return ValueError(
        f"ckpt_path must be a checkpoint of {num_ranks} ranks, got {path}, which {written} have written; "
        + (f"start {written} ranks, or make a universal one by deepspeed.checkpoint.ds_to_universal, with checkpoint."
           "load_universal in the config." if continued else f"start at most {written} ranks.")
    )  # fmt: skip


def _check_device(device_type: str) -> None:
    chosen = get_accelerator().device_name()
    if chosen.split(":")[0] != device_type:
        raise ValueError(
            f"DeepSpeed's device must be the trainer's ({device_type}), got {chosen}; "
            f"set DS_ACCELERATOR={device_type} before anything imports deepspeed."
        )


def _replicated_norm(engine: Any) -> torch.Tensor | None:
    """Return the 2-norm of gradients that every rank holds in full (stage 0 without a wrapped optimizer), or None."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    if engine.zero_optimization() or hasattr(engine.optimizer, "_global_grad_norm") or not gradients:
        return None
    return torch.nn.utils.get_total_norm(gradients)
