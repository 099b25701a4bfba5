"""Hugging Face checkpoints in and out: loaded shard by shard, exported, loaded again. Two gloo processes, and one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from recipes.lightning.export import main
from recipes.lightning.text import PackedText, is_held_out, text_files
from ringflash import huggingface
from ringflash.data.order import SampleOrder
from ringflash.huggingface.weights import draw_weights, load_weights, merge_config, read_config
from tests.helpers.pool import Launches
from tests.helpers.recipe_model import build_model
from tests.recipes.launching import write_text
from tests.recipes.test_strategy import CONFIG, SEQLEN
from tests.recipes.weights_worker import found

MOE = {
    "moe_intermediate_size": 24, "num_local_experts": 6, "num_experts": 6, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "num_key_value_heads": 4,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
FAMILIES = {
    "mixtral": MOE, "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 24}, "qwen3_moe": MOE,
    "deepseek_v2": {**MOE, **LATENT, "topk_method": "greedy"}, "deepseek_v3": {**MOE, **LATENT}, "olmoe": MOE,
    "glm4_moe": {**MOE, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}, "gpt_oss": MOE,
    "llama4_text": {**MOE, "intermediate_size_mlp": 48}, "granitemoe": MOE, "phimoe": MOE,
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 24},
    "minimax_m2": MOE, "gpt_neox": {},
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e5}


def transformers_model(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """Values of transformers' own."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIG, **options}), dtype=dtype)


def transformers_experts(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """A mixture of experts, or another model whose checkpoint has other names; no two tensors of it are alike."""
    model = transformers_model(dtype, **{"model_type": family, **FAMILIES[family], **options})
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(0.1 * torch.randn_like(tensor) + (tensor == 1))
    return model


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
    transformers_experts("deepseek_v3").save_pretrained(folder / "experts", max_shard_size="40KB")
    three = {"num_experts": 3, "num_local_experts": 3, "moe_intermediate_size": 64}
    transformers_experts("qwen3_moe", **three).save_pretrained(folder / "uneven", max_shard_size="40KB")
    transformers_experts("ernie4_5_moe", torch.bfloat16).save_pretrained(folder / "fp32 routers")
    transformers_model(intermediate_size=40).save_pretrained(folder / "wrong")
    wrong = json.loads((folder / "wrong" / "config.json").read_text())
    (folder / "wrong" / "config.json").write_text(json.dumps({**wrong, "intermediate_size": 48}))
    write_text(folder / "texts")
    assert len(list((folder / "untied").glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("found")


@pytest.fixture(scope="module")
def ranks(pool: Launches, folder: Path, out: Path) -> list[dict[str, Any]]:
    """Findings of each of two ranks, which leave checkpoints in <out>."""
    return pool.run(found, folder, out, size=2)


def first_loss(model: nn.Module, folder: Path) -> float:
    """Loss of the first sequence by transformers' own attention in one process, a document at a time."""
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


@pytest.mark.parametrize("name", ["untied", "tied", "experts", "uneven"])
def test_training_starts_from_the_checkpoint(ranks: list[dict[str, Any]], folder: Path, name: str) -> None:
    """The ring's loss over two ranks, fp64, is transformers' loss of the same checkpoint."""
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    want = first_loss(AutoModelForCausalLM.from_pretrained(folder / name, **options), folder)
    for rank in ranks:
        assert abs(rank[name]["loss"] - want) <= 1e-12 * want


def test_no_rank_holds_or_reads_the_model(ranks: list[dict[str, Any]]) -> None:
    """Each reads what it holds and no more, at most a tensor's part at a time; of three experts both hold a half."""
    for name, num_buffer_values in (("untied", 0), ("tied", 0), ("experts", 6), ("uneven", 0)):
        for rank in ranks:
            assert sum(rank[name]["reads"]) == rank[name]["held"] + num_buffer_values
            assert max(rank[name]["reads"]) <= rank[name]["largest"]
        held, whole = [rank[name]["held"] for rank in ranks], ranks[0][name]["all"]
        assert sum(held) == whole and max(held) <= 0.52 * whole


def test_tensors_kept_in_fp32_are_not_rounded(ranks: list[dict[str, Any]], folder: Path) -> None:
    """Parameters of Ernie 4.5's routers, in a model whose layers are in bf16."""
    model = AutoModelForCausalLM.from_pretrained(folder / "fp32 routers", dtype=torch.bfloat16)
    want = {name: (str(p.dtype), p.double().norm().item()) for name, p in model.named_parameters()}
    assert sum(dtype == "torch.float32" for dtype, _ in want.values()) == 2
    for rank in ranks:
        assert rank["in_bf16"]["before"] == want
        assert math.isfinite(rank["in_bf16"]["loss"])


def test_drawn_values_depend_only_on_the_seed(ranks: list[dict[str, Any]]) -> None:
    """Two ranks' shards are the whole parameters that one process draws."""
    alone, other = (build_model(CONFIG, None, seed, dtype=torch.float64) for seed in (5, 6))
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


@pytest.mark.parametrize("published", [True, False], ids=["published", "own names"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_names_and_experts_one_by_one_are_read(tmp_path: Path, family: str, published: bool) -> None:
    """Every tensor that transformers converts as it loads has the bits and the dtype that from_pretrained gives it."""
    saved = transformers_experts(family, torch.bfloat16)
    saved.save_pretrained(tmp_path, max_shard_size="40KB", save_original_format=published)
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    model = on_meta(dtype=torch.bfloat16, model_type=family, **FAMILIES[family])
    load_weights(model, torch.device("cpu"), tmp_path)
    assert model.state_dict().keys() == want.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == want[name].dtype and torch.equal(tensor, want[name])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("5.up_proj.weight", None, r"every tensor of the model, got a difference in {0}.5.up_proj.weight;"),
        (".up_proj.weight", None, r"every tensor .* {0}.0.up_proj.weight, {0}.1.up_proj.weight, .* and 3 more;"),
        ("6.up_proj.weight", (24, 32), r"only tensors of the model, got a difference in {0}.6.up_proj.weight;"),
        ("2.down_proj.weight", (24, 32), r"the model's shapes, .* {0}.2.down_proj.weight \(24, 32\) for \(32, 24\);"),
        ("gate_up_proj", (6, 48, 32), r"each tensor once, got a difference in {0}.gate_up_proj;"),
    ],
)
def test_wrong_experts_are_named(tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str) -> None:
    transformers_experts("qwen3_moe").save_pretrained(tmp_path)
    experts = "model.layers.0.mlp.experts"
    tensors = load_file(tmp_path / "model.safetensors")
    if shape is None:
        tensors = {x: tensor for x, tensor in tensors.items() if not (x.startswith(experts) and x.endswith(name))}
    else:
        tensors[f"{experts}.{name}"] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message.format(experts)):
        load_weights(on_meta(model_type="qwen3_moe", **MOE), torch.device("cpu"), tmp_path)


def test_a_conversion_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that transformers would cut, permute or transpose, too."""
    saved = transformers_model()
    saved.save_pretrained(tmp_path)
    table = [WeightConverter("q_proj.weight", "q_proj.weight", [Transpose(0, 1)])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: table)
    with pytest.raises(ValueError, match="must hold only tensors of the model, got .*layers.0.self_attn.q_proj.weight"):
        load_weights(on_meta(), torch.device("cpu"), tmp_path)


def test_a_model_without_its_head_gives_the_tied_one(tmp_path: Path) -> None:
    """The names of a decoder that was saved by itself lack its prefix."""
    saved = transformers_model(tie_word_embeddings=True)
    saved.model.save_pretrained(tmp_path)
    model = on_meta(tie_word_embeddings=True)
    load_weights(model, torch.device("cpu"), tmp_path)
    ids = torch.arange(40)[None]
    assert torch.equal(model(ids).logits, saved(ids).logits)
    with pytest.raises(ValueError, match="every tensor of the model, got a difference in lm_head.weight"):
        load_weights(on_meta(), torch.device("cpu"), tmp_path)


def test_tied_tensors_must_be_equal(tmp_path: Path) -> None:
    """A checkpoint with a separate head, which tie_word_embeddings would drop; either of the two is accepted."""
    saved = transformers_model()
    saved.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="must be equal in the checkpoint, got different values of lm_head.weight and model.embed"
    ):
        load_weights(on_meta(tie_word_embeddings=True), torch.device("cpu"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = on_meta(tie_word_embeddings=True)
    load_weights(model, torch.device("cpu"), tmp_path)
    assert torch.equal(model.model.embed_tokens.weight, saved.lm_head.weight)


def test_yarn_under_the_ring_is_transformers() -> None:
    """One process, fp64: the loss with extended rotary angles."""
    ring = build_model({**CONFIG, "rope_parameters": YARN}, None, dtype=torch.float64)
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


@pytest.mark.parametrize("named", ["lm_head.weight", "model.rotary_emb.inv_freq"])
def test_values_that_no_rule_gives_are_refused(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constructor's values are lost on the meta device: a model would begin with what the memory held."""
    model = on_meta()
    left_out = type(model.get_submodule(named.rpartition(".")[0]))
    rules = type(model)._init_weights

    def all_but_one(self: nn.Module, module: nn.Module) -> None:
        if type(module) is not left_out:
            rules(self, module)

    monkeypatch.setattr(type(model), "_init_weights", all_but_one)
    with pytest.raises(NotImplementedError, match="must give every tensor its initial values, got none for .*; start"):
        draw_weights(model, torch.device("cpu"), 0)


def exported(checkpoint: Path, out: Path, *options: str) -> nn.Module:
    """Load with transformers what the command has written."""
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


@pytest.mark.parametrize(("name", "last"), [("experts", "1.mlp.experts.5"), ("uneven", "1.mlp.experts.2")])
def test_exported_experts_are_read(ranks: list[dict[str, Any]], out: Path, folder: Path, name: str, last: str) -> None:
    """One by one, as they are published, with the router's buffer, which no optimizer trains."""
    assert ranks
    place = folder / f"{name} exported"
    model = exported(out / f"{name}.ckpt", place, "--dtype", "float64")
    with safe_open(place / "model.safetensors", "pt") as file:
        assert f"model.layers.{last}.up_proj.weight" in file.keys()
    with torch.device("meta"):
        again = AutoModelForCausalLM.from_config(AutoConfig.for_model(**read_config(place)), dtype=torch.float64)
    load_weights(again, torch.device("cpu"), place)
    start = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key])
        assert torch.equal(tensor, start[key]) == key.endswith("e_score_correction_bias")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("empty", r"must hold a checkpoint in \*\.safetensors, got none"),
        ("cut", "must hold whole safetensors files"),
        ("missing", "must hold every tensor of the model, got a difference in model.norm.weight"),
        ("unknown", "must hold only tensors of the model, got a difference in model.extra"),
    ],
)
def test_what_is_no_checkpoint_of_the_model_is_refused(tmp_path: Path, spoil: str, message: str) -> None:
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
    """The index's, or model.safetensors, whatever else is there; an index of files that do not exist is refused."""
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
def test_rope_parameters_replace_the_checkpoints(before: dict[str, Any]) -> None:
    """Whichever keys it has; its base stays where none is given. Older keys are refused: they would not count."""
    change = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = AutoConfig.for_model(**merge_config({**CONFIG, **before}, {"rope_parameters": change}))
    assert config.rope_parameters == {**change, "rope_theta": 7e5}
    config = AutoConfig.for_model(**merge_config({**CONFIG, **before}, {"rope_parameters": YARN}))
    assert config.rope_parameters == YARN
    with pytest.raises(ValueError, match="rotary embedding through rope_parameters, got rope_theta; move them there"):
        merge_config({**CONFIG, **before}, {"rope_theta": 1e6})


@pytest.mark.parametrize("text", ["{}", "[]", "[[1, 2]]", "3", "{"])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json must be a transformers configuration, got .*"):
        read_config(tmp_path)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    """Their scales would be missing from them, and the exported configuration would say what is no longer true."""
    transformers_model().save_pretrained(tmp_path)
    model = on_meta()
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="must hold plain weights, got quantization_config .*'fp8'.*; dequantize it"):
        load_weights(model, torch.device("cpu"), tmp_path)


def test_export_refuses_what_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "zero.ckpt").mkdir()
    (tmp_path / "zero.ckpt" / "latest").touch()
    for name, out, options, message in (
        ("nothing", "out", [], "must be a complete distributed checkpoint"),
        ("zero.ckpt", "out", [], "got one of DeepSpeed; the zero_to_fp32.py in it writes its weights"),
        ("nothing", "", [], "must not exist yet"),
        ("nothing", "out", ["--tokenizer", "/nowhere"], "must be a directory with a tokenizer's files, got none in"),
    ):
        assert main([str(tmp_path / name), str(tmp_path / out), *options]) == 1
        assert message in capsys.readouterr().err
