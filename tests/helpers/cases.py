"""The cases of the distributed tiers: one list for gloo in fp64 and for GPUs in bf16.

A grid of all products would be some 20,000 runs. Masks meet each other and both layouts in full, on one
shape; shapes meet one another on one mask; the rest are single variations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.two_sided.forests import TREES, of_lengths, random_forest

WINDOWS = ("none", "left", "both", "self", "wide")
DOCUMENTS = ("none", "whole", "tokens", "crossing", "aligned", "mixed")


@dataclass(frozen=True)
class Case:
    """One call of ring_attention; lengths follow from the number of ranks and the tokens of a chunk."""

    causal: bool = True
    window: str = "none"
    documents: str = "none"
    layout: str = "zigzag"
    batch: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    softmax_scale: float | None = None
    strides: str = "contiguous"
    lse_gradient: bool = True
    transport: str = "auto"

    def __str__(self) -> str:
        """The fields that differ from the default, as a test id."""
        default = Case()
        differing = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return "-".join(f"{name}={value}" for name, value in differing.items()) or "default"

    def window_size(self, chunk: int) -> tuple[int, int]:
        """(left, right) for chunks of `chunk` tokens."""
        half = max(1, chunk // 2)
        return {
            "none": (-1, -1),
            "left": (chunk + half, -1),
            "both": (half, chunk + 1),
            "self": (0, 0),
            "wide": (3 * chunk, 0),
        }[self.window]

    def cu_seqlens(self, seqlen: int, chunk: int) -> Sequence[int] | Sequence[Sequence[int]] | None:
        """Bounds of the packed documents of a sequence of two chunks or more for each rank, or rows of a table.

        `documents` is one of DOCUMENTS, of TREES, or "forest" and the seed of a random one.
        """
        if self.documents in TREES:
            return of_lengths(TREES[self.documents], seqlen).rows
        if self.documents.startswith("forest"):
            return random_forest(int(self.documents[6:]), seqlen, window=False).rows
        bounds = {
            "none": None,
            "whole": {0, seqlen},
            "tokens": set(range(0, min(seqlen, 2 * chunk) + 1)) | {seqlen},  # one token each, over two chunks
            "crossing": {0, seqlen // 3 + 1, seqlen - 1, seqlen},
            "aligned": set(range(0, seqlen + 1, chunk)),
            "divisible": {0, seqlen // chunk, 3 * (seqlen // chunk), seqlen},  # for the layout "documents"
            "mixed": {0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1, seqlen - chunk - 1, seqlen},
        }[self.documents]
        return None if bounds is None else tuple(sorted(bounds))


def mask_cases() -> list[Case]:
    """Causal or not, every window, every packing, both layouts."""
    return [
        Case(causal=causal, window=window, documents=documents, layout=layout)
        for causal in (True, False)
        for window in WINDOWS
        for documents in DOCUMENTS
        for layout in ("zigzag", "contiguous")
    ]


def paired_mask_cases() -> list[Case]:
    """Every pair of values of two of the four properties of a mask, in a quarter of all masks."""
    return [
        Case(
            causal=(i + j) % 2 == 0, window=window, documents=documents,
            layout=("zigzag", "contiguous")[(i + j // 2) % 2],
        )
        for i, window in enumerate(WINDOWS)
        for j, documents in enumerate(DOCUMENTS)
    ]  # fmt: skip


def tree_cases() -> list[Case]:
    """Every tree, under every window that trees allow, in the layouts."""
    return [
        Case(documents=documents, window=window, layout=layout)
        for documents in TREES
        for window in ("none", "left", "self", "wide")
        for layout in ("zigzag", "contiguous", "balanced")
    ]


def paired_tree_cases() -> list[Case]:
    """Every pair of tree, window and layout, in a third of all."""
    return [case for i, case in enumerate(tree_cases()) if (i + i // 3 + i // 12) % 3 == 0]


def shape_cases() -> list[Case]:
    """MHA, GQA and MQA, head_dim 16 to 128, batch 1 and 3, under a causal mask and no packing."""
    return [
        Case(batch=batch, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        for batch in (1, 3)
        for num_heads, num_kv_heads in ((2, 2), (4, 2), (6, 2), (4, 1))
        for head_dim in (16, 64, 80, 128)
    ]


def single_cases() -> list[Case]:
    """Strides, scale and a loss that ignores lse, each by itself and under a mask with a window."""
    alone = [
        *(Case(strides=strides, batch=2) for strides in ("heads_first", "fused_qkv", "expanded_dout", "sliced")),
        Case(softmax_scale=0.5),
        Case(softmax_scale=0.5, layout="contiguous"),
        Case(lse_gradient=False),
        Case(lse_gradient=False, layout="contiguous"),
        Case(lse_gradient=False, documents="crossing"),
    ]
    return alone + [replace(case, window="left", causal=False) for case in alone]


def narrow_cases() -> list[Case]:
    """Latent attention at the one pair of head_dims at which values are not padded."""
    narrow = Case(num_heads=2, num_kv_heads=2, head_dim=192, value_dim=128)
    return [narrow, replace(narrow, num_kv_heads=1, documents="crossing", layout="contiguous")]


def all_cases() -> list[Case]:
    return list(dict.fromkeys([*mask_cases(), *shape_cases(), *single_cases(), *narrow_cases()]))
