"""The command `ringflash`; each subcommand is a module with `add_arguments(parser)` and `run(options)`.

A subcommand is imported when it is asked for, so that one does not need what another does.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from jsonargparse import ArgumentParser

from ringflash.console import status_of

COMMANDS: dict[str, tuple[str, str]] = {  # name: module, help
    "bench": ("ringflash.bench.command", "How fast are kernels and ring, beside their peers and a baseline"),
    "doctor": ("ringflash.commands.doctor.command", "Is this machine, and every host of the job, fit for a long run"),
    "plan": ("ringflash.commands.plan.command", "Will it fit, how long is a step, and what to change"),
    "verify": ("ringflash.verify.command", "Does a training over the ring learn what it learns on one device"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        args: default those of the command line.
    Returns:
        status: 0 all is right; 1 the command found something wrong; 2 it could not be run as asked; 130 or 141 it was
            stopped (`status_of`).
    """
    args = list(sys.argv[1:] if args is None else args)
    return status_of(lambda: _run(args))


def _run(args: list[str]) -> int:
    options = _parser(wanted=args[0] if args else "").parse_args(args)
    module = import_module(COMMANDS[options.subcommand][0])
    try:
        return module.run(options[options.subcommand])
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, NotImplementedError, ImportError, OSError) as error:
        print(f"ringflash {options.subcommand}: {error}", file=sys.stderr)
    except Exception:  # a mistake of ours, which must not pass for a finding: Python's own status is 1
        traceback.print_exc()
    return 2


def _parser(wanted: str) -> ArgumentParser:
    """All subcommands by name and help, and the arguments of the one that is wanted."""
    parser = ArgumentParser(prog="ringflash", description="Exact ring attention: look before the long run.")
    commands = parser.add_subcommands()
    for name, (module, help_line) in COMMANDS.items():
        command = ArgumentParser(description=help_line)
        if name == wanted:
            import_module(module).add_arguments(command)
        commands.add_subcommand(name, command, help=help_line)
    return parser
