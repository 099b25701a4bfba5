"""Export of a training checkpoint for transformers, from the command line:

python -m ringflash.huggingface runs/quickstart/version_0/checkpoints/epoch=0-step=200.ckpt exported
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from ringflash.console import status_of
from ringflash.huggingface.export import export

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def main(args: list[str] | None = None) -> int:
    """Export a checkpoint and return the exit status.

    Args:
        args: default is those of the command line.
    """
    parser = argparse.ArgumentParser(prog="python -m ringflash.huggingface", description=__doc__.partition(":")[0])
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


if __name__ == "__main__":
    sys.exit(main())
