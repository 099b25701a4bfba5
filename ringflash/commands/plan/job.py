"""Training job to plan, and the machine that it runs on, with assumed rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ringflash.commands.plan.model_shape import ModelShape
from ringflash.commands.plan.trace import Layers
from ringflash.huggingface import flops
from ringflash.memory import Memory

GIB = 1 << 30
BF16, FP32 = 2, 4  # bytes of one number

Precision = Literal["bf16-mixed", "bf16-true"]
Float8 = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]


@dataclass(frozen=True)
class Gpu:
    """Data-sheet figures of a GPU.

    Args:
        memory_bytes: memory that a process can allocate, as the driver reports it.
        peak_tflops: dense bf16, without sparsity.
        memory_gbytes: GB/s of the GPU's memory.
        nvlink_gbytes: GB/s between two GPUs of a host, in one direction.
    """

    name: str
    memory_bytes: int
    peak_tflops: float
    memory_gbytes: float
    nvlink_gbytes: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", int(139.8 * GIB), 989, 4800, 450),
        Gpu("H100", int(79.1 * GIB), 989, 3350, 450),
        Gpu("A100-80GB", int(79.1 * GIB), 312, 2039, 300),
    )
}


@dataclass(frozen=True)
class Rates:
    """Assumed rates and fixed costs. A plan prints all of them, and each can be set; docs/plan.md has their sources.

    Args:
        products: fraction of the bf16 peak in matmuls of the layers and the head.
        float8_products: fraction of the bf16 peak in matmuls of layers with `float8`, including casts of operands.
        passes: fraction of the memory bandwidth in operators between the matmuls.
        expert_passes: as `passes`, for models with experts, whose operators gather and scatter rows.
        attention_forward: fraction of the bf16 peak in attention's forward, on visible work.
        attention_backward: fraction of the bf16 peak in attention's backward, on visible work.
        fp8_attention_forward: as `attention_forward`, in FP8.
        fp8_attention_backward: as `attention_backward`, with impl="hopper_fp8_all".
        fp8_scores_backward: as `attention_backward`, with impl="hopper_fp8_scores".
        fp8_bf16_backward: as `attention_backward`, with impl="hopper_fp8": in bf16 after a forward in FP8.
        copies: fraction of NVLink's GB/s for the copy engine inside a host.
        nvlink: fraction of NVLink's GB/s for NCCL inside a host.
        network_gbytes: GB/s that NCCL reaches over the NIC of one GPU, in one direction.
        host_gbytes: GB/s between a GPU and its host's memory, in one direction.
        optimizer: fraction of the memory bandwidth for the bytes that AdamW must read and write; it moves more.
        host_seconds: seconds in which the host launches one layer, forward and backward; limits short steps.
        reserved_bytes: bytes of the CUDA context, NCCL, and workspaces of libraries.
        fragmentation: fraction of the allocated memory that is lost between blocks (with expandable segments).
    """

    products: float = 0.68
    float8_products: float = 0.95
    passes: float = 0.55
    expert_passes: float = 0.32
    attention_forward: float = 0.64
    attention_backward: float = 0.59
    fp8_attention_forward: float = 1.02
    fp8_attention_backward: float = 0.80
    fp8_scores_backward: float = 0.68
    fp8_bf16_backward: float = 0.61
    copies: float = 0.8
    nvlink: float = 0.6
    network_gbytes: float = 30.0
    host_gbytes: float = 50.0
    optimizer: float = 0.23
    host_seconds: float = 0.033
    reserved_bytes: int = int(3.0 * GIB)
    fragmentation: float = 0.03

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name not in ("reserved_bytes", "fragmentation")):
                raise ValueError(f"rate {name} must be positive, got {value}; leave it out for its default.")


@dataclass(frozen=True)
class Machine:
    """GPUs on hosts; the last host may be partly used."""

    gpu: Gpu
    num_gpus: int
    gpus_per_host: int = 8
    rates: Rates = Rates()

    def __post_init__(self) -> None:
        for name in ("num_gpus", "gpus_per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}; count GPUs from 1.")


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Memory):
    """One optimizer step with a sequence on every data rank, and the choice of the activations that it keeps.

    Args:
        seqlen: number of tokens of a whole sequence.
        cp_size: number of ranks that share a sequence.
        dp_size: number of sequences that are processed in parallel.
        visible_fraction: fraction of the causal pairs that are visible; below 1 for windows and packed documents.
        precision: bf16-mixed keeps weights, gradients and AdamW's two moments in fp32; bf16-true in bf16.
        accumulates: True if a step processes several sequences in turn, so that it keeps gradients of earlier ones.
        impl: as in `ring_attention`; all exact kernels are planned at the same rates.
        float8: torchao's recipe for linear layers in FP8; None for bf16.
    """

    model: ModelShape
    seqlen: int
    cp_size: int
    dp_size: int = 1
    visible_fraction: float = 1.0
    precision: Precision = "bf16-mixed"
    accumulates: bool = False
    impl: str = "auto"
    float8: Float8 | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"precision must be one of {get_args(Precision)} for a plan, got {self.precision!r}; add "
                "--trainer.precision bf16-mixed."
            )
        if self.float8 not in (None, *get_args(Float8)):
            raise ValueError(
                f"float8 must be one of {get_args(Float8)}, got {self.float8!r}; leave it out for products in bf16."
            )
        if self.liger and self.model.liger is None:
            raise NotImplementedError(
                f"liger must be false for a plan of {self.model.family}, got true; what its kernels keep there "
                "is not counted."
            )
        for name, least in (("seqlen", 1), ("cp_size", 1), ("dp_size", 1), ("mlp_tile_tokens", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of {least} or more, got {value!r}; correct it.")
        if self.mlp_tile_tokens and not self.model.tiled_parameters:
            raise NotImplementedError(
                f"mlp_tile_tokens must be 0 for {self.model.family}, got {self.mlp_tile_tokens}; MLPs of gate_proj, "
                "up_proj and down_proj are tiled, and experts that transformers stacks."
            )
        if not 0 < self.visible_fraction <= 1:
            raise ValueError(
                f"visible_fraction must be above 0 and at most 1, got {self.visible_fraction}; 1 is a causal sequence."
            )
        if self.seqlen % (step := 2 * self.cp_size):
            raise ValueError(
                f"seqlen must be divisible by 2 * cp_size ({step}), got {self.seqlen}; "
                f"pad to {-(-self.seqlen // step) * step}."
            )

    @property
    def layers(self) -> Layers:
        """Bytes that the layers keep and move, with Liger or without."""
        return self.model.liger if self.liger and self.model.liger else self.model.plain

    @property
    def world_size(self) -> int:
        """Number of ranks, over which parameters are sharded."""
        return self.cp_size * self.dp_size

    @property
    def local_tokens(self) -> int:
        """Number of tokens of one rank."""
        return self.seqlen // self.cp_size

    @property
    def tile_tokens(self) -> int:
        """Number of tokens of a tile; 0 without tiles, as in checkpointed layers whose tile would hold all tokens."""
        whole = self.checkpointing != "none" and self.mlp_tile_tokens >= self.local_tokens
        return 0 if whole else self.mlp_tile_tokens

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight, of its gradient, and of each moment of AdamW."""
        return FP32 if self.precision == "bf16-mixed" else BF16

    @property
    def visible_pairs(self) -> float:
        """Number of visible (query, key) pairs of a whole sequence."""
        return self.visible_fraction * flops.visible_pairs(self.seqlen)
