"""What the ranks of a group tell one another when one of them is stuck, over the store that they met in.

Nothing is read or written while all goes well. A store may be gone, with the process that kept it, and a request to it
may never come back; neither may keep a rank from its end, nor end one. So each request has its own thread and a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar
from weakref import ref

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

T = TypeVar("T")
ANSWER_S = 5.0  # for the other ranks to answer
ASK_EVERY_S = ANSWER_S / 2  # between two questions of a rank to the store: soon enough to answer in time
_RETRY_S = 30.0  # from a request that got no answer to the next
_PATIENCE_S = 2.0  # with the store itself
_PAUSE_S = 0.25
_ASKED = "asked"


class StoreGone(RuntimeError):
    """No answer from the store."""


class Board:
    """One group's.

    Args:
        group: not kept alive.
        patience: seconds that a request to the store may take beyond what it waits for.
    """

    def __init__(self, group: dist.ProcessGroup, patience: float = _PATIENCE_S) -> None:
        self._group, self._patience = ref(group), patience
        self.rank, self.size = group.rank(), group.size()
        self._store: dist.Store | None = None
        self._gone = False  # the store answered with an error
        self._ask_after = float("-inf")

    def is_open(self) -> bool:
        """Whether the group is still there."""
        return _store(self._group()) is not None

    def asked(self, now: float) -> str:
        """Return why a rank of the group asks the others, if one does, as far as the store has been asked lately.

        A store that answers with an error is left alone from then on. One that does not answer may be busy, and is
        asked again later, over a new connection.
        """
        if self._gone or now < self._ask_after:
            return ""
        self._ask_after = now + ASK_EVERY_S
        try:
            return self._within(0.0, self._question)
        except StoreGone:
            self._store, self._ask_after = None, now + _RETRY_S
            return ""

    def exchange(
        self, why: str, own: str, clock: Callable[[], float], pause: Callable[[float], object]
    ) -> dict[int, str]:
        """What each rank says, of those that answer in time, after telling them what this one does.

        Args:
            why: what makes this rank ask, the first words of the report; not empty.
            own: what this rank does.
        Raises:
            StoreGone: nobody could be asked.
        """
        answers: dict[int, str] = {}

        def exchange() -> None:
            store, deadline = self._opened(), clock() + ANSWER_S
            store.set(str(self.rank), own)
            store.set(_ASKED, why)
            while len(answers) < self.size:
                for rank in range(self.size):
                    if rank not in answers and store.check([str(rank)]):
                        answers[rank] = store.get(str(rank)).decode()
                if clock() >= deadline:
                    break
                pause(_PAUSE_S)

        self._within(ANSWER_S, exchange)
        return dict(answers)

    def _question(self) -> str:
        store = self._opened()
        return store.get(_ASKED).decode() if store.check([_ASKED]) else ""

    def _opened(self) -> dist.Store:
        """A connection of its own: the working thread may hold the group's for as long as it waits for a key."""
        if self._store is None:
            store = _store(self._group())
            if store is None:
                raise StoreGone("the group was destroyed")
            self._store = dist.PrefixStore("ringflash/watch", store.clone())  # type: ignore[attr-defined]
        return self._store

    def _within(self, seconds: float, request: Callable[[], T]) -> T:
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(request())
            except Exception as error:  # a store raises what its kind raises
                errors.append(error)
                self._gone = True

        thread = Thread(target=run, name="ringflash-watch-store", daemon=True)
        thread.start()
        thread.join(seconds + self._patience)
        if not results:
            raise StoreGone(str(errors[0]) if errors else "no answer")
        return results[0]


def _store(group: dist.ProcessGroup | None) -> dist.Store | None:
    if group is None:
        return None
    try:
        return _get_process_group_store(group)
    except KeyError:
        return None
