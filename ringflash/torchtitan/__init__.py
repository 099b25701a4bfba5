"""Ring attention as the context parallelism of torchtitan, without a fork.

    torchtitan.train ... --parallelism.context_parallel_degree 8 --training.disable_cuda_graphs \\
        --override.imports ringflash.torchtitan.ring_attention ringflash.torchtitan.keep_attention

torchtitan all-gathers the keys of the whole sequence for flex attention. `ring_attention` replaces each flex attention
in the configuration, before the model is built. torchtitan still cuts the sequence; its loss, positions, checkpoints
and other parallelism are unchanged. docs/torchtitan.md says what is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

try:
    import torchtitan as _  # noqa: F401
except ModuleNotFoundError as missing:
    raise ImportError(
        f"torchtitan must be installed for ringflash.torchtitan, got {missing}; pip install 'ringflash[torchtitan]'."
    ) from missing

from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.sharding import LocalMapConfig

from ringflash.torchtitan import trainer
from ringflash.torchtitan.inner_attention import QKV, RingInnerAttention

__all__ = ["keep_attention", "ring_attention"]

trainer.install()


@override(target=FlexAttention.Config, exact=True, description="attention over a ring of ranks")
def ring_attention(config: FlexAttention.Config, **options: Any) -> RingInnerAttention.Config:
    """Replace flex attention, whose keys torchtitan all-gathers, by ring attention.

    Args:
        config: what torchtitan would build.
        options: fields of `RingInnerAttention.Config`, on the command line as JSON:
            `'ringflash.torchtitan.ring_attention={"impl": "flash2"}'`.
    """
    sharding = config.sharding_config
    if sharding is not None:  # keys and values stay where they are, and so do their gradients
        placements = sharding.in_src_shardings
        gradients = LocalMapConfig(in_grad_placements=tuple(placements[name] for name in QKV))
        sharding = dataclasses.replace(sharding, in_dst_shardings=dict(placements), local_map=gradients)
    return derive(config, RingInnerAttention.Config, sharding_config=sharding, **options)


class KeepAttentionAC(SelectiveAC):
    """Selective activation checkpointing that also saves the result of ring attention."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Fields of torchtitan's."""

    def get_save_ops(self) -> set:
        """Return the operators whose results are saved."""
        return super().get_save_ops() | {torch.ops.ringflash.ring_attention.default}


@override(target=SelectiveAC.Config, exact=True, description="the result of ring attention is saved")
def keep_attention(config: SelectiveAC.Config) -> KeepAttentionAC.Config:
    """Save the result of ring attention instead of computing it twice, as torchtitan does for flex attention."""
    return derive(config, KeepAttentionAC.Config)
