"""Rules of the source tree that a review would repeat: the direction of imports, names, and docstrings. CPU."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A unit imports from the units before its own, and units of one line do not import each other.
LAYERS = (
    ("version",),
    ("comm",),
    ("checkpoint", "sequence"),
    ("attention", "recurrent"),
    ("loss", "memory"),
    ("huggingface",),
    ("wrap", "compat"),
    ("data",),
    ("lightning",),
    ("deepspeed",),
    ("accelerate",),
    ("megatron",),
    ("torchtitan",),
    ("testing",),
    ("verify",),
    ("commands",),
)
# The public face of the kernels.
KERNELS = {"ringflash_kernels", "ringflash_kernels.api", "ringflash_kernels.mask"}
OPENERS = "What|Whether|Of|Where|Those|As|By|Which|To|Nothing|Behind|How|That|Who|Whose|So"


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of both packages, parsed, by dotted name."""
    found = {}
    for top in (ROOT / "ringflash", ROOT / "kernels" / "ringflash_kernels"):
        for path in sorted(top.rglob("*.py")):
            name = ".".join(path.relative_to(top.parent).with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text())
    return found


def imports(name: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of this project in a module; the name is "" for `import module`."""
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("ringflash"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringflash"):
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in modules() else (node.module, alias.name)


def unit(module: str) -> str:
    """The folder or flat module below `ringflash` that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_imports_point_one_way() -> None:
    rank = {name: index for index, names in enumerate(LAYERS) for name in names}
    package = [name for name in modules() if name.startswith("ringflash.") and unit(name) != "__main__"]
    assert {unit(name) for name in package} == set(rank), "a new folder needs its place in LAYERS"
    wrong = [
        f"{name} imports {module}"
        for name in package
        for module, _ in imports(name)
        if module.startswith("ringflash.") and unit(module) != unit(name) and rank[unit(module)] >= rank[unit(name)]
    ]
    assert not wrong


def test_kernels_are_used_by_their_public_face() -> None:
    wrong = [
        f"{name} imports {module}"
        for name in modules()
        if not name.startswith("ringflash_kernels")
        for module, _ in imports(name)
        if module.startswith("ringflash_kernels") and module not in KERNELS
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    arrows = {name: {module for module, _ in imports(name) if module != name} for name in modules()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for module in arrows.get(name, ()):
                if not name.startswith(f"{module}."):  # a package runs before its modules
                    visit(module, (*path, name))
            done.add(name)

    for name in modules():
        visit(name, ())


def test_private_names_stay_in_their_file() -> None:
    wrong = [
        f"{name} imports {module}.{imported}"
        for name in modules()
        for module, imported in imports(name)
        if imported.startswith("_") and not imported.startswith("__")
    ]
    assert not wrong


def test_a_class_name_occurs_once() -> None:
    places = defaultdict(list)
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert not {name: where for name, where in places.items() if len(where) > 1}


@pytest.mark.parametrize("top", ["ringflash", "kernels", "recipes", "benchmarks", "tests"])
def test_docstrings_open_with_a_verb_or_a_noun(top: str) -> None:
    """The first line of a docstring can be understood by itself (CONTRIBUTING.md, English)."""
    clause = re.compile(rf"(?:{OPENERS})\b")
    wrong = []
    for path in sorted((ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if clause.match(text):
                    wrong.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not wrong
