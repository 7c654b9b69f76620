"""Which items have met their fate, and where the run stands: the whole of a checkpoint.

Every rank holds a copy and applies the same entries, so that all derive the same state without asking each other.
Nothing in it depends on the number of ranks. A state covers consumed mini-batches only; read-ahead is not state.

An item is one row of a segment; its fate is "admitted" or a named drop. Per writer the state is the first segment
with an open item, and what of later segments is done.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from knit_data.errors import StateError
from knit_data.infos import Array, InfoTable

VERSION = 2
Done = tuple[int, set[int] | None]  # rows of a segment, and the items with a fate; None: all
Runs = list[tuple[int, int, int, int, int]]  # writer, segment, first item, count, rows of the segment


@dataclass(frozen=True)
class Progress:
    """The next mini-batch to admit: train batch k, pass e, position j; ``short``: mini-batches of a cut-off batch."""

    train_batch: int = 0
    epoch: int = 0
    position: int = 0
    short: int | None = None


@dataclass(frozen=True)
class Entry:
    """What one admitted mini-batch changes. ``runs``: items that met their fate since the entry before."""

    progress: Progress  # after it
    counts: Mapping[tuple[str, ...], int]  # of the open train batch, after it
    runs: Runs = field(default_factory=list)
    seen: Sequence[tuple[int, int, int, int, int]] = ()  # key, mark, version, writer, segment of groups
    opened: Sequence[Runs] = ()  # groups kept for later passes
    closes: bool = False  # the train batch is over: kept groups are let go
    dropped: Mapping[str, int] = field(default_factory=dict)  # by reason, as Dropped.count counts
    forget_below: int | None = None  # versions that no admission can take any more
    starts: Sequence[tuple[int, int]] = ()  # writers found after their first segments were reclaimed
    accepted: Sequence[int] = ()  # keys of groups that ``keep`` accepted since the entry before, and that still wait

    def to_json(self) -> dict[str, Any]:
        p = self.progress
        return {
            "progress": [p.train_batch, p.epoch, p.position, p.short],
            "counts": [[list(c), n] for c, n in self.counts.items()],
            "runs": _pack(self.runs),
            "seen": _pack(self.seen),
            "opened": [_pack([run for runs in self.opened for run in runs]), [len(runs) for runs in self.opened]],
            "closes": self.closes,
            "dropped": dict(self.dropped),
            "forget_below": self.forget_below,
            "starts": [list(s) for s in self.starts],
            "accepted": _pack_keys(self.accepted),
        }

    @cached_property
    def text(self) -> str:
        """The same in one line, for every rank."""
        return json.dumps(self.to_json())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        opened, lengths = iter(_unpack(data["opened"][0])), data["opened"][1]
        return cls(
            Progress(*data["progress"]),
            {tuple(c): n for c, n in data["counts"]},
            _unpack(data["runs"]),
            _unpack(data["seen"]),
            [list(islice(opened, n)) for n in lengths],
            data["closes"],
            data["dropped"],
            data["forget_below"],
            [(writer, first) for writer, first in data["starts"]],
            _unpack_keys(data["accepted"]),
        )


class Ledger:
    """The state of a run; ``apply`` entries in order."""

    def __init__(self, store_id: str, terms: Mapping[str, Any], remember_all: bool) -> None:
        self.store_id, self.terms, self.remember_all = store_id, dict(terms), remember_all
        self.progress = Progress()
        self.counts: dict[tuple[str, ...], int] = {}
        self.opened: list[Runs] = []
        self.dropped: dict[str, int] = {}
        self.seen: dict[int, tuple[int, int, int, int]] = {}
        self.hashes: set[int] = set()  # groups remembered by name only
        self.accepted: set[int] = set()  # groups that ``keep`` accepted and that have no fate yet
        self._next: dict[int, int] = {}
        self._done: dict[int, dict[int, Done]] = {}  # writer -> segment, from _next on -> what of it is done

    # -- asking -----------------------------------------------------------------------------------------------------

    def cursors(self) -> dict[int, int]:
        """Per writer the first segment with an item that has no fate yet."""
        return dict(self._next)

    def floors(self) -> dict[int, int]:
        """Per writer the first segment that a run which stands here may still read: one with a row without a fate, or
        with a group of the open train batch, for its later passes."""
        floors = dict(self._next)
        for runs in self.opened:
            for writer, segment, *_ in runs:
                floors[writer] = min(floors.get(writer, 0), segment)
        return floors

    def floors_after(self, entry: Entry) -> dict[int, int]:
        """The floors that this entry would leave; nothing changes."""
        then = Ledger(self.store_id, {}, self.remember_all)
        then.opened, then._next = self.opened, dict(self._next)
        for writer, segments in self._done.items():
            then._done[writer] = {n: (rows, None if i is None else set(i)) for n, (rows, i) in segments.items()}
        then.apply(entry)
        return then.floors()

    def open_rows(self, table: InfoTable) -> Array:
        """Rows of one segment's table that have no fate yet."""
        writer, segment, _ = table[0].address
        items = table.columns["item"]
        if segment < self._next.get(writer, 0):
            return np.zeros(0, np.int64)
        _, done = self._done.get(writer, {}).get(segment, (0, set()))
        if done is None:
            return np.zeros(0, np.int64)
        return np.flatnonzero([i not in done for i in items.tolist()]) if done else np.arange(len(items))

    # -- changing ---------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        for writer, first in entry.starts:
            self._advance(writer, first)
        for run in entry.runs:
            self._finish(*run)
        for writer in {run[0] for run in entry.runs}:
            self._advance(writer, 0)
        self.accepted |= set(entry.accepted)
        for key, *rest in entry.seen:
            self.accepted.discard(key)
            if self.remember_all:
                self.hashes.add(key)
            else:
                self.seen[key] = (rest[0], rest[1], rest[2], rest[3])
        if entry.forget_below is not None:
            self.seen = {k: v for k, v in self.seen.items() if v[1] >= entry.forget_below}
        self.opened = [] if entry.closes else [*self.opened, *(list(r) for r in entry.opened)]
        for reason, groups in entry.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + groups
        self.progress, self.counts = entry.progress, dict(entry.counts)

    def _finish(self, writer: int, segment: int, first: int, count: int, rows: int) -> None:
        if segment >= self._next.get(writer, 0):
            segments = self._done.setdefault(writer, {})
            done = None if count == rows else segments.get(segment, (rows, set()))[1]
            if done is not None:
                done.update(range(first, first + count))
            segments[segment] = rows, None if done is None or len(done) == rows else done

    def _advance(self, writer: int, first: int) -> None:
        """The cursor: past what is done, and at least ``first``."""
        at, segments = self._next.get(writer, 0), self._done.get(writer, {})
        if first > at:
            at = first
            self._done[writer] = segments = {n: v for n, v in segments.items() if n >= at}
        while at in segments and segments[at][1] is None:
            del segments[at]
            at += 1
        self._next[writer] = at

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """A fresh JSON-able value; equal on all ranks."""
        p = self.progress
        writers = []
        for writer in sorted(self._next):
            later = [
                [segment, rows, None if items is None else sorted(items)]
                for segment, (rows, items) in sorted(self._done.get(writer, {}).items())
            ]
            writers.append([writer, self._next[writer], later])
        return {
            "version": VERSION,
            "store": self.store_id,
            "terms": json.loads(json.dumps(self.terms)),
            "progress": [p.train_batch, p.epoch, p.position, p.short],
            "counts": [[list(c), n] for c, n in sorted(self.counts.items())],
            "writers": writers,
            "opened": [list(map(list, runs)) for runs in self.opened],
            "dropped": dict(sorted(self.dropped.items())),
            "seen": _pack([(k, *v) for k, v in sorted(self.seen.items())]),
            "hashes": _pack_keys(sorted(self.hashes)),
            "accepted": _pack_keys(sorted(self.accepted)),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state; raises StateError, and changes nothing, if it is not of this store and these terms."""
        try:
            version = state["version"]
            if version != VERSION:
                raise StateError(f"state version {version!r}, this release reads {VERSION}: use the other.")
            if state["store"] != self.store_id:
                raise StateError(
                    f"this state belongs to store {state['store']}, the sampler reads store {self.store_id}; open the "
                    "store that the run was trained from."
                )
            k, e, j, short = state["progress"]
            progress = Progress(_count(k), _count(e), _count(j), None if short is None else _count(short))
            self._check_terms(state["terms"], progress)
            counts = {tuple(map(_text, c)): _count(n) for c, n in state["counts"]}
            opened = [[_run(r) for r in runs] for runs in state["opened"]]
            dropped = {_text(reason): _count(n) for reason, n in state["dropped"].items()}
            seen = {k: (mark, v, w, s) for k, mark, v, w, s in _unpack(state["seen"])}
            hashes, accepted = set(_unpack_keys(state["hashes"])), set(_unpack_keys(state["accepted"]))
            cursors = {_count(writer): _count(at) for writer, at, _ in state["writers"]}
            done: dict[int, dict[int, Done]] = {
                writer: {_count(s): (_count(rows), None if i is None else set(map(_count, i))) for s, rows, i in later}
                for writer, _, later in state["writers"]
            }
        except StateError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise StateError(
                f"this is not a state of this loader ({error!r}); found {found}. Give what state_dict() returned."
            ) from error
        self.progress, self.counts, self.opened, self.dropped = progress, counts, opened, dropped
        self.seen, self.hashes, self.accepted = seen, hashes, accepted
        self._next, self._done = cursors, done

    def _check_terms(self, then: Mapping[str, Any], progress: Progress) -> None:
        """Sizes, passes and seed must be those of the run; quotas may change between train batches."""
        now = json.loads(json.dumps(self.terms))
        open_batch = progress.epoch or progress.position
        for name in sorted(then.keys() | now.keys()):
            if then.get(name) == now.get(name) or (name == "quotas" and not open_batch):
                continue
            raise StateError(
                f"the state was saved with {name}={then.get(name)!r}, this sampler has {now.get(name)!r}; resume with "
                "the same value" + (" until the train batch is over." if name == "quotas" else ", or start anew.")
            )


def runs_of(tables: Iterable[InfoTable]) -> Runs:
    """The rows' addresses, consecutive items as one run."""
    out: Runs = []
    first, following = 0, (-1, -1, -1)
    for table in tables:
        columns = table.columns
        cells = zip(*(columns[c].tolist() for c in ("writer", "segment", "item", "segment_rows")), strict=True)
        for writer, segment, item, rows in cells:
            if (writer, segment, item) == following:
                out[-1] = writer, segment, first, item + 1 - first, rows
            else:
                first = item
                out.append((writer, segment, item, 1, rows))
            following = writer, segment, item + 1
    return out


def _run(values: Sequence[int]) -> tuple[int, int, int, int, int]:
    writer, segment, first, count, rows = map(_count, values)
    return writer, segment, first, count, rows


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} where a count belongs")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where a name belongs")
    return value


def _blob(text: str) -> bytes:
    return base64.b64decode(_text(text), validate=True)


def _pack_keys(keys: Sequence[int]) -> str:
    return base64.b64encode(np.array(keys, np.uint64).tobytes()).decode()


def _unpack_keys(text: str) -> list[int]:
    return list(map(int, np.frombuffer(_blob(text), np.uint64)))


def _pack(rows: Sequence[tuple[int, int, int, int, int]]) -> str:
    return base64.b64encode(np.array(rows, np.uint64).tobytes()).decode()


def _unpack(text: str) -> list[tuple[int, int, int, int, int]]:
    columns = np.frombuffer(_blob(text), np.uint64).reshape(-1, 5).T.tolist()
    return list(zip(*columns, strict=True))
