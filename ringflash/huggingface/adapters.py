"""Models with PEFT's adapters in their layers, which need nothing; and adapters that are more than that."""

from __future__ import annotations

from typing import Any

from torch import nn


def without_peft(model: nn.Module) -> nn.Module:
    """The transformers model in which PEFT put adapters, with them; another model as it is. Raises as the check."""
    if getattr(model, "peft_config", None) is None:
        return model
    check_adapters(model)
    return next((module for module in model.modules() if "lm_head" in module._modules), model)


def check_adapters(model: nn.Module) -> None:
    """Refuse adapters that do more than change what a layer does with each token.

    Raises:
        NotImplementedError: tokens put before those of each shard; a loss beside that of the tokens; tokens that are
            looked for in the shard alone.
    """
    configs: Any = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if _has_its_own_forward(config.peft_type) or getattr(config, "alora_invocation_tokens", None):
            kind = "LORA with alora_invocation_tokens" if config.peft_type == "LORA" else str(config.peft_type.value)
            raise NotImplementedError(
                f"peft_type must be one that changes layers alone, such as LORA, got {kind}, which also changes the "
                "model's inputs or its loss; those of a shard are not those of the sequence."
            )


def _has_its_own_forward(peft_type: Any) -> bool:
    from peft import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.tuners.tuners_utils import BaseTuner

    return PEFT_TYPE_TO_TUNER_MAPPING[peft_type].forward not in (BaseTuner.forward, nn.Module.forward)
