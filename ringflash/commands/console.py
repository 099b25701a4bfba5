"""Console output of the commands, and their exit status after an interruption."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console

_WIDTH_COLUMNS = 160  # width if the output is no terminal; rich would use 80 and wrap every cell


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:  # rich would exit with status 1
        raise BrokenPipeError


def console() -> Console:
    """Return a console as wide as the terminal, or 160 columns wide if the output is a file or a pipe."""
    plain = _Console(highlight=False, soft_wrap=True)
    return plain if plain.is_terminal else _Console(highlight=False, soft_wrap=True, width=_WIDTH_COLUMNS)


def status_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit status; like a shell, 130 after Ctrl-C and 141 after a broken pipe."""
    try:
        status = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest at exit
        return 141
    return status
