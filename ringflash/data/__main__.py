"""Command line for token files:

python -m ringflash.data prepare books/ --tokenizer checkpoints/llama --out tokens/books
python -m ringflash.data check tokens/books
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from math import isfinite
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ringflash.console import status_of
from ringflash.data.files import TokenFiles
from ringflash.data.prepare import prepare
from ringflash.data.prepare.sources import SUFFIXES, BadLines

_LEFT_OUT = {"num_empty": "empty documents left out", "num_bad": "bad lines skipped"}
_COUNTS = ("num_tokens", "num_documents", *_LEFT_OUT)

_STDERR = Console(stderr=True, highlight=False, soft_wrap=True)


def main(args: list[str] | None = None) -> int:
    """Run a subcommand and return its exit status.

    Args:
        args: default: the arguments of the command line.
    """
    options = _parser().parse_args(args)
    return status_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    try:
        options.run(options)
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        _STDERR.print(f"error: {error}", markup=False)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ringflash.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("prepare", help="write token files; run it again to resume after an interruption")
    making.set_defaults(run=_prepare)
    making.add_argument(
        "inputs", nargs="+", type=Path, help="text, .jsonl, .ndjson or .parquet files, or folders of them"
    )
    making.add_argument("--out", required=True, type=Path, help="folder of the token files")
    making.add_argument("--tokenizer", default="bytes", help="folder of a Hugging Face tokenizer, or %(default)s")
    making.add_argument("--text-field", default="text", help="field of JSONL and column of parquet (%(default)s)")
    making.add_argument(
        "--suffix", action="append", help=f"suffix of the files to read in folders; repeatable ({' '.join(SUFFIXES)})"
    )
    making.add_argument(
        "--bad-lines", choices=get_args(BadLines), default="error",
        help="lines and rows without a document: stop at the first one, or skip and count them (%(default)s)",
    )  # fmt: skip
    making.add_argument("--shard-mib", type=_mib, default=64, help="MiB of input for each token file (%(default)s)")
    cores = len(os.sched_getaffinity(0))  # the cores of this job; the host may have more
    making.add_argument("--processes", type=int, default=cores, help="default: one per core (%(default)s)")
    checking = commands.add_parser("check", help="read all token files and compare their checksums")
    checking.set_defaults(run=_check)
    checking.add_argument("folder", type=Path, help="folder that prepare wrote")
    return parser


def _mib(text: str) -> float:
    mib = float(text)
    if not isfinite(mib) or mib * (1 << 20) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of MiB of a byte or more, got {text}; 64 is the default.")
    return mib


def _prepare(options: argparse.Namespace) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=_STDERR)
    task = progress.add_task("tokens", total=None)
    with ExitStack() as shown:

        def show(done: int, total: int) -> None:
            if not progress.live.is_started:  # the first call follows the checks, so an error shows no progress bar
                shown.enter_context(progress)
            progress.update(task, completed=done, total=total)

        try:
            header = prepare(
                options.inputs, options.out, tokenizer=options.tokenizer, text_field=options.text_field,
                suffixes=options.suffix or SUFFIXES, bad_lines=options.bad_lines,
                shard_bytes=int(options.shard_mib * (1 << 20)), num_processes=options.processes, on_shard=show,
            )  # fmt: skip
        except OSError as error:
            raise RuntimeError(
                f"inputs must be readable and {options.out} a folder that can be written, got {error}; "
                "run the same command again once they are, and it goes on."
            ) from error
    total = {name: sum(getattr(shard, name) for shard in header.shards) for name in _COUNTS}
    left_out = [f"{total[name]:,} {words}" for name, words in _LEFT_OUT.items() if total[name]]
    written = f"{total['num_tokens']:,} tokens of {header.dtype} in {total['num_documents']:,} documents"
    print(f"{options.out}: " + "; ".join([written, *left_out]))


def _check(options: argparse.Namespace) -> None:
    files = TokenFiles(options.folder)
    files.check()
    print(f"{options.folder}: {files.lengths.sum():,} tokens in {len(files):,} documents are as they were written")


if __name__ == "__main__":
    sys.exit(main())
