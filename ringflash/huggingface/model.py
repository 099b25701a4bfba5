"""A causal language model whose forward is its loss, so that the logits are never whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ringflash import loss as token_loss
from ringflash.comm.group import Group, HoldsGroup, resolve
from ringflash.huggingface.adapters import check_adapters, without_peft
from ringflash.huggingface.routers import check_routers, routed, router_coefficient, router_loss

# Families whose logits are scaled: by which name of the configuration, and whether they are divided by it.
_SCALED: dict[Any, tuple[str, bool]] = {
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), ("logit_scale", False)),
    "hyperclovax": ("logits_scaling", False),
    **dict.fromkeys(
        ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "minicpm3"),
        ("logits_scaling", True),
    ),
}


class CausalLMWithLoss(HoldsGroup, nn.Module):
    """A causal language model whose forward returns `ringflash.loss.cross_entropy`; logits are never whole.

    With `output_router_logits` in its configuration a model of experts adds router_aux_loss_coef * the balancing loss
    of the whole sequence, which `router_loss` keeps of the last forward: added whole to each call's loss, and over all
    tokens, those without labels too; padding is left out where `prepare_batch` was given an attention_mask.

    Shard this module, not the model in it, with FSDP2: the output embedding is then gathered where it is read.

    Args:
        model: a transformers model with .model and .lm_head, such as LlamaForCausalLM; also with PEFT's adapters in it,
            or in its PeftModel, but none on .lm_head (`modules_to_save` may name it).
        group: as `set_group`'s.
        chunk_tokens: as `cross_entropy`.
    Raises:
        NotImplementedError: logits that are more than hidden @ lm_head.weight.T, times a number for those models that
            are known to have one; a balancing loss of another form than transformers'. Adapters of PEFT that do more
            than change layers.
    """

    router_loss: Tensor | None = None  # without its coefficient and gradient; the mean over the ranks is the sequence's

    def __init__(self, model: nn.Module, group: Group, *, chunk_tokens: int | None = None) -> None:
        super().__init__()
        causal = without_peft(model)
        _check_head(causal)
        self.logit_scale = _logit_scale(getattr(causal, "config", None))
        self.model, self.group, self.chunk_tokens = model, resolve(group), chunk_tokens

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """The model's own, which transformers' Trainer calls for TrainingArguments(gradient_checkpointing=True)."""
        self.model.gradient_checkpointing_enable(**options)  # type: ignore[operator]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool = False,
        checksum: Tensor | None = None,
        is_token: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scalar loss of this rank; arguments as `prepare_batch` returns them.

        Args:
            per_token: return what `ringflash.loss.score_tokens` does instead.
        """
        check_adapters(self)  # adapters may have come since, around this module, too
        causal: Any = without_peft(self.model)
        self._check_head_unchanged(causal)
        places = {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "checksum": checksum, "is_token": is_token}
        outputs = causal.model(input_ids=input_ids, use_cache=use_cache, **places)
        hidden, weight = outputs.last_hidden_state, _weight_of(causal.lm_head)
        if per_token:
            return token_loss.score_tokens(
                hidden, weight, shift_labels, chunk_tokens=self.chunk_tokens, logit_scale=self.logit_scale
            )
        loss = token_loss.cross_entropy(
            hidden, weight, shift_labels, group=self.group, num_tokens=num_items_in_batch,
            chunk_tokens=self.chunk_tokens, logit_scale=self.logit_scale,
        )  # fmt: skip
        if not _has_router_loss(causal):
            return loss
        logits = routed(causal, outputs)
        balance = router_loss(logits, causal.num_experts, causal.num_experts_per_tok, self.group, is_token)
        self.router_loss = balance.detach()
        return loss + router_coefficient(causal) * balance

    def _check_head_unchanged(self, causal: nn.Module) -> None:
        """Refuse a configuration that was edited since this module was made."""
        _check_head(causal)
        if (scale := _logit_scale(getattr(causal, "config", None))) != self.logit_scale:
            raise NotImplementedError(
                f"the scale of the logits must stay {self.logit_scale:g}, got {scale:g} from a configuration that was "
                "edited since; make the CausalLMWithLoss after that."
            )


def _check_head(model: nn.Module) -> None:
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        raise NotImplementedError(
            f"model must have .model and .lm_head, got {type(model).__name__}; call ringflash.loss.cross_entropy on "
            "its hidden states."
        )
    _weight_of(model.lm_head)
    if _has_router_loss(model):
        check_routers(model)
    config: Any = getattr(model, "config", None)
    _check_head_config(config, known=_scaling(config)[0])
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is not config:  # of models that have one for each tower; Gemma 4's head follows the text's
        _check_head_config(text, known=None)


def _has_router_loss(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "output_router_logits", False)


def _weight_of(head: Any) -> Tensor:
    """The weight that makes logits of hidden states alone; of a layer that PEFT trains as a whole, its copy's."""
    layer = getattr(head, "original_module", head)
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        raise NotImplementedError(
            f"lm_head must be a linear layer without bias, got {type(layer).__module__}.{type(layer).__name__}; call "
            "ringflash.loss.cross_entropy on the hidden states, or, with PEFT, leave lm_head out of target_modules."
        )
    weight: Tensor = head.weight
    return weight


def _logit_scale(config: Any) -> float:
    """What the model multiplies its logits by."""
    name, divides = _scaling(config)
    value = 1.0 if name is None else float(getattr(config, name))
    return 1 / value if divides else value


def _scaling(config: Any) -> tuple[str | None, bool]:
    return _SCALED.get(getattr(config, "model_type", None), (None, False))


def _check_head_config(config: Any, known: str | None) -> None:
    for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1), ("logits_scaling", 1)):
        if name == known:
            continue
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise NotImplementedError(f"{name} must be unset, got {value}; compute the loss from the model's logits.")
