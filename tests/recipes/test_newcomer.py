"""The README from top to bottom, as somebody new follows it: install, the example, the four commands, make's targets.

The targets are CONTRIBUTING's, too. All runs in a copy of the files and an environment of its own, which borrows what
is installed here. `make train` and `make test` are expanded, not run: this is the latter, and the former's recipe has
tests of its own. CPU, 2 processes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers.examples import example
from tests.recipes.launching import ROOT

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
KEPT = "ringflash kernels benchmarks recipes launch .ci pyproject.toml README.md LICENSE Makefile".split()
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "max_position_embeddings": 4096,
}  # fmt: skip


class Newcomer:
    """A clone, an environment, and what is typed there."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.env = folder / "ringflash", folder / "env"
        self.clone.mkdir()
        for name in KEPT:
            source, target = ROOT / name, self.clone / name
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.env], check=True)  # it borrows pip, too
        (site,) = self.env.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def types(self, command: str) -> str:
        """Run a line in the clone's root; what it prints."""
        environment = {"PATH": f"{self.env / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(self.clone.parent)}
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.clone, env=environment | {"OMP_NUM_THREADS": "1"}, text=True,
            capture_output=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    newcomer = Newcomer(tmp_path_factory.mktemp("newcomer"))
    (install,) = re.findall(r"^pip install .*$", README, re.MULTILINE)
    newcomer.types("python -m " + install)
    return newcomer


def test_install_is_of_the_clone(newcomer: Newcomer) -> None:
    found = newcomer.types("cd / && python -c 'import ringflash, ringflash_kernels; print(ringflash.__file__)'")
    assert Path(found.strip()).is_relative_to(newcomer.clone)


def test_example(newcomer: Newcomer) -> None:
    (newcomer.clone / "ring.py").write_text(example("README.md", "# ring.py"))
    (command,) = re.findall(r"run by: (torchrun .*)$", README, re.MULTILINE)
    printed = newcomer.types("python -m torch.distributed.run" + command.removeprefix("torchrun"))
    assert printed.count("out (1, 2048, 8, 64), |dk|") == 2, printed


@pytest.mark.parametrize("name", ["doctor", "verify", "plan", "bench"])
def test_commands(newcomer: Newcomer, name: str) -> None:
    """Only what README gives in angle brackets is filled in."""
    (newcomer.clone / "model").mkdir(exist_ok=True)
    (newcomer.clone / "model" / "config.json").write_text(json.dumps(MODEL))
    (command,) = re.findall(rf"^`(ringflash {name}[^`]*)`", README, re.MULTILINE)
    results = "benchmarks/results/kernels_h200.json"
    filled = {
        "<model or training>": "model", "<config or recipe>": "recipes/lightning/qwen3_8b_pretrain.yaml",
        "kernels|ring": results, "<file>": results,
    }  # fmt: skip
    for placeholder, value in filled.items():
        command = command.replace(placeholder, value)
    assert "<" not in command
    extra = {"doctor": " --no_probes", "verify": " --seqlen 64"}.get(name, "")
    shown = newcomer.types(command + extra)
    assert {"doctor": "torch", "verify": "passed", "plan": "It fits", "bench": "hd128"}[name] in shown


COPY = """
import ringflash
from ringflash.commands.cli import main
copy = ["recipes", "--copy", "mine"]
print(ringflash, [main(arguments) for arguments in (["recipes"], copy, copy)])
"""


def test_a_wheel_holds_recipes_and_launchers(newcomer: Newcomer) -> None:
    """Outside the clone: they are listed, copied, and start from the copy; a second copy is refused."""
    newcomer.types("python -m pip install -q --no-deps --target ../installed . && mkdir ../elsewhere")
    (newcomer.clone.parent / "elsewhere" / "copy_recipes.py").write_text(COPY)
    here = "cd ../elsewhere && export PYTHONPATH=$PWD/../installed && "
    shown = newcomer.types(here + "python copy_recipes.py 2>&1")
    assert "recipes/lightning/quickstart.yaml: A small Llama on Python's own sources" in shown
    assert "--copy must be a folder without recipes and launch, got mine with" in shown
    assert "/installed/ringflash/" in shown and "[0, 0, 2]" in shown
    shown = newcomer.types(
        here + "cd mine && NPROC=2 DRY_RUN=1 launch/local.sh recipes/lightning/qwen3_8b_pretrain.yaml"
    )
    assert "-m recipes.lightning.train fit --config recipes/lightning/qwen3_8b_pretrain.yaml" in shown
    newcomer.types(here + "cd mine && python -m recipes.lightning.train fit --help >/dev/null")


def test_targets_of_make(newcomer: Newcomer) -> None:
    targets = set(re.findall(r"make ([a-z-]+)", README + CONTRIBUTING))
    assert targets == {"train", "test", "docs", "figures", "format", "lint", "test-gpu", "test-multi-gpu"}
    for target in sorted(targets):
        assert newcomer.types(f"make -n {target}")
