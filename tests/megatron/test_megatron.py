"""Training by Megatron-core's own loop, on two and four CPU processes, against its own attention on one.

`make test-megatron` runs this file in an environment of its own; elsewhere it is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.inference import utils as inference
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import ProcessGroup

import ringflash
from ringflash.megatron import core_attention, with_ring
from ringflash.megatron.core_attention import RingCoreAttention
from ringflash.megatron.layer_spec import RingLayer

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
ENGINE = Path(__file__).parent / "engine"  # a stand-in for Transformer Engine
MODELS = ("dense", "window", "packed", "packed window", "latent", "packed latent", "experts")
ENGINE_MODELS = ["engine", "engine hybrid"] if find_spec("megatron.core.models.hybrid") else ["engine"]
RELATIVE_ERROR = 32 * torch.finfo(torch.float32).eps  # of the norm of a tensor; the ring sums in another order

Results = Callable[[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Function that returns what each rank of a case has written.

    All cases of a number of ranks run in one launch, and those with a stand-in for Transformer Engine in another.
    """
    folder = tmp_path_factory.mktemp("megatron")
    launches = {
        1: [f"{name} alone" for name in MODELS],
        2: [*MODELS, "recomputed", "recomputed layers", "dense wrong", "tensor parallel alone", "pipeline alone"],
        4: [*MODELS, "tensor parallel", "sequence parallel", "pipeline"],
    }
    of_engine = {1: [f"{name} alone" for name in ENGINE_MODELS], 2: ENGINE_MODELS}

    def read(size: int, case: str) -> list[dict[str, Any]]:
        engine = case.startswith("engine")
        out = folder / f"{size} {engine}"
        if not out.exists():
            out.mkdir()
            launch(size, out, of_engine[size] if engine else launches[size], [ENGINE] if engine else [])
        return [torch.load(out / f"{case}.{rank}") for rank in range(size)]

    return read


def launch(size: int, folder: Path, cases: list[str], packages: list[Path]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    paths = os.pathsep.join(map(str, [ROOT, ROOT / "kernels", *packages, os.environ.get("PYTHONPATH", "")]))
    ran = subprocess.run(
        [*command, "-m", "tests.megatron.worker", str(folder), *cases], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, timeout=800,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-8000:]


def largest_error(got: dict[str, Any], want: dict[str, Any]) -> float:
    """Return the largest relative error of a loss, a gradient or a parameter."""
    errors = [abs(x - y) / y for x, y in zip(got["losses"], want["losses"], strict=True)]
    for kind in ("gradients", "parameters"):
        assert got[kind].keys() == want[kind].keys() and got[kind]
        errors += [(got[kind][name] - x).norm() / x.norm() for name, x in want[kind].items()]
    return float(torch.stack(errors).max())


EQUAL = [
    *((size, case, f"{case} alone") for case in MODELS for size in (2, 4)),
    *((2, case, f"{case} alone") for case in ENGINE_MODELS),  # Megatron's classes and specs for it, over a stand-in
    *((2, case, "packed alone") for case in ("recomputed", "recomputed layers")),  # in the backward
]


@pytest.mark.parametrize("size, case, alone", EQUAL)
def test_training_equals_one_process(results: Results, size: int, case: str, alone: str) -> None:
    want = results(1, alone)[0]
    assert all(largest_error(got, want) <= RELATIVE_ERROR for got in results(size, case))


@pytest.mark.parametrize(
    "case, of_rank",
    [("tensor parallel", (0, 1, 0, 1)), ("sequence parallel", (0, 1, 0, 1)), ("pipeline", (0, 0, 1, 1))],
)
def test_training_equals_other_parallelism(results: Results, case: str, of_rank: tuple[int, ...]) -> None:
    """With weights or layers over two ranks and the sequence over two, against the first two."""
    want = results(2, f"{case.replace('sequence', 'tensor')} alone")
    for rank, got in zip(of_rank, results(4, case), strict=True):
        assert largest_error(got, want[rank]) <= RELATIVE_ERROR


def test_training_notices_attention_to_a_shard(results: Results) -> None:
    assert largest_error(results(2, "dense wrong")[0], results(1, "dense alone")[0]) > 1000 * RELATIVE_ERROR


def settings(**changes: Any) -> TransformerConfig:
    given = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0,
        "transformer_impl": "local", "calculate_per_token_loss": True, "normalization": "RMSNorm",
    }  # fmt: skip
    return TransformerConfig(**{**given, **changes})


def attention(config: TransformerConfig, **changes: Any) -> RingCoreAttention:
    arguments = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    return RingCoreAttention(config, **{**arguments, **changes})


@pytest.mark.parametrize(
    "name, got, must",
    [
        ("attention_dropout", 0.1, "0.0"),
        ("softmax_type", "learnable", "'vanilla'"),
        ("qk_clip", True, "False"),
        ("log_max_attention_logit", True, "False"),
        ("attention_backend", AttnBackend.fused, "<AttnBackend.auto"),
        ("flash_attention_version", 3, "None"),
        ("fp8_dot_product_attention", True, "False"),
        ("apply_query_key_layer_scaling", True, "False"),
        ("cuda_graph_impl", "full_iteration", "'none'"),
        ("hybrid_context_parallel", True, "False"),
    ],
)
def test_settings_of_other_attention_are_refused(name: str, got: Any, must: str) -> None:
    config = settings()
    setattr(config, name, got)
    with pytest.raises(NotImplementedError, match=f"{name} must be {must}.* with RingCoreAttention, got .*; set it so"):
        attention(config)


def test_arguments_of_other_attention_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dataloader_inter_document_masking", "reset_attention_mask"):
        trainer = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**{name: True}))
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", trainer)
        with pytest.raises(NotImplementedError, match=f"{name} must be False with RingCoreAttention, got True"):
            attention(settings())


def test_layers_of_other_attention_are_refused() -> None:
    for name, got in (("attention_type", "cross"), ("cp_comm_type", "a2a"), ("attention_dropout", 0.1)):
        with pytest.raises(NotImplementedError, match=f"{name} must be .* with RingCoreAttention, got '?{got}"):
            attention(settings(), **{name: got})


def test_loss_of_a_rank_is_refused() -> None:
    config = settings(context_parallel_size=2, calculate_per_token_loss=False)
    with pytest.raises(ValueError, match="calculate_per_token_loss must be True .*; pass --calculate-per-token-loss"):
        attention(config)


def test_masks_that_are_not_read_are_refused() -> None:
    layer, x = attention(settings()), torch.ones(4, 1, 4, 8)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    for error, message, changes in (
        (ValueError, r"attention_mask must be None, got \(1, 1, 4, 4\), .* --no-create", {"attention_mask": mask}),
        (NotImplementedError, "attention_bias must be None", {"attention_bias": mask}),
        (NotImplementedError, "must be causal or no_mask, got padding", {"attn_mask_type": AttnMaskType.padding}),
        (NotImplementedError, "'thd' .* got 'sbhd'", {"packed_seq_params": replace(packed, qkv_format="sbhd")}),
        (NotImplementedError, "a local_cp_size of 1", {"packed_seq_params": replace(packed, local_cp_size=1)}),
        (
            NotImplementedError,
            "packed documents must be causal, got no_mask",
            {"packed_seq_params": packed, "attn_mask_type": AttnMaskType.no_mask},
        ),
    ):
        with pytest.raises(error, match=message):
            layer(x, x, x, **changes)


def test_inference_on_a_ring_is_refused() -> None:
    if not hasattr(inference, "InferenceMode"):
        pytest.skip("this release has no sign of inference")
    layer, x = attention(settings()), torch.ones(4, 1, 4, 8)
    with inference.InferenceMode.active():
        layer(x, x, x)
        layer.group = ProcessGroup(0, 2)
        with pytest.raises(NotImplementedError, match="must be 1 for inference, .* got 2; generate"):
            layer(x, x, x)


def test_one_process_attends_as_ring_attention() -> None:
    """Full attention, and padding at the end of each document, which the padded bounds have."""
    q, k, v = torch.randn(3, 6, 1, 4, 8, dtype=torch.float64)
    across = [x.transpose(0, 1) for x in (q, k, v)]
    layer = attention(settings())
    want = ringflash.ring_attention(*across, group=None, causal=False, layout="contiguous")
    assert torch.equal(layer(q, k, v, attn_mask_type=AttnMaskType.no_mask), want.transpose(0, 1).flatten(2))
    bounds, padded = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 3], [0, 2, 6]))
    want = ringflash.ring_attention(*across, group=None, cu_seqlens=padded, layout="contiguous")
    packed = PackedSeqParams("thd", bounds, bounds, padded, padded)
    assert torch.equal(layer(q[:, 0], k[:, 0], v[:, 0], packed_seq_params=packed), want[0].flatten(1))


def test_bounds_are_read_once_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are refilled in place. Documents may be empty."""
    read, x = [], torch.ones(4, 4, 8)
    monkeypatch.setattr(core_attention, "ring_attention", lambda q, *_, cu_seqlens, **__: read.append(cu_seqlens) or q)
    bounds = torch.tensor([0, 2, 4, 4], dtype=torch.int32)
    for layer in (attention(settings()), attention(settings())):
        layer(x, x, x, packed_seq_params=PackedSeqParams("thd", bounds, bounds))
    bounds[1] = 3
    layer(x, x, x, packed_seq_params=PackedSeqParams("thd", bounds, bounds))
    assert read[0] is read[1] and [b.tolist() for b in read[1:]] == [[0, 2, 4], [0, 3, 4]]


def test_with_ring_replaces_every_core_attention() -> None:
    own = get_gpt_decoder_block_spec(settings(), use_transformer_engine=False, normalization="RMSNorm", pp_rank=0)
    block = with_ring(own)
    assert block.layer_norm is own.layer_norm and len(block.layer_specs) == 2
    for spec in (*block.layer_specs, with_ring(get_gpt_layer_local_spec())):
        assert spec.submodules.self_attention.submodules.core_attention is RingCoreAttention


def test_with_ring_refuses_other_attention() -> None:
    other = with_ring(with_ring(get_gpt_layer_local_spec())).submodules.self_attention.submodules.core_attention
    with pytest.raises(NotImplementedError, match=r"core_attention must be one of \['DotProductAttention'.*RingCore"):
        other(settings(), layer_number=1)
    with pytest.raises(ValueError, match="spec must have a core_attention, got none in"):
        with_ring(ModuleSpec(module=IdentityOp))


def test_layers_of_other_implementations_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="transformer_impl must be .* got 'inference_optimized'; pass"):
        config = settings()
        config.transformer_impl = "inference_optimized"
        RingLayer(config, 1, None)
    for name in ("use_transformer_engine_op_fuser", "use_grouped_gemm_for_dense_mlp"):
        config = settings()
        setattr(config, name, True)
        with pytest.raises(NotImplementedError, match=f"{name} must be False with layer_spec .* without experts, got"):
            RingLayer(config, 1, None)
