"""Where the commands print."""

from __future__ import annotations

from rich.console import Console

_WIDTH = 160  # of what is no terminal, for which rich takes 80 columns and breaks every cell


def console() -> Console:
    """As wide as the terminal; wide where the output goes to a file or another program."""
    plain = Console(highlight=False, soft_wrap=True)
    return plain if plain.is_terminal else Console(highlight=False, soft_wrap=True, width=_WIDTH)
