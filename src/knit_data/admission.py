"""Which groups form the next mini-batch: constraint-preserving, oldest version first.

A mini-batch is admitted as soon as enough complete groups fit; each admission keeps every quota of the train batch
reachable (see ``quotas``), so early mini-batches are free and the train batch is exact. Nothing is committed before
the whole mini-batch is found, so that a late older group still goes first. Greedy choice finds one whenever one
exists: the sets of groups that can be completed to a feasible batch form a matroid.

Pure: groups in, decisions out.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from knit_data.errors import InvalidArgument, StateError
from knit_data.groups import Dropped, Group
from knit_data.infos import InfoTable, TrajectoryInfo
from knit_data.ledger import Progress
from knit_data.quotas import Combination, Quotas
from knit_data.seats import QuotaSeats
from knit_data.staleness import Clock, Staleness


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
        if self.train_batch % self.mini_batch:
            raise InvalidArgument(
                f"train_batch_size={self.train_batch} groups cannot be cut into mini-batches of "
                f"mini_batch_size={self.mini_batch}; make it a multiple."
            )

    @property
    def minis(self) -> int:
        return self.train_batch // self.mini_batch

    @property
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


class Admission:
    """The open train batch and the groups that wait for a seat."""

    def __init__(self, sizes: Sizes, quotas: Quotas, staleness: Staleness | None, seed: int = 0) -> None:
        self.sizes, self.quotas, self.staleness, self.seed = sizes, quotas, staleness, seed
        self.progress = Progress()
        self.seats = QuotaSeats(quotas, sizes.train_batch)
        self.batch: list[Group] = []  # of the open train batch, in admission order
        self.waiting: dict[int, Group] = {}  # by key
        self._queues: dict[Combination, list[tuple[tuple[int, int, int, int], Group]]] = {}

    def restore(self, progress: Progress, counts: Mapping[Combination, int], batch: Sequence[Group]) -> None:
        self.progress, self.batch = progress, list(batch)
        self.seats = QuotaSeats(self.quotas, self.sizes.train_batch, counts)

    def offer(self, group: Group) -> None:
        """A complete group, to wait for its seat."""
        self.waiting[group.key] = group
        queue = self._queues.setdefault(group.combination, [])
        bisect.insort(queue, (group.order, group), key=lambda item: item[0])

    def expire(self) -> list[Dropped]:
        """Waiting groups that the staleness bound, or the abandoned-timeline rule, excludes from now on."""
        rule, out = self.staleness, []
        if rule is None:
            return []
        clock, k, step = self.sizes.clock, self.progress.train_batch, self.sizes.index(self.progress)
        for combination, queue in self._queues.items():
            stale = 0
            while stale < len(queue) and not rule.admits(
                clock.excess(train_batch=k, version=queue[stale][1].version), clock
            ):
                stale += 1
            gone = [(g, "stale") for _, g in queue[:stale]]
            if rule.abandoned == "drop":
                gone += [(g, "abandoned") for _, g in queue[stale:] if g.version > step]
            names = {g.key for g, _ in gone}
            self._queues[combination] = [item for item in queue[stale:] if item[1].key not in names]
            for group, reason in gone:
                del self.waiting[group.key]
                out.append(Dropped(reason, group.table, group.name))
        return out

    def choose(self) -> list[Group] | None:
        """Groups of the next mini-batch, or None while too few fit. In later passes the batch's own, dealt anew."""
        p, size = self.progress, self.sizes.mini_batch
        if p.epoch:
            order = deal(self.seed, p.train_batch, p.epoch, len(self.batch))
            return [self.batch[i] for i in order[p.position * size : (p.position + 1) * size]]
        seats, heads = self.seats.copy(), dict.fromkeys(self._queues, 0)
        chosen: list[Group] = []
        while len(chosen) < size:
            best: Combination | None = None
            for combination, at in heads.items():
                queue = self._queues[combination]
                if at < len(queue) and seats.admissible(combination):
                    if best is None or queue[at][0] < self._queues[best][heads[best]][0]:
                        best = combination
            if best is None:
                return None
            chosen.append(self._queues[best][heads[best]][1])
            heads[best] += 1
            seats.admit(best)
        return chosen

    def commit(self, chosen: Sequence[Group]) -> tuple[int, bool]:
        """Take the seats and step on. Returns the optimizer step's index and whether it ends its train batch."""
        p = self.progress
        index, last = self.sizes.index(p), False
        if p.epoch == 0:
            for group in chosen:
                self.seats.admit(group.combination)
                queue = self._queues[group.combination]
                del queue[bisect.bisect_left(queue, group.order, key=lambda item: item[0])]
                del self.waiting[group.key]
            self.batch += chosen
        minis = self.sizes.minis if p.short is None else p.short
        p = replace(p, position=p.position + 1)
        if p.position == minis:
            p = replace(p, epoch=p.epoch + 1, position=0)
        if p.epoch == self.sizes.epochs:
            last = p.short is None
            p = Progress(p.train_batch + 1) if last else replace(p, epoch=self.sizes.epochs)
            self.batch, self.seats = [], QuotaSeats(self.quotas, self.sizes.train_batch)
        self.progress = p
        return index, last

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


def explain(admission: Admission, incomplete: Mapping[Combination, int], dropped: Mapping[str, int]) -> str:
    """One sentence: what the open mini-batch needs, what is there, and what is short."""
    p, sizes, seats = admission.progress, admission.sizes, admission.seats
    waiting: dict[Combination, int] = {}
    for group in list(admission.waiting.values()):  # another thread may be admitting
        waiting[group.combination] = waiting.get(group.combination, 0) + 1
    parts = []
    for c, bound in seats.bounds.items():
        state = f"{seats.counts[c]} in, {waiting.get(c, 0)} complete, {incomplete.get(c, 0)} incomplete"
        parts.append(f"{'/'.join(c)} ({bound}: {state}{'' if seats.admissible(c) else ', no seat left'})")
    if not parts:
        parts = [f"{sum(waiting.values())} complete, {sum(incomplete.values())} incomplete"]
    missing = {c: n - waiting.get(c, 0) for c, n in seats.deficits().items()}
    short = [f"{n} {'/'.join(c)}" for c, n in missing.items() if n > 0]
    text = (
        f"train batch {p.train_batch}, mini-batch {p.position + 1} of {sizes.minis} waits for {sizes.mini_batch} "
        f"groups that fit: {'; '.join(parts)}; {seats.free()} free of {seats.left} seats left"
    )
    if short:
        text += f"; short of {', '.join(short)}"
    if dropped:
        text += "; dropped " + ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items()))
    return text + "."
