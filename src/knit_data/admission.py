"""Which groups form the next mini-batch: constraint-preserving, oldest version first.

A mini-batch is admitted as soon as enough complete groups fit; each admission keeps every quota of the train batch
reachable (see ``quotas``), so early mini-batches are free and the train batch is exact. Nothing is committed before
the whole mini-batch is found, so that a late older group still goes first. Greedy choice finds one whenever one
exists while quotas count one attribute, or one within another: the sets of groups that can be completed to a feasible
batch then form a matroid. Where attributes cross, a bounded search goes on from there.

Oldest first is also what would expire first: `a` counts from the start of the train batch, so that nothing expires
within one, and what expires with it is what is oldest.

Pure: groups in, decisions out.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import xxhash

from knit_data.errors import InvalidArgument, StateError
from knit_data.infos import InfoTable, TrajectoryInfo
from knit_data.ledger import Progress
from knit_data.quotas import Combination, Quotas
from knit_data.seats import QuotaSeats
from knit_data.staleness import Clock, Staleness

_MOST = 1 << 20  # groups of a train batch
_LOOKS = 256  # before a search is given up: a millisecond or two
_THOROUGH = 1 << 16  # the same when no more groups will come


@dataclass(frozen=True)
class Sizes:
    """Counted in groups: a train batch of G, mini-batches of G / M, E passes, S = E x M optimizer steps."""

    train_batch: int
    mini_batch: int
    epochs: int = 1

    def __post_init__(self) -> None:
        for name in ("train_batch", "mini_batch", "epochs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                label = name if name == "epochs" else f"{name}_size"
                raise InvalidArgument(f"{label} must be an int of at least 1, found {value!r}.")
        if self.train_batch > _MOST:
            raise InvalidArgument(
                f"train_batch_size={self.train_batch}: seats are given group by group, to {_MOST} of them at most."
            )
        if self.train_batch % self.mini_batch:
            raise InvalidArgument(
                f"train_batch_size={self.train_batch} groups cannot be cut into mini-batches of "
                f"mini_batch_size={self.mini_batch}; make it a multiple."
            )

    @property
    def minis(self) -> int:
        return self.train_batch // self.mini_batch

    @cached_property
    def clock(self) -> Clock:
        return Clock(self.epochs * self.minis)

    def index(self, p: Progress) -> int:
        """u = kS + eM + j."""
        return p.train_batch * self.clock.steps + p.epoch * self.minis + p.position


@dataclass(frozen=True, eq=False)
class AdmittedMiniBatch:
    """The groups of one optimizer step, before any payload is read. Rows of a group stand together."""

    table: InfoTable
    group_rows: tuple[int, ...]  # rows per group
    index: int
    train_batch: int
    epoch: int
    position: int
    is_last: bool

    @property
    def infos(self) -> list[TrajectoryInfo]:
        return self.table.infos()

    @property
    def n_groups(self) -> int:
        return len(self.group_rows)


class Candidate(Protocol):
    """What admission looks at: a complete group."""

    @property
    def key(self) -> int: ...
    @property
    def order(self) -> tuple[int, ...]: ...  # oldest version first, then by place; no two alike
    @property
    def combination(self) -> Combination: ...
    @property
    def version(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class Admission(Generic[C]):
    """The open train batch and the groups that wait for a seat.

    A decision looks at one head per combination, so that it costs the same however many groups wait.
    """

    def __init__(self, sizes: Sizes, quotas: Quotas, staleness: Staleness | None, seed: int = 0) -> None:
        self.sizes, self.quotas, self.staleness, self.seed = sizes, quotas, staleness, seed
        self.progress = Progress()
        self._empty = self._seats()
        self.seats = self._empty.copy()
        self.mix = self.seats.completion()  # a whole train batch by combination, free seats spread
        self.batch: list[C] = []  # of the open train batch, in admission order
        self.waiting: dict[int, C] = {}  # by key
        self._heaps: dict[Combination, list[tuple[tuple[int, ...], C]]] = {}
        self.trained: dict[Combination, int] = {}  # groups admitted since the start or resume, by combination
        self._fresh: list[C] = []  # offered since the last expiry
        self._hopeless = False  # nothing has changed since no mini-batch was found
        self._deficits: dict[Combination, int] | None = None
        self._plan: dict[Combination, int] | None = None

    def _seats(self, counts: Mapping[Combination, int] | None = None) -> QuotaSeats:
        return QuotaSeats(self.quotas, self.sizes.train_batch, counts, self.sizes.mini_batch)

    def restore(self, progress: Progress, counts: Mapping[Combination, int], batch: Sequence[C]) -> None:
        self.progress, self.batch = progress, list(batch)
        self.seats, self.trained = self._seats(counts), dict(counts)
        self._deficits = self._plan = None

    def offer(self, group: C) -> None:
        """A complete group, to wait for its seat."""
        self.waiting[group.key] = group
        heapq.heappush(self._heaps.setdefault(group.combination, []), (group.order, group))
        self._fresh.append(group)
        self._hopeless = False

    def expire(self) -> list[tuple[C, str]]:
        """Waiting groups that the staleness bound, or the abandoned-timeline rule, excludes from now on; each with
        the reason. A version above the trainer's step is known when a group comes: steps only grow."""
        rule, out = self.staleness, list[tuple[C, str]]()
        if rule is None:
            self._fresh.clear()
            return out
        clock, k, step = self.sizes.clock, self.progress.train_batch, self.sizes.index(self.progress)
        if rule.abandoned == "drop" and any(g.version > step for g in self._fresh):
            gone = {g.key for g in self._fresh if g.version > step}
            for combination in {g.combination for g in self._fresh if g.key in gone}:
                heap = [item for item in self._heaps[combination] if item[1].key not in gone]
                heapq.heapify(heap)
                self._heaps[combination] = heap
            out += [(self.waiting.pop(key), "abandoned") for key in sorted(gone)]
        self._fresh.clear()
        for heap in self._heaps.values():
            while heap and not rule.admits(clock.excess(train_batch=k, version=heap[0][1].version), clock):
                _, group = heapq.heappop(heap)
                out.append((self.waiting.pop(group.key), "stale"))
        return out

    def choose(self, held: Mapping[Combination, int] | None = None, thorough: bool = False) -> list[C] | None:
        """Groups of the next mini-batch, or None while too few fit. In later passes the batch's own, dealt anew.

        ``held``: groups still to come for which seats are kept, where quotas allow it. ``thorough``: look longer, since
        no others will come.
        """
        p, size = self.progress, self.sizes.mini_batch
        if p.epoch:
            order = deal(self.seed, p.train_batch, p.epoch, len(self.batch))
            return [self.batch[i] for i in order[p.position * size : (p.position + 1) * size]]
        if len(self.waiting) < size or (self._hopeless and not held and not thorough):
            return None
        seats = self.seats.copy()
        for combination, count in (held or {}).items():
            for _ in range(min(count, seats.left)):
                seats.reserve(combination)
        chosen = self._oldest_that_fit(seats.copy())
        if chosen is None and not seats.greedy:
            chosen = self._search(seats.copy(), _THOROUGH if thorough else _LOOKS)
            chosen = chosen or self._oldest_that_fit(seats, self.plan())  # what was launched for it fits together
        self._hopeless = chosen is None and not held
        return chosen

    def _oldest_that_fit(self, seats: QuotaSeats, most: Mapping[Combination, int] | None = None) -> list[C] | None:
        """One after the other the oldest that fits, of each combination at ``most`` so many. What does not fit now
        will not later, so that its combination is left: as many looks as seats and combinations."""
        heads = [(heap[0][0], c) for c, heap in self._heaps.items() if heap and (most is None or c in most)]
        room = dict(most or {})
        heapq.heapify(heads)
        taken: list[tuple[tuple[int, ...], C]] = []
        while heads and len(taken) < self.sizes.mini_batch:
            _, combination = heapq.heappop(heads)
            if not seats.admissible(combination):
                continue
            seats.admit(combination)
            heap = self._heaps[combination]
            taken.append(heapq.heappop(heap))
            if most is not None:
                room[combination] -= 1
            if heap and (most is None or room[combination]):
                heapq.heappush(heads, (heap[0][0], combination))
        for item in taken:
            heapq.heappush(self._heaps[item[1].combination], item)
        return [group for _, group in taken] if len(taken) == self.sizes.mini_batch else None

    def _search(self, seats: QuotaSeats, most: int) -> list[C] | None:
        """Where combinations cross, the oldest may leave no room for enough others: go back and try without some.
        Finding a mini-batch among finite waiting groups is NP-hard for three attributes, so that this gives up after
        so many looks; the batch stays feasible, and the next arrival starts anew."""
        size, items = self.sizes.mini_batch, list[tuple[tuple[int, ...], C]]()
        for combination, heap in self._heaps.items():
            if not heap or not seats.admissible(combination):
                continue
            oldest = [heapq.heappop(heap) for _ in range(min(size, len(heap)))]
            for item in oldest:
                heapq.heappush(heap, item)
            items += oldest
        items.sort(key=lambda item: item[0])
        chosen: list[int] = []
        passed: list[set[Combination]] = [set()]  # by depth: combinations that were given up
        at, looks = 0, 0
        while len(chosen) < size:
            if at == len(items) or len(items) - at < size - len(chosen):
                if not chosen:
                    return None
                at = chosen.pop()
                passed.pop()
                seats.release(items[at][1].combination)
                passed[-1].add(items[at][1].combination)  # a younger one of these would do no better
                at += 1
                continue
            if (looks := looks + 1) > most:
                return None
            combination = items[at][1].combination
            if combination not in passed[-1] and seats.admissible(combination):
                seats.admit(combination)
                chosen.append(at)
                passed.append(set(passed[-1]))
            at += 1
        return [items[i][1] for i in chosen]

    def commit(self, chosen: Sequence[C]) -> tuple[int, bool]:
        """Take the seats and step on. Returns the optimizer step's index and whether it ends its train batch."""
        p = self.progress
        index, last = self.sizes.index(p), False
        if p.epoch == 0:
            for group in chosen:
                self.seats.admit(group.combination)
                self._follow(group.combination)
                self.trained[group.combination] = self.trained.get(group.combination, 0) + 1
                heapq.heappop(self._heaps[group.combination])  # chosen are the oldest of their combination
                del self.waiting[group.key]
            self.batch += chosen
        minis = self.sizes.minis if p.short is None else p.short
        p = replace(p, position=p.position + 1)
        if p.position == minis:
            p = replace(p, epoch=p.epoch + 1, position=0)
        if p.epoch == self.sizes.epochs:
            last = p.short is None
            p = Progress(p.train_batch + 1) if last else replace(p, epoch=self.sizes.epochs)
            self.batch, self.seats, self._plan = [], self._empty.copy(), dict(self.mix)
        self.progress, self._hopeless, self._deficits = p, False, None
        return index, last

    def deficits(self) -> dict[Combination, int]:
        """Groups that minima still reserve; the same between two commits."""
        if self._deficits is None:
            self._deficits = self.seats.deficits()
        return self._deficits

    def plan(self) -> dict[Combination, int]:
        """One way to fill all seats left, for launchers. It stays what it was as long as what is admitted follows it:
        where attributes cross there are many ways, and what is launched for one may not serve another."""
        if self._plan is None:
            self._plan = self.seats.completion()
        return {combination: count for combination, count in self._plan.items() if count}

    def _follow(self, combination: Combination) -> None:
        if self._plan is not None:
            left = self._plan.get(combination, 0)
            self._plan = {**self._plan, combination: left - 1} if left else None

    def waiting_by_combination(self) -> dict[Combination, int]:
        return {combination: len(heap) for combination, heap in self._heaps.items() if heap}

    def surplus(self) -> dict[Combination, float]:
        """Groups of closed train batches beyond the mix's share, since the start or the last resume: what a range let
        in, at most one train batch's worth. The launcher makes up for it, so that the mix holds in the long run."""
        total = sum(self.trained.values()) - sum(self.seats.counts.values())
        out = {}
        for combination, whole in self.mix.items():
            closed = self.trained.get(combination, 0) - self.seats.counts.get(combination, 0)
            over = closed - whole * total / self.sizes.train_batch
            if over:
                out[combination] = max(-float(whole), min(over, float(whole)))
        return out

    def cut_short(self) -> bool:
        """The stream ended: remaining passes run over the full mini-batches there are. False: nothing remains."""
        p = self.progress
        if p.epoch == 0 and p.position and self.sizes.epochs > 1:
            self.progress = replace(p, epoch=1, position=0, short=p.position)
            return True
        return False

    @property
    def over(self) -> bool:
        """A cut-off train batch had its last pass: nothing more can come."""
        return self.progress.short is not None and self.progress.epoch >= self.sizes.epochs


def check_progress(sizes: Sizes, p: Progress, admitted: int, opened: int) -> None:
    """Raise StateError unless p is a place within a train batch and as many groups are admitted as belong there."""
    limit = sizes.minis if p.short is None else p.short
    over = p.short is not None and p.epoch == sizes.epochs
    done = 0 if over else p.position if p.epoch == 0 else limit
    fits = over or (p.epoch < sizes.epochs and p.position < limit)
    kept = done * sizes.mini_batch if sizes.epochs > 1 else 0
    if not fits or not 0 < limit <= sizes.minis or p.train_batch >= 2**40 or opened != kept:
        raise StateError(
            f"this state is damaged: {p} does not fit {sizes}, with {opened} groups kept. Use another one."
        )
    if admitted != done * sizes.mini_batch:
        raise StateError(
            f"this state is damaged: at {p} {done * sizes.mini_batch} groups are admitted, it counts {admitted}. Use "
            "another one."
        )


def deal(seed: int, train_batch: int, epoch: int, count: int) -> list[int]:
    """A shuffle of range(count) that no library version changes: sorted by hash."""
    return sorted(
        range(count), key=lambda i: (xxhash.xxh3_64_intdigest(f"{seed}/{train_batch}/{epoch}/{i}".encode()), i)
    )


def mini_batch(tables: Sequence[InfoTable], index: int, before: Progress, is_last: bool) -> AdmittedMiniBatch:
    return AdmittedMiniBatch(
        InfoTable.concat(tables),
        tuple(len(t) for t in tables),
        index,
        before.train_batch,
        before.epoch,
        before.position,
        is_last,
    )
