"""The one consumer of a store that deletes: how it says so, and how it does it.

``registers/consumer`` holds {"session": "3f", "beat": 17, "deleted": {"0": 12}}: who it is (null: it closed), a number
that grows while it lives, and per writer the segment below which all are deleted. A newcomer that finds a session
watches it for four seconds. The last write wins: a consumer that was taken for dead finds another session there before
it deletes anything, and stops.

Floors go first: with floor 5, deleted 3 a crash left segments 3 and 4, and the next reclaim deletes them.
"""

from __future__ import annotations

import json
import math
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from knit_data.errors import ConsumerConflict, KeyMissing, StoreError
from knit_data.store.catalogue import Catalogue, check_count

_KEY = "registers/consumer"
_BEAT = 0.5  # seconds between two signs of life
_PATIENCE = 4.0  # seconds without one after which a consumer is taken for dead
_BATCH = 1024  # keys of one delete


@dataclass
class _Written:
    """What is left of one writer."""

    name: str
    floor: int
    deleted: int


class Consumer:
    """Deletes segments for the trainer that holds it, as long as no other took its place.

    >>> consumer = Consumer(store)
    >>> consumer.reclaim({0: 2})  # of writer 0 nothing below segment 2 is needed any more
    >>> store.floor(0)
    2
    """

    def __init__(self, store: Catalogue) -> None:
        self.store, self._session = store, uuid.uuid4().hex[:16]
        self.held, self._warned = False, False
        self._beat, self._spoke = 0, -math.inf
        self._deleted: dict[int, int] = {}
        self._writers: dict[int, _Written] = {}

    def claim(self) -> None:
        """Become the store's consumer, at once where the one before closed or there is none; else after watching it
        for 4 s. Raises ConsumerConflict if it lives."""
        if self.held:
            return
        raw = self.store.backend.get(_KEY)
        if self._read(raw)["session"] is not None:
            raw = self._watch(raw)
        self._deleted, self._writers = self._read(raw)["deleted"], {}
        self._speak()
        self.held = True

    def beat(self) -> None:
        """Call it often: says every 0.5 s that this consumer lives. Raises ConsumerConflict if another took over; a
        storage that does not answer is tried again at the next beat."""
        now = self.store.backend.now()
        if not self.held or now - self._spoke < _BEAT:
            return
        self._spoke = now
        try:
            self._check()
            self._speak()
        except ConsumerConflict:
            raise
        except StoreError:
            pass

    def reclaim(self, floors: Mapping[int, int]) -> None:
        """Delete each writer's segments below its floor, which is never lowered.

        Raises ConsumerConflict, before anything is deleted, if another consumer lives. Where the storage fails this
        warns once and leaves the rest to the next call.
        """
        try:
            self.claim()
            for writer, floor in floors.items():
                self._reclaim(writer, floor)
        except ConsumerConflict:
            raise
        except StoreError as e:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self.store.url}: consumed segments could not be deleted ({e}); training goes on, and the next "
                    "reclaim tries again.",
                    UserWarning,
                    stacklevel=2,
                )

    def release(self) -> None:
        """A clean end: the next consumer starts at once."""
        if not self.held:
            return
        try:
            self._check()
            self._speak(closed=True)
        except StoreError:
            pass  # taken over, or out of reach: a newcomer watches
        self.held = False

    def _reclaim(self, writer: int, floor: int) -> None:
        w = self._writers.get(writer) or self._look_up(writer)
        if floor <= w.floor and w.deleted >= w.floor:
            return
        self._check()
        if floor > w.floor:
            self.store.backend.put(f"registers/floor.{writer}", str(floor).encode())
            w.floor = floor
        while w.deleted < w.floor:
            end = min(w.floor, w.deleted + _BATCH)
            self.store.backend.delete([self.store.segment_key(w.name, n) for n in range(w.deleted, end)])
            w.deleted = self._deleted[writer] = end

    def _look_up(self, writer: int) -> _Written:
        claim = self.store.claim(writer)
        if claim is None:
            raise KeyMissing(f"{self.store.url}: writers/{writer}.json is missing, though its segments were read.")
        found = _Written(claim["name"], self.store.floor(writer), max(self._deleted.get(writer, 0), claim["first"]))
        self._writers[writer] = found
        return found

    def _read(self, raw: bytes | None) -> dict[str, Any]:
        if raw is None:
            return {"session": None, "deleted": {}}
        with self.store.understood(_KEY):
            data = json.loads(raw)
            deleted = {int(writer): check_count(n) for writer, n in data["deleted"].items()}
            return {"session": data["session"], "deleted": deleted}

    def _watch(self, raw: bytes | None) -> bytes | None:
        """The register of a consumer that is dead, or has closed meanwhile."""
        backend = self.store.backend
        deadline = backend.now() + _PATIENCE
        while (left := deadline - backend.now()) > 0:
            backend.wait([], min(left, _BEAT))
            again = backend.get(_KEY)
            if again != raw:
                if self._read(again)["session"] is None:
                    return again
                self._refuse("lives", "close its loader first, or open the store with reclaim='never' in all but one.")
        return raw

    def _check(self) -> None:
        """Before anything that only the store's consumer may do."""
        if self._read(self.store.backend.get(_KEY))["session"] != self._session:
            self._refuse(
                "took over, as this one gave no sign of life for a while", "stop one of them. Nothing was deleted here."
            )

    def _refuse(self, found: str, advice: str) -> NoReturn:
        raise ConsumerConflict(f"{self.store.url}: another trainer that reclaims {found}; one may: {advice}")

    def _speak(self, closed: bool = False) -> None:
        self._beat += 1
        deleted = {str(writer): n for writer, n in self._deleted.items()}
        data = {"session": None if closed else self._session, "beat": self._beat, "deleted": deleted}
        self.store.backend.put(_KEY, json.dumps(data).encode())
        self._spoke = self.store.backend.now()
