"""A state is followed by what was dropped from it, however often it was loaded; another state by nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knit_data.drops import catch_up, links_of, to_bytes
from knit_data.ledger import Entry, Ledger, Progress


def ledger(*entries: Entry) -> Ledger:
    made = Ledger("s", {"quotas": {}}, remember_all=False)
    for entry in entries:
        made.apply(entry)
    return made


def dropped(first: int, count: int) -> Entry:
    """So many segments of one row, and their groups."""
    runs = [(0, n, 0, 1, 1) for n in range(first, first + count)]
    return Entry(
        Progress(1),
        {("a",): 2},
        runs,
        [(n, 0, 3, 0, n) for n in range(first, first + count)],
        dropped={"filtered": count},
    )


START = Entry(Progress(1), {("a",): 2}, [(0, 0, 0, 1, 1)])


def test_the_example_of_the_module() -> None:
    a = ledger(START)
    links = [(a.mark(), dropped(1, 1000))]
    b = ledger(START)
    catch_up(b, links_of(to_bytes(links)))
    assert (b.floors(), b.dropped) == ({0: 1001}, {"filtered": 1000})
    assert [mark for mark, _ in b.links] == [a.mark()]
    catch_up(b, links)  # nothing is known of this one yet
    assert (b.floors(), b.dropped) == ({0: 1001}, {"filtered": 1000})
    links += [(b.mark(), dropped(1001, 20))]
    for state in (a.state(), b.state()):
        loaded = ledger()
        loaded.load(json.loads(json.dumps(state)))
        catch_up(loaded, links_of(to_bytes(links)))
        assert (loaded.floors(), loaded.dropped) == ({0: 1021}, {"filtered": 1020})
    other = ledger(START, dropped(1, 1))
    before = other.state()
    catch_up(other, links)
    catch_up(other, links_of(None))
    assert (other.state(), other.links) == (before, [])


def test_quotas_do_not_change_a_mark_and_a_row_does() -> None:
    one, two = ledger(START), Ledger("s", {"quotas": {"x": 1}}, remember_all=False)
    two.apply(START)
    assert one.mark() == two.mark() != ledger().mark() != ledger(START, dropped(1, 1)).mark()


rows = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 2)), unique=True)


@given(rows, rows)
def test_floors_after_an_entry_are_those_of_a_copy_that_took_it(
    before: list[tuple[int, ...]], then: list[tuple[int, ...]]
) -> None:
    def entry(cells: list[tuple[int, ...]]) -> Entry:
        return Entry(Progress(), {}, [(w, s, i, 1, 3) for w, s, i in cells])

    made = ledger(entry(before))
    state = made.state()
    copy = ledger(entry(before), entry(then))
    assert made.floors_after(entry(then)) == copy.floors()
    assert made.state() == state
    done = {(w, s, i) for w, s, i in [*before, *then]}
    for writer, floor in copy.floors().items():  # the oracle
        assert all((writer, s, i) in done for s in range(floor) for i in range(3))
        assert not all((writer, floor, i) in done for i in range(3))


def test_what_is_damaged_is_no_record() -> None:
    for raw in (b"{", b"[3]", b'[["a", {}]]'):
        with pytest.raises((ValueError, TypeError, KeyError)):
            links_of(raw)
