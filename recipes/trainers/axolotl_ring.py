"""axolotl on a ring: copy this file next to your YAML (docs/other-trainers.md), and name it and the size there.

    plugins: [axolotl_ring.RingPlugin]
    ringflash_size: 8
    # and no context_parallel_size

`ringflash.accelerate` does the work.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

from accelerate import ParallelismConfig
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

import ringflash.accelerate

if not version("axolotl").startswith("0.21."):
    raise RuntimeError(f"axolotl must be 0.21, got {version('axolotl')}; this file uses its plug-ins.")

# Keys that axolotl's collators add to packed rows, and that repeat what position_ids say.
_SAID_BY_POSITIONS = "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"


class RingArguments(BaseModel):
    """Keys of the plug-in in a YAML."""

    ringflash_size: int = Field(ge=2, description="Number of ranks that share a sequence")


class RingPlugin(BasePlugin):
    """Training in which the ranks of a ring share each sequence."""

    def get_input_args(self) -> str:
        """Name the keys."""
        return "axolotl_ring.RingArguments"

    def register(self, cfg: dict) -> None:
        """Add the backend to accelerate before axolotl changes it."""
        ringflash.accelerate.register()

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return Trainer's ParallelismConfig.

        Raises:
            NotImplementedError: another kind of parallelism, or a trainer of reinforcement learning.
        """
        others = "context_parallel_size", "tensor_parallel_size", "expert_parallel_size"
        wrong = [name for name in others if (getattr(cfg, name, None) or 1) > 1]
        wrong += [name for name in ("rl", "reward_model", "process_reward_model") if getattr(cfg, name, None)]
        if wrong:
            raise NotImplementedError(
                f"{', '.join(wrong)} must be left out with ringflash_size; remove it from the configuration."
            )
        rings = int(os.environ.get("WORLD_SIZE", 1)) // cfg.ringflash_size
        axis = "dp_shard_size" if cfg.fsdp_config else "dp_replicate_size"
        config = ParallelismConfig(cp_backend="ringflash", cp_size=cfg.ringflash_size, **{axis: rings})
        return {"parallelism_config": config}

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Let packed rows be told by their positions only."""
        if cfg.sample_packing:
            trainer.data_collator = _ByPositions(trainer.data_collator)
            if getattr(trainer, "eval_data_collator", None) is not None:
                trainer.eval_data_collator = _ByPositions(trainer.eval_data_collator)


class _ByPositions:
    """A collator that removes from packed batches what repeats position_ids; other batches keep their mask."""

    def __init__(self, collator: Any) -> None:
        self._collator = collator

    def __call__(self, *args: Any, **options: Any) -> Any:
        batch = self._collator(*args, **options)
        for name in _SAID_BY_POSITIONS if "position_ids" in batch else ():
            batch.pop(name, None)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collator, name)
