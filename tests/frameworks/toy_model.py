"""A small Qwen3 with a tokenizer of bytes, as files."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def save_model(folder: Path) -> None:
    """Write the model and its tokenizer into a folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*letters, *special])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=len(letters) + 8, max_position_embeddings=4096,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
