"""Passkey retrieval: how often a model finds a number that is hidden in a long text.

    filler ... The pass key is 48213. Remember it. ... filler ... What is the pass key? The pass key is 48213
                  depth of the sequence                                                   predicted

Each token of the answer is predicted from the correct tokens before it, in one pass over the ring, without a cache or
generation. A key counts as found if each of its tokens is the most likely one, as greedy generation would choose.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lightning
import torch
import torch.distributed as dist

from ringflash import huggingface
from ringflash.lightning.module import CausalLM
from ringflash.lightning.strategy import strategy_of
from ringflash.sequence.layout import DOCUMENT_LAYOUTS
from ringflash.sequence.padding import IGNORE_INDEX

Encode = Callable[[str], Sequence[int]]

_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True)
class Found:
    """Result at one depth.

    Args:
        keys: fraction of the keys that were found.
        loss: mean cross-entropy over the keys' tokens, natural log.
    """

    keys: float
    loss: float


class Passkey(lightning.Callback):
    """Callback that hides keys in sequences of the data's length at each evaluation, and reports how many are found.

    Args:
        depths: fractions of the sequence before the key.
        num_keys: keys tried at each depth.
        num_digits: digits of a key.
        tokenizer: "bytes", or the directory of a Hugging Face tokenizer.
        seed: determines the keys.
    """

    def __init__(
        self,
        depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 0.95),
        num_keys: int = 4,
        num_digits: int = 5,
        tokenizer: str = "bytes",
        seed: int = 0,
    ) -> None:
        if not depths or not all(0 <= depth <= 1 for depth in depths):
            raise ValueError(f"depths must be fractions from 0 to 1, got {list(depths)}; 0.5 is the middle.")
        if num_keys < 1 or num_digits < 1:
            raise ValueError(f"num_keys and num_digits must be 1 or more, got {num_keys} and {num_digits}; raise them.")
        self.depths, self.num_keys, self.num_digits, self.seed = tuple(depths), num_keys, num_digits, seed
        self.tokenizer = tokenizer
        self.found: dict[float, Found] = {}  # last evaluation, by depth

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: CausalLM) -> None:
        """Try each depth: the ranks of a ring share a sequence, and all data ranks try the same sequences."""
        encode = encoder(self.tokenizer)
        draw = random.Random(self.seed)
        for depth in self.depths:
            keys = ["".join(draw.choices("0123456789", k=self.num_digits)) for _ in range(self.num_keys)]
            sequences = [passkey_sequence(key, depth, trainer.datamodule.seqlen, encode) for key in keys]
            self.found[depth] = self._find(trainer, pl_module, sequences)
        self._report(trainer)

    def _find(
        self, trainer: lightning.Trainer, module: CausalLM, sequences: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Found:
        strategy = strategy_of(trainer)
        sums = torch.zeros(len(sequences), 3, dtype=torch.float64, device=strategy.root_device)
        for total, (input_ids, labels) in zip(sums, sequences, strict=True):
            by_documents = strategy.layout in DOCUMENT_LAYOUTS
            bounds = torch.tensor([0, input_ids.shape[1]], dtype=torch.int32) if by_documents else None
            batch = huggingface.prepare_batch(
                input_ids, group=strategy.cp_group, labels=labels, layout=strategy.layout, cu_seqlens=bounds
            )
            moved = {k: x.to(strategy.root_device) if isinstance(x, torch.Tensor) else x for k, x in batch.items()}
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                losses, correct = module(**moved, per_token=True)
            labelled = moved["shift_labels"] != IGNORE_INDEX
            total += torch.stack([correct.sum(), labelled.sum(), losses.double().sum()])
        dist.all_reduce(sums, group=strategy.cp_group)
        right, tokens, loss = sums.unbind(1)
        return Found((right == tokens).double().mean().item(), (loss.sum() / tokens.sum()).item())

    def _report(self, trainer: lightning.Trainer) -> None:
        values = {f"passkey/{depth:g}": found.keys for depth, found in self.found.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        shown = "  ".join(f"{depth:g}: {found.keys:.0%}" for depth, found in self.found.items())
        lightning.pytorch.utilities.rank_zero_info(f"pass keys found, by depth: {shown}")


def passkey_sequence(key: str, depth: float, seqlen: int, encode: Encode) -> tuple[torch.Tensor, torch.Tensor]:
    """Build a text that hides a key and asks for it at the end.

    Args:
        depth: fraction of the filler before the key.
    Returns:
        input_ids: (1, seqlen), int64.  labels: (1, seqlen), int64, shifted; only the answer is labelled.
    Raises:
        ValueError: a length too short for the key and the question.
    """
    needle = list(encode(f"The pass key is {key}. Remember it. {key} is the pass key. "))
    question = list(encode("What is the pass key? The pass key is "))
    answer = list(encode(key))
    room = seqlen - len(needle) - len(question) - len(answer)
    if room < 0:
        raise ValueError(f"seqlen must be {seqlen - room} or more for a pass key, got {seqlen}; raise it.")
    filler = list(encode(_FILLER))
    before = round(depth * room)
    text = filler * (room // len(filler) + 1)
    ids = text[:before] + needle + text[before:room] + question + answer
    labels = [IGNORE_INDEX] * (seqlen - 1 - len(answer)) + answer + [IGNORE_INDEX]
    return torch.tensor([ids]), torch.tensor([labels])


def encoder(tokenizer: str) -> Encode:
    """Return a function from text to tokens that adds no special tokens."""
    if tokenizer == "bytes":
        return lambda text: list(text.encode())
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    return lambda text: loaded.encode(text, add_special_tokens=False)
