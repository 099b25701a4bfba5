"""Text as packed sequences, the order in which data ranks draw them, and the sizes of the mesh. One process."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn

from recipes.lightning.text import SEPARATOR, PackedText, TextData, is_held_out, text_files
from ringflash.comm.mesh import mesh_sizes
from ringflash.lightning import CausalLM, ContextParallelStrategy
from ringflash.lightning.data import CountConsumed, _check_epochs
from tests.recipes.launching import write_text

DOCUMENTS = [b"a", b"bb" * 20, b"ccc", bytes(range(256)), b"d" * 5]


@pytest.mark.parametrize("seqlen", [1, 2, 7, 16, 64])
def test_packing_keeps_every_byte(seqlen: int) -> None:
    """The sequences, one after another, are the documents, each behind a separator, from which bounds count."""
    text = PackedText(DOCUMENTS, seqlen)
    tokens = [text[i]["input_ids"][0] for i in range(len(text))]
    stream = [x for document in DOCUMENTS for x in (SEPARATOR, *document)]
    assert torch.cat(tokens).tolist() == stream[: len(text) * seqlen] and len(stream) - len(text) * seqlen < seqlen
    for i, sequence in enumerate(tokens):
        bounds = text[i]["cu_seqlens"]
        assert bounds.tolist() == [*sorted({0, *(sequence == SEPARATOR).nonzero().flatten().tolist()}), seqlen]
        assert bounds.dtype == torch.int32


def test_text_that_fills_no_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text must fill a sequence of seqlen 64 tokens, got 4; give more files"):
        PackedText([b"abc"], 64)
    with pytest.raises(ValueError, match=f"folder must hold files that end in '.md', got none in {tmp_path}"):
        text_files(str(tmp_path), ".md")


def test_standard_library_has_a_held_out_part() -> None:
    """Thousands of sequences by default, a few percent of the files held out, installed packages left out."""
    files = text_files()
    held_out = [name for name, _ in files if is_held_out(name)]
    assert sum(path.stat().st_size for _, path in files) > 4_000_000
    assert 0.02 < len(held_out) / len(files) < 0.1
    assert not any("site-packages" in path.parts or "dist-packages" in path.parts for _, path in files)


def test_files_are_the_same_in_any_order_of_the_disk(tmp_path: Path) -> None:
    """Sorted by their path below the folder, empty ones and other suffixes left out."""
    write_text(tmp_path / "b")
    write_text(tmp_path / "a", 2)
    (tmp_path / "a" / "empty.txt").touch()
    (tmp_path / "a" / "other.md").write_text("x")
    names = [name for name, _ in text_files(str(tmp_path), ".txt")]
    assert names == sorted(names) and names[:3] == ["a/0.txt", "a/1.txt", "b/0.txt"]


def test_checkpoint_of_other_data_is_refused() -> None:
    """A place in the data means nothing for another length or order."""
    data = TextData(seqlen=16)
    data.train = PackedText(DOCUMENTS, 16)
    data.num_consumed = 7
    state = data.state_dict()
    data.load_state_dict(state)
    for name in ("seqlen", "seed", "num_sequences", "text"):
        with pytest.raises(ValueError, match=f"{name} must be that of the checkpoint .99., got .*; resume"):
            data.load_state_dict({**state, name: 99})
    data.trainer = SimpleNamespace(state=SimpleNamespace(fn="validate"))
    data.load_state_dict({**state, "seqlen": 99, "num_consumed": 8})  # its model may be judged by other data
    assert data.num_consumed == 7


@pytest.mark.parametrize(("place", "refused"), [("TokenData", True), ("TextData", False), ("OwnData", False)])
def test_checkpoint_of_another_data_class_is_refused(place: str, refused: bool) -> None:
    """Lightning does not hand its place over: the run began at the first sequence again. A user's data has none."""
    states = {"OwnData": {"seen": 1}} if place == "OwnData" else {place: {"num_consumed": 7}}
    batches = {kind: {"ready": 4, "completed": 4} for kind in ("current", "total")}
    loops = {"fit_loop": {"epoch_loop.batch_progress": batches}}
    checkpoint = {"state_dict": {}, **states, "epoch": 0, "loops": loops}
    state = SimpleNamespace(fn=TrainerFn.FITTING)
    trainer = SimpleNamespace(
        state=state, datamodule=TextData(seqlen=16), accumulate_grad_batches=1, callbacks=[]
    )  # fmt: skip
    match = r"data must be of the checkpoint's class \(TokenData\), got TextData, which would begin at its first"
    with pytest.raises(ValueError, match=match) if refused else nullcontext():
        CountConsumed().on_load_checkpoint(trainer, CausalLM({"model_type": "llama"}), checkpoint)
    state.fn = TrainerFn.VALIDATING
    CountConsumed().on_load_checkpoint(trainer, CausalLM({"model_type": "llama"}), checkpoint)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_place_within_a_step_is_that_of_its_begin(dp_size: int) -> None:
    """Two steps of four batches, and three batches of the third: of each, every data rank has consumed one sample."""
    batches = {kind: {"ready": 11, "completed": 11} for kind in ("current", "total")}
    checkpoint = {
        "TextData": {"num_consumed": 11 * dp_size}, "loops": {"fit_loop": {"epoch_loop.batch_progress": batches}}
    }  # fmt: skip
    strategy = ContextParallelStrategy()
    strategy._device_mesh = {"data_parallel": SimpleNamespace(size=lambda: dp_size)}
    progress = SimpleNamespace(current=SimpleNamespace(ready=11))
    loop = SimpleNamespace(batch_progress=progress, _should_accumulate=lambda: True)
    trainer = SimpleNamespace(
        strategy=strategy, datamodule=TextData(seqlen=16), accumulate_grad_batches=4,
        fit_loop=SimpleNamespace(epoch_loop=loop),
    )  # fmt: skip
    CountConsumed().on_save_checkpoint(trainer, CausalLM({"model_type": "llama"}), checkpoint)
    assert checkpoint["TextData"]["num_consumed"] == 8 * dp_size
    assert all(count == 8 for kind in batches.values() for count in kind.values())


@pytest.mark.parametrize(("config", "got"), [({"vocab_size": 256}, 256), ({}, 32000)])
def test_model_without_some_of_the_tokens_is_refused(config: dict, got: int) -> None:
    """256 bytes and no separator; and a vocabulary that is left to the family."""
    module = CausalLM({"model_type": "llama", **config})
    data = TextData(seqlen=16)
    data.trainer = SimpleNamespace(lightning_module=module)
    with pytest.raises(ValueError, match=f"vocab_size of the model must be {got + 1} or more for text, got"):
        data.check_vocabulary(got + 1, "text")
    data.check_vocabulary(got, "text")


@pytest.mark.parametrize(
    ("options", "dp_size", "message"),
    [
        ({"overfit_batches": 2}, 2, "overfit_batches must be 0 with several data ranks, got 2: .* set data_par"),
        ({"max_epochs": 3}, 1, "max_epochs must be -1 without limit_train_batches, got 3: .* no end; give max_steps"),
        ({"max_epochs": 1000, "limit_train_batches": 0.5}, 1, "max_epochs must be -1 without limit_train_batches"),
        ({"_val_check_time_interval": 600.0}, 1, "val_check_interval must be a number of batches .*, got 600 s; give"),
        ({"limit_train_batches": 3}, 1, r"limit_train_batches must be a multiple of accumulate_grad\w+ \(2\)"),
        (
            {"limit_train_batches": 4, "callbacks": [GradientAccumulationScheduler({1: 3})]},
            1,
            r"limit_train_batches must be a multiple of accumulate_grad\w+ \(3\)",
        ),
    ],
)
def test_trainers_with_other_settings_are_refused(options: dict, dp_size: int, message: str) -> None:
    """All data ranks would train on the same; epochs without end, or that end in a step; ranks that would part."""
    defaults = {"overfit_batches": 0.0, "max_epochs": -1, "limit_train_batches": 1.0, "world_size": 2}
    defaults |= {
        "accumulate_grad_batches": 2, "callbacks": [], "fast_dev_run": False, "_val_check_time_interval": None,
    }  # fmt: skip
    strategy = ContextParallelStrategy()
    strategy._device_mesh = {"data_parallel": SimpleNamespace(size=lambda: dp_size)}
    data = TextData(seqlen=16)
    connector = SimpleNamespace(use_distributed_sampler=False)
    data.trainer = SimpleNamespace(**{**defaults, **options}, strategy=strategy, _accelerator_connector=connector)
    with pytest.raises(ValueError, match=message):
        data.setup("fit")


def test_fast_dev_run_may_end_in_a_step() -> None:
    """It sets limit_train_batches to 1 itself, and keeps accumulate_grad_batches."""
    limits: dict = {"limit_train_batches": 1, "overfit_batches": 0.0, "max_epochs": 1, "accumulate_grad_batches": 2}
    limits["callbacks"] = []
    _check_epochs(SimpleNamespace(**limits, fast_dev_run=1))
    with pytest.raises(ValueError, match="limit_train_batches must be a multiple"):
        _check_epochs(SimpleNamespace(**limits, fast_dev_run=False))


@pytest.mark.parametrize("num_nodes, world_size", [(1, 4), (2, 2)])
def test_hosts_without_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch, num_nodes: int, world_size: int) -> None:
    """Before processes join: a mesh of some of them would wait, or fail in torch."""
    started = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": 2}
    for name, value in (started | {"TORCHELASTIC_RUN_ID": "x"}).items():
        monkeypatch.setenv(name, str(value))
    strategy = ContextParallelStrategy()
    trainer = lightning.Trainer(accelerator="cpu", devices=2, num_nodes=num_nodes, strategy=strategy, logger=False)
    with pytest.raises(ValueError, match=rf"2 \* {num_nodes}\) does not match the world size \({world_size}\)"):
        trainer.fit(CausalLM({}), [0])
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("data", "context", "world", "sizes"),
    [
        ("auto", "auto", 4, (1, 4)),
        ("auto", 2, 6, (3, 2)),
        (3, "auto", 6, (3, 2)),
        (2, 2, 4, (2, 2)),
        ("auto", 1, 1, (1, 1)),
    ],
)
def test_sizes_fill_the_world(data: int | str, context: int | str, world: int, sizes: tuple[int, int]) -> None:
    """ "auto" is what the other size leaves."""
    assert mesh_sizes(data, context, world) == sizes


@pytest.mark.parametrize(
    ("data", "context", "message"),
    [
        *(
            (data, context, rf"must be the number of ranks \(4\), got {data} \* {context}; start \d+ ranks, or set")
            for data, context in ((2, 3), ("auto", 3), (3, "auto"), (1, 2), ("auto", 8), (8, "auto"))
        ),
        *(("auto", x, "context_parallel_size must be 'auto' or a positive integer, got") for x in (0, -1, 1.5, "all")),
    ],
)
def test_other_sizes_are_refused(data: int | str, context: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh_sizes(data, context, 4)
