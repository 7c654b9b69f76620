"""What is launched: rules that hold for every outlook, and what they come to in simulated runs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knit_data.admission import Admission, Sizes
from knit_data.demand import Demand, Outlook, Pace, Yields, outlook_of
from knit_data.launching import Launching
from knit_data.quotas import Combination, Quotas
from knit_data.simulation import Report, Scenario, Source, simulate
from knit_data.staleness import Staleness

A, B, C = ("a",), ("b",), ("c",)

# response tokens of public reasoning traces and chat answers, at 50 tokens a second
LONG = [(p, n / 50) for p, n in [(0.01, 2_000), (0.25, 9_000), (0.5, 19_000), (0.75, 30_000), (0.99, 39_500)]]
SHORT = [(p, n / 50) for p, n in [(0.01, 38), (0.25, 66), (0.5, 88), (0.75, 117), (0.99, 229), (1.0, 404)]]


@st.composite
def outlooks(draw: st.DrawFn) -> Outlook:
    mix = {c: draw(st.integers(1, 6)) for c in draw(st.sampled_from([(A,), (A, B), (A, B, C)]))}
    seats = {c: draw(st.integers(0, mix.get(c, 2))) for c in (A, B, C)}  # attributes that combine may pair anew
    minis = draw(st.integers(1, 4))
    steps = minis * draw(st.integers(1, 2))
    return Outlook(
        train_batch=draw(st.integers(0, 5)),
        seats=seats,
        mix=mix,
        waiting={c: n for c in mix if (n := draw(st.integers(0, 8)))},
        surplus={c: draw(st.sampled_from([-1.5, 0.5, 1.0])) for c in mix if draw(st.booleans())},
        yields={c: draw(st.sampled_from([0.25, 0.8])) for c in mix if draw(st.booleans())},
        minis=minis,
        steps=steps,
        steps_left=draw(st.integers(1, steps)),
        pace=draw(st.none() | st.sampled_from([0.5, 10.0])),
        starving=draw(st.booleans()),
        limit=draw(st.none() | st.integers(0, 12)),
    )


def launchings(draw: st.DrawFn, outlook: Outlook) -> Launching:
    made = Launching()
    for c in outlook.mix:
        for seconds in draw(st.lists(st.floats(0.1, 1e4), max_size=3)):
            made.took(c, seconds)
    return made


def there(outlook: Outlook, in_flight: dict[Combination, int], c: Combination) -> float:
    return in_flight.get(c, 0) * outlook.yields.get(c, 1.0) + outlook.waiting.get(c, 0)


@given(st.data())
def test_what_the_open_train_batch_needs_is_never_held_back(data: st.DataObject) -> None:
    """Whatever the pace, the leads and the bound: launching ends only when enough is under way for every seat."""
    outlook = data.draw(outlooks())
    launching = launchings(data.draw, outlook)
    version = data.draw(st.integers(0, outlook.train_batch * outlook.steps))
    in_flight = {c: data.draw(st.integers(0, 3)) for c in (A, B, C)}
    for _ in range(400):
        chosen = launching.next(outlook, in_flight, version)
        if chosen is None:
            break
        in_flight[chosen] += 1
    assert chosen is None, "bounded: a few train batches ahead"
    assert all(there(outlook, in_flight, c) >= n for c, n in outlook.seats.items())


@given(st.data())
def test_a_starving_trainer_waits_only_for_what_would_be_too_stale(data: st.DataObject) -> None:
    outlook = replace(data.draw(outlooks()), starving=True)
    launching = launchings(data.draw, outlook)
    version = data.draw(st.integers(0, outlook.train_batch * outlook.steps))
    in_flight = {c: data.draw(st.integers(0, 12)) for c in outlook.mix}
    if launching.next(outlook, in_flight, version) is None:
        limit = 2 * outlook.steps if outlook.limit is None else outlook.limit
        for c, whole in outlook.mix.items():
            ahead = 1 + int((there(outlook, in_flight, c) - outlook.seats[c]) // whole)  # all needs are met: >= 1
            assert (outlook.train_batch + ahead) * outlook.steps - version > limit


@given(st.data())
def test_more_under_way_never_asks_for_more(data: st.DataObject) -> None:
    """Of a combination alone: once it is held back, one more in flight does not release it."""
    outlook = replace(data.draw(outlooks()), mix={A: 4}, seats={A: 2}, surplus={}, yields={}, waiting={})
    launching = launchings(data.draw, outlook)
    held = [launching.next(outlook, {A: n}) is None for n in range(16)]
    assert held == sorted(held)


def test_held_back_until_one_lead_before_its_turn() -> None:
    """4 steps of 10 s a train batch; the open one is filled, the next begins in ``steps_left`` steps."""
    launching = Launching()
    outlook = Outlook(seats={A: 0}, mix={A: 4}, minis=4, steps=4, pace=10.0, starving=False)
    assert launching.next(replace(outlook, steps_left=4), {}) is None, "nothing known: a lead of a train batch"
    assert launching.next(replace(outlook, steps_left=3), {}) == A
    for _ in range(9):
        launching.took(A, 15.0)
    assert launching.next(replace(outlook, steps_left=2), {}) is None, "20 s until its turn, 15 s to complete"
    assert launching.next(replace(outlook, steps_left=1), {}) == A
    assert launching.next(replace(outlook, steps_left=1), {A: 1}) is None, "the second is due a step later"
    assert launching.next(replace(outlook, steps_left=2, starving=True), {}) == A
    launching.took(A, 45.0)  # mean 18 s, deviation 9 s
    assert launching.next(replace(outlook, steps_left=2), {}) == A
    assert launching.next(replace(outlook, steps_left=1), {}, version=0) == A
    assert launching.next(replace(outlook, steps_left=1, limit=3), {}, version=0) is None, "it would be 4 steps old"
    assert launching.next(replace(outlook, steps_left=1, limit=3), {}, version=1) == A


def test_each_combination_by_itself() -> None:
    launching = Launching()
    outlook = Outlook(seats={A: 2, B: 2}, mix={A: 2, B: 2}, minis=4, steps=4, pace=10.0, starving=False)
    outlook = replace(outlook, steps_left=4)
    assert launching.next(outlook, {A: 9}) == B, "the surplus of a takes nobody's place"
    assert launching.next(replace(outlook, waiting={A: 9}), {B: 1}) == B
    for _ in range(9):
        launching.took(A, 5.0)
        launching.took(B, 35.0)
    assert launching.next(outlook, {}) == B, "the slow one is urgent"
    assert launching.next(replace(outlook, yields={A: 0.5}), {A: 3, B: 2}) == A, "half of 3 in flight are dropped"
    assert launching.next(replace(outlook, surplus={A: 1.0}), {A: 1, B: 1}) == B, "a had one too many before"


def test_no_quotas_is_one_combination() -> None:
    admission: Admission[Any] = Admission(Sizes(4, 2), Quotas(), Staleness(1))
    outlook = outlook_of(admission, Pace(), True)
    assert (outlook.seats, outlook.mix, outlook.free, outlook.deficits) == ({(): 4}, {(): 4}, 4, {})
    assert (outlook.minis, outlook.steps, outlook.steps_left, outlook.limit) == (2, 2, 2, 2)
    in_flight: dict[Combination, int] = {(): 0}
    while Launching().next(outlook, in_flight) is not None:
        in_flight[()] += 1
    assert in_flight == {(): 8}, "train batches 0 and 1, as version 0 is 2 steps old in the second"


# -- what is learned ---------------------------------------------------------------------------------------------------


def test_pace_is_that_of_steps_that_nothing_was_waited_for() -> None:
    pace = Pace()
    assert pace.seconds is None and not pace.ample
    pace.admitted(100.0, 0.0)
    assert pace.seconds is None, "the first has no one before"
    pace.admitted(110.0, 0.0)
    assert pace.seconds == 10.0 and pace.ample
    pace.admitted(150.0, 30.0)
    assert pace.seconds == 10.0 and not pace.ample
    pace.admitted(150.1, 0.0)  # a read-ahead right behind
    assert pace.seconds == pytest.approx(5.05), "of two"  # a difference of floats
    now = 150.1
    for _ in range(200):
        now += 12.0
        pace.admitted(now, 0.0)
    assert pace.seconds == pytest.approx(12.0) and pace.ample


def test_yields_are_never_nothing() -> None:
    yields = Yields()
    assert yields.shares() == {}
    for _ in range(9):
        yields.add(A, True)
        yields.add(B, False)
    assert yields.shares() == {B: 0.1}
    for _ in range(64):
        yields.add(B, True)
    assert yields.shares() == {}, "forgotten"


# -- JSON --------------------------------------------------------------------------------------------------------------


@given(outlooks())
def test_json_round_trip(outlook: Outlook) -> None:
    outlook = replace(outlook, attributes=("source",), deficits={A: 1}, free=2)
    data = json.loads(json.dumps(outlook.to_json(), allow_nan=False))
    assert Outlook.from_json(data) == outlook
    demand = Demand.from_json(data)
    assert (demand.train_batch, demand.deficits, demand.free) == (outlook.train_batch, {A: 1}, 2)
    assert Demand.from_json(demand.to_json()) == demand


DATA = Outlook(deficits={A: 1}, seats={A: 2}, mix={A: 2}, waiting={B: 1}, surplus={A: 0.5}, attributes=("x",)).to_json()


@pytest.mark.parametrize("name", [f.name for f in fields(Outlook)])
def test_a_missing_key(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        Outlook.from_json({k: v for k, v in DATA.items() if k != name})


@pytest.mark.parametrize("name", ["deficits", "seats", "mix", "waiting", "surplus", "yields"])
@pytest.mark.parametrize("wrong", [3, None, [1], [["a"]], [[["a"], "many"]], [[["a"], None]], [[5, 1]], "text"])
def test_wrong_counts(name: str, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Outlook.from_json({**DATA, name: wrong})


@pytest.mark.parametrize("wrong", [3, None])
def test_wrong_attributes(wrong: Any) -> None:
    with pytest.raises(ValueError):
        Outlook.from_json({**DATA, "attributes": wrong})


# -- runs --------------------------------------------------------------------------------------------------------------


def mean_seconds(report: Report) -> float:
    """Of all trained responses."""
    return sum(n * report.seconds[s] for s, n in report.trained.items()) / sum(report.trained.values())


def drawn_seconds(scenario: Scenario) -> float:
    return sum(s.groups * s.mean() for s in scenario.sources.values()) / scenario.groups


@pytest.mark.parametrize("slots", [32, 64])
def test_long_reasoning_beside_short_answers(slots: int) -> None:
    """Responses of 380 s beside 1.8 s at the median: neither takes the other's seats or slots."""
    sources = {"long": Source(32, quantiles=LONG), "short": Source(32, quantiles=SHORT)}
    scenario = Scenario(sources, slots, mini_batches=16, batches=8, warmup=3)
    base, report = simulate(scenario, "train-batch"), simulate(scenario, pacing=True)
    assert (report.violations, report.dead_ends) == (0, 0)
    assert report.trained == {"long": 8 * 32, "short": 8 * 32}
    assert report.cycle_seconds <= 1.05 * scenario.rollout_seconds, "slots stay busy"
    assert report.staleness < 0.5 * base.staleness


def test_discards_of_a_staleness_bound_starve_slow_prompts_unless_paced() -> None:
    """The oldest groups are those that took longest. Launched two train batches ahead, most that are dropped are slow
    ones, and ranges let fast ones take their seats: what is trained drifts to short responses."""
    slow = Source(16, quantiles=[(0.0, 20.0), (0.5, 60.0), (0.9, 140.0), (1.0, 260.0)])
    sources = {"fast": Source(48, 10.0, 0.3), "slow": slow}
    scenario = Scenario(sources, 128, mini_batches=16, rho=1.3, slack=8, max_staleness=1, batches=20, warmup=4)
    early, paced = simulate(scenario), simulate(scenario, pacing=True)
    groups = 24 * scenario.groups
    drawn = drawn_seconds(scenario)
    assert early.violations == paced.violations == 0
    assert early.dropped["stale"] > 0.2 * groups and paced.dropped["stale"] < 0.05 * groups
    assert mean_seconds(early) < 0.9 * drawn and abs(mean_seconds(paced) / drawn - 1) < 0.03
    assert early.trained["slow"] < 0.9 * 20 * 16 and abs(paced.trained["slow"] / (20 * 16) - 1) < 0.03
    assert early.seconds["slow"] < 0.96 * slow.mean() < paced.seconds["slow"]


def test_a_filter_is_made_up_for() -> None:
    sources = {"a": Source(32, 30.0, 0.4, keep=0.5), "b": Source(32, 30.0, 0.4)}
    scenario = Scenario(sources, 32, mini_batches=16, batches=12, warmup=4)
    report = simulate(scenario, pacing=True)
    assert report.trained == {"a": 12 * 32, "b": 12 * 32} and report.violations == 0
    assert report.cycle_seconds < 1.15 * 1.5 * scenario.rollout_seconds, "a costs twice its share"
    assert report.staleness < 0.2
    early = simulate(scenario)
    assert early.dead_ends == 1, "a gate over all launches runs full of b"


def test_ranges_hold_the_mix_in_the_long_run() -> None:
    sources = {"fast": Source(32, 15.0, 0.5), "slow": Source(16, 120.0, 1.0)}
    scenario = Scenario(sources, 32, mini_batches=16, slack=6, batches=20, warmup=4)
    report = simulate(scenario, pacing=True)
    assert abs(report.trained["slow"] / (20 * 16) - 1) < 0.03
