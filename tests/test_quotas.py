"""The words of quotas: bounds, shares, support and window; what they come to, and what is refused."""

from __future__ import annotations

import doctest
import json
import math
import pickle
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import knit_data as kd
from knit_data import quotas as quotas_module
from knit_data.errors import InvalidArgument
from knit_data.quotas import Bounds, Quotas, apportion


def texts(quotas: Quotas, size: int) -> list[str]:
    return [str(b) for values in quotas.resolved(size).values() for b in values.values()]


# -- bounds and shares ------------------------------------------------------------------------------------------------


def test_bounds_say_themselves() -> None:
    quotas = Quotas({"s": {"a": 3, "b": (1, 2), "c": kd.at_least(4), "d": kd.at_most(5), "e": 0}})
    assert texts(quotas, 99) == ["exactly 3", "1 to 2", "at least 4", "at most 5", "exactly 0"]
    assert Quotas({"s": {"a": (4, None)}}) == Quotas({"s": {"a": kd.at_least(4)}})
    assert Quotas({"s": {"a": Bounds(1, 2)}}) == Quotas({"s": {"a": (1, 2)}}) != Quotas({"s": {"a": 2}})
    assert Quotas() == Quotas({}) and Quotas().attributes == () and Quotas().resolved(8) == {}


def test_shares_become_counts_when_the_train_batch_is_known() -> None:
    quotas = Quotas(
        {"s": {"a": 0.25, "b": (0.125, 0.25), "c": kd.at_least(0.25), "d": kd.at_most(0.5), "e": 1.0, "f": (2, 0.25)}}
    )
    assert texts(quotas, 64) == [
        *("exactly 16 (0.25 of 64)", "8 to 16 (0.125 to 0.25 of 64)", "at least 16 (0.25 of 64)"),
        *("at most 32 (0.5 of 64)", "exactly 64 (1.0 of 64)", "2 to 16 (2 to 0.25 of 64)"),
    ]
    assert quotas.resolved(64)["s"]["a"] == Bounds(16, 16), "where a count comes from does not matter"


@pytest.mark.parametrize(
    ("share", "size", "count"),
    [(0.15, 10, 2), (0.35, 10, 4), (0.145, 100, 15), (0.29, 100, 29), (0.1, 14, 1), (0.5, 7, 4), (1.0, 7, 7)],
)
def test_shares_are_rounded_half_up_as_they_were_written(share: float, size: int, count: int) -> None:
    assert Quotas({"s": {"a": share, "b": (0, None)}}).resolved(size)["s"]["a"] == Bounds(count, count)


@pytest.mark.parametrize(
    ("shares", "size", "counts"),
    [
        ([0.5, 0.25, 0.25], 10, [5, 3, 2]),
        ([0.5, 0.5], 7, [4, 3]),
        ([0.3333333333, 0.3333333333, 0.3333333333], 8, [3, 3, 2]),
        ([0.7, 0.2, 0.1], 15, [11, 3, 1]),
        ([1.0], 9, [9]),
        ([0.5, 0.4], 10, [5, 4]),
    ],
)
def test_shares_that_sum_to_1_are_rounded_by_largest_remainder(
    shares: list[float], size: int, counts: list[int]
) -> None:
    found = Quotas({"s": {f"v{i}": share for i, share in enumerate(shares)}}).resolved(size)["s"]
    assert [b.low for b in found.values()] == [b.high for b in found.values()] == counts


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(60, 400))
def test_shares_that_sum_to_1_fill_the_train_batch(parts: list[int], size: int) -> None:
    shares = [n / sum(parts) for n in parts]
    try:
        found = Quotas({"s": {f"v{i}": share for i, share in enumerate(shares)}}).resolved(size)["s"]
    except InvalidArgument as e:
        assert "rounds to 0 groups" in str(e)
        return
    assert sum(b.low for b in found.values()) == size
    assert all(abs(b.low - share * size) < 1 for b, share in zip(found.values(), shares, strict=True))


@given(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_apportion_never_differs_by_one_group(total: int, weights: list[int]) -> None:
    out = apportion(total, weights)
    assert sum(out) == total
    assert all(abs(n - Fraction(total * w, sum(weights))) < 1 for n, w in zip(out, weights, strict=True))


@pytest.mark.parametrize("bound", [0.01, kd.at_least(0.01), kd.at_most(0.01), (0.01, 4), (0, 0.01)])
def test_a_share_that_rounds_to_no_group_is_refused(bound: Any) -> None:
    text = r"quotas\['source'\]\['math'\]: a share of 0.01 rounds to 0 groups of train_batch_size=16; give a larger"
    for quotas in (Quotas({"source": {"math": bound}}), Quotas({"source": {"math": 0.01, "code": 0.99}})):
        with pytest.raises(InvalidArgument, match=text):
            quotas.resolved(16)


def test_bounds_that_cross_are_refused_as_soon_as_they_are_known() -> None:
    for bound in ((3, 2), (0.5, 0.25)):
        with pytest.raises(InvalidArgument, match=r"lower bound .* is above the upper bound"):
            Quotas({"source": {"math": bound}})
    with pytest.raises(InvalidArgument, match=r"'math'.: the lower bound 5 is above the upper bound 4"):
        Quotas({"source": {"math": (5, 0.25)}}).resolved(16)


BAD = [-1, (-1, 2), True, (False, 2), 2.0, 0.0, -0.5, math.nan, math.inf, (1, 2.5), "3", None, (None, 3), [1, 2]]


@pytest.mark.parametrize("bound", BAD)
@pytest.mark.parametrize("more", [(), (2,)])
def test_bounds_are_counts_or_shares(bound: Any, more: tuple[int, ...]) -> None:
    if more:
        bound = (*bound, 2) if isinstance(bound, tuple) else (1, 2, 3)
    with pytest.raises(InvalidArgument, match=r"quotas.'source'..'math'. = .*give a count of groups"):
        Quotas({"source": {"math": bound}})


def test_a_list_is_not_a_range() -> None:
    with pytest.raises(InvalidArgument, match=r"= \[2, 4\]: .*a \(low, high\) tuple"):
        Quotas({"source": {"math": [2, 4]}})


def test_what_else_is_refused() -> None:
    for call in (kd.at_least, kd.at_most):
        for count in (-1, True, 1.5, 0.0, None, (1, 2)):
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
    for window in (-1, True, 0.5, "1"):
        with pytest.raises(InvalidArgument, match="mini_window must be None or a count of groups"):
            Quotas({"source": {"math": 8}}, mini_window=window)  # type: ignore[arg-type]


# -- support ----------------------------------------------------------------------------------------------------------

BOTH: dict[str, dict[str, Any]] = {"source": {"math": (1, 8), "code": (0, 8)}, "level": {"hard": 4, "easy": 4}}


@pytest.mark.parametrize(
    ("support", "text"),
    [
        ([("math",)], r"support lists \('math',\): give a tuple with one value for each attribute, \(source, level\)"),
        ([["math", "hard"]], r"support lists \['math', 'hard'\]: give a tuple"),
        (["math"], "support lists 'math': give a tuple"),
        ("math", "support must list the combinations that can occur as tuples, found 'math'"),
        (3, "support must list the combinations that can occur as tuples, found 3"),
        ([("math", "odd")], r"quotas\['level'\] has no value 'odd'; it has hard, easy"),
        ([("math", "hard"), ("math", "hard")], r"support lists \('math', 'hard'\) twice"),
        ([("math", "hard")], r"quotas\['level'\]\['easy'\] asks for groups, but no combination in support has 'easy'"),
        ({("math", "hard"): [1, 2]}, r"support\[\('math', 'hard'\)\] = \[1, 2\]: give a count of groups"),
        ({("math", "hard"): (3, 2)}, "lower bound 3 is above the upper bound 2"),
    ],
)
def test_supports_that_are_refused(support: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Quotas(BOTH, support)


def test_a_support_needs_a_combination() -> None:
    with pytest.raises(InvalidArgument, match="support lists no combination"):
        Quotas({"source": {"math": (0, 8)}}, [])


def test_a_support_bounds_combinations_too() -> None:
    quotas = Quotas(BOTH, {("math", "hard"): (0.25, 4), ("math", "easy"): None, ("code", "easy"): kd.at_least(1)})
    assert quotas.support == (("math", "hard"), ("math", "easy"), ("code", "easy"))
    cells = {c: str(b) for c, b in quotas.cells(8).items()}
    assert cells == {("math", "hard"): "2 to 4 (0.25 to 4 of 8)", ("code", "easy"): "at least 1"}
    with pytest.raises(InvalidArgument, match=r"support\[\('math', 'hard'\)\]: a share of 0.25 rounds to 0 groups"):
        quotas.cells(1)
    assert Quotas({"source": {"math": 8}}, [("math",)]).support == (("math",),)


# -- what they are kept as --------------------------------------------------------------------------------------------


def test_nobody_can_change_them_and_they_travel() -> None:
    mapping: dict[str, dict[str, Any]] = {"s": {"a": 1, "b": 0.5}}
    support: dict[Any, Any] = {("a",): None, ("b",): (0, 4)}
    quotas = Quotas(mapping, support, 2)
    mapping["s"]["a"] = 9
    support.clear()
    quotas.resolved(8)["s"]["a"] = Bounds(0, 0)
    assert quotas == Quotas({"s": {"a": 1, "b": 0.5}}, {("a",): None, ("b",): (0, 4)}, 2)
    assert pickle.loads(pickle.dumps(quotas)) == quotas and "mini_window=2" in repr(quotas)
    with pytest.raises(AttributeError):
        quotas.mini_window = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="unhashable"):
        hash(quotas)


def test_json_is_the_same_for_equal_terms() -> None:
    one = Quotas({"source": {"math": 0.5, "code": 0.5}}).to_json(8)
    assert one == Quotas({"source": {"math": 4, "code": (4, 4)}}).to_json(8)
    assert one == {"attributes": [["source", {"math": "exactly 4", "code": "exactly 4"}]]}
    cells = {("math", "easy"): None, ("code", "easy"): (0, 0.5), ("math", "hard"): 4}
    made = Quotas(BOTH, cells, 1).to_json(8)
    assert made["support"] == [
        *([["code", "easy"], "at most 4"], [["math", "easy"], None], [["math", "hard"], "exactly 4"])
    ]
    assert made["mini_window"] == 1 and json.loads(json.dumps(made)) == made
    assert made == Quotas(BOTH, dict(reversed(cells.items())), 1).to_json(8) != Quotas(BOTH, cells).to_json(8)


def test_the_docstring_is_true() -> None:
    assert doctest.testmod(quotas_module).failed == 0
    drawn = Quotas({"s": {"math": 32, "code": 32}}, mini_window=2)
    seats = kd.seats.QuotaSeats(drawn, 64, mini_batch_size=16)  # the docstring's 6 to 10 of the first mini-batch
    for _ in range(10):
        seats.admit(("math",))
    assert not seats.admissible(("math",))
