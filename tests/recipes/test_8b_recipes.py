"""The recipes of large models: each trains two steps scaled down by flags, every combination parses and is planned.

Two gloo processes on the CPU, without the launcher (test_lightning_recipes.py has it). That they fit an H200 is what
`ringflash plan` says, not a measurement.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from recipes.lightning.compare import newest_curve, read_losses
from recipes.lightning.train import main as train_cli
from ringflash.commands.cli import main as ringflash
from ringflash.commands.overlays import lay_over
from ringflash.commands.plan.command import read_recipe
from tests.helpers.plans import read_once  # noqa: F401, a fixture
from tests.helpers.tokens import write_tokens
from tests.recipes.launching import ROOT, train

FOLDER = ROOT / "recipes" / "lightning"
MODELS = ("llama3_8b", "qwen3_8b")
LENGTHS = {"128k_cp8_8gpus": 8, "512k_cp8_8gpus": 8, "1m_cp8_8gpus": 8, "1m_cp64_8hosts": 64}  # GPUs
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 257,
}  # fmt: skip
SCALED_DOWN = {
    "trainer.max_steps": 2, "trainer.val_check_interval": 2, "trainer.accumulate_grad_batches": 1,
    "trainer.strategy.init_args.context_parallel_size": 2, "model.memory.mlp_tile_tokens": 40, "data.seqlen": 96,
    "data.num_eval_sequences": 2, "data.held_out_percent": 30, "checkpoint.every_n_train_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files, and a small checkpoint of each family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "tokens", [[(7 * i + j) % 256 for j in range(20 + i)] for i in range(60)], 20)
    for name in MODELS:
        torch.manual_seed(0)
        config = AutoConfig.for_model(name.partition("3")[0].replace("qwen", "qwen3"), **SMALL)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder


pytestmark = pytest.mark.usefixtures("read_once")


@pytest.mark.parametrize(
    ("model", "length", "pretrained"),
    [
        ("llama3_8b", "128k_cp8_8gpus", False),
        ("llama3_8b", "1m_cp8_8gpus", True),
        ("qwen3_8b", "512k_cp8_8gpus", True),
        ("qwen3_8b", "1m_cp64_8hosts", False),
    ],
)
def test_recipe_trains(folder: Path, model: str, length: str, pretrained: bool) -> None:
    """Two steps in bf16-mixed; losses are those of a model that knows nothing, and the checkpoint is there.

    From a checkpoint on two ranks, else on one.
    """
    out = folder / f"{model}-{length}"
    flags: dict[str, Any] = {**SCALED_DOWN, "output_dir": out, "data.folder": folder / "tokens"}
    num_ranks = flags["trainer.strategy.init_args.context_parallel_size"] = 1 + pretrained
    overlays = [f"--config={FOLDER / length}.yaml"]
    if pretrained:
        overlays.insert(0, f"--config={FOLDER / model}_continue.yaml")
        flags["model.pretrained"] = folder / model
    else:
        flags |= {f"model.model.{name}": value for name, value in SMALL.items()}
    recipe = FOLDER / f"{model}_pretrain.yaml"
    train(recipe, *overlays, *(f"--{k}={v}" for k, v in flags.items()), num_ranks=num_ranks)
    losses = read_losses(newest_curve(out))
    assert sorted(losses) == [0, 1] and all(5.0 < loss < 6.0 for loss in losses.values())  # log(257) is 5.55
    (checkpoint,) = out.glob("version_0/checkpoints/*step=2.ckpt")
    config = torch.load(checkpoint / "meta.pt", weights_only=True)["model_config"]
    assert config["rope_parameters"]["rope_type"] == ("yarn" if pretrained else "default")
    assert config["max_position_embeddings"] == 1 << 20 and config["hidden_size"] == 32


def test_recipe_of_experts_trains(folder: Path) -> None:
    """Two steps, in tiles; the balancing loss of four experts, of which a token is sent to two, is at least 2."""
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    out = folder / "experts"
    flags = {**SCALED_DOWN, "output_dir": out, "data.folder": folder / "tokens"}
    flags |= {f"model.model.{name}": value for name, value in (SMALL | experts).items()}
    overlay = f"--config={FOLDER / '128k_cp8_8gpus.yaml'}"
    train(FOLDER / "qwen3_30b_a3b_pretrain.yaml", overlay, *(f"--{k}={v}" for k, v in flags.items()), num_ranks=2)
    losses = read_losses(newest_curve(out))
    assert sorted(losses) == [0, 1] and all(5.0 < loss < 6.0 for loss in losses.values())
    with newest_curve(out).open() as file:
        balance = [float(row["router_loss"]) for row in csv.DictReader(file) if row["router_loss"]]
    assert len(balance) == 2 and all(2.0 <= loss < 4.0 for loss in balance)


@pytest.mark.parametrize(
    ("model", "length", "tile"),
    [
        *((f"{model}_pretrain", length, None) for model in MODELS for length in LENGTHS),
        ("qwen3_30b_a3b_pretrain", "128k_cp8_8gpus", 0),
        ("qwen3_30b_a3b_pretrain", "1m_cp8_8gpus", 1 << 15),  # a million tokens over eight GPUs fit in tiles only
    ],
)
def test_recipe_fits_an_h200(model: str, length: str, tile: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/recipes.md has them."""
    recipes, gpus = [str(FOLDER / f"{name}.yaml") for name in (model, length)], LENGTHS[length]
    flags = [] if tile is None else ["--model.memory.mlp_tile_tokens", str(tile)]
    assert ringflash(["plan", *recipes, "--gpus", str(gpus), *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    words = {"128k": 1 << 17, "512k": 1 << 19, "1m": 1 << 20}
    assert plan["job"]["seqlen"] == words[length.partition("_")[0]] and plan["job"]["cp_size"] == gpus
    assert read(model, length)["trainer"]["strategy"]["init_args"]["context_parallel_size"] == gpus
    assert round(plan["parameters"] / 1e9, 1) in ((30.5,) if "30b" in model else (8.0, 8.2))


@pytest.mark.parametrize("model", MODELS)
def test_continuing_changes_the_context_and_no_size(model: str) -> None:
    start, on = read(f"{model}_pretrain"), read(f"{model}_pretrain", f"{model}_continue")
    assert on["model"]["model"].keys() == {"rope_parameters", "max_position_embeddings"}
    rope = on["model"]["model"]["rope_parameters"]
    assert rope["factor"] * rope["original_max_position_embeddings"] == 1 << 20
    assert rope["rope_theta"] == start["model"]["model"]["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize(
    ("overlays", "changed"),
    [
        (
            ["model: {model: {num_hidden_layers: 4, rope_parameters: {rope_theta: 7.0}}}", "1m_cp8_8gpus"],
            {"num_hidden_layers": 4, "head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 7}},
        ),
        (["qwen3_8b_continue", "model: {model: {rms_norm_eps: 1.0}}"], {"rms_norm_eps": 1.0, "hidden_size": None}),
        (["model: {model: null}"], None),
    ],
    ids=["keys", "checkpoint", "null"],
)
def test_overlays_combine_in_training_as_in_plan(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overlays: list[str],
    changed: dict[str, Any] | None,
) -> None:
    """Mappings are merged, but the keys next to a checkpoint are changes of its config.json."""
    paths = [FOLDER / "qwen3_8b_pretrain.yaml"]
    for number, overlay in enumerate(overlays):
        paths.append(tmp_path / f"{number}.yaml" if ":" in overlay else FOLDER / f"{overlay}.yaml")
        if ":" in overlay:
            paths[-1].write_text(overlay)
    monkeypatch.setattr("sys.argv", ["train"])  # Lightning warns of other arguments
    with pytest.raises(SystemExit):
        train_cli(["fit", *(f"--config={path}" for path in paths), "--print_config"])
    trained = yaml.safe_load(capsys.readouterr().out)["model"]["model"]
    assert trained == read_recipe(paths)["model"]["model"]
    if changed is not None:
        assert {name: trained.get(name) for name in changed} == changed


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_is_explained(path: Path) -> None:
    """A key with a value, or above such keys that are not, has a comment."""
    bare = [line for line in path.read_text().splitlines() if ":" in line and "#" not in line]
    allowed = {
        "trainer:", "strategy:", "init_args:", "progress:", "model:", "data:", "memory:", "class_path:", "output_dir:",
    }  # fmt: skip
    assert [line for line in bare if line.split()[0] not in allowed] == []


def read(*names: str) -> dict[str, Any]:
    """A recipe and what is laid over it."""
    recipe: dict[str, Any] = {}
    for name in names:
        recipe = lay_over(recipe, yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
    return recipe
