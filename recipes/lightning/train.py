"""Train a recipe:

    torchrun --nproc_per_node 2 -m recipes.lightning.train fit --config recipes/lightning/quickstart.yaml

Every key of a recipe is also a flag: `--trainer.max_steps 50`, `--data.seqlen 8192`,
`--trainer.strategy.context_parallel_size 4`; `fit --help` lists them. `--ckpt_path <directory>` continues from a
checkpoint; `--ckpt_path auto` continues from the newest complete one below output_dir, if there is one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

import lightning
import torch
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from recipes.lightning.progress import Progress
from recipes.lightning.resume import SameCheckpoint, newest_checkpoint
from ringflash.commands.overlays import lay_over
from ringflash.lightning import CausalLM
from ringflash.lightning.checkpoints import ModelCheckpoint
from ringflash.lightning.data import SequenceData

# Replaces the usage of hundreds of flags, which would hide the error below it.
_USAGE = "--config recipe.yaml [--config another.yaml ...] [--key value ...]"


class OverlayAction(ActionConfigFile):
    """Action of `--config` that merges mappings key by key; jsonargparse's replaces an argument that is a mapping."""

    def __call__(self, parser: Any, cfg: Namespace, values: str, option_string: str | None = None) -> None:
        """Apply the file to the arguments so far."""
        before = cfg.clone()
        super().__call__(parser, cfg, values, option_string)
        for key, value in cfg.items():
            if isinstance(value, dict) and isinstance(before.get(key), dict):
                group, _, name = key.rpartition(".")
                pretrained = f"{group}.pretrained"
                trees = ({"pretrained": x.get(pretrained), name: x[key]} for x in (before, cfg))
                cfg[key] = lay_over(*trees)[name]


class RecipeCLI(LightningCLI):
    """Lightning's command line with four additional keys: `output_dir`, `loggers`, `progress` and `checkpoint`."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Build Lightning's parser with another `--config`."""
        parser = LightningArgumentParser(dump_header=[f"lightning.pytorch=={lightning.__version__}"], **kwargs)
        parser.add_argument("-c", "--config", action=OverlayAction, help="A recipe, or an overlay of those before it.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the four keys."""
        parser.add_argument("--output_dir", type=str, required=True, help="Folder for version_N of the results.")
        parser.add_argument(
            "--loggers",
            type=list[Literal["csv", "tensorboard", "wandb"]],
            default=["csv", "tensorboard"],
            help="Loggers of the curves; trainer.logger replaces them.",
        )
        parser.add_lightning_class_args(Progress, "progress")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer, with default loggers, folder and precision if the recipe does not set them."""
        asked = self._get(self.config_init, "trainer")
        if asked["precision"] is None and not asked["plugins"] and torch.cuda.is_available():
            kwargs["precision"] = "bf16-mixed"
        output_dir = self._get(self.config_init, "output_dir")
        if asked["logger"] is None:
            kwargs["logger"] = _loggers(self._get(self.config_init, "loggers"), output_dir)
        if asked["default_root_dir"] is None:
            kwargs["default_root_dir"] = output_dir  # folder of checkpoints without a logger
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """Replace `--ckpt_path auto` by the newest checkpoint.

        Raises:
            ValueError: `--ckpt_path last` although each run has its own folder: Lightning would silently start afresh.
        """
        options = self.config_init["fit"]
        if options["ckpt_path"] == "last" and self._get(self.config_init, "checkpoint").dirpath is None:
            raise ValueError(
                "ckpt_path must be auto or a checkpoint if checkpoint.dirpath is not set, got last, which is "
                "looked for only in the folder of this run; give auto."
            )
        if options["ckpt_path"] == "auto":
            output_dir = self._get(self.config_init, "output_dir")
            options["ckpt_path"] = newest_checkpoint(output_dir)
            self.trainer.callbacks.append(SameCheckpoint(options["ckpt_path"], output_dir))


def _loggers(names: list[str], output_dir: str) -> list[Logger]:
    """Build the loggers of these names, which share one version_N of the folder."""
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
    """Return the numbers of devices and nodes that torchrun has started, or one of each without torchrun."""
    world_size, local_size = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return {"devices": local_size, "num_nodes": world_size // local_size}


def main(args: list[str] | None = None, callbacks: Sequence[Callback] = ()) -> None:
    """Read the recipe and run the subcommand.

    Args:
        args: flags; default those of the command line.
        callbacks: added to the recipe's.
    """
    # Lightning 2.6 uses a deprecated function of newer torch, once in every process.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)", category=FutureWarning)
    # On SLURM Lightning suggests srun, which has in fact started torchrun.
    warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
    # DeepSpeed 0.19 calls collectives by deprecated names of newer torch, on every step.
    warnings.filterwarnings("ignore", message=r".*distributed\.\w+_tensor. is deprecated", category=FutureWarning)
    defaults = {**launched_ranks(), "callbacks": list(callbacks)}
    RecipeCLI(
        CausalLM, SequenceData, subclass_mode_data=True, args=args, trainer_defaults=defaults,
        seed_everything_default=0,
        parser_kwargs={name: {"usage": f"train.py {name} {_USAGE}"} for name in RecipeCLI.subcommands()},
        save_config_kwargs={"overwrite": True},  # without a logger's version_N a resumed run finds its own
    )  # fmt: skip


if __name__ == "__main__":
    main()
