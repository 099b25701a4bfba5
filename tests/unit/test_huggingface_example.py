"""The examples of docs/huggingface.md under torchrun, run as printed. CPU, 2 processes; needs the huggingface extra."""

import re
from concurrent.futures import ThreadPoolExecutor
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

    The last batch of an epoch, after which the model is evaluated, has one sequence for two. Two processes checkpoint
    their layers. One goes back to the middle of the second epoch in the end, and repeats the last step. (Several cannot
    on CPU: transformers loads to "cpu:0" there.)
    """
    pytest.importorskip("accelerate")
    code, runs = example("docs/huggingface.md", "# trainer.py"), tmp_path / "runs"
    plain = code
    code = code.replace("range(16)", "range(15)").replace("max_steps=6", 'max_steps=6,\n        eval_strategy="epoch"')
    last = "    trainer.evaluate()\n"
    again = code.replace('"runs/trainer"', repr(str(runs))).replace('save_strategy="no"', "save_steps=5")
    again = again.replace(last, f'{last}    trainer.train("{runs}/checkpoint-5")\n')
    checkpointed = code.replace("remove_unused", "gradient_checkpointing=True,\n        remove_unused")
    assert checkpointed.endswith(END)
    checkpointed = checkpointed.removesuffix(END) + CHECK_FREED
    assert len({plain, code, again, checkpointed}) == 4
    folders = [tmp_path / "1", tmp_path / "2"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as threads:
        one, two = threads.map(torchrun, [again, checkpointed], folders, [1, 2])
    figures = [re.findall(r"'(loss|grad_norm|eval_loss)': '([\d.]+)'", printed) for printed in (one, two)]
    epochs = [*["loss", "grad_norm"] * 4, "eval_loss", *["loss", "grad_norm"] * 2, "eval_loss"]
    assert [name for name, _ in figures[1]] == [*epochs, "eval_loss"], two
    assert figures[0] == figures[1] + figures[1][-4:-1]
    assert two.count("group freed") == 2, two
