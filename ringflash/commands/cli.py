"""The command `ringflash`; each subcommand is a module with `add_arguments(parser)` and `run(options)`.

A subcommand is imported when it is asked for, so that one does not need what another does. That of the benchmarks is
beside the package in a clone, and in no wheel.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from jsonargparse import ArgumentParser

import ringflash
from ringflash.console import status_of

COMMANDS: dict[str, tuple[str, str]] = {  # name: module, help
    "bench": ("benchmarks.command", "How fast are kernels and ring, beside their peers and a baseline"),
    "doctor": ("ringflash.commands.doctor.command", "Is this machine, and every host of the job, fit for a long run"),
    "plan": ("ringflash.commands.plan.command", "Will it fit, how long is a step, and what to change"),
    "verify": ("ringflash.verify.command", "Does a training over the ring learn what it learns on one device"),
}

ROOT = Path(ringflash.__file__).parents[1]


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
    wanted = args[0] if args else ""
    try:
        options = _parser(wanted).parse_args(args)
        return _module(options.subcommand).run(options[options.subcommand])
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, NotImplementedError, ImportError, OSError) as error:
        print(f"ringflash {wanted}: {error}", file=sys.stderr)
    except Exception:  # a mistake of ours, which must not pass for a finding: Python's own status is 1
        traceback.print_exc()
    return 2


def _module(name: str) -> ModuleType:
    """Import a subcommand.

    Raises:
        RuntimeError: a command of the benchmarks in an installed package.
    """
    module = COMMANDS[name][0]
    if not module.startswith("ringflash."):
        if not (ROOT / module.replace(".", "/")).with_suffix(".py").is_file():
            raise RuntimeError(
                f"benchmarks must be beside the package, got none in {ROOT}; run ringflash {name} from a clone of the "
                "repository, with pip install -e."
            )
        if str(ROOT) not in sys.path:  # a script's own folder is there, not that of its package
            sys.path.insert(0, str(ROOT))
    return import_module(module)


def _parser(wanted: str) -> ArgumentParser:
    """All subcommands by name and help, and the arguments of the one that is wanted."""
    parser = ArgumentParser(prog="ringflash", description="Exact ring attention: look before the long run.")
    commands = parser.add_subcommands()
    for name, (_, help_line) in COMMANDS.items():
        command = ArgumentParser(description=help_line)
        if name == wanted:
            _module(name).add_arguments(command)
        commands.add_subcommand(name, command, help=help_line)
    return parser
