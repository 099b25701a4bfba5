"""Registration of the backend with accelerate and transformers' Trainer, which have no plug-in point for one.

Ranks that share a sequence read one batch: the loader counts data-parallel ranks only. Each of them returns the loss of
the whole sequence, which Trainer scales as it does for tensor-parallel ranks. accelerate uses `cp_enabled` for torch's
own backend, which requires FSDP and drops masks: it is False, except while the device mesh is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch.distributed as dist

NAME = "ringflash"
_REMEDY = "pip install 'ringflash[accelerate]'"


def register(*, share_prefixes: bool | int = False) -> None:
    """Make `ParallelismConfig(cp_backend="ringflash", cp_size=N)` work, in an Accelerator and in transformers' Trainer.

    Call it once, before the configuration is made. Models that are then prepared run over a ring of the `cp` ranks:
    their forward takes whole batches, and returns the loss of the whole sequence on each of them.

    Args:
        share_prefixes: TRL's GRPO, RLOO and DPO compute a prompt once for all its answers in a batch, and any other
            common beginning of sequences, with the same result (`ringflash.share_prefixes`); a number is the least
            tokens to share. It needs attention in all layers.
    Raises:
        RuntimeError: accelerate or transformers is missing or too old; the backend is registered already.
    """
    try:
        import accelerate.accelerator
        from accelerate import Accelerator, ParallelismConfig
        from accelerate.scheduler import AcceleratedScheduler
        from transformers import Trainer, TrainingArguments
    except ImportError as cause:
        raise RuntimeError(
            f"accelerate 1.15 and transformers 5.17, or later, must be installed, got {cause}; {_REMEDY}."
        ) from cause
    if isinstance(ParallelismConfig.cp_enabled, _CpEnabled):
        raise RuntimeError("register must be called once in a process, got a second call; remove that call.")
    wrappers: list[tuple[Any, Callable[..., Any]]] = [
        (ParallelismConfig, __post_init__), (ParallelismConfig, build_device_mesh),
        (ParallelismConfig, _validate_accelerator), (Accelerator, prepare), (Accelerator, prepare_model),
        (Accelerator, backward), (Accelerator, gather_for_metrics),
        (accelerate.accelerator, prepare_data_loader), (AcceleratedScheduler, step),
        (Trainer, get_tp_size), (Trainer, get_cp_size), (Trainer, _get_num_items_in_batch), (Trainer, compute_loss),
        (Trainer, prediction_step), (Trainer, create_accelerator_and_postprocess), (Trainer, evaluation_loop),
        (Trainer, floating_point_ops), (TrainingArguments, _post_init_arguments),
    ]  # fmt: skip
    if hasattr(Trainer, _track_num_input_tokens.__name__):  # some releases count within the training loop
        wrappers.append((Trainer, _track_num_input_tokens))
    missing = [f.__name__ for owner, f in wrappers if not hasattr(owner, f.__name__)]
    if missing:
        raise RuntimeError(f"accelerate and transformers must have {missing}, got releases without them; {_REMEDY}.")
    from ringflash.accelerate.forward import RingForward  # imports much, and needs transformers

    RingForward.min_shared = int(share_prefixes)
    cast(Any, ParallelismConfig).cp_enabled = _CpEnabled()
    for owner, wrapper in wrappers:
        _wrap(owner, wrapper)


def _wrap(owner: Any, wrapper: Callable[..., Any]) -> None:
    """Replace owner's function of the wrapper's name by wrapper(original, ...)."""
    original = getattr(owner, wrapper.__name__)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, wrapper.__name__, wrapped)


class _CpEnabled(property):
    """ParallelismConfig.cp_enabled: whether torch's backend is in use."""

    def __init__(self) -> None:
        super().__init__(lambda config: config.cp_size > 1 and config.cp_backend != NAME)


def ring_size(config: Any) -> int:
    """Return the cp_size of a ParallelismConfig with this backend, and 1 for any other or None."""
    return config.cp_size if config is not None and config.cp_backend == NAME else 1


@contextmanager
def _with_cp_axis(config: Any) -> Iterator[None]:
    config.cp_backend = "torch"
    try:
        yield
    finally:
        config.cp_backend = NAME


# ParallelismConfig


def __post_init__(original: Callable[..., Any], self: Any) -> None:
    """Check the sizes; a launcher's environment may give backend and size."""
    if (self.cp_backend or os.environ.get("PARALLELISM_CONFIG_CP_BACKEND")) != NAME:
        return original(self)
    size = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", 1)) if self.cp_size is None else self.cp_size
    if size < 1 or self.cp_handler is not None:
        raise ValueError(
            f"cp_size must be 1 or more and cp_handler None with cp_backend={NAME!r}, got {size} and "
            f"{self.cp_handler!r}; leave cp_handler out."
        )
    self.cp_backend, self.cp_size = "torch", 1  # accelerate refuses cp with dp_replicate and without dp_shard
    original(self)
    self.cp_backend = NAME
    self._set_size("cp", size)
    if size > 1 and (self.tp_size > 1 or self.sp_size > 1):
        raise NotImplementedError(
            f"tp_size and sp_size must be 1 with cp_backend={NAME!r}, got {self.tp_size} and {self.sp_size}; leave "
            "them out."
        )


def build_device_mesh(original: Callable[..., Any], self: Any, device_type: str) -> Any:
    """Build the mesh with an axis "cp"."""
    if ring_size(self) == 1:
        return original(self, device_type)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if self.total_size != processes:
        raise ValueError(
            f"dp_replicate_size * dp_shard_size * cp_size must be the number of processes ({processes}), got "
            f"{self.dp_replicate_size} * {self.dp_shard_size} * {self.cp_size}; start a multiple of cp_size "
            "processes (accelerate launch --multi_gpu --num_processes N, on CPUs too), and set dp_replicate_size (DDP, "
            "ZeRO) or dp_shard_size (FSDP) to the number of rings."
        )
    with _with_cp_axis(self):
        return original(self, device_type)


def _validate_accelerator(original: Callable[..., Any], self: Any, accelerator: Any) -> None:
    """Accept CPUs and DDP, which accelerate's own check does not; the sizes are checked by `build_device_mesh`."""
    if ring_size(self) == 1:
        original(self, accelerator)


# Accelerator


def prepare(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """Put models on the ring, before they are sharded; check that ZeRO averages over all ranks."""
    import torch

    if ring_size(self.parallelism_config) == 1:
        return original(self, *args, **options)
    for x in args:
        if isinstance(x, torch.nn.Module) and not getattr(x, "_is_accelerate_prepared", False):
            _put_on_ring(x)
    before = getattr(self, "deepspeed_engine_wrapped", None)
    prepared = original(self, *args, **options)
    if getattr(self, "deepspeed_engine_wrapped", None) is not before:  # loaders are prepared later
        from ringflash.deepspeed import engine, refusals

        # accelerate counts every rank as a sample in train_batch_size, as DeepSpeed does
        config = {name: x for name, x in self.deepspeed_config.items() if name != "train_batch_size"}
        refusals.check(config, {})
        engine.put_on_ring(self.deepspeed_engine_wrapped.engine)
    return prepared


def prepare_model(
    original: Callable[..., Any], self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
) -> Any:
    """Put the model on the ring; models without a language model's head may be evaluated whole on each rank.

    A model prepared for an evaluation may be trained later. By then accelerate has marked it as prepared, and would not
    wrap it in DDP: each rank would step by the gradient of its own shard.
    """
    if ring_size(self.parallelism_config) == 1:
        return original(self, model, device_placement, evaluation_mode)
    if (hasattr(model, "lm_head") or not evaluation_mode) and not getattr(model, "_is_accelerate_prepared", False):
        _put_on_ring(model)
    prepared = original(self, model, device_placement, evaluation_mode)
    if evaluation_mode:
        prepared._is_accelerate_prepared = False
    return prepared


def _put_on_ring(model: Any) -> None:
    """Put a model on the ring of accelerate's mesh, if that has one of several ranks."""
    from accelerate.state import AcceleratorState

    from ringflash.accelerate.forward import put_on_ring

    state: Any = AcceleratorState()
    if ring_size(state.parallelism_config) > 1:
        put_on_ring(model, state.device_mesh["cp"].get_group())


def prepare_data_loader(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Give the ranks of a ring the same batches, under DDP, FSDP and DeepSpeed alike.

    Trainer seeds the workers of a loader by the process, but workers on the ranks of a ring must draw alike.
    """
    from accelerate.state import AcceleratorState

    if (size := ring_size(AcceleratorState().parallelism_config)) == 1:
        return original(*args, **options)
    if options.get("dispatch_batches"):
        raise NotImplementedError(
            f"dispatch_batches must be False with cp_backend={NAME!r}, got True, which splits a batch over all ranks; "
            "leave it out."
        )
    options["num_processes"] //= size
    options["process_index"] //= size
    loader = args[0] if args else options["dataloader"]
    if type(getattr(loader, "batch_sampler", None)).__name__ == "BatchRebalanceSampler":
        raise NotImplementedError(
            f"train_sampling_strategy must be 'random' or 'group_by_length' with cp_backend={NAME!r}, got "
            "'batch_rebalance', which gives different batches to the ranks of a ring; use one of these."
        )
    seed = getattr(loader, "worker_init_fn", None)
    if isinstance(seed, partial) and "rank" in seed.keywords:
        loader.worker_init_fn = partial(seed, rank=options["process_index"])
    return original(*args, **options | {"dispatch_batches": False, "torch_device_mesh": None})


def backward(original: Callable[..., Any], self: Any, loss: Any, **options: Any) -> Any:
    """Compare a Trainer's loss with its forward's, once: a subclass may have another compute_loss."""
    if getattr(self, "_ringflash_checks_loss", False):
        from ringflash.accelerate.forward import compare_loss

        size = ring_size(self.parallelism_config)
        self._ringflash_checks_loss = not compare_loss(loss, self.num_processes, size)
    return original(self, loss, **options)


def gather_for_metrics(
    original: Callable[..., Any], self: Any, input_data: Any, use_gather_object: bool = False
) -> Any:
    """Gather from one rank of each ring, since all of its ranks have the same values."""
    if ring_size(self.parallelism_config) == 1:
        return original(self, input_data, use_gather_object)
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda x: x, input_data, error_on_other_type=True)
    except TypeError:
        use_gather_object = True
    if use_gather_object:
        raise NotImplementedError(
            f"gather_for_metrics must be given tensors with cp_backend={NAME!r}, got objects or "
            "use_gather_object=True; pad tensors to one length."
        )
    self.gather = partial(_gather_rings, self, self.gather)
    try:
        return original(self, input_data)
    finally:
        del self.gather


def _gather_rings(accelerator: Any, gather: Callable[[Any], Any], mine: Any) -> Any:
    """Return the tensors of one rank of each ring, gathered by a function that gathers from all ranks."""
    from accelerate.utils import recursively_apply

    shape, size = (accelerator.num_processes, -1), ring_size(accelerator.parallelism_config)
    return recursively_apply(lambda x: x.unflatten(0, shape)[::size].flatten(0, 1), gather(mine))


def step(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> None:
    """Step a scheduler once per data-parallel rank, whose batches it counts."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    size = ring_size(state.parallelism_config)
    if size == 1 or self.split_batches or not self.step_with_optimizer or not self.gradient_state.sync_gradients:
        return original(self, *args, **options)
    self.split_batches = True  # the flag with which accelerate makes a single step
    try:
        for _ in range(state.num_processes // size):
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", self.scheduler._step_count):
                original(self, *args, **options)
    finally:
        self.split_batches = False


# TrainingArguments and Trainer


def _post_init_arguments(original: Callable[..., Any], self: Any) -> None:
    """Count ranks in a given generation_batch_size, as TRL divides it; `count_groups_of_rings` counts rings again."""
    original(self)
    if getattr(self, "generation_batch_size", None) is not None:
        self.generation_batch_size *= _ring_size_of(self)


_post_init_arguments.__name__ = "__post_init__"


def _ring_size_of(args: Any) -> int:
    """Return the size of the ring for a trainer's arguments, also if only the launcher's environment configures it."""
    from accelerate import ParallelismConfig
    from accelerate.utils import parse_flag_from_env

    config = args.parallelism_config
    if config is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        config = ParallelismConfig()
    return ring_size(config)


def create_accelerator_and_postprocess(original: Callable[..., Any], self: Any) -> None:
    """Create the accelerator; let TRL's trainers use the ring for all models that score, and count rings."""
    original(self)
    if (size := ring_size(self.accelerator.parallelism_config)) > 1:
        from ringflash.accelerate.trl import count_groups_of_rings, put_on_ring_with_head, share_rollouts

        self.accelerator._ringflash_checks_loss = True
        put_on_ring_with_head(type(self), _put_on_ring)
        if hasattr(self.args, "num_generations_eval"):
            count_groups_of_rings(self.args, size)
            if hasattr(self, "_calculate_rewards"):
                share_rollouts(self, self.accelerator.torch_device_mesh["cp"].get_group())


def get_tp_size(original: Callable[..., Any], self: Any) -> int:
    """Return the number of ranks with one batch and its whole loss: tensor-parallel ranks, or the ranks of a ring."""
    size = ring_size(self.accelerator.parallelism_config)
    return original(self) if size == 1 else size


def get_cp_size(original: Callable[..., Any], self: Any) -> int:
    """Return the number of ranks that return the loss of a shard only."""
    return original(self) // ring_size(self.accelerator.parallelism_config)


def compute_loss(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """Scale the loss as tensor-parallel ranks do, whose number transformers 5.17 takes from the configuration."""
    config = self.accelerator.parallelism_config
    if (size := ring_size(config)) == 1:
        return original(self, *args, **options)
    config.tp_size = size
    try:
        return original(self, *args, **options)
    finally:
        config.tp_size = 1


def _get_num_items_in_batch(original: Callable[..., Any], self: Any, *args: Any) -> Any:
    """Count the labels of this rank's batches if `average_tokens_across_devices` is off.

    Trainer would divide them by the ranks of the ring, which all have them; transformers 5.20 rounds the result down.
    """
    if ring_size(self.accelerator.parallelism_config) == 1 or self.args.average_tokens_across_devices:
        return original(self, *args)
    self.get_tp_size = lambda: 1
    try:
        return original(self, *args)
    finally:
        del self.get_tp_size


def floating_point_ops(original: Callable[..., Any], self: Any, inputs: Any) -> Any:
    """Return this rank's share of the operations of a batch: Trainer sums over all ranks."""
    return original(self, inputs) / ring_size(self.accelerator.parallelism_config)


def _track_num_input_tokens(original: Callable[..., Any], self: Any, inputs: Any) -> None:
    """Count the tokens of a ring's batch once: Trainer sums over all ranks."""
    before = self.state.num_input_tokens_seen
    original(self, inputs)
    counted = self.state.num_input_tokens_seen - before
    self.state.num_input_tokens_seen = before + counted // ring_size(self.accelerator.parallelism_config)


def evaluation_loop(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """Let Seq2SeqTrainer gather from one rank of each ring; it would have each answer once for every rank."""
    gather = self.accelerator.gather
    if ring_size(self.accelerator.parallelism_config) > 1 and self.gather_function == gather:
        self.gather_function = partial(_gather_rings, self.accelerator, gather)
    return original(self, *args, **options)


def prediction_step(
    original: Callable[..., Any],
    self: Any,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    *args: Any,
    **options: Any,
) -> Any:
    """Refuse evaluations that need logits."""
    if ring_size(self.accelerator.parallelism_config) > 1 and not prediction_loss_only:
        raise NotImplementedError(
            f"compute_metrics and predict must be left out with cp_backend={NAME!r}, got an evaluation that asks for "
            "logits, which never exist for a whole sequence; set prediction_loss_only=True, and use "
            "ringflash.log_probs."
        )
    return original(self, model, inputs, prediction_loss_only, *args, **options)
