"""Documents packed into sequences; each rank reads only its own chunks.

    documents  |aaaa|bbbbbbbbb|ccc|        concatenated in the given order
    sequences  |aaaabbbb|bbbbbccc|         cu_seqlens (0, 4, 8)   (0, 5, 8)
    rank 0      aa    bb                   2 ranks, zigzag; labels  aa    b.
    rank 1        aabb                                                a.bb

If a document is cut, the rest of it is a separate document in the next sequence. The last sequence is padded with a
document without labels. The label of a chunk's last token is the first token of the next chunk, so each chunk is read
with one extra token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ringflash.data.files import TokenFiles
from ringflash.data.order import shuffled
from ringflash.sequence.layout import check_seqlen, chunks, local_positions
from ringflash.sequence.padding import IGNORE_INDEX

Batch = dict[str, Any]


class TokenSequences(Dataset[Batch]):
    """One rank's shard of each sequence, equal to what `ringflash.huggingface.prepare_batch` cuts from it.

    Args:
        documents: (num_documents,), document numbers in packing order.
        seqlen: number of tokens of a whole sequence, which cp_size ranks share.
    Raises:
        ValueError: there are no documents, or the layout cannot divide the length or the documents.
    """

    def __init__(
        self,
        files: TokenFiles,
        documents: Tensor,
        seqlen: int,
        *,
        cp_size: int = 1,
        cp_rank: int = 0,
        layout: str = "zigzag",
    ) -> None:
        check_seqlen(seqlen, cp_size, layout)
        if layout == "documents":
            raise ValueError(
                "layout must not be 'documents' for packed token files, whose documents have any length; take "
                "'balanced' or 'zigzag'."
            )
        if not len(documents):
            raise ValueError("documents must not be empty, got none; prepare more text.")
        self.files, self.documents, self.seqlen = files, documents.numpy(), seqlen
        self.place = cp_size, cp_rank, layout
        self.ends = np.cumsum(files.lengths[self.documents])  # end of each document in the packed stream

    def __len__(self) -> int:
        return -(-int(self.ends[-1]) // self.seqlen)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}, got {index}; sequences end there.")
        bounds, num_tokens = self.bounds(index)
        cu_seqlens = torch.from_numpy(bounds)
        of_rank = chunks(self.seqlen, *self.place, tuple(bounds.tolist()))
        parts = [self._chunk(index * self.seqlen, c.start, c.stop, bounds, num_tokens) for c in of_rank]
        tokens, labels = (torch.cat(x) for x in zip(*parts, strict=True))
        num_documents = len(bounds) - 1 - (num_tokens < self.seqlen)
        return {
            "input_ids": tokens[None],
            "position_ids": local_positions(self.seqlen, *self.place, cu_seqlens)[None],
            "shift_labels": labels[None],
            "num_items_in_batch": torch.tensor(max(1, num_tokens - num_documents)),
            "cu_seqlens": cu_seqlens,
            "use_cache": False,
        }

    def bounds(self, index: int) -> tuple[np.ndarray, int]:
        """Return the bounds of the documents in a sequence (int32, with padding) and the number of real tokens."""
        first = index * self.seqlen
        num_tokens = min(self.seqlen, int(self.ends[-1]) - first)
        inside = slice(*np.searchsorted(self.ends, (first, first + num_tokens), side="right"))
        bounds = np.concatenate([[0], self.ends[inside] - first, [num_tokens, self.seqlen]])
        return np.unique(bounds).astype(np.int32), num_tokens

    def _chunk(self, first: int, start: int, stop: int, bounds: np.ndarray, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return tokens [start, stop) of the sequence and their labels, int64; reads one extra token."""
        read = self._read(first + min(start, num_tokens), first + min(stop + 1, num_tokens))
        whole = torch.zeros(stop + 1 - start, dtype=torch.int64)
        whole[: len(read)] = torch.from_numpy(read)
        labels = whole[1:].clone()
        labels[max(0, num_tokens - start) :] = IGNORE_INDEX
        last = bounds[1:] - 1 - start
        labels[torch.from_numpy(last[(last >= 0) & (last < stop - start)]).long()] = IGNORE_INDEX
        return whole[:-1], labels

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Read tokens [start, stop) of the packed stream, int64."""
        parts = [np.zeros(0, dtype=np.int64)]
        at, document = start, int(np.searchsorted(self.ends, start, side="right"))
        while at < stop:
            number, end = int(self.documents[document]), int(self.ends[document])
            begin = end - int(self.files.lengths[number])
            parts.append(self.files.read(number, at - begin, min(stop, end) - begin).astype(np.int64))
            at, document = end, document + 1
        return np.concatenate(parts)


def split(num_documents: int, held_out_percent: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the training documents, shuffled by the seed, and of the held-out ones.

    Every seed holds out the same documents.

    Raises:
        ValueError: no document is left for training.
    """
    order = shuffled(num_documents, "held out")
    count = int(-(-num_documents * held_out_percent // 100))
    if count >= num_documents:
        raise ValueError(
            f"token files must have more than {count} documents, which held_out_percent {held_out_percent} holds out, "
            f"got {num_documents}; prepare more, cut a long text into several documents, or hold out fewer."
        )
    held_out, trained = order[:count], order[count:].sort().values
    return trained[shuffled(len(trained), f"{seed}/documents")], held_out
