"""The command `ringflash recipes`: list the recipes and launchers, or copy them into a folder of the user's.

A clone has them next to the package, an installed wheel inside the package.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

import ringflash
from ringflash.commands.console import console

FOLDERS = ("recipes", "launch")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--copy", type=Path | None, default=None, help="folder to copy recipes/ and launch/ into; made if missing"
    )


def run(options: Namespace) -> int:
    """Print each recipe with its first line, or copy recipes and launchers; return 0.

    Raises:
        ValueError: the folder already holds one of them.
    """
    source, out = source_folder(), console()
    if options.copy is None:
        for recipe in sorted((source / "recipes").rglob("*.yaml")):
            out.print(f"{recipe.relative_to(source)}: {recipe.read_text().partition(chr(10))[0].lstrip('# ')}")
        out.print("ringflash recipes --copy FOLDER copies them with their launchers (docs/recipes.md, docs/launch.md)")
        return 0
    present = [name for name in FOLDERS if (options.copy / name).exists()]
    if present:
        raise ValueError(
            f"--copy must be a folder without {' and '.join(FOLDERS)}, got {options.copy} with "
            f"{' and '.join(present)}; name a new folder."
        )
    for name in FOLDERS:
        shutil.copytree(source / name, options.copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    out.print(f"copied; start one there: cd {options.copy} && launch/local.sh recipes/lightning/quickstart.yaml")
    return 0


def source_folder() -> Path:
    """Return the folder that holds recipes/ and launch/: in the clone, or in the installed package."""
    package = Path(ringflash.__file__).parent
    clone = package.parent
    return clone if all((clone / name).is_dir() for name in FOLDERS) else package / "files"
