"""Peak figures of GPUs and links, and the rates that are reached: all assumptions of a plan."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """Figures of a data sheet.

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
    """Fractions of the peaks that are reached, and fixed costs. A plan prints all of them; each can be set.

    Args:
        products: fraction of the peak FLOP/s in matmuls of the layers and the head.
        passes: fraction of the memory's GB/s in operators between the matmuls.
        attention_forward, attention_backward: fraction of the peak FLOP/s in attention kernels, on visible work.
        fp8_attention_forward, fp8_attention_backward, fp8_scores_backward, fp8_bf16_backward: as these, of the bf16
            peak, with FP8's forward and the backward "fp8", "fp8_scores" or "bf16".
        copies: fraction of the links' GB/s for the copy engine inside a host.
        nvlink: fraction of the links' GB/s for NCCL inside a host.
        network: fraction of a NIC's GB/s for NCCL between hosts.
        optimizer: fraction of the memory's GB/s for the bytes that AdamW must read and write; it moves more.
        host_seconds: time of the host to launch one layer, forward and backward: a lower limit for short steps.
        reserved_bytes: CUDA context, NCCL, and workspaces of libraries.
        fragmentation: fraction of the allocated memory that is lost between blocks (with expandable segments).
    Source: attention: benchmarks/results/kernels_h200.json (head_dim 128, 8k to 128k tokens); in FP8
        these times the quotients of fp8_steps_1xh200.json, fp8_bf16_backward not measured. products and passes: the
        steps in docs/plan.md; optimizer: its share of them. copies and nvlink: two H200s (366 and 266 of 450 GB/s).
        host_seconds: steps of 16,384 tokens on 4 H200s, 36 checkpointed layers under Lightning and FSDP2. The others
        are not measured yet.
    """

    products: float = 0.68
    passes: float = 0.32
    attention_forward: float = 0.64
    attention_backward: float = 0.59
    fp8_attention_forward: float = 0.88
    fp8_attention_backward: float = 0.69
    fp8_scores_backward: float = 0.64
    fp8_bf16_backward: float = 0.56
    copies: float = 0.8
    nvlink: float = 0.6
    network: float = 0.6
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
    """GPUs and the links between them.

    Args:
        network_gbytes: GB/s of one GPU's NIC, in one direction.
        host_gbytes: GB/s between a GPU and its host's memory, in one direction.
        host_memory_bytes: memory of one host; None if unknown.
    """

    gpu: Gpu
    num_gpus: int
    gpus_per_host: int = 8
    network_gbytes: float = 50.0
    host_gbytes: float = 50.0
    rates: Rates = Rates()
    host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_gpus", "gpus_per_host", "network_gbytes", "host_gbytes"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} must be positive, got {getattr(self, name)}; count GPUs, and GB/s, from above 0."
                )

    def keeps_on_a_host(self, cp_size: int) -> bool:
        """Return True if every ring of `cp_size` consecutive ranks stays on one host."""
        return self.num_gpus <= self.gpus_per_host or self.gpus_per_host % cp_size == 0

    @property
    def num_hosts(self) -> int:
        """Number of hosts; one of them may be partly used."""
        return -(-self.num_gpus // self.gpus_per_host)
