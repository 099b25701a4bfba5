"""The module that takes the place of torchtitan's FlexAttention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torch.distributed import ProcessGroup
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module

from ringflash.attention.api import ring_attention
from ringflash.torchtitan.ring_mask import RingMask

# Names of FlexAttention's inputs, by which torchtitan shards them: q_BLNH, k_BLNH, v_BLNH in 0.3.
QKV = list(inspect.signature(FlexAttention.forward).parameters)[1:4]


class RingInnerAttention(Module):
    """Attention of the local queries over the whole sequence, whose keys and values stay sharded."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Options of `ringflash.ring_attention`; options of flex attention have no effect."""

        impl: str = "auto"
        transport: str = "auto"
        deterministic: bool = False

    group: ProcessGroup | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "impl": config.impl,
            "transport": config.transport,
            "deterministic": config.deterministic,
        }
        self._pos_arg_list = QKV  # instead of the names in `forward`

    def parallelize(self, parallel_dims: Any) -> None:
        """Take the ring from torchtitan's mesh."""
        if parallel_dims.cp_enabled:
            self.group = parallel_dims.get_mesh("cp").get_group()
        super().parallelize(parallel_dims)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: RingMask,
        scale: float | None = None,
        enable_gqa: bool = False,
        score_mod: Callable | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Return the output, as q; arguments as torchtitan's FlexAttention.

        Args:
            q: (batch, seqlen_local, num_heads, head_dim), or (tokens_local, num_heads, head_dim) where torchtitan folds
                rows into one.
            out_transform: function of output and log-sum-exp, such as attention sinks.
        """
        self._check(attention_masks, score_mod, unknown)
        # torchtitan's checker of types knows neither this operator nor the operators of flex and varlen.
        with spmd.no_typecheck():
            out, lse = self._attend(q, k, v, attention_masks, scale, out_transform is not None)
        if spmd.is_type_checking():
            spec = get_partition_spec(q)
            spmd.assert_type(out, spmd.get_local_type(q), spec)
            if lse is not None:
                spmd.assert_type(lse, spmd.get_local_type(q), None if spec is None else spmd.PartitionSpec(*spec[:-1]))
        if out_transform is None:
            return out
        assert lse is not None
        return out_transform(out, lse)

    def _check(self, mask: RingMask, score_mod: Callable | None, unknown: dict[str, Any]) -> None:
        """Raise NotImplementedError for a call that the ring would not follow: on every rank, since all call alike."""
        if not self._parallelized:
            raise NotImplementedError(
                "model.parallelize(parallel_dims) must parallelize the attention of every layer, got a layer that it "
                "left out, which would not use the ring; parallelize the layer in the model's parallelize function."
            )
        if score_mod is not None or unknown:
            given = sorted(unknown) + ["score_mod"] * (score_mod is not None)
            raise NotImplementedError(
                f"attention must be called without {' and '.join(given)}, which this model passes; leave "
                "ringflash.torchtitan.ring_attention out for it."
            )
        if not isinstance(mask, RingMask):
            raise NotImplementedError(
                "attention_masks must be made by Decoder._create_flex_attention_mask, which returns a RingMask, got "
                f"{type(mask).__name__}; leave ringflash.torchtitan.ring_attention out for this model."
            )
        if self.group is not None and mask.layout is None:
            raise NotImplementedError(
                "the sequence must be cut by torchtitan's Trainer or Validator (prepare_context_parallel_input), got a "
                "mask that does not say how it was cut; train with these classes."
            )

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: RingMask, scale: float | None, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the log-sum-exp as (batch, seqlen_local, num_heads)."""
        folded = q.dim() == 3
        result: Any = ring_attention(
            *(x[None] if folded else x for x in (q, k, v)), group=self.group, softmax_scale=scale,
            window_size=(-1, -1) if mask.window is None else (mask.window - 1, 0), cu_seqlens=mask.cu_seqlens,
            layout=mask.layout or "contiguous", return_lse=with_lse, **self.options,
        )  # fmt: skip
        out, lse = (result[0], result[1].transpose(1, 2)) if with_lse else (result, None)
        return (out[0], None if lse is None else lse[0]) if folded else (out, lse)
