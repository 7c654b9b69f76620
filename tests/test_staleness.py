"""Architectural staleness: its definition, its bound, and its identity."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, count, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import Waiting

from knit_data.admission import Admission, Sizes
from knit_data.errors import InvalidArgument
from knit_data.ledger import Progress
from knit_data.quotas import Quotas
from knit_data.staleness import Clock, Staleness, statistics


@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 200), st.data())
def test_the_gap_is_the_colocated_gap_and_the_excess(k: int, epochs: int, minis: int, v: int, data: st.DataObject):
    sizes = Sizes(minis * 3, 3, epochs)
    e, j = data.draw(st.integers(0, epochs - 1)), data.draw(st.integers(0, minis - 1))
    u = sizes.index(Progress(k, e, j))
    assert u == k * epochs * minis + e * minis + j
    colocated = u - k * sizes.clock.steps  # published right before the train batch
    assert u - v == colocated + sizes.clock.excess(train_batch=k, version=v)


def test_worked_examples() -> None:
    clock = Clock(8)
    assert clock.excess(train_batch=3, version=24) == 0, "published when its train batch began"
    assert clock.excess(train_batch=3, version=16) == 8, "one train batch older"
    assert clock.excess(train_batch=3, version=27) == -3, "published inside the batch"


@given(st.integers(0, 5), st.integers(1, 6), st.integers(-50, 50))
def test_limits_are_inclusive_in_both_units(limit: int, steps: int, excess: int) -> None:
    clock = Clock(steps)
    assert Staleness(limit).admits(excess, clock) == (max(excess, 0) / steps <= limit)
    assert Staleness(limit, unit="optimizer_step").admits(excess, clock) == (max(excess, 0) <= limit)


def test_the_limit_itself_is_admitted_and_one_step_more_is_not() -> None:
    clock = Clock(4)
    batches, steps = Staleness(2), Staleness(2, unit="optimizer_step")
    assert [batches.admits(a, clock) for a in (-1, 0, 8, 9)] == [True, True, True, False]
    assert [steps.admits(a, clock) for a in (-1, 0, 2, 3)] == [True, True, True, False]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0, 3)), min_size=1, max_size=20),
    st.integers(0, 5),
    st.integers(1, 8),
    st.data(),
)
def test_statistics_against_a_plain_loop(
    tags: list[tuple[int, float]], k: int, steps: int, data: st.DataObject
) -> None:
    index = k * steps + data.draw(st.integers(0, steps - 1))
    versions = [v for v, _ in tags]
    means = [v + more for v, more in tags]
    found = statistics(np.array(versions), np.array(means), index=index, train_batch=k, clock=Clock(steps))
    excess = [max(k * steps - v, 0) for v in versions]
    near = {
        "staleness/mean": sum(excess) / len(excess) / steps,
        "staleness/max": max(excess) / steps,
        "staleness/token_mean": sum(max(k * steps - m, 0) for m in means) / len(means) / steps,
        "staleness/steps_mean": sum(excess) / len(excess),
        "staleness/signed_steps_mean": sum(k * steps - v for v in versions) / len(versions),
        "staleness/gap_mean": sum(index - v for v in versions) / len(versions),
    }
    ranked, at = sorted(excess), 0.99 * (len(excess) - 1)
    between = ranked[int(at)] + (at - int(at)) * (ranked[min(int(at) + 1, len(ranked) - 1)] - ranked[int(at)])
    near |= {"staleness/steps_p99": between, "staleness/p99": between / steps}
    assert found.keys() == near.keys()
    for name, value in near.items():  # sums of floats in another order
        assert found[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


@given(st.lists(st.integers(0, 60), min_size=1, max_size=300), st.integers(1, 8))
def test_percentiles_are_those_of_numpy(ages: list[int], steps: int) -> None:
    versions = 60 - np.array(ages)
    found = statistics(versions, versions.astype(float), index=0, train_batch=60, clock=Clock(steps))
    lag = 60.0 * steps - versions
    assert found["staleness/steps_p99"] == np.percentile(lag, 99)
    assert found["staleness/p99"] == np.percentile(lag / steps, 99)


def test_negative_excess_counts_as_zero_except_in_the_identity() -> None:
    found = statistics(np.array([10, 2]), np.array([10.0, 2.0]), index=5, train_batch=1, clock=Clock(4))
    assert found["staleness/mean"] == 0.25 and found["staleness/steps_mean"] == 1.0
    assert found["staleness/signed_steps_mean"] == -2.0 and found["staleness/gap_mean"] == -1.0


def test_the_identity_on_a_small_schedule() -> None:
    """E[a]/S = E[groups in the system at a publish]/B: weights are published after each train batch, and a group is in
    the system from its start until its train batch begins."""
    batch, steps = 2, 2
    clock = Clock(steps)
    # group -> publishes before it started, train batch that takes it; a long steady run of this pattern
    lives = [(max(k - age, 0), k) for k in range(12) for age in (k % 3, 1)]
    excess = [clock.excess(train_batch=k, version=start * steps) for start, k in lives]
    in_system = [sum(start < publish <= k for start, k in lives) for publish in range(1, 12)]
    assert sum(excess) / steps == sum(in_system)
    train_batches = len(lives) / batch
    assert sum(excess) / len(lives) / steps == sum(in_system) / train_batches / batch


@pytest.mark.parametrize("limit", [-1, 1.0, True, "2", None])
def test_the_limit_is_a_count(limit: object) -> None:
    with pytest.raises(InvalidArgument, match="max_staleness must be an int >= 0"):
        Staleness(limit)  # type: ignore[arg-type]


def test_what_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="'drop' or 'wait', found 'hope'"):
        Staleness(1, strategy="hope")
    with pytest.raises(InvalidArgument, match="'train_batch' or 'optimizer_step', found 'step'"):
        Staleness(1, unit="step")
    with pytest.raises(InvalidArgument, match="'accept' or 'drop', found 'keep'"):
        Staleness(1, abandoned="keep")


@given(st.integers(0, 3), st.sampled_from(["train_batch", "optimizer_step"]), st.integers(1, 5), st.integers(0, 6))
def test_the_last_chance_is_the_last_train_batch_that_admits(limit: int, unit: str, steps: int, version: int) -> None:
    rule, clock = Staleness(limit, unit), Clock(steps)
    admitting = [k for k in range(60) if rule.admits(clock.excess(train_batch=k, version=version), clock)]
    assert [k for k in range(60) if rule.last_chance(version, clock, train_batch=k)] == [admitting[-1]]


def test_what_excludes_an_incomplete_group() -> None:
    clock = Clock(4)
    for rule, expected in (
        (Staleness(1), ["stale", None, None, None, None]),
        (Staleness(1, abandoned="drop"), ["stale", None, None, None, "abandoned"]),
    ):
        found = [rule.excludes(v, clock, train_batch=3, step=13) for v in (7, 8, 12, 13, 14)]
        assert found == expected, "train batch 3 begins at step 12; step 13 is next"


# -- what would expire goes first -------------------------------------------------------------------------------------


def most_batches(pools: dict[str, list[int]], quotas: dict[str, int], limit: int, k: int = 0) -> int:
    """Train batches that the best order of admission completes of groups that are all there: tries every choice."""
    fresh = {s: [v for v in pool if k - v <= limit] for s, pool in pools.items()}
    if any(len(fresh[s]) < n for s, n in quotas.items()):
        return k
    choices = [set(combinations(sorted(fresh[s]), n)) for s, n in quotas.items()]
    best = k
    for choice in product(*choices):
        rest = {
            s: list((Counter(fresh[s]) - Counter(taken)).elements()) for s, taken in zip(quotas, choice, strict=True)
        }
        best = max(best, most_batches(rest, quotas, limit, k + 1))
    return best


@given(st.data())
@settings(max_examples=150)
def test_oldest_first_loses_no_train_batch_to_expiry(data: st.DataObject) -> None:
    """Within a train batch nothing expires, and what expires with it is the oldest: by version is by deadline."""
    quotas = {name: data.draw(st.integers(1, 2)) for name in ("a", "b")[: data.draw(st.integers(1, 2))]}
    limit = data.draw(st.integers(0, 2))
    pools = {name: data.draw(st.lists(st.integers(0, 3), max_size=5)) for name in quotas}
    size = sum(quotas.values())
    made: Admission[Waiting] = Admission(Sizes(size, 1), Quotas({"s": quotas}), Staleness(limit))
    number = count()
    for name, versions in pools.items():
        for version in versions:
            made.offer(Waiting(next(number), (name,), version * size))
    while True:
        made.expire()
        if (chosen := made.choose()) is None:
            break
        made.commit(chosen)
    assert made.progress.train_batch == most_batches(pools, quotas, limit)
