"""The rollout side's handle: checks a group, makes it visible at once, and goes on after a crash."""

from __future__ import annotations

import json
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType

from knit_data.errors import (
    InvalidArgument,
    InvalidTrajectory,
    KeyMissing,
    StoreClosed,
    StoreError,
    WaitTimeout,
    WriterConflict,
)
from knit_data.infos import InfoTable, Schema, TrajectoryInfo
from knit_data.store.catalogue import Catalogue, check_writer
from knit_data.store.segment import check_schema, encode, schema_of
from knit_data.trajectory import Trajectory, check_group

_REMEMBERED = 256  # reclaimed segments whose ids are still known
_AHEAD = 32  # segment heads read in one batch while catching up


class StoreWriter:
    """Puts trajectories; one segment file a put. Threads may share it; other live writers need other names.

    Repeating a put of equal content is a no-op that returns the first one's infos, also after a restart, so a
    worker that does not know whether its last put arrived simply repeats it. Of what the trainer reclaimed a writer
    remembers the last 256 puts, and none after a restart: a repeat from before those is written again, and the
    sampler, which remembers what it trained for the staleness window, drops it as a duplicate.
    """

    def __init__(self, store: Catalogue, name: str, max_bytes: int | None = None) -> None:
        try:
            check_writer(name)
        except ValueError as e:
            raise InvalidArgument(
                f"writer name {name!r}: use 1 to 100 of A-Z a-z 0-9 . _ - (it becomes a folder), starting with a "
                "letter or digit."
            ) from e
        self.store, self.name, self.max_bytes = store, name, max_bytes
        self._session = uuid.uuid4().hex[:16]
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, int, int]] = {}  # id -> fingerprint, segment, item
        self._segments: deque[tuple[int, list[str]]] = deque()  # those with ids in _known
        self._sizes: deque[tuple[int, int]] = deque()  # (segment, bytes), not reclaimed as far as was seen
        self._held = 0  # their sum
        self._number, first = self._claim()
        self._floor = self.store.floor(self._number)
        self._next = max(first, self._floor)
        self._catch_up(owned=False)
        self._unsure = False  # whether a put may have arrived that was not confirmed

    def put(self, trajectory: Trajectory, timeout: float = 1800.0) -> TrajectoryInfo:
        """Make one trajectory visible. For groups of several prefer ``put_group``."""
        return self._put([trajectory], grouped=False, timeout=timeout)[0]

    def put_group(self, trajectories: Sequence[Trajectory], timeout: float = 1800.0) -> list[TrajectoryInfo]:
        """Make a whole group visible at once.

        Raises ``InvalidTrajectory`` naming the first one that cannot be trained on, ``StoreClosed`` after seal or
        finish, ``WaitTimeout`` if there was no room below ``max_bytes`` for ``timeout`` seconds; nothing is written
        then.
        """
        if isinstance(trajectories, Trajectory) or not isinstance(trajectories, Iterable):
            raise InvalidTrajectory(
                f"put_group takes the trajectories of one group, found {type(trajectories).__name__}; put(trajectory) "
                "takes one."
            )
        return self._put(list(trajectories), grouped=True, timeout=timeout)

    def close(self) -> None:
        """Nothing is buffered, so nothing is lost without it."""

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- opening ----------------------------------------------------------------------------------------------------

    def _claim(self) -> tuple[int, int]:
        """This name's writer number and first segment: from its earlier claim, or by claiming the next free number."""
        if self.store.exists(["sealing.json"])[0]:
            raise StoreClosed(f"{self.store.url}: the store is sealed; writer {self.name!r} cannot be opened.")
        mine = json.dumps({"name": self.name, "first": 0}).encode()
        number = 0
        while True:
            claim = self.store.claim(number)
            if claim is None:
                self.store.backend.create(f"writers/{number}.json", [mine])
                claim = self.store.claim(number)
            if claim is not None and claim["name"] == self.name:
                return number, int(claim["first"])
            number += 1

    def _catch_up(self, *, owned: bool) -> None:
        """Remember the segments that are there, up to the first free number. ``owned``: all must be this writer's.

        The floor is read after a segment was found missing: what was reclaimed meanwhile must not be written again.
        """
        ahead = 1
        while True:
            for head in self.store.heads([(self._number, self.name, self._next + i) for i in range(ahead)]):
                if isinstance(head, KeyMissing):
                    break
                if isinstance(head, Exception):
                    raise head
                table, size, session = head
                if owned and session != self._session:
                    raise WriterConflict(
                        f"writer {self.name!r}: segment {self._next} was written by another process. Two live writers "
                        "use one name; give each its own. This group was not written."
                    )
                self._remember(table, self._next, size)
                self._next += 1
            else:
                ahead = min(2 * ahead, _AHEAD)
                continue
            if (floor := self.store.floor(self._number)) <= self._next:
                return
            self._next = floor

    def _remember(self, table: InfoTable, number: int, size: int) -> None:
        """Doing it again, after an interrupt in the middle, changes nothing."""
        names = table.ragged["id"].texts()
        marks = enumerate(zip(names, table.fingerprints(), strict=True))
        self._known.update({name: (mark, number, item) for item, (name, mark) in marks})
        if not self._segments or self._segments[-1][0] != number:
            self._segments.append((number, names))
        if not self._sizes or self._sizes[-1][0] != number:
            self._sizes.append((number, size))
            self._held += size

    def _forget(self) -> None:
        """What was reclaimed takes no room any more, and all but the last of it is forgotten."""
        self._floor = self.store.floor(self._number)
        while self._sizes and self._sizes[0][0] < self._floor:
            self._held -= self._sizes.popleft()[1]
        while self._segments and self._segments[0][0] < self._floor - _REMEMBERED:
            number, names = self._segments.popleft()
            for name in names:
                if self._known[name][1] == number:
                    del self._known[name]

    # -- putting ----------------------------------------------------------------------------------------------------

    def _put(self, trajectories: list[Trajectory], *, grouped: bool, timeout: float) -> list[TrajectoryInfo]:
        check_group(trajectories)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
            raise InvalidArgument(f"timeout must be seconds, at least 0, found {timeout!r}.")
        with self._lock:
            self._refuse_if_closed()
            schema = self._agree(trajectories)
            while True:
                if self._unsure:
                    self._recover()
                if (repeated := self._repeated(trajectories, grouped)) is not None:
                    return repeated
                if len(self._segments) % _REMEMBERED == _REMEMBERED - 1:  # now and then: it is a look into the store
                    self._forget()
                number = self._next
                self._refuse_if_reclaimed(number)
                segment = encode(
                    trajectories, writer=self._number, segment=number, grouped=grouped, session=self._session
                )
                self._wait_for_room(segment.nbytes, timeout, trajectories[0])
                check_schema(trajectories[0], self.store.settle(schema), "this store")
                self._unsure = True  # also if the name exists: ours, when the back end tried again, or a rival's
                if self.store.backend.create(self.store.segment_key(self.name, number), segment.parts):
                    # in this order: what an interrupt leaves undone, the next put finds in the store and does
                    self._remember(segment.table, number, segment.nbytes)
                    self._next = number + 1
                    self._unsure = False
                    self._confirm(number)
                    return segment.table.infos()

    def _recover(self) -> None:
        """After a create whose outcome is unknown: find out what arrived."""
        before = self._next
        self._catch_up(owned=True)
        self._unsure = False
        if self._next > before:
            self._confirm(self._next - 1)

    def _agree(self, trajectories: Sequence[Trajectory]) -> Schema:
        """All trajectories of a store have one schema; the first put settles it."""
        schema, where = self.store.schema, "this store"
        if schema is None:
            schema, where = schema_of(trajectories[0]), f"trajectory {trajectories[0].id!r} of the same group"
        for t in trajectories:
            check_schema(t, schema, where)
        return schema

    def _repeated(self, trajectories: list[Trajectory], grouped: bool) -> list[TrajectoryInfo] | None:
        """The infos of an earlier equal put; None if these ids are new."""
        seen = [t for t in trajectories if t.id in self._known]
        if not seen:
            return None
        if len(seen) < len(trajectories):
            new = next(t for t in trajectories if t.id not in self._known)
            raise InvalidTrajectory(
                f"trajectory {seen[0].id!r} was already written in segment {self._known[seen[0].id][1]}, "
                f"{new.id!r} of the same put was not; repeat a put as it was, or give new trajectories new ids."
            )
        table = encode(
            trajectories, writer=self._number, segment=self._known[trajectories[0].id][1], grouped=grouped
        ).table
        for t, mark in zip(trajectories, table.fingerprints(), strict=True):
            known, number, _ = self._known[t.id]
            if known != mark:
                raise InvalidTrajectory(
                    f"trajectory {t.id!r} was already written with other content in "
                    f"{self.store.segment_key(self.name, number)}; ids are unique in a store, choose a new one."
                )
        tables: dict[int, InfoTable] = {}
        for number in {self._known[t.id][1] for t in trajectories}:
            (head,) = self.store.heads([(self._number, self.name, number)])
            if isinstance(head, KeyMissing):
                return table.infos()  # consumed and reclaimed: what the first put returned
            if isinstance(head, Exception):
                raise head
            tables[number] = head[0]
        return [tables[number][item] for _, number, item in (self._known[t.id] for t in trajectories)]

    def _refuse_if_closed(self) -> None:
        sealed, finished, claimed = self.store.exists(["sealing.json", "finished.json", f"writers/{self._number}.json"])
        if not claimed:
            raise StoreError(
                f"{self.store.url}: the claim of writer {self.name!r} is gone; was the folder removed or unmounted? "
                "Nothing was written. Open the store and the writer again."
            )
        if finished or sealed:
            why = "finished by the trainer" if finished else "sealed"
            raise StoreClosed(f"{self.store.url}: the store is {why}; writer {self.name!r} wrote nothing.")

    def _refuse_if_reclaimed(self, number: int) -> None:
        """What another wrote under this name, and was consumed since, has left its number free: nobody would read it.

        Looked at before the create: afterwards a quick trainer may have reclaimed this very segment.
        """
        if (floor := self.store.register(f"floor.{self._number}")) > number:
            raise WriterConflict(
                f"writer {self.name!r}: its next segment is {number}, and those below {floor} were written by another "
                "process and reclaimed. Two live writers use one name; give each its own. This group was not written."
            )

    def _confirm(self, number: int) -> None:
        """A seal that began before this put was visible may have counted without it; then it did not happen."""
        if not self.store.exists(["sealing.json"])[0]:
            return  # a seal that begins now counts it
        self.store.seal()
        counts = self.store.sealed() or []
        if self._number >= len(counts) or number >= counts[self._number]:
            raise StoreClosed(
                f"{self.store.url}: the store was sealed during this put by writer {self.name!r}; it does not count."
            )

    def _wait_for_room(self, size: int, timeout: float, first: Trajectory) -> None:
        limit = self.max_bytes
        if limit is None:
            return
        if size > limit:
            raise InvalidTrajectory(
                f"group {first.group!r} of trajectory {first.id!r} takes {size} bytes, max_bytes is {limit}; raise it."
            )
        deadline = self.store.backend.now() + timeout
        while self._held + size > limit:
            self._forget()
            if self._held + size <= limit:
                return
            left = deadline - self.store.backend.now()
            if left <= 0:
                raise WaitTimeout(
                    f"writer {self.name!r}: {self._held} of max_bytes={limit} are not reclaimed after {timeout:g} s, "
                    f"group {first.group!r} needs {size} more; it was not written, put it again. The trainer makes "
                    "room: after each loader.commit(state), or with reclaim='consumed' as it trains. Is it alive? "
                    "Else raise max_bytes above what comes between two commits, or commit more often. Groups that it "
                    "drops take room too: with reclaim='consumed' they go while it waits for better ones, but for "
                    "those behind a group that waits for its mini-batch; with 'commit' only with a later mini-batch."
                )
            self.store.exists(["finished.json", "sealing.json"], min(left, 0.5))
            self._refuse_if_closed()
