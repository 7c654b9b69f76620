"""Admission against a naive reference that re-sorts everything and tries every completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from makers import completable, group, rows
from mixtures import (
    SMALL,
    Counts,
    crossed_specs,
    free_specs,
    mixed_specs,
    more,
    nested_specs,
    window_specs,
)
from mixtures import (
    Spec as Mixture,
)

from knit_data.admission import Admission, Sizes, deal, mini_batch
from knit_data.errors import InvalidArgument
from knit_data.groups import Group
from knit_data.infos import InfoTable
from knit_data.ledger import Progress
from knit_data.quotas import Bounds, Combination, Quotas
from knit_data.seats import QuotaSeats
from knit_data.staleness import Staleness

NAMES = ("a", "b", "c")


@cache
def table_of(name: str, writer: int, segment: int) -> InfoTable:
    return rows(group(name, 1, lengths=[2]), writer, segment)


def waiting(name: str, value: str = "a", version: int = 0, writer: int = 0, segment: int = 0) -> Group:
    return Group(name, table_of(name, writer, segment), (value,), version, 1)


@dataclass(frozen=True)
class Spec:
    bounds: tuple[tuple[int, int], ...]
    sizes: Sizes
    staleness: Staleness | None

    def admission(self, seed: int = 0) -> Admission:
        values = {n: Bounds(*b) for n, b in zip(NAMES, self.bounds, strict=False)}
        return Admission(self.sizes, Quotas({"source": values}), self.staleness, seed)


@st.composite
def specs(draw: st.DrawFn, stale: bool = True, epochs: int = 2) -> Spec:
    mini, minis = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size = mini * minis
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
    bounds = []
    for low, high in zip([0, *cuts], [*cuts, size], strict=True):
        count = high - low
        bounds.append((draw(st.integers(0, count)), min(size, count + draw(st.integers(0, 2)))))
    rule = None
    if stale and draw(st.booleans()):
        unit, abandoned = (
            draw(st.sampled_from(["train_batch", "optimizer_step"])),
            draw(st.sampled_from(["accept", "drop"])),
        )
        rule = Staleness(draw(st.integers(0, 2)), unit, abandoned=abandoned)
    return Spec(tuple(bounds), Sizes(size, mini, draw(st.integers(1, epochs))), rule)


@st.composite
def arrivals(draw: st.DrawFn, spec: Spec, count: int = 24) -> list[Group]:
    n = draw(st.integers(0, count))
    places = draw(st.permutations([(w, s) for w in range(2) for s in range(count // 2)]))
    return [
        waiting(
            f"g{i}",
            NAMES[draw(st.integers(0, len(spec.bounds) - 1))],
            draw(st.integers(0, 3 * spec.sizes.clock.steps)),
            *places[i],
        )
        for i in range(n)
    ]


class Naive:
    """Groups in a list, sorted anew for every seat; a seat is taken if some completion of the batch exists."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.pool = spec, list[Group]()
        self.counts = [0] * len(spec.bounds)
        self.k = self.e = self.j = 0

    def expire(self) -> list[tuple[str, str]]:
        rule, steps = self.spec.staleness, self.spec.sizes.epochs * self.spec.sizes.minis
        out: list[tuple[str, str]] = []
        if rule is None or self.e:
            return out
        limit = rule.limit * (steps if rule.unit == "train_batch" else 1)
        for g in list(self.pool):
            reason = ""
            if self.k * steps - g.version > limit:
                reason = "stale"
            elif g.version > self.k * steps + self.j and rule.abandoned == "drop":
                reason = "abandoned"
            if reason:
                self.pool.remove(g)
                out.append((g.name, reason))
        return sorted(out)

    def fits(self, chosen: list[Group]) -> bool:
        after = [n + sum(g.combination == (v,) for g in chosen) for n, v in zip(self.counts, NAMES, strict=False)]
        left = self.spec.sizes.train_batch - sum(after)
        return left >= 0 and completable(after, self.spec.bounds, left)

    def choose(self) -> list[Group] | None:
        chosen: list[Group] = []
        while len(chosen) < self.spec.sizes.mini_batch:
            rest = sorted((g for g in self.pool if g not in chosen), key=lambda g: g.order)
            found = next((g for g in rest if self.fits([*chosen, g])), None)
            if found is None:
                return None
            chosen.append(found)
        return chosen

    def commit(self, chosen: list[Group]) -> None:
        for g in chosen:
            self.pool.remove(g)
            self.counts[NAMES.index(g.combination[0])] += 1

    def step(self) -> None:
        self.j += 1
        if self.j == self.spec.sizes.minis:
            self.e, self.j = self.e + 1, 0
        if self.e == self.spec.sizes.epochs:
            self.k, self.e, self.counts = self.k + 1, 0, [0] * len(self.counts)


@given(st.data())
def test_any_interleaving_of_arrivals_and_admissions(data: st.DataObject) -> None:
    spec = data.draw(specs())
    made, naive = spec.admission(), Naive(spec)
    groups = data.draw(arrivals(spec))
    trained: dict[int, list[list[Group]]] = {}
    fates: Counter[str] = Counter()

    def admit() -> bool:
        expected = naive.expire()
        gone = made.expire() if not made.progress.epoch else []
        assert sorted((g.name, reason) for g, reason in gone) == expected
        fates.update(name for name, _ in expected)
        chosen, before = made.choose(), made.progress
        assert (before.train_batch, before.epoch, before.position) == (naive.k, naive.e, naive.j)
        if before.epoch == 0:
            reference = naive.choose()
            assert chosen == reference, "oldest first among those that fit"
            if chosen is None:
                return False
            naive.commit(chosen)
            assert made.seats.counts.keys() == {(v,) for v in NAMES[: len(spec.bounds)]}
            fates.update(g.name for g in chosen)
        assert chosen is not None
        trained.setdefault(before.train_batch * spec.sizes.epochs + before.epoch, []).append(chosen)
        index, last = made.commit(chosen)
        assert index == spec.sizes.index(before)
        naive.step()
        assert last == (naive.k > before.train_batch)
        return True

    for g in groups:
        made.offer(g)
        naive.pool.append(g)
        while data.draw(st.booleans()) and admit():
            pass
    while admit():
        pass
    for number, minis in trained.items():
        passed = [g for mini in minis for g in mini]
        assert len({g.name for g in passed}) == len(passed), "each group once a pass"
        assert all(len(mini) == spec.sizes.mini_batch for mini in minis)
        if len(minis) == spec.sizes.minis:
            for value, (low, high) in zip(NAMES, spec.bounds, strict=False):
                assert low <= sum(g.combination == (value,) for g in passed) <= high
        first = trained[number - number % spec.sizes.epochs]
        if number % spec.sizes.epochs:
            assert {g.name for mini in minis for g in mini} <= {g.name for mini in first for g in mini}
            if len(minis) == spec.sizes.minis:
                assert {g.name for g in passed} == {g.name for mini in first for g in mini}
    assert set(fates) | {g.name for g in made.waiting.values()} == {g.name for g in groups}
    assert set(fates.values()) <= {1} and not fates.keys() & {g.name for g in made.waiting.values()}


@given(st.data())
def test_greedy_finds_a_mini_batch_whenever_one_exists(data: st.DataObject) -> None:
    spec = data.draw(specs(stale=False, epochs=1))
    made, naive = spec.admission(), Naive(spec)
    for g in data.draw(arrivals(spec, 8)):
        made.offer(g)
        naive.pool.append(g)
    while True:
        exists = any(naive.fits(list(c)) for c in combinations(naive.pool, spec.sizes.mini_batch))
        chosen = made.choose()
        assert (chosen is not None) == exists
        if chosen is None or naive.k:
            return
        naive.commit(chosen)
        made.commit(chosen)
        naive.step()


@given(st.data())
def test_no_arrival_order_leads_to_a_dead_end(data: st.DataObject) -> None:
    """With enough of every value, each train batch fills, whatever came first."""
    spec = data.draw(specs(stale=False, epochs=1))
    made = spec.admission()
    first = data.draw(st.sampled_from(NAMES[: len(spec.bounds)]))
    order = [first] * spec.sizes.train_batch
    order += [n for n in NAMES[: len(spec.bounds)] if n != first for _ in range(spec.sizes.train_batch)]
    for i, value in enumerate(order):
        made.offer(waiting(f"g{i}", value, 0, 0, i))
        while made.progress.train_batch == 0 and (chosen := made.choose()) is not None:
            made.commit(chosen)
    assert made.progress.train_batch == 1


def test_an_older_group_that_comes_late_goes_first() -> None:
    made = Admission(Sizes(4, 2), Quotas(), None)
    for name, version, segment in (("new", 5, 0), ("old", 3, 1)):
        made.offer(Group(name, table_of(name, 0, segment), (), version, 1))
        if name == "new":
            assert made.choose() is None, "nothing is committed before the whole mini-batch is found"
    assert [g.name for g in made.choose() or []] == ["old", "new"]
    made.offer(Group("older", table_of("older", 1, 0), (), 2, 1))
    assert [g.name for g in made.choose() or []] == ["older", "old"]
    assert made.seats.left == 4 and len(made.waiting) == 3


# -- several attributes, a support, windows ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """All that admission looks at."""

    key: int
    order: tuple[int, ...]
    combination: Combination
    version: int = 0


@dataclass
class Enumerated:
    """Every set of waiting groups is tried, oldest first, against all ways there are to fill the train batch."""

    mixture: Mixture
    alive: set[Counts]
    counts: Counts
    pool: list[Waiting] = field(default_factory=list)

    def after(self, some: Sequence[Combination]) -> Counts:
        return tuple(n + some.count(key) for n, key in zip(self.counts, self.mixture.keys, strict=True))

    def choose(self, held: Sequence[Combination] = ()) -> list[Waiting] | None:
        """The oldest of the sets that keep the batch possible, with seats for ``held`` in it."""
        rest = sorted(self.pool, key=lambda g: g.order)
        for chosen in combinations(rest, self.mixture.mini or 1):
            after = self.after([g.combination for g in chosen])
            if after in self.alive and self.takes(after, held):
                return list(chosen)
        return None

    def takes(self, counts: Counts, held: Sequence[Combination]) -> bool:
        """Whether some full train batch beyond these counts has the held ones, too."""
        wanted = tuple(n + held.count(key) for n, key in zip(counts, self.mixture.keys, strict=True))
        full = (c for c in self.reach(counts) if sum(c) == self.mixture.size)
        return any(all(a >= b for a, b in zip(c, wanted, strict=True)) for c in full)

    def reach(self, counts: Counts) -> set[Counts]:
        out, layer = {counts}, {counts}
        while layer:
            layer = {c for less in layer for i in range(len(less)) if (c := more(less, i)) in self.alive}
            out |= layer
        return out

    def commit(self, chosen: Sequence[Waiting]) -> None:
        self.counts = self.after([g.combination for g in chosen])
        assert self.counts in self.alive, "the batch can still be completed"
        for g in chosen:
            self.pool.remove(g)
        if sum(self.counts) == self.mixture.size:
            for term, (low, high) in self.mixture.terms().items():
                assert low <= self.mixture.of(term, self.counts) <= high, "a full train batch meets every quota"
            self.counts = (0,) * len(self.counts)


@st.composite
def in_mini_batches(draw: st.DrawFn, specs: st.SearchStrategy[Mixture]) -> Mixture:
    mixture = draw(specs)
    minis = [n for n in (1, 2, 3) if mixture.size % n == 0]
    return replace(mixture, mini=mixture.mini or draw(st.sampled_from(minis)))


@st.composite
def coming(draw: st.DrawFn, mixture: Mixture, count: int) -> list[Waiting]:
    seats = draw(st.lists(st.sampled_from(mixture.keys), max_size=count))
    places = draw(st.permutations(range(len(seats))))
    ages = draw(st.lists(st.integers(0, 2), min_size=len(seats), max_size=len(seats)))
    return [Waiting(i, (ages[i], at), c) for i, (at, c) in enumerate(zip(places, seats, strict=True))]


def both(mixture: Mixture) -> tuple[Admission[Waiting], Enumerated]:
    alive, zero = mixture.alive(), (0,) * len(mixture.keys)
    assume(zero in alive)
    made: Admission[Waiting] = Admission(Sizes(mixture.size, mixture.mini or 1), mixture.quotas(), None)
    return made, Enumerated(mixture, alive, zero)


STRUCTURES = pytest.mark.parametrize("specs", [free_specs, nested_specs, crossed_specs, mixed_specs, window_specs])


@STRUCTURES
@settings(SMALL, max_examples=150)
@given(data=st.data())
def test_a_mixture_admits_the_oldest_set_that_keeps_every_quota_possible(specs: Any, data: st.DataObject) -> None:
    """Any interleaving of arrivals and admissions. A window holds after each mini-batch: beyond it nothing is alive."""
    made, reference = both(data.draw(in_mini_batches(specs())))
    for g in data.draw(coming(reference.mixture, 9)):
        made.offer(g)
        reference.pool.append(g)
        while data.draw(st.booleans()) or len(reference.pool) == 8:
            chosen = made.choose()
            assert chosen == reference.choose()
            if chosen is None:
                break
            made.commit(chosen)
            reference.commit(chosen)
        assert list(made.waiting.values()) == reference.pool


@STRUCTURES
@settings(SMALL, max_examples=60)
@given(data=st.data())
def test_a_mixture_fills_from_what_its_demand_asks_for(specs: Any, data: st.DataObject) -> None:
    """Whatever came first: when all comes that the train batch asks for, there is a mini-batch; and what minima
    reserve is part of a way to fill the batch."""
    made, reference = both(data.draw(in_mini_batches(specs())))
    for g in data.draw(coming(reference.mixture, 6)):
        made.offer(g)
        reference.pool.append(g)
        if made.progress.train_batch == 0 and (chosen := made.choose()):
            made.commit(chosen)
            reference.commit(chosen)
    if made.progress.train_batch:
        return
    short = made.deficits()
    if reference.mixture.window is None:
        assert reference.takes(reference.counts, [c for c, n in short.items() for _ in range(n)])
    count = 100
    while made.progress.train_batch == 0:
        if (chosen := made.choose()) is None:
            for c, n in made.plan().items():
                for _ in range(n):
                    reference.pool.append(Waiting(count, (9, count), c))
                    made.offer(reference.pool[-1])
                    count += 1
            chosen = made.choose()
            assert chosen is not None, "what was asked for came"
        made.commit(chosen)
        reference.commit(chosen)


@STRUCTURES
@settings(SMALL, max_examples=100)
@given(data=st.data())
def test_a_mixture_keeps_seats_for_what_is_held(specs: Any, data: st.DataObject) -> None:
    """Where quotas have room for all that is held beside a mini-batch, it gets its seats."""
    made, reference = both(data.draw(in_mini_batches(specs())))
    held = data.draw(st.lists(st.sampled_from(reference.mixture.keys), max_size=3))
    for g in data.draw(coming(reference.mixture, 7)):
        made.offer(g)
        reference.pool.append(g)
        possible = reference.takes(reference.counts, held)
        chosen = made.choose(Counter(held))
        if chosen is not None:
            after = reference.after([g.combination for g in chosen])
            assert after in reference.alive
            if possible and reference.mixture.window is None:
                assert reference.takes(after, held)
        if possible and reference.mixture.window is None:
            assert chosen == reference.choose(held)
        assert made.choose() == reference.choose(), "nothing of it stays"
        if chosen is not None:
            made.commit(chosen)
            reference.commit(chosen)


def test_held_seats_do_not_move_the_mini_batch_that_a_window_looks_at() -> None:
    """Held groups come later; the window is that of the mini-batch which is chosen now."""
    quotas = Quotas({"s": {"a": 4, "b": 4}}, mini_window=0)
    made: Admission[Waiting] = Admission(Sizes(8, 4), quotas, None)
    for i, value in enumerate("aabb"):
        made.offer(Waiting(i, (i,), (value,)))
    chosen = made.choose({("a",): 2})
    assert chosen is not None and [g.combination[0] for g in chosen] == ["a", "a", "b", "b"]
    made.commit(chosen)
    for i, value in enumerate("aabb", 4):
        made.offer(Waiting(i, (i,), (value,)))
    assert made.choose({("a",): 2}) is None, "the last mini-batch waits for them"
    assert made.choose() is not None


def test_a_search_that_gives_up_goes_on_with_the_next_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve values of each of two attributes once each: the oldest groups take rows and columns of each other's."""
    n = 12
    names = [f"{i:02}" for i in range(n)]
    quotas = Quotas({"row": dict.fromkeys(names, 1), "column": dict.fromkeys(names, 1)})
    made: Admission[Waiting] = Admission(Sizes(n, n), quotas, None)
    for i in range(n - 1):
        for j in range(n - 1):  # the last row and the last column are missing
            made.offer(Waiting(i * n + j, (i, j), (names[i], names[j])))
    looks = 0
    admissible = QuotaSeats.admissible

    def counted(seats: QuotaSeats, combination: Combination) -> bool:
        nonlocal looks
        looks += 1
        return admissible(seats, combination)

    monkeypatch.setattr(QuotaSeats, "admissible", counted)
    assert made.choose() is None and looks > 256
    given_up, looks = looks, 0
    assert made.choose() is None and looks == 0, "nothing has changed"
    made.offer(Waiting(n * n, (n,), (names[-1], names[-1])))
    assert made.choose() is not None and looks < given_up


# -- staleness ---------------------------------------------------------------------------------------------------------


def test_staleness_is_tested_at_admission_inclusive() -> None:
    made = Admission(Sizes(2, 1), Quotas(), Staleness(1))
    made.restore(Progress(3), {}, [])
    for version in (3, 4, 5):
        made.offer(Group(f"v{version}", table_of(f"v{version}", 0, version), (), version, 1))
    assert [(g.name, reason) for g, reason in made.expire()] == [("v3", "stale")], (
        "a = 6 - 3 is above one batch of 2 steps"
    )
    assert [g.name for g in made.choose() or []] == ["v4"]
    assert made.expire() == []
    made.restore(Progress(4), {}, [])
    assert sorted(g.name for g, _ in made.expire()) == ["v4", "v5"] and not made.waiting


@pytest.mark.parametrize("abandoned", ["accept", "drop"])
def test_versions_of_an_abandoned_timeline(abandoned: str) -> None:
    made = Admission(Sizes(4, 1), Quotas(), Staleness(0, abandoned=abandoned))
    made.restore(Progress(1, 0, 2), {(): 2}, [])
    for version in (6, 7):  # the trainer is at step 6
        made.offer(Group(f"v{version}", table_of(f"v{version}", 0, version), (), version, 1))
    assert [(g.name, reason) for g, reason in made.expire()] == ([] if abandoned == "accept" else [("v7", "abandoned")])
    assert [g.name for g in made.waiting.values()] == (["v6", "v7"] if abandoned == "accept" else ["v6"])


# -- passes and the end ------------------------------------------------------------------------------------------------


def run(made: Admission) -> list[tuple[int, Progress, list[str], bool]]:
    out = []
    while not made.over:
        chosen = made.choose()
        if chosen is None:
            if not made.cut_short():
                break
            continue
        before = made.progress
        index, last = made.commit(chosen)
        out.append((index, before, [g.name for g in chosen], last))
    return out


def filled(count: int, epochs: int = 3, seed: int = 0, sizes: tuple[int, int] = (6, 2)) -> Admission:
    made = Admission(Sizes(*sizes, epochs), Quotas(), None, seed)
    for i in range(count):
        made.offer(Group(f"g{i}", table_of(f"g{i}", 0, i), (), 0, 1))
    return made


def test_each_pass_deals_the_same_groups_in_another_order() -> None:
    steps = run(filled(12))
    assert [index for index, *_ in steps] == list(range(18))
    assert [last for *_, last in steps] == [False] * 8 + [True] + [False] * 8 + [True]
    passes = [[n for _, _, names, _ in steps[i : i + 3] for n in names] for i in range(0, 18, 3)]
    assert passes[0] == [f"g{i}" for i in range(6)] and passes[3] == [f"g{i}" for i in range(6, 12)]
    assert [sorted(p) for p in passes] == [sorted(passes[0])] * 3 + [sorted(passes[3])] * 3
    assert len({tuple(p) for p in passes}) == 6
    assert run(filled(12)) == steps, "the order follows from the seed"
    assert run(filled(12, seed=1)) != steps


def test_the_deal_is_pinned() -> None:
    """Resumed runs, and other releases, must deal alike."""
    assert deal(0, 0, 1, 6) == [5, 0, 1, 4, 2, 3]
    assert deal(0, 0, 2, 6) == [2, 1, 5, 3, 4, 0]
    assert deal(7, 3, 1, 6) == [5, 2, 3, 0, 4, 1]
    assert all(sorted(deal(s, k, e, 9)) == list(range(9)) for s in range(3) for k in range(3) for e in range(1, 3))


def test_the_stream_ends_inside_a_train_batch() -> None:
    steps = run(filled(6 + 5))  # two full mini-batches and one group of the second train batch
    assert [index for index, *_ in steps] == [*range(9), 9, 10, 12, 13, 15, 16], "gaps where mini-batches are missing"
    assert [p.position for _, p, *_ in steps[9:]] == [0, 1] * 3
    assert not any(last for *_, last in steps[9:])
    assert [sorted(steps[i][2] + steps[i + 1][2]) for i in (9, 11, 13)] == [["g6", "g7", "g8", "g9"]] * 3
    made = filled(6 + 5)
    run(made)
    assert [g.name for g in made.waiting.values()] == ["g10"] and made.over


@pytest.mark.parametrize(
    ("count", "epochs", "steps"), [(0, 3, 0), (1, 3, 0), (6, 3, 9), (7, 3, 9), (5, 1, 2), (6, 1, 3)]
)
def test_only_full_mini_batches_are_trained(count: int, epochs: int, steps: int) -> None:
    made = filled(count, epochs)
    assert len(run(made)) == steps
    assert len(made.waiting) == count % 2
    assert not made.cut_short()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 40))
def test_a_restored_admission_goes_on_alike(mini: int, minis: int, epochs: int, count: int) -> None:
    assume(count <= 3 * mini * minis)
    steps = run(filled(count, epochs, 0, (mini * minis, mini)))
    for cut in range(len(steps) + 1):
        made = filled(count, epochs, 0, (mini * minis, mini))
        for _ in range(cut):
            made.choose() or made.cut_short()
            made.commit(made.choose() or [])
        twin = Admission(made.sizes, made.quotas, None)
        twin.restore(made.progress, made.seats.counts, made.batch)
        for g in made.waiting.values():
            twin.offer(g)
        assert run(twin) == steps[cut:]


def test_a_mini_batch_keeps_the_rows_of_a_group_together() -> None:
    tables = [rows(group("a", 3)), rows(group("b", 2), 1)]
    made = mini_batch(tables, 7, Progress(1, 0, 2), True)
    assert [i.id for i in made.infos] == ["a/0", "a/1", "a/2", "b/0", "b/1"]
    assert (made.group_rows, made.n_groups) == ((3, 2), 2)
    assert (made.index, made.train_batch, made.epoch, made.position, made.is_last) == (7, 1, 0, 2, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((8, 3), "train_batch_size=8 groups cannot be cut into mini-batches of mini_batch_size=3"),
        ((0, 1), "train_batch_size must be an int of at least 1, found 0"),
        ((4, True), "mini_batch_size must be an int of at least 1, found True"),
        ((4, 2.0), "mini_batch_size must be an int of at least 1, found 2.0"),
        ((4, 2, 0), "epochs must be an int of at least 1, found 0"),
    ],
)
def test_sizes(arguments: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Sizes(*arguments)
