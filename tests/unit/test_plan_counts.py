"""Counts of ringflash plan, by hand, and its reading of models, against real ones. One process, no GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ringflash import huggingface
from ringflash.commands.plan.job import GPUS, TrainingJob
from ringflash.commands.plan.memory import (
    activation_bytes,
    attention_work_bytes,
    checkpoint_bytes,
    host_bytes,
    layer_bytes,
    worst_moment,
)
from ringflash.commands.plan.ring import ring_of
from ringflash.commands.plan.timing import step_time
from ringflash.commands.plan.trace import TrafficCounter
from ringflash.huggingface.flops import layer_windows, matmul_sizes
from ringflash.memory import Memory
from tests.helpers.jobs import EXPERTS, HOST, JOB, LLAMA4, SMALL, flat, small
from tests.helpers.plans import model_of
from tests.helpers.recipe_model import build_model

LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 8, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "head_dim": 8,
}  # fmt: skip
READ: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
    ("mistral", {"sliding_window": 9}),
    ("mixtral", EXPERTS),
    ("qwen3_moe", EXPERTS),
    ("gpt_oss", {**EXPERTS, "rope_parameters": None, "sliding_window": 32}),
    ("granitemoe", EXPERTS),
    ("deepseek_v3", {**EXPERTS, **LATENT}),
    ("gemma3_text", {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    ("llama4_text", LLAMA4),
    ("phi3", {"pad_token_id": 0, "sliding_window": 32}),
    ("glm4", {"pad_token_id": 0}),
    ("cohere2", {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    ("starcoder2", {"use_bias": True}),
    ("olmo2", {"tie_word_embeddings": True}),
]  # fmt: skip


def test_bytes_between_products_are_of_operators() -> None:
    """Counted by hand: bf16, 5 tokens of width 8."""
    x, w = (torch.empty(n, 8, dtype=torch.bfloat16, device="meta") for n in (5, 8))
    scale, rows = (torch.empty(8, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.long))
    for compute, num_bytes in (
        (lambda: x @ w, 0),  # a product
        (lambda: x.t().view(8, 5).unsqueeze(0).detach(), 0),  # views
        (lambda: torch.empty_like(x), 0),
        (lambda: x + x, 2 * 80),  # read once, written once
        (lambda: x * scale, 2 * 80 + 16),
        (lambda: x * scale.expand(5, 8), 2 * 80 + 16),  # of what is expanded, what is there
        (lambda: x.float(), 80 + 160),
        (lambda: x.add_(1), 2 * 80),  # in place
        (lambda: torch.zeros_like(x), 80),
        (lambda: torch.cat([x, x]), 80 + 160),
        (lambda: torch.nn.functional.embedding(rows, w), 0),
    ):
        with TrafficCounter() as passes:
            compute()
        assert passes.num_bytes == num_bytes


def test_what_is_computed_again_takes_time_again() -> None:
    """Layers with checkpoints; tiles by themselves, and their sums once a tile."""
    job = TrainingJob(model=model_of(small("qwen3_moe", **EXPERTS))[0], seqlen=1 << 20, cp_size=8)
    tiles, layers, passed = 1 << 17 >> 13, job.model.num_layers, job.layers
    whole, checkpointed, in_tiles, both = (
        step_time(replace(job, checkpointing=checkpointing, mlp_tile_tokens=tile), HOST).parts["between products"]
        for tile in (0, 1 << 13)
        for checkpointing in ("none", "attention_kept")
    )  # fmt: skip
    per_byte = 1 / (GPUS["H200"].memory_gbytes * 1e9 * HOST.rates.expert_passes)
    assert checkpointed - whole == pytest.approx(layers * job.local_tokens * passed.forward * per_byte)
    assert both - checkpointed == pytest.approx(layers * tiles * job.model.tiled_parameters * 10 * per_byte, rel=1e-6)
    assert in_tiles - whole == pytest.approx(both - checkpointed + layers * job.local_tokens * passed.mlp * per_byte)
    assert 0 < passed.mlp < passed.forward < passed.backward
    times = [step_time(replace(job, mlp_tile_tokens=tile), HOST).parts for tile in (0, 1 << 13)]
    routed = 2 * 2 * 3 * 64 * 48 / job.model.matmul_parameters  # in two layers two experts of three matrices
    assert times[0]["linear again"] == 0
    assert times[1]["linear again"] == pytest.approx(routed * times[1]["linear"] / 3, rel=0.02)


def test_what_is_there_at_each_moment() -> None:
    """AdamW makes a tensor as large as the weights; gradients of earlier sequences exist with the backward's."""
    weights = JOB.model.parameters * 4 // 8
    name, parts = worst_moment(replace(JOB, seqlen=1 << 12, cp_size=2), HOST)
    assert name == "the optimizer's step" and sum(parts[x] for x in list(parts)[:3]) == 20 * weights
    name, parts = worst_moment(JOB, HOST)
    assert name == "the last layer's backward" and parts["gradients"] == JOB.model.embedding_parameters * 2
    assert worst_moment(replace(JOB, accumulates=True), HOST)[1]["gradients"] - parts["gradients"] == weights
    alone = replace(JOB, cp_size=1, accumulates=True)
    assert worst_moment(alone, HOST)[1]["gradients"] == 8 * weights


def test_dq_is_summed_for_two_sections() -> None:
    """Sums of 8 query heads in place of 32 at a head a section; of all where a section has all heads."""
    long = replace(JOB, seqlen=1 << 23)
    rest = 4 * long.model.q_size + 4 * long.model.kv_size
    for job, heads in ((long, 8), (replace(JOB, seqlen=1 << 12), 32), (replace(long, cp_size=1), 32)):
        assert attention_work_bytes(flat(job, 0.0)) == job.local_tokens * (heads * 128 * 4 + rest)


def test_tile_of_all_tokens_is_none_in_checkpoints() -> None:
    def work(tile: int, checkpointing: Any = "attention_kept") -> int:
        job = replace(JOB, mlp_tile_tokens=tile, checkpointing=checkpointing)
        return layer_bytes(job, ring_of(job, HOST))

    assert work(JOB.local_tokens) == work(0) > work(8192)
    assert work(JOB.local_tokens, "none") != work(0, "none")


def test_offloaded_checkpoints_take_powers_of_two() -> None:
    """1.25 times the tokens take twice the host's memory; of 1,048,576 over 8 GPUs a layer takes a GiB on each."""
    job = replace(JOB, offload_checkpoints=True)
    layers = job.model.num_layers
    assert host_bytes(JOB, HOST) == 0
    kept = [host_bytes(replace(job, seqlen=n << 18), HOST) for n in (2, 4, 5, 8)]
    assert kept == [8 * layers * n << 29 for n in (1, 2, 4, 4)]
    assert 2 * host_bytes(job, replace(HOST, gpus_per_host=4)) == host_bytes(job, HOST)


def test_flops_are_counted_by_hand() -> None:
    """FLOPs of one GPU: 6 for each parameter that multiplies a token; 4 * head_dim for each pair a head sees."""
    job = TrainingJob(model=model_of(small("llama"))[0], seqlen=256, cp_size=2)
    products = 6 * (2 * (64 * 128 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + 100 * 64) * 128
    attention = 4 * 8 * 16 * (256 * 257 / 2) / 2 * 2
    time, peak = step_time(job, HOST), HOST.gpu.peak_tflops * 1e12
    assert time.parts["linear"] * peak * HOST.rates.products == pytest.approx(products, rel=1e-3)
    assert time.parts["attention forward"] * peak * HOST.rates.attention_forward == pytest.approx(attention)
    assert time.parts["attention backward"] * peak * HOST.rates.attention_backward == pytest.approx(2.5 * attention)
    assert time.model_flops * time.step == pytest.approx(products + 3 * attention)


def test_recomputing_attention_costs_its_forward() -> None:
    """And saves its output; no part of a step or of the memory is negative."""
    full = replace(JOB, checkpointing="full")
    kept, recomputed = (step_time(x, HOST) for x in (JOB, full))
    assert recomputed.step - kept.step == pytest.approx(kept.parts["attention forward"])
    model = JOB.model
    saved = JOB.local_tokens * (model.num_heads * model.head_dim * 2 + model.num_heads * 4)
    assert checkpoint_bytes(JOB) - checkpoint_bytes(full) == saved
    for job in (JOB, replace(full, offload_checkpoints=True)):
        assert min(*step_time(job, HOST).parts.values(), *worst_moment(job, HOST)[1].values()) >= 0


# What a plan reads off a model.


def saved_bytes(config: dict[str, Any], seqlen: int, mlp_tile_tokens: int = 0) -> int:
    """Bytes that autograd keeps of one bf16 layer's forward on one process.

    Not counted: parameters, and the record of attention, which is in the host's memory.
    """
    memory = Memory(mlp_tile_tokens=mlp_tile_tokens)
    model = build_model({**config, "num_hidden_layers": 1}, None, memory=memory, dtype=torch.bfloat16)
    (layer,) = model.get_submodule("model.model.layers").children()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.int64 or x.numel() > 2:
            kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage())
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    layer.register_forward_pre_hook(lambda *_: hooks.__enter__())
    layer.register_forward_hook(lambda *_: hooks.__exit__())
    model(**huggingface.prepare_batch(torch.randint(0, 100, (1, seqlen)), group=None))
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in parameters)


@pytest.mark.parametrize(("family", "options"), READ, ids=[family for family, _ in READ])
def test_what_is_read_off_a_model_is_right(family: str, options: dict[str, Any]) -> None:
    """Parameters, what multiplies a token, windows; and, compared with a forward with numbers, what its layers keep."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = small(family, **options)
    shape, windows = model_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.matmul_parameters, shape.mean_size) == matmul_sizes(model)
    assert windows == layer_windows(model.config)
    of_one = {name: config[name][:1] for name in ("layer_types", "no_rope_layers") if name in config}
    first, _ = model_of({**config, "num_hidden_layers": 1, **of_one})
    seqlen = 96
    for tile in (0, 40) if first.tiled_parameters else (0,):
        job = TrainingJob(model=first, seqlen=seqlen, cp_size=1, mlp_tile_tokens=tile)
        kept = activation_bytes(job, first.plain.kept)
        rotary = saved_bytes({**config, **of_one}, seqlen, tile) - kept
        assert 0 <= rotary <= seqlen * 2 * shape.head_dim * 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_dense_layers_keep_what_the_page_says(family: str) -> None:
    """The first line of the table in docs/plan.md, and for each norm of a token a number in fp32; with Liger less."""
    model, _ = model_of(small(family))
    h, q, kv, f, heads = model.hidden_size, model.q_size, model.kv_size, SMALL["intermediate_size"], model.num_heads
    normed = heads + model.num_kv_heads if family == "qwen3" else 0
    page = 16 * h + 4 * q + 4 * kv + 8 * f + 4 * heads + (6 * (q + kv) if normed else 0)
    assert model.plain.kept.layer == page + 4 * (2 + normed)
    assert model.liger is not None
    fused = 8 * h + 4 * q + 4 * kv + 6 * f + 4 * heads + (2 * (q + kv) if normed else 0)
    assert model.liger.kept.layer == fused and model.liger.kept.input == 2 * h
