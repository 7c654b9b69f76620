"""The one consumer of a store that deletes: how it says so, and how it does it.

``registers/consumer`` holds {"session": "3f", "beat": 17, "deleted": {"0": 12}}: who it is (null: it closed), a number
that grows while it lives, and per writer the segment below which all are deleted. A newcomer that finds a session
watches it for four seconds. So whoever said within the last two that it lives may delete; else it looks first, and one
that was taken for dead finds another session and stops.

Floors go first: with floor 5, deleted 3 a crash left segments 3 and 4, and the next reclaim deletes them. A floor that
a dying consumer set late, and too low, counts for nothing below what is deleted: ``Catalogue.floor``.
"""

from __future__ import annotations

import errno
import json
import math
import threading
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from knit_data.errors import ConsumerConflict, KeyMissing, StoreError, Unreachable
from knit_data.store.catalogue import CONSUMER, RESERVE, Catalogue

BEAT = 0.5  # seconds between two signs of life, and between two tries of what failed
_PATIENCE = 4.0  # seconds without one after which a consumer is taken for dead
_SURE = 2.0  # seconds after one in which nothing is looked at again; half of them, as what follows takes a while
_TURN = 0.25  # seconds after which the rest is left to the next call: the same thread reads
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_BATCH = 256  # keys of one delete


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
        self.held, self._over, self._warned = False, False, False
        self._lock = threading.RLock()  # threads that beat, reclaim, close; the last also as the garbage collector runs
        self._reserved = True  # there is room that was not used, as far as is known
        self._lost: str | None = None  # why it may not go on
        self._beat, self._said, self._tried, self._rest = 0, -math.inf, -math.inf, -math.inf
        self._deleted: dict[int, int] = {}
        self._writers: dict[int, _Written] = {}

    def claim(self) -> None:
        """Become the store's consumer, at once where the one before closed or there is none; else after watching it
        for 4 s. Raises ConsumerConflict if it lives. After a release it does nothing."""
        with self._lock:
            if self.held or self._over:
                return
            session, self._deleted = self.store.consumer()
            if session is not None:
                self._deleted = self._watch(self.store.backend.get(CONSUMER))
            self._writers = {}
            self._speak()
            self.held, self._reserved = True, self._reserved and self.store.reserve()

    def beat(self) -> None:
        """Call it often, from any thread: says every 0.5 s that this consumer lives. Raises ConsumerConflict if another
        took over; a storage that does not answer is tried again at the next beat."""
        with self._lock:
            if self._lost is not None:
                raise ConsumerConflict(self._lost)
            now = self.store.backend.now()
            if not self.held or now - self._tried < BEAT:
                return
            self._tried = now
            try:
                self._confirm()
            except ConsumerConflict:
                raise
            except StoreError:
                pass

    def lives(self) -> bool:
        """The same, for a thread that does nothing else: False when it may end."""
        try:
            self.beat()
        except ConsumerConflict:  # the next beat of the others says so
            return False
        return not self._over

    def reclaim(self, floors: Mapping[int, int]) -> bool:
        """Delete each writer's segments below its floor, which is never lowered. True: all of them are gone.

        False: call again. It returns after 0.25 s, so that the caller can do something else between; and where the
        storage fails, of which it warns once, it tries nothing for 0.5 s, unless ``retry`` is called. Raises
        ConsumerConflict, before anything more is deleted, if another consumer lives.
        """
        if self.rests:
            return False
        try:
            self.claim()
            if not self.held:
                return True  # it closed: the next consumer does it
            before, began = dict(self._deleted), self.store.backend.now()
            for writer, floor in floors.items():
                w = self._writers.get(writer) or self._look_up(writer)
                if floor > w.floor:
                    self._raise(writer, w, floor)
                while w.deleted < w.floor:
                    if self.store.backend.now() - began > _TURN:
                        return False
                    self._delete(writer, w)
            if self._deleted != before:
                with self._lock:
                    self._confirm()
                self._reserved = self._reserved or self.store.reserve()
        except ConsumerConflict:
            raise
        except StoreError as e:
            self._rest = self.store.backend.now() + BEAT
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self.store.url}: consumed segments could not be deleted ({e}); training goes on, and the next "
                    "reclaim tries again.",
                    UserWarning,
                    stacklevel=2,
                )
            return False
        return True

    @property
    def rests(self) -> bool:
        """After a failure."""
        return self.store.backend.now() < self._rest

    def retry(self) -> None:
        self._rest = -math.inf

    def release(self) -> None:
        """A clean end, for good: the next consumer starts at once."""
        with self._lock:
            self._over = True
            if not self.held:
                return
            try:
                self._check()
                self._speak(closed=True)
            except StoreError:
                pass  # taken over, or out of reach: a newcomer watches
            self.held = False

    def _put(self, key: str, value: bytes) -> None:
        """On a full disk in the room that was reserved for it: what is said here is what frees the disk."""
        try:
            self.store.backend.put(key, value)
            return
        except Unreachable as e:
            if not isinstance(e.__cause__, OSError) or e.__cause__.errno not in _NO_ROOM:
                raise
        self._reserved = False
        self.store.backend.delete([RESERVE])
        try:
            self.store.backend.put(key, value)
        except Unreachable as e:
            raise Unreachable(
                f"{e} The trainer frees the disk, and to say so it needs {len(value):,} bytes there, which others took "
                "before it. Remove anything else of some size, and start it again; rollout workers wait meanwhile."
            ) from e

    def _raise(self, writer: int, w: _Written, floor: int) -> None:
        self._make_sure()
        name = f"floor.{writer}"
        there = self.store.register(name)
        if there < floor:
            self._put(f"registers/{name}", str(floor).encode())
        w.floor = max(floor, there)

    def _delete(self, writer: int, w: _Written) -> None:
        self._make_sure()
        end = min(w.floor, w.deleted + _BATCH)
        self.store.backend.delete([self.store.segment_key(w.name, n) for n in range(w.deleted, end)])
        w.deleted = self._deleted[writer] = end

    def _make_sure(self) -> None:
        """Before anything that only the store's consumer may do."""
        with self._lock:
            if self.store.backend.now() - self._said > _SURE:
                self._confirm()

    def _look_up(self, writer: int) -> _Written:
        claim = self.store.claim(writer)
        if claim is None:
            raise KeyMissing(f"{self.store.url}: writers/{writer}.json is missing, though its segments were read.")
        deleted = max(self._deleted.get(writer, 0), claim["first"])
        found = _Written(claim["name"], max(self.store.register(f"floor.{writer}"), deleted), deleted)
        self._writers[writer] = found
        return found

    def _watch(self, raw: bytes | None) -> dict[int, int]:
        """What a consumer deleted that is dead, or has closed meanwhile."""
        backend = self.store.backend
        deadline = backend.now() + _PATIENCE
        while (left := deadline - backend.now()) > 0:
            backend.wait([], min(left, BEAT))
            if backend.get(CONSUMER) != raw:
                session, deleted = self.store.consumer()
                if session is None:
                    return deleted
                advice = "close its loader first, or open the store with reclaim='never' in all but one."
                raise ConsumerConflict(self._conflict("lives", advice))
        return self.store.consumer()[1]

    def _confirm(self) -> None:
        self._check()
        self._speak()

    def _check(self) -> None:
        if self._lost is not None:
            raise ConsumerConflict(self._lost)
        if self.store.consumer()[0] != self._session:
            self._lost = self._conflict("took over, as this one gave no sign of life for a while", "stop one of them.")
            raise ConsumerConflict(self._lost)

    def _conflict(self, found: str, advice: str) -> str:
        return f"{self.store.url}: another trainer that reclaims {found}; one may: {advice}"

    def _speak(self, closed: bool = False) -> None:
        if self._over and not closed:
            return
        began = self._tried = self.store.backend.now()
        self._beat += 1
        deleted = {str(writer): n for writer, n in dict(self._deleted).items()}  # copied: the other thread writes it
        data = {"session": None if closed else self._session, "beat": self._beat, "deleted": deleted}
        self._put(CONSUMER, json.dumps(data).encode())
        self._said = began
