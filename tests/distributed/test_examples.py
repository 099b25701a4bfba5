"""Examples of the documents, run on CPU processes over gloo, as printed or with other sizes.

The README's is in test_newcomer.py, those of Trainer and TRL are in test_trainer_examples.py. The ranks are forked
with the imports already done (tests/recipes/launching.py): torchrun would take most of the time.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.examples import example
from tests.recipes.launching import ROOT, run_ranks

# A gloo thread that outlives its group aborts the process now and then; see docs/huggingface.md.
END = "dist.destroy_process_group()\n"
CHECK_FREED = f"""
import weakref
group = weakref.ref(dist.group.WORLD)
{END}print("group freed" if group() is None else "group alive")
"""
TWO_RINGS = """
import torch, torch.distributed as dist
from ringflash import huggingface
from tests.helpers import models

dist.init_process_group("gloo")
model, whole = models.build(), models.build(impl="sdpa")
sequences = torch.randint(0, 61, (2, 1, 24), generator=torch.Generator().manual_seed(1))
logits = whole(input_ids=sequences[:, 0]).logits[:, :-1]
torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 0, 1:].flatten()).backward()
EXAMPLE
for (name, sharded), one in zip(model.named_parameters(), whole.parameters(), strict=True):
    torch.testing.assert_close(sharded.grad.full_tensor(), one.grad, rtol=0, atol=1e-10, msg=name)
print("gradients are equal")
dist.destroy_process_group()
"""


def run(code: str, folder: Path, num_ranks: int = 2) -> str:
    """Write a script to the folder and return what it prints."""
    script = folder / "script.py"
    script.write_text(code)
    return run_ranks(script, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("document", "start", "printed", "times"),
    [
        ("wrapping", "# train_loop.py", "loss", 3),
        ("lightning", "# lightning_module.py", "loss", 4),
        ("huggingface", "# policy.py", "loss", 3),
        ("wrapping", "# attention.py", "norm", 1),
    ],
)
def test_results_are_those_of_one_process(document: str, start: str, printed: str, times: int, tmp_path: Path) -> None:
    code = example(f"docs/{document}.md", start)
    two, one = (re.findall(rf"^.*{printed}.*$", run(code, tmp_path, ranks), re.MULTILINE) for ranks in (2, 1))
    assert len(two) == times and two == one


def test_minimal_ring_equals_dense(tmp_path: Path) -> None:
    """It asserts errors below 1e-12, on four ranks."""
    printed = run((ROOT / "examples" / "minimal_ring.py").read_text(), tmp_path, 4)
    assert printed.count("differs from dense attention by at most") == 16, printed


def test_group_of_a_transformers_model_is_freed(tmp_path: Path) -> None:
    """The last line of docs/huggingface.md's example is in the check."""
    code = example("docs/huggingface.md", "# train.py")
    assert code.endswith(END)
    printed = run(code.removesuffix(END) + CHECK_FREED, tmp_path)
    assert printed.count(": loss 5.") == 2, printed
    assert printed.count("group freed") == 2, printed


def test_two_rings_train_what_one_process_trains(tmp_path: Path) -> None:
    """On 2 x 2 CPU processes instead of 2 x 4 GPUs."""
    code = example("docs/huggingface.md", "from torch.distributed.device_mesh")
    assert code.count('"cuda", (2, 4)') == 1
    code = TWO_RINGS.replace("EXAMPLE", code.replace('"cuda", (2, 4)', '"cpu", (2, 2)'))
    assert run(code, tmp_path, 4).count("gradients are equal") == 4


def test_deepspeed_learns(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    printed = run(example("docs/deepspeed.md", "# deepspeed_zero.py").replace("(1, 1024)", "(1, 128)"), tmp_path)
    losses = [float(x) for x in re.findall(r"rank 0: loss ([0-9.]+)", printed)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2], printed
