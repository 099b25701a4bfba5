"""Documents that continue one another, made from rollouts that share prefixes, or from spans of images.

    rollouts   p q r s a b        packed      p q r   s a b   s c d e
               p q r s c d e      parents     (-1, 0, 0)
                                  positions   0 1 2   3 4 5   3 4 5 6
                                  labels      q r s   a b .   c d e .

A token with several successors is packed once for each of them, as the first token of a document. So every row has one
label, and every token of a rollout except the first is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringflash.sequence.layout import document_table, read_documents
from ringflash.sequence.mask import check_cu_seqlens
from ringflash.sequence.padding import IGNORE_INDEX


class SharedPrefixes(NamedTuple):
    """Sequences packed so that tokens of a common prefix occur once.

    Args:
        input_ids, position_ids: (1, num_tokens), int64.
        cu_seqlens: the documents, as `ringflash.document_table`.
        labels: (1, num_tokens), int64, the successor of each token, or -100 at the ends of sequences.
        rows: for each sequence, the rows of its tokens except the last. The label of a row is the next token.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    labels: Tensor
    rows: tuple[Tensor, ...]

    def unpack(self, values: Tensor) -> list[Tensor]:
        """Return, for each sequence, the values of its tokens except the last, such as log-probabilities of labels.

        Args:
            values: (num_tokens,) or (1, num_tokens), with or without padding after them. The gradient of a value is
                the sum over the sequences that share its row.
        Raises:
            ValueError: values of another shape, such as a shard or logits.
        """
        wanted = self.input_ids.shape[1]
        if values.dim() not in (1, 2) or values.shape[:-1].numel() != 1 or values.shape[-1] < wanted:
            raise ValueError(
                f"values must be ({wanted},) or (1, {wanted}), or longer, one for each packed token, got "
                f"{tuple(values.shape)}; give those of the whole packed sequence (ringflash.unshard_sequence)."
            )
        flat = values.flatten()
        return [flat[rows.to(flat.device)] for rows in self.rows]


def places_of(packed: SharedPrefixes, spans: Sequence[tuple[int, int]], num_tokens: int) -> Tensor:
    """Return the packed row of each token of a flattened batch, -1 for tokens without a next one: (num_tokens,).

    Args:
        spans: where each packed sequence begins and ends in the batch.
    """
    places = torch.full((num_tokens,), -1, device="cpu")
    for (start, stop), rows in zip(spans, packed.rows, strict=True):
        places[start : stop - 1] = rows
    return places


def values_at(values: Tensor, places: Tensor) -> Tensor:
    """Return the packed values at the rows that `places_of` returned, and 0 for tokens without a row."""
    return values.flatten()[places.clamp(min=0)].masked_fill(places < 0, 0)


class _Node(NamedTuple):
    tokens: np.ndarray
    parent: int  # index in order of creation
    sequences: list[int]  # sequences that pass through it
    start: int  # position of its first token in these sequences


def share_prefixes(sequences: Sequence[Tensor | Sequence[int]], *, min_shared: int = 1) -> SharedPrefixes:
    """Pack sequences depth first, each common prefix once.

    Of the trees that continue a document, the largest is first. The path of any document then consists of at most
    1 + log2(documents) pieces of the packed sequence. The result is on the CPU, and the same on all ranks.

    Args:
        sequences: token ids, each of one token or more. Equal sequences are packed once.
        min_shared: shorter common continuations are not shared. Short documents leave parts of kernels' tiles empty.
    Raises:
        ValueError: no sequences, or one that is empty, not 1-D or not of integers; min_shared below 1.
    """
    if min_shared < 1:
        raise ValueError(f"min_shared must be 1 or more, got {min_shared}; leave it out to share all.")
    ids = [np.asarray(x.cpu() if isinstance(x, Tensor) else x) for x in sequences]
    wrong = [x.shape for x in ids if x.ndim != 1 or not len(x)]
    if wrong or not ids:
        raise ValueError(
            "sequences must be one or more, each 1-D with one token or more, got "
            f"{wrong[0] if wrong else 'none'}; leave empty ones out, and flatten (1, seqlen)."
        )
    kinds = sorted({str(x.dtype) for x in ids if x.dtype.kind not in "iu"})
    if kinds:
        raise ValueError(f"sequences must be integers, token ids, got {kinds}; tokenize them first.")
    ids = [x.astype(np.int64) for x in ids]
    nodes = _grow(ids, min_shared)
    order = _depth_first(nodes)
    place = {node: index for index, node in enumerate(order)}
    bounds = np.cumsum([0, *(len(nodes[node].tokens) for node in order)])
    parents = [place.get(nodes[node].parent, -1) for node in order]
    tokens = np.concatenate([nodes[node].tokens for node in order])
    positions = np.concatenate([nodes[node].start + np.arange(len(nodes[node].tokens)) for node in order])
    labels = np.append(tokens[1:], IGNORE_INDEX)
    labels[bounds[1:] - 1] = IGNORE_INDEX
    rows: list[list[np.ndarray]] = [[] for _ in ids]
    for index, node in enumerate(order):
        first, end = bounds[index], bounds[index + 1]
        if parents[index] >= 0:
            labels[bounds[parents[index] + 1] - 1] = tokens[first]
        for sequence in nodes[node].sequences:
            rows[sequence].append(np.arange(first, min(end, first + len(ids[sequence]) - 1 - nodes[node].start)))
    return SharedPrefixes(
        torch.from_numpy(tokens)[None],
        torch.from_numpy(positions)[None],
        document_table(torch.from_numpy(bounds).int(), torch.tensor(parents, dtype=torch.int32, device="cpu")),
        torch.from_numpy(labels)[None],
        tuple(torch.from_numpy(np.concatenate(x)) for x in rows),
    )


def _grow(ids: list[np.ndarray], min_shared: int) -> list[_Node]:
    """Return the documents, each after its parent."""
    nodes: list[_Node] = []
    groups = _group_by_token(ids, range(len(ids)), 0)
    todo = [(group, 0, 0, -1) for group in groups]
    while todo:
        # The sequences of a group agree up to position `known`; their tokens up to `start` are in `nodes` already.
        group, start, known, parent = todo.pop()
        stop = _common(ids, group, known)
        longer = [member for member in group if len(ids[member]) > stop]
        ended = [member for member in group if len(ids[member]) == stop]  # these sequences are equal
        if longer and stop - 1 - start >= min_shared:
            nodes.append(_Node(ids[group[0]][start : stop - 1], parent, group, start))
            start, parent = stop - 1, len(nodes) - 1
        elif ended:
            nodes.append(_Node(ids[ended[0]][start:stop], parent, ended, start))
        todo += [(part, start, stop, parent) for part in _group_by_token(ids, longer, stop)]
    return nodes


def _group_by_token(ids: list[np.ndarray], members: Sequence[int], position: int) -> list[list[int]]:
    """Divide sequences by their token at a position."""
    groups: dict[int, list[int]] = {}
    for member in members:
        groups.setdefault(int(ids[member][position]), []).append(member)
    return list(groups.values())


def _common(ids: list[np.ndarray], group: list[int], start: int) -> int:
    """Return the position up to which the sequences of a group agree."""
    stop = min(len(ids[member]) for member in group)
    first = ids[group[0]]
    for member in group[1:]:
        differ = np.flatnonzero(ids[member][start:stop] != first[start:stop])
        stop = start + int(differ[0]) if len(differ) else stop
    return stop


def _depth_first(nodes: list[_Node]) -> list[int]:
    """Order nodes depth first, the largest tree first."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(index)
    size = [len(node.tokens) for node in nodes]
    for index in reversed(range(len(nodes))):  # parents are created before their children
        if nodes[index].parent >= 0:
            size[nodes[index].parent] += size[index]
    order: list[int] = []
    stack = sorted(children.get(-1, []), key=lambda i: size[i])
    while stack:
        index = stack.pop()
        order.append(index)
        stack += sorted(children.get(index, []), key=lambda i: size[i])
    return order


def span_documents(block_sequence_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the documents of a causal sequence with bidirectional spans, as `document_table` does.

    Text and spans alternate, and each continues the previous one. The result is on the CPU.

    Args:
        block_sequence_ids: (seqlen,) or (1, seqlen), as transformers makes them of `token_type_ids`: -1 for text;
            tokens with the same number see one another.
        cu_seqlens: (num_documents + 1,), int32, bounds of packed documents.
    Raises:
        NotImplementedError: the tokens of one number are not neighbours, or are in several documents.
        ValueError: several rows; bounds that do not end at seqlen; or a mask, whose 0 for text would number a span.
    """
    ids = block_sequence_ids.cpu()
    if ids.dtype == torch.bool or ids.is_floating_point():
        raise ValueError(
            f"block_sequence_ids must be integers, got {ids.dtype}; number the spans, and give -1 to text, as "
            "torch.where(mask, 0, -1) does for a mask of one span."
        )
    ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
    if ids.dim() != 1:
        raise ValueError(
            f"block_sequence_ids must be (seqlen,) or (1, seqlen), got {tuple(ids.shape)}; make a table of each row."
        )
    packed_bounds = (0, len(ids)) if cu_seqlens is None else read_documents(cu_seqlens).plain_bounds("span_documents")
    check_cu_seqlens(packed_bounds, len(ids))
    bounds = torch.tensor(packed_bounds, device="cpu")
    changes = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    cuts = torch.cat([bounds, changes]).unique()
    kinds = ids[cuts[:-1].long()]
    spans = kinds[kinds >= 0]
    if len(spans.unique()) < len(spans):
        raise NotImplementedError(
            "block_sequence_ids must number each span of neighbours differently, got one number in two spans; number "
            "them by document and span."
        )
    begins = torch.isin(cuts[:-1], bounds)
    parents = torch.where(begins, -1, torch.arange(-1, len(kinds) - 1, device="cpu"))
    return document_table(cuts.int(), parents.int(), kinds >= 0)
