"""recipes/trainers/swift_ring.py inside `swift sft`. CPU, in an environment of its own (make test-frameworks)."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.frameworks.checks import RTOL
from tests.frameworks.launch import torchrun
from tests.frameworks.toy_model import save_model
from tests.recipes.launching import ROOT

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]  # its imports take long

RING = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_CP_BACKEND": "ringflash",
    "PARALLELISM_CONFIG_CP_SIZE": "2",
}
PLUGIN = ("--external_plugins", str(ROOT / "recipes/trainers/swift_ring.py"), "--use_logits_to_keep", "false")
ARGUMENTS = """--model_type qwen3 --template qwen3 --tuner_type full --use_cpu true --torch_dtype float32 --max_steps 3
    --gradient_accumulation_steps 2 --logging_steps 1 --learning_rate 1e-3 --warmup_ratio 0 --lr_scheduler_type constant
    --save_strategy no --eval_strategy no --split_dataset_ratio 0 --dataset_shuffle false
    --train_dataloader_shuffle false --attn_impl eager --report_to none --dataloader_num_workers 0 --dataset_num_proc 1
    --gradient_checkpointing false""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, its tokenizer of bytes, and conversations of several lengths."""
    folder = tmp_path_factory.mktemp("swift")
    save_model(folder / "model")
    draw = random.Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for i in range(16):
            text = "".join(draw.choice("abcdefgh ") for _ in range(60 + 7 * (i % 5)))
            turns = [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:]}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return folder


def train(data: Path, num_ranks: int, rows: int, *arguments: str, **environment: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of `swift sft`."""
    spec = find_spec("swift")
    assert spec is not None and spec.origin is not None
    out = data / f"out_{num_ranks}_{rows}"
    torchrun(
        Path(spec.origin).parent / "cli/sft.py", num_ranks, "--model", data / "model", "--dataset", data / "data.jsonl",
        "--output_dir", out, "--per_device_train_batch_size", str(rows), *ARGUMENTS, *arguments,
        MODELSCOPE_OFFLINE="1", **environment,
    )  # fmt: skip
    (log,) = out.glob("*/logging.jsonl")
    lines = map(json.loads, log.read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]


@pytest.fixture(scope="module")
def wanted(data: Path) -> torch.Tensor:
    """Losses and gradient norms of one process."""
    return torch.tensor(train(data, 1, 2))


@pytest.mark.parametrize(("num_ranks", "rows"), [(2, 2), (4, 1)])
def test_swift_equals_one_process(data: Path, wanted: torch.Tensor, num_ranks: int, rows: int) -> None:
    """A ring of two with the same rows, and two rings with half of them each: in all, the same batches."""
    assert wanted.shape == (3, 2)
    rings = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(num_ranks // 2)}
    got = torch.tensor(train(data, num_ranks, rows, *PLUGIN, **RING, **rings))
    torch.testing.assert_close(got, wanted, rtol=RTOL, atol=0)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (PLUGIN, {}, "RuntimeError: PARALLELISM_CONFIG_CP_SIZE must be 2 or more"),
        ((*PLUGIN[:2], "--use_logits_to_keep", "true"), RING, "got also ['logits_to_keep']; leave them out"),
        ((*PLUGIN, "--enable_dft_loss", "true"), RING, "input_ids and labels must be given"),
        ((*PLUGIN, "--streaming", "true"), RING, "streaming must be False on a ring"),
    ],
    ids=["no size", "logits_to_keep", "another loss", "streaming"],
)
def test_swift_refuses(data: Path, arguments: tuple[str, ...], environment: dict[str, str], message: str) -> None:
    with pytest.raises(AssertionError) as failure:
        train(data, 2, 1, *arguments, **environment)
    assert message in str(failure.value)
