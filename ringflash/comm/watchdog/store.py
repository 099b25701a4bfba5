"""Messages between the watchdogs of a group through the store that the group was created with.

The store is not used while calls make progress. The process that hosts it may have ended, and a request may never
return. A healthy rank must survive both, and a stalled rank must still end. So every request runs in its own thread
with a time limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar
from weakref import ref

import torch.distributed as dist

from ringflash.comm.group import store_of

T = TypeVar("T")
ANSWER_S = 5.0  # time for the other ranks to answer
ASK_EVERY_S = ANSWER_S / 2  # interval of a rank's queries to the store: short enough to answer in time
_RETRY_S = 30.0  # interval after a request without an answer
_PATIENCE_S = 2.0  # time for the store itself to answer
_PAUSE_S = 0.25  # interval of the queries for answers of other ranks
_ASKED, _COLLECTOR, _ANSWERS = "asked", "collector", "answers"


class StoreGone(RuntimeError):
    """Raised if the store does not answer."""


class WatchdogStore:
    """Keys of a group's store through which its watchdogs exchange what their ranks are doing.

    Args:
        group: not kept alive.
        location: where this rank runs. Written at once, because the rank may not answer later; not written if empty.
        patience: seconds that a request to the store may take in addition to the time that it waits for other ranks.
    """

    def __init__(self, group: dist.ProcessGroup, location: str = "", patience: float = _PATIENCE_S) -> None:
        self._group, self._patience = ref(group), patience
        self.rank, self.size = group.rank(), group.size()
        self._store: dist.Store | None = None
        self._gone = False  # the store answered with an error
        self._ask_after = float("-inf")
        if location:
            with suppress(StoreGone):
                self._run_with_limit(0.0, lambda: self._connect().set(_location_key(self.rank), location))

    def is_open(self) -> bool:
        """Return True if the group has not been destroyed."""
        return store_of(self._group()) is not None

    def asked(self, now: float) -> str:
        """Return why a rank of the group has asked the others what they are doing; empty if none has asked.

        The store is queried every ASK_EVERY_S at most. After an error it is never queried again. A store that does not
        answer may be busy, and is queried again later over a new connection.
        """
        if self._gone or now < self._ask_after:
            return ""
        self._ask_after = now + ASK_EVERY_S
        try:
            return self._run_with_limit(0.0, self._question)
        except StoreGone:
            self._store, self._ask_after = None, now + _RETRY_S
            return ""

    def exchange(
        self, why: str, own: str, clock: Callable[[], float], pause: Callable[[float], object]
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Write what this rank is doing; return the answers that arrive in time and the locations, both by rank.

        One rank collects for all, so that the number of requests grows with the number of ranks and not with its
        square. If that rank stops, each of the others collects for itself.

        Args:
            why: the reason for asking, with which the report begins; not empty.
            own: what this rank is doing.
        Raises:
            StoreGone: the store could not be reached.
        """
        collected: dict[str, dict[str, str]] = {}

        def exchange() -> None:
            store, deadline = self._connect(), clock() + ANSWER_S
            store.set(str(self.rank), own)
            collects = int(store.compare_set(_COLLECTOR, "", str(self.rank))) == self.rank
            store.set(_ASKED, why)
            if not collects:
                while not store.check([_ANSWERS]) and clock() < deadline:
                    pause(_PAUSE_S)
                if store.check([_ANSWERS]):
                    collected.update(json.loads(store.get(_ANSWERS)))
                    return
            answers: dict[str, str] = {}
            while True:
                answers |= _read(store, {str(rank): str(rank) for rank in range(self.size) if str(rank) not in answers})
                if len(answers) == self.size or clock() >= deadline:
                    break
                pause(_PAUSE_S)
            locations = _read(store, {str(rank): _location_key(rank) for rank in range(self.size)})
            collected.update(answers=answers, locations=locations)
            store.set(_ANSWERS, json.dumps(collected))

        self._run_with_limit(ANSWER_S, exchange)
        answers, locations = (
            {int(rank): text for rank, text in collected[key].items()} for key in ("answers", "locations")
        )
        return answers, locations

    def _question(self) -> str:
        store = self._connect()
        return store.get(_ASKED).decode() if store.check([_ASKED]) else ""

    def _connect(self) -> dist.Store:
        """Return a separate connection, since the main thread may hold the group's while it waits for a key."""
        if self._store is None:
            store = store_of(self._group())
            if store is None:
                raise StoreGone("the group was destroyed")
            self._store = dist.PrefixStore("ringflash/watch", store.clone())  # type: ignore[attr-defined]
        return self._store

    def _run_with_limit(self, seconds: float, request: Callable[[], T]) -> T:
        """Return the result of a request that may take `seconds`; raise StoreGone if it fails or takes longer."""
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(request())
            except Exception as error:  # each kind of store has its own errors
                errors.append(error)
                self._gone = True

        thread = Thread(target=run, name="ringflash-watch-store", daemon=True)
        thread.start()
        thread.join(seconds + self._patience)
        if not results:
            raise StoreGone(str(errors[0]) if errors else "no answer")
        return results[0]


def _location_key(rank: int) -> str:
    return f"location of {rank}"


def _read(store: dist.Store, keys: dict[str, str]) -> dict[str, str]:
    """Return the values of the keys that are set, by name; `keys` maps names to keys."""
    return {name: store.get(key).decode() for name, key in keys.items() if store.check([key])}
