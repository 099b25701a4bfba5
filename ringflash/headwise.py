"""Attention over keys gathered from all ranks, a few heads at a time: the ring of GPUs that map one another's memory.

    pull    K/V(0) K/V(1) ........ K/V(2) ..........     copies from their owners: no SM
    even    ...... section 0 ..... section 2 .......     kernels; those of the next section take the SMs that
    odd     ............. section 1 ..... section 3      the last tiles of this one leave idle
    begin   (backward) row sums of dO and O, zeros for dQ
    end     (backward) ..... dK/dV(0) .. dK/dV(1) ..     copies to their owners, who add them up; dQ cast

A section is some KV heads with the query heads that share them. All the keys that a rank sees lie before the kernel
in the order of their positions, so that a section is one launch, as on one device: no state passes from hop to hop.
Long sequences take turns with two buffers. docs/decisions/0005-copy-engine.md says what waits for what, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch.profiler import record_function

from ringflash.schedule import Gathering, Piece
from ringflash.transport.buffers import buffer
from ringflash.transport.peer_memory import PeerMemory, Token
from ringflash.waiting import measuring, waiting
from ringflash.watch import Call, Unwatched, watching
from ringflash_kernels.api import BackwardPass, begin_backward, collect, implementation, state_dtype

T = TypeVar("T")
BEGIN, PULLED, READY, FREE = range(4)  # channels of barriers
WHOLE_BYTES = 1 << 30  # K/V of the whole sequence, gathered at once up to so many
_WORK_OF_A_SECTION = 1 << 18  # query heads times keys; with less a section takes the host longer than the GPU


@dataclass(frozen=True)
class Headwise:
    """One attention call, apart from its tensors.

    Args:
        gathering: the keys that this rank sees.
        memory: areas of the group.
        impl: kernel implementation, already chosen.
    """

    gathering: Gathering
    memory: PeerMemory
    impl: str
    softmax_scale: float
    deterministic: bool

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ring.Ring.forward`; a row is computed whole, in the kernel's own precision."""
        kernel, mask = implementation(self.impl, q, k, v), self.gathering.mask
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=state_dtype(q.dtype), device=q.device)
        with waiting(q.device):
            gathered = self._gathered(k, q.shape[2])
            gathered.publish(k, v)

        def attend(section: int) -> None:
            mine = gathered.query_heads(section, q.shape[2])
            keys, values = gathered.of(section)
            kernel.forward(q[:, :, mine], keys, values, mask, self.softmax_scale, out=out[:, :, mine], lse=lse[:, mine])

        self._run("forward", gathered, attend)
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `ring.Ring.backward`; dk and dv are summed in the order of the ranks."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        with waiting(q.device):
            gathered = self._gathered(k, q.shape[2])
            home = self._kept("home", k, q.shape[2], lambda: Home(gathered, k))
            gathered.publish(k, v)

        passes: dict[int, BackwardPass] = {}

        def begin(section: int) -> None:
            mine = gathered.query_heads(section, q.shape[2])
            passes[section % 2] = begin_backward(
                dout[:, :, mine], q[:, :, mine], out[:, :, mine], lse[:, mine], impl=self.impl,
                softmax_scale=self.softmax_scale, dlse=None if dlse is None else dlse[:, mine],
                deterministic=self.deterministic,
            )  # fmt: skip

        def differentiate(section: int) -> None:
            keys, values = gathered.of(section)
            passes[section % 2].add(keys, values, self.gathering.mask, *home.stage(section), accumulate=False)

        def end(section: int) -> None:
            passes[section % 2].finish(dq[:, :, gathered.query_heads(section, q.shape[2])])
            home.collect(section, dk, dv, self.impl)

        self._run("backward", gathered, differentiate, begin, end)
        return dq, dk, dv

    def _run(self, way: str, gathered: Gathered, *work: Callable[[int], None]) -> None:
        """Compute all sections, while the watch looks on."""
        with watching(self.memory, way, gathered.device) as call:
            self._run_sections(call, way, gathered, *work)

    def _run_sections(
        self,
        call: Call | Unwatched,
        way: str,
        gathered: Gathered,
        compute: Callable[[int], None],
        begin: Callable[[int], None] | None = None,
        end: Callable[[int], None] | None = None,
    ) -> None:
        """Compute all sections, two lanes of them side by side, each as soon as its K/V are there.

        Args:
            begin, end: what comes before and after a section's kernel, on urgent lanes: small kernels that would
                otherwise queue behind all of the next section's. A section begins when the last but one has ended.
        """
        device, start = gathered.device, self.memory.mark()
        call.reach(start, "for all ranks to begin")
        in_order = self._is_first(way, device) or measuring()
        computed: list[Token] = []
        ended: list[Token] = []

        def work(section: int, *here: Token) -> None:
            with waiting(device):
                for token in here:
                    token.wait()
            with record_function(f"ringflash::{way}_section{section}"):
                compute(section)

        for section in range(gathered.sections):
            arrived = gathered.pull(section, [start, *computed[-2:-1]])
            tokens = [arrived]
            if begin is not None:
                after = [start, *ended[-2:-1]]
                tokens.append(self.memory.beside("begin", partial(begin, section), after, urgent=True))
            after = [start, *(computed[-1:] if in_order else [])]
            lane = "odd" if section % 2 else "even"
            computed.append(self.memory.beside(lane, partial(work, section, *tokens), after))
            call.reach(computed[-1], "for section {}", section)
            if end is not None:
                ended.append(self.memory.beside("end", partial(end, section), computed[-1:], urgent=True))
                call.reach(ended[-1], "for the gradients of section {}", section)
        for token in computed[-2:]:
            token.wait()
        with waiting(device):
            for token in (arrived, *ended[-1:]):
                token.wait()

    def _gathered(self, k: torch.Tensor, num_heads: int) -> Gathered:
        return self._kept("gathered", k, num_heads, lambda: Gathered(self.memory, self.gathering, k, num_heads))

    def _kept(self, what: str, k: torch.Tensor, num_heads: int, make: Callable[[], T]) -> T:
        return self.memory.keep((what, id(self.gathering), num_heads, k.shape, k.dtype), make)

    def _is_first(self, way: str, device: torch.device) -> bool:
        """Whether a mask is new to this kernel: the second section must then find what the first one keeps with it."""
        kept, key = self.gathering.mask._cache, ("headwise", way, self.impl, self.deterministic, device)
        new = key not in kept
        kept[key] = True
        return new


class Gathered:
    """Where K/V of the sections lie, and how they get there. Made once for calls of one mask and shape.

    Short sequences are gathered whole, in the very area from which the others pull: a rank's own K/V then lie where
    its kernel wants them. (A copy within one GPU takes SMs, which a running kernel does not give up before its end.)
    Long ones are gathered in two buffers that take turns, from an area that holds the rank's own.

    Args:
        memory: areas of the group; every rank makes its own calls with tensors of the same shapes.
        gathering: the keys that this rank sees.
        k: (batch, seqlen_local, num_kv_heads, head_dim), for its shape, dtype and device.
        num_heads: of the queries.
    """

    def __init__(self, memory: PeerMemory, gathering: Gathering, k: torch.Tensor, num_heads: int) -> None:
        self.memory, self.gathering, self.device = memory, gathering, k.device
        batch, rows, num_kv_heads, head_dim = k.shape
        self.heads = heads_of_a_section(num_kv_heads, num_heads // num_kv_heads, batch * gathering.capacity)
        self.sections = num_kv_heads // self.heads
        self.turns = 2 * batch * gathering.capacity * num_kv_heads * head_dim * k.itemsize > WHOLE_BYTES
        rest = (self.heads, 2, head_dim)
        shape = (self.sections, batch, rows if self.turns else gathering.capacity, *rest)
        memory.reserve("kv", math.prod(shape) * k.itemsize)
        areas = {piece.owner: memory.view("kv", piece.owner, shape, k.dtype) for piece in gathering.pieces}
        own = areas[memory.rank]
        if self.turns:
            slots = [
                buffer(f"kv.{slot}", (batch, gathering.num_rows, *rest), k.dtype, k.device)
                for slot in range(min(2, self.sections))
            ]
        else:
            slots = [own[section, :, : gathering.num_rows] for section in range(self.sections)]
        self.slots = slots
        self.pulls = [
            [
                (target[_rows(piece.row, piece)], source[_rows(self._there(piece), piece)])
                for piece in self._nearest_first()
                if self.turns or piece.owner != memory.rank
                for target, source in zip(slots[section % len(slots)], areas[piece.owner][section], strict=True)
            ]
            for section in range(self.sections)
        ]
        mine = [piece for piece in gathering.pieces if piece.owner == memory.rank]
        self.own = [
            (which, _rows(piece.start, piece), _wide(own)[:, :, _rows(self._there(piece), piece), :, which])
            for piece in mine
            for which in (0, 1)
        ]

    def publish(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put this rank's K and V where the others pull them from."""
        heads = [_wide(x).unflatten(2, (self.sections, self.heads)).permute(2, 0, 1, 3, 4) for x in (k, v)]
        for which, rows, target in self.own:
            target.copy_(heads[which][:, :, rows])
        self.memory.barrier(BEGIN)

    def pull(self, section: int, after: list[Token]) -> Token:
        """Begin to copy a section's K/V.

        Args:
            after: the beginning of the call, and the section that last used the buffer, which whole sequences ignore.
        """

        def copy() -> None:
            for target, source in self.pulls[section]:  # both contiguous: no SM
                target.copy_(source, non_blocking=True)
            if section == self.sections - 1:
                self.memory.barrier(PULLED)

        return self.memory.beside("pull", copy, after if self.turns else after[:1], urgent=True)

    def of(self, section: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V: (batch, rows gathered, heads of a section, head_dim)."""
        slot = self.slots[section % len(self.slots)]
        return slot[..., 0, :], slot[..., 1, :]

    def query_heads(self, section: int, num_heads: int) -> slice:
        """The query heads that share the section's K/V."""
        count = num_heads // self.sections
        return slice(section * count, (section + 1) * count)

    def _there(self, piece: Piece) -> int:
        """First row of a piece in its owner's area."""
        return piece.start if self.turns else piece.there

    def _nearest_first(self) -> list[Piece]:
        """The pieces, each rank beginning with another owner; its own last."""
        rank = self.memory.rank
        return sorted(self.gathering.pieces, key=lambda piece: (piece.owner <= rank, piece.owner == rank, piece.owner))


class Home:
    """Gradients of gathered keys, on their way to the owners of the keys. Made once, as `Gathered` is.

    Numerics: partial sums in fp32 (fp64 for fp64), added in the order of the ranks to the owner's.
    """

    def __init__(self, gathered: Gathered, k: torch.Tensor) -> None:
        self.gathering = gathering = gathered.gathering
        self.memory = memory = gathered.memory
        self.heads, self.sections = gathered.heads, gathered.sections
        dtype, batch, row = state_dtype(k.dtype), k.shape[0], (gathered.heads, 2, k.shape[3])
        shape = (min(2, gathered.sections), batch, gathering.capacity, *row)
        memory.reserve("dkv", math.prod(shape) * dtype.itemsize)
        size = gathering.pieces[0].size
        others = [[reader for reader in readers if reader.rank != memory.rank] for readers in gathering.readers]
        arrived = buffer("dkv.in", (sum(map(len, others)), batch, size, *row), dtype, k.device)
        by_chunk = arrived.split(list(map(len, others)))
        own = memory.view("dkv", memory.rank, shape, dtype)
        self.stages = [(stage[..., 0, :], stage[..., 1, :]) for stage in own[:, :, : gathering.num_rows]]
        self.pulls = [
            [
                (target, source[reader.row : reader.row + size])
                for chunk, readers in zip(by_chunk, others, strict=True)
                for targets, reader in zip(chunk, readers, strict=True)
                for target, source in zip(targets, memory.view("dkv", reader.rank, shape, dtype)[slot], strict=True)
            ]
            for slot in range(shape[0])
        ]
        rows = [dict(readers)[memory.rank] for readers in gathering.readers]
        self.sums = [
            [
                (slice(chunk.row, chunk.row + size), stage[:, row : row + size], came)
                for chunk, row, came in zip(gathering.chunks, rows, by_chunk, strict=True)
            ]
            for stage in own
        ]

    def stage(self, section: int) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of a section's gathered keys, for the kernel to write."""
        return self.stages[section % 2]

    def collect(self, section: int, dk: torch.Tensor, dv: torch.Tensor, impl: str) -> None:
        """dk and dv of this rank's own keys and a section's heads, from all ranks that see them.

        Copied before they are added: an addition that reads a peer's memory would hold SMs for as long.
        """
        self.memory.barrier(READY)
        for target, source in self.pulls[section % 2]:
            target.copy_(source, non_blocking=True)
        if section + 2 < self.sections:  # of the last two, the next call's BEGIN says as much
            self.memory.barrier(FREE)
        heads = slice(section * self.heads, (section + 1) * self.heads)
        for rows, own, others in self.sums[section % 2]:
            collect(impl, own, others, dk[:, rows, heads], dv[:, rows, heads])


def _rows(first: int, piece: Piece) -> slice:
    return slice(first, first + piece.size)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """x in words of 8 bytes where a row has them: torch copies what is not contiguous element by element."""
    if x.shape[-1] * x.itemsize % 8:
        return x
    places = (x.storage_offset(), *x.stride()[:-1])
    aligned = x.stride(-1) == 1 and all(place * x.itemsize % 8 == 0 for place in places)
    return (x if aligned else x.clone(memory_format=torch.contiguous_format)).view(torch.int64)


def heads_of_a_section(num_kv_heads: int, group: int, keys: int) -> int:
    """KV heads of a section: the fewest that give a launch enough work. A divisor, the same on every rank.

    Args:
        group: query heads that share a KV head.
        keys: most that any rank gathers, of all sequences of the batch.
    """
    able = [count for count in range(1, num_kv_heads + 1) if num_kv_heads % count == 0]
    return next((count for count in able if count * group * keys >= _WORK_OF_A_SECTION), num_kv_heads)
