"""Train what a recipe describes:

    torchrun --nproc_per_node 2 -m recipes.lightning.train fit --config recipes/lightning/quickstart.yaml

Every key of a recipe is also a flag: `--trainer.max_steps 50`, `--data.seqlen 8192`,
`--trainer.strategy.context_parallel_size 4`; `fit --help` lists them. `--ckpt_path <directory>` continues, and
`--ckpt_path auto` from the newest complete checkpoint below output_dir, where there is one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from ringflash.lightning import CausalLM, Progress
from ringflash.lightning.checkpoints import ModelCheckpoint, SameCheckpoint, newest_checkpoint
from ringflash.lightning.sequences import SequenceData

# In the place of hundreds of flags, behind which an error would go unseen.
_USAGE = "--config recipe.yaml [--config another.yaml ...] [--key value ...]"


class RecipeCLI(LightningCLI):
    """Lightning's command line, with the keys `output_dir`, `loggers`, `progress` and `checkpoint` beside its own."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys."""
        parser.add_argument("--output_dir", type=str, required=True, help="Where version_N of the results goes.")
        parser.add_argument(
            "--loggers",
            type=list[Literal["csv", "tensorboard", "wandb"]],
            default=["csv", "tensorboard"],
            help="Where the curves go; trainer.logger takes their place.",
        )
        parser.add_lightning_class_args(Progress, "progress")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer; where the recipe leaves them open, with both loggers and the precision of the device."""
        asked = self._get(self.config_init, "trainer")
        if asked["precision"] is None and not asked["plugins"] and torch.cuda.is_available():
            kwargs["precision"] = "bf16-mixed"
        output_dir = self._get(self.config_init, "output_dir")
        if asked["logger"] is None:
            kwargs["logger"] = _loggers(self._get(self.config_init, "loggers"), output_dir)
        if asked["default_root_dir"] is None:
            kwargs["default_root_dir"] = output_dir  # where checkpoints go without a logger
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """Put the newest checkpoint in the place of `--ckpt_path auto`.

        Raises:
            ValueError: `--ckpt_path last` where each run has a folder of its own: Lightning would start from nothing.
        """
        options = self.config_init["fit"]
        if options["ckpt_path"] == "last" and self._get(self.config_init, "checkpoint").dirpath is None:
            raise ValueError(
                "ckpt_path must be auto or a checkpoint where checkpoint.dirpath is left out, got last, which is "
                "looked for in the folder of this run alone; give auto."
            )
        if options["ckpt_path"] == "auto":
            output_dir = self._get(self.config_init, "output_dir")
            options["ckpt_path"] = newest_checkpoint(output_dir)
            self.trainer.callbacks.append(SameCheckpoint(options["ckpt_path"], output_dir))


def _loggers(names: list[str], output_dir: str) -> list[Logger]:
    """The loggers of these names, in one version_N of the folder."""
    csv = CSVLogger(output_dir, name=None)
    loggers: list[Logger] = [csv] if "csv" in names else []
    if "tensorboard" in names:
        loggers.append(TensorBoardLogger(output_dir, name=None, version=csv.version))
    if "wandb" in names:
        if find_spec("wandb") is None:
            raise ValueError(f"wandb must be installed for loggers {names}, got none; pip install wandb, or drop it.")
        loggers.append(WandbLogger(save_dir=output_dir))
    return loggers


def launched_ranks() -> dict[str, int]:
    """Devices and nodes as torchrun started them; one process without it."""
    world_size, local_size = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return {"devices": local_size, "num_nodes": world_size // local_size}


def main(args: list[str] | None = None, callbacks: Sequence[Callback] = ()) -> None:
    """Read the recipe and run the subcommand.

    Args:
        args: flags; default those of the command line.
        callbacks: beside the recipe's.
    """
    # Lightning 2.6 asks newer torch about a tree in the old way, once in every process.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
    # On SLURM it asks for srun, which has started torchrun.
    warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
    # DeepSpeed 0.19 calls collectives by names that newer torch deprecates, on every step.
    warnings.filterwarnings("ignore", message=r".*distributed\.\w+_tensor. is deprecated", category=FutureWarning)
    defaults = {**launched_ranks(), "callbacks": list(callbacks)}
    RecipeCLI(
        CausalLM, SequenceData, subclass_mode_data=True, args=args, trainer_defaults=defaults,
        seed_everything_default=0,
        parser_kwargs={name: {"usage": f"train.py {name} {_USAGE}"} for name in RecipeCLI.subcommands()},
        save_config_kwargs={"overwrite": True},  # where no logger makes a version_N, a run that goes on meets its own
    )  # fmt: skip


if __name__ == "__main__":
    main()
