"""Committed trajectories as a torchdata node, in the order of their writers' segments.

No listing and no server: names are dense, so the next segment of every writer and the next writer are the only keys
to look for, all in one wait. A writer that has been silent for t seconds is looked at every t / 100 s, 30 s at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from knit_data.errors import InvalidArgument, KeyMissing, StateError
from knit_data.infos import Array, InfoTable, TrajectoryInfo
from knit_data.ledger import Ledger, Runs
from knit_data.store.store import TrajectoryStore

_SLICE = 0.05  # seconds a wait may last before a stop is noticed
_SILENCE, _SLOWEST = 0.01, 30.0  # look again after this share of the silence, and at least this often
_LONG = 1.0  # seconds of silence that may mean a reclaimed segment
_HEADS = 32  # segment heads read ahead in one batch while catching up


class _Tail:
    """One writer's next segment."""

    def __init__(self, name: str, at: int, now: float) -> None:
        self.name, self.first, self.at, self.heard, self.due = name, at, at, now, now
        self.end: int | None = None

    @property
    def over(self) -> bool:
        return self.end is not None and self.at >= self.end


class TrajectoryStream(BaseNode[TrajectoryInfo]):
    """Yields a ``TrajectoryInfo`` for every committed trajectory, each once.

    ``follow=True`` waits for more until the store is sealed; ``follow=False`` ends at what is committed when reading
    starts. Constructing does no I/O. State: per writer the next segment and row, JSON-able.
    """

    def __init__(self, store: TrajectoryStore, follow: bool = True, consumer: str = "trainer") -> None:
        super().__init__()
        if not isinstance(store, TrajectoryStore):
            raise InvalidArgument(f"TrajectoryStream needs a TrajectoryStore, found {type(store).__name__}.")
        if not isinstance(consumer, str) or not consumer:
            raise InvalidArgument(f"consumer must be a name, found {consumer!r}.")
        self.store, self.follow, self.consumer = store, follow, consumer
        self._forget()

    def _forget(self) -> None:
        self._tails: list[_Tail] = []
        self._starts: dict[int, tuple[int, int]] = {}
        self._rows: deque[TrajectoryInfo] = deque()
        self._final: list[int] | None = None  # segment counts per writer, once known
        self._taken: dict[int, tuple[int, int]] = {}  # writer -> next segment and row that next() will give
        self._stopped = False

    # -- node contract ----------------------------------------------------------------------------------------------

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        starts = {}
        if initial_state is not None:
            if initial_state.get("store") != self.store.id:
                raise StateError(
                    f"this stream state belongs to store {initial_state.get('store')!r}, the stream reads "
                    f"{self.store.id!r}; open the store it was saved from."
                )
            starts = _starts(initial_state)
        self._forget()
        self._starts = starts
        self._taken = dict(starts)

    def next(self) -> TrajectoryInfo:
        while not self._rows:
            for table in self.poll(_SLICE):
                writer, segment, _ = table[0].address
                start = self._starts.get(writer, (0, 0))
                skip = start[1] if start[0] == segment else 0
                self._rows.extend(table.infos()[skip:])
            if not self._rows and (self.ended or self._stopped):
                raise StopIteration
        info = self._rows.popleft()
        writer, segment, item = info.address
        whole = item + 1 == len(info.table)
        self._taken[writer] = (segment + 1, 0) if whole else (segment, item + 1)
        return info

    def get_state(self) -> dict[str, Any]:
        return {"store": self.store.id, "writers": [[w, s, i] for w, (s, i) in sorted(self._taken.items())]}

    # -- for the sampler --------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Every segment that will ever come was polled."""
        return self._final is not None and len(self._tails) >= len(self._final) and all(t.over for t in self._tails)

    @property
    def finite(self) -> bool:
        """The end is known, whether or not it is reached."""
        return not self.follow or self._final is not None

    @property
    def stopped(self) -> bool:
        return self._stopped

    def firsts(self) -> dict[int, int]:
        """Per writer the segment that reading began with."""
        return {w: tail.first for w, tail in enumerate(self._tails)}

    def poll(self, timeout: float) -> list[InfoTable]:
        """Tables of new segments, one each; waits up to ``timeout`` seconds for the first, less after ``stop``."""
        backend = self.store.backend
        if self._final is None and not self.follow:
            self._snapshot()
        deadline = backend.now() + timeout
        while not self._stopped:
            known = len(self._tails), self._final
            found = self._look(0.0)
            if found or self.ended:
                return found
            if known != (len(self._tails), self._final):
                continue  # there is more to look for than this look knew of
            left = deadline - backend.now()
            if left <= 0:
                return []
            found = self._look(min(left, _SLICE))
            if found:
                return found
        return []

    def hurry(self) -> None:
        """The next poll looks at every writer, however long it was silent."""
        for tail in self._tails:
            tail.due = min(tail.due, self.store.backend.now())

    def stop(self) -> None:
        """Makes a poll in another thread return soon, and later ones at once; reset starts anew."""
        self._stopped = True
        self.store.backend.interrupt()

    # -- looking ----------------------------------------------------------------------------------------------------

    def _snapshot(self) -> None:
        """What is committed now, for ``follow=False``; of a sealed store only what counts."""
        sealed = self.store.sealed()
        counts: list[int] = []
        while (claim := self.store.claim(len(counts))) is not None:
            self._tail(len(counts), claim)
            counts.append(self.store.count_segments(len(counts), claim))
        self._close(counts if sealed is None else sealed)

    def _close(self, counts: Sequence[int]) -> None:
        """The end is known; a writer that came too late for the seal ends before its first segment."""
        self._final = list(counts)
        for writer, tail in enumerate(self._tails):
            tail.end = counts[writer] if writer < len(counts) else 0

    def _tail(self, writer: int, claim: Mapping[str, Any]) -> _Tail:
        if writer < len(self._tails):
            return self._tails[writer]
        at = max(claim["first"], self._starts.get(writer, (0, 0))[0], self.store.floor(writer))
        tail = _Tail(claim["name"], at, self.store.backend.now())
        if self._final is not None:
            tail.end = self._final[writer] if writer < len(self._final) else 0
        self._tails.append(tail)
        return tail

    def _look(self, timeout: float) -> list[InfoTable]:
        """One wait over everything that may appear, and the heads of what did."""
        store, now = self.store, self.store.backend.now()
        due = [(w, t) for w, t in enumerate(self._tails) if not t.over and t.due <= now]
        keys = [store.segment_key(t.name, t.at) for _, t in due]
        more = self._final is None or len(self._tails) < len(self._final)
        if more:
            keys.append(f"writers/{len(self._tails)}.json")
        if self._final is None:
            keys.append("sealed.json")
        there = store.exists(keys, timeout) if keys else []
        now = store.backend.now()
        for (writer, tail), key, yes in zip(due, keys, there, strict=False):
            if yes:
                tail.heard = now
            elif tail.end is not None or now - tail.heard >= _LONG:
                if not self._skip_reclaimed(writer, tail) and tail.end is not None:
                    raise KeyMissing(
                        f"{store.url}: {key} is missing, though writer {tail.name!r} made {tail.end} segments and "
                        "this one was not reclaimed; restore it."
                    )
            tail.due = now + (0.0 if yes else min((now - tail.heard) * _SILENCE, _SLOWEST))
        if self._final is None and there[-1]:
            self._close(store.sealed() or [])
            for tail in self._tails:
                tail.due = now
        if more and there[len(due)]:
            while (claim := store.claim(len(self._tails))) is not None:
                self._tail(len(self._tails), claim)
        return self._read([(w, t) for (w, t), yes in zip(due, there, strict=False) if yes and not t.over])

    def _skip_reclaimed(self, writer: int, tail: _Tail) -> bool:
        """Go on behind what another consumer had reclaimed; True if there was anything."""
        floor = self.store.floor(writer)
        if floor <= tail.at:
            return False
        tail.first = tail.at = floor
        return True

    def _read(self, ready: Sequence[tuple[int, _Tail]]) -> list[InfoTable]:
        """The next segments of these writers: the one that is there, and more while catching up."""
        wanted = []
        for writer, tail in ready:
            wanted += [(writer, tail.name, tail.at + n) for n in range(self._run(tail))]
        tables: list[InfoTable] = []
        for (writer, _, number), head in zip(wanted, self.store.heads(wanted), strict=True):
            tail = self._tails[writer]
            if number < tail.at or (isinstance(head, KeyMissing) and self._skip_reclaimed(writer, tail)):
                continue
            if isinstance(head, Exception):
                if tables:
                    return tables  # the next look meets the error again
                raise head
            tail.at = number + 1
            tables.append(head[0])
        return tables

    def _run(self, tail: _Tail) -> int:
        """How many segments are there from the next one on, which is; twice as many are looked up each time: of five,
        the second, then two more, then four."""
        most = _HEADS if tail.end is None else min(_HEADS, tail.end - tail.at)
        there, missing = 1, False
        while there < most and not missing:
            numbers = range(tail.at + there, tail.at + min(2 * there, most))
            found = self.store.exists([self.store.segment_key(tail.name, n) for n in numbers])
            missing = False in found
            there += found.index(False) if missing else len(found)
        return there


def check_reachable(store: TrajectoryStore, ledger: Ledger) -> None:
    """Raise StateError if a segment that a run from there must read was reclaimed. A state that has consumed nothing
    starts at what there is."""
    needed, writer = ledger.floors(), 0
    while needed and (claim := store.claim(writer)) is not None:
        floor, first = store.floor(writer), needed.get(writer, 0)
        if floor > first:
            raise StateError(
                f"{store.url}: this state still needs segment {first} of writer {claim['name']!r}, and those below "
                f"{floor} are reclaimed: a later checkpoint was committed, or reclaim='consumed' deleted what was "
                "trained after this one. Load the state that was committed last, or start without one on what is left."
            )
        writer += 1


def stored(store: TrajectoryStore, runs: Runs) -> Iterator[tuple[InfoTable, Array]]:
    """Segments that were read before, each with the rows of a run in it."""
    for writer, segment, first, count, _ in runs:
        claim = store.claim(writer)
        (head,) = store.heads([(writer, claim["name"] if claim else str(writer), segment)])
        if isinstance(head, Exception):
            raise head
        if first + count > len(head[0]):
            raise StateError(f"the state keeps row {first + count - 1} of segment {segment} with {len(head[0])} rows.")
        yield head[0], np.arange(first, first + count)


def _starts(state: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Per writer the segment and row to go on with."""
    try:
        return {int(w): (int(segment), int(item)) for w, segment, item in state["writers"]}
    except (KeyError, TypeError, ValueError) as e:
        raise StateError(f"this is not a state of a TrajectoryStream ({e!r}), found {state!r:.200}.") from e
