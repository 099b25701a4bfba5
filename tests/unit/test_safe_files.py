"""Checkpoints that would run code are refused, and no product module loads files unsafely. One process, no GPU."""

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from recipes.lightning.export import main
from ringflash.checkpoint.safe_files import check_checkpoint
from tests.recipes.launching import ROOT


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.mark, "ran")


def state() -> dict[str, Any]:
    """Parameters, and an optimizer with its nested lists, None, tuples and numbers."""
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    nested = [{"a": [torch.ones(2), 3]}, (1, None, True)]
    return {"state_dict": model.state_dict(), "optimizer_0": optimizer.state_dict(), "nested": nested}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    dcp.save(state(), checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
    torch.save({"epoch": 1, "model_config": {"model_type": "llama"}}, tmp_path / "a.ckpt" / "meta.pt")
    return tmp_path / "a.ckpt"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """There only where planted code ran."""
    return tmp_path / "mark"


@pytest.mark.parametrize("with_meta", [True, False])
def test_what_torch_writes_passes(checkpoint: Path, with_meta: bool) -> None:
    if not with_meta:
        (checkpoint / "meta.pt").unlink()
    check_checkpoint(checkpoint)


def test_metadata_that_runs_code_is_refused(checkpoint: Path, mark: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = Planted(mark)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"a.ckpt must hold a whole .metadata .*, got UnpicklingError: pathlib"):
        check_checkpoint(checkpoint)
    assert not mark.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert mark.exists()  # the plant works


def test_export_refuses_before_it_loads(
    checkpoint: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Planted(mark)))
    assert main([str(checkpoint), str(tmp_path / "out")]) == 1
    assert "must hold a whole .metadata" in capsys.readouterr().err
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_a_value_that_runs_code_is_refused(checkpoint: Path, mark: Path) -> None:
    """torch loads what is not a tensor without a restriction."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex("optimizer_0.param_groups.0.lr")]
    torch.save(Planted(mark), checkpoint / "planted.distcp")
    info.relative_path, info.offset, info.length = "planted.distcp", 0, (checkpoint / "planted.distcp").stat().st_size
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="must hold values that are data only, got UnpicklingError"):
        check_checkpoint(checkpoint)
    assert not mark.exists()
    dcp.load(state(), checkpoint_id=checkpoint, no_dist=True)
    assert mark.exists()


def test_meta_that_runs_code_is_refused(checkpoint: Path, mark: Path) -> None:
    torch.save({"model_config": Planted(mark)}, checkpoint / "meta.pt")
    with pytest.raises(ValueError, match="a.ckpt must hold a whole meta.pt of data only.*holds more than data"):
        check_checkpoint(checkpoint)
    assert not mark.exists()


def test_metadata_that_changes_a_class_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle's BUILD with (None, {name: value}) sets attributes, also of a class."""
    monkeypatch.setattr(MetadataIndex, "fqn", "as it was", raising=False)
    build = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n(N(Vfqn\nVchanged\ndtb."
    (checkpoint / ".metadata").write_bytes(b"\x80\x02" + build)
    with pytest.raises(ValueError, match="a change of the class MetadataIndex"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp"])
@pytest.mark.parametrize("length", [0, 0.5])
def test_a_cut_file_is_a_named_error(checkpoint: Path, name: str, length: float) -> None:
    whole = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(whole[: int(len(whole) * length)])
    with pytest.raises(ValueError, match="a.ckpt must hold .*it is damaged"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("content", [{}, 3, {"state_dict_metadata": {}}])
def test_other_pickles_are_refused(checkpoint: Path, content: Any) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=r"must hold a Metadata in \.metadata, got TypeError"):
        check_checkpoint(checkpoint)


FOLDERS = ("ringflash", "kernels", "recipes", "benchmarks", "launch")
CHECKS = ("check_checkpoint", "check_together")
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unsafe(source: str, name: str = "x.py") -> list[str]:
    """Calls in a module that load files in ways that can run code."""
    tree = ast.parse(source)
    found = [f"import {x}" for x in _imports(tree) & PICKLES if name != "ringflash/checkpoint/safe_files.py"]
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call)]
    found += [ast.unparse(x) for x in calls if _unsafe_call(x)]
    reads = [x for x in calls if _name(x) in ("dcp.load", "FileSystemReader")]
    reads = [x for x in reads if "HuggingFaceStorageReader(" not in ast.unparse(x)]  # safetensors
    checked = name == "ringflash/checkpoint/safe_files.py" or any(_name(x) in CHECKS for x in calls)
    return found + [ast.unparse(x) for x in reads if not checked]


def _imports(tree: ast.AST) -> set[str]:
    nodes = list(ast.walk(tree))
    names = {alias.name.split(".")[0] for x in nodes if isinstance(x, ast.Import) for alias in x.names}
    origins = [x for x in nodes if isinstance(x, ast.ImportFrom)]
    loaders = {f"{x.module}.{a.name}" for x in origins for a in x.names} & {"torch.load", "yaml.load", "numpy.load"}
    return names | {(x.module or "").split(".")[0] for x in origins} | ({"pickle"} if loaders else set())


def _name(call: ast.Call) -> str:
    """The call's name as written, with the usual short forms of torch.distributed.checkpoint."""
    name = ast.unparse(call.func).replace("torch.distributed.checkpoint.", "dcp.")
    return name.rpartition(".")[2] if name.endswith(("FileSystemReader", *CHECKS)) else name


def _unsafe_call(call: ast.Call) -> bool:
    keywords = {x.arg: ast.unparse(x.value) for x in call.keywords}
    if _name(call) == "torch.load":
        return keywords.get("weights_only") != "True"
    if _name(call) in ("yaml.load", "yaml.load_all"):
        return "SafeLoader" not in ast.unparse(call)
    return _name(call) in ("yaml.unsafe_load", "yaml.full_load") or keywords.get("allow_pickle", "False") != "False"


def test_the_product_loads_safely() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 50
    names = {path: path.relative_to(ROOT).as_posix() for path in files}
    assert {names[x]: bad for x in files if (bad := unsafe(x.read_text(), names[x]))} == {}


UNSAFE = [
    "import pickle", "from pickle import loads", "from torch import load", "import cloudpickle as c",
    "torch.load(f)", "torch.load(f, weights_only=False)", "torch.load(f, weights_only=safe)",
    "np.load(f, allow_pickle=True)", "yaml.load(f)", "yaml.load(f, Loader=yaml.Loader)", "yaml.unsafe_load(f)",
    "dcp.load(state, checkpoint_id=d)", "torch.distributed.checkpoint.load(s)", "FileSystemReader(d)",
    "dcp.FileSystemReader(d)",
]  # fmt: skip
SAFE = [
    "torch.load(f, weights_only=True)", "np.load(f)", "yaml.safe_load(f)", "yaml.load(f, Loader=yaml.SafeLoader)",
    "check_checkpoint(d); dcp.load(s, storage_reader=FileSystemReader(d))",
    "dcp.load(s, storage_reader=HuggingFaceStorageReader(d))",
]  # fmt: skip


@pytest.mark.parametrize("source", [*UNSAFE, *SAFE])
def test_the_scan_knows(source: str) -> None:
    assert bool(unsafe(source)) == (source in UNSAFE)
