"""Examples of docs/accelerate.md run as printed on two CPU processes over gloo.

The first one by the command of its first line, up to torchrun; the others on workers that have begun. Qwen3-0.6B is a
tiny model in a folder of that name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.examples import example
from tests.helpers.pool import Context, Pool
from tests.helpers.ranks import run_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate.commands.launch import launch_command, launch_command_parser
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.helpers import trainer


def printed(ctx: Context, code: str, folder: str) -> str:
    """Return what a script prints if a worker runs it."""
    trainer.join(ctx)
    os.chdir(folder)
    with redirect_stdout(StringIO()) as text:
        exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})
    return text.getvalue()


def run(code: str, folder: Path, size: int = 2) -> list[str]:
    """Return what each rank prints; the workers are new ones, since a process registers the backend once."""
    pool = Pool(size)
    try:
        return pool.run(printed, code, str(folder), timeout_s=120)
    finally:
        pool.close()


def launch(code: str, folder: Path) -> str:
    """Return what a script prints if the command in its first line starts it, on forked ranks (`run_ranks`)."""
    words = code.splitlines()[0].partition("run by: accelerate launch ")[2].split()
    script = folder / words[-1]
    script.write_text(f"import os\nos.chdir({str(folder)!r})\n{code}")
    printed = []

    def torchrun(args: Any) -> None:
        assert args.training_script == script.name
        printed.append(run_ranks(script, num_ranks=int(args.nproc_per_node)))

    with mock.patch("torch.distributed.run.run", torchrun):
        launch_command(launch_command_parser().parse_args(words))
    return printed[0]


def test_trainer_by_accelerate_equals_one_process(tmp_path: Path) -> None:
    """Losses, gradient norms and the evaluations, to the four digits that Trainer prints; a step takes two batches.

    The last batch of an epoch has one sequence for two. The process is without ringflash; the ring also continues from
    its checkpoint.
    """
    code = example("docs/accelerate.md", "# hf_trainer.py").replace("range(16)", "range(15)").replace("240 +", "60 +")
    folders = [tmp_path / name for name in ("one", "two", "resumed")]
    for folder in folders:
        folder.mkdir()
    plain = re.sub(r"ringflash\.accelerate\.register\(\)|parallelism_config=.*", "", code)
    resumed = code.replace(".train()", f".train('{folders[0]}/runs/trainer/checkpoint-4')")
    one, two, after = (
        re.findall(r"'(loss|grad_norm|eval_loss)': '([\d.]+)'", text)
        for text in (run(plain, folders[0], 1)[0], launch(code, folders[1]), run(resumed, folders[2])[0])
    )
    steps = ["loss", "grad_norm"]
    assert [name for name, _ in one] == [*steps * 4, "eval_loss", *steps * 2, "eval_loss"]
    assert one == two and after == one[-5:]
    assert (folders[1] / "runs/trainer/checkpoint-6/model.safetensors").is_file()


def test_a_loop_is_that_of_one_process(tmp_path: Path) -> None:
    code = example("docs/accelerate.md", "# loop.py")
    (one,) = run(code.replace("cp_size=2", "cp_size=1"), tmp_path, 1)
    assert one.count("loss 5.") == 4
    assert run(code, tmp_path) == [one, ""]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """With a model, its tokenizer, and texts."""
    tokenizer = trainer.tokenizer()
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    for part in (Qwen3ForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path / "Qwen/Qwen3-0.6B")
    lines = [json.dumps({"text": "a ring of ranks holds a sequence " * (1 + i)}) for i in range(6)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    yield tmp_path


@pytest.mark.parametrize("kind, steps", [("sft", 3), ("grpo", 2)])
def test_trl_learns(folder: Path, kind: str, steps: int) -> None:
    """SFT has six documents in one packed row, three times."""
    pytest.importorskip("trl")
    run(example("docs/accelerate.md", f"# {kind}.py"), folder)
    folders = ("Qwen/Qwen3-0.6B", f"runs/{kind}/checkpoint-{steps}")
    start, end = (load_file(folder / path / "model.safetensors") for path in folders)
    assert all(x.isfinite().all() for x in end.values())
    assert any(not torch.equal(end[name].float(), x.float()) for name, x in start.items())
