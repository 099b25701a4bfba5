"""Errors for a user without an optional package. One process."""

import importlib
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.recipes.launching import run


@pytest.mark.parametrize(
    ("package", "module"),
    [("lightning", "lightning"), ("deepspeed", "deepspeed"), ("numpy", "data"), ("torchtitan", "torchtitan")],
)
def test_module_without_its_package_names_the_extra(package: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [x for x in sys.modules if x.split(".")[0] == package or x.startswith(f"ringflash.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package} must be installed .* pip install 'ringflash\[{module}\]'"):
        importlib.import_module(f"ringflash.{module}")


def test_accelerate_backend_and_fp8_name_their_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    import ringflash.accelerate
    from ringflash.lightning.float8 import multiply_in_float8

    for name in ("accelerate", "torchao"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RuntimeError, match=r"must be installed, got .*pip install 'ringflash\[accelerate\]'"):
        ringflash.accelerate.register()
    with pytest.raises(RuntimeError, match=r"torchao must be installed .* pip install 'ringflash\[float8\]'"):
        multiply_in_float8(torch.nn.Linear(16, 16), "tensorwise", "cpu")


WITHOUT_EXTRAS = """
import sys
sys.modules.update(lightning=None, transformers=None, deepspeed=None)
import torch
before = set(sys.modules)
import ringflash
new = set(sys.modules) - before
assert not new & {"torch._dynamo", "torch.distributed.tensor"}, "as long an import as torch's own"
assert ringflash.wrap_attention and ringflash.check_wrapped
x = torch.randn(1, 8, 2, 16)
assert ringflash.ring_attention(x, x, x, group=None).shape == x.shape
from ringflash import huggingface
try:
    huggingface.register()
except RuntimeError as error:
    print(error)
"""


def test_ringflash_itself_needs_no_extra() -> None:
    """In a new process: the core imports without them, and little but torch, and attends.

    transformers is named only when it is needed.
    """
    said = run([sys.executable, "-c", WITHOUT_EXTRAS])
    assert "transformers must be version 5.17 or later" in said and "pip install ringflash[huggingface]" in said


ALL_EXTRAS = "[huggingface,accelerate,trl,data,parquet,lightning,deepspeed,liger,float8,bench]"


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "extras"),
    [pytest.param("2.15.0", "3.9.0", ALL_EXTRAS, marks=pytest.mark.nightly), ("2.11.0", "3.6.0", "")],
)
def test_pip_keeps_the_installed_torch(torch_version: str, triton_version: str, extras: str, tmp_path: Path) -> None:
    """A dry run, in an environment that has both as far as pip sees. It asks the registry, if it can be reached.

    All extras are of some ninety packages, which the registry changes, and commits seldom: at night.
    """
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    for name, version, more in (
        ("torch", torch_version, f"Requires-Dist: triton=={triton_version}\n"), ("triton", triton_version, "")
    ):  # fmt: skip
        (site / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / "none.txt").write_text("# in place of constraints of this machine\n")
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "venv" / "bin" / "python", "install", "--dry-run"]
    options = {"PIP_CONSTRAINT": str(tmp_path / "none.txt"), "PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "5"}
    try:
        said = run([*pip, f".{extras}"], **options)
    except AssertionError as error:
        if "(from versions: none)" in str(error):
            pytest.skip(f"no registry: {str(error)[-200:]}")
        raise
    added = dict(x.rsplit("-", 1) for x in said.partition("Would install ")[2].split())
    assert added["ringflash"] and "rich" in added and ("lightning" in added) == bool(extras)
    assert not {"torch", "triton"} & added.keys()


def test_other_strategies_and_modules_are_refused() -> None:
    """Before the training; a module that cannot find its ring says which strategy to pass."""
    import lightning

    from recipes.lightning.progress import Progress
    from ringflash.lightning import ContextParallelStrategy
    from ringflash.lightning.strategy import strategy_of

    with pytest.raises(ValueError, match="strategy must be a ContextParallelStrategy, got str; pass Trainer"):
        strategy_of(SimpleNamespace(strategy="ddp"))
    with pytest.raises(ValueError, match="Progress must have a CausalLM and a SequenceData, got LightningModule and"):
        Progress().setup(SimpleNamespace(datamodule=None), lightning.LightningModule(), "fit")
    with pytest.raises(RuntimeError, match="shard_mesh must be read after the processes have joined"):
        _ = ContextParallelStrategy().shard_mesh


def test_parameters_in_fp16_are_refused() -> None:
    """AdamW would make all of them NaN."""
    from ringflash.lightning import CausalLM

    module = CausalLM({"model_type": "llama"})
    module.model = torch.nn.Linear(2, 2, dtype=torch.float16)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"got fp16 \(16-true\), in which its eps is 0; use bf16-mixed"):
        module.configure_optimizers()
    module.model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)  # type: ignore[assignment]
    assert module.configure_optimizers()["optimizer"].param_groups[0]["params"]
