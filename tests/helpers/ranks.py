"""Start the processes of a job, with torchrun's variables and, on the CPU, forked with the imports already done.

    run_ranks("tests.my_worker", folder, num_ranks=2)      # python -m of a module, or python of a script, as ranks

Ranks that stay and run functions are in tests/helpers/pool.py; commands that a user would type in
tests/recipes/launching.py.
"""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, ForkServerContext
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from tests.helpers.nan_memory import fill_new_memory

ROOT = Path(__file__).parents[2]
TORCHRUN = (
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK",
)  # fmt: skip
_PRELOADED = [
    "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "transformers.trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer",
    "trl.trainer.sft_trainer", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3", "lightning.pytorch.cli", "torch.utils.tensorboard", "deepspeed",
]  # fmt: skip


def forked() -> ForkServerContext:
    """Return the context of `multiprocessing` whose processes are forked from a server that has imported the above.

    The imports take five seconds. All callers share one server, which the first process starts; it has no thread, no
    process group and no code of ours, and leaves out what is not installed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def environment_of(**more: str) -> dict[str, str]:
    """Return the variables of a process on the CPU, in the repository's root: the caller's, changed."""
    here = {"PYTHON": sys.executable, "PYTHONPATH": ".:kernels", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **here, **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """`target(*arguments)` in a process for each rank, started at once; they share a store, which lives here.

    Args:
        arguments: of each rank.
        base: variables of the ranks, to which torchrun's are added, and then those of `environment`.
        ranks_per_host: as if from so many ranks on there were another host; default all on one.
        processes: how they begin; default `forked`.
    """

    daemon = True

    def __init__(
        self, target: Callable[..., None], arguments: Sequence[Sequence[Any]], base: dict[str, str],
        ranks_per_host: int | None = None, processes: BaseContext | None = None, **environment: str,
    ) -> None:  # fmt: skip
        size, context = len(arguments), processes or forked()
        per_host = ranks_per_host or size
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = ("127.0.0.1", self.store.port, True, "forked", 0, size, per_host)
        self.started: list[Any] = []
        try:
            for i, each in enumerate(arguments):
                values = (*job, i, i % per_host, i // per_host)
                variables = base | dict(zip(TORCHRUN, map(str, values), strict=True)) | environment
                process = context.Process(target=_begin, args=(variables, target, *each), daemon=self.daemon)  # type: ignore[attr-defined]
                self.started.append(process)
                process.start()
        except BaseException:
            self.close()
            raise

    def statuses(self) -> list[int | None]:
        """Exit statuses by rank; None of those that still run."""
        return [process.exitcode for process in self.started]

    def close(self) -> None:
        """End what still runs."""
        for process in self.started:
            if process.pid is not None and process.is_alive():
                process.kill()
                process.join()


class Ranks(Processes):
    """`torchrun --nproc_per_node <num_ranks> <program> <arguments>`, without the launcher.

    Args:
        program: a script, or the name of a module.
        ranks_per_host, processes: of `Processes`.
        environment: variables added to those of `environment_of`.
    """

    daemon = False  # programs may start processes

    def __init__(
        self, program: str | Path, *arguments: str | Path, num_ranks: int, ranks_per_host: int | None = None,
        processes: BaseContext | None = None, **environment: str,
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name, "output")
        self._output.touch()
        argv = [str(x) for x in (program, *arguments)]
        each = [(self._output, argv)] * num_ranks
        super().__init__(_run_program, each, environment_of(), ranks_per_host, processes, **environment)

    def finish(self, timeout_s: float) -> str:
        """Wait for the ranks and return what they printed.

        Raises:
            AssertionError: a rank failed, which ends the others, or no end in time; with the output.
        """
        try:
            left, deadline = {rank.sentinel: rank for rank in self.started}, time.monotonic() + timeout_s
            while left and not any(self.statuses()) and time.monotonic() < deadline:
                for sentinel in wait(list(left), max(0.0, deadline - time.monotonic())):
                    left.pop(sentinel).join()  # type: ignore[call-overload]
        finally:  # one failed, or time is up
            self.close()
        assert not any(self.statuses()), f"exit statuses {self.statuses()}:\n{self.output()[-8000:]}"
        return self.output()

    def output(self) -> str:
        """Return what the ranks have printed by now."""
        return self._output.read_text(errors="replace")


def run_ranks(
    program: str | Path, *arguments: str | Path, num_ranks: int, timeout_s: float = 150.0, **environment: str
) -> str:
    """Start `Ranks` and return what they print."""
    return Ranks(program, *arguments, num_ranks=num_ranks, **environment).finish(timeout_s)


def _begin(environment: dict[str, str], target: Callable[..., None], *arguments: Any) -> None:
    fill_new_memory()
    gc.freeze()  # collections, of which DeepSpeed's ZeRO 3 asks for many, pass over what was imported before
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    sys.path += [path for path in environment.get("PYTHONPATH", "").split(":") if path]
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    target(*arguments)


def _run_program(output: Path, argv: list[str]) -> None:
    with output.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = argv
    if argv[0].endswith(".py"):
        runpy.run_path(argv[0], run_name="__main__")
    else:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
