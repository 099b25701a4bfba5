"""The command `ringflash`; each subcommand is a module with `add_arguments(parser)` and `run(options)`.

A subcommand is imported only when it is called, so it does not need the dependencies of the others. `bench` is part of
a clone of the repository but not of the wheel.
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
from ringflash.commands.console import status_of

COMMANDS: dict[str, tuple[str, str]] = {  # name: module, help
    "bench": (
        "benchmarks.command",
        "Time the kernels or the ring, and compare them with their peers and with a baseline.",
    ),
    "doctor": ("ringflash.commands.doctor.command", "Check this machine, or every host of a job, before a long run."),
    "plan": (
        "ringflash.commands.plan.command",
        "Predict whether a training fits and how long a step takes, and say what to change.",
    ),
    "recipes": ("ringflash.commands.recipes", "List the recipes, or copy them and their launchers into a folder."),
    "verify": ("ringflash.commands.verify", "Check that a model trains over the ring as it does on one device."),
}

ROOT = Path(ringflash.__file__).parents[1]
DOCUMENTS = "https://github.com/ringflash/ringflash/tree/main/docs"  # messages name pages as docs/page.md


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        args: default: the arguments of the command line.
    Returns:
        status: 0 if all is well; 1 if the command found a fault; 2 if it could not be run as requested; 130 or 141 if
            it was stopped (`status_of`).
    """
    args = list(sys.argv[1:] if args is None else args)
    return status_of(lambda: _run(args))


def _run(args: list[str]) -> int:
    """Run a subcommand and return its exit status: 2 for an error, printed without a traceback if it was foreseen."""
    wanted = args[0] if args else ""
    try:
        options = _parser(wanted).parse_args(args)
        return _module(options.subcommand).run(options[options.subcommand])
    except BrokenPipeError:
        raise
    except (ValueError, RuntimeError, NotImplementedError, ImportError, OSError) as error:
        print(f"ringflash {wanted}: {error}", file=sys.stderr)
    except Exception:  # a bug in ringflash: Python's own exit status, 1, would mean that a fault was found
        traceback.print_exc()
    return 2


def _module(name: str) -> ModuleType:
    """Import the module of a subcommand.

    Raises:
        RuntimeError: the benchmarks are missing because ringflash was installed from a wheel.
    """
    module = COMMANDS[name][0]
    if not module.startswith("ringflash."):
        if not (ROOT / module.replace(".", "/")).with_suffix(".py").is_file():
            raise RuntimeError(
                f"benchmarks must be next to the package, got none in {ROOT}; run ringflash {name} from a clone of the "
                "repository, with pip install -e."
            )
        if str(ROOT) not in sys.path:  # Python adds the folder of the script, not the root of the clone
            sys.path.insert(0, str(ROOT))
    return import_module(module)


def _parser(wanted: str) -> ArgumentParser:
    """Return a parser with all subcommands, and the arguments of the wanted one."""
    parser = ArgumentParser(
        prog="ringflash",
        description=f"Commands to run before a long training over a ring. Pages that messages name are in {DOCUMENTS}.",
        version=f"{ringflash.__version__}, documents: {DOCUMENTS}",
    )
    commands = parser.add_subcommands()
    for name, (_, help_line) in COMMANDS.items():
        command = ArgumentParser(description=help_line)
        if name == wanted:
            _module(name).add_arguments(command)
        commands.add_subcommand(name, command, help=help_line)
    return parser
