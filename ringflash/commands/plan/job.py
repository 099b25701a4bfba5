"""A training step as it would be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ringflash.commands.plan.read import Layers, ReadShape

Checkpointing = Literal["none", "attention_kept", "full"]
Precision = Literal["bf16-mixed", "bf16-true"]


@dataclass(frozen=True)
class Job:
    """One optimizer step: a sequence on every data rank.

    Args:
        seqlen: tokens of a whole sequence.
        cp_size, dp_size: ranks that share a sequence; sequences at a time.
        visible_fraction: visible pairs as a part of the causal ones; windows and packed documents have less than 1.
        precision: bf16-mixed keeps weights, gradients and AdamW's two moments in fp32; bf16-true in bf16.
        checkpointing: what of a layer is kept for the backward: all, its input and attention's (out, lse), or its
            input alone.
        offload_checkpoints: the layers' inputs lie in the host's memory between forward and backward.
        offload_optimizer: AdamW's moments and the fp32 weights too, and the host steps.
        mlp_tile_tokens: tokens whose MLP is computed at a time; 0 is all.
        liger: Liger's norms, rotary embedding and SwiGLU, which keep less than transformers' own.
        accumulates: a step has several sequences one after another; gradients of the first ones are kept meanwhile.
    """

    model: ReadShape
    seqlen: int
    cp_size: int
    dp_size: int = 1
    visible_fraction: float = 1.0
    precision: Precision = "bf16-mixed"
    checkpointing: Checkpointing = "attention_kept"
    offload_checkpoints: bool = False
    offload_optimizer: bool = False
    mlp_tile_tokens: int = 0
    liger: bool = False
    accumulates: bool = False

    def __post_init__(self) -> None:
        if self.checkpointing not in get_args(Checkpointing):
            raise ValueError(
                f"checkpointing must be one of {get_args(Checkpointing)}, got {self.checkpointing!r}; "
                "'attention_kept' computes all but attention again."
            )
        if self.offload_checkpoints and self.checkpointing == "none":
            raise ValueError(
                "checkpointing must be 'attention_kept' or 'full' with offload_checkpoints, got 'none'; there are no "
                "checkpoints to offload."
            )
        if self.liger and self.model.liger is None:
            raise NotImplementedError(
                f"liger must be false for a plan of {self.model.family}, got true; what its kernels keep there "
                "is not counted."
            )
        if self.mlp_tile_tokens > 0 and not self.model.tiled_parameters:
            raise NotImplementedError(
                f"mlp_tile_tokens must be 0 for {self.model.family}, got {self.mlp_tile_tokens}; MLPs of gate_proj, "
                "up_proj and down_proj are tiled, and experts that transformers stacks."
            )
        if not 0 < self.visible_fraction <= 1:
            raise ValueError(
                f"visible_fraction must be above 0 and at most 1, got {self.visible_fraction}; 1 is a causal sequence."
            )
        if self.mlp_tile_tokens < 0:
            raise ValueError(f"mlp_tile_tokens must be 0 or more, got {self.mlp_tile_tokens}; 0 is all at once.")
        if self.cp_size < 1 or self.dp_size < 1:
            raise ValueError(f"cp_size and dp_size must be positive, got {self.cp_size} and {self.dp_size}; give both.")
        if self.seqlen < 1 or self.seqlen % (2 * self.cp_size):
            step = 2 * self.cp_size
            raise ValueError(
                f"seqlen must be divisible by 2 * cp_size ({step}), got {self.seqlen}; "
                f"pad to {-(-max(self.seqlen, 1) // step) * step}."
            )

    @property
    def layers(self) -> Layers:
        """What the model's layers keep and move, with Liger or without."""
        fused = self.model.liger if self.liger else None
        return self.model.plain if fused is None else fused

    @property
    def world_size(self) -> int:
        """Ranks, over all of which parameters are sharded."""
        return self.cp_size * self.dp_size

    @property
    def local_tokens(self) -> int:
        """Tokens of one rank."""
        return self.seqlen // self.cp_size

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile, 0 for none: checkpointed layers go without where one would be all of a rank's."""
        whole = self.checkpointing != "none" and self.mlp_tile_tokens >= self.local_tokens
        return 0 if whole else self.mlp_tile_tokens

    @property
    def visible_pairs(self) -> float:
        """Pairs of a query and a key it sees, of a whole sequence."""
        return self.visible_fraction * self.seqlen * (self.seqlen + 1) / 2
