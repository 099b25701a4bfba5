"""Jobs and machines for tests of `ringflash plan`."""

from dataclasses import replace
from typing import Any

from ringflash.commands.plan.job import GPUS, Machine, TrainingJob
from ringflash.commands.plan.ring import Ring, ring_of
from tests.helpers.plans import model_of

SMALL = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LLAMA4 = {
    **EXPERTS, "num_experts_per_tok": 1, "attention_chunk_size": 40, "no_rope_layers": [1, 0],
    "intermediate_size_mlp": 96,
}  # fmt: skip
HOST, TWO_HOSTS = Machine(GPUS["H200"], 8), Machine(GPUS["H200"], 16)
JOB = TrainingJob(
    model=model_of(QWEN3_8B)[0], seqlen=1 << 20, cp_size=8, checkpointing="attention_kept", mlp_tile_tokens=8192
)


def small(family: str, **options: Any) -> dict[str, Any]:
    """Keywords of a small model."""
    return {"model_type": family, **SMALL, **options}


def flat(job: TrainingJob, on_network: float = 1.0) -> Ring:
    """Return a ring without an exchange of heads."""
    return replace(ring_of(job, replace(HOST, num_gpus=job.cp_size, gpus_per_host=job.cp_size)), on_network=on_network)
