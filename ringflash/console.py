"""Where the commands print, and how they end when they are stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console

_WIDTH = 160  # of what is no terminal, for which rich takes 80 columns and breaks every cell


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:  # rich would end the process with status 1
        raise BrokenPipeError


def console() -> Console:
    """As wide as the terminal; wide where the output goes to a file or another program."""
    plain = _Console(highlight=False, soft_wrap=True)
    return plain if plain.is_terminal else _Console(highlight=False, soft_wrap=True, width=_WIDTH)


def status_of(command: Callable[[], int]) -> int:
    """What a command returns; as of a shell's own 130 after Ctrl-C, and 141 where what reads its output has ended."""
    try:
        status = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest as it ends
        return 141
    return status
