"""What a GPU and its links can do, and what of it is reached: the assumptions of a plan, all in one place."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """Figures of a data sheet.

    Args:
        memory_bytes: what a process can allocate, as the driver reports it.
        peak_tflops: dense bf16, without sparsity.
        memory_gbytes: GB/s of its memory.
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
    """Parts of the peaks that are reached. Every one is printed with a plan, and can be set.

    Args:
        products: of the peak FLOP/s, matrix products of the layers and the head.
        passes: of the memory's GB/s, what is read and written between the products.
        attention_forward, attention_backward: of the peak FLOP/s, the attention kernels on visible work.
        copies: of the links' GB/s, what the copy engine moves inside a host.
        nvlink: of the links' GB/s, NCCL's messages inside a host.
        network: of a NIC's GB/s, NCCL's messages between hosts.
        optimizer: of the memory's GB/s, what a step of AdamW must read and write; it moves more.
        host_seconds: for the host to give out a layer's work, forward and backward: what a short step takes at least.
        reserved_bytes: CUDA context, NCCL, libraries' workspaces.
        fragmentation: of what is allocated, lost between blocks (with expandable segments).
    Source: attention, benchmarks/results/kernels_h200.json (head_dim 128, 8k to 128k tokens); products and passes, the
        steps in docs/plan.md, and optimizer its part of them; copies and nvlink, two H200s (366 and 266 of 450 GB/s);
        host_seconds, steps of 16,384 tokens on 4 H200s, 36 layers checkpointed under Lightning and FSDP2; the others
        are not measured yet.
    """

    products: float = 0.68
    passes: float = 0.32
    attention_forward: float = 0.64
    attention_backward: float = 0.59
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
    """GPUs, and how they are joined.

    Args:
        network_gbytes: GB/s from a GPU to another host, in one direction: its own NIC's.
        host_gbytes: GB/s between a GPU and its host's memory, in one direction.
        host_memory_bytes: of one host; None is not known.
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
        """Whether every ring of so many ranks, which follow one another, stays on one host."""
        return self.num_gpus <= self.gpus_per_host or self.gpus_per_host % cp_size == 0

    @property
    def num_hosts(self) -> int:
        """Hosts, all full but perhaps one."""
        return -(-self.num_gpus // self.gpus_per_host)
