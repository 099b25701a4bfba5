"""ring_attention against attention of the whole sequence: out, lse and all gradients. gloo, 2 to 4 CPU processes.

fp64 to 1e-11 over every mask, layout, head grouping and memory order; fp32 and bf16 by the tolerance policy.
All masks run on 4 ranks, and a pairwise cover of them on 2 and 3. Shapes do not change who sends what: they run on 2.
"""

from __future__ import annotations

import pytest

from tests.helpers import ring_check
from tests.helpers.cases import (
    Case,
    mask_cases,
    narrow_cases,
    paired_mask_cases,
    paired_tree_cases,
    shape_cases,
    single_cases,
    tree_cases,
)
from tests.helpers.pool import Pool


@pytest.mark.parametrize("case", mask_cases(), ids=str)
def test_masks(pool: Pool, case: Case) -> None:
    pool.run(ring_check.check, case, size=4)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", paired_mask_cases(), ids=str)
def test_masks_on_fewer_ranks(pool: Pool, case: Case, size: int) -> None:
    pool.run(ring_check.check, case, size=size)


@pytest.mark.parametrize("case", paired_tree_cases(), ids=str)
def test_trees(pool: Pool, case: Case) -> None:
    """Documents that continue others, and bidirectional ones."""
    for size in (4, 2, 3):
        pool.run(ring_check.check, case, 10, size=size)


@pytest.mark.nightly
@pytest.mark.parametrize("case", tree_cases(), ids=str)
def test_all_trees(pool: Pool, case: Case) -> None:
    for size in (4, 2, 3):
        pool.run(ring_check.check, case, 13, size=size)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(40))
def test_random_trees(pool: Pool, seed: int) -> None:
    heads, groups = ((4, 2), (2, 2), (6, 1))[seed % 3]
    window, layout = ("none", "left", "wide")[seed // 2 % 3], ("zigzag", "balanced", "contiguous")[seed // 3 % 3]
    case = Case(documents=f"forest{seed}", num_heads=heads, num_kv_heads=groups, layout=layout, window=window)
    for size in (2, 4):
        pool.run(ring_check.check, case, 12, size=size)


@pytest.mark.parametrize("case", shape_cases(), ids=str)
def test_shapes(pool: Pool, case: Case) -> None:
    pool.run(ring_check.check, case, size=2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", single_cases(), ids=str)
def test_variations(pool: Pool, case: Case, size: int) -> None:
    pool.run(ring_check.check, case, size=size)


@pytest.mark.parametrize("case", narrow_cases(), ids=str)
def test_narrow_values(pool: Pool, case: Case) -> None:
    """Only values of 128 columns travel with keys of 192, and gradients alike."""
    pool.run(ring_check.check, case, size=2)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_short_chunks(pool: Pool, chunk: int, layout: str) -> None:
    """Down to a single token a chunk: with documents of one token, whole shards see nothing of each other."""
    pool.run(ring_check.check, Case(layout=layout, documents="crossing"), chunk, size=4)
    pool.run(ring_check.check, Case(layout=layout, documents="tokens", causal=False), chunk, size=3)


@pytest.mark.parametrize("size", [2, 4])
def test_striped(pool: Pool, size: int) -> None:
    """64 chunks a rank, of one token and of some."""
    for documents, window, causal, chunk in (
        ("mixed", "none", True, 96), ("crossing", "both", True, 32), ("none", "left", False, 32),
        ("deep", "none", True, 64),
    ):  # fmt: skip
        case = Case(layout="striped", documents=documents, window=window, causal=causal)
        pool.run(ring_check.check, case, chunk, size=size)


@pytest.mark.parametrize("size", [2, 4])
def test_balanced(pool: Pool, size: int) -> None:
    """Documents whole on a rank and cut over several, under every mask."""
    for documents, window, causal, chunk in (
        ("crossing", "none", True, 40), ("mixed", "left", True, 6), ("mixed", "both", False, 33),
        ("aligned", "none", False, 6), ("tokens", "self", True, 5), ("whole", "none", True, 16),
    ):  # fmt: skip
        case = Case(layout="balanced", documents=documents, window=window, causal=causal)
        pool.run(ring_check.check, case, chunk, size=size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_documents(pool: Pool, size: int) -> None:
    """A zigzag of each document, down to chunks of one token."""
    for documents, window, causal, chunk in (
        ("divisible", "none", True, 6), ("divisible", "left", True, 4), ("divisible", "both", False, 9),
        ("whole", "wide", True, 5),
    ):  # fmt: skip
        case = Case(layout="documents", documents=documents, window=window, causal=causal)
        pool.run(ring_check.check, case, chunk, size=size)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [Case(), Case(documents="mixed", window="left"), Case(causal=False)], ids=str)
def test_low_precision(pool: Pool, case: Case, dtype: str) -> None:
    pool.run(ring_check.check, case, 32, dtype, size=4)


def test_fp32(pool: Pool) -> None:
    """Unmasked only: the budget is the largest error of fp32 eager attention; in rows of few keys that is luck."""
    pool.run(ring_check.check, Case(causal=False, head_dim=64), 64, "float32", size=4)
