"""Deciding what to admit: the cost of an arrival, and of a mini-batch, for pools of waiting groups.

    python benchmarks/bench_admission.py [--quick] [--json FILE]

Train batches of 64 groups in mini-batches of 4; every attribute has 6 values, of which a train batch has 9 to 13
groups each, and waiting groups have any of them. ``arrival`` is one group offered, ``mini-batch`` is expire, choose and
commit; as many groups arrive as leave, and 4 more whenever none is found, so that the last seats of many attributes,
which few combinations fit, cost many looks: see ``arrivals``. ``crossing``: two attributes of which every sixth
combination does not occur, so that a flow decides. The peer sorts all that wait for every seat and takes the oldest
that fits; it is asked once a train batch, at another mini-batch each time, and must decide the same. ``stream`` admits
1,000,000 trajectories in groups of 8, asking after every arrival. All times are processor time of the thread.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from peers import sort_and_scan
from report import Report

from knit_data.admission import Admission, Sizes
from knit_data.quotas import Combination, Quotas
from knit_data.staleness import Staleness

VALUES, LOW, HIGH = 6, 9, 13
SIZES = Sizes(64, 4)
GROUP_SIZE = 8


@dataclass(frozen=True, eq=False)
class Item:
    """A complete group, as admission sees it."""

    key: int
    version: int
    combination: Combination

    @property
    def order(self) -> tuple[int, int]:
        return self.version, self.key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="small pools, 100,000 trajectories, few repeats")
    parser.add_argument("--json", metavar="FILE", help="append the rows to this file as well")
    options = parser.parse_args()
    report = Report("admission", options.json)
    pools, repeats = ((100, 1_000), 3) if options.quick else ((100, 1_000, 10_000, 100_000), 5)
    for attributes in (1, 2) if options.quick else (1, 2, 3, 4):
        for pool in pools:
            measure(report, pool, attributes, False, repeats)
    for pool in pools:
        measure(report, pool, 2, True, repeats)
    stream(report, (100_000 if options.quick else 1_000_000) // GROUP_SIZE)


def admission_of(attributes: int, crossing: bool) -> tuple[Admission[Item], list[Combination]]:
    values = [f"v{i}" for i in range(VALUES)]
    found = list(product(values, repeat=attributes))
    if crossing:
        found = [c for c in found if values.index(c[1]) != (values.index(c[0]) + 1) % VALUES]
    mapping = {f"attribute {i}": dict.fromkeys(values, (LOW, HIGH)) for i in range(attributes)}
    quotas = Quotas(mapping, support=found if crossing else None)
    return Admission(SIZES, quotas, Staleness(10**6)), found


def measure(report: Report, pool: int, attributes: int, crossing: bool, repeats: int) -> None:
    rng, (admission, combinations) = random.Random(0), admission_of(attributes, crossing)
    items = (Item(key, key // 64, rng.choice(combinations)) for key in range(10**9))
    for _ in range(pool):
        admission.offer(next(items))
    arrivals: list[float] = []
    minis: list[float] = []
    peer: list[float] = []
    needed: list[float] = []
    for turn in range(repeats + 1):  # the first is not counted
        offered = decided = 0.0
        count = 0
        for j in range(SIZES.minis):
            if j == turn * 3 % SIZES.minis and not crossing:
                expected, seconds = asked(admission)
                peer += [1e3 * seconds] * bool(turn)
            else:
                expected = None
            start = time.thread_time()
            chosen = decide(admission)
            decided += time.thread_time() - start
            assert expected is None or chosen == expected, "the peer decides otherwise"
            while True:
                coming = [next(items) for _ in range(SIZES.mini_batch)]
                start = time.thread_time()
                for item in coming:
                    admission.offer(item)
                offered += time.thread_time() - start
                count += len(coming)
                if chosen is not None:
                    break
                start = time.thread_time()  # too few of those that wait fit: again with more
                chosen = decide(admission)
                decided += time.thread_time() - start
        if turn:
            arrivals.append(1e6 * offered / count)
            minis.append(1e3 * decided / SIZES.minis)
            needed.append(count / SIZES.minis)
    case = f"pool {pool}, {attributes} attribute{'s' * (attributes > 1)}{', crossing' * crossing}"
    report.add(case=case, provider="knit_data", metric="arrival", unit="us", samples=arrivals)
    report.add(case=case, provider="knit_data", metric="mini-batch", unit="ms", samples=minis)
    report.add(case=case, provider="knit_data", metric="arrivals for a mini-batch", unit="groups", samples=needed)
    if peer:
        report.add(case=case, provider="sort and scan", metric="mini-batch", unit="ms", samples=peer)


def decide(admission: Admission[Item]) -> list[Item] | None:
    admission.expire()
    chosen = admission.choose()
    if chosen is not None:
        admission.commit(chosen)
    return chosen


def asked(admission: Admission[Item]) -> tuple[list[Item] | None, float]:
    """What the peer would take now, and the seconds it thinks."""
    attributes = len(admission.quotas.attributes)
    waiting = list(admission.waiting.values())
    counts = [dict.fromkeys((f"v{i}" for i in range(VALUES)), 0) for _ in range(attributes)]
    for item in admission.batch:
        for values, value in zip(counts, item.combination, strict=True):
            values[value] += 1

    def fits(taken: Sequence[Combination]) -> bool:
        left = SIZES.train_batch - len(admission.batch) - len(taken)
        for i, values in enumerate(counts):
            after = {value: n + sum(c[i] == value for c in taken) for value, n in values.items()}
            short, room = (sum(max(0, LOW - n) for n in after.values()), sum(HIGH - n for n in after.values()))
            if max(after.values()) > HIGH or not short <= left <= room:
                return False
        return True

    start = time.thread_time()
    chosen = sort_and_scan(waiting, SIZES.mini_batch, fits)
    return chosen, time.thread_time() - start


def stream(report: Report, groups: int) -> None:
    """Every group of a whole run, in an order of completion that mixes about 20 train batches."""
    quotas = {f"v{i}": 11 if i < 4 else 10 for i in range(VALUES)}
    admission: Admission[Item] = Admission(SIZES, Quotas({"attribute": quotas}), Staleness(10**6))
    rng = random.Random(0)
    mix = [(value,) for value, n in quotas.items() for _ in range(n)]
    items = [Item(key, key // 64, mix[key % 64]) for key in range(groups)]
    items.sort(key=lambda item: item.key + rng.expovariate(1 / 300))
    minis = 0
    start = time.thread_time()
    for item in items:
        admission.offer(item)
        while decide(admission) is not None:
            minis += 1
    seconds = time.thread_time() - start
    admitted = minis * SIZES.mini_batch
    assert admitted >= groups - 64, f"{groups - admitted} of {groups} groups are left"
    case = f"stream of {groups * GROUP_SIZE} trajectories"
    report.add(case=case, provider="knit_data", metric="group", unit="us", samples=[1e6 * seconds / groups])
    report.add(case=case, provider="knit_data", metric="whole", unit="s", samples=[seconds])


if __name__ == "__main__":
    main()
