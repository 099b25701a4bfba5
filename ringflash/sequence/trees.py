"""Documents that continue one another, from what users have: rollouts that share prefixes, and spans of images.

rollouts   p p p p a a a          packed      p p p p a a a b b
           p p p p b b            parents     (-1, 0, 0), documents p, a, b
                                  positions   0 1 2 3 4 5 6 4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringflash.sequence.layout import document_table, read_documents
from ringflash.sequence.padding import IGNORE_INDEX


class SharedPrefixes(NamedTuple):
    """Sequences packed so that tokens of a common prefix occur once.

    input_ids, position_ids: (1, num_tokens).
    cu_seqlens: the documents, as `document_table`.
    labels: (1, num_tokens), successor of each token in its document or in the one that follows it directly, or -100.
    branch_rows, branch_labels: (num_branches,): other successors. The hidden states of these rows are needed again.
    places: for each sequence, the index of each of its tokens but the first in (log-probabilities of labels, those of
        branch_labels), joined.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    labels: Tensor
    branch_rows: Tensor
    branch_labels: Tensor
    places: tuple[Tensor, ...]

    def unpack(self, log_probs: Tensor, of_branches: Tensor) -> list[Tensor]:
        """Return the log-probabilities of each sequence's tokens but the first.

        Args:
            log_probs: (num_tokens,), of `labels`.  of_branches: (num_branches,), of `branch_labels`.
        """
        joined = torch.cat([log_probs, of_branches])
        return [joined[places] for places in self.places]


class _Node(NamedTuple):
    tokens: np.ndarray
    parent: int  # index in order of creation
    sequences: list[int]  # that pass through it
    start: int  # position of its first token in these sequences


def share_prefixes(sequences: Sequence[Tensor | Sequence[int]], *, min_shared: int = 1) -> SharedPrefixes:
    """Pack sequences depth first, each common prefix once.

    The largest tree comes first among those that continue one document: then the path of any document is at most
    1 + log2(documents) pieces of the packed sequence.

    Args:
        sequences: token ids, each of one token or more.
        min_shared: shorter common continuations are not shared. Short documents leave parts of kernels' tiles empty.
    """
    ids = [np.asarray(x, dtype=np.int64) for x in sequences]
    if not ids or any(len(x) == 0 for x in ids):
        raise ValueError("sequences must hold one token or more each, got an empty one; leave it out.")
    nodes: list[_Node] = []
    _grow(ids, list(range(len(ids))), 0, -1, nodes, max(1, min_shared))
    order = _depth_first(nodes)
    place = {node: index for index, node in enumerate(order)}
    bounds = [0]
    for node in order:
        bounds.append(bounds[-1] + len(nodes[node].tokens))
    parents = [place.get(nodes[node].parent, -1) for node in order]
    tokens = np.concatenate([nodes[node].tokens for node in order])
    positions = np.concatenate([nodes[node].start + np.arange(len(nodes[node].tokens)) for node in order])
    labels = np.full(len(tokens), IGNORE_INDEX)
    branch_rows, branch_labels, entry = [], [], {}  # where the first token of a document is predicted
    for index, (first, end) in enumerate(pairwise(bounds)):
        labels[first : end - 1] = tokens[first + 1 : end]
        if parents[index] < 0:
            continue
        row = bounds[parents[index] + 1] - 1
        if row + 1 == first:
            labels[row], entry[index] = tokens[first], row
        else:
            entry[index] = len(tokens) + len(branch_rows)
            branch_rows.append(row)
            branch_labels.append(tokens[first])
    places: list[list[np.ndarray]] = [[] for _ in ids]
    for index, node in enumerate(order):
        first, end = bounds[index], bounds[index + 1]
        inside = np.arange(first, end) - 1
        inside = inside[1:] if parents[index] < 0 else np.concatenate([[entry[index]], inside[1:]])
        for sequence in nodes[node].sequences:
            places[sequence].append(inside)
    table = document_table(torch.tensor(bounds, dtype=torch.int32), torch.tensor(parents, dtype=torch.int32))
    return SharedPrefixes(
        torch.from_numpy(tokens)[None], torch.from_numpy(positions)[None], table, torch.from_numpy(labels)[None],
        torch.tensor(branch_rows, dtype=torch.int64), torch.tensor(branch_labels, dtype=torch.int64),
        tuple(torch.from_numpy(np.concatenate(x)) for x in places),
    )  # fmt: skip


def _grow(
    ids: list[np.ndarray], members: list[int], start: int, parent: int, nodes: list[_Node], min_shared: int
) -> None:
    """Add the documents of the sequences `members`, which agree before position `start`, and continue `parent`."""
    todo = [(members, start, parent)]
    while todo:
        members, start, parent = todo.pop()
        groups: dict[int, list[int]] = {}
        for member in members:
            if len(ids[member]) > start:
                groups.setdefault(int(ids[member][start]), []).append(member)
        for group in groups.values():
            stop = _common(ids, group, start)
            if stop - start < min_shared and len(group) > 1:
                for member in group:
                    nodes.append(_Node(ids[member][start:], parent, [member], start))
                continue
            nodes.append(_Node(ids[group[0]][start:stop], parent, group, start))
            if any(len(ids[member]) > stop for member in group):
                todo.append((group, stop, len(nodes) - 1))


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
    """Return the documents of a causal sequence with spans that are seen in both directions, as `document_table`.

    Args:
        block_sequence_ids: (seqlen,), as transformers makes them of `token_type_ids`: -1 for text; tokens of one number
            see one another.
        cu_seqlens: (num_documents + 1,), int32, bounds of packed documents.
    Raises:
        NotImplementedError: the tokens of one number are not neighbours, or are in several documents.
    """
    ids = block_sequence_ids.cpu()
    bounds = torch.tensor(
        [0, len(ids)] if cu_seqlens is None else read_documents(cu_seqlens).plain_bounds("span_documents")
    )
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
    parents = torch.where(begins, -1, torch.arange(-1, len(kinds) - 1))
    return document_table(cuts.int(), parents.int(), kinds >= 0)
