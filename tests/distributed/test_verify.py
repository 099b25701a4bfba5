"""`ringflash verify`: right trainings pass; each planted mistake fails, and the report names it. gloo, 2 and 4 CPU
processes, fp32; needs the huggingface extra."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.pool import Context, Pool, on_ranks

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from ringflash.verify.attention import attention_checks
from ringflash.verify.session import Session, Settings
from ringflash.verify.target import draw_data, load
from tests.helpers import plants
from tests.helpers.models import TINY, build

SEQLEN = 48
BOUNDS = [0, 19, 29, 48]


def report_of(
    ctx: Context, plant: str, kind: str | None = None, bounds: list[int] | None = None, patch: str | None = None,
    settings: dict[str, Any] | None = None,
) -> tuple[bool, dict[str, list[str]], str, str]:  # fmt: skip
    """(passed, what failed by check, first difference, likely cause)."""
    build: Any = getattr(plants, plant)
    told = Settings(SEQLEN, torch.float32, ctx.device, bounds, **settings or {})
    with plants.PATCHES[patch]() if patch else nullcontext():
        report = Session(lambda group: build(group, kind) if kind else build(group), ctx.group, told).run()
    return report.passed, {c.name: c.failed for c in report.checks if c.failed}, report.first, report.hint


def report_of_folder(ctx: Context, folder: str, layers: int | None) -> tuple[bool, list[str], int]:
    """(passed, what failed, layers that were compared) of a folder as the command takes it."""
    session = Session(load(folder, layers, 0), ctx.group, Settings(SEQLEN, torch.float32, ctx.device))
    report = session.run()
    return report.passed, [c.name for c in report.checks if c.failed], len(session.windows)


def report_with_more_baselines(ctx: Context, patch: str | None) -> tuple[bool, float, int]:
    """(passed, largest error over budget, baselines drawn in addition).

    The first baseline is too exact, unless a mistake is patched in.
    """

    def lucky(self: Session, got: Any) -> Any:
        runs = original(self, got)
        for name, want in () if patch else runs.want.layers.items():
            seen = runs.baseline.layers
            seen[name] = (want + 0.1 * (seen[name].double() - want)).double()
        return runs

    original = Session._observe_cp1
    session = Session(plants.right, ctx.group, Settings(SEQLEN, torch.float32, ctx.device))
    with (
        plants.PATCHES[patch]() if patch else nullcontext(),
        mock.patch.object(Session, "_observe_cp1", lucky),
        mock.patch.object(session, "_add_baseline", wraps=session._add_baseline) as drawn,
    ):
        report = session.run()
    return report.passed, max(check.ratio or 0.0 for check in report.checks), drawn.call_count


def same_on_all_ranks(results: list[Any]) -> Any:
    assert all(result == results[0] for result in results)
    return results[0]


RIGHT: list[tuple[Any, ...]] = [  # number of ranks, and arguments of `report_of`
    *((2, "right", kind, x) for kind in ("llama", "qwen3_window", "mistral_window") for x in (None, BOUNDS)),
    (2, "right", "sinks", BOUNDS),
    (2, "right", "chunks", BOUNDS),
    (4, "right", "qwen3_window", [0, 17, 18, 48]),
    *((2, "right_in_fp8", impl, BOUNDS) for impl in ("reference_fp8", "reference_fp8_all")),
    *((2, plant) for plant in ("right_with_ddp", "right_with_fsdp", "bare")),
]


@pytest.mark.parametrize(("size", "options"), [(size, options) for size, *options in RIGHT], ids=str)
def test_a_right_training_passes(pool: Pool, size: int, options: list[Any]) -> None:
    """In FP8, limits are twice its own error on one device, and printed ones against exact attention.

    A wrapper averages the gradients; names are those of the model. Without a list of layers all modules count.
    """
    assert_named(pool, "", "", *options, size=size)


@on_ranks(2)
def test_the_default_device_of_torch_is_not_used(ctx: Context) -> None:
    """A model's code may call torch.set_default_device("cuda"); generators of the CPU cannot draw there."""
    want = draw_data(61, SEQLEN, BOUNDS, 0, ctx.device)
    with torch.device("meta"):
        data = draw_data(61, SEQLEN, BOUNDS, 0, ctx.device)
        (check,) = attention_checks(ctx.group, data, {None}, True, torch.float32)
    assert torch.equal(data.input_ids, want.input_ids) and check.ratio is not None and not check.failed


def test_right_training_passes_with_an_exact_baseline(pool: Pool) -> None:
    (passed, _, drawn), (others, _, none) = pool.run(report_with_more_baselines, None, size=2)
    assert passed and others and 1 <= drawn <= 8 and none == 0


@pytest.mark.parametrize(("patch", "drawn"), [("scale", 0), ("nearly_the_scale", 32)])
def test_more_baselines_hide_no_other_scale(pool: Pool, patch: str, drawn: int) -> None:
    """Scales that are wrong by 1e-3, and by 5e-6, which rounding might seem to explain."""
    (passed, ratio, count), _ = pool.run(report_with_more_baselines, patch, size=2)
    assert not passed and count == drawn and (ratio > 100) == (drawn == 0)


@on_ranks(2)
def test_limits_of_fp8_are_printed(ctx: Context) -> None:
    report = Session(plants.right_in_fp8, ctx.group, Settings(SEQLEN, torch.float32, ctx.device)).run()
    if ctx.rank == 0:
        loss, gradients = (check.note for check in report.checks if check.name.startswith("FP8 against exact"))
        assert loss.endswith("% apart, at most 1%") and gradients.endswith("% apart, at most 12%")
        assert 0 < float(loss.split("%")[0]) < 1 < float(gradients.split("%")[0]) < 12


def assert_named(pool: Pool, where: str, why: str, *options: Any, size: int = 2) -> dict[str, list[str]]:
    """Assert that a training fails, by its first difference and likely cause; return what failed by check.

    If there is no first difference, it passes.
    """
    passed, failed, first, hint = same_on_all_ranks(pool.run(report_of, *options, size=size))
    assert passed != bool(where) and bool(failed) == bool(where), (passed, failed, first, hint)
    assert where in first and why in hint, (failed, first, hint)
    return failed


# plant: (first difference, likely cause), parts of what is printed; a chunk is 12 tokens on 2 ranks, 6 on 4
MISTAKES: dict[str, tuple[str, str]] = {
    "hidden_local_positions": ("layers.0.self_attn at position {chunk} (chunk 1, held by rank 1)", "positions (RoPE)"),
    "hidden_local_positions_in_fp8": ("gradients: ", ""),  # layer outputs are within FP8's error
    "local_positions_in_batch": ("cp={size} does not run: ValueError: position_ids must be", ""),
    "labels_shifted_in_batch": ("batch: shift_labels at position {last} (chunk ", "labels are shifted after sharding"),
    "labels_shifted_in_module": ("loss: loss", "labels are shifted after sharding"),
    "mean_of_own_tokens": ("loss: loss", "each averages over its own tokens"),
    "without_cp_size": ("loss: loss", "the loss is 1/{size} of the truth"),
    "gradients_not_averaged": ("gradients: ", "averaged over the wrong ranks"),
    "missed_layer": ("layers.1.self_attn at position {chunk} (chunk 1, held by rank 1)", "this layer was missed"),
    "bare_on_own_shard": ("layer outputs: attention at position {chunk} (chunk 1", "the rank's own shard only"),
    "hand_written": ("layer outputs: layers.0.out at position {chunk} (chunk 1", "the rank's own shard only"),
    "hand_written_in_the_model": ("layer outputs: out at position {chunk} (chunk 1", "the rank's own shard only"),
    "eval_loss_summed": ("evaluation loss: eval loss", "eval loss is {size}x"),
    "other_weights": ("weights before: model.lm_head.weight", "the models differ before the first step"),
    "other_weights_on_rank_1": ("weights before: model.lm_head.weight", "from one seed"),
    "other_step_on_rank_1": ("optimizer step: model.model.embed_tokens.weight", ""),
    "counts_averaged": ("optimizer step: model.model.layers.1.mlp.counts", ""),
    "other_last_norm": ("layer outputs: last hidden state at position 0", ""),
}


# On four ranks, too: a place, a rank, and a factor of the number of ranks.
ON_FOUR = ("missed_layer", "without_cp_size")


@pytest.mark.parametrize(("plant", "size"), [*((plant, 2) for plant in MISTAKES), *((plant, 4) for plant in ON_FOUR)])
def test_a_mistake_is_named(pool: Pool, plant: str, size: int) -> None:
    where, why = (text.format(size=size, chunk=24 // size, last=24 // size - 1) for text in MISTAKES[plant])
    failed = assert_named(pool, where, why, plant, size=size)
    assert plant != "eval_loss_summed" or list(failed) == ["evaluation loss"]


PATCHED: dict[str, tuple[str, str, str]] = {
    "local_shard_only": ("llama", "layers.0.self_attn at position 12 (chunk 1", "the rank's own shard only"),
    "window_dropped": ("mistral_window", "layers.0.self_attn at position 5 (chunk 0", "a mask is dropped at cp=N"),
    "rounded_gradients": ("llama", "gradients: model.model.layers.1.self_attn.", "sum them in fp32"),
}


@pytest.mark.parametrize("patch", PATCHED)
def test_a_mistake_in_the_attention_is_named(pool: Pool, patch: str) -> None:
    kind, where, why = PATCHED[patch]
    assert_named(pool, where, why, "right", kind, None, patch)


@pytest.mark.parametrize(
    ("plant", "where", "why"),
    [
        ("documents_dropped_in_ring", "layers.0.self_attn at position 19 (chunk 1", "a mask is dropped at cp=N"),
        ("documents_dropped_everywhere", "mask: cp=1", "position 18 reaches 19 at cp=1 and cp=N"),
        ("documents_dropped_beside_a_list", "mask: cp=1", "position 18 reaches 19 at cp=1 and cp=N"),
        ("bounds_a_token_early", "mask: cp=1", "position 18 reaches 19 at cp=1 and cp=N, outside [18, 19)"),
        ("bounds_but_the_first_dropped", "mask: cp=1", "position 28 reaches 29 at cp=1 and cp=N"),
    ],
)
def test_dropped_documents_are_named(pool: Pool, plant: str, where: str, why: str) -> None:
    assert_named(pool, where, why, plant, None, BOUNDS)


PARENTS = {"parents": [-1, 0, 0]}


# Two documents that continue the first one, which is bidirectional in some; or three with global tokens.
@pytest.mark.parametrize(
    ("plant", "kind", "settings", "where", "why"),
    [
        ("right", "mistral_window", PARENTS, "", ""),
        ("right", "llama", {**PARENTS, "bidirectional": [True, False, False]}, "", ""),
        ("parents_dropped", None, PARENTS, "masks of layers", "0 does not reach 47, inside [0, 48) at"),
        ("siblings_in_a_chain", None, PARENTS, "mask: cp=1", "28 reaches 29 at cp=1 and cp=N, outside [28, 29)"),
        ("right", "mistral_window", {"global_tokens": 2}, "", ""),
        ("global_tokens_dropped", None, {"global_tokens": 2}, "masks of layers", "does not reach"),
    ],
)
def test_documents_in_a_table(
    pool: Pool, plant: str, kind: str | None, settings: dict[str, Any], where: str, why: str
) -> None:
    assert_named(pool, where, why, plant, kind, BOUNDS, None, settings)


AT_ONE_TOO = "0 reaches 5, outside [0, 5) at cp=1 and cp=N"
# patch: (kind, bounds, layer and position of the first difference, likely cause); a chunk of the layout is 12 tokens
HIDDEN_BY_FULL_LAYERS: dict[str, tuple[str, list[int] | None, str, str]] = {
    "window_dropped": ("qwen3_window", None, "1.self_attn at position 5 (chunk 0", "a mask is dropped at cp=N"),
    "window_dropped_everywhere": ("qwen3_window", None, "1.self_attn at position 5 (chunk 0", AT_ONE_TOO),
    "window_one_more": ("qwen3_window", None, "1.self_attn at position 5 (chunk 0", AT_ONE_TOO),
    "window_one_less": ("qwen3_window", BOUNDS, "1.self_attn at position 4 (", "0 does not reach 4, inside [0, 5) at"),
    "window_on_the_wrong_layer": ("qwen3_window", BOUNDS, "0.self_attn at position 18 (", "does not reach 18, inside"),
    "chunks_dropped": ("chunks", None, "0.self_attn at position 5 (chunk 0", AT_ONE_TOO),
    "chunks_of_the_shard": ("chunks", None, "0.self_attn at position 12 (chunk 1, held by rank 1)", ""),
    "chunks_of_the_sequence": (
        "chunks", BOUNDS, "0.self_attn at position 33 (", "29 does not reach 33, inside [29, 34)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("patch", HIDDEN_BY_FULL_LAYERS)
def test_a_mask_that_full_layers_hide_is_named(pool: Pool, patch: str) -> None:
    kind, bounds, where, why = HIDDEN_BY_FULL_LAYERS[patch]
    assert "masks of layers" in assert_named(pool, where, why, "right", kind, bounds, patch)


@pytest.mark.parametrize(
    ("plant", "bounds", "window", "where", "why"),
    [
        ("bidirectional", None, None, "", ""),
        ("bidirectional", BOUNDS, None, "", ""),
        ("bidirectional_window", BOUNDS, 5, "", ""),
        ("bidirectional_window", None, 4, "mask: cp=1", "position 24 reaches 20 at cp=1 and cp=N, outside [21, 28)"),
        ("bidirectional_on_own_shard", None, None, "layer outputs: attention at position 0", "own shard only"),
        ("bidirectional_without_documents", BOUNDS, None, "mask: cp=1", "reaches 19 at cp=1 and cp=N, outside [0, 19)"),
    ],
)
def test_attention_in_both_directions(
    pool: Pool, plant: str, bounds: list[int] | None, window: int | None, where: str, why: str
) -> None:
    """The model is said not to be causal."""
    settings = {"window": window, "causal": False}
    assert_named(pool, where, why, plant, None, bounds, None, settings)


def test_attention_in_both_directions_must_be_said(pool: Pool) -> None:
    _, failed, *_ = same_on_all_ranks(pool.run(report_of, "bidirectional", size=2))
    assert failed == {"mask": ["cp=1", "cp=N"]}


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        ("dropout_over_a_mistake", "the forward must draw no random numbers, got some; set every dropout"),
        ("batch_norm", "norm must not be nn.BatchNorm1d, .*; its statistics are of the rank's own tokens;"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_judged_is_refused(ctx: Context, plant: str, message: str) -> None:
    """Dropout makes runs differ by more than any rounding: the budget would let everything pass.

    A norm over tokens would be right at cp=1 only, and in fp64 has no statistics to evaluate with.
    """
    with pytest.raises(RuntimeError, match=message):
        report_of(ctx, plant)


def test_a_folder_with_weights_or_without_passes(pool: Pool, tmp_path: Path) -> None:
    """A checkpoint in safetensors; only its configuration; only its first layer; experts, that round by the batch."""
    model = build("qwen3_window").float()
    model.save_pretrained(tmp_path / "checkpoint")
    model.config.save_pretrained(tmp_path / "config")
    AutoConfig.for_model("mixtral", **TINY, num_local_experts=8).save_pretrained(tmp_path / "experts")
    for folder, layers in (("checkpoint", None), ("config", None), ("checkpoint", 1), ("experts", None)):
        result = same_on_all_ranks(pool.run(report_of_folder, str(tmp_path / folder), layers, size=2))
        assert result == (True, [], layers or 2)


def test_layers_that_are_cut_off_are_not_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers lists them for every load; a tensor that is not there at all is still said."""
    build("qwen3_window").float().save_pretrained(tmp_path)
    log = logging.getLogger("transformers")  # which hands nothing on
    log.addHandler(caplog.handler)
    try:
        load(str(tmp_path), 1, 0)(None)
    finally:
        log.removeHandler(caplog.handler)
    assert "UNEXPECTED" not in caplog.text
    weights = tmp_path / "model.safetensors"
    save_file(
        {name: x for name, x in load_file(weights).items() if name != "model.norm.weight"}, weights, {"format": "pt"}
    )
    with pytest.warns(UserWarning, match=r"lacks \['model.norm.weight'\], which were drawn"):
        load(str(tmp_path), 1, 0)(None)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Rather than drawn anew."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="weights must be safetensors, got .bin files"):
        load(str(tmp_path), None, 0)
