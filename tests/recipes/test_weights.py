"""Hugging Face checkpoints in and out: loaded shard by shard, exported, loaded again. Two gloo processes, and one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ringflash import huggingface
from ringflash.data.order import SampleOrder
from ringflash.huggingface.__main__ import main
from ringflash.huggingface.weights import draw_weights, laid_over, load_weights, read_config
from ringflash.lightning.module import build_model
from ringflash.lightning.text import PackedText
from tests.recipes.launching import run_ranks, write_text
from tests.recipes.strategy_worker import CONFIG, SEQLEN

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e5}


def transformers_model(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """Values of transformers' own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIG, **options}), dtype=dtype)


def on_meta(**options: Any) -> nn.Module:
    """A model without values."""
    with torch.device("meta"):
        return transformers_model(**options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of several files each."""
    folder = tmp_path_factory.mktemp("checkpoints")
    transformers_model().save_pretrained(folder / "untied", max_shard_size="40KB")
    transformers_model(tie_word_embeddings=True).save_pretrained(folder / "tied", max_shard_size="40KB")
    transformers_model(intermediate_size=40).save_pretrained(folder / "wrong")
    wrong = json.loads((folder / "wrong" / "config.json").read_text())
    (folder / "wrong" / "config.json").write_text(json.dumps({**wrong, "intermediate_size": 48}))
    write_text(folder / "texts")
    assert len(list((folder / "untied").glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks found."""
    out = tmp_path_factory.mktemp("found")
    run_ranks("tests.recipes.weights_worker", folder, out, num_ranks=2)
    return out


@pytest.fixture(scope="module")
def ranks(out: Path) -> list[dict[str, Any]]:
    """The same, read."""
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def first_loss(model: nn.Module, folder: Path) -> float:
    """Of the first sequence, by transformers' own attention in one process, a document at a time."""
    from ringflash.lightning.text import is_held_out, text_files

    paths = [path for name, path in text_files(str(folder / "texts"), ".txt") if not is_held_out(name)]
    texts = PackedText((path.read_bytes() for path in paths), SEQLEN)
    sample = texts[next(iter(SampleOrder(len(texts), seed=0, dp_rank=0, dp_size=1, first=0)))]
    bounds, total, count = sample["cu_seqlens"].tolist(), 0.0, 0
    for start, stop in zip(bounds, bounds[1:], strict=False):
        ids = sample["input_ids"][:, start:stop]
        logits = model(ids).logits[0, :-1]
        total += nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += stop - start - 1
    return total / count


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_training_starts_from_the_checkpoint(ranks: list[dict[str, Any]], folder: Path, name: str) -> None:
    """The ring's loss over two ranks, fp64, is transformers' loss of the same checkpoint."""
    want = first_loss(transformers_model(tie_word_embeddings=name == "tied"), folder)
    for rank in ranks:
        assert abs(rank[name]["loss"] - want) <= 1e-12 * want


def test_no_rank_holds_the_model(ranks: list[dict[str, Any]]) -> None:
    for name in ("untied", "tied"):
        held, whole = [rank[name]["held"] for rank in ranks], ranks[0][name]["all"]
        assert sum(held) == whole and max(held) <= 0.6 * whole


def test_drawn_values_depend_on_the_seed_alone(ranks: list[dict[str, Any]]) -> None:
    """Two ranks' shards are the whole parameters that one process draws."""
    torch.set_default_dtype(torch.float64)
    try:
        alone, other = (build_model(CONFIG, None, seed) for seed in (5, 6))
    finally:
        torch.set_default_dtype(torch.float32)
    want = {f"model.{name}": p.norm().item() for name, p in alone.named_parameters()}
    assert ranks[0]["drawn"].keys() == want.keys()
    for name, norm in want.items():
        assert abs(ranks[0]["drawn"][name] - norm) <= 1e-12 * norm
    weights = [p for p in alone.parameters() if p.dim() > 1]
    assert len({p.norm().item() for p in weights}) == len(weights)  # no two drawn alike
    assert not torch.equal(alone.model.lm_head.weight, other.model.lm_head.weight)


def test_one_rank_with_a_wrong_checkpoint_stops_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "must hold tensors of the model's shapes" in rank["error"]
        assert "mlp.down_proj.weight (32, 40) for (32, 48)" in rank["error"]


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"rope_parameters": YARN}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_from_pretrained(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    options = {"model_type": family, "head_dim": 8, **options}
    saved = transformers_model(**options)
    saved.save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    model = on_meta(**options)
    load_weights(model, torch.device("cpu"), tmp_path / "saved")
    ids = torch.arange(40)[None] % 257
    assert torch.equal(model(ids).logits, saved(ids).logits)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is options.get("tie_word_embeddings", False)


def test_yarn_under_the_ring_is_transformers() -> None:
    """One process, fp64: the loss with extended rotary angles."""
    torch.set_default_dtype(torch.float64)
    try:
        ring = build_model({**CONFIG, "rope_parameters": YARN}, None, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    plain = transformers_model(rope_parameters=YARN)
    plain.load_state_dict(ring.model.state_dict())
    ids = torch.arange(96)[None] * 7 % 257
    want = nn.functional.cross_entropy(plain(ids).logits[0, :-1], ids[0, 1:])
    got = ring(**huggingface.prepare_batch(ids, group=None))
    assert abs(got - want) <= 1e-12 * want


def test_first_values_follow_the_models_rules() -> None:
    """Normal with the configuration's deviation, norms of ones, and buffers that no checkpoint holds."""
    model, plain = on_meta(initializer_range=0.5, rope_parameters=YARN), transformers_model(rope_parameters=YARN)
    draw_weights(model, torch.device("cpu"), 0)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert abs(weight.std().item() - 0.5) < 0.05 and abs(weight.mean().item()) < 0.05
    assert torch.equal(model.model.norm.weight, torch.ones_like(model.model.norm.weight))
    assert torch.equal(model.model.rotary_emb.inv_freq.double(), plain.model.rotary_emb.inv_freq.double())


def exported(checkpoint: Path, out: Path, *options: str) -> nn.Module:
    """What transformers loads after the command."""
    from transformers import AutoModelForCausalLM

    assert main([str(checkpoint), str(out), *options]) == 0
    return AutoModelForCausalLM.from_pretrained(out)


def test_exported_checkpoint_has_the_trained_logits(ranks: list[dict[str, Any]], out: Path, folder: Path) -> None:
    """Saved by two ranks after a few steps; exported, and loaded into the ring again."""
    assert ranks
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    options = ["--dtype", "float64", "--tokenizer", str(folder / "tokenizer")]
    model = exported(out / "saved.ckpt", folder / "exported", *options)
    assert model.dtype == torch.float64 and (folder / "exported" / "tokenizer.json").read_text() == "{}"
    start, ids = transformers_model(), torch.arange(40)[None]
    again = on_meta()
    load_weights(again, torch.device("cpu"), folder / "exported")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert not torch.equal(start(ids).logits, model(ids).logits)
    norms = torch.stack([(a - b).norm() for a, b in zip(model.parameters(), start.parameters(), strict=True)])
    assert (norms > 0).all()  # every parameter was trained, and saved


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("empty", r"must hold a checkpoint in \*\.safetensors, got none"),
        ("cut", "must hold whole safetensors files"),
        ("missing", "must hold every tensor of the model, got a difference in model.norm.weight"),
        ("unknown", "must hold tensors of the model alone, got a difference in model.extra"),
    ],
)
def test_what_is_no_checkpoint_of_the_model_is_refused(tmp_path: Path, spoil: str, message: str) -> None:
    from safetensors.torch import load_file, save_file

    file = tmp_path / "model.safetensors"
    if spoil != "empty":
        transformers_model().save_pretrained(tmp_path)
        tensors = load_file(file)
        if spoil == "missing":
            del tensors["model.norm.weight"]
        if spoil == "unknown":
            tensors["model.extra"] = torch.zeros(2)
        save_file(tensors, file)
    if spoil == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=message):
        load_weights(on_meta(), torch.device("cpu"), tmp_path)


def test_files_are_those_that_from_pretrained_reads(folder: Path, tmp_path: Path) -> None:
    """The index's, or model.safetensors, whatever lies beside them; an index of files that are not there is refused."""
    from safetensors.torch import save_file

    saved, place = transformers_model(), tmp_path / "checkpoint"
    saved.save_pretrained(place, max_shard_size="40KB")
    stale = {name: torch.zeros_like(value) for name, value in saved.state_dict().items()}
    save_file(stale, place / "old.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(2)}, place / "consolidated.safetensors")

    def loaded() -> nn.Module:
        model = on_meta()
        load_weights(model, torch.device("cpu"), place)
        return model

    assert torch.equal(loaded().lm_head.weight, saved.lm_head.weight)
    first = min(place.glob("model-*.safetensors"))
    first.rename(tmp_path / first.name)
    with pytest.raises(ValueError, match=f"must hold every file of its index, got no .*{first.name}; copy it again"):
        loaded()
    index = place / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first.name, f"../{first.name}"))
    with pytest.raises(ValueError, match="must hold every file of its index"):
        loaded()
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index.json must be the index of a checkpoint, got KeyError\('weight_map'\)"):
        loaded()
    saved.save_pretrained(place)
    assert torch.equal(loaded().lm_head.weight, saved.lm_head.weight)


@pytest.mark.parametrize(
    "before",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
        {"rope_theta": 7e5, "rope_scaling": None},
        {"rope_theta": 7e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=["new", "old", "old and scaled"],
)
def test_rope_parameters_take_the_place_of_the_checkpoints(before: dict[str, Any]) -> None:
    """Whichever keys it has; its base stays where none is given. Older keys are refused: they would not count."""
    from transformers import AutoConfig

    change = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = AutoConfig.for_model(**laid_over({**CONFIG, **before}, {"rope_parameters": change}))
    assert config.rope_parameters == {**change, "rope_theta": 7e5}
    config = AutoConfig.for_model(**laid_over({**CONFIG, **before}, {"rope_parameters": YARN}))
    assert config.rope_parameters == YARN
    with pytest.raises(ValueError, match="rotary embedding by rope_parameters, got rope_theta; move them there"):
        laid_over({**CONFIG, **before}, {"rope_theta": 1e6})


@pytest.mark.parametrize("text", ["{}", "[]", "[[1, 2]]", "3", "{"])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json must be a transformers configuration, got .*"):
        read_config(tmp_path)


def test_export_refuses_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 1
    assert "must be a complete distributed checkpoint" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing"), str(tmp_path)]) == 1
    assert "must not exist yet" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing"), str(tmp_path / "out"), "--tokenizer", str(tmp_path / "nowhere")]) == 1
    assert "must be a directory with a tokenizer's files, got none in" in capsys.readouterr().err
