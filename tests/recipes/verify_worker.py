"""The command `ringflash verify` on several trainings in one launch; rank 0 writes their reports to <out>.

torchrun --nproc_per_node 2 -m tests.recipes.verify_worker <folder with the modules that it imports> <out>
"""

import contextlib
import io
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ringflash.commands import verify as command
from ringflash.commands.cli import main
from ringflash.lightning import CausalLM
from ringflash.lightning.strategy import strategy_of
from tests.helpers.models import TINY

CONFIG = {"model_type": "llama", **TINY, "tie_word_embeddings": False}
DOCUMENTS = ["--cu_seqlens", "[0,19,48]"]
FACTORIES = {"summed_evaluation": DOCUMENTS, "own": [], "misplaced": []}


class SummedEvaluation(CausalLM):
    """Reports the sum of the ranks' evaluation losses."""

    def on_validation_epoch_end(self) -> None:
        self._totals[..., 0] *= strategy_of(self.trainer).cp_size
        super().on_validation_epoch_end()


def summed_evaluation(group: Any) -> CausalLM:
    """Its evaluation loss is that of cp_size sequences."""
    return SummedEvaluation(CONFIG)


def own(group: Any) -> Any:
    """A module with the diff of docs/lightning.md, whose batches are whole."""
    from changed_gpt import GPT  # type: ignore[import-not-found]

    return GPT()


def misplaced(group: Any) -> Any:
    """With positions that are counted from the shard."""
    from changed_gpt import GPT

    return type("Misplaced", (GPT,), {"positions": lambda self, tokens: torch.arange(tokens.shape[1])})()


def verify(factory: str) -> dict[str, Any]:
    """Return what the command says, with its exit status."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(
            ["verify", f"tests.recipes.verify_worker:{factory}", "--seqlen", "48", "--json", *FACTORIES[factory]]
        )
    text = printed.getvalue()
    return {"status": status} | (json.loads(text[text.index('{\n  "passed"') :]) if os.environ["RANK"] == "0" else {})


def started(target: str, *arguments: str) -> list[dict[str, Any]]:
    """Return the command's output on each rank that it starts, and the status; these ranks stand in for them."""
    printed, errors, rank = io.StringIO(), io.StringIO(), int(os.environ["RANK"])
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    join = partial(dist.init_process_group, store=dist.PrefixStore(target, agent), rank=rank, world_size=2)
    with (
        mock.patch.object(command, "elastic_launch", lambda _, function: lambda options: [function(options)]),
        mock.patch.object(dist, "init_process_group", join),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
    ):
        status = main(["verify", target, *arguments])
    ranks: list[Any] = [None, None]
    join("gloo", store=dist.PrefixStore(f"{target} gather", agent))
    dist.all_gather_object(ranks, {"status": status, "printed": printed.getvalue(), "errors": errors.getvalue()})
    dist.destroy_process_group()
    return ranks


if __name__ == "__main__":
    folder, out, *example = sys.argv[1:]
    sys.path.insert(0, folder)
    small = ("--nproc", "2", "--seqlen", "64")
    found: dict[str, Any] = {name: started(f"failing_{name}:build", *small) for name in ("import", "build")}
    found["example"] = started(*example)
    dist.init_process_group("gloo")
    # Over gloo Lightning evaluates without inference mode; here it is to do what it does over NCCL.
    with mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False):
        found |= {factory: verify(factory) for factory in FACTORIES}
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()
