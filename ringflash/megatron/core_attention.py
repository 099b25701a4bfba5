"""Core attention of a Megatron-core layer, over the ranks of its context-parallel group."""

from __future__ import annotations

import sys
from typing import Any, cast

from megatron.core.inference import utils as inference
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from ringflash.attention.api import ring_attention
from ringflash.sequence.tensor_cache import once_per_tensor

_SETTINGS = {  # options of Megatron's configuration: a ring computes attention with these values, and with no others
    "softmax_type": "vanilla",
    "qk_clip": False,
    "log_max_attention_logit": False,
    "apply_query_key_layer_scaling": False,
    "attention_backend": AttnBackend.auto,
    "flash_attention_version": None,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "batch_invariant_mode": False,
    "cuda_graph_impl": "none",
    "hybrid_context_parallel": False,
    "heterogeneous_block_specs": False,
}
# Arguments of Megatron-LM. With the first, it cuts documents as one sequence, and rotates each as cut by itself.
_ARGUMENTS = ("dataloader_inter_document_masking", "reset_attention_mask")


class RingCoreAttention(MegatronModule):
    """Attention over the whole sequence; each rank of `pg_collection.cp` holds a shard of it.

    Args:
        k_channels, v_channels: Megatron passes them for latent attention; q, k and v have these sizes.
        others: as Megatron's `DotProductAttention`.
    Raises:
        ValueError, NotImplementedError: a setting that the ring does not follow. On every rank, since all have the
            same configuration.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check_settings(config, attention_type, dropout, cp_comm_type)
        self.group = None
        if config.context_parallel_size > 1:
            if pg_collection is None:
                pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
            self.group = pg_collection.cp
        self.attn_mask_type, self.softmax_scale = attn_mask_type, softmax_scale
        self.window_size = (-1, -1)
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window_size = tuple(config.window_size)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query, key, value: (seqlen_local, batch, heads, head_dim), or (seqlen_local, heads, head_dim) of packed
                documents.
        Returns:
            out: (seqlen_local, batch, heads * v_head_dim), or (seqlen_local, heads * v_head_dim).
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if attention_mask is not None:
            raise ValueError(
                f"attention_mask must be None, got {tuple(attention_mask.shape)}, which a ring does not read; pass "
                "--no-create-attention-mask-in-dataloader."
            )
        if attention_bias is not None:
            raise NotImplementedError("attention_bias must be None, got one; use Megatron's own attention.")
        engine = getattr(inference, "InferenceMode", None)  # in Megatron-core 0.19
        if self.group is not None and engine is not None and engine.is_active():
            raise NotImplementedError(
                "context_parallel_size must be 1 for inference, in which Megatron gives each rank whole sequences, got "
                f"{self.group.size()}; generate with a model without context parallelism."
            )
        layout, bounds, batch_dim = "zigzag", None, 1
        if packed_seq_params is not None:
            layout, bounds, batch_dim = "documents", _document_bounds(packed_seq_params, mask_type), 0
            query, key, value = (x[None] for x in (query, key, value))
        elif mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise NotImplementedError(
                f"attn_mask_type must be causal or no_mask, got {mask_type.name}; use Megatron's own attention."
            )
        q, k, v = (x.transpose(0, batch_dim) for x in (query, key, value))
        out = ring_attention(
            q, k, v, group=self.group, causal=mask_type is not AttnMaskType.no_mask, softmax_scale=self.softmax_scale,
            window_size=self.window_size, cu_seqlens=bounds, layout="contiguous" if self.group is None else layout,
            deterministic=self.config.deterministic_mode,
        )  # fmt: skip
        joined = cast(Tensor, out).flatten(2).transpose(0, batch_dim).contiguous()
        return joined if packed_seq_params is None else joined[0]


def _check_settings(config: TransformerConfig, attention_type: str, dropout: float, cp_comm_type: str | None) -> None:
    """Raise unless a ring follows every setting that concerns attention, and the loss covers all ranks."""
    trainer = sys.modules.get("megatron.training.global_vars")  # not imported here: Megatron Bridge has none
    arguments = getattr(trainer, "_GLOBAL_ARGS", None)
    wanted: dict[str, tuple[Any, Any]] = {
        "attention_type": ("self", attention_type),
        "attention_dropout": (0.0, dropout),
        "cp_comm_type": ("p2p", cp_comm_type or "p2p"),
        **{name: (want, getattr(config, name, want)) for name, want in _SETTINGS.items()},
        **{name: (False, getattr(arguments, name, False)) for name in _ARGUMENTS},
    }
    for name, (want, got) in wanted.items():
        if got != want:
            raise NotImplementedError(
                f"{name} must be {want!r} with RingCoreAttention, got {got!r}; set it so, or use Megatron's attention."
            )
    if config.context_parallel_size > 1 and not config.calculate_per_token_loss:
        raise ValueError(
            "calculate_per_token_loss must be True with context_parallel_size above 1, got False, with which each rank "
            "divides by its own number of labels; pass --calculate-per-token-loss."
        )


def _document_bounds(packed: PackedSeqParams, mask_type: AttnMaskType) -> Tensor:
    """Return the bounds by which Megatron has cut packed documents: with the padding that each has at its end."""
    if packed.qkv_format != "thd" or packed.cp_group is not None or packed.local_cp_size is not None:
        raise NotImplementedError(
            "packed_seq_params must have the format 'thd' and the group of the model, got "
            f"{packed.qkv_format!r} and a local_cp_size of {packed.local_cp_size}; leave hybrid_context_parallel out."
        )
    if mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise NotImplementedError(
            f"attn_mask_type of packed documents must be causal, got {mask_type.name}, with which tokens would see the "
            "padding of their document; build the layer with AttnMaskType.causal."
        )
    return _read(packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded)


@once_per_tensor
def _read(bounds: Tensor) -> Tensor:
    """Return bounds on the CPU, without the empty documents that Megatron's RL appends."""
    return bounds.cpu().unique_consecutive()
