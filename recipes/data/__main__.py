"""Command line for token files:

python -m recipes.data prepare books/ --tokenizer checkpoints/llama --out tokens/books
python -m recipes.data check tokens/books
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from recipes.data.prepare import SUFFIXES, prepare
from ringflash.commands.console import status_of
from ringflash.data.files import TokenFiles

_COUNTS = {"num_documents": "documents", "num_empty": "empty documents left out", "num_bad": "bad lines skipped"}


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status.

    Args:
        args: default: the arguments of the command line.
    """
    options = _parser().parse_args(sys.argv[1:] if args is None else list(args))
    return status_of(lambda: _run(options))


def _run(options: Namespace) -> int:
    try:
        run = _prepare if options.subcommand == "prepare" else _check
        run(**options[options.subcommand].as_dict())
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m recipes.data", description="Write and check token files.")
    commands = parser.add_subcommands()
    writing = ArgumentParser(description="Write token files; run it again to resume after an interruption.")
    words = "text, .jsonl, .ndjson, .json (an object on each line) or .parquet files, or folders of them"
    writing.add_argument("inputs", nargs="+", type=Path, help=words)
    words = "ends of the names of files to read in folders, with commas between them"
    writing.add_argument("--suffixes", default=",".join(SUFFIXES), help=words)
    writing.add_function_arguments(prepare, skip={"inputs", "suffixes", "on_shard"})
    writing.set_defaults(num_processes=len(os.sched_getaffinity(0)))  # the cores of this job; the host may have more
    commands.add_subcommand("prepare", writing, help="write token files")
    checking = ArgumentParser(description="Read all token files and compare their checksums.")
    checking.add_argument("folder", type=Path, help="folder that prepare wrote")
    commands.add_subcommand("check", checking, help="compare the checksums of token files")
    return parser


def _prepare(out: Path, suffixes: str, **options: object) -> None:
    def show(done: int, total: int) -> None:
        print(f"{done:,} of {total:,} token files", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        ends = suffixes.strip("[]").replace(" ", "").split(",")
        header = prepare(out=out, suffixes=ends, on_shard=show, **options)  # type: ignore[arg-type]
    total = {name: sum(getattr(shard, name) for shard in header.shards) for name in _COUNTS}
    counts = "; ".join(f"{total[name]:,} {words}" for name, words in _COUNTS.items() if total[name])
    print(f"{out}: {sum(shard.num_tokens for shard in header.shards):,} tokens of {header.dtype} in {counts}")


def _check(folder: Path) -> None:
    files = TokenFiles(folder)
    files.check()
    print(f"{folder}: {files.lengths.sum():,} tokens in {len(files):,} documents are as they were written")


if __name__ == "__main__":
    sys.exit(main())
