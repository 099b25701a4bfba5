"""A rank that dies, raises, exits or sleeps ends the others with an error that names it. Two GPUs or more.

Over the copy engine and NCCL, there for keys and for states of recurrent layers. Ranks are new processes,
since they end. All jobs run at once on the same GPUs: each of them mostly waits. Two have no fault, a watch that looks
all the time, captured calls, and calls under way while something else is captured. In two the other ranks end with
calls in flight, which the last one has not begun.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.helpers.faulty_job import GOOD_STEPS, RECURRENT, Job
from tests.multi_gpu.conftest import Setup

pytestmark = pytest.mark.multi_gpu

TIMEOUT_S = 15.0
LIMIT_S = 100.0  # for processes that start, the timeout, and the 30 seconds that docs/troubleshooting.md promises
CALL = 2 * GOOD_STEPS + 1  # forward and backward of the good steps, then the one that the victim does not make
PLACES = {  # where a rank waits for one that has not begun; NCCL may keep a message to it, so a forward need not wait
    "copy_engine": f"for all ranks to begin in forward call {CALL}",
    "nccl": f"for section 0 in forward call {CALL}",
    RECURRENT: f"for (states of a recurrent layer in forward call {CALL}"
    f"|gradients of states of a recurrent layer in backward call {CALL + 1})",
}
FAULTS = [(way, fault) for fault in ("raises", "exits", "dies", "sleeps") for way in ("nccl", "copy_engine")]
FAULTS += [(RECURRENT, "dies")]
HEALTHY = [(way, "none") for way in PLACES if way != RECURRENT]
LATE = [(way, "is late") for way in PLACES if way != RECURRENT]

Ends = dict[tuple[str, str], tuple[list[int | None], list[str]]]


@pytest.fixture(scope="module")
def ends(setup: Setup) -> Iterator[Ends]:
    """Codes and output of the ranks of every job."""
    if setup.backend != "nccl":
        pytest.skip("needs GPUs")
    jobs = {
        (way, fault): Job(
            setup.ranks, transport=way, fault=fault, device="cuda", impl=setup.impl, timeout_s=TIMEOUT_S,
        )
        for way, fault in FAULTS + HEALTHY + LATE
    }  # fmt: skip
    try:
        found = {which: job.finish(LIMIT_S) for which, job in jobs.items()}
        assert jobs[FAULTS[0]].ended[0] == 1  # a rank that raised waits for no other; seen from its start
        yield found
    finally:
        for job in jobs.values():
            job.close()


@pytest.mark.parametrize("way, fault", FAULTS)
def test_the_others_end_with_the_name_of_the_rank(ends: Ends, way: str, fault: str) -> None:
    codes, texts = ends[way, fault]
    shown = f"{codes}\n" + "\n---\n".join(texts)
    assert all(code not in (0, None) for code in codes), shown
    assert fault != "exits" or codes[1] == 3, shown  # it does not wait for the others until it is killed
    silent = (
        "does not answer: it has died"
        if fault != "sleeps"
        else f"has not begun call {CALL} (its previous call, backward call"
    )
    transport = "nccl" if way == RECURRENT else way
    for rank, text in enumerate(texts):
        assert f"rank {rank} has done {GOOD_STEPS} steps" in text, shown
        if rank == 1:
            continue
        limit, waited = f"made no progress for {TIMEOUT_S:.0f} s: rank 0 has", r"has been waiting \d+ s"
        if "lost the connection to a rank" in text:  # NCCL between hosts says itself that a peer is gone
            assert way in ("nccl", RECURRENT) and fault != "sleeps", shown
            limit, waited = (
                "lost the connection to a rank: rank 0 ",
                rf"({waited}|lost its NCCL connection \(.*\) while.*)",
            )
        assert f"ring attention over {transport} {limit}" in text, shown
        assert re.search(rf"rank {rank} {waited} {PLACES[way]}; ", text), shown
        assert re.search(rf"; rank 1 on GPU \d+ of \S+ {re.escape(silent)}", text), shown


@pytest.mark.parametrize("way, fault", HEALTHY)
def test_a_healthy_job_and_its_captures_go_on(ends: Ends, way: str, fault: str) -> None:
    codes, texts = ends[way, fault]
    assert codes == [0] * len(codes), "\n---\n".join(texts)
    for text in texts:
        assert "has ended well" in text
        for problem in ("made no progress", "lost its device", "the watchdog of ring attention has failed"):
            assert problem not in text


@pytest.mark.parametrize("way, fault", LATE)
def test_ranks_end_after_the_calls_of_a_late_one(ends: Ends, way: str, fault: str) -> None:
    codes, texts = ends[way, fault]
    assert codes == [0] * len(codes) and "rank 1 has ended well" in texts[1], "\n---\n".join(texts)
    if way == "copy_engine":  # NCCL may keep the messages for the late rank
        assert "the program has ended, but its GPU has not finished its ring calls" in texts[0]
