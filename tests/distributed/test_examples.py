"""Examples of the documents, run as printed on two CPU processes over gloo.

The README's is in test_newcomer.py, those of Trainer and TRL are in test_trainer_examples.py. The ranks are forked
with the imports already done (tests/recipes/launching.py): torchrun would take most of the time.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.examples import example
from tests.recipes.launching import run_ranks

# A gloo thread that outlives its group aborts the process now and then; see docs/huggingface.md.
END = "dist.destroy_process_group()\n"
CHECK_FREED = f"""
import weakref
group = weakref.ref(dist.group.WORLD)
{END}print("group freed" if group() is None else "group alive")
"""


def run(code: str, folder: Path, num_ranks: int = 2) -> str:
    """Write a script to the folder and return what it prints."""
    script = folder / "script.py"
    script.write_text(code)
    return run_ranks(script, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("document", "start", "printed", "times"),
    [
        ("wrapping", "# loop.py", "loss", 3),
        ("rl", "# policy.py", "loss", 3),
        ("ring-flash-attention", "# attention.py", "norm", 1),
    ],
)
def test_results_are_those_of_one_process(document: str, start: str, printed: str, times: int, tmp_path: Path) -> None:
    code = example(f"docs/{document}.md", start)
    shown = run(code, tmp_path)
    assert shown.count(printed) == times and shown == run(code, tmp_path, 1)


def test_nothing_keeps_the_group_of_a_transformers_model(tmp_path: Path) -> None:
    """The last line of docs/huggingface.md's example is in the check."""
    code = example("docs/huggingface.md", "# train.py")
    assert code.endswith(END)
    printed = run(code.removesuffix(END) + CHECK_FREED, tmp_path)
    assert printed.count(": loss 5.") == 2, printed
    assert printed.count("group freed") == 2, printed


def test_deepspeed_learns(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    printed = run(example("docs/deepspeed.md", "# zero.py"), tmp_path)
    losses = [float(x) for x in re.findall(r"rank 0: loss ([0-9.]+)", printed)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], printed
