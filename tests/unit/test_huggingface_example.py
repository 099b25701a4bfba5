"""The examples of docs/huggingface.md and accelerate.md, run as printed. CPU, 2 processes; needs their extras."""

import re
from pathlib import Path

import pytest

from tests.helpers.examples import example, torchrun

pytest.importorskip("transformers")

# A gloo thread that outlives its group aborts the process now and then; see docs/huggingface.md.
END = "dist.destroy_process_group()\n"
CHECK_FREED = f"""
import weakref
group = weakref.ref(dist.group.WORLD)
{END}print("group freed" if group() is None else "group alive")
"""


def test_example_runs_as_printed_and_nothing_keeps_the_group(tmp_path: Path) -> None:
    """One run: its last line stands in the check."""
    code = example("docs/huggingface.md", "# train.py")
    assert code.endswith(END)
    printed = torchrun(code.removesuffix(END) + CHECK_FREED, tmp_path)
    assert printed.count(": loss 5.") == 2, printed
    assert printed.count("group freed") == 2, printed


def test_trainer_is_that_of_one_process(tmp_path: Path) -> None:
    """Losses, gradient norms and the evaluations, to the four digits that Trainer prints; a step takes two batches.

    The last batch of an epoch has one sequence for two.
    """
    pytest.importorskip("accelerate")
    code = example("docs/accelerate.md", "# trainer.py").replace("range(16)", "range(15)")
    printed = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        sized = code.replace("cp_size=2", f"cp_size={size}").replace('"runs/trainer"', repr(str(folder / "runs")))
        printed.append(torchrun(sized, folder, size))
    one, two = (re.findall(r"'(loss|grad_norm|eval_loss)': '([\d.]+)'", text) for text in printed)
    assert [name for name, _ in one] == [
        *["loss", "grad_norm"] * 4,
        "eval_loss",
        *["loss", "grad_norm"] * 2,
        "eval_loss",
    ]
    assert one == two
    assert (tmp_path / "2/runs/checkpoint-6/model.safetensors").is_file()
