"""One choice of how to save the memory of a model's activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from ringflash.memory.layers import checkpoint_layers
from ringflash.memory.liger import use_liger
from ringflash.memory.tiles import tile_mlps

Checkpointing = Literal["none", "attention_kept", "full"]


@dataclass(frozen=True)
class Memory:
    """Activations of a model that are kept between forward and backward.

    Args:
        checkpointing: "none" keeps all activations; "attention_kept" keeps the input of each layer and attention's
            (out, lse), and recomputes the rest; "full" keeps only the inputs, and also recomputes attention.
        offload_checkpoints: keep the inputs of the layers in the host's memory.
        mlp_tile_tokens: tokens whose MLP is computed at a time, forward and backward; 0 computes all together.
        liger: use Liger's fused norms, rotary embedding and SwiGLU, on GPUs. "auto" uses them if liger-kernel is
            installed and supports the model.
    Raises:
        ValueError: unknown options, or options that contradict each other.
    """

    checkpointing: Checkpointing = "none"
    offload_checkpoints: bool = False
    mlp_tile_tokens: int = 0
    liger: bool | Literal["auto"] = False

    def __post_init__(self) -> None:
        if self.checkpointing not in get_args(Checkpointing):
            raise ValueError(
                f"checkpointing must be one of {', '.join(get_args(Checkpointing))}, got {self.checkpointing!r}; "
                "'attention_kept' computes all but attention again."
            )
        if self.liger not in (True, False, "auto"):
            raise ValueError(f"liger must be true, false or 'auto', got {self.liger!r}; 'auto' uses it if installed.")
        if self.offload_checkpoints and self.checkpointing == "none":
            raise ValueError(
                "checkpointing must be 'attention_kept' or 'full' with offload_checkpoints, got 'none'; there are no "
                "checkpoints to offload."
            )


def save_memory(model: nn.Module, memory: Memory) -> None:
    """Apply the options to a transformers model, in place; call it before the model is sharded.

    Raises:
        NotImplementedError: layers or MLPs of an unknown form.
        RuntimeError: liger=True, but Liger is missing.
    """
    if memory.liger:
        use_liger(model, if_possible=memory.liger == "auto")
    if memory.mlp_tile_tokens:
        tile_mlps(model, memory.mlp_tile_tokens, checkpointed=memory.checkpointing != "none")
    if memory.checkpointing != "none":
        keep = memory.checkpointing == "attention_kept"
        checkpoint_layers(model, keep_attention=keep, offload=memory.offload_checkpoints)
