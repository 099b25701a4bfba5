"""Train small GPT models of Megatron-core over gloo: its DDP, schedule, finalization of gradients and optimizer.

    torchrun --nproc-per-node 2 -m tests.megatron.worker FOLDER CASE...

Each rank writes FOLDER/CASE.rank: losses, gradients of the first step, and parameters after the last. Megatron asks for
CUDA by name, so that this file first replaces what it asks.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
for name, value in {
    "current_device": lambda: CPU, "current_stream": lambda *_: None, "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 0, "set_device": lambda *_: None, "synchronize": lambda *_: None,
    "FloatTensor": torch.FloatTensor, "IntTensor": torch.IntTensor, "LongTensor": torch.LongTensor,
}.items():  # fmt: skip
    setattr(torch.cuda, name, value)
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


OnCpu().__enter__()

from megatron.core import parallel_state, tensor_parallel, utils  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import random as tensor_parallel_random  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.spec_utils import import_module  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

import ringflash  # noqa: E402
from ringflash.megatron import core_attention, with_ring  # noqa: E402

STEPS, MICROBATCHES, SEQLEN, VOCAB = 3, 2, 128, 256
DOCUMENTS = (0, 32, 48, SEQLEN)
DENSE = {"num_query_groups": 4}
EXPERTS = {
    "num_moe_experts": 4, "moe_layer_freq": [0, 1, 1], "moe_router_load_balancing_type": "none", "qk_layernorm": True,
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16, "kv_channels": 16, "rope_type": "rope",
}  # fmt: skip


class Case(NamedTuple):
    """A model and how it is trained.

    Args:
        settings: of Megatron's configuration.
        tp: ranks that share the weights of a layer.
        pp: stages of the pipeline; the ranks of a stage that do not share weights share the sequence.
        ring: with ringflash; without, Megatron's own attention on one shard of the sequence.
        packed: documents in a row.
        wrong: attend to a rank's own tokens only.
        hybrid: Megatron's HybridModel, with this pattern of layers.
    """

    settings: dict[str, Any]
    tp: int = 1
    pp: int = 1
    ring: bool = True
    packed: bool = False
    wrong: bool = False
    hybrid: str = ""


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ENGINE = {**DENSE, "transformer_impl": "transformer_engine"}
WINDOW = {**DENSE, "window_size": (20, 0), "window_attn_skip_freq": 2}
CASES = {
    "dense": Case(DENSE),
    "window": Case(WINDOW),
    "packed": Case(DENSE, packed=True),
    "packed window": Case({**DENSE, "window_size": (20, 0)}, packed=True),
    "latent": Case(LATENT),
    "packed latent": Case(LATENT, packed=True),
    "experts": Case({**DENSE, **EXPERTS}),
    "engine": Case(ENGINE),
    "engine hybrid": Case(ENGINE, hybrid="*-*-"),
    "recomputed": Case({**DENSE, **RECOMPUTED}, packed=True),
    "recomputed layers": Case({**DENSE, **LAYERS}, packed=True),
    "tensor parallel": Case(DENSE, tp=2),
    "sequence parallel": Case({**DENSE, "sequence_parallel": True}, tp=2),
    "pipeline": Case({**DENSE, **EXPERTS, "num_layers": 4, "moe_layer_freq": [0, 1, 1, 0]}, pp=2),
}


class NoTracker(SimpleNamespace):
    """Megatron's generators of random numbers of CUDA, of which a CPU has none."""

    fork = staticmethod(lambda *_, **__: nullcontext())
    is_initialized = staticmethod(lambda: False)
    add = staticmethod(lambda *_: None)


tensor_parallel_random.get_cuda_rng_tracker = tensor_parallel.get_cuda_rng_tracker = lambda *_, **__: NoTracker()
tensor_parallel_random._get_all_rng_states = lambda: (torch.get_rng_state(), None, None)
tensor_parallel_random._set_all_rng_states = lambda state, *_: torch.set_rng_state(state)


own_attention = DotProductAttention.__init__


def sized_by_tensors(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
    """Megatron's own attention refuses the sizes of latent attention, which it can compute if kv_channels is v's."""
    own_attention(self, *args, **options)


DotProductAttention.__init__ = sized_by_tensors  # type: ignore[method-assign]
own_norm = WrappedTorchNorm.__new__


def norm_of_shards(cls: type, config: TransformerConfig, *args: Any, **options: Any) -> torch.nn.Module:
    """Make torch's norms, which Megatron refuses with sequence parallelism, and mark them for it to sum gradients."""
    with mock.patch.object(config, "sequence_parallel", False):
        norm = own_norm(cls, config, *args, **options)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


WrappedTorchNorm.__new__ = norm_of_shards  # type: ignore[method-assign]


def train(case: Case) -> dict[str, Any]:
    """Return losses, gradients of the first step and final parameters."""
    cp = dist.get_world_size() // case.tp // case.pp
    parallel_state.initialize_model_parallel(case.tp, case.pp, context_parallel_size=cp)
    torch.manual_seed(0)
    config = configuration(case, cp)
    model = build(case, config)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=False), model)
    settings = OptimizerConfig(optimizer="sgd", lr=0.5, clip_grad=1.0, sgd_momentum=0.0, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(settings, [model])
    config.finalize_model_grads_func = finalize_model_grads
    result: dict[str, Any] = {"losses": []}
    stream = batches()
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=partial(forward, case), data_iterator=stream, model=[model],
            num_microbatches=MICROBATCHES, seq_length=SEQLEN, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        if step == 0:
            result["gradients"] = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
        optimizer.step()
        if reports:  # on the last stage
            total = torch.stack([report["lm loss"] for report in reports]).sum(0)
            dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
            result["losses"].append(total[0] / total[1])
    result["parameters"] = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    parallel_state.destroy_model_parallel()
    return result


def build(case: Case, config: TransformerConfig) -> torch.nn.Module:
    options = {
        "vocab_size": VOCAB, "max_sequence_length": SEQLEN, "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False, "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }  # fmt: skip
    if case.hybrid:
        # Of later releases than the oldest that is tested.
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        spec = with_ring(hybrid_stack_spec) if case.ring else hybrid_stack_spec
        return HybridModel(config, spec, hybrid_layer_pattern=case.hybrid, **options)
    if case.ring:
        spec = import_module(("ringflash.megatron", "layer_spec"))  # as --spec does
    else:
        by_engine = config.transformer_impl == "transformer_engine"
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=by_engine, normalization="RMSNorm")
    return GPTModel(config, spec, **options)


def configuration(case: Case, cp: int) -> TransformerConfig:
    """Return Megatron's configuration of a case. Its own attention would take a window in place of the documents."""
    own = {"window_size": None} if case.packed and not case.ring else {}
    make = MLATransformerConfig if case.settings.get("multi_latent_attention") else TransformerConfig
    return make(
        hidden_size=64, num_attention_heads=8, ffn_hidden_size=128, use_cpu_initialization=True,
        context_parallel_size=cp, tensor_model_parallel_size=case.tp, pipeline_model_parallel_size=case.pp,
        pipeline_dtype=torch.float32, calculate_per_token_loss=True, attention_dropout=0.0, hidden_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False,
        **{"num_layers": len(case.hybrid) or 3, "transformer_impl": "local", **case.settings, **own},
    )  # fmt: skip


def batches() -> Iterator[dict[str, Any]]:
    """Yield microbatches of the whole sequence, the same on every rank; a fifth of the labels do not count.

    Of every second one, those of the first 16 tokens alone count: ranks differ in labels, and most have none.
    """
    generator = torch.Generator().manual_seed(1)
    for counted in itertools.cycle((SEQLEN, 16)):
        ids = torch.randint(0, VOCAB, (2, SEQLEN + 1), generator=generator)
        yield {
            "tokens": ids[:, :-1].contiguous(),
            "labels": ids[:, 1:].contiguous(),
            "loss_mask": (torch.rand(2, SEQLEN, generator=generator) > 0.2) * (torch.arange(SEQLEN) < counted).float(),
            "position_ids": torch.arange(SEQLEN).expand(2, -1).contiguous(),
            "cu_seqlens": None,
        }


def forward(case: Case, stream: Iterator[dict[str, Any]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run a microbatch, as Megatron-LM's pretrain_gpt.py does."""
    batch, group = next(stream), parallel_state.get_context_parallel_group()
    mask = packed = None
    if case.packed:
        bounds = torch.tensor(DOCUMENTS, dtype=torch.int32)
        mine = ringflash.local_positions(SEQLEN, group.size(), group.rank(), "documents", bounds)
        batch = {name: x[:1, mine] for name, x in batch.items() if x is not None}
        longest = int(bounds.diff().max())
        packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)
    else:
        options = {"is_hybrid_cp": False, "cp_group": group}
        known = inspect.signature(utils.get_batch_on_this_cp_rank).parameters
        batch = utils.get_batch_on_this_cp_rank(batch, **{k: x for k, x in options.items() if k in known})
    if not case.ring:
        mask, packed = hidden(case), None
    losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"], packed_seq_params=packed)
    return losses, partial(sum_of_losses, batch["loss_mask"])


def hidden(case: Case) -> torch.Tensor:
    """Return the mask of Megatron's own attention: True for keys that a query does not see."""
    i = torch.arange(SEQLEN)
    masked = i[:, None] < i
    if case.packed:
        document = torch.searchsorted(torch.tensor(DOCUMENTS[1:]), i, right=True)
        left, _ = case.settings.get("window_size", (SEQLEN, 0))
        masked = masked | (document[:, None] != document) | (i[:, None] - i > left)
    return masked[None, None]


def sum_of_losses(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    total, count = (losses.view(-1) * mask.view(-1)).sum(), mask.sum().clone().detach()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count])}


def alone(*args: Any, **options: Any) -> torch.Tensor:
    return ringflash.ring_attention(*args, **{**options, "group": None, "layout": "contiguous"})


def main() -> None:
    folder, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    for name in names:
        case = CASES[name.removesuffix(" wrong").removesuffix(" alone")]
        case = case._replace(ring=not name.endswith(" alone"), wrong=name.endswith(" wrong"))
        with mock.patch.object(core_attention, "ring_attention", alone) if case.wrong else nullcontext():
            torch.save(train(case), Path(folder, f"{name}.{dist.get_rank()}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
