"""A causal language model whose forward is its loss, so that the logits are never whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ringflash import loss as token_loss
from ringflash.group import Group, resolve


class CausalLMWithLoss(nn.Module):
    """A causal language model whose forward returns `ringflash.loss.cross_entropy`; logits are never whole.

    Shard this module, not the model in it, with FSDP2: the output embedding is then gathered where it is read.

    Args:
        model: a transformers model with .model and .lm_head, such as LlamaForCausalLM.
        group: as `set_group`'s.
        chunk_tokens: as `cross_entropy`.
    Raises:
        NotImplementedError: logits that are more than hidden @ lm_head.weight.T.
    """

    def __init__(self, model: nn.Module, group: Group, *, chunk_tokens: int | None = None) -> None:
        super().__init__()
        _check_head(model)
        self.model, self.group, self.chunk_tokens = model, resolve(group), chunk_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> CausalLMWithLoss:
        from copy import deepcopy

        return CausalLMWithLoss(deepcopy(self.model, memo), self.group, chunk_tokens=self.chunk_tokens)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool = False,
        per_token: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scalar loss of this rank; arguments as `prepare_batch` returns them.

        Args:
            per_token: return what `ringflash.loss.score_tokens` does instead.
        """
        base: Callable[..., Any] = self.model.model  # type: ignore[assignment]
        hidden = base(
            input_ids=input_ids, position_ids=position_ids, cu_seqlens=cu_seqlens, use_cache=use_cache
        ).last_hidden_state
        weight: Tensor = self.model.lm_head.weight  # type: ignore[union-attr,assignment]
        if per_token:
            return token_loss.score_tokens(hidden, weight, shift_labels, chunk_tokens=self.chunk_tokens)
        return token_loss.cross_entropy(
            hidden, weight, shift_labels, group=self.group, num_tokens=num_items_in_batch,
            chunk_tokens=self.chunk_tokens,
        )  # fmt: skip


def _check_head(model: nn.Module) -> None:
    head = getattr(model, "lm_head", None)
    if not hasattr(model, "model") or not isinstance(head, nn.Linear) or head.bias is not None:
        raise NotImplementedError(
            f"model must have .model and a linear .lm_head without bias, got {type(model).__name__}; "
            "call ringflash.loss.cross_entropy on its hidden states."
        )
    config: Any = getattr(model, "config", None)
    _check_head_config(config)
    if hasattr(config, "get_text_config"):  # of models that have one for each tower; Gemma 4's head follows the text's
        _check_head_config(config.get_text_config())


def _check_head_config(config: Any) -> None:
    for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1)):
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise NotImplementedError(f"{name} must be unset, got {value}; compute the loss from the model's logits.")
    if getattr(config, "output_router_logits", False):
        raise NotImplementedError(
            "output_router_logits must be False, got True; add the router's loss from the model's own outputs."
        )
