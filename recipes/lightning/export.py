"""Export of a training checkpoint as a directory that `from_pretrained` loads:

python -m recipes.lightning.export runs/quickstart/version_0/checkpoints/epoch=0-step=200.ckpt exported
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from ringflash.checkpoint.safe_files import check_checkpoint
from ringflash.commands.console import status_of
from ringflash.huggingface.weights import materialize, saved_tensors

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
_PREFIX = "state_dict.model.model."  # of Lightning, CausalLM and CausalLMWithLoss
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*",
)  # fmt: skip


def main(args: list[str] | None = None) -> int:
    """Export a checkpoint and return the exit status.

    Args:
        args: default is those of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m recipes.lightning.export", description=__doc__.partition(":")[0])
    parser.add_argument("checkpoint", type=Path, help="directory that a run under ContextParallelStrategy wrote")
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the parameters (%(default)s)")
    parser.add_argument("--tokenizer", type=Path, help="directory whose tokenizer files are copied along")
    options = parser.parse_args(args)
    return status_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    try:
        export(options.checkpoint, options.out, dtype=_DTYPES[options.dtype], tokenizer=options.tokenizer)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: from_pretrained loads it")
    return 0


def export(checkpoint: Path, out: Path, *, dtype: torch.dtype = torch.bfloat16, tokenizer: Path | None = None) -> None:
    """Write config.json and safetensors files of at most 5 GB for a distributed checkpoint of `CausalLM`.

    Runs in one process, on the CPU, with the whole model in its memory. The directory appears when it is complete.

    Args:
        checkpoint: directory that a run under `ContextParallelStrategy` wrote.
        out: directory to write; must not exist yet.
        dtype: of the parameters.
        tokenizer: directory whose tokenizer files are copied.
    Raises:
        ValueError: no such checkpoint, one that holds more than data, something at `out`, or no tokenizer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if out.exists():
        raise ValueError(f"{out} must not exist yet, got a directory or file; name another, or remove it.")
    copied = [] if tokenizer is None else _tokenizer_files(tokenizer)
    config = _config_of(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    materialize(model, torch.device("cpu"))
    state = {_PREFIX + name: tensor for name, tensor in saved_tensors(model).items()}
    dcp.load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished, max_shard_size="5GB")
    for file in copied:
        shutil.copy2(file, unfinished)
    unfinished.rename(out)


def _tokenizer_files(directory: Path) -> list[Path]:
    files = [file for pattern in _TOKENIZER_FILES for file in sorted(directory.glob(pattern)) if file.is_file()]
    if not files:
        raise ValueError(f"tokenizer must be a directory with a tokenizer's files, got none in {directory}; name it.")
    return files


def _config_of(checkpoint: Path) -> dict:
    """Return the model configuration that the run saved with the parameters."""
    meta = checkpoint / "meta.pt"
    if (checkpoint / "latest").is_file():
        raise ValueError(
            f"{checkpoint} must be a checkpoint of ContextParallelStrategy, got one of DeepSpeed; the zero_to_fp32.py "
            "in it writes its weights (docs/deepspeed.md)."
        )
    if not (checkpoint / ".metadata").is_file() or not meta.is_file():
        raise ValueError(
            f"{checkpoint} must be a complete distributed checkpoint, got no .metadata or meta.pt; name the directory "
            "that a run wrote, such as runs/quickstart/version_0/checkpoints/epoch=0-step=200.ckpt."
        )
    check_checkpoint(checkpoint)
    config = torch.load(meta, map_location="cpu", weights_only=True).get("model_config")
    if config is None:
        raise ValueError(
            f"{checkpoint} must hold model_config, which CausalLM writes, got none; load weights of another module as "
            "docs/lightning.md says (Using a checkpoint)."
        )
    return config


if __name__ == "__main__":
    sys.exit(main())
