"""Processes that begin with torch, transformers and Lightning imported: forked from a server that did it once.

The imports take five seconds of each process, more than what most tests then do in it. The server has no thread, no
process group and no code of ours; what is not installed, it leaves out. CPU only. For the ranks that a test needs: what
is tested as a user starts it has interpreters of its own.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_PRELOADED = [
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.sft_trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "lightning.pytorch.cli",
    "torch.utils.tensorboard",
    "deepspeed",
]


def forked() -> ForkServerContext:
    """Return the context of `multiprocessing`; all callers share one server, which the first process starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context
