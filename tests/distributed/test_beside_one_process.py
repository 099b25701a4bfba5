"""In bf16 the ring loses what one process loses; a ring that rounds what it passes on loses more (tests/multi_gpu)."""

from __future__ import annotations

from tests.helpers.pool import Pool
from tests.multi_gpu.test_beside_others import CASES, GRADED, NOISE, TOKENS, mean_of, measure


def test_bf16_errors_are_those_of_one_process(pool: Pool) -> None:
    ranks = pool.run(measure, CASES[0], TOKENS["gloo"], "gloo", "bfloat16", "reference", size=4)
    for key in GRADED:
        means = {name: mean_of(key, [found[name] for found in ranks]) for name in ranks[0]}
        assert means["the ring"] <= NOISE * means["reference"], (key, means)
        assert means["a ring that rounds"] > 1.4 * means["the ring"], (key, means)
