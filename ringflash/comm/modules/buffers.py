"""Comparison of buffers that layers change in a training forward, such as statistics of their tokens.

A layer that computes a buffer from its tokens (running statistics, a codebook, a bias that balances experts) gets
different values on each rank of a ring, which has only its own tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from torch import Tensor, nn

from ringflash.comm import cuda_graphs
from ringflash.comm.agreement import gather
from ringflash.comm.comparison import checksum, gather_values
from ringflash.comm.group import Group, resolve

INTERVAL = 16  # the first 16 training forwards are compared, then every 16th


class ChangedBuffers:
    """Persistent buffers of a module that its training forwards change. Other buffers may differ between ranks."""

    def __init__(self) -> None:
        self._num_forwards = 0
        self._before: dict[str, tuple[Tensor, int]] | None = None

    def begin(self, module: nn.Module, _: Group = None) -> None:
        """Note the buffers at the start of a training forward, if they will be compared at its end."""
        self._num_forwards += 1
        due = self._num_forwards <= INTERVAL or self._num_forwards % INTERVAL == 0
        self._before = {name: (x, x._version) for name, x in persistent_buffers(module)} if due else None

    def end(self, module: nn.Module, group: Group) -> None:
        """Compare the buffers that the forward has changed, by checksums; all ranks of the ring call this together.

        Raises:
            ValueError: a buffer differs between ranks; on every rank.
        """
        before, self._before, resolved = self._before, None, resolve(group)
        if not before or resolved is None:
            return
        now = dict(persistent_buffers(module))
        if any(cuda_graphs.capturing(x.device) for x in now.values()):
            return
        same = {name for name, (x, version) in before.items() if now.get(name) is x and x._version == version}
        changed = sorted(now.keys() - same)
        sums = {name: checksum(now[name]) for name in changed}
        if len(set(gather(resolved, zlib.crc32(str(sums).encode())))) == 1:
            return
        everywhere = sorted({name for names in gather_values(resolved, changed) for name in names})
        mine = [checksum(now[name]) if name in now else None for name in everywhere]
        of_ranks = zip(*gather_values(resolved, mine), strict=True)
        unequal = [name for name, checksums in zip(everywhere, of_ranks, strict=True) if len(set(checksums)) > 1]
        if unequal:
            raise ValueError(
                "buffers that a training forward changes must be equal on all ranks of a ring, got different values of "
                f"{', '.join(unequal[:3])}{' and others' * (len(unequal) > 3)}; each rank has other tokens, so sum "
                "what they are computed from over the ring, by torch.distributed.all_reduce(counts, group=group) with "
                "the ring's group (in Lightning self.trainer.strategy.cp_group), or register a buffer that is meant "
                "to differ with persistent=False."
            )


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a checkpoint holds, by name; the buffers of a shared layer once."""
    for prefix, layer in module.named_modules():
        for name, x in layer._buffers.items():
            if x is not None and name not in layer._non_persistent_buffers_set and not x.is_meta:
                yield f"{prefix}.{name}" if prefix else name, x
