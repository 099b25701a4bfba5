"""The launch of a kernel with the addresses of another call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ringflash.attention.recording.steps import Repetition, Step
from ringflash.comm.driver import driver, plain_launch
from ringflash.comm.driver_commands import Command


class Address:
    """Stand-in for the tensor of a TMA descriptor, which is asked for its address only."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def repeat_launch(
    launch: Any, place_of: Callable[[Tensor], tuple[int | None, int]]
) -> tuple[Step, list[Command] | None]:
    """Return the step that repeats a launch, and the command that does the same, if there is one.

    Args:
        launch: the record that `observed_launches` of the kernels hands on.
        place_of: `Slots.place`.
    """
    given, launch = launch.args, launch._replace(args=())  # a step must not keep tensors
    template, moving = list(given), list[tuple[int, int, int, Address | None]]()
    pointers, maps = list[tuple[int, int, int]](), list[tuple[int, int] | None]()
    for place, x in enumerate(given):
        base = None
        if isinstance(x, Tensor):
            slot, offset = place_of(x)
            template[place] = offset
            if slot is not None:
                pointers.append((x.data_ptr(), slot, offset))
        elif hasattr(x, "block_shape"):
            slot, offset = place_of(x.base)
            template[place], base = copy.copy(x), Address(offset)
            template[place].base = base
            maps.append(None if slot is None else (slot, offset))
        else:
            continue
        if slot is not None:
            moving.append((place, slot, offset, base))

    def again(now: Repetition) -> None:
        for place, slot, offset, base in moving:
            if base is None:
                template[place] = now.addresses[slot] + offset
            else:
                base.address = now.addresses[slot] + offset
        launch.repeat(template)

    if not launch.is_readable or driver() is None:
        return again, None
    repeat = partial(launch.repeat, given)
    command = plain_launch(lambda stream: repeat(stream.cuda_stream), launch.stream, pointers, maps)
    return again, None if command is None else [command]
