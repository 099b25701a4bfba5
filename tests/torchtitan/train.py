"""One rank of a training by torchtitan's own Trainer, which writes what each step computed.

    torchrun --nproc-per-node N -m tests.torchtitan.train OUT.safetensors '{"model": "llama3", "cp": 2, ...}'

OUT gets the losses, the gradients of the first step and the parameters after the last one, whole.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torchtitan import cpu  # noqa: F401  # isort: skip
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import ParallelismConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer

from benchmarks.bench_torchtitan import NoTokenizer

ROWS = 4  # of each step, whatever the number of ranks
LAYERS = 2
CHECKPOINTING = {None: None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}


class Documents(BaseDataLoader):
    """Rows of packed documents; row i of a step is the same in every run. A fifth of the labels is ignored."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Documents of row i, by i modulo the length. The Validator sets `infinite`, which these rows are."""

        documents: tuple[int, ...] = (3, 1, 2, 4)
        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.config, self.dp_size, self.dp_rank = config, dp_world_size, dp_rank
        self.seqlen, self.batch, self.count = seq_len, local_batch_size, 0

    def _row(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 2048, (self.seqlen + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[torch.rand(self.seqlen, generator=generator) < 0.2] = -100
        positions = torch.arange(self.seqlen)
        num_documents = self.config.documents[index % len(self.config.documents)]
        for cut in sorted(torch.randperm(self.seqlen - 1, generator=generator)[: num_documents - 1].add(1).tolist()):
            positions[cut:] = torch.arange(self.seqlen - cut)
        return ids[:-1], positions, labels

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = (self.count * self.dp_size + self.dp_rank) * self.batch
            self.count += 1
            rows = [self._row(first + i) for i in range(self.batch)]
            ids, positions, labels = (torch.stack(x) for x in zip(*rows, strict=True))
            yield {"input": ids, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches were read."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after these batches."""
        self.count = state["count"]


def configure(case: dict[str, Any]) -> Trainer.Config:
    """Return a configuration of torchtitan for a case of the tests."""
    model = case["model"]
    flavor = case.get("flavor", f"{model}_debugmodel")
    config = getattr(importlib.import_module(f"torchtitan.models.{model}.config_registry"), flavor)()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Documents.Config(**case.get("data", {}))
    del config.model_spec.model.layers[LAYERS:]
    training = config.training
    training.seq_len, training.steps = case.get("seqlen", 256), case.get("steps", 2)
    training.local_batch_size, training.global_batch_size = case.get("rows", ROWS), ROWS
    training.dtype = training.mixed_precision_param = training.mixed_precision_reduce = "float64"
    training.disable_cuda_graphs = not case.get("cuda_graphs", False)
    config.checkpoint.enable = "folder" in case
    if "folder" in case:
        config.dump_folder, config.checkpoint.interval = case["folder"], 1
        config.checkpoint.load_step = case.get("load_step", -1)
    config.validator.enable = case.get("validate", False)
    if config.validator.enable:
        config.validator.dataloader, config.validator.freq, config.validator.steps = config.dataloader, 1, 1
    config.activation_checkpoint = CHECKPOINTING[case.get("checkpointing")]
    config.compile.enable = case.get("compile", False)
    config.parallelism = ParallelismConfig(
        context_parallel_degree=case.get("cp", 1), tensor_parallel_degree=case.get("tp", 1),
        pipeline_parallel_degree=case.get("pp", 1), data_parallel_replicate_degree=case.get("replicate", 1),
        pipeline_parallel_schedule="1F1B", context_parallel_load_balancer=case.get("balancer", "headtail"),
        spmd_backend=case.get("backend", "spmd_types"),
    )  # fmt: skip
    config.debug.seed, config.debug.deterministic = 0, False
    config.debug.spmd_typechecking = case.get("typechecking", False)
    config.override = OverrideConfig(imports=[f"ringflash.torchtitan.{name}" for name in case.get("override", ())])
    return config


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that does not depend on how it is sharded."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone().contiguous()


class Recorded:
    """Losses, gradients and parameters that the steps of a trainer compute."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.losses: list[float] = []
        self.validation: list[float] = []
        self.tensors: dict[str, torch.Tensor] = {}
        log, log_validation, clip = (
            trainer.metrics_processor.log, trainer.metrics_processor.log_validation, dist_utils.clip_grad_norm_,
        )  # fmt: skip

        def logged(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
            self.losses.append(loss)
            log(step, loss, *args, **kwargs)

        def logged_validation(loss: float, *args: Any, **kwargs: Any) -> None:
            self.validation.append(loss)
            log_validation(loss, *args, **kwargs)

        def clipped(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not self.tensors:
                self.tensors = {f"gradient.{name}": whole(p.grad) for name, p in self.parameters()}
            return clip(*args, **kwargs)

        trainer.metrics_processor.log, trainer.metrics_processor.log_validation = logged, logged_validation
        dist_utils.clip_grad_norm_ = clipped

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters of this rank's stages, by name."""
        for part in self.trainer.model_parts:
            for name, parameter in part.named_parameters():
                yield name.replace("_checkpoint_wrapped_module.", ""), parameter

    def result(self) -> dict[str, torch.Tensor]:
        """Return all that was recorded, of all stages of a pipeline."""
        self.tensors |= {f"parameter.{name}": whole(p) for name, p in self.parameters()}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.tensors)
        found = {"losses": torch.tensor(self.losses, dtype=torch.float64)}
        if self.validation:
            found["validation"] = torch.tensor(self.validation, dtype=torch.float64)
        return found | {name: x for part in parts for name, x in part.items()}

    def begin_as(self, path: Path) -> None:
        """Take the parameters of the first run: torchtitan draws others if they are sharded."""
        if not path.exists():
            save_file({name: whole(p) for name, p in self.parameters()}, path)
        first = load_file(path)
        with torch.no_grad():
            for name, p in self.parameters():
                x = first[name]
                p.copy_(distribute_tensor(x, p.device_mesh, p.placements) if isinstance(p, DTensor) else x)


def main(out: Path, case: dict[str, Any]) -> None:
    """Train, and write the result from the rank that has the loss of the last stage."""
    time.sleep = lambda _: None  # of torchtitan, after the last step
    if "refused" in case:
        with pytest.raises(NotImplementedError, match=case["refused"]):
            configure(case).build()
        return
    trainer = configure(case).build()
    recorded = Recorded(trainer)
    recorded.begin_as(Path(case["first"]))
    trainer.train()
    result = recorded.result()
    if dist.get_rank() == dist.get_world_size() - 1:
        save_file(result, out)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
