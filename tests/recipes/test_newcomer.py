"""The README from top to bottom, as somebody new follows it: install, the example, the four commands, make's targets.

The targets are CONTRIBUTING's, too. The install and one command run in a copy of the files and an environment of its
own, which borrows what is installed here; the other commands run in this process and in forked ranks. `make train` and
`make test` are expanded, not run: this is the latter, and the former's recipe is tested elsewhere. CPU, 2 processes.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from ringflash.commands import verify
from ringflash.commands.cli import main
from tests.helpers.examples import example
from tests.helpers.models import TINY
from tests.helpers.ranks import forked
from tests.recipes.launching import ROOT, run_ranks

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
KEPT = "ringflash kernels benchmarks recipes launch .ci pyproject.toml README.md LICENSE Makefile".split()
MODEL = TINY | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}


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
    find = "from importlib.util import find_spec; print(*(find_spec(x).origin for x in sys.argv[1:]))"
    found = newcomer.types(f'cd / && python -c "import sys; {find}" ringflash ringflash_kernels').split()
    assert len(found) == 2 and all(Path(path).is_relative_to(newcomer.clone) for path in found)


def test_example(tmp_path: Path) -> None:
    """On the ranks that README's command starts."""
    (tmp_path / "ring.py").write_text(example("README.md", "# ring.py"))
    (num_ranks,) = re.findall(r"run by: torchrun --nproc-per-node (\d) ring.py$", README, re.MULTILINE)
    printed = run_ranks(tmp_path / "ring.py", num_ranks=int(num_ranks))
    assert printed.count("out (1, 2048, 8, 64), |dk|") == 2, printed


def command_of(name: str) -> str:
    """Return README's command, with what it has in angle brackets filled in."""
    (command,) = re.findall(rf"^`(ringflash {name}[^`]*)`", README, re.MULTILINE)
    results = "benchmarks/results/kernels_h200.json"
    filled = {
        "<model or training>": "model", "<config or recipe>": "model", "kernels|ring": results, "<file>": results,
    }  # fmt: skip
    for placeholder, value in filled.items():
        command = command.replace(placeholder, value)
    assert "<" not in command
    return command


def test_installed_command(newcomer: Newcomer) -> None:
    assert "torch" in newcomer.types(command_of("doctor") + " --no_probes")


@pytest.mark.parametrize(("name", "shown"), [("verify", "passed"), ("plan", "It fits"), ("bench", "hd128")])
def test_commands(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks of verify, forked with the imports already done, print into files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    logs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT)
    config = partial(verify.LaunchConfig, start_method=forked().get_start_method(), logs_specs=logs)
    monkeypatch.setattr(verify, "LaunchConfig", config)
    extra = ["--seqlen", "64"] if name == "verify" else []
    assert main([*command_of(name).split()[1:], *extra]) == 0
    printed = [capsys.readouterr().out, *(path.read_text() for path in tmp_path.rglob("stdout.log"))]
    assert shown in "".join(printed)


COPY = """
import os, runpy, sys
from pathlib import Path
_, folder, installed = sys.argv
names = ("recipes", "ringflash_kernels")  # of this repository
sys.path = [installed, *(x for x in sys.path if not any(Path(x, name).is_dir() for name in names))]
os.chdir(folder)

import ringflash
from ringflash.commands.cli import main
copy = ["recipes", "--copy", "mine"]
print(ringflash, [main(arguments) for arguments in (["recipes"], copy, copy)], flush=True)

os.chdir("mine")
sys.path.insert(0, os.getcwd())
sys.argv = ["train", "fit", "--help"]
runpy.run_module("recipes.lightning.train", run_name="__main__", alter_sys=True)
"""


def test_a_wheel_holds_recipes_and_launchers(newcomer: Newcomer) -> None:
    """Outside the clone: they are listed, copied, and start from the copy; a second copy is refused."""
    newcomer.types("python -m pip install -q --no-deps --target ../installed . && mkdir ../elsewhere")
    folder = newcomer.clone.parent
    (folder / "copy_recipes.py").write_text(COPY)
    shown = run_ranks(folder / "copy_recipes.py", folder / "elsewhere", folder / "installed", num_ranks=1)
    assert "recipes/lightning/quickstart.yaml: A small Llama on Python's own sources" in shown
    assert "--copy must be a folder without recipes and launch, got mine with" in shown
    assert "/installed/ringflash/" in shown and "[0, 0, 2]" in shown
    assert "usage: train.py fit --config recipe.yaml" in shown and "--progress.every_n_steps" in shown
    shown = newcomer.types(
        "cd ../elsewhere/mine && NPROC=2 DRY_RUN=1 launch/local.sh recipes/lightning/qwen3_8b_pretrain.yaml"
    )
    assert "-m recipes.lightning.train fit --config recipes/lightning/qwen3_8b_pretrain.yaml" in shown


def test_targets_of_make(newcomer: Newcomer) -> None:
    targets = set(re.findall(r"make ([a-z-]+)", README + CONTRIBUTING))
    tests = {"test", "test-all", "test-gpu", "test-multi-gpu", "test-frameworks", "test-torchtitan"}
    assert targets == {"train", "help", "docs", "figures", "lint", *tests}
    for target in sorted(targets | {"format", "test-megatron", "test-newest"}):
        assert newcomer.types(f"make -n {target}")
