"""The seats of a train batch against the enumeration of all ways to fill it, for every structure of quotas."""

from __future__ import annotations

import doctest
import pickle
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import completable
from mixtures import (
    SEEDED,
    SMALL,
    Counts,
    Spec,
    any_specs,
    crossed_specs,
    free_specs,
    mixed_specs,
    more,
    nested_specs,
    window_specs,
)

import knit_data as kd
from knit_data import seats as seats_module
from knit_data.errors import InvalidArgument
from knit_data.quotas import Bounds, Combination, Quotas
from knit_data.seats import Line, QuotaSeats
from knit_data.seats.structure import blocks_of

# -- the seats are exact ----------------------------------------------------------------------------------------------


def counts_of(seats: QuotaSeats, spec: Spec) -> Counts:
    return tuple(seats.counts.get(key, 0) for key in spec.keys)


def check(seats: QuotaSeats, spec: Spec, alive: set[Counts]) -> list[int]:
    """Compare one state with the enumeration; returns what may come next."""
    counts = counts_of(seats, spec)
    assert seats.left == spec.size - sum(counts)
    able = [i for i, key in enumerate(spec.keys) if seats.admissible(key)]
    assert able == [i for i in range(len(counts)) if more(counts, i) in alive], (spec, counts)
    assert bool(able) == bool(seats.left), f"a dead end at {counts}"
    if not seats.left:
        assert all(low <= spec.of(t, counts) <= high for t, (low, high) in spec.terms().items())
    return able


def walk(spec: Spec, rng: Any) -> None:
    alive, seats, done = spec.alive(), spec.seats(), []
    while able := check(seats, spec, alive):
        i = rng.choice(able)
        twin = seats.copy()
        twin.admit(spec.keys[i])
        assert counts_of(twin, spec) == more(counts_of(seats, spec), i)
        seats.admit(spec.keys[i])
        done.append(i)
        if not rng.randrange(3):  # back, and on again
            seats.release(spec.keys[done.pop()])
            check(seats, spec, alive)
    while done and rng.randrange(4):
        seats.release(spec.keys[done.pop()])
        check(seats, spec, alive)


@pytest.mark.parametrize("specs", [free_specs, nested_specs, crossed_specs, mixed_specs, window_specs])
@settings(SMALL, max_examples=240)
@given(data=st.data(), rng=SEEDED)
def test_admissible_is_exact_and_never_runs_into_a_dead_end(specs: Any, data: Any, rng: Any) -> None:
    spec = data.draw(specs(data.draw(st.booleans())))
    if (0,) * len(spec.keys) in spec.alive():
        walk(spec, rng)
    else:
        with pytest.raises(InvalidArgument, match="quotas"):
            spec.seats()


@pytest.mark.parametrize(("size", "values"), [(1, 1), (3, 1), (2, 2), (4, 2), (2, 3), (3, 3)])
def test_the_counting_test_is_exact_in_every_state_that_can_be_reached(size: int, values: int) -> None:
    one = [(low, high) for low in range(size + 1) for high in range(low, size + 1)]
    names = ("a", "b", "c")[:values]
    for bounds in product(one, repeat=values):
        spec = Spec((tuple(zip(names, bounds, strict=True)),), tuple((n,) for n in names), size, explicit=False)
        if not completable([0] * values, bounds, size):
            with pytest.raises(InvalidArgument, match=r"quotas need at least|quotas allow at most"):
                spec.seats()
            continue
        known, todo = {(0,) * values}, [spec.seats()]
        while todo:
            seats = todo.pop()
            counts = counts_of(seats, spec)
            able = [i for i, n in enumerate(names) if seats.admissible((n,))]
            room = seats.left > 0
            assert able == [
                i for i in range(values) if room and completable(more(counts, i), bounds, seats.left - 1)
            ], (spec, counts)
            assert bool(able) == room, f"a dead end at {counts} of {spec}"
            for i in able:
                if more(counts, i) not in known:
                    known.add(more(counts, i))
                    todo.append(seats.copy())
                    todo[-1].admit((names[i],))


def test_two_crossed_attributes_exhaustively() -> None:
    """All exact margins and one missing combination, of 3 groups."""
    keys = (("m", "h"), ("m", "e"), ("c", "e"))
    for m, h, width in product(range(4), range(4), range(2)):
        values = tuple(
            ((v, (n, min(3, n + width))), (w, (max(0, 3 - n - width), 3 - n)))
            for (v, w), n in ((("m", "c"), m), (("h", "e"), h))
        )
        spec = Spec(values, keys, 3)
        alive = spec.alive()
        if (0, 0, 0) not in alive:
            with pytest.raises(InvalidArgument, match="exclude each other"):
                spec.seats()
            continue
        todo = [spec.seats()]
        while todo:
            seats = todo.pop()
            for i in check(seats, spec, alive):
                todo.append(seats.copy())
                todo[-1].admit(keys[i])


# -- what is short, and what would fill the batch ---------------------------------------------------------------------


def fewest(spec: Spec, alive: set[Counts], counts: Counts) -> int:
    """Of all that closes the minima and leads to a full batch."""
    lows = {t: low for t, (low, _) in spec.terms().items()}
    return min(
        sum(after) - sum(counts)
        for after in alive
        if all(a >= b for a, b in zip(after, counts, strict=True))
        and all(spec.of(t, after) >= low for t, low in lows.items())
    )


def added(spec: Spec, counts: Counts, some: dict[Combination, int]) -> Counts:
    assert set(some) <= set(spec.keys) and all(n > 0 for n in some.values())
    return tuple(n + some.get(key, 0) for key, n in zip(spec.keys, counts, strict=True))


@settings(SMALL, max_examples=240)
@given(data=st.data(), rng=SEEDED)
def test_what_is_shown_is_true_in_every_state(data: Any, rng: Any) -> None:
    spec = data.draw(any_specs(data.draw(st.booleans())))
    alive = spec.alive()
    if (0,) * len(spec.keys) not in alive:
        return
    seats = spec.seats()
    while True:
        counts = counts_of(seats, spec)
        short, rest = seats.deficits(), seats.completion()
        closed, full = added(spec, counts, short), added(spec, counts, rest)
        assert sum(full) == spec.size and full in alive, (counts, rest)
        assert all(spec.of(t, closed) >= low for t, (low, _) in spec.terms().items()), (counts, short)
        assert seats.free() == seats.left - sum(short.values()) >= 0
        if spec.window is None:
            assert closed in alive, f"{short} leads nowhere from {counts}"
            least = fewest(spec, alive, counts)
            assert sum(short.values()) == least or ("flow" in seats.solver and sum(short.values()) > least)
        else:
            need = {t: max(0, low - spec.of(t, counts)) for t, (low, _) in spec.terms().items()}
            per = [sum(n for (i, _), n in need.items() if i == a) for a in range(len(spec.values))]
            assert sum(short.values()) == max(per)
        again = spec.seats({k: n for k, n in seats.counts.items() if n})
        if spec.window is None or spec.mini is None or sum(counts) % spec.mini == 0:
            assert (again.deficits(), again.completion(), again.lines()) == (short, rest, seats.lines())
            check(again, spec, alive)
        able = [key for key in spec.keys if seats.admissible(key)]
        lines = {line.label: (line.bounds, line.taken, line.left) for line in seats.lines()}
        for (i, name), (low, high) in spec.terms().items():
            label = "/".join(name) if i < 0 or len(spec.values) == 1 else f"{'abcd'[i]}={name[0]}"
            fits = any((key if i < 0 else (key[i],)) == name for key in able)
            assert lines[label] == (Bounds(low, high), spec.of((i, name), counts), fits)
        if not able:
            return
        seats.admit(rng.choice(able))


def test_deficits_of_a_flow_are_nearly_always_the_fewest() -> None:
    """The exact minimum is a flow only where no bounds of combinations and no chains are involved."""
    rng, states, over = random.Random(0), 0, 0
    for _ in range(300):
        every = [(f"r{i}", f"c{j}") for i in range(rng.randint(2, 4)) for j in range(rng.randint(2, 3))]
        keys = rng.sample(every, min(len(every), rng.randint(4, 8)))
        made = rng.choices(keys, k=rng.randint(3, 5))
        values = tuple(
            tuple((v, (n - (n > 0 and rng.random() < 0.3), n + rng.randint(0, 1))) for v, n in counted.items())
            for counted in (
                {v: sum(c[i] == v for c in made) for v in dict.fromkeys(k[i] for k in keys)} for i in (0, 1)
            )
        )
        spec = Spec(values, tuple(keys), len(made))
        alive, seats = spec.alive(), spec.seats()
        while able := [key for key in keys if seats.admissible(key)]:
            more_than_least = sum(seats.deficits().values()) - fewest(spec, alive, counts_of(seats, spec))
            assert more_than_least >= 0
            states, over = states + 1, over + (more_than_least > 0)
            seats.admit(rng.choice(able))
    assert states > 900 and over <= 3, (over, states)


def test_a_completion_spreads_the_free_seats() -> None:
    one = QuotaSeats(Quotas({"s": {"math": (2, 4), "code": (4, 8), "web": (0, 4)}}), 11)
    assert one.completion() == {("math",): 3, ("code",): 6, ("web",): 2}, "5 free seats by 2, 4, 4: 1, 2, 2"
    two = QuotaSeats(Quotas({"s": {"math": 0.5, "code": 0.5}, "d": {"hard": 0.25, "easy": 0.75}}), 16)
    assert two.completion() == {("math", "hard"): 2, ("math", "easy"): 6, ("code", "hard"): 2, ("code", "easy"): 6}
    support = [("math", "hard"), ("math", "easy"), ("code", "easy")]
    tied = QuotaSeats(Quotas({"s": {"math": (0, 16), "code": (0, 16)}, "d": {"hard": 4, "easy": 12}}, support), 16)
    assert tied.solver == "counting", "nothing is asked of the source"
    assert tied.completion() == {("math", "hard"): 4, ("math", "easy"): 6, ("code", "easy"): 6}
    flow = QuotaSeats(Quotas({"s": {"math": (4, 12), "code": (4, 12)}, "d": {"hard": 4, "easy": 12}}, support), 16)
    assert flow.solver == "flow with lower bounds"
    made = flow.completion()
    assert made[("math", "hard")] == 4 and 4 <= made[("code", "easy")] <= 8


# -- structure --------------------------------------------------------------------------------------------------------

CROSS = [("m", "h"), ("m", "e"), ("c", "e")]


@pytest.mark.parametrize(
    ("mapping", "support", "window", "solver", "greedy"),
    [
        ({}, None, None, "counting", True),
        ({"s": {"m": 2, "c": 2}}, None, None, "counting", True),
        ({"s": {"m": 2, "c": 2}}, {("m",): (1, 2), ("c",): None}, None, "interval propagation", True),
        ({"s": {"m": 2, "c": 2}}, None, 1, "flow with lower bounds", False),
        ({"s": {"m": (0, 4), "c": (0, 9)}}, None, 1, "counting", True),
        ({"s": {"m": 2, "c": 2}, "d": {"h": 1, "e": 3}}, None, None, "counting", False),
        ({"s": {"m": 2, "c": 2}, "d": {"h": (0, 4), "e": (0, 4)}}, None, None, "counting", True),
        ({"s": {"m": 2, "c": 2}, "d": {"h": 1, "e": 3}}, [*CROSS, ("c", "h")], None, "counting", False),
        ({"s": {"m": 2, "c": 2}, "d": {"h": 1, "e": 3}}, CROSS, None, "flow with lower bounds", False),
        ({"s": {"m": 2, "c": 2}, "d": {"h": (0, 4), "e": (0, 4)}}, CROSS, None, "counting", True),
        ({"s": {"m": 2, "c": 2}, "d": {"h": 1, "e": 3, "x": 0}}, [*CROSS, ("c", "x")], None, "flow", False),
        ({"s": {"m": 2, "c": 2}, "d": {"h": 1, "e": 1, "x": 2}}, [*CROSS[:2], ("c", "x")], None, "interval", True),
    ],
)
def test_the_structure_decides_the_solver(
    mapping: Any, support: Any, window: int | None, solver: str, greedy: bool
) -> None:
    seats = QuotaSeats(Quotas(mapping, support, window), 4, None, 2)
    assert seats.solver.startswith(solver) and seats.greedy == greedy


@settings(SMALL, max_examples=60)
@given(spec=st.one_of(free_specs(), nested_specs()), data=st.data())
def test_where_greedy_is_said_whatever_fits_can_be_taken(spec: Spec, data: Any) -> None:
    """Every order of taking what fits, from a pool, ends with the same number of groups."""
    seats = spec.seats()
    if not seats.greedy:
        return
    pool = tuple(data.draw(st.integers(0, 2)) for _ in spec.keys)
    ends: set[int] = set()
    todo, known = [(seats, pool)], {pool}
    while todo:
        now, rest = todo.pop()
        able = [i for i, n in enumerate(rest) if n and now.admissible(spec.keys[i])]
        if not able:
            ends.add(spec.size - now.left)
        for i in able:
            less = (*rest[:i], rest[i] - 1, *rest[i + 1 :])
            if less not in known:
                known.add(less)
                todo.append((now.copy(), less))
                todo[-1][0].admit(spec.keys[i])
    assert len(ends) == 1


def test_where_attributes_cross_taking_what_fits_can_spoil_it() -> None:
    """Of hard math, easy math and hard code two fit, unless hard math goes first."""
    mapping = {"source": {"math": 1, "code": 1}, "level": {"hard": 1, "easy": 1}}
    seats = QuotaSeats(Quotas(mapping), 2)
    assert not seats.greedy
    pool = [("math", "hard"), ("math", "easy"), ("code", "hard")]
    seats.admit(pool[0])
    assert not any(seats.admissible(c) for c in pool)
    seats.release(pool[0])
    seats.admit(pool[1])
    assert seats.admissible(pool[2])


def test_a_free_attribute_is_decided_apart_from_two_that_are_tied() -> None:
    support = [(s, x, d) for s, d in CROSS for x in ("p", "q")]
    seats = QuotaSeats(Quotas({"s": {"m": 2, "c": 2}, "x": {"p": 3, "q": 1}, "d": {"h": 1, "e": 3}}, support), 4)
    assert seats.solver == "flow with lower bounds and counting" and not seats.greedy
    assert sum(seats.deficits().values()) == 4


def test_each_quota_alone_would_be_wrong_where_combinations_are_missing() -> None:
    """Hard code does not exist: one easy math group, and two hard ones find no seats. Margins alone do not see it."""
    quotas = {"source": {"math": 2, "code": 2}, "level": {"hard": 2, "easy": 2}}
    support = [("math", "hard"), ("math", "easy"), ("code", "easy")]
    exact, margins = QuotaSeats(Quotas(quotas, support), 4), QuotaSeats(Quotas(quotas), 4)
    assert margins.admissible(("math", "easy")) and not exact.admissible(("math", "easy"))
    assert exact.completion() == exact.deficits() == {("math", "hard"): 2, ("code", "easy"): 2}
    margins.admit(("math", "easy"))
    assert ("math", "easy") not in margins.deficits() and ("code", "hard") in margins.deficits(), "a dead end"


def test_maxima_alone_run_into_a_dead_end() -> None:
    seats = QuotaSeats(Quotas({"source": {"fast": (0, 4), "slow": (2, 4)}}), 4)
    seats.admit(("fast",))
    seats.admit(("fast",))
    assert seats.counts[("fast",)] < 4 and not seats.admissible(("fast",)), "slow's minimum has no more to spare"


def test_three_that_cross_are_refused() -> None:
    keys = [("a1", "b1", "c1"), ("a1", "b2", "c2"), ("a2", "b1", "c2"), ("a2", "b2", "c1"), ("a1", "b1", "c2")]
    mapping = {a: {f"{a}1": (1, 3), f"{a}2": (1, 3)} for a in "abc"}
    with pytest.raises(InvalidArgument, match=r"quotas: a, b and c cross, .* is NP-hard. Allow all .* or merge two"):
        QuotaSeats(Quotas(mapping, keys), 4)
    every = list(product(("a1", "a2"), ("b1", "b2"), ("c1", "c2")))
    assert QuotaSeats(Quotas(mapping, every), 4).solver == "counting"
    with pytest.raises(InvalidArgument, match="a, b and c cross"):
        QuotaSeats(Quotas(mapping, {**dict.fromkeys(every), every[0]: (1, 2)}), 4)


def test_what_a_window_cannot_have() -> None:
    mapping = {"s": {"m": 2, "c": 2}, "d": {"h": 1, "e": 3}}
    with pytest.raises(InvalidArgument, match=r"mini_window=1 needs attributes that combine freely; .* s and d, "):
        QuotaSeats(Quotas(mapping, CROSS, 1), 4, None, 2)
    for mini in (None, 3):
        with pytest.raises(InvalidArgument, match=f"mini_window=1 needs the mini_batch_size, .*=4; found {mini}"):
            QuotaSeats(Quotas(mapping, None, 1), 4, None, mini)
    with pytest.raises(InvalidArgument, match=r"mini_window=0 of an even pace .math exactly 3.: 8 groups make 4"):
        QuotaSeats(Quotas({"s": {"math": 3, "code": (0, 8)}}, None, 0), 8, None, 2)


def test_a_window_keeps_the_pace() -> None:
    seats = QuotaSeats(Quotas({"s": {"math": 4, "code": 4}}, mini_window=0), 8, mini_batch_size=4)
    for _ in range(2):
        seats.admit(("math",))
    assert not seats.admissible(("math",)) and seats.admissible(("code",))
    assert (seats.deficits(), seats.completion()) == ({("math",): 2, ("code",): 4}, {("math",): 2, ("code",): 4})
    for _ in range(2):
        seats.admit(("code",))
    assert seats.admissible(("math",)), "the next mini-batch"
    with pytest.raises(InvalidArgument, match=r"cannot be met any more with 4 of 8 groups in: 3 math, 1 code"):
        QuotaSeats(Quotas({"s": {"math": 4, "code": 4}}, mini_window=0), 8, {("math",): 3, ("code",): 1}, 4)


# -- quotas that cannot be met ----------------------------------------------------------------------------------------


@settings(SMALL, max_examples=240)
@given(data=st.data())
def test_what_blocks_is_named_and_nothing_else(data: Any) -> None:
    spec = data.draw(any_specs(loose=True))
    zero = (0,) * len(spec.keys)
    if zero in spec.alive():
        return
    with pytest.raises(InvalidArgument) as caught:
        spec.seats()
    named = []
    for block in blocks_of(spec.quotas(), spec.size, spec.mini):
        if not named and not block.start().feasible:
            for i, cell in block.blocking():
                level = block.levels[i]
                named.append((-1 if level.own else block.where[level.where[0]], cell))
    assert named and all(f"{'/'.join(name)} " in str(caught.value) for _, name in named)
    terms = {t: spec.terms()[t] for t in named}
    whole = replace(spec, window=None)
    if zero not in whole.alive(terms):  # not the window's fault
        spec = whole
    assert zero not in spec.alive(terms), "these alone cannot be met"
    for left_out in named:
        assert zero in spec.alive({t: b for t, b in terms.items() if t != left_out}), f"{left_out} does not block"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"math": 5, "code": 4}, "need at least 9 groups .math exactly 5, code exactly 4., train_batch_size is 8"),
        ({"math": kd.at_least(6), "code": (3, 9)}, "need at least 9 groups .math at least 6, code 3 to 9."),
        ({"web": 1, "math": 5, "vqa": 2, "code": 4}, "need at least 9 groups .math exactly 5, code exactly 4."),
        ({"math": 5, "code": 2}, "allow at most 7 groups .math exactly 5, code exactly 2., train_batch_size is 8"),
        ({"math": kd.at_most(3), "code": (0, 4)}, "allow at most 7 groups .math at most 3, code at most 4."),
        ({"math": 0.75, "code": 0.5}, r"at least 10 groups \(math exactly 6 \(0.75 of 8\), code exactly 4 \(0.5 of 8"),
    ],
)
def test_quotas_that_cannot_add_up_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        QuotaSeats(Quotas({"source": values}), 8)


def test_quotas_that_exclude_each_other_are_named_with_their_attributes() -> None:
    mapping = {"s": {"math": (0, 3), "code": (0, 8)}, "d": {"hard": 4, "easy": 4}}
    support = [("math", "hard"), ("math", "easy"), ("code", "easy")]
    with pytest.raises(InvalidArgument, match=r"exclude each other \(s=math at most 3, d=hard exactly 4\) in a train"):
        QuotaSeats(Quotas(mapping, support), 8)
    cells = {("math", "hard"): (5, 6), ("math", "easy"): None, ("code", "easy"): None}
    with pytest.raises(InvalidArgument, match=r"exclude each other \(d=hard exactly 4, math/hard 5 to 6\) in a train"):
        QuotaSeats(Quotas({**mapping, "s": {"math": 6, "code": 2}}, cells), 8)


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_the_docstring_is_true() -> None:
    names = {"Quotas": Quotas, "QuotaSeats": QuotaSeats}
    assert doctest.testmod(seats_module, extraglobs=names).failed == 0


def test_a_worked_example() -> None:
    seats = QuotaSeats(Quotas({"source": {"math": 4, "code": (1, 3), "vqa": kd.at_least(1), "web": kd.at_most(1)}}), 8)
    assert (seats.deficits(), seats.free()) == ({("math",): 4, ("code",): 1, ("vqa",): 1}, 2)
    seats.admit(("code",))
    seats.admit(("code",))
    assert (seats.deficits(), seats.free()) == ({("math",): 4, ("vqa",): 1}, 1)
    seats.admit(("web",))
    admissible = {line.label for line in seats.lines() if seats.admissible(line.values)}
    assert admissible == {"math", "vqa"}, "the last five seats are reserved: 4 math, 1 vqa"
    with pytest.raises(InvalidArgument, match="no seat is left for web"):
        seats.admit(("web",))
    assert seats.lines()[3] == Line("web", (0,), ("web",), Bounds(0, 1), 1, False)


def test_without_quotas_only_the_seats_count() -> None:
    seats = QuotaSeats(Quotas(), 2)
    assert seats.knows(()) and (seats.deficits(), seats.free(), seats.completion()) == ({}, 2, {(): 2})
    seats.admit(())
    seats.admit(())
    assert not seats.admissible(()) and seats.free() == 0 and seats.lines() == [] and seats.completion() == {}


def test_a_copy_is_apart_and_counts_can_be_taken_over() -> None:
    seats = QuotaSeats(Quotas({"source": {"a": 2, "b": 2}}), 4, {("a",): 1})
    twin = seats.copy()
    twin.admit(("a",))
    assert (seats.counts, seats.left) == ({("a",): 1, ("b",): 0}, 3)
    assert (twin.counts, twin.left) == ({("a",): 2, ("b",): 0}, 2)


def test_what_is_known() -> None:
    free = QuotaSeats(Quotas({"s": {"m": (0, 2), "c": (0, 2)}, "d": {"h": (0, 2), "e": (0, 2)}}), 2)
    tied = QuotaSeats(Quotas({"s": {"m": (0, 2), "c": (0, 2)}, "d": {"h": 1, "e": 1}}, CROSS), 2)
    assert free.knows(("c", "h")) and not tied.knows(("c", "h")) and tied.knows(("c", "e"))
    for combination in (("m",), ("m", "x"), ("m", "h", "h"), ()):
        assert not free.knows(combination) and not tied.knows(combination)
    for seats in (free, tied):
        with pytest.raises(InvalidArgument, match="do not know the combination"):
            seats.admissible(("m", "x"))
        with pytest.raises(InvalidArgument, match=r"counts hold .*which the quotas do not know"):
            QuotaSeats(Quotas({"s": {"m": 2}}), 2, {("c",): 1})


def test_counts_that_went_too_far_are_refused() -> None:
    for counts in ({("a",): 3}, {("a",): 2, ("b",): 3}):
        with pytest.raises(InvalidArgument, match=r"cannot be met any more with . of 4 groups in: . a"):
            QuotaSeats(Quotas({"s": {"a": 2, "b": 2}}), 4, counts)


def test_only_what_was_admitted_can_be_released() -> None:
    quotas = Quotas({"s": {"a": 2, "b": 2}})
    seats = QuotaSeats(quotas, 4)
    with pytest.raises(InvalidArgument, match="a was not admitted"):
        seats.release(("a",))
    paced = QuotaSeats(Quotas({"s": {"a": 2, "b": 2}}, mini_window=1), 4, {("a",): 1, ("b",): 1}, 2)
    paced.admit(("a",))
    for late in (("b",), ("a",), ("a",)):
        if late == ("a",) and paced.left == 1:
            paced.release(late)
        else:
            with pytest.raises(InvalidArgument, match="was not admitted last"):
                paced.release(late)
    assert paced.left == 2


def test_many_attributes_are_not_multiplied_out() -> None:
    quotas = Quotas({a: {f"{a}{i}": (0, 4) for i in range(40)} for a in "abcdef"})
    seats = QuotaSeats(quotas, 64)
    seats.admit(tuple(f"{a}7" for a in "abcdef"))
    assert len(seats.counts) == 1 and sum(seats.completion().values()) == 63
    twin = pickle.loads(pickle.dumps(seats))
    assert twin.counts == seats.counts and twin.completion() == seats.completion()
