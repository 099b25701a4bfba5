"""Steps of a GPT of Megatron-core: ringflash over all GPUs, ringflash on each, and Megatron's own local attention.

    torchrun --nproc-per-node 2 benchmarks/bench_megatron.py --lengths 4096,32768 --json results.json

A step is forward, backward and the reduction of gradients, by Megatron's own schedule and DistributedDataParallel. Its
local attention keeps a score for each pair of tokens and cannot shard a sequence, so it runs up to --own tokens, on
one GPU; every GPU then runs the same sequence. With --engine, the same layers also run with the attention of
Transformer Engine as their core attention, on one GPU and by its own context parallelism; with --impl
transformer_engine, its linear layers and norms are used in every way. Each way has the same weights and data. Losses
and gradients are compared with the first way of their length: `error` is the largest relative error of a gradient in
norm. Each length is also run packed, with documents in the format "thd". Seconds are the median over steps of the
slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from megatron.core import parallel_state, tensor_parallel, utils  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import ringflash  # noqa: E402
from benchmarks.environment import describe, result_text  # noqa: E402
from ringflash.megatron import layer_spec  # noqa: E402

VOCAB = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,32768,131072")
    parser.add_argument("--own", type=int, default=4096, help="most tokens of Megatron's own attention")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048, help="a head has 128; four heads share K and V")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", action="store_true", help="also by the attention of Transformer Engine")
    parser.add_argument("--impl", default="local", choices=["local", "transformer_engine"], help="of all other layers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    torch.cuda.set_device(dist.get_rank() % max(1, torch.cuda.device_count()))
    packages = ["megatron-core", "transformer-engine"] if options.engine else ["megatron-core"]
    header = {**describe(*packages), "model": {**vars(options), "json": None}}
    rows = []
    for length in map(int, options.lengths.split(",")):
        for packed in (False, True):
            ways = ["own"] if length <= options.own and not packed and options.impl == "local" else []
            engine = ["engine one", "engine ring"] if options.engine else []
            first: dict[str, Any] | None = None
            for way in (*ways, "one", "ring", *engine):
                got = run(options, length, way, packed)
                first = first or got
                row = {"tokens": length, "packed": packed, "way": way, **compared(got, first)}
                rows.append(row)
                if dist.get_rank() == 0:
                    print(json.dumps(row), flush=True)
                    if options.json:
                        options.json.write_text(result_text({**header, "rows": rows}))
    dist.destroy_process_group()


def run(options: argparse.Namespace, length: int, way: str, packed: bool) -> dict[str, Any]:
    """Return seconds, memory, loss and gradients of a step."""
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size() if "ring" in way else 1)
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    model = build(options, length, way)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.steps + 1):  # the first compiles
        model.zero_grad_buffer()
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        (report,) = forward_backward_no_pipelining(
            forward_step_func=partial(forward, way=way), data_iterator=batches(length, packed), model=[model],
            num_microbatches=1, seq_length=length, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    took = torch.tensor(seconds[1:], device="cuda")
    dist.all_reduce(took, dist.ReduceOp.MAX)
    total = report["lm loss"]
    dist.all_reduce(total)
    found = {
        "seconds": statistics.median(took.tolist()),
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "loss": (total[0] / total[1]).item(),
        "gradients": {name: p.main_grad.float().cpu() for name, p in model.module.named_parameters()},
    }
    del model
    ringflash.release_buffers()
    torch.cuda.empty_cache()
    parallel_state.destroy_model_parallel()
    return found


def build(options: argparse.Namespace, length: int, way: str) -> DistributedDataParallel:
    heads, dtype = options.hidden // 128, getattr(torch, options.dtype)
    config = TransformerConfig(
        num_layers=options.layers, hidden_size=options.hidden, num_attention_heads=heads,
        num_query_groups=max(1, heads // 4), ffn_hidden_size=3 * options.hidden, transformer_impl=options.impl,
        context_parallel_size=parallel_state.get_context_parallel_world_size(), calculate_per_token_loss=True,
        attention_dropout=0.0, hidden_dropout=0.0, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        apply_rope_fusion=False, bf16=dtype is torch.bfloat16, params_dtype=dtype, pipeline_dtype=dtype,
    )  # fmt: skip
    model = GPTModel(
        config, spec_of(way, options.impl), vocab_size=VOCAB, max_sequence_length=length, position_embedding_type="rope"
    )
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model.cuda())


def spec_of(way: str, impl: str) -> Any:
    """Return the spec of a layer. "own" and "engine" differ from ringflash's in the core attention only."""
    if way in ("one", "ring"):
        return layer_spec
    if impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec()
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if way != "own":
        # Only with --engine is it installed.
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        spec.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    return spec


def batches(length: int, packed: bool) -> Iterator[dict[str, Any]]:
    """Yield the whole sequence, the same on every rank, and the bounds of its documents."""
    ids = torch.randint(0, VOCAB, (1, length + 1), generator=torch.Generator().manual_seed(1)).cuda()
    unit = length // 32
    yield {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "loss_mask": torch.ones(1, length, device="cuda"),
        "position_ids": torch.arange(length, device="cuda")[None],
        "cu_seqlens": [0, unit, 3 * unit, 11 * unit, length] if packed else None,
    }


def forward(stream: Iterator[dict[str, Any]], model: Any, *, way: str) -> tuple[torch.Tensor, Any]:
    """Run a microbatch, as Megatron-LM's pretrain_gpt.py does."""
    batch, group = next(stream), parallel_state.get_context_parallel_group()
    mask = documents = None
    if batch["cu_seqlens"] is not None:
        bounds = torch.tensor(batch.pop("cu_seqlens"), dtype=torch.int32)
        length, longest = int(bounds[-1]), int(bounds.diff().max())
        mine = ringflash.local_positions(length, group.size(), group.rank(), "documents", bounds).cuda()
        batch = {name: x[:, mine] for name, x in batch.items()}
        documents = PackedSeqParams("thd", bounds.cuda(), bounds.cuda(), max_seqlen_q=longest, max_seqlen_kv=longest)
    else:
        batch = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    if way == "own":
        length = batch["tokens"].shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)[None, None]
    losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"], packed_seq_params=documents)
    return losses, partial(sum_of_losses, batch["loss_mask"])


def sum_of_losses(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return the sum, the number of tokens and the report, as --calculate-per-token-loss asks."""
    total, count = (losses.float().view(-1) * mask.view(-1)).sum(), mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach(), count])}


def compared(got: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a step, with the largest relative error of a gradient against the first step."""
    errors = {name: float((got["gradients"][name] - x).norm() / x.norm()) for name, x in first["gradients"].items()}
    worst = max(errors, key=errors.__getitem__)
    return {name: x for name, x in got.items() if name != "gradients"} | {"error": errors[worst], "tensor": worst}


if __name__ == "__main__":
    main()
