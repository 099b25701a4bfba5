"""All-gather by heads of a job: its ranks and sizes, its buffers, and the time that kernels wait for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import torch

from ringflash.attention.head_exchange import Share, area_bytes
from ringflash.attention.schedule import plan_blocks
from ringflash.attention.sections import (
    HEADER_BYTES,
    GatherSizes,
    Sections,
    buffer_sizes,
    choose_blocks,
    choose_num_gradient_buffers,
    choose_sections,
    fits_unbuffered,
    order_units,
    shared_buffer_sizes,
)
from ringflash.attention.ulysses import kv_heads_by_rank
from ringflash.comm.transport import CopyEngine, NcclGather
from ringflash.commands.plan.job import BF16, FP32, Machine, TrainingJob
from ringflash.commands.plan.model_shape import ModelShape
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.api import rounds


@dataclass(frozen=True)
class Ring:
    """Ranks that share a causal zigzag sequence, with the transport that `auto` chooses.

    A sequence over several whole hosts exchanges heads inside each of them (by_host). The ring is then the ranks that
    have the same place on their hosts; each has the tokens of its host, and a share of the heads.

    Args:
        model: its numbers of heads are those of one rank of the ring.
        cp_size: number of ranks of the ring.
        pairs: visible pairs of one rank.
        exchanging: number of ranks of a host that exchange heads; 1 is none.
        on_network: fraction of the other ranks that are on other hosts.
    """

    model: ModelShape
    seqlen: int
    cp_size: int
    pairs: int
    in_fp8: bool
    exchanging: int
    on_network: float

    @property
    def transport(self) -> str | None:
        """Name of the transport, as `ring_attention` takes it; None for one rank."""
        if self.exchanging > 1:
            return "by_host"
        return None if self.cp_size == 1 else "nccl" if self.on_network else "copy_engine"

    @property
    def rows(self) -> int:
        """Number of tokens of one rank of the ring."""
        return self.seqlen // self.cp_size

    @property
    def sizes(self) -> GatherSizes:
        """Sizes of a call, as the ranks of a real ring compute them."""
        shape = 1, self.rows, self.model.num_kv_heads, self.model.kv_dim
        dtype = torch.uint8 if self.in_fp8 else torch.bfloat16
        return GatherSizes(shape, self.model.num_heads, self.seqlen, self.seqlen - self.rows, self.pairs, dtype)

    @property
    def gathered(self) -> int:
        """Number of elements of K and V that rank 0, which sees the keys of all other ranks, gathers in a pass."""
        return 2 * (self.seqlen - self.rows) * self.model.kv_size

    @property
    def network_bytes(self) -> float:
        """Bytes of K, V and their gradients that the NIC of one GPU receives in both passes of one layer."""
        return self.on_network * self.gathered * (2 * self.key_bytes + FP32)

    @property
    def key_bytes(self) -> float:
        """Bytes of an element of K or V in transfer; in FP8 a key and its value share one byte of scales."""
        return 1 + 1 / (2 * self.model.kv_dim) if self.in_fp8 else BF16

    @property
    def gather_transport(self) -> str:
        """Transport of the all-gather of K/V."""
        return "nccl" if self.on_network else "copy_engine"

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Number of ranks of each block, whose keys are gathered together."""
        return choose_blocks(self.sizes, self.cp_size, self.gather_transport)

    @cached_property
    def sections(self) -> Sections:
        """Number of KV heads of each section, which are gathered together."""
        return choose_sections(self.sizes, len(self.blocks), self.gather_transport)


def ring_of(job: TrainingJob, machine: Machine) -> Ring:
    """Return the ring of a job on a machine; ranks that share a sequence are consecutive."""
    model, gpus, cp_size = job.model, machine.gpus_per_host, job.cp_size
    near = cp_size if machine.num_gpus <= gpus else gcd(cp_size, gpus)  # on the host with the fewest ranks of a ring
    exchanging, on_network = 1, (cp_size - near) / max(1, cp_size - 1)
    if near == gpus < cp_size and model.num_heads % gpus == 0:
        kv_heads = len(kv_heads_by_rank(gpus, model.num_heads, model.num_kv_heads)) // gpus
        model = replace(model, num_heads=model.num_heads // gpus, num_kv_heads=kv_heads)
        exchanging, cp_size, on_network = gpus, cp_size // gpus, 1.0
    pairs = int(job.visible_pairs / cp_size)
    return Ring(model, job.seqlen, cp_size, pairs, rounds(job.impl), exchanging, on_network)


def buffer_bytes(ring: Ring) -> int:
    """Return the bytes of the transport's buffers, which all layers share, on the rank with most."""
    several, last = len(ring.blocks) > 1, ring.cp_size - 1
    # in one block rank 0 gathers most keys, and the last rank receives most gradients
    ranks = range(0, ring.cp_size, max(1, ring.cp_size // 16)) if several else (0, last)
    gathered = max(_gathered_bytes(ring, rank) for rank in ranks) if last else 0
    return gathered + (_exchanged_bytes(ring) if ring.exchanging > 1 else 0)


def _gathered_bytes(ring: Ring, rank: int) -> int:
    """Return the bytes of the areas and buffers of one rank, as `GatheredKV` and `GradientReturn` make them.

    Several blocks also need sums of the rank's own gradients, and the output in fp32, both for two sections.
    """
    model, heads = ring.model, ring.sections.backward
    mask = SequenceMask(2 * ring.cp_size)  # a chunk of the layout is one token long
    blocks = plan_blocks(mask, ring.cp_size, rank, "zigzag", ring.blocks)
    several = len(blocks) > 1

    def in_units(heads: tuple[int, ...], rows: list[int]) -> tuple[int, ...]:
        """Return the rows of the block times the heads of the section, for each unit whose keys travel."""
        units = order_units(len(heads), len(blocks))
        return tuple(rows[unit.block] * heads[unit.section] for unit in units if unit.transfer is not None)

    keys = model.num_kv_heads * blocks[0].capacity
    if several or not fits_unbuffered(ring.sizes):
        num_buffers = (NcclGather if ring.on_network else CopyEngine).num_buffers
        rows = [block.num_rows for block in blocks]
        buffers = Sections(*(in_units(heads, rows) for heads in ring.sections))
        keys = 2 * model.num_kv_heads + sum(shared_buffer_sizes(buffers, num_buffers))
    arriving = [sum(reader.rank != rank for readers in block.readers for reader in readers) for block in blocks]
    stages = 2
    if not several:
        stages = choose_num_gradient_buffers(ring.sizes, heads)
    gradients = sum(buffer_sizes(in_units(heads, [block.capacity for block in blocks]), stages))
    states: float = gradients + max(in_units(heads, arriving))
    if several:
        output = model.num_heads // model.num_kv_heads * model.value_dim / (2 * model.kv_dim)
        states += 2 * sum(buffer_sizes(heads)) * (1 + output)
    return HEADER_BYTES + int(ring.rows * model.kv_dim * (keys * ring.key_bytes + states * FP32))


def _exchanged_bytes(ring: Ring) -> int:
    """Return the bytes of the areas and the buffer over which a host exchanges heads, in a backward."""
    model, ranks = ring.model, ring.exchanging
    q, k = (
        Share(1, ring.rows // ranks, heads, model.head_dim, torch.bfloat16)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    out, v = (x._replace(width=model.value_dim) for x in (q, k))
    lse = q._replace(width=1, dtype=torch.float32)
    return 2 * area_bytes(ranks, (k, v, lse, q, out, out)) + area_bytes(ranks, (q, k, v))


def exposed_seconds(ring: Ring, machine: Machine, forward: float, backward: float) -> float:
    """Return the seconds that attention kernels wait for messages in one layer.

    In an exchange of heads, only the exchange of queries is hidden: keys from other hosts arrive at the same time.

    Args:
        forward, backward: seconds of the kernels.
    """
    if ring.transport is None:
        return 0.0
    link = machine.gpu.nvlink_gbytes * machine.rates.copies * 1e9
    byte = ring.on_network / (machine.rates.network_gbytes * 1e9) if ring.on_network else 1 / link
    # the last rank owns what all others see
    arrive, leave = ring.gathered * ring.key_bytes * byte, ring.gathered * FP32 * byte
    q, out, k = (
        size * ring.rows * BF16 * (1 - 1 / ring.exchanging) / link
        for size in (ring.model.q_size, ring.model.out_size, ring.model.kv_size)
    )
    exposed = 0.0
    for kernels, heads, returned, queries, results in (
        (forward, ring.sections.forward, 0.0, q, out),
        (backward, ring.sections.backward, leave, q + 2 * out, q + 2 * k),
    ):
        end = pipeline_seconds(heads, ring.blocks, arrive, returned, kernels, queries)
        exposed += 2 * k + end - kernels + results
    return exposed


def pipeline_seconds(
    heads: tuple[int, ...], blocks: tuple[int, ...], arrive: float, leave: float, kernels: float, queries: float = 0.0
) -> float:
    """Return the seconds of one pass of an all-gather by heads, whose kernels and messages overlap.

    Messages have one order: the keys of the next unit are ahead of the gradients of this one.

    Args:
        heads: KV heads of each section.
        blocks: distances of each block; of several, the first has the rank's own keys, which do not travel.
        arrive: seconds of all messages with keys.
        leave: seconds of all messages with gradients; 0 in a forward.
        kernels: seconds of all kernels.
        queries: seconds until the queries are there.
    """
    units, travelling = order_units(len(heads), len(blocks)), sum(blocks[1:]) or blocks[0]
    work = [heads[unit.section] * blocks[unit.block] / sum(heads) for unit in units]
    moved = [share / travelling for unit, share in zip(units, work, strict=True) if unit.transfer is not None]
    link = arrived = moved[0] * arrive
    device = queries
    for unit, share in zip(units, work, strict=True):
        if unit.transfer is not None:
            device = max(device, arrived)
        device += share / sum(blocks) * kernels
        if unit.transfer is not None:
            link = arrived = link + (moved[unit.transfer + 1] * arrive if unit.transfer + 1 < len(moved) else 0.0)
            if leave:
                link = max(link, device) + moved[unit.transfer] * leave
    return max(link, device)
