"""The state of a run against a set of items, and what a ledger refuses to load."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import group, rows

from knit_data.errors import StateError
from knit_data.infos import InfoTable
from knit_data.ledger import Entry, Ledger, Progress, runs_of

TERMS: dict[str, Any] = {"train_batch_size": 4, "mini_batch_size": 2, "seed": 0, "quotas": {"math": "exactly 4"}}
WORD = st.integers(0, 2**64 - 1)


def ledger(remember_all: bool = False, **terms: Any) -> Ledger:
    return Ledger("store-1", TERMS | terms, remember_all)


def through_json(entry: Entry) -> Entry:
    return Entry.from_json(json.loads(json.dumps(entry.to_json())))


@st.composite
def runs(draw: st.DrawFn, shapes: list[list[int]]) -> list[tuple[int, int, int, int, int]]:
    """Some of the items of a store, ``shapes[writer][segment]`` rows."""
    out = []
    places = [(w, s, n) for w, sizes in enumerate(shapes) for s, n in enumerate(sizes)]
    for writer, segment, n in draw(st.lists(st.sampled_from(places), max_size=6)):
        first = draw(st.integers(0, n - 1))
        out.append((writer, segment, first, draw(st.integers(1, n - first)), n))
    return out


SHAPES = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=3)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[int]], list[Entry]]:
    shapes = draw(SHAPES)
    entries = [
        Entry(
            Progress(draw(st.integers(0, 9)), draw(st.integers(0, 2)), n, draw(st.sampled_from([None, 1, 3]))),
            draw(st.dictionaries(st.sampled_from([("math",), ("code",), ()]), st.integers(1, 9), max_size=2)),
            draw(runs(shapes)),
            draw(st.lists(st.tuples(WORD, WORD, st.integers(0, 50), st.integers(0, 3), st.integers(0, 9)), max_size=3)),
            draw(st.lists(runs(shapes), max_size=2)),
            draw(st.booleans()),
            draw(st.dictionaries(st.sampled_from(["stale", "late"]), st.integers(1, 5))),
            draw(st.one_of(st.none(), st.integers(-5, 50))),
            draw(st.lists(st.tuples(st.integers(0, len(shapes) - 1), st.integers(0, 4)), max_size=1)),
            draw(st.lists(WORD, max_size=3)),
        )
        for n in range(draw(st.integers(0, 6)))
    ]
    return shapes, entries


class Items:
    """What a ledger should know, as plain sets."""

    def __init__(self, shapes: list[list[int]]) -> None:
        self.open = {(w, s, i) for w, sizes in enumerate(shapes) for s, n in enumerate(sizes) for i in range(n)}
        self.shapes = shapes

    def apply(self, entry: Entry) -> None:
        for writer, first in entry.starts:
            self.open -= {(w, s, i) for w, s, i in self.open if w == writer and s < first}
        for writer, segment, first, count, _ in entry.runs:
            self.open -= {(writer, segment, i) for i in range(first, first + count)}

    def of(self, writer: int, segment: int) -> list[int]:
        return sorted(i for w, s, i in self.open if (w, s) == (writer, segment))

    def cursor(self, writer: int, starts: int) -> int:
        mine = [s for w, s, _ in self.open if w == writer]
        return min(mine) if mine else max(len(self.shapes[writer]), starts)


@cache
def table_of(writer: int, segment: int, n: int) -> InfoTable:
    return rows(group("g", n, lengths=[2] * n), writer, segment)


@given(histories(), st.booleans())
def test_cursors_and_open_rows_against_a_set_of_items(history: tuple[list[list[int]], list[Entry]], reload: bool):
    shapes, entries = history
    made, items, starts = ledger(), Items(shapes), dict.fromkeys(range(len(shapes)), 0)
    for entry in entries:
        made.apply(entry)
        items.apply(entry)
        for writer, first in entry.starts:
            starts[writer] = max(starts[writer], first)
        if reload:
            state = json.loads(json.dumps(made.state()))
            made = ledger()
            made.load(state)
        for writer, sizes in enumerate(shapes):
            if writer in made.cursors():
                assert made.cursors()[writer] == items.cursor(writer, starts[writer])
            else:
                assert len(items.of(writer, 0)) == sizes[0], "a writer of which nothing is known starts at 0"
            for segment, n in enumerate(sizes):
                assert made.open_rows(table_of(writer, segment, n)).tolist() == items.of(writer, segment)


@given(histories(), st.booleans())
def test_replicas_agree_and_a_state_is_worth_the_ledger(history: Any, remember_all: bool) -> None:
    _, entries = history
    first, replica, resumed = ledger(remember_all), ledger(remember_all), ledger(remember_all)
    for entry in entries:
        first.apply(entry)
        replica.apply(through_json(entry))
        resumed.apply(through_json(entry))
        state = first.state()
        assert state == replica.state() == resumed.state()
        text = json.dumps(state)
        resumed = ledger(remember_all)
        resumed.load(json.loads(text))
        assert resumed.state() == state and json.dumps(resumed.state()) == text
        assert (resumed.progress, resumed.counts, resumed.opened) == (first.progress, first.counts, first.opened)
        assert (resumed.seen, resumed.hashes, resumed.cursors()) == (first.seen, first.hashes, first.cursors())
        assert resumed.accepted == first.accepted


@pytest.mark.parametrize("remember_all", [True, False])
def test_accepted_groups_are_remembered_until_they_meet_their_fate(remember_all: bool) -> None:
    made = ledger(remember_all)
    made.apply(through_json(Entry(Progress(), {}, accepted=[7, 2**64 - 1, 9])))
    assert made.accepted == {7, 9, 2**64 - 1}
    assert len(made.state()["accepted"]) == 32, "8 bytes each, in base64"
    made.apply(Entry(Progress(), {}, seen=[(9, 0, 3, 0, 0), (8, 0, 3, 0, 0)], accepted=[8, 11]))
    assert made.accepted == {7, 11, 2**64 - 1}, "a fate in the same entry counts"
    loaded = ledger(remember_all)
    loaded.load(json.loads(json.dumps(made.state())))
    assert loaded.accepted == made.accepted


def test_a_state_is_fresh() -> None:
    made = ledger()
    made.apply(
        Entry(Progress(0, 0, 1), {("a",): 1}, [(0, 1, 0, 1, 2)], opened=[[(0, 1, 0, 1, 2)]], dropped={"late": 1})
    )
    state = made.state()
    kept = copy.deepcopy(state)
    for value in state.values():
        if isinstance(value, (list, dict)):
            value.clear()
    assert made.state() == kept
    made.apply(Entry(Progress(1), {}, [(0, 0, 0, 1, 1)]))
    other = ledger()
    other.load(kept)
    assert other.state() == kept


def test_what_stays_of_later_segments() -> None:
    made = ledger()
    made.apply(Entry(Progress(), {}, [(0, 2, 0, 3, 3), (0, 1, 1, 1, 2)]))
    assert made.cursors() == {0: 0} and made.state()["writers"] == [[0, 0, [[1, 2, [1]], [2, 3, None]]]]
    made.apply(Entry(Progress(), {}, [(0, 0, 0, 1, 1)]))
    assert made.cursors() == {0: 1} and made.state()["writers"] == [[0, 1, [[1, 2, [1]], [2, 3, None]]]]
    made.apply(Entry(Progress(), {}, [(0, 1, 0, 1, 2)]))
    assert made.cursors() == {0: 3} and made.state()["writers"] == [[0, 3, []]]
    made.apply(Entry(Progress(), {}, [(0, 1, 0, 2, 2)]))
    assert made.state()["writers"] == [[0, 3, []]], "what is done is not opened again"


def test_a_writer_whose_first_segments_are_gone() -> None:
    made = ledger()
    made.apply(Entry(Progress(), {}, [(0, 4, 0, 2, 2), (0, 6, 0, 1, 2)], starts=[(0, 4), (1, 3)]))
    assert made.cursors() == {0: 5, 1: 3}
    made.apply(Entry(Progress(), {}, starts=[(0, 6), (1, 2)]))
    assert made.cursors() == {0: 6, 1: 3} and made.state()["writers"] == [[0, 6, [[6, 2, [0]]]], [1, 3, []]]


def test_runs_of() -> None:
    a, b = rows(group("a", 4), 1, 2), rows(group("b", 2), 1, 3)
    assert runs_of([a, b]) == [(1, 2, 0, 4, 4), (1, 3, 0, 2, 2)]
    assert runs_of([a.take(np.array([0, 1])), a.take(np.array([2]))]) == [(1, 2, 0, 3, 4)]
    assert runs_of([a.take(np.array([3, 0, 1]))]) == [(1, 2, 3, 1, 4), (1, 2, 0, 2, 4)]
    assert runs_of([a.take(np.array([2, 0]))]) == [(1, 2, 2, 1, 4), (1, 2, 0, 1, 4)]
    assert runs_of([]) == []


def test_groups_are_remembered_for_the_staleness_window() -> None:
    made = ledger()
    made.apply(Entry(Progress(), {}, seen=[(7, 70, 3, 0, 1), (8, 80, 5, 1, 2)]))
    assert made.seen == {7: (70, 3, 0, 1), 8: (80, 5, 1, 2)} and not made.hashes
    made.apply(Entry(Progress(), {}, seen=[(9, 90, 4, 0, 0)], forget_below=4))
    assert made.seen == {8: (80, 5, 1, 2), 9: (90, 4, 0, 0)}
    made = ledger(remember_all=True)
    made.apply(Entry(Progress(), {}, seen=[(2**64 - 1, 70, 3, 0, 1)], forget_below=4))
    assert made.hashes == {2**64 - 1} and not made.seen


def test_opened_groups_are_kept_until_their_train_batch_closes() -> None:
    made, one, two = ledger(), [(0, 0, 0, 2, 2)], [(1, 0, 0, 1, 2), (0, 4, 1, 1, 2)]
    made.apply(Entry(Progress(0, 0, 1), {}, opened=[one]))
    made.apply(Entry(Progress(0, 1, 0), {}, opened=[two]))
    assert made.opened == [one, two]
    made.apply(Entry(Progress(1), {}, closes=True))
    assert made.opened == []


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train_batch_size", "mini_batch_size", "seed"])
def test_other_terms_are_refused_by_name(name: str) -> None:
    state = ledger().state()
    with pytest.raises(StateError, match=f"saved with {name}={TERMS[name]}, this sampler has 99; .*start anew"):
        ledger(**{name: 99}).load(state)
    with pytest.raises(StateError, match="saved with epochs=None, this sampler has 2"):
        ledger(epochs=2).load(state)


def test_quotas_may_change_between_train_batches_only() -> None:
    other = {"quotas": {"math": "exactly 2", "code": "exactly 2"}}
    for progress, counts in ((Progress(0, 0, 1), {("math",): 2}), (Progress(0, 1, 0), {("math",): 4})):
        made = ledger()
        made.apply(Entry(progress, counts))
        with pytest.raises(
            StateError, match=r"saved with quotas=.*exactly 4.*, this sampler has .*code.*until the train"
        ):
            ledger(**other).load(made.state())
    made = ledger()
    made.apply(Entry(Progress(3), {}))
    changed = ledger(**other)
    changed.load(made.state())
    assert changed.progress == Progress(3) and changed.state()["terms"]["quotas"] == other["quotas"]


def test_another_store_and_another_version_are_refused() -> None:
    state = ledger().state()
    with pytest.raises(StateError, match="belongs to store store-1, the sampler reads store store-2"):
        Ledger("store-2", TERMS, False).load(state)
    for version in (1, 3, "2"):
        with pytest.raises(StateError, match=f"state version {version!r}, this release reads 2"):
            ledger().load(state | {"version": version})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def worth_keeping() -> Ledger:
    made = ledger()
    seen = [(7, 70, 3, 0, 1)]
    made.apply(
        Entry(
            *(Progress(1, 1, 1), {("math",): 2}, [(0, 1, 0, 1, 2)], seen, [[(0, 1, 0, 1, 2)]]),
            dropped={"late": 1},
            accepted=[8, 9],
        )
    )
    return made


@given(JSON)
def test_garbage_raises_state_error_only(garbage: Any) -> None:
    with pytest.raises(StateError):
        ledger().load(garbage)


@given(st.sampled_from(sorted(worth_keeping().state())), JSON)
def test_garbage_in_one_place_raises_or_loads_a_sound_state(key: str, garbage: Any) -> None:
    made = ledger()
    try:
        made.load(worth_keeping().state() | {key: garbage})
    except StateError:
        assert made.state() == ledger().state(), "a refused state changes nothing"
    else:
        again = ledger()
        again.load(json.loads(json.dumps(made.state())))
        assert again.state() == made.state()


@pytest.mark.parametrize("key", sorted(ledger().state()))
def test_a_missing_part_is_named(key: str) -> None:
    state = worth_keeping().state()
    del state[key]
    with pytest.raises(StateError, match=f"{key}.*found .*Give what state_dict"):
        ledger().load(state)
