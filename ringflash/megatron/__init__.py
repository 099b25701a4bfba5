"""Attention over Megatron-core's context-parallel group, by a layer spec.

core_attention   the attention of a layer
layer_spec       specs with it: what `--spec` names, and a function for specs of your own

    pretrain_gpt.py ... --context-parallel-size 8 --spec ringflash.megatron layer_spec \\
        --calculate-per-token-loss --attention-dropout 0 --no-create-attention-mask-in-dataloader

Everything else stays Megatron's: it cuts batches and rotary embeddings in the layout "zigzag" (packed documents of the
format "thd" in "documents"), reduces gradients over the group, and divides the loss.
"""

from ringflash.megatron.layer_spec import layer_spec, with_ring

__all__ = ["layer_spec", "with_ring"]
