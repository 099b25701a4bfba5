"""Reads SASS: instructions, control flow, and the innermost loops that feed the tensor cores."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

_LABEL = re.compile(r"^\s*(\.L_[\w$.]+|[\w$.]+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"\.L_[\w$.]*\w")
_NO_FALL_THROUGH = ("BRA", "EXIT", "RET", "BRX", "JMP")


@dataclass(frozen=True)
class Instruction:
    predicate: str | None
    opcode: str  # with its modifiers
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def falls_through(self) -> bool:
        """Return whether the next instruction may follow."""
        conditional = self.predicate is not None or self.operands.startswith(("UP", "!UP", "P", "!P"))
        return self.name not in _NO_FALL_THROUGH or conditional


@dataclass(frozen=True)
class Loop:
    """Basic blocks of a natural loop, in the order of their addresses."""

    blocks: tuple[tuple[Instruction, ...], ...]

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(instruction for block in self.blocks for instruction in block)

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(instruction.name for instruction in self.instructions)

    @property
    def masked(self) -> bool:
        """Return whether every turn replaces scores by -inf: the selects share a block with exponentials or maxima."""
        names = ("MUFU", "FMNMX", "VIMNMX3")
        selecting = [block for block in self.blocks if _count(block, "FSEL") >= _MANY]
        return any(_count(block, name) >= _MANY for block in selecting for name in names)

    @property
    def spills(self) -> int:
        return self.counts["LDL"] + self.counts["STL"]

    @property
    def spills_off_the_mask(self) -> int:
        """Spills outside of blocks that only a partly masked tile enters."""
        unmasked = [block for block in self.blocks if _count(block, "FSEL") < _MANY]
        return sum(_count(block, "LDL") + _count(block, "STL") for block in unmasked)


_MANY = 16  # selects, exponentials or maxima that a thread needs for a tile of scores, at least


def _count(block: tuple[Instruction, ...], name: str) -> int:
    return sum(instruction.name == name for instruction in block)


class Program:
    """The kernels of one disassembly."""

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        for line in text.splitlines():
            instruction = _INSTRUCTION.search(line)
            if instruction:
                self.instructions.append(Instruction(instruction[1], instruction[2], instruction[3].strip()))
            elif label := _LABEL.match(line):
                self._labels[label[1]] = len(self.instructions)

    @cached_property
    def counts(self) -> Counter[str]:
        return Counter(instruction.name for instruction in self.instructions)

    @cached_property
    def _blocks(self) -> list[tuple[int, int]]:
        """[start, stop) of the basic blocks."""
        size = len(self.instructions)
        starts = {0, *(index for index in self._labels.values() if index < size)}
        starts |= {i + 1 for i, x in enumerate(self.instructions) if x.name in (*_NO_FALL_THROUGH, "BSYNC")}
        ordered = sorted(start for start in starts if start < size)
        return list(zip(ordered, [*ordered[1:], size], strict=True))

    @cached_property
    def _successors(self) -> list[list[int]]:
        block_at = {start: number for number, (start, _) in enumerate(self._blocks)}
        reconvergence: dict[str, int] = {}
        result = []
        for start, stop in self._blocks:
            following = []
            for instruction in self.instructions[start:stop]:
                targets = [self._labels[label] for label in _TARGET.findall(instruction.operands)]
                if instruction.name == "BSSY":
                    reconvergence[instruction.operands.split(",")[0]] = targets[0]
                else:
                    following += [block_at[target] for target in targets if target in block_at]
            last = self.instructions[stop - 1]
            if last.name == "BSYNC" and reconvergence.get(last.operands) in block_at:
                following.append(block_at[reconvergence[last.operands]])
            if last.falls_through and stop in block_at:
                following.append(block_at[stop])
            result.append(following)
        return result

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops with an HGMMA and no smaller such loop inside, in order of address."""
        bodies = [body for body in self._natural_loops() if self._has_mma(body)]
        inner = [body for body in bodies if not any(other < body for other in bodies)]
        unique = {min(body): body for body in inner}
        return [Loop(tuple(map(self._block, sorted(body)))) for _, body in sorted(unique.items())]

    @property
    def unmasked_loops(self) -> list[Loop]:
        return [loop for loop in self.loops if not loop.masked]

    def _natural_loops(self) -> list[frozenset[int]]:
        dominators = self._dominators()
        predecessors: list[list[int]] = [[] for _ in self._blocks]
        for block, following in enumerate(self._successors):
            for other in following:
                predecessors[other].append(block)
        bodies: dict[int, set[int]] = {}
        for block, following in enumerate(self._successors):
            for header in following:
                if header in dominators[block]:
                    body = bodies.setdefault(header, {header})
                    pending = [block]
                    while pending:
                        member = pending.pop()
                        if member not in body:
                            body.add(member)
                            pending += predecessors[member]
        return [frozenset(body) for body in bodies.values()]

    def _dominators(self) -> list[set[int]]:
        """Blocks that every path from an entry to a block passes; blocks without a jump to them are entries."""
        count = len(self._blocks)
        predecessors: list[set[int]] = [set() for _ in range(count)]
        for block, following in enumerate(self._successors):
            for other in following:
                predecessors[other].add(block)
        everything = set(range(count))
        dominators = [everything if predecessors[block] and block else {block} for block in range(count)]
        changed = True
        while changed:
            changed = False
            for block in range(1, count):
                if predecessors[block]:
                    new = set.intersection(*(dominators[p] for p in predecessors[block])) | {block}
                    if new != dominators[block]:
                        dominators[block], changed = new, True
        return dominators

    def _block(self, number: int) -> tuple[Instruction, ...]:
        return tuple(self.instructions[slice(*self._blocks[number])])

    def _has_mma(self, body: frozenset[int]) -> bool:
        return any(_count(self._block(number), name) for name in ("HGMMA", "QGMMA") for number in body)


def share_of_exp_before_last_wait(loop: Loop, opcode: str = "MUFU.EX2") -> float:
    """Share of a loop's exp2, or of another opcode, between a wait that leaves products in flight and the next one.

    The next one leaves none. Counted round the loop, since its first instruction may be any.
    """
    body = loop.instructions * 2
    waits = [(i, _products_left(x)) for i, x in enumerate(body) if x.opcode.startswith("WARPGROUP.DEPBAR")]
    best = 0
    for (first, left), (second, left_next) in zip(waits, waits[1:], strict=False):
        if left > 0 and left_next == 0:
            best = max(best, sum(x.opcode.startswith(opcode) for x in body[first:second]))
    total = sum(x.opcode.startswith(opcode) for x in loop.instructions)
    return best / total if total else 0.0


def exp_within_turns(loop: Loop) -> int:
    """exp2 between taking a turn (waiting at named barrier 8, 9 or 10) and passing it, round the loop."""
    return _within_turns(loop, "MUFU.EX2")


def products_within_turns(loop: Loop) -> int:
    """Products issued between taking a turn and passing it, round the loop."""
    return _within_turns(loop, "HGMMA")


def _within_turns(loop: Loop, opcode: str) -> int:
    count, within = 0, False
    for x in loop.instructions * 2:
        if x.opcode.startswith("BAR.SYNC") and x.operands.startswith(("0x8", "0x9", "0xa")):
            count, within = 0, True
        elif x.opcode.startswith("BAR.ARV"):
            within = False
        elif within and x.opcode.startswith(opcode):
            count += 1
    return count


def _products_left(wait: Instruction) -> int:
    return int(wait.operands.split(",")[1], 16)
