"""Small tokenizers and inputs of token files, and what must be read from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ringflash.data.files import TokenFiles
from ringflash.data.format import HEADER, Header, write_json, write_shard


def word_tokenizer(words: Sequence[str], split: Any, **special: str) -> Any:
    """A tokenizer of transformers with a token for each of these words, the first of which stands for others."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=words[0], **special)


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    """A line for each text, which has another field, too."""
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_tokens(folder: Path, documents: Sequence[list[int]], per_shard: int, vocab_size: int = 257) -> TokenFiles:
    """Token files of these documents, so many in each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(documents), per_shard)
    parts = [documents[i : i + per_shard] for i in starts]
    shards = [write_shard(folder / f"{i:05}.bin", part, vocab_size) for i, part in enumerate(parts)]
    dtype = "uint16" if vocab_size <= 65536 else "uint32"
    write_json(folder / HEADER, Header(dtype, vocab_size, "tokenizer", "plan", tuple(shards)))
    return TokenFiles(folder)


def read_all(folder: Path) -> list[list[int]]:
    """The tokens of every document."""
    files = TokenFiles(folder)
    files.check()
    return [files.read(i, 0, int(length)).tolist() for i, length in enumerate(files.lengths)]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def whole_sequence(documents: Sequence[list[int]], seqlen: int, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens (1, seqlen), bounds and number of tokens of one sequence: plain lists, one after another, cut."""
    first, tokens, bounds, end = index * seqlen, [], {0}, 0
    for document in documents:
        end += len(document)
        tokens += document
        if first < end < first + seqlen:
            bounds.add(end - first)
    found = tokens[first : first + seqlen]
    bounds |= {len(found), seqlen}
    padded = torch.tensor([found + [0] * (seqlen - len(found))])
    return padded, torch.tensor(sorted(bounds), dtype=torch.int32), len(found)
