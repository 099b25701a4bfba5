"""recipes/trainers/axolotl_ring.py inside `axolotl train`. CPU, an environment of its own (make test-frameworks)."""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from tests.frameworks.checks import RTOL
from tests.frameworks.launch import torchrun
from tests.frameworks.toy_model import save_model
from tests.recipes.launching import ROOT

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]  # its imports take long

RING = {"plugins": ["axolotl_ring.RingPlugin"], "ringflash_size": 2}
# All rows in each of two steps, in one bin if they are packed.
CONFIG = {
    "sequence_len": 1024, "gradient_accumulation_steps": 1, "num_epochs": 2, "max_steps": 2, "learning_rate": 1e-3,
    "optimizer": "adamw_torch", "lr_scheduler": "constant", "attn_implementation": "eager", "bf16": False,
    "fp16": False, "tf32": False, "logging_steps": 1, "save_steps": 2, "val_set_size": 0, "curriculum_sampling": True,
    "pad_to_sequence_len": False, "dataset_num_proc": 1, "special_tokens": {"pad_token": "<|endoftext|>"},
}  # fmt: skip
# Prompts have no labels, so that packing adds none for the first token of a document.
ROWS = {"field_instruction": "prompt", "field_output": "answer", "format": "{instruction}"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model and rows of several lengths."""
    folder, draw = tmp_path_factory.mktemp("axolotl"), random.Random(0)
    save_model(folder / "model")
    texts = ["".join(draw.choices("abcdefgh ", k=60 + 7 * (i % 5))) for i in range(8)]
    rows = [json.dumps({"prompt": text[:20], "answer": text[20:]}) for text in texts]
    (folder / "data.jsonl").write_text("\n".join(rows))
    return folder


def train(data: Path, num_ranks: int, **changes: object) -> torch.Tensor:
    """Return loss and gradient norm of each step of `axolotl train`."""
    out = data / f"out_{num_ranks}_{changes['micro_batch_size']}"
    config = CONFIG | {
        "base_model": str(data / "model"), "output_dir": str(out), "dataset_prepared_path": str(out / "prepared"),
        "datasets": [{"path": str(data / "data.jsonl"), "ds_type": "json", "type": ROWS}],
    }  # fmt: skip
    path = data / f"{out.name}.yml"
    path.write_text(yaml.safe_dump(config | changes))
    torchrun("axolotl_worker.py", num_ranks, path, AXOLOTL_DO_NOT_TRACK="1", ACCELERATE_USE_CPU="true")
    log = json.loads((out / "checkpoint-2/trainer_state.json").read_text())["log_history"]
    return torch.tensor([[line["loss"], line["grad_norm"]] for line in log if "grad_norm" in line])


@pytest.fixture(scope="module")
def wanted(data: Path) -> torch.Tensor:
    """Losses and gradient norms of one process."""
    return train(data, 1, micro_batch_size=8, sample_packing=False)


@pytest.mark.parametrize(("rows", "packed"), [(8, False), (1, True)], ids=["rows", "packed"])
def test_axolotl_equals_one_process(data: Path, wanted: torch.Tensor, rows: int, packed: bool) -> None:
    """419 labels, which transformers 5.20 would round down to 418."""
    assert wanted.shape == (2, 2)
    got = train(data, 2, micro_batch_size=rows, sample_packing=packed, **RING)
    torch.testing.assert_close(got, wanted, rtol=RTOL, atol=0)


@pytest.mark.parametrize(("key", "value"), [("context_parallel_size", 2), ("rl", "grpo")])
def test_axolotl_ring_refuses(monkeypatch: pytest.MonkeyPatch, key: str, value: object) -> None:
    monkeypatch.syspath_prepend(ROOT / "recipes/trainers")
    plugin = import_module("axolotl_ring").RingPlugin()
    with pytest.raises(NotImplementedError, match=f"{key} must be left out with ringflash_size; remove it"):
        plugin.get_training_args(SimpleNamespace(ringflash_size=2, fsdp_config=None, **{key: value}))


def test_rows_that_are_not_packed_keep_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `eval_sample_packing: false`, where only the mask tells padding, which may be on the left."""
    monkeypatch.syspath_prepend(ROOT / "recipes/trainers")
    trainer = SimpleNamespace(data_collator=dict, eval_data_collator=dict)
    import_module("axolotl_ring").RingPlugin().post_trainer_create(SimpleNamespace(sample_packing=True), trainer)
    packed = {"attention_mask": "mask", "position_ids": "positions"}
    assert trainer.data_collator(packed) == {"position_ids": "positions"}
    assert trainer.eval_data_collator({"attention_mask": "mask"}) == {"attention_mask": "mask"}
