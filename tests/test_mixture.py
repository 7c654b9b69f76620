"""What quotas over several attributes promise, through the sampler and the loader: every single train batch is exact,
whatever arrives first, also after a resume; what is short is said; what cannot work is refused where it is written."""

from __future__ import annotations

import json
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import group, groups_of, loader, memory, sampler
from spawn import Ranks

import knit_data as kd
from knit_data.admission import Admission, Sizes
from knit_data.quotas import Combination, Quotas
from knit_data.store.memory import ManualClock

HANG = 120.0  # seconds; reached only by a test that fails

ANY = (0, None)
NESTED = [("math", "m-hard"), ("math", "m-easy"), ("code", "c-hard"), ("code", "c-easy")]
NESTED_64 = [("math", "a"), ("math", "b"), ("code", "c"), ("code", "d")]
MISSING = [("math", "hard"), ("math", "easy"), ("code", "easy")]


@dataclass(frozen=True)
class Mixture:
    """What a user writes, and the counts that every train batch must have: by value, or by combination."""

    quotas: kd.Quotas
    expected: dict[Combination, tuple[int, int]]  # part of a combination, None for any value: least and most
    size: int = 8
    mini: int = 2

    @property
    def combinations(self) -> list[Combination]:
        seats = kd.seats.QuotaSeats(self.quotas, self.size, None, self.mini)
        if self.quotas.support is not None:
            return list(self.quotas.support)
        out: list[Combination] = [()]
        for values in self.quotas.resolved(self.size).values():
            out = [(*c, value) for c in out for value in values]
        assert all(map(seats.knows, out))
        return out

    def check(self, batch: Sequence[Combination], minis: Sequence[Sequence[Combination]]) -> None:
        """One train batch, exactly; and its pace, where a window asks for one."""
        assert len(batch) == self.size
        for part, (low, high) in self.expected.items():
            assert low <= counted(batch, part) <= high, (part, Counter(batch))
            window, m = self.quotas.mini_window, self.size // self.mini
            if window is not None:
                for j in range(1, m + 1):
                    n = counted([c for mini in minis[:j] for c in mini], part)
                    assert j * low - window * m <= n * m <= j * high + window * m, (part, j)


def counted(batch: Sequence[Combination], part: tuple[str | None, ...]) -> int:
    return sum(all(want in (None, value) for want, value in zip(part, c, strict=True)) for c in batch)


def exact(**counts: int) -> dict[Combination, tuple[int, int]]:
    return {(name,): (n, n) for name, n in counts.items()}


def margins(first: dict[str, int], second: dict[str, int]) -> dict[Any, tuple[int, int]]:
    return {(a, None): (n, n) for a, n in first.items()} | {(None, b): (n, n) for b, n in second.items()}


TWO = {"source": {"math": 4, "code": 4}, "level": {"hard": 2, "easy": 6}}
TWO_MARGINS = margins({"math": 4, "code": 4}, {"hard": 2, "easy": 6})
MIXTURES = {
    "counts": Mixture(kd.Quotas({"source": {"math": 4, "code": (2, 4), "web": kd.at_most(1)}}), {("math",): (4, 4)}),
    "shares": Mixture(kd.Quotas({"source": {"math": 0.5, "code": 0.25, "web": 0.25}}), exact(math=4, code=2, web=2)),
    "at least, at most": Mixture(
        kd.Quotas({"source": {"math": kd.at_least(0.25), "code": kd.at_most(3), "web": (1, None)}}),
        {("math",): (2, 8), ("code",): (0, 3), ("web",): (1, 8)},
    ),
    "nested": Mixture(
        kd.Quotas(
            {"source": {"math": 6, "code": 2}, "kind": {"m-hard": 2, "m-easy": 4, "c-hard": ANY, "c-easy": ANY}}, NESTED
        ),
        margins({"math": 6, "code": 2}, {"m-hard": 2, "m-easy": 4}),
    ),
    "free": Mixture(kd.Quotas(TWO), TWO_MARGINS),
    "missing": Mixture(kd.Quotas(TWO, MISSING), {**TWO_MARGINS, ("math", "hard"): (2, 2), ("code", "easy"): (4, 4)}),
    "bounded": Mixture(
        kd.Quotas(TWO, {**dict.fromkeys([*MISSING, ("code", "hard")]), ("math", "hard"): 1}),
        {**TWO_MARGINS, ("math", "hard"): (1, 1), ("code", "hard"): (1, 1)},
    ),
    "three free": Mixture(
        kd.Quotas({**TWO, "length": {"long": (1, 2), "short": kd.at_least(0.5)}}),
        {
            **{(*part, None): bound for part, bound in TWO_MARGINS.items()},
            (None, None, "long"): (1, 2),
            (None, None, "short"): (4, 8),
        },
    ),
    "free beside tied": Mixture(
        kd.Quotas({**TWO, "length": {"long": 3, "short": 5}}, [(*c, x) for c in MISSING for x in ("long", "short")]),
        {**{(*part, None): bound for part, bound in TWO_MARGINS.items()}, (None, None, "long"): (3, 3)},
    ),
    "stratified": Mixture(kd.Quotas({"source": {"math": 0.5, "code": 0.5}}, mini_window=0), exact(math=4, code=4)),
    "window of 1": Mixture(kd.Quotas({"source": {"math": 5, "code": 3}}, mini_window=1), exact(math=5, code=3)),
    "two paced": Mixture(kd.Quotas(TWO, mini_window=1), TWO_MARGINS),
}
ORDERS: dict[str, Callable[[list[Combination], int], list[Combination]]] = {
    "first value first": lambda every, n: [c for c in every for _ in range(n)],
    "first value last": lambda every, n: [c for c in reversed(every) for _ in range(n)],
    "in turn": lambda every, n: [c for _ in range(n) for c in every],
}


@dataclass(frozen=True)
class Step:
    index: int
    train_batch: int
    epoch: int
    names: tuple[str, ...]


def put(writer: kd.StoreWriter, name: str, quotas: kd.Quotas, combination: Combination) -> None:
    writer.put_group(group(name, 1, attributes=dict(zip(quotas.attributes, combination, strict=True))))


def run(
    mixture: Mixture, arrivals: Sequence[Combination], resume: bool, shuffle: random.Random | None = None
) -> tuple[list[Step], dict[str, Combination]]:
    """Two train batches of two passes. Groups come one by one, what fits is trained at once. ``resume``: every
    mini-batch is the last of its sampler; ``shuffle``: then the rest comes in another order."""
    arguments = {
        **{"train_batch_size": mixture.size, "mini_batch_size": mixture.mini, "group_size": 1},
        **{"epochs": 2, "quotas": mixture.quotas},
    }
    store, rest, steps, sent = memory(ManualClock()), list(arrivals), list[Step](), dict[str, Combination]()
    writer, made = store.writer("w"), sampler(store, **arguments)
    minis = mixture.size // mixture.mini
    while len(steps) < 4 * minis:
        admitted = made.admit(0.0)
        if admitted is None:
            assert rest, made.explain()
            name = f"g{len(sent):03}"
            sent[name] = rest.pop(0)
            put(writer, name, mixture.quotas, sent[name])
            continue
        mini = admitted.mini
        steps.append(Step(mini.index, mini.train_batch, mini.epoch, tuple(groups_of(mini))))
        if resume:
            state = json.loads(json.dumps(made.get_state()))
            made = sampler(store, **arguments)
            made.reset(state)
        if shuffle is not None:
            shuffle.shuffle(rest)
    return steps, sent


def check(mixture: Mixture, steps: Sequence[Step], sent: dict[str, Combination]) -> None:
    minis = mixture.size // mixture.mini
    assert [step.index for step in steps] == list(range(4 * minis))
    for k in range(2):
        first, second = ([s.names for s in steps if (s.train_batch, s.epoch) == (k, epoch)] for epoch in range(2))
        names = [name for mini in first for name in mini]
        mixture.check([sent[name] for name in names], [[sent[name] for name in mini] for mini in first])
        assert sorted(names) == sorted(name for mini in second for name in mini), "later passes train the same groups"
    trained = [name for step in steps if not step.epoch for name in step.names]
    assert len(set(trained)) == len(trained) == 2 * mixture.size


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MIXTURES)
def test_every_train_batch_is_exact_whatever_comes_first(name: str, order: str) -> None:
    mixture = MIXTURES[name]
    arrivals = ORDERS[order](mixture.combinations, 2 * mixture.size)
    steps, sent = run(mixture, arrivals, resume=False)
    check(mixture, steps, sent)
    assert run(mixture, arrivals, resume=True) == (steps, sent), "a resume after every mini-batch changes nothing"


@pytest.mark.parametrize("name", MIXTURES)
def test_every_train_batch_is_exact_when_the_rest_comes_in_another_order_after_a_resume(name: str) -> None:
    mixture = MIXTURES[name]
    arrivals = ORDERS["first value first"](mixture.combinations, 2 * mixture.size)
    check(mixture, *run(mixture, arrivals, resume=True, shuffle=random.Random(name)))


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quotas", "solver", "short"),
    [
        (
            kd.Quotas({"source": {"math": 0.25, "code": kd.at_most(0.75)}}),
            "counting",
            "short of 16 math: math (exactly 16 (0.25 of 64): 0 in, 0 complete, 0 incomplete); code (at most 48 (0.75 ",
        ),
        (
            kd.Quotas({"source": {"math": 0.25, "code": 0.75}, "kind": dict.fromkeys("abcd", (8, None))}, NESTED_64),
            "interval propagation",
            "short of 16 source=math, 48 source=code, 8 kind=a, 8 kind=b, 8 kind=c, 8 kind=d: source=math (exactly 16 ",
        ),
        (
            kd.Quotas({"source": {"math": 0.25, "code": 0.75}, "level": {"hard": 5, "easy": 59}}, MISSING),
            "flow with lower bounds",
            "short of 16 source=math, 48 source=code, 5 level=hard, 59 level=easy: source=math (exactly 16 (0.25 of",
        ),
        (
            kd.Quotas({"source": {"math": 0.26, "code": 47}}, mini_window=2),
            "flow with lower bounds",
            "short of 17 math, 47 code: math (exactly 17 (0.26 of 64): 0 in",
        ),
    ],
)
def test_waiting_says_what_is_short_as_it_was_written_and_who_decides(
    quotas: kd.Quotas, solver: str, short: str
) -> None:
    clock = ManualClock()
    made = sampler(
        memory(clock), train_batch_size=64, mini_batch_size=4, group_size=1, quotas=quotas, max_staleness=1, timeout=9.0
    )
    with pytest.raises(kd.WaitTimeout) as caught:
        made.next()
    text = made.explain()
    assert text in str(caught.value)
    assert short in text and text.endswith(f"seats left; decided by {solver}.")


def test_the_share_that_was_rounded_is_shown() -> None:
    made = sampler(memory(ManualClock()), train_batch_size=10, quotas={"s": {"a": 0.5, "b": 0.25, "c": 0.25}})
    assert made.admit(0.0) is None
    text = made.explain()
    assert all(part in text for part in ("a (exactly 5 (0.5 of 10)", "b (exactly 3 (0.25 of", "c (exactly 2 (0.25 of"))


@pytest.mark.parametrize("name", ["free", "missing", "bounded", "three free", "nested"])
def test_what_the_demand_asks_for_and_any_free_ones_finish_the_train_batch(name: str) -> None:
    mixture = MIXTURES[name]
    combinations = mixture.combinations
    for begun in range(0, mixture.size + 1, mixture.mini):
        store = memory(ManualClock())
        made = sampler(store, train_batch_size=mixture.size, group_size=1, quotas=mixture.quotas)
        writer, seats = store.writer("w"), kd.seats.QuotaSeats(mixture.quotas, mixture.size)
        made.admit(0.0)
        for i in range(begun):  # only what fits, so that nothing is left waiting
            fits = next(c for c in [*combinations[i % 2 :], *combinations] if seats.admissible(c))
            seats.admit(fits)
            put(writer, f"a{i}", mixture.quotas, fits)
        for _ in range(begun // mixture.mini):
            assert made.admit(0.0) is not None
        if begun == mixture.size:
            continue
        demand = store.demand()
        assert demand.free == made.free_seats() == mixture.size - begun - sum(demand.deficits.values())
        wanted = [c for c, n in demand.deficits.items() for _ in range(n)]
        for c in wanted:
            seats.admit(c)
        for _ in range(demand.free):
            wanted.append(next(c for c in reversed(combinations) if seats.admissible(c)))
            seats.admit(wanted[-1])
        for i, c in enumerate(reversed(wanted)):
            put(writer, f"b{i}", mixture.quotas, c)
        for _ in range((mixture.size - begun) // mixture.mini):
            assert made.admit(0.0) is not None, made.explain()
        assert store.demand().train_batch == 1


# -- what is refused ---------------------------------------------------------------------------------------------------

LEVELS = {"source": {"math": 4, "code": 4}, "level": {"hard": 6, "easy": 2}}


@pytest.mark.parametrize(
    ("mapping", "options", "text"),
    [
        (
            LEVELS,
            {"support": MISSING},
            r"exclude each other \(source=math exactly 4, level=hard exactly 6\)",
        ),
        (
            {**LEVELS, "length": {"long": (0, 8), "short": (0, 8)}},
            {"support": [(*c, x) for c in MISSING for x in ("long", "short")]},
            r"exclude each other \(source=math exactly 4, level=hard exactly 6\)",
        ),
        (
            TWO,
            {"support": {**dict.fromkeys(MISSING), ("code", "hard"): (3, 4)}},
            r"exclude each other \(level=easy exactly 6, code/hard 3 to 4\)",
        ),
        (
            {"source": {"math": 5, "code": 4, "web": 1}},
            {},
            r"at least 9 groups \(math exactly 5, code exactly 4\)",
        ),
        (TWO, {"support": [*MISSING, ("code", "odd")]}, r"\('code', 'odd'\), but quotas\['level'\] has no value 'odd'"),
        (
            {a: {f"{a}1": 4, f"{a}2": 4} for a in "xyz"},
            {"support": [("x1", "y1", "z1"), ("x1", "y2", "z2"), ("x2", "y1", "z2"), ("x2", "y2", "z1")]},
            "x, y and z cross, and the support ties them together",
        ),
        ({"source": {"math": 0.05, "code": 0.95}}, {}, "a share of 0.05 rounds to 0 groups of train_batch_size=8"),
        (
            {"source": {"math": 4, "code": 4}, "kind": {"m-hard": 2, "m-easy": 2, "c-hard": 2, "c-easy": 2}},
            {"support": NESTED, "mini_window": 1},
            "mini_window=1 needs attributes that combine freely; the support restricts .* of source and kind",
        ),
        ({"source": {"math": 3, "code": 5}}, {"mini_window": 0}, r"keep within mini_window=0 .*\(code exactly 5\): 8"),
    ],
)
def test_quotas_that_cannot_work_are_refused_by_the_sampler(mapping: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(kd.InvalidArgument, match=text):
        sampler(memory(), quotas=kd.Quotas(mapping, **options))


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (
            {"source": "math"},
            r"has no attribute 'level', which the quotas count; .* are \{'source': 'math'\}",
        ),
        ({"source": "web", "level": "easy"}, "has 'web' as attribute 'source' and 'easy' as attribute 'level', which"),
        (
            {"source": "code", "level": "hard"},
            "has 'code' as attribute 'source' and 'hard' as attribute 'level',",
        ),
    ],
)
def test_groups_that_no_quota_counts(attributes: dict[str, str], text: str) -> None:
    def filled() -> kd.TrajectoryStore:
        store = memory(ManualClock())
        writer = store.writer("w")
        writer.put_group(group("odd", 1, attributes=attributes))
        for i, c in enumerate([("math", "hard")] * 2 + [("math", "easy")] * 2 + [("code", "easy")] * 4):
            put(writer, f"g{i}", quotas, c)
        return store

    quotas = kd.Quotas(TWO, MISSING)
    with pytest.raises(kd.InvalidGroup, match=text):
        sampler(filled(), group_size=1, quotas=quotas).next()
    made = sampler(filled(), group_size=1, quotas=quotas, groups=kd.GroupPolicy(invalid="drop"))
    assert sum(made.next().n_groups for _ in range(4)) == 8
    assert made.dropped() == {"invalid": 1}


# -- other quotas after a resume ---------------------------------------------------------------------------------------

PLAIN = {"source": {"math": 4, "code": 4}, "level": {"hard": (0, 8), "easy": (0, 8)}}
OTHERS = {
    "counts": kd.Quotas({**PLAIN, "source": {"math": 6, "code": 2}}),
    "another attribute": kd.Quotas({"level": {"hard": 4, "easy": 4}}),
    "attributes the other way round": kd.Quotas(dict(reversed(PLAIN.items()))),
    "a support": kd.Quotas(PLAIN, MISSING),
    "a bounded combination": kd.Quotas(PLAIN, {**dict.fromkeys(MISSING), ("code", "hard"): (0, 1)}),
    "a window": kd.Quotas(PLAIN, mini_window=1),
    "none": kd.Quotas(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_quotas_change_between_train_batches_only(name: str) -> None:
    def open_sampler(quotas: kd.Quotas) -> kd.QuotaSampler:
        return sampler(store, group_size=1, quotas=quotas, groups=kd.GroupPolicy(invalid="drop"))

    before, after = kd.Quotas(PLAIN), OTHERS[name]
    store = memory(ManualClock())
    writer, made = store.writer("w"), open_sampler(before)
    every = [("math", "hard"), ("math", "easy"), ("code", "hard"), ("code", "easy")]
    for i in range(48):
        put(writer, f"g{i:02}", before, every[i % 4])
    for j in range(4):
        made.next()
        state = json.loads(json.dumps(made.get_state()))
        if j < 3:
            with pytest.raises(kd.StateError, match=r"saved with quotas=.* resume with the same value until the train"):
                open_sampler(after).reset(state)
            open_sampler(kd.Quotas(PLAIN)).reset(state)
    resumed = open_sampler(after)
    resumed.reset(state)
    batch = [info.attributes for _ in range(4) for info in resumed.next().infos]
    for attribute, values in after.resolved(8).items():
        for value, bound in values.items():
            n = sum(attributes[attribute] == value for attributes in batch)
            assert bound.low <= n <= (8 if bound.high is None else bound.high)
    if after.support:
        assert {(a["source"], a["level"]) for a in batch} <= set(after.support)


def test_quotas_are_told_apart_by_any_name() -> None:
    """Joined by an equals sign, both would be a=b=c."""
    one = kd.Quotas({"a=b": {"c": 1, "d": 3}, "a": {"b=c": 2, "b=d": 2}})
    two = kd.Quotas({"a=b": {"c": 2, "d": 2}, "a": {"b=c": 2, "b=d": 2}})
    assert one.to_json(4) != two.to_json(4)


# -- through the loader, on two ranks ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def trained(rank: int, _world: int, url: str, quotas: kd.Quotas, steps: int) -> list[list[list[str]]]:
    """Of each mini-batch, this rank's groups with their attributes."""
    store, out = kd.TrajectoryStore(url), []
    arguments = {"group_size": 1, "quotas": quotas, "max_staleness": 1}
    with loader(store, 64, {"prefetch": 2}, **arguments) as going:
        for mini in going:
            infos = [info for micro in mini for info in micro.infos]
            out.append([[info.group, info.attributes["source"], info.attributes["level"]] for info in infos])
            if mini.is_last and rank == 0:
                store.publish(mini.index + 1)
            if len(out) == steps:
                break
    if rank == 0:
        store.finish()
    return out


@pytest.mark.parametrize("name", ["free", "missing", "bounded"])
def test_both_ranks_train_exact_mixtures_that_a_pacer_asked_for(tmp_path: Path, two: Ranks, name: str) -> None:
    mixture = MIXTURES[name]
    store = kd.TrajectoryStore(tmp_path)
    pacer = kd.RolloutPacer(store, capacity=6)

    def roll_out() -> None:
        with store.writer("w") as writer:
            while (launch := pacer.next(HANG)) is not None:
                version = store.policy_version()
                try:
                    writer.put_group(group(launch.group, 1, attributes=launch.attributes, policy_version=version))
                except kd.StoreClosed:
                    return
                pacer.done(launch)

    thread = threading.Thread(target=roll_out, name="rollout")
    thread.start()
    ranks = two.run(trained, str(tmp_path), mixture.quotas, 12)
    store.finish()
    thread.join(HANG)
    assert not thread.is_alive()
    assert all(isinstance(part, list) for part in ranks), ranks
    minis = [[*one, *other] for one, other in zip(*ranks, strict=True)]
    assert all(one and other for one, other in zip(*ranks, strict=True)), "each rank has its share"
    for k in range(0, 12, 4):
        batch = [[tuple(c) for _, *c in mini] for mini in minis[k : k + 4]]
        mixture.check([c for mini in batch for c in mini], batch)
    names = [name for mini in minis for name, *_ in mini]
    assert len(set(names)) == len(names) == 12 * mixture.mini


# -- bad input ---------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
ONE = {"a": kd.Source(4, 1.0)}
SCENARIO = kd.Scenario(ONE, 2, 2, batches=1, warmup=0)
ODD = [True, NAN, INF, "4", -1, 2.5, b"", [], {}, object(), np.float32(4), np.True_, 10**400]
NO_COUNT = [*ODD[:-1], None, np.int64(4), np.float64(4.0)]  # as everywhere: a count is an int, say int(n)


def refused(call: Callable[[Any], object], values: Sequence[Any]) -> None:
    """Every one of them with InvalidArgument, and its value in the text."""
    for value in values:
        with pytest.raises(kd.InvalidArgument) as caught:
            call(value)
        assert repr(value) in str(caught.value), f"{value!r} is not in {caught.value}"


def test_bounds_that_are_neither_counts_nor_shares_are_refused() -> None:
    for make in (lambda n: kd.Quotas({"s": {"a": n}}), kd.at_least, kd.at_most):
        refused(make, [NAN, INF, -INF, True, np.True_, "4", b"4", -1, 2.5, 0.0, None, np.int64(4), np.float32(0.5), {}])
    refused(lambda n: kd.Quotas({"s": {"a": (0, n)}}), [NAN, INF, True, "4", 2.5, np.int64(4)])
    refused(lambda n: kd.Quotas({"s": {"a": 1}}, {("a",): n}), [NAN, INF, True, "4", 2.5, np.int64(4), ()])
    assert kd.Quotas({"s": {"a": np.float64(0.5)}}).to_json(8) == kd.Quotas({"s": {"a": 0.5}}).to_json(8)


def test_other_arguments_of_quotas_are_refused() -> None:
    refused(lambda window: kd.Quotas(TWO, mini_window=window), [True, NAN, INF, "1", -1, 1.0, np.int64(1), []])
    refused(kd.Quotas, ["s", 3, b"s", [1], {"s": 3}, {"s": ["a"]}, {"s": "a"}, [("s", {"a": 1})], False])
    refused(lambda names: kd.Quotas({"s": names}), [{}])
    refused(lambda name: kd.Quotas({name: {"a": 1}}), [3, None, ("s",), b"s", True])
    refused(lambda name: kd.Quotas({"s": {name: 1}}), [3, None, ("s",), b"s", True])
    refused(
        lambda c: kd.Quotas({"s": {"a": 1}}, [c]), [(["a"],), ({},), ("a", "a"), (), (3,), ("b",), "a", None, ["a"]]
    )
    refused(lambda support: kd.Quotas({"s": {"a": 1}}, support), [3, "a", True, NAN])
    refused(kd.Quotas(TWO).resolved, NO_COUNT)
    refused(kd.Quotas(TWO, dict.fromkeys(MISSING)).cells, NO_COUNT)


def test_huge_counts() -> None:
    huge = 10**9
    with pytest.raises(kd.InvalidArgument, match="need at least 1000000000 groups"):
        sampler(memory(), quotas={"s": {"a": huge}})
    refused(lambda size: sampler(memory(), train_batch_size=size), [huge, 10**400])
    quotas = kd.Quotas({"s": {"a": kd.at_most(huge), "b": (4, huge)}}, mini_window=huge)
    made = sampler(memory(ManualClock()), quotas=quotas)
    assert made.admit(0.0) is None and "a (at most 1000000000: 0 in" in made.explain()


def test_names_of_any_kind_go_through() -> None:
    quotas = kd.Quotas({"a/b=c": {"ü/1": 1, "=": 1, "": 0}, "層": {"/": 1, "簡 単": 1}})
    store = memory(ManualClock())
    made, writer = sampler(store, train_batch_size=2, group_size=1, quotas=quotas), store.writer("w")
    assert made.admit(0.0) is None
    outlook, pacer = store.outlook(), kd.RolloutPacer(store)
    assert outlook is not None and outlook.attributes == ("a/b=c", "層")
    assert "1 a/b=c=ü/1, 1 a/b=c==, 1 層=/, 1 層=簡 単: a/b=c=ü/1 (exactly 1: 0 in" in made.explain()
    for _ in range(2):
        launch = pacer.next(0.0)
        assert launch is not None
        writer.put_group(group(launch.group, 1, attributes=launch.attributes))
    mini = made.next()
    assert {info.attributes["a/b=c"] for info in mini.infos} == {"ü/1", "="}
    sampler(store, train_batch_size=2, group_size=1, quotas=quotas).reset(json.loads(json.dumps(made.get_state())))


def test_policies_are_refused() -> None:
    refused(kd.Staleness, [n for n in NO_COUNT if n is not None])
    for name in ("strategy", "unit", "abandoned"):
        refused(lambda value, name=name: kd.Staleness(1, **{name: value}), [*ODD, None, "Wait", np.int64(4)])
    for name in ("incomplete", "invalid", "surplus", "oversize"):
        refused(lambda value, name=name: kd.GroupPolicy(**{name: value}), [*ODD, None, "Drop"])
    bad = [True, NAN, INF, "4", -1, 0, None, 10**400, np.int64(4), np.float32(4), [], {}]
    refused(lambda seconds: kd.GroupPolicy(incomplete="drop", timeout=seconds), bad)
    refused(lambda seconds: kd.GroupPolicy(timeout=seconds), [value for value in bad if value is not None])


def test_samplers_are_refused() -> None:
    for name in ("train_batch_size", "mini_batch_size", "epochs"):
        refused(lambda value, name=name: sampler(memory(), **{name: value}), NO_COUNT)
    refused(lambda quotas: sampler(memory(), quotas=quotas), [[], "", False, 0, (), "s", 3])
    refused(lambda staleness: sampler(memory(), max_staleness=staleness), [n for n in NO_COUNT if n is not None])


def test_pacers_are_refused() -> None:
    store = memory(ManualClock())
    refused(lambda capacity: kd.RolloutPacer(store, capacity=capacity), NO_COUNT)
    refused(lambda share: kd.RolloutPacer(store, share=share), [n for n in ODD if n is not None])
    for part in (lambda n: (n, 2), lambda n: (0, n)):
        refused(lambda n, part=part: kd.RolloutPacer(store, share=part(n)), [n for n in NO_COUNT if not callable(n)])
    with pytest.raises(kd.WaitTimeout):
        kd.RolloutPacer(memory(ManualClock())).next(0)
    store.finish()
    for timeout in (10**400, INF):
        assert kd.RolloutPacer(store).next(timeout) is None


def test_scenarios_are_refused() -> None:
    for name in ("groups", "seconds", "sigma", "keep", "fail"):
        arguments = {"groups": 4, "seconds": 1.0}
        values = [n for n in ODD if not (name in ("seconds", "sigma") and n == 2.5)]
        refused(lambda value, name=name, arguments=arguments: kd.Source(**{**arguments, name: value}), values)
    pairs = [True, 3, "ab", [], [1, 2], [(0, 1)], [(0, 1), (1,)], [(NAN, 1), (1, 2)], [(0, "1"), (1, 2)], {0: 1, 1: 2}]
    refused(
        lambda quantiles: kd.Source(4, quantiles=quantiles), [*pairs, [(0, 10**400), (1, 10**400)], [(0, 1), (1, INF)]]
    )
    for name in ("slots", "mini_batches", "group_size", "slack", "launch_ahead", "batches", "warmup", "max_staleness"):
        refused(
            lambda value, name=name: kd.Scenario(**{"sources": ONE, "slots": 2, "mini_batches": 2, name: value}), ODD
        )
    for name in ("rho", "step_seconds", "publish_seconds"):
        values = [n for n in ODD if n != 2.5]
        refused(lambda value, name=name: kd.Scenario(ONE, 2, 2, **{name: value}), values)
    refused(lambda name: kd.Scenario(ONE, 2, 2, name=name), [n for n in ODD if n != "4"])
    refused(lambda sources: kd.Scenario(sources, 2, 2), [None, {}, [], "a", 3])
    refused(lambda flag: kd.simulate(SCENARIO, pacing=flag), ["no", 1, None, NAN])
    refused(lambda seed: kd.simulate(SCENARIO, seed=seed), NO_COUNT)
    refused(lambda admission: kd.simulate(SCENARIO, admission), [*ODD, None, "Colocated"])


# -- many values, many combinations, many groups -----------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    key: int
    combination: Combination
    version: int = 0

    @property
    def order(self) -> tuple[int, ...]:
        return (self.key,)


def admit(quotas: Quotas, size: int, mini: int, arrivals: Sequence[Combination]) -> int:
    """Groups of these that are admitted, as they come."""
    made: Admission[Waiting] = Admission(Sizes(size, mini), quotas, None)
    for i, combination in enumerate(arrivals):
        made.offer(Waiting(i, combination))
        if len(made.waiting) >= mini and i % 5 == 4 and (chosen := made.choose()):
            made.commit(chosen)
            made.plan()
    return made.seats.size - made.seats.left


def test_a_thousand_values() -> None:
    values = [f"v{i}" for i in range(1000)]
    assert admit(Quotas({"s": dict.fromkeys(values, 2)}), 2000, 50, [(v,) for v in values]) == 1000


def test_thirty_by_thirty_with_holes() -> None:
    rows, columns = [f"r{i}" for i in range(30)], [f"c{i}" for i in range(30)]
    support = [(r, c) for i, r in enumerate(rows) for j, c in enumerate(columns) if (7 * i + 3 * j) % 5]
    quotas = Quotas({"row": dict.fromkeys(rows, (20, 60)), "column": dict.fromkeys(columns, (20, 60))}, support)
    arrivals = [support[17 * i % len(support)] for i in range(1000)]
    assert admit(quotas, 1100, 110, arrivals) == 990, "the last mini-batch has yet to come"


@pytest.mark.parametrize(("mini", "window"), [(128, 0), (64, 2), (4, 1)])
def test_a_window_over_four_thousand_groups(mini: int, window: int) -> None:
    quotas = Quotas({"s": {"a": 0.25, "b": 0.25, "c": 0.5}}, mini_window=window)
    made: Admission[Waiting] = Admission(Sizes(4096, mini), quotas, None)
    steps = min(8, 1024 // mini)
    for i in range(steps * mini):
        made.offer(Waiting(i, ("cacb"[i % 4],)))
    for _ in range(steps):
        chosen = made.choose()
        assert chosen is not None
        made.commit(chosen)
    assert made.seats.left == 4096 - steps * mini and not made.waiting
    assert sum(made.plan().values()) == made.seats.left
