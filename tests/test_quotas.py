"""The counting test against the enumeration of all completions, and what a constructor refuses."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import completable

import knit_data as kd
from knit_data.errors import InvalidArgument
from knit_data.quotas import Bounds, Quotas, QuotaSeats

NAMES = ("a", "b", "c", "d")
Spec = list[tuple[int, int | None]]


def seats_of(spec: Spec, size: int) -> QuotaSeats:
    return QuotaSeats(
        Quotas({"source": {name: Bounds(*bound) for name, bound in zip(NAMES, spec, strict=False)}}), size
    )


def ranges(spec: Spec, size: int) -> list[tuple[int, int]]:
    return [(low, size if high is None else high) for low, high in spec]


def every_spec(size: int, values: int) -> list[Spec]:
    one = [(low, high) for low in range(size + 1) for high in range(low, size + 1)]
    return [list(spec) for spec in product([*one, *((low, None) for low in range(size + 1))], repeat=values)]


@pytest.mark.parametrize(("size", "values"), [(1, 1), (3, 1), (1, 2), (2, 2), (4, 2), (2, 3), (3, 3)])
def test_the_counting_test_is_exact_in_every_state_that_can_be_reached(size: int, values: int) -> None:
    for spec in every_spec(size, values):
        bounds = ranges(spec, size)
        if not completable([0] * values, bounds, size):
            with pytest.raises(InvalidArgument):
                seats_of(spec, size)
            continue
        known, todo = {(0,) * values}, [seats_of(spec, size)]
        while todo:
            seats = todo.pop()
            counts = [seats.counts[(name,)] for name in NAMES[:values]]
            assert seats.left == size - sum(counts)
            choices = []
            for i, name in enumerate(NAMES[:values]):
                after = [n + (i == j) for j, n in enumerate(counts)]
                possible = seats.left > 0 and completable(after, bounds, seats.left - 1)
                assert seats.admissible((name,)) == possible, (spec, counts, name)
                if possible:
                    choices.append((name, tuple(after)))
            if seats.left:
                assert choices, f"a dead end at {counts} of {spec}"
            else:
                assert all(low <= n <= high for n, (low, high) in zip(counts, bounds, strict=True))
            for name, after in choices:
                if after not in known:
                    known.add(after)
                    todo.append(seats.copy())
                    todo[-1].admit((name,))


@st.composite
def specs(draw: st.DrawFn) -> tuple[Spec, int]:
    """A train batch that can be filled: bounds are drawn around its counts."""
    made = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any))
    spec: Spec = []
    for count in made:
        high = draw(st.one_of(st.none(), st.integers(count, count + 3)))
        spec.append((draw(st.integers(0, count)), high))
    return spec, sum(made)


@given(specs(), st.randoms(use_true_random=False))
def test_no_order_of_arrival_leads_to_a_dead_end(spec_size: tuple[Spec, int], rng: Any) -> None:
    spec, size = spec_size
    seats, bounds = seats_of(spec, size), ranges(*spec_size)
    while seats.left:
        names = list(NAMES[: len(spec)])
        rng.shuffle(names)
        name = next((n for n in names if seats.admissible((n,))), None)
        assert name is not None
        counts = [seats.counts[(n,)] for n in NAMES[: len(spec)]]
        need = {(n,): low - c for n, c, (low, _) in zip(NAMES, counts, bounds, strict=False) if low > c}
        assert seats.deficits() == need
        assert seats.free() == seats.left - sum(need.values()) >= 0
        seats.admit((name,))
    assert seats.deficits() == {} and seats.free() == 0
    assert all(low <= seats.counts[(n,)] <= high for n, (low, high) in zip(NAMES, bounds, strict=False))


def test_a_worked_example() -> None:
    seats = QuotaSeats(Quotas({"source": {"math": 4, "code": (1, 3), "vqa": kd.at_least(1), "web": kd.at_most(1)}}), 8)
    assert (seats.deficits(), seats.free()) == ({("math",): 4, ("code",): 1, ("vqa",): 1}, 2)
    seats.admit(("code",))
    seats.admit(("code",))
    assert (seats.deficits(), seats.free()) == ({("math",): 4, ("vqa",): 1}, 1)
    seats.admit(("web",))
    admissible = {c[0] for c in seats.bounds if seats.admissible(c)}
    assert admissible == {"math", "vqa"}, "the last five seats are reserved: 4 math, 1 vqa"


def test_without_quotas_only_the_seats_count() -> None:
    seats = QuotaSeats(Quotas(), 2)
    assert seats.knows(()) and (seats.deficits(), seats.free()) == ({}, 2)
    seats.admit(())
    seats.admit(())
    assert not seats.admissible(()) and seats.free() == 0


def test_a_copy_is_apart_and_counts_can_be_taken_over() -> None:
    seats = QuotaSeats(Quotas({"source": {"a": 2, "b": 2}}), 4, {("a",): 1})
    twin = seats.copy()
    twin.admit(("a",))
    assert (seats.counts, seats.left) == ({("a",): 1, ("b",): 0}, 3)
    assert (twin.counts, twin.left) == ({("a",): 2, ("b",): 0}, 2)


def test_bounds_say_themselves() -> None:
    bounds = Quotas({"s": {"a": 3, "b": (1, 2), "c": kd.at_least(4), "d": kd.at_most(5), "e": 0}}).bounds()
    assert [str(b) for b in bounds.values()] == ["exactly 3", "1 to 2", "at least 4", "at most 5", "exactly 0"]
    assert Quotas({"s": {"a": (4, None)}}).bounds() == Quotas({"s": {"a": kd.at_least(4)}}).bounds()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"math": 5, "code": 4}, "need at least 9 groups .math exactly 5, code exactly 4., train_batch_size is 8"),
        ({"math": kd.at_least(6), "code": (3, 9)}, "need at least 9 groups .math at least 6, code 3 to 9."),
        ({"math": 5, "code": 2}, "allow at most 7 groups .math exactly 5, code exactly 2., train_batch_size is 8"),
        ({"math": kd.at_most(3), "code": (0, 4)}, "allow at most 7 groups .math at most 3, code at most 4."),
    ],
)
def test_quotas_that_cannot_add_up_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        QuotaSeats(Quotas({"source": values}), 8)


@pytest.mark.parametrize("bound", [-1, (-1, 2), True, (False, 2), 2.0, 0.5, (1, 2.5), "3", None, (None, 3), [1, 2]])
@pytest.mark.parametrize("more", [(), (2,)])
def test_bounds_are_counts(bound: Any, more: tuple[int, ...]) -> None:
    if more:
        bound = (*bound, 2) if isinstance(bound, tuple) else (1, 2, 3)
    with pytest.raises(InvalidArgument, match=r"quotas.'source'..'math'. = .*give a count of groups"):
        Quotas({"source": {"math": bound}})


def test_what_else_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="lower bound 3 is above the upper bound 2"):
        Quotas({"source": {"math": (3, 2)}})
    for call in (kd.at_least, kd.at_most):
        for count in (-1, True, 1.5, None, (1, 2)):
            with pytest.raises(InvalidArgument, match=call.__name__):
                call(count)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"must map values to bounds, found \{\}"):
        Quotas({"source": {}})
    with pytest.raises(InvalidArgument, match=r"must map an attribute to .*found .*3"):
        Quotas({"source": 3})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="must map an attribute"):
        Quotas(["source"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="as strings, found 3"):
        Quotas({"level": {3: 8}})  # type: ignore[dict-item]


def test_what_this_version_has_not_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"2 attributes .source, difficulty."):
        Quotas({"source": {"math": 8}, "difficulty": {"hard": 8}})
    with pytest.raises(InvalidArgument, match="no shares"):
        Quotas({"source": {"math": 0.5, "code": 0.5}})
    with pytest.raises(InvalidArgument, match="support"):
        Quotas({"source": {"math": 8}}, support=[("math",)])
    with pytest.raises(InvalidArgument, match="mini_window"):
        Quotas({"source": {"math": 8}}, mini_window=2)
