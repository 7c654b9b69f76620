"""The quota sampler: which groups form the next mini-batch, decided on global rank 0 for all.

A torchdata node over a ``TrajectoryStream``. The decisions themselves are pure (``groups``, ``admission``,
``quotas``, ``staleness``); this file feeds them and remembers what became of every row (``ledger``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torchdata.nodes import BaseNode

from knit_data.admission import Admission, AdmittedMiniBatch, Sizes, explain, mini_batch
from knit_data.errors import InvalidArgument, InvalidGroup, KnitError, UsageError, WaitTimeout
from knit_data.groups import Assembler, Dropped, Group, GroupPolicy, Terms, annotated, conflict, name_key
from knit_data.infos import InfoTable, parse_attributes
from knit_data.ledger import Entry, Ledger, Progress, runs_of
from knit_data.quotas import Combination, Quotas, QuotaSeats
from knit_data.staleness import Staleness
from knit_data.store.store import Demand
from knit_data.stream import TrajectoryStream

_SLICE = 0.05


@dataclass(frozen=True, eq=False)
class Admitted:
    """A mini-batch with the ledger entry that its consumption will be worth."""

    mini: AdmittedMiniBatch
    entry: Entry
    finite: bool


class QuotaSampler(BaseNode[AdmittedMiniBatch]):
    """Admits mini-batches of ``mini_batch_size`` groups so that each train batch of ``train_batch_size`` groups meets
    its quotas exactly, whatever the order of arrival.

    Sizes and quotas count groups. ``max_staleness`` is in train batches (or a ``Staleness``); None: no bound.
    ``timeout``: seconds without enough groups before ``WaitTimeout``, which says what is short. Only global rank 0
    decides; on other ranks ``TrajectoryLoader`` receives its share.
    """

    def __init__(
        self,
        stream: TrajectoryStream,
        train_batch_size: int,
        mini_batch_size: int,
        group_size: int | None,
        quotas: Mapping[str, Mapping[str, Any]] | Quotas | None = None,
        max_staleness: int | Staleness | None = None,
        groups: GroupPolicy | None = None,
        epochs: int = 1,
        seed: int = 0,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__()
        if not isinstance(stream, TrajectoryStream):
            raise InvalidArgument(f"QuotaSampler reads a TrajectoryStream, found {type(stream).__name__}.")
        if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int)):
            raise InvalidArgument(f"group_size must be an int or None, found {group_size!r}.")
        if group_size is not None and group_size < 1:
            raise InvalidArgument(f"group_size must be at least 1, found {group_size}.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InvalidArgument(f"seed must be an int, found {seed!r}.")
        if not timeout > 0:
            raise InvalidArgument(f"timeout must be above 0 seconds, found {timeout!r}.")
        self.stream, self.timeout, self.seed = stream, timeout, seed
        self.sizes = Sizes(train_batch_size, mini_batch_size, epochs)
        self.group_size = group_size
        self.quotas = quotas if isinstance(quotas, Quotas) else Quotas(quotas or {})
        self.staleness = (
            max_staleness if isinstance(max_staleness, Staleness) or max_staleness is None else Staleness(max_staleness)
        )
        self.policy = groups or GroupPolicy()
        self.max_tokens = self.policy.max_tokens
        QuotaSeats(self.quotas, train_batch_size)  # refuses quotas that cannot add up
        self._ledger: Ledger | None = None
        self._failure: KnitError | None = None

    # -- node contract ----------------------------------------------------------------------------------------------

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Start, or go on from a state. Without one, a sampler that already admitted goes on where it stands: a
        second ``iter`` of torchdata's Loader must not train everything again."""
        super().reset(initial_state)
        state = initial_state or (self._ledger.state() if self._ledger else None)
        ledger = self.new_ledger()
        if state is not None:
            ledger.load(state)
        self._start(ledger)

    def next(self) -> AdmittedMiniBatch:
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            raise UsageError(
                f"rank {dist.get_rank()} asked the sampler for a mini-batch; only global rank 0 admits. Use "
                "TrajectoryLoader, which hands every rank its share."
            )
        while True:
            admitted = self.admit(_SLICE)
            if admitted is not None:
                return admitted.mini

    def get_state(self) -> dict[str, Any]:
        return self._required().state()

    # -- asking -----------------------------------------------------------------------------------------------------

    def deficits(self) -> Mapping[Combination, int]:
        """Groups that the open train batch still reserves for minima, by combination of quota attributes."""
        return self._admission.seats.deficits() if self._ledger else self._seats().deficits()

    def free_seats(self) -> int:
        """Seats of the open train batch that no minimum reserves."""
        return self._admission.seats.free() if self._ledger else self._seats().free()

    def explain(self) -> str:
        """Why the trainer waits, in one sentence."""
        if self._ledger is None:
            return "the sampler has not started: it starts with the first mini-batch."
        return explain(self._admission, self._incomplete(), self.dropped())

    def dropped(self) -> dict[str, int]:
        """Groups dropped so far, by reason."""
        counts = dict(self._required().dropped)
        for drop in self._drops:
            counts[drop.reason] = counts.get(drop.reason, 0) + drop.groups
        return {reason: n for reason, n in counts.items() if n}

    def left_over(self) -> int:
        """Groups, complete or not, that have no fate yet."""
        return len(self._admission.waiting) + len(self._assembler.incomplete)

    # -- for the loader ---------------------------------------------------------------------------------------------

    def limit_tokens(self, longest: int) -> None:
        """The loader's cap: no trajectory may be longer than what fits, unless oversize is "alone"."""
        asked = self.policy.max_tokens
        if asked is not None and asked > longest and self.policy.oversize != "alone":
            raise InvalidArgument(
                f"GroupPolicy(max_tokens={asked}) does not fit a micro-batch: its cap takes {longest} tokens. Raise "
                "max_tokens_per_micro_batch, lower max_tokens, or choose oversize='alone'."
            )
        self.max_tokens = longest if asked is None else asked

    def new_ledger(self) -> Ledger:
        """An empty ledger on this sampler's terms; every rank keeps one."""
        terms = {
            "train_batch_size": self.sizes.train_batch,
            "mini_batch_size": self.sizes.mini_batch,
            "group_size": self.group_size,
            "epochs": self.sizes.epochs,
            "seed": self.seed,
            "quotas": {"/".join(c): str(b) for c, b in self.quotas.bounds().items()},
        }
        return Ledger(self.stream.store.id, terms, remember_all=self.staleness is None)

    def admit(self, timeout: float) -> Admitted | None:
        """One attempt: what is there is drained first, then up to ``timeout`` seconds are waited for more.

        None: not yet. Raises StopIteration at the end of the stream, WaitTimeout, or what makes a group invalid.
        """
        self._required()
        if self._failure is not None:
            raise self._failure
        try:
            return self._attempt(timeout)
        except KnitError as e:
            self._failure = e
            raise

    # -- inside -----------------------------------------------------------------------------------------------------

    def _start(self, ledger: Ledger) -> None:
        self._ledger, self._failure = ledger, None
        policy = self.policy
        terms = Terms(self.group_size, self.quotas.attributes, self._seats().knows, policy, self.staleness is None)
        self._assembler = Assembler(terms, self.max_tokens)
        self._admission = Admission(self.sizes, self.quotas, self.staleness, self.seed)
        self._drops: list[Dropped] = []
        self._waiting_since: float | None = None
        self._demanded: Demand | None = None
        self.stream.reset(
            {"store": self.stream.store.id, "writers": [[w, s, 0] for w, s in sorted(ledger.cursors().items())]}
        )
        batch = [self._reread(runs) for runs in ledger.opened]
        self._admission.restore(ledger.progress, ledger.counts, batch)

    def _reread(self, runs: list[tuple[int, int, int, int, int]]) -> Group:
        """A group of the open train batch, again from its segments, for its later passes."""
        store, tables = self.stream.store, []
        for writer, segment, first, count, _ in runs:
            claim = store.claim(writer)
            (head,) = store.heads([(writer, claim["name"] if claim else str(writer), segment)])
            if isinstance(head, KnitError):
                raise head
            tables.append(head[0].take(np.arange(first, first + count)))
        table = InfoTable.concat(tables)
        version = int(table.columns["policy_version"].min())
        return Group(table[0].group, table, (), version, 0)

    def _attempt(self, timeout: float) -> Admitted | None:
        admission, clock = self._admission, self.stream.store.backend
        if admission.over:
            raise StopIteration
        if admission.progress.epoch == 0:
            self._drain()
        chosen = self._choose()
        if chosen is not None:
            return self._commit(chosen)
        self._publish_demand()
        if self.stream.ended:
            if not admission.cut_short():
                raise StopIteration
            return self._commit(self._choose() or [])
        now = clock.now()
        if self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > self.timeout:
            raise WaitTimeout(
                f"no mini-batch could be admitted for {self.timeout:g} s: {self.explain()} Are the rollout workers "
                "alive, and do they serve store.demand()? Raise timeout to wait longer."
            )
        if timeout > 0:
            for table in self.stream.poll(timeout):
                self._offer(table)
        return None

    def _drain(self) -> None:
        while tables := self.stream.poll(0.0):
            for table in tables:
                self._offer(table)

    def _offer(self, table: InfoTable) -> None:
        ledger = self._required()
        rows = ledger.open_rows(table)
        if not len(rows):
            return
        if len(rows) < len(table):
            table = table.take(rows)
        key = name_key(table[0].group)
        if self.group_size != 1 and not int(table.columns["group_rows"][0]) and self._remembers(key):
            self._drops.append(Dropped("late", table, groups=0))
            return
        for outcome in self._assembler.offer(table):
            if isinstance(outcome, Dropped):
                self._drops.append(outcome)
            elif (repeat := self._repeat(outcome)) is not None:
                self._drops.append(repeat)
            else:
                self._admission.offer(outcome)

    def _remembers(self, key: int) -> bool:
        ledger = self._required()
        return key in ledger.seen or key in ledger.hashes or key in self._admission.waiting

    def _repeat(self, group: Group) -> Dropped | None:
        """A group that came before: the same again is dropped, other content under the same name is invalid."""
        ledger, key = self._required(), group.key
        first = self._admission.waiting.get(key)
        if first is not None:
            mark, (writer, segment, _) = first.mark, first.table[0].address
        elif key in ledger.seen:
            mark, _, writer, segment = ledger.seen[key]
        elif key in ledger.hashes:
            return Dropped("duplicate", group.table, groups=0)
        else:
            return None
        if mark == group.mark:
            return Dropped("duplicate", group.table, groups=0)
        if self.policy.invalid == "error":
            raise InvalidGroup(conflict(group, writer, segment))
        return Dropped("invalid", group.table, groups=1)

    def _choose(self) -> list[Group] | None:
        if self._admission.progress.epoch == 0:
            self._drops += self._admission.expire()
        return self._admission.choose()

    def _commit(self, chosen: list[Group]) -> Admitted:
        admission, ledger = self._admission, self._required()
        before = admission.progress
        tables = [annotated(group, self.policy.annotate) for group in chosen]
        index, is_last = admission.commit(chosen)
        fresh = chosen if before.epoch == 0 else []
        runs = runs_of([*(g.table for g in fresh), *(d.table for d in self._drops)])
        seen = [(g.key, g.mark, g.version, *g.table[0].address[:2]) for g in fresh]
        dropped: dict[str, int] = {}
        for drop in self._drops:
            dropped[drop.reason] = dropped.get(drop.reason, 0) + drop.groups
            if drop.name is not None:
                version = int(drop.table.columns["policy_version"].min())
                seen.append((name_key(drop.name), 0, version, *drop.table[0].address[:2]))
        entry = Entry(
            admission.progress,
            {c: n for c, n in admission.seats.counts.items() if n},
            runs,
            seen,
            [runs_of([g.table]) for g in fresh] if self.sizes.epochs > 1 else [],
            closes=admission.progress.train_batch > before.train_batch or admission.over,
            dropped=dropped,
            forget_below=self._oldest(admission.progress),
            starts=[(w, at) for w, at in self.stream.firsts().items() if at > ledger.cursors().get(w, 0)],
        )
        ledger.apply(entry)
        self._drops, self._waiting_since = [], None
        self._publish_demand()
        mini = mini_batch(tables, index, before, is_last)
        return Admitted(mini, entry, self.stream.finite)

    def _oldest(self, progress: Progress) -> int | None:
        """The oldest version that can still be admitted; groups below it need no remembering."""
        if self.staleness is None:
            return None
        clock = self.sizes.clock
        return progress.train_batch * clock.steps - self.staleness.steps(clock)

    def _incomplete(self) -> dict[Combination, int]:
        counts: dict[Combination, int] = {}
        for members in self._assembler.incomplete.values():
            attributes = parse_attributes(members[0].ragged["attributes"].text(0))
            combination = tuple(attributes.get(a, "") for a in self.quotas.attributes)
            counts[combination] = counts.get(combination, 0) + 1
        return counts

    def _publish_demand(self) -> None:
        seats = self._admission.seats
        demand = Demand(self._admission.progress.train_batch, seats.deficits(), seats.free())
        if demand != self._demanded:
            self.stream.store.publish_demand(demand)
            self._demanded = demand

    def _seats(self) -> QuotaSeats:
        return QuotaSeats(self.quotas, self.sizes.train_batch)

    def _required(self) -> Ledger:
        if self._ledger is None:
            self.reset()
        assert self._ledger is not None
        return self._ledger
