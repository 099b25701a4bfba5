"""Text files as training data that needs no preparation: bytes are tokens, and each file is a document.

    files      a.py  b.py      c.py
    stream     |aaaa|bbbbbbbbb|ccc          | is SEPARATOR, the first token of a document
    sequences  |aaaa|bb   bbbbbbb|   ccc     seqlen 8: cu_seqlens (0, 5, 8)   (0, 7, 8)   ...

A document that does not fit is cut, and its rest is a separate document in the next sequence. For real training use
`ringflash.lightning.TokenData`.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from ringflash import huggingface
from ringflash.comm.agreement import READ_TIMEOUT, agree
from ringflash.lightning.data import Batch, SequenceData
from ringflash.lightning.strategy import strategy_of

SEPARATOR = 256  # the first token that is not a byte
VOCAB_SIZE = 257

_HELD_OUT_PERCENT = 5


class PackedSequence(TypedDict):
    """One sequence: input_ids, (1, seqlen), int64; cu_seqlens, (num_documents + 1,), int32, its documents' bounds."""

    input_ids: torch.Tensor
    cu_seqlens: torch.Tensor


class PackedText(Dataset[PackedSequence]):
    """Sequences of `seqlen` tokens cut from one stream of documents; an incomplete last sequence is dropped.

    Args:
        documents: the bytes of each document; none may be empty.
        seqlen: tokens of a whole sequence, over all ranks that share it.
    Raises:
        ValueError: documents too short to fill one sequence together.
    """

    def __init__(self, documents: Iterable[bytes], seqlen: int) -> None:
        tokens = [torch.frombuffer(bytearray(document), dtype=torch.uint8).short() for document in documents]
        lengths = torch.tensor([len(x) + 1 for x in tokens])
        self.seqlen = seqlen
        self.starts = lengths.cumsum(0) - lengths
        self.stream = torch.full((int(lengths.sum()),), SEPARATOR, dtype=torch.int16)
        for start, document in zip(self.starts.tolist(), tokens, strict=True):
            self.stream[start + 1 : start + 1 + len(document)] = document
        if len(self) == 0:
            raise ValueError(
                f"text must fill a sequence of seqlen {seqlen} tokens, got {len(self.stream)}; give more files, "
                "of which one in twenty is held out of the training."
            )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tokens."""
        return hashlib.blake2b(self.stream.numpy().tobytes(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.stream) // self.seqlen

    def __getitem__(self, index: int) -> PackedSequence:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}, got {index}; sequences end there.")
        first = index * self.seqlen
        inside = self.starts[(self.starts > first) & (self.starts < first + self.seqlen)] - first
        bounds = torch.cat([torch.tensor([0]), inside, torch.tensor([self.seqlen])])
        tokens = self.stream[first : first + self.seqlen].long()
        return {"input_ids": tokens.unsqueeze(0), "cu_seqlens": bounds.int()}


def text_files(folder: str | None = None, suffix: str = ".py") -> list[tuple[str, Path]]:
    """Return the non-empty files in and below a folder as (path relative to the folder, path), sorted.

    Installed packages below it are skipped.

    Args:
        folder: default the sources of Python's standard library, which every machine has.
    Raises:
        ValueError: there is no such file.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    candidates = (p for p in root.rglob(f"*{suffix}") if not skipped.intersection(p.parts[len(root.parts) :]))
    found = [p for p in candidates if p.is_file() and p.stat().st_size > 0]
    if not found:
        raise ValueError(f"folder must hold files that end in {suffix!r}, got none in {root}; name another folder.")
    return sorted((p.relative_to(root).as_posix(), p) for p in found)


def is_held_out(name: str) -> bool:
    """Return True if a file is held out of training: one in twenty, chosen by name, the same on every machine."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < _HELD_OUT_PERCENT


class TextData(SequenceData):
    """Bytes of text files, packed into sequences, with one file in twenty held out.

    Every rank reads all of the text and cuts its shard out of whole sequences.

    Args:
        seqlen: tokens of a whole sequence, over all ranks that share it.
        folder: folder with the files; default the sources of Python's standard library.
        suffix: end of the names of the files to read.
        num_eval_sequences: sequences to evaluate from each of the two sets; divisible by the data-parallel size.
        seed: determines the order of the sequences.
    """

    def __init__(
        self, seqlen: int, folder: str | None = None, suffix: str = ".py", num_eval_sequences: int = 8, seed: int = 0
    ) -> None:
        super().__init__(seqlen, num_eval_sequences, seed)
        self.folder, self.suffix = folder, suffix

    def read(self) -> tuple[PackedText, PackedText]:
        """Read and pack the files, on all ranks or none.

        Raises:
            ValueError: no files, or too little text in them; ranks with different text; a model without the bytes and
                the separator in its vocabulary.
        """
        self.check_vocabulary(VOCAB_SIZE, "bytes and the separator between documents")
        parts: list[PackedText] = []
        error = None
        try:
            files = text_files(self.folder, self.suffix)
            for held in (False, True):
                paths = [path for name, path in files if is_held_out(name) == held]
                parts.append(PackedText((path.read_bytes() for path in paths), self.seqlen))
        except (ValueError, OSError) as problem:
            error = problem
        fingerprints = [part.fingerprint for part in parts]
        agree(dist.group.WORLD, {"fingerprints of the text": fingerprints}, error, timeout=READ_TIMEOUT)
        train, held_out = parts
        return train, held_out

    def identity(self) -> dict[str, Any]:
        """Add the text's fingerprint."""
        assert isinstance(self.train, PackedText)
        return {**super().identity(), "text": self.train.fingerprint}

    def on_before_batch_transfer(self, batch: PackedSequence, dataloader_idx: int) -> Batch:
        """Cut this rank's shard out of the sequence before it is moved to the device."""
        strategy = strategy_of(self.trainer)
        return huggingface.prepare_batch(
            batch["input_ids"], group=strategy.cp_group, cu_seqlens=batch["cu_seqlens"], layout=strategy.layout
        )
