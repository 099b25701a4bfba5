"""The training job to be planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from ringflash.attention.ulysses import shared_kv_heads
from ringflash.commands.plan.read import Layers, ReadShape

Checkpointing = Literal["none", "attention_kept", "full"]
Precision = Literal["bf16-mixed", "bf16-true"]
Fp8Backward = Literal["bf16", "fp8_scores", "fp8"]


@dataclass(frozen=True)
class TrainingJob:
    """One optimizer step: a sequence on every data rank.

    Args:
        seqlen: number of tokens of a whole sequence.
        cp_size: number of ranks that share a sequence.
        dp_size: number of sequences that are processed in parallel.
        visible_fraction: fraction of the causal pairs that are visible; below 1 for windows and packed documents.
        precision: bf16-mixed keeps weights, gradients and AdamW's two moments in fp32; bf16-true in bf16.
        checkpointing: tensors that a layer keeps for the backward: all, its input and attention's (out, lse), or only
            its input.
        offload_checkpoints: keep the layers' inputs in host memory between forward and backward.
        offload_optimizer: keep AdamW's moments and the fp32 weights in host memory, and step on the host.
        mlp_tile_tokens: number of tokens whose MLP is computed at a time; 0 is all.
        liger: use Liger's norms, rotary embedding and SwiGLU, which keep less than those of transformers.
        accumulates: a step has several sequences in turn, so gradients of earlier ones are kept.
        exchanging: number of ranks of a host that exchange heads around the ring between hosts (transport "by_host"); 1
            is none. `on_hosts` sets it.
        fp8_backward: attention is in FP8 with this backward, as in `ring_attention`; None is exact attention.
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
    exchanging: int = 1
    fp8_backward: Fp8Backward | None = None

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

    def on_hosts(self, gpus_per_host: int) -> TrainingJob:
        """Return the job with the exchange of heads that `auto` chooses if a ring takes several whole hosts."""
        whole = self.cp_size > gpus_per_host and self.cp_size % gpus_per_host == 0
        divides = self.model.num_heads % gpus_per_host == 0
        return replace(self, exchanging=gpus_per_host if whole and divides else 1)

    @property
    def rail(self) -> TrainingJob:
        """The job as the ring between hosts sees it: the tokens of a host on a rank, with its share of the heads."""
        if self.exchanging == 1:
            return self
        model, ranks = self.model, self.exchanging
        shared = len(shared_kv_heads(ranks, model.num_heads, model.num_kv_heads))
        share = replace(model, num_heads=model.num_heads // ranks, num_kv_heads=shared // ranks)
        cp_size, dp_size = self.cp_size // ranks, self.dp_size * ranks
        return replace(self, model=share, cp_size=cp_size, dp_size=dp_size, exchanging=1)

    @property
    def layers(self) -> Layers:
        """Bytes that the layers keep and move, with Liger or without."""
        fused = self.model.liger if self.liger else None
        return self.model.plain if fused is None else fused

    @property
    def world_size(self) -> int:
        """Number of ranks, over which parameters are sharded."""
        return self.cp_size * self.dp_size

    @property
    def local_tokens(self) -> int:
        """Number of tokens of one rank."""
        return self.seqlen // self.cp_size

    @property
    def tile_tokens(self) -> int:
        """Number of tokens of a tile, 0 for no tiles: checkpointed layers skip a tile that would hold all tokens."""
        whole = self.checkpointing != "none" and self.mlp_tile_tokens >= self.local_tokens
        return 0 if whole else self.mlp_tile_tokens

    @property
    def visible_pairs(self) -> float:
        """Number of visible (query, key) pairs of a whole sequence."""
        return self.visible_fraction * self.seqlen * (self.seqlen + 1) / 2
