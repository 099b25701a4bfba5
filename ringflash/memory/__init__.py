"""Less memory for the activations of a transformers model: checkpointing, offloading to the host, and tiling.

    save_memory(model, Memory(checkpointing="attention_kept", mlp_tile_tokens=8192))

Attention is recomputed only with checkpointing="full": its results (out, lse) are small, and at a million tokens it is
nearly all of the work. docs/plan.md has the bytes.
"""

from ringflash.memory.options import Memory, save_memory

__all__ = ["Memory", "save_memory"]
