"""Tokenizers of `prepare`: plain bytes, or a Hugging Face tokenizer from a local folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ringflash.data.format import Tokens
from ringflash.data.prepare.sources import Document

SEPARATOR = 256  # first token of each document: the first id after the 256 bytes
BYTE_VOCAB_SIZE = 257


class Tokenizer(Protocol):
    """Interface of a tokenizer for `prepare`.

    vocab_size: larger than every token.  checksum: of everything that determines the tokens.
    """

    vocab_size: int
    checksum: str

    def encode(self, documents: Sequence[Document]) -> Sequence[Tokens]:
        """Return the tokens of each non-empty document, with the tokens that mark its start or end."""
        ...


class Bytes:
    """Tokenizer that returns SEPARATOR and then the bytes: the vocabulary of `ringflash.lightning.TextData`."""

    vocab_size = BYTE_VOCAB_SIZE
    checksum = hashlib.sha256(b"bytes behind 256").hexdigest()

    def encode(self, documents: Sequence[Document]) -> Sequence[Tokens]:
        """Return the separator and the bytes of each document."""
        return [np.insert(np.frombuffer(x.text, np.uint8).astype(np.uint16), 0, SEPARATOR) for x in documents]


class HuggingFace:
    """Tokenizer of a folder with tokenizer.json. Documents start with its bos and end with its eos, if it has them.

    Special tokens that are spelled out in the text are encoded as plain text.

    Args:
        folder: folder with tokenizer.json and tokenizer_config.json. Nothing is downloaded and no code in it is run.
    Raises:
        ValueError: the folder has no tokenizer, or the tokenizer has neither bos nor eos.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"tokenizer must be 'bytes' or a folder with tokenizer.json, got {folder}; save it there.")
        self._tokenizer = _load(Path(folder))
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if bos is None and eos is None:
            raise ValueError(
                f"tokenizer must have a bos or an eos token, got neither in {folder}; "
                "name one in tokenizer_config.json."
            )
        self._first, self._last = ([] if x is None else [x] for x in (bos, eos))
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
        whole = self._tokenizer.backend_tokenizer.to_str()  # tokenizer_config.json may add tokens to tokenizer.json
        content = hashlib.sha256(whole.encode()).hexdigest()
        self.checksum = hashlib.sha256(json.dumps([content, bos, eos]).encode()).hexdigest()

    def encode(self, documents: Sequence[Document]) -> Sequence[Tokens]:
        """Return the tokens of each document between bos and eos.

        Raises:
            ValueError: a text is not UTF-8; the error names its place.
        """
        found = self._tokenizer(
            [_text(document) for document in documents], add_special_tokens=False, split_special_tokens=True,
            return_attention_mask=False, verbose=False,
        )["input_ids"]  # fmt: skip
        return [[*self._first, *tokens, *self._last] for tokens in found]


def load(tokenizer: str) -> Tokenizer:
    """Load a tokenizer by name: "bytes" or a folder."""
    return Bytes() if tokenizer == "bytes" else HuggingFace(tokenizer)


def _load(folder: Path):  # type: ignore[no-untyped-def]
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"transformers must be installed to read {folder}, got {missing}; pip install 'ringflash[huggingface]'."
        ) from missing
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(
            f"tokenizer must be one that transformers reads, got {type(error).__name__}: {error} in {folder}; "
            "write it with save_pretrained."
        ) from error


def _text(document: Document) -> str:
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text must be UTF-8 for a tokenizer, got {error} in {document.place}; convert the file."
        ) from error
