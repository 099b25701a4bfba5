"""Factories that tests of the command `ringflash verify` name by their dotted path."""

from __future__ import annotations

from typing import Any

from ringflash.lightning import CausalLM
from ringflash.lightning.strategy import strategy_of

CONFIG = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


class SummedEvaluation(CausalLM):
    """Reports the sum of the ranks' evaluation losses."""

    def on_validation_epoch_end(self) -> None:
        self._totals[:, 0] *= strategy_of(self.trainer).cp_size
        super().on_validation_epoch_end()


def summed_evaluation(group: Any) -> CausalLM:
    """A LightningModule with one mistake."""
    return SummedEvaluation(CONFIG)
