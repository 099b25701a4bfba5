"""Refusal of settings under which ZeRO does not average over all ranks, before DeepSpeed sees them.

With the loss of `ringflash.loss`, whose scale includes cp_size, the average over all ranks is the true gradient. If
deepspeed 0.19.8 is told about the rings, it does this on data x context ranks, compared with a dense reference:

    told by                                     stages 0, 1, 2              stage 3
    mpu                                         sums over a ring            averages over it, or ranks diverge
    mesh_param                                  ranks diverge               averages over it
    sequence_parallel_size in the config        ranks diverge               averages over it
    nothing                                     averages over all ranks     averages over all ranks
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig

Config = dict[str, Any] | str | Path

_LEAVE_OUT = "leave it out: the loss is scaled by cp_size, and ZeRO averages over all ranks"

_DRAW_ALIKE = (
    "leave it out: give ranks of a ring the same sequences, as by a DistributedSampler with the data axis' "
    "num_replicas and rank"
)

_KEYWORDS = {
    "mpu": "its groups are summed over at some stages and averaged over at others",
    "mesh_param": "gradients are then reduced over its data axis only",
}
_TWICE = {"optimizer": "optimizer", "lr_scheduler": "scheduler"}  # keyword -> config key with the same meaning
_KEYS = {
    "sequence_parallel_size": "gradients are then reduced over the data axis only",
    "data_parallel_size": "with sequence_parallel_size it makes a mesh of DeepSpeed's own",
}


def read(config: Config) -> dict[str, Any]:
    """Return the config as a dictionary.

    Raises:
        ValueError: a file that is not a JSON object, or that repeats a key: all but the last entry would be ignored.
    """
    if isinstance(config, dict):
        return dict(config)
    try:
        content = json.loads(Path(config).read_text(), object_pairs_hook=_reject_repeated_keys)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"config must be a dictionary or a JSON file, got {config}: {error}; correct it.") from error
    if not isinstance(content, dict):
        raise ValueError(f"config must be an object of JSON, got {type(content).__name__}; see recipes/deepspeed.")
    return content


def _reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given more than once; keep one")
    return dict(pairs)


def parse(config: Mapping[str, Any]) -> DeepSpeedConfig:
    """Parse a config as DeepSpeed does, which reads "true" and 1 as true, and "0" as 0.

    Raises:
        ValueError: keys or values that DeepSpeed rejects or would ignore.
    """
    unknown = sorted(set(config) - _known_keys())
    if unknown:
        close = [name for key in unknown for name in get_close_matches(key, _known_keys(), n=1)]
        raise ValueError(
            f"config must have keys that DeepSpeed reads, got {', '.join(unknown)}, which it would ignore; correct or "
            f"remove them (similar keys: {', '.join(close) or 'none'})."
        )
    left_open = [name for name in _auto_values(config) if name != "data_types.keep_in_fp32_modules"]
    if left_open:
        raise ValueError(
            f"config must have values, got 'auto' for {', '.join(left_open)}, which only transformers' Trainer fills "
            "in, and which DeepSpeed replaces by its default or misreads; write values, or leave them out."
        )
    try:
        return DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config})
    except Exception as error:
        raise ValueError(
            f"config must be one that DeepSpeed takes, got {type(error).__name__}: {error}; correct that key."
        ) from error


@cache
def _known_keys() -> frozenset[str]:
    """Return the config keys that DeepSpeed looks up; it silently ignores all others."""
    looked_for = set[str]()

    class Noting(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            looked_for.add(str(key))
            return super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            looked_for.add(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            looked_for.add(key)
            return super().get(key, default)

        def keys(self) -> Any:  # DeepSpeed tests if a key is in them
            return self

    DeepSpeedConfig(Noting(train_micro_batch_size_per_gpu=1))
    return frozenset(looked_for)


def _auto_values(value: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted names of values that are "auto"."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _auto_values(inner, f"{name}.{key}" if name else str(key))
    elif value == "auto":
        yield name


def check(config: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
    """Check that gradients will be averaged over all ranks.

    Args:
        config: DeepSpeed config, as a dictionary.
        keywords: further arguments of `deepspeed.initialize`.
    Raises:
        ValueError: a key or keyword that changes the ranks that gradients are averaged over, or how batches are
            counted; one that DeepSpeed would ignore in favour of another.
        NotImplementedError: tensor or expert parallelism, or fp16 at stage 0.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be an object of JSON, got {type(config).__name__}; see recipes/deepspeed.")
    _check_keywords(config, keywords)
    _check_keys(config)
    _check_values(parse(config))


def _check_keywords(config: Mapping[str, Any], keywords: Mapping[str, Any]) -> None:
    """Check the keywords of `deepspeed.initialize`, as `check` does."""
    if keywords.get("config_params") is not None:
        raise ValueError(
            f"config_params must be None, got {type(keywords['config_params']).__name__}, which DeepSpeed ignores if "
            "there is a config; give one of them, as config."
        )
    for keyword, name in _TWICE.items():
        if keywords.get(keyword) is not None and name in config:
            raise ValueError(
                f"{name} must not be in the config together with {keyword}=, got {config[name]}, which DeepSpeed then "
                "ignores; give one of them."
            )
    for name, reason in _KEYWORDS.items():
        if keywords.get(name) is not None:
            raise ValueError(f"{name} must be None, got {type(keywords[name]).__name__} ({reason}); {_LEAVE_OUT}.")
    if keywords.get("training_data") is not None:
        raise ValueError(
            f"training_data must be None, got {type(keywords['training_data']).__name__}, which DeepSpeed distributes "
            f"over all ranks; {_DRAW_ALIKE}."
        )


def _check_keys(config: Mapping[str, Any]) -> None:
    """Check the keys of the config as they were written, as `check` does."""
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
            "rank of a ring as a separate sample: give train_micro_batch_size_per_gpu and "
            "gradient_accumulation_steps."
        )


def _check_values(content: DeepSpeedConfig) -> None:
    """Check the values that DeepSpeed read from the config, as `check` does."""
    if not (isinstance(content.gradient_clipping, int | float) and content.gradient_clipping >= 0):
        raise ValueError(
            f"gradient_clipping must be a norm of at least 0, got {content.gradient_clipping!r}; leave it out for no "
            "clipping."
        )
    if content.data_efficiency_enabled:
        raise ValueError(
            "data_efficiency.enabled must be false, got true (each rank would draw and drop different tokens); "
            f"{_DRAW_ALIKE}."
        )
    # At stage 0 DeepSpeed 0.19.8 divides gradients by a scale without having multiplied the loss by it.
    if content.float16_config.enabled and content.zero_optimization_stage == 0:
        raise NotImplementedError(
            "fp16 must have a ZeRO stage of 1, 2 or 3, got 0, at which DeepSpeed does not scale the loss; set "
            "zero_optimization.stage, or enable bf16."
        )
    if content.tensor_parallel_config.autotp_size > 1:
        raise NotImplementedError(
            f"tensor_parallel.autotp_size must be 0 or 1, got {content.tensor_parallel_config.autotp_size}; shard with "
            "ZeRO over all ranks."
        )
    if content.expert_parallel_config.enabled:
        raise NotImplementedError("expert_parallel.enabled must be false, got true; shard with ZeRO over all ranks.")
