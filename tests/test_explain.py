"""Why the trainer waits, in one sentence."""

from __future__ import annotations

import pickle
import re

from hypothesis import given
from hypothesis import strategies as st
from test_admission import NAMES, arrivals, filled, specs, table_of, waiting

from knit_data.admission import Admission, Sizes
from knit_data.explain import Around, explain
from knit_data.groups import Group
from knit_data.quotas import Quotas, at_most

MATH, CODE, WEB = ("math",), ("code",), ("web",)


def short_of_code() -> Admission:
    quotas = Quotas({"source": {"math": 4, "code": (2, 3), "web": at_most(1)}})
    made = Admission(Sizes(8, 4), quotas, None)
    for i in range(6):
        made.offer(waiting(f"m{i}", "math", 0, 0, i))
    made.commit(made.choose() or [])
    made.offer(waiting("c", "code", 0, 1, 0))
    assert made.choose() is None
    return made


def test_what_is_short_is_named_first() -> None:
    around = Around({CODE: 3, MATH: 1}, dropped={"stale": 2, "late": 1})
    assert explain(short_of_code(), around) == (
        "train batch 0, mini-batch 2 of 2 waits for 4 groups that fit, short of 1 code: "
        "code (2 to 3: 0 in, 1 complete, 3 incomplete); "
        "math (exactly 4: 4 in, 2 complete, 1 incomplete, no seat left); "
        "web (at most 1: 0 in, 0 complete, 0 incomplete); "
        "2 free of 4 seats left; dropped 1 late, 2 stale; decided by counting."
    )


def test_what_is_in_flight_and_what_was_dropped_is_told_by_value() -> None:
    around = Around(
        in_flight={CODE: 2},
        held={CODE: 1, WEB: 2},
        gone={(CODE, "stale"): 3, (CODE, "filtered"): 1, (MATH, "stale"): 2, (("tool",), "invalid"): 9},
    )
    text = explain(short_of_code(), around)
    assert (
        "code (2 to 3: 0 in, 1 complete, 0 incomplete, 2 in flight, 1 dropped as filtered, 3 dropped as stale);" in text
    )
    assert "math (exactly 4: 4 in, 2 complete, 0 incomplete, 0 in flight, 2 dropped as stale, no seat left);" in text
    assert "; seats are kept for 1 code, 2 web in flight, which the next train batch would find too old;" in text
    assert "tool" not in text and "RolloutPacer" not in text
    assert "'wait' keeps no seats: it needs a RolloutPacer;" in explain(short_of_code(), Around(unpaced=True))


def test_without_quotas() -> None:
    around = Around({(): 2}, {(): 3}, {(): 1}, {((), "stale"): 4})
    assert explain(filled(1, sizes=(6, 2)), around) == (
        "train batch 0, mini-batch 1 of 3 waits for 2 groups that fit, short of 1 more: 1 complete, 2 incomplete, "
        "3 in flight, 4 dropped as stale; 6 free of 6 seats left; seats are kept for 1 in flight, which the next "
        "train batch would find too old; decided by counting."
    )


def test_when_nothing_is_waited_for() -> None:
    made = filled(2, epochs=3, sizes=(2, 2))
    made.commit(made.choose() or [])
    assert explain(made, Around()) == "train batch 0, pass 2: trains groups that are there already."
    assert explain(made, Around(left_over=5, ended=True)) == "the stream has ended: 5 groups are left over."


@given(st.data())
def test_counts(data: st.DataObject) -> None:
    spec = data.draw(specs(stale=False, epochs=1))
    made = spec.admission()
    for g in data.draw(arrivals(spec, 10)):
        made.offer(g)
    while (chosen := made.choose()) is not None:
        made.commit(chosen)
    text = explain(made, Around())
    assert text.endswith(".") and "\n" not in text and text.count(". ") == 0
    order = re.findall(r"(\w+) \((?:exactly|at|\d)", text)
    shorts: list[str] = []
    bounds = {line.label: line.bounds for line in made.seats.lines()}
    for value, (low, _) in zip(NAMES, spec.bounds, strict=False):
        complete = sum(g.combination == (value,) for g in made.waiting.values())
        taken = made.seats.counts[(value,)]
        assert f"{value} ({bounds[value]}: {taken} in, {complete} complete" in text
        short = re.search(rf"short of [^:]*?(\d+) {value}\b", text)
        assert (int(short[1]) if short else 0) == max(0, low - taken - complete)
        shorts += [value] if short else []
    assert order[: len(shorts)] == shorts and sorted(order) == sorted(NAMES[: len(spec.bounds)])


def test_what_is_short_is_named_where_attributes_combine() -> None:
    """Each quota has enough for itself; only the combination says what is missing."""
    quotas = Quotas({"source": {"math": 2, "code": 2}, "level": {"hard": 2, "easy": 2}})
    made: Admission[Group] = Admission(Sizes(4, 2), quotas, None)
    for i, pair in enumerate([("math", "hard")] * 2 + [("math", "easy")] * 5 + [("code", "hard")] * 5):
        made.offer(Group(f"g{i}", table_of(f"g{i}", 0, i), pair, 0, 1))
        if i == 1:
            made.commit(made.choose() or [])
    assert made.choose() is None
    assert "waits for 2 groups that fit, short of 2 code/easy: " in explain(made, Around())


def test_explaining_moves_nothing() -> None:
    """Another thread asks: what decides admissions is left as it is, also where deciding moves a flow."""
    support = [("a", "x"), ("a", "y"), ("b", "y"), ("b", "z"), ("c", "z"), ("c", "x")]
    quotas = Quotas({"s": dict.fromkeys("abc", 4), "l": dict.fromkeys("xyz", 4)}, support=support)
    made: Admission[Group] = Admission(Sizes(12, 2), quotas, None)
    for i, pair in enumerate([("a", "x"), ("c", "x"), ("b", "z")] * 2):
        made.offer(Group(f"g{i}", table_of(f"g{i}", 0, i), pair, 0, 1))
    before = pickle.dumps(made.seats)
    explain(made, Around())
    assert pickle.dumps(made.seats) == before
