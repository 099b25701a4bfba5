"""Attention over keys gathered from all ranks, a few heads at a time: over the copy engine and over NCCL.

    pull    K/V(0) K/V(1) ........ K/V(2) ..........     copies from their owners (no SM), or messages
    even    ...... section 0 ..... section 2 .......     kernels; those of the next section take the SMs that
    odd     ............. section 1 ..... section 3      the last tiles of this one leave idle
    begin   (backward) row sums of dO and O, zeros for dQ
    end     (backward) ..... dK/dV(0) .. dK/dV(1) ..     to their owners, who add them up; dQ cast

A section is some KV heads with the query heads that share them. All the keys that a rank sees lie before the kernel
in the order of their positions, so that a section is one launch, as on one device: no state passes from hop to hop.
The first section is small, since nothing hides its pull, and so is the last of a backward, whose gradients go home.
Long sequences take turns with two buffers, over NCCL with three. Where a call is long and its keys still come at once,
gradients go home a few sections at a time, so that the links sleep in between. docs/decisions/0005-copy-engine.md says
what waits for what, and why; 0008-nccl-by-heads.md what differs over NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple, TypeVar

import torch
from torch.profiler import record_function

from ringflash.attention.schedule import Gathering, Piece
from ringflash.comm import call_numbers
from ringflash.comm.call_numbers import NO_NUMBER, CallNumber, Words
from ringflash.comm.transport import MessageMemory, transport_name
from ringflash.comm.transport.buffers import buffer
from ringflash.comm.transport.lanes import Token
from ringflash.comm.transport.peer_memory import Incoming, Outgoing, PeerMemory
from ringflash.comm.transport.sms import kernel_options
from ringflash.comm.wait_timer import measuring, waiting
from ringflash.comm.watchdog import Call, Unwatched, watching
from ringflash_kernels.api import BackwardPass, begin_backward, collect, implementation, publish, state_dtype

T = TypeVar("T")
BEGIN, PULLED, READY, FREE = range(4)  # channels of barriers
NUMBER_BYTES = 256  # of an area, ahead of K/V: the number of the call, and what K/V need to be aligned
WHOLE_BYTES = 2 << 30  # K/V of all the keys that a rank gathers, at once up to so many
_WORK_OF_A_SECTION = 1 << 18  # query heads times keys; with less a section takes the host longer than the GPU
_WORK_OF_A_LONG_CALL = 1 << 39  # heads times queries, keys and columns; with less, a third section of a backward would
_WORK_WHERE_LINKS_SLEEP = 1 << 43  # heads times visible pairs and columns: a backward of 140 ms
_STAGE_BYTES = 192 << 20  # of a buffer of K/V, or of gradients, where a section may be smaller
_STAGES_BYTES = 5 << 28  # of all buffers of gradients, where more than two let links sleep
_ROWS_OF_A_PULL = 3000  # query rows whose kernel takes as long as the pull of their keys
_WAY_HOME = 0.8  # of what a forward hides: kernels 2.6 times as long, twice the bytes, two barriers and a sum
_EXPOSED = 0.05  # of a forward: the pull of the first section, where one section more would shorten it


@dataclass(frozen=True)
class Headwise:
    """One attention call, apart from its tensors.

    Args:
        gathering: the keys that this rank sees.
        memory: areas of the group.
        impl: kernel implementation, already chosen.
        call: its number in the group.
    """

    gathering: Gathering
    memory: PeerMemory
    impl: str
    softmax_scale: float
    deterministic: bool
    call: CallNumber = NO_NUMBER

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ring.Ring.forward`; a row is computed whole, in the kernel's own precision."""
        kernel, mask = implementation(self.impl, q, k, v), self.gathering.mask
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=state_dtype(q.dtype), device=q.device)
        with waiting(q.device):
            gathered = self._gathered("forward", k, q.shape[2])
            gathered.publish(k, v, self.impl, self.call)

        options = kernel_options(self.impl, transport_name(self.memory), q.device)

        def attend(section: int) -> None:
            mine = gathered.query_heads(section)
            keys, values = gathered.of(section)
            kernel.forward(
                q[:, :, mine], keys, values, mask, self.softmax_scale, out=out[:, :, mine], lse=lse[:, mine], **options
            )

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
            gathered = self._gathered("backward", k, q.shape[2])
            home = self._kept("home", ("kv", "dkv"), k, q.shape[2], lambda: Home(gathered, k))
            gathered.publish(k, v, self.impl, self.call)

        passes: dict[int, BackwardPass] = {}

        def begin(section: int) -> None:
            mine = gathered.query_heads(section)
            passes.pop(section % 2, None)  # which has ended: its fp32 dQ makes room for the new one
            passes[section % 2] = begin_backward(
                dout[:, :, mine], q[:, :, mine], out[:, :, mine], lse[:, mine], impl=self.impl,
                softmax_scale=self.softmax_scale, dlse=None if dlse is None else dlse[:, mine],
                deterministic=self.deterministic,
            )  # fmt: skip

        def differentiate(section: int) -> None:
            keys, values = gathered.of(section)
            passes[section % 2].add(keys, values, self.gathering.mask, *home.stage(section), accumulate=False)

        def finish(section: int) -> None:
            passes[section % 2].finish(dq[:, :, gathered.query_heads(section)])

        def bring_home(section: int) -> None:
            home.collect(section, dk, dv, self.impl)

        self._run("backward", gathered, differentiate, begin, finish, bring_home)
        return dq, dk, dv

    def num_posted(self) -> int:
        """Barriers or batches of messages of this rank, of earlier calls too."""
        return self.memory.num_posted

    def _run(self, way: str, gathered: Gathered, *work: Callable[[int], None]) -> None:
        """Compute all sections, while the watch looks on.

        Where that ends with an error, out of memory say, lanes still write to what the caller is about to give back.
        """
        with watching(self.memory, way, gathered.device) as call:
            try:
                self._run_sections(call, way, gathered, *work)
            except BaseException:
                with suppress(RuntimeError):  # of a device that failed: the error is the first one
                    self.memory.join()
                raise
            self._met(way, gathered)

    def _run_sections(
        self,
        call: Call | Unwatched,
        way: str,
        gathered: Gathered,
        compute: Callable[[int], None],
        begin: Callable[[int], None] | None = None,
        *end: Callable[[int], None],
    ) -> None:
        """Compute all sections, two lanes of them side by side, each as soon as its K/V are there.

        Args:
            begin, end: what comes before and after a section's kernel, on urgent lanes: small kernels that would
                otherwise queue behind all of the next section's. A section begins when the last but one has ended.
                Of the last two, for which no section waits, the first of `end` runs beside the others.
        """
        device, start = gathered.device, self.memory.mark()
        together = transport_name(self.memory) == "copy_engine"  # else messages order the ranks, and no barrier
        call.reach(start, "for {} to begin", "all ranks" if together else "its device")
        in_order = self._is_first(way, gathered) or measuring()
        computed: list[Token] = []
        ended: list[Token] = []
        finished: list[Token] = []

        def work(section: int, *here: Token) -> None:
            with waiting(device):
                self.memory.wait(*here)
            with _range(f"ringflash::{way}_section{section}"):
                compute(section)

        arrived = gathered.pull(0, start, computed)
        for section in range(gathered.sections):
            tokens = [arrived]
            if begin is not None:
                after = [start, *ended[-2:-1]]
                tokens.append(self.memory.beside("begin", partial(begin, section), after, urgent=True))
            after = [start, *(computed[-1:] if in_order else [])]
            lane = "odd" if section % 2 else "even"
            if section + 1 == gathered.sections:  # ahead of the last kernel, which may leave no SM to it
                pulled = gathered.all_pulled(self.call)
            computed.append(self.memory.beside(lane, partial(work, section, *tokens), after))
            call.reach(computed[-1], "for section {}", section)
            if section + 1 < gathered.sections:  # before this one's gradients go home, which messages wait for
                arrived = gathered.pull(section + 1, start, computed)
            if end:
                last_two = section + 2 >= gathered.sections
                rest = partial(_in_turn, end[1:] if last_two else end, section)
                ended.append(self.memory.beside("end", rest, computed[-1:], urgent=True))
                call.reach(ended[-1], "for the gradients of section {}", section)
                if last_two:
                    finished.append(self.memory.beside(lane, partial(end[0], section), []))
        if together:
            call.reach(pulled, "for all ranks to have their keys")
        tokens = [pulled]
        if begin is not None:  # the lane that allocated dQ and the statistics, which are freed when this call returns
            tokens.append(self.memory.beside("begin", _nothing, [*finished[-2:], *ended[-1:]], urgent=True))
        self.memory.wait(*(finished or computed)[-2:])
        with waiting(device):
            self.memory.wait(*tokens)

    def _gathered(self, way: str, k: torch.Tensor, num_heads: int) -> Gathered:
        def make() -> Gathered:
            sections = sections_of(k.shape, num_heads, self.gathering.capacity, k.dtype)
            return Gathered(self.memory, self.gathering, k, num_heads, getattr(sections, way))

        return self._kept(way, ("kv",), k, num_heads, make)

    def _kept(self, what: str, areas: tuple[str, ...], k: torch.Tensor, num_heads: int, make: Callable[[], T]) -> T:
        return self.memory.keep((what, id(self.gathering), num_heads, k.shape, k.dtype), areas, make)

    def _is_first(self, way: str, gathered: Gathered) -> bool:
        """Whether a mask is new to this kernel: the second section must then find what the first one keeps with it."""
        return not self.gathering.mask.is_cached(self._kernel(way, gathered))

    def _met(self, way: str, gathered: Gathered) -> None:
        """From now on, it is not."""
        self.gathering.mask.cached(self._kernel(way, gathered), lambda: True)

    def _kernel(self, way: str, gathered: Gathered) -> tuple[object, ...]:
        return "headwise", way, self.impl, self.deterministic, gathered.head_dim, gathered.device


class Gathered:
    """Where K/V of the sections lie, and how they get there. Made once for calls of one mask and shape.

    Short sequences are gathered whole, in the very area from which the others pull: a rank's own K/V then lie where
    its kernel wants them. (A copy within one GPU takes SMs, which a running kernel does not give up before its end.)
    Long ones are gathered in `memory.turns` buffers that take turns, from an area that holds the rank's own.

    Args:
        memory: areas of the group; every rank makes its own calls with tensors of the same shapes.
        gathering: the keys that this rank sees.
        k: (batch, seqlen_local, num_kv_heads, head_dim), for its shape, dtype and device.
        num_heads: of the queries.
        heads: KV heads of each section.
    """

    def __init__(
        self, memory: PeerMemory, gathering: Gathering, k: torch.Tensor, num_heads: int, heads: tuple[int, ...]
    ) -> None:
        self.memory, self.gathering, self.device, self.heads = memory, gathering, k.device, heads
        batch, rows, num_kv_heads, head_dim = k.shape
        self.head_dim = head_dim
        self.sections, self.group = len(heads), num_heads // num_kv_heads
        self.first = [0, *accumulate(heads)]
        self.turns = not gathered_whole(k.shape, gathering.capacity, k.dtype)
        line = 2 * head_dim
        places = (batch, rows if self.turns else gathering.capacity)
        size = math.prod(places) * num_kv_heads * line
        memory.reserve("kv", NUMBER_BYTES + size * k.itemsize)
        parts = {piece.owner: _word_and_area(memory, piece.owner, size, k.dtype) for piece in gathering.pieces}
        areas = {owner: area for owner, (_, area) in parts.items()}
        word, own = parts[memory.rank]
        assert word is not None and own is not None
        self.own = own
        self.words = Words(word, sorted(set(areas) - {memory.rank}), k.device)
        mine = _sections(self.own, places, self.heads, head_dim)
        by_section = {
            owner: (None,) * self.sections if area is None else _sections(area, places, self.heads, head_dim)
            for owner, area in areas.items()
        }
        if self.turns:
            shape = (batch, gathering.num_rows)
            buffers = [
                buffer(f"kv.{turn}", (math.prod(shape) * most * line,), k.dtype, k.device)
                for turn, most in enumerate(taking_turns(heads, memory.turns))
            ]
            self.slots = [
                _sections(buffers[section % memory.turns], shape, (count,), head_dim)[0]
                for section, count in enumerate(heads)
            ]
        else:
            self.slots = [area[:, : gathering.num_rows] for area in mine]
        self.pulls = [
            [
                Incoming(
                    slot[sequence, _rows(piece.row, piece)],
                    piece.owner,
                    None if there is None else there[sequence, _rows(self._there(piece), piece)],
                )
                for piece in self._nearest_first()
                if self.turns or piece.owner != memory.rank
                for there in (by_section[piece.owner][section],)
                for sequence in range(batch)
            ]
            for section, slot in enumerate(self.slots)
        ]
        self.sends = [
            [
                Outgoing(sequence[begin : begin + segment.size], reader.rank)
                for segment, readers in zip(gathering.segments, gathering.readers, strict=True)
                for begin in (segment.row if self.turns else dict(readers)[memory.rank],)
                for reader in readers
                if reader.rank != memory.rank
                for sequence in section
            ]
            for section in mine
        ]
        self.pulls[0] += [Incoming(self.words.of(owner), owner, parts[owner][0]) for owner in self.words.senders]
        self.pulls[0].sort(key=lambda pull: self._nearness(pull.rank))
        readers = {reader.rank for readers in gathering.readers for reader in readers}
        self.sends[0] += [Outgoing(word, reader) for reader in sorted(readers - {memory.rank})]
        self.moves = [
            memory.moving(pulls, sends, f"K/V of section {section}")
            for section, (pulls, sends) in enumerate(zip(self.pulls, self.sends, strict=True))
        ]
        self.lines = torch.tensor(
            [
                (math.prod(places) * line * first + head * line, heads * line)
                for first, heads in zip(self.first, self.heads, strict=False)
                for head in range(heads)
            ]
        ).to(k.device)
        there = torch.empty(rows, dtype=torch.int32)
        for piece in gathering.pieces:
            if piece.owner == memory.rank:
                there[_rows(piece.start, piece)] = torch.arange(piece.size, dtype=torch.int32) + self._there(piece)
        self.places, self.there = places, there.to(k.device)

    def publish(self, k: torch.Tensor, v: torch.Tensor, impl: str, call: CallNumber) -> None:
        """Put this rank's K and V, and the number of its call, where the others pull them from."""
        self.words.write(call)
        publish(impl, k, v, self.own, self.lines, self.there, self.places[1])
        self.memory.barrier(BEGIN)

    def pull(self, section: int, start: Token, computed: list[Token]) -> Token:
        """Begin to bring a section's K/V here.

        Args:
            start: the beginning of the call.
            computed: the sections until now; of long sequences, one of them last used the buffer.
        """
        last = section - self.memory.turns
        used = computed[last : last + 1] if self.turns and last >= 0 else []
        return self.memory.beside("pull", self.moves[section], [start, *used], urgent=True)

    def all_pulled(self, call: CallNumber) -> Token:
        """Barrier after the last pull of every rank. No kernel waits for it: each needs only its own rank's keys."""
        on_host = self.words.for_host(call)

        def end() -> None:
            if on_host is not None:
                on_host.copy_(self.words.arrived, non_blocking=True)
            self.memory.barrier(PULLED)

        token = self.memory.beside("pull", end, [], urgent=True)
        if on_host is not None:
            call_numbers.expect(self.memory.group, token, call, on_host, self.words.senders)
        return token

    def of(self, section: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V: (batch, rows gathered, heads of a section, head_dim)."""
        keys, values = self.slots[section].unbind(3)
        return keys, values

    def query_heads(self, section: int) -> slice:
        """The query heads that share the section's K/V."""
        return slice(self.first[section] * self.group, self.first[section + 1] * self.group)

    def _there(self, piece: Piece) -> int:
        """First row of a piece in its owner's area."""
        return piece.start if self.turns else piece.there

    def _nearest_first(self) -> list[Piece]:
        """The pieces, each rank beginning with another owner; its own last."""
        return sorted(self.gathering.pieces, key=lambda piece: self._nearness(piece.owner))

    def _nearness(self, owner: int) -> tuple[bool, bool, int]:
        """Key to sort owners by, from the next rank to this one."""
        return owner <= self.memory.rank, owner == self.memory.rank, owner


class Home:
    """Gradients of gathered keys, on their way to the owners of the keys. Made once, as `Gathered` is.

    Numerics: partial sums in fp32 (fp64 for fp64), added in the order of the ranks to the owner's.
    """

    def __init__(self, gathered: Gathered, k: torch.Tensor) -> None:
        gathering = gathered.gathering
        self.gathered, self.memory = gathered, gathered.memory
        rank, dtype, batch, head_dim = gathered.memory.rank, state_dtype(k.dtype), k.shape[0], k.shape[3]
        places, sizes = (batch, gathering.capacity), [segment.size for segment in gathering.segments]
        num_heads = k.shape[2] * gathered.group
        self.turns = stages_of(k.shape, num_heads, gathering.capacity, gathering.pairs, k.dtype, gathered.heads)
        self.together = {group[-1]: group for group in sent_together(gathered.sections, self.turns)}
        stages = [math.prod(places) * most * 2 * head_dim for most in taking_turns(gathered.heads, self.turns)]
        self.memory.reserve("dkv", sum(stages) * dtype.itemsize)
        others = [[reader for reader in readers if reader.rank != rank] for readers in gathering.readers]
        lines = [len(readers) * batch * size for readers, size in zip(others, sizes, strict=True)]
        arrived = buffer("dkv.in", (sum(lines) * max(gathered.heads) * 2 * head_dim,), dtype, k.device)
        areas = {
            reader.rank: self.memory.view("dkv", reader.rank, (sum(stages),), dtype)
            for readers in gathering.readers
            for reader in readers
        }
        self.stages, self.pulls, self.sends, self.sums = [], [], [], []
        for section, heads in enumerate(gathered.heads):
            turn = section % self.turns
            there = {
                peer: None if area is None else _sections(area.split(stages)[turn], places, (heads,), head_dim)[0]
                for peer, area in areas.items()
            }
            mine = there[rank]
            assert mine is not None
            own = mine[:, : gathering.num_rows]
            self.stages.append((own[..., 0, :], own[..., 1, :]))
            came = _sections(arrived, (sum(lines),), (heads,), head_dim)[0]
            come = [
                part.view(len(readers), batch, size, heads, 2, head_dim)
                for part, readers, size in zip(came.split(lines), others, sizes, strict=True)
            ]
            pulls = [
                Incoming(target, reader.rank, None if source is None else source[sequence, reader.row :][:size])
                for segment, readers, size in zip(come, others, sizes, strict=True)
                for targets, reader in zip(segment, readers, strict=True)
                for source in (there[reader.rank],)
                for sequence, target in enumerate(targets)
            ]
            self.pulls.append(sorted(pulls, key=lambda pull: (pull.rank <= rank, pull.rank)))  # nearest first, as K/V
            self.sends.append([
                Outgoing(sequence[_rows(piece.row, piece)], piece.owner)
                for piece in gathering.pieces
                if piece.owner != rank
                for sequence in own
            ])  # fmt: skip
            self.sums.append((mine, came))
        self.most = max(map(len, others))
        self.sources = _sources(gathering, rank, lines, k.shape[1]).to(k.device)
        self.moves = [
            self.memory.moving(pulls, sends, f"dK/dV of section {section}")
            for section, (pulls, sends) in enumerate(zip(self.pulls, self.sends, strict=True))
        ]

    def stage(self, section: int) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of a section's gathered keys, for the kernel to write."""
        return self.stages[section]

    def collect(self, section: int, dk: torch.Tensor, dv: torch.Tensor, impl: str) -> None:
        """dk and dv of this rank's own keys and the heads of all sections that go home behind this one, if any do.

        Copied before they are added: an addition that reads a peer's memory would hold SMs for as long.
        """
        together = self.together.get(section, ())
        if together:
            self.memory.barrier(READY)
        for each in together:
            self.moves[each]()
            if each == section and together[0] + self.turns < self.gathered.sections:
                self.memory.barrier(FREE)  # of the last stages, the next call's BEGIN says as much
            heads = slice(*self.gathered.first[each : each + 2])
            collect(impl, *self.sums[each], self.sources, self.most, dk[:, :, heads], dv[:, :, heads])


def _sources(gathering: Gathering, rank: int, lines: list[int], rows: int) -> torch.Tensor:
    """Where the gradients of each of this rank's rows are, as `ringflash_kernels.api.collect` takes it.

    Args:
        lines: rows that come of each segment, one segment behind another.
    """
    sources = torch.empty(4, rows, dtype=torch.int32)
    firsts = accumulate(lines, initial=0)
    for segment, readers, first in zip(gathering.segments, gathering.readers, firsts, strict=False):
        mine = sources[:, segment.row : segment.row + segment.size]
        places = torch.arange(segment.size)
        mine[0] = dict(readers)[rank] + places
        mine[1] = first + places
        mine[2:] = torch.tensor([[segment.size], [len(readers) - 1]])
    return sources


def _word_and_area(
    memory: PeerMemory, owner: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The word and the K/V of a rank's area; None if it is out of reach."""
    area = memory.view("kv", owner, (NUMBER_BYTES + size * dtype.itemsize,), torch.uint8)
    return (None, None) if area is None else (area[:8].view(torch.int64), area[NUMBER_BYTES:].view(dtype))


def _nothing() -> None:
    """No work: the lane only waits."""


def _in_turn(work: Sequence[Callable[[int], None]], section: int) -> None:
    for part in work:
        part(section)


def _range(name: str) -> AbstractContextManager[object]:
    """For a profiler; where there is none, a range costs the host 13 µs for nothing."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def _rows(first: int, piece: Piece) -> slice:
    return slice(first, first + piece.size)


def _sections(
    area: torch.Tensor, places: tuple[int, ...], heads: tuple[int, ...], head_dim: int
) -> tuple[torch.Tensor, ...]:
    """The beginning of an area in parts, one behind another: (*places, heads of a section, 2, head_dim)."""
    sizes = [math.prod(places) * count * 2 * head_dim for count in heads]
    parts = area[: sum(sizes)].split(sizes)
    return tuple(part.view(*places, count, 2, head_dim) for part, count in zip(parts, heads, strict=True))


class Sections(NamedTuple):
    """KV heads of each section."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def sections_of(shape: torch.Size | tuple[int, ...], num_heads: int, keys: int, dtype: torch.dtype) -> Sections:
    """The same on every rank.

    Args:
        shape: of a rank's k: (batch, rows, num_kv_heads, head_dim).
        num_heads: of the queries.
        keys: most that any rank gathers of one sequence.
        dtype: of k.
    """
    batch, rows, num_kv_heads, head_dim = shape
    group = num_heads // num_kv_heads
    least = max(1, -(-_WORK_OF_A_SECTION // (group * batch * keys)))
    if least >= num_kv_heads:
        return Sections((num_kv_heads,), (num_kv_heads,))
    head = 2 * batch * keys * head_dim
    most = num_kv_heads if gathered_whole(shape, keys, dtype) else max(least, _STAGE_BYTES // (head * dtype.itemsize))
    hiding = max(1.0, group * rows / _ROWS_OF_A_PULL)
    forward = _growing(num_kv_heads, hiding, most)
    if batch * num_heads * rows * keys * head_dim < _WORK_OF_A_LONG_CALL:
        return Sections(forward, _parts(num_kv_heads, least))
    most = max(least, _STAGE_BYTES // (head * state_dtype(dtype).itemsize))
    return Sections(forward, _small_at_both_ends(num_kv_heads, hiding, most))


def buffer_bytes(
    shape: torch.Size | tuple[int, ...], num_heads: int, keys: int, arriving: int, pairs: int, dtype: torch.dtype
) -> int:
    """What any rank gathers into at most, beside its own K/V, over NCCL.

    Args: as `sections_of` and `stages_of`, and
        arriving: most rows of gradients of one sequence that come to any rank.
    """
    row, sections = 2 * shape[0] * shape[3], sections_of(shape, num_heads, keys, dtype)
    kv = shape[2] if gathered_whole(shape, keys, dtype) else sum(shared_turns(sections, MessageMemory.turns))
    turns = stages_of(shape, num_heads, keys, pairs, dtype, sections.backward)
    gradients = sum(taking_turns(sections.backward, turns)) * keys + max(sections.backward) * arriving
    return NUMBER_BYTES + row * (kv * keys * dtype.itemsize + gradients * state_dtype(dtype).itemsize)


def stages_of(
    shape: torch.Size | tuple[int, ...],
    num_heads: int,
    keys: int,
    pairs: int,
    dtype: torch.dtype,
    heads: tuple[int, ...],
) -> int:
    """Buffers of gradients that take turns: two, or as many as let the links sleep from one way home to the next.

    NVLinks stay awake for 50 ms after they were used, and take power that kernels would run faster with. A call of
    that length has nothing to gain, nor one whose keys come a section at a time.

    Args: as `sections_of`, and
        pairs: visible pairs of one sequence, a rank's part of them.
        heads: KV heads of each section of the backward.
    """
    batch, _, _, head_dim = shape
    short = batch * num_heads * pairs * head_dim < _WORK_WHERE_LINKS_SLEEP
    if short or not gathered_whole(shape, keys, dtype):
        return min(2, len(heads))
    stage = max(heads) * 2 * batch * keys * head_dim * state_dtype(dtype).itemsize
    return min(max(2, _STAGES_BYTES // stage), len(heads))


def sent_together(sections: int, turns: int) -> list[tuple[int, ...]]:
    """The sections whose gradients go home together: few times, while another stage is filled; the last one by itself.

    Args:
        turns: stages that take turns.
    """
    ends = [0, *accumulate(_parts(sections - 1, max(1, turns - 1)) if sections > 1 else ()), sections]
    return [tuple(range(*both)) for both in pairwise(ends)]


def gathered_whole(shape: torch.Size | tuple[int, ...], keys: int, dtype: torch.dtype) -> bool:
    """Whether K/V of all sections lie in the area, or take turns with buffers. Args: as `sections_of`."""
    batch, _, num_kv_heads, head_dim = shape
    return 2 * batch * keys * num_kv_heads * head_dim * dtype.itemsize <= WHOLE_BYTES


def taking_turns(heads: tuple[int, ...], turns: int = 2) -> tuple[int, ...]:
    """Most heads that a buffer holds, of so many that take turns: of the even sections and of the odd ones."""
    return tuple(max(heads[turn::turns]) for turn in range(min(turns, len(heads))))


def shared_turns(sections: Sections, turns: int) -> tuple[int, ...]:
    """`taking_turns`, of buffers that forward and backward share."""
    return tuple(map(max, zip_longest(*(taking_turns(heads, turns) for heads in sections), fillvalue=0)))


def _growing(num_heads: int, hiding: float, most: int) -> tuple[int, ...]:
    """Few sections, each of them hiding the pull of the next, `hiding` times its own."""
    for count in range(2, 5):
        first = math.ceil(num_heads / sum(hiding**power for power in range(count)))
        if first <= _EXPOSED * num_heads * hiding:
            break
    heads: list[int] = []
    following = first
    while sum(heads) < num_heads:
        heads.append(min(following, most, num_heads - sum(heads)))
        following = math.floor(heads[-1] * hiding)
    return tuple(heads)


def _small_at_both_ends(num_heads: int, hiding: float, most: int) -> tuple[int, ...]:
    """Sections of a backward: a small first one, and last ones that each hide the way home of the one before."""
    first = math.ceil(min(num_heads / 16, most))
    last = [first][: num_heads - first]
    grown = math.floor(first * hiding * _WAY_HOME)
    while last and last[0] < grown < most and first + sum(last) + grown <= num_heads:
        last.insert(0, grown)
        grown = math.floor(grown * hiding * _WAY_HOME)
    return first, *_parts(num_heads - first - sum(last), most), *last


def _parts(num_heads: int, most: int) -> tuple[int, ...]:
    """As few as possible, as equal as possible."""
    count = -(-num_heads // most)
    return tuple(num_heads // count + (index < num_heads % count) for index in range(count))
