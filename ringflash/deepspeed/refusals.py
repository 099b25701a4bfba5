"""What makes ZeRO average over something else than all ranks, refused before DeepSpeed sees it.

With the loss of `ringflash.loss` (its scale holds cp_size) an average over all ranks is the true gradient. What
deepspeed 0.19.8 does instead when it is told of the rings, on data x context ranks, against a dense reference:

    told by                                     stages 0, 1, 2              stage 3
    mpu                                         sums over a ring            averages over it, or ranks diverge
    mesh_param                                  ranks diverge               averages over it
    sequence_parallel_size in the config        ranks diverge               averages over it
    nothing                                     averages over all ranks     averages over all ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LEAVE_OUT = "leave it out: the loss is scaled by cp_size, and ZeRO averages over all ranks"

_DRAW_ALIKE = (
    "leave it out: give ranks of a ring the same sequences, as by a DistributedSampler with the data axis' "
    "num_replicas and rank"
)

_KEYWORDS = {
    "mpu": "its groups are summed over at some stages and averaged over at others",
    "mesh_param": "gradients are then reduced over its data axis alone",
}
_TWICE = {"optimizer": "optimizer", "lr_scheduler": "scheduler"}  # keywords, and the keys that say the same
_KEYS = {
    "sequence_parallel_size": "gradients are then reduced over the data axis alone",
    "data_parallel_size": "with sequence_parallel_size it makes a mesh of DeepSpeed's own",
}


def check(config: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
    """Return if gradients will be averaged over all ranks.

    Args:
        config: DeepSpeed's, as a dictionary.
        keywords: further ones of `deepspeed.initialize`.
    Raises:
        ValueError: a key or keyword that changes what gradients are averaged over, or what a batch counts; one that
            DeepSpeed ignores beside another.
        NotImplementedError: parallelism over something else than data and context.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be an object of JSON, got {type(config).__name__}; see recipes/deepspeed.")
    if keywords.get("config_params") is not None:
        raise ValueError(
            f"config_params must be None, got {type(keywords['config_params']).__name__}, which DeepSpeed ignores "
            "beside a config; give one of them, as config."
        )
    for keyword, name in _TWICE.items():
        if keywords.get(keyword) is not None and name in config:
            raise ValueError(
                f"{name} must not be in the config beside {keyword}=, got {config[name]}, which DeepSpeed then "
                "ignores; give one of them."
            )
    for name, reason in _KEYWORDS.items():
        if keywords.get(name) is not None:
            raise ValueError(f"{name} must be None, got {type(keywords[name]).__name__} ({reason}); {_LEAVE_OUT}.")
    if keywords.get("training_data") is not None:
        raise ValueError(
            f"training_data must be None, got {type(keywords['training_data']).__name__}, which DeepSpeed shares out "
            f"over all ranks; {_DRAW_ALIKE}."
        )
    if (config.get("data_efficiency") or {}).get("enabled"):
        raise ValueError(
            "data_efficiency.enabled must be false, got true (it draws and drops tokens on each rank by itself); "
            f"{_DRAW_ALIKE}."
        )
    for name, reason in _KEYS.items():
        if name in config:
            raise ValueError(f"{name} must not be in the config, got {config[name]} ({reason}); {_LEAVE_OUT}.")
    if str(config.get("gradient_allreduce_op", "mean")).lower() != "mean":
        raise ValueError(
            f"gradient_allreduce_op must be 'mean', got {config['gradient_allreduce_op']!r}; "
            "leave it out: the loss is scaled for an average over all ranks."
        )
    if "train_batch_size" in config:
        raise ValueError(
            f"train_batch_size must not be in the config, got {config['train_batch_size']}; DeepSpeed counts every "
            "rank of a ring as a sample of its own: give train_micro_batch_size_per_gpu and "
            "gradient_accumulation_steps."
        )
    _check_fp16(config)
    tensor_parallel = (config.get("tensor_parallel") or {}).get("autotp_size")
    if tensor_parallel not in (None, 0, 1):
        raise NotImplementedError(
            f"tensor_parallel.autotp_size must be 0 or 1, got {tensor_parallel}; shard with ZeRO over all ranks."
        )
    if (config.get("expert_parallel") or {}).get("enabled"):
        raise NotImplementedError("expert_parallel.enabled must be false, got true; shard with ZeRO over all ranks.")


def _check_fp16(config: Mapping[str, Any]) -> None:
    """DeepSpeed 0.19.8 divides gradients of stage 0 by a scale that it has not multiplied the loss by."""
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 1
    if stage == 0 and (config.get("fp16") or {}).get("enabled") is True:
        raise NotImplementedError(
            "fp16 must have a ZeRO stage of 1, 2 or 3, got 0, at which DeepSpeed does not scale the loss; set "
            "zero_optimization.stage, or enable bf16."
        )
