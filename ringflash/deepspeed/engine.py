"""A DeepSpeed engine that averages gradients over all ranks of a data x context mesh."""

from __future__ import annotations

import json
import zlib
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringflash.comm.agreement import MESSAGE_BYTES, raising_together
from ringflash.comm.mesh import Size, data_context_mesh, mesh_sizes
from ringflash.deepspeed.parameter_use import watch_parameters
from ringflash.deepspeed.refusals import Config, check, read


def context_mesh(context_parallel_size: Size = "auto", data_parallel_size: Size = "auto") -> DeviceMesh:
    """Return the mesh of axes "data_parallel" and "context_parallel", on the device that DeepSpeed has chosen.

    Joins the process group if the caller has not: NCCL on GPUs, gloo on CPUs.

    Args:
        context_parallel_size: ranks that share one sequence; "auto" is all that data_parallel_size leaves.
        data_parallel_size: number of sequences processed in parallel; "auto" is all that is left.
    Raises:
        ValueError: sizes that do not multiply to the number of ranks.
        RuntimeError: the process was not started by a launcher.
    """
    skip_shared_memory_op()
    device_type = get_accelerator().device_name()
    if not dist.is_initialized():
        _join("gloo" if device_type == "cpu" else get_accelerator().communication_backend_name())
    sizes = mesh_sizes(data_parallel_size, context_parallel_size, dist.get_world_size())
    return data_context_mesh(device_type, *sizes)


def _join(backend: str) -> None:
    """Call `deepspeed.init_distributed`, which needs the environment variables of a launcher, or MPI.

    Raises:
        RuntimeError: there is neither.
    """
    try:
        deepspeed.init_distributed(backend)
    except ModuleNotFoundError as missing:
        if missing.name != "mpi4py":
            raise
        raise RuntimeError(
            "the script must be started by a launcher, which tells each process its rank, got one process without RANK "
            "and WORLD_SIZE; start it by torchrun --nproc-per-node <GPUs> <script>."
        ) from missing


def skip_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce for CPU processes, which only inference calls.

    Otherwise joining the process group would compile it, which takes a minute the first time and fails without a C++
    compiler. No effect on GPUs.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def initialize(*, model: nn.Module, config: Config, **keywords: Any) -> tuple[Any, Any, Any, Any]:
    """Call `deepspeed.initialize` for a loss scaled by `ringflash.loss`; all ranks call this together.

    Args:
        model: a module whose forward computes the loss: stage 3 gathers parameters there.
        config: DeepSpeed config, a dictionary or the path of a JSON file, equal on all ranks. Without
            gradient_clipping in it nothing is clipped (DeepSpeed itself would clip at 1.0).
        keywords: further arguments of `deepspeed.initialize`: optimizer, model_parameters, lr_scheduler, ...
    Returns:
        engine, optimizer, dataloader, lr_scheduler: as `deepspeed.initialize`.
    Raises:
        ValueError: settings under which gradients are not averaged over all ranks, or ranks with different configs;
            before the engine is built, on every rank (if the processes have joined, as by `context_mesh`).
        NotImplementedError: tensor or expert parallelism, or fp16 at stage 0.
        RuntimeError: the engine nevertheless averages over other ranks.
        ValueError: later, as `watch_parameters`.
    """
    signature: dict[str, object] = {}
    with raising_together(dist.group.WORLD, signature):
        content = read(config)
        check(content, keywords)
        signature |= _signature(content)
    skip_shared_memory_op()
    made = deepspeed.initialize(model=model, config={"gradient_clipping": 0.0, **content}, **keywords)
    put_on_ring(made[0])
    return made


def put_on_ring(engine: Any) -> None:
    """Make a new engine fit to train over a ring, or refuse it; all ranks call this together."""
    _check_engine(engine)
    watch_parameters(engine)
    _separate_backwards(engine)


def _signature(config: dict[str, Any]) -> dict[str, object]:
    """Signature that ranks compare: the keys and values of the config, or a checksum if it is long."""
    text = json.dumps({"keys": sorted(config), **config}, sort_keys=True, default=str)
    if len(text) > MESSAGE_BYTES // 2:
        return {"config": f"{len(text)} characters, checksum {zlib.crc32(text.encode())}"}
    return json.loads(text)


def _separate_backwards(engine: Any) -> None:
    """Make each backward of an engine independent of the previous one, or refuse it.

    Unless a forward ran in between, DeepSpeed 0.19.8 takes a backward for a continuation of the previous one, and at
    stage 3 overwrites the gradients of the first. At stages 1 and 2, a backward that it takes for the last one of a
    step replaces the gradients of the ones before.
    """
    backward, prologue = engine.backward, engine._backward_prologue
    step_of_last = -1  # number of the engine's step that has had its last backward

    def check() -> None:
        """Raise ValueError for a second backward in the last batch of a step, at ZeRO stages 1 and 2."""
        nonlocal step_of_last
        is_last = engine.managed_gradient_accumulation() and engine.is_gradient_accumulation_boundary()
        if not is_last or engine.zero_optimization_stage() not in (1, 2):
            return
        if engine.micro_steps == step_of_last:
            raise ValueError(
                "at ZeRO stages 1 and 2 the last batch of a step must have one backward, got a second one before "
                "engine.step, whose gradients would replace those of the first; set "
                '"managed_gradient_accumulation": false in the config (at stage 1 also "overlap_comm": false). Every '
                "engine.step is then a step of the optimizer, for all backwards before it."
            )
        step_of_last = engine.micro_steps

    def separate_backward(*args: Any, **keywords: Any) -> Any:
        check()
        if isinstance(engine.optimizer, ZeROOptimizer):
            engine.optimizer.clear_backward_seen_flag()
        return backward(*args, **keywords)

    def separate_prologue() -> None:
        if not engine._running_engine_backward:  # loss.backward()
            check()
        prologue()

    engine.backward, engine._backward_prologue = separate_backward, separate_prologue


def _check_engine(engine: Any) -> None:
    """Check that an engine averages over all ranks: DeepSpeed reuses the groups of an earlier engine."""
    averaged, world_size = engine.seq_dp_world_size, dist.get_world_size()
    if averaged != world_size or engine.sequence_parallel_size != 1:
        raise RuntimeError(
            f"the engine must average gradients over all {world_size} ranks, got {averaged} with "
            f"sequence_parallel_size {engine.sequence_parallel_size}; start a process in which no earlier "
            "engine was given an mpu or a mesh."
        )
