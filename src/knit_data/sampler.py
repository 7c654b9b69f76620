"""The quota sampler: which groups form the next mini-batch, decided on global rank 0 for all.

A torchdata node over a ``TrajectoryStream``. The decisions themselves are pure (``groups``, ``admission``,
``quotas``, ``staleness``); this file feeds them and remembers what became of every row (``ledger``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torchdata.nodes import BaseNode

from knit_data.admission import Admission, AdmittedMiniBatch, Sizes, check_progress, explain, mini_batch
from knit_data.errors import InvalidArgument, InvalidGroup, UsageError, WaitTimeout
from knit_data.groups import (
    Assembler,
    Dropped,
    Group,
    GroupPolicy,
    Terms,
    annotated,
    conflict,
    extras,
    group_mark,
    name_key,
)
from knit_data.infos import InfoTable, parse_attributes
from knit_data.launching import Outlook, outlook_of
from knit_data.ledger import Entry, Ledger, Progress, Runs, runs_of
from knit_data.quotas import Combination, Quotas
from knit_data.seats import QuotaSeats
from knit_data.staleness import Staleness
from knit_data.stream import TrajectoryStream, stored
from knit_data.truncate import truncated

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
    ``epochs``: passes over each train batch; later ones deal its groups anew, shuffled by ``seed``.
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
        if groups is not None and not isinstance(groups, GroupPolicy):
            raise InvalidArgument(f"groups must be a GroupPolicy or None, found {groups!r}.")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
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
        QuotaSeats(self.quotas, train_batch_size, None, mini_batch_size)  # refuses quotas that cannot add up
        self._ledger: Ledger | None = None
        self._failure: Exception | None = None
        self._waiting_since: float | None = None

    # -- node contract ----------------------------------------------------------------------------------------------

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Start, or go on from a state. Without one, a sampler that already admitted goes on where it stands: a
        second ``iter`` of torchdata's Loader must not train everything again."""
        super().reset(initial_state)
        state = initial_state or (self._ledger.state() if self._ledger else None)
        self._start(self.ledger_of(state))

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
            if self.stream.stopped:
                raise UsageError("the stream was stopped while the sampler waited; reset() starts again.")

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
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            return f"global rank 0 admits; ask its sampler, not that of rank {dist.get_rank()}."
        if self._ledger is None:
            return "the sampler has not started: it starts with the first mini-batch."
        return explain(self._admission, self._incomplete(), self.dropped())

    def dropped(self) -> dict[str, int]:
        """What was dropped so far, by reason: groups, or for the reasons of ``EXTRAS`` single trajectories."""
        return _counted(self._required().dropped, self._drops)

    def left_over(self) -> int:
        """Groups, complete or not, that have no fate yet."""
        return len(self._admission.waiting) + len(self._assembler.incomplete) if self._ledger else 0

    # -- for the loader ---------------------------------------------------------------------------------------------

    @property
    def used(self) -> bool:
        """Whether a mini-batch was admitted since the sampler was built."""
        return self._ledger is not None and self._ledger.progress != Progress()

    def limit_tokens(self, longest: int) -> None:
        """The loader's cap: no trajectory may be longer than what fits, unless oversize is "alone"."""
        asked = self.policy.max_tokens
        if asked is not None and asked > longest and self.policy.oversize != "alone":
            raise InvalidArgument(
                f"GroupPolicy(max_tokens={asked}) does not fit a micro-batch: its cap takes {longest} tokens. Raise "
                "max_tokens_per_micro_batch, lower max_tokens, or choose oversize='alone'."
            )
        self.max_tokens = longest if asked is None else asked

    def ledger_of(self, state: Mapping[str, Any] | None = None) -> Ledger:
        """A ledger on this sampler's terms, empty or of a state that fits them; every rank keeps one."""
        terms = {
            "train_batch_size": self.sizes.train_batch,
            "mini_batch_size": self.sizes.mini_batch,
            "group_size": self.group_size,
            "epochs": self.sizes.epochs,
            "seed": self.seed,
            "quotas": self.quotas.to_json(self.sizes.train_batch),
        }
        ledger = Ledger(self.stream.store.id, terms, remember_all=self.staleness is None)
        if state is not None:
            ledger.load(state)
            check_progress(self.sizes, ledger.progress, sum(ledger.counts.values()), len(ledger.opened))
        return ledger

    def admit(self, timeout: float, needed: bool = True) -> Admitted | None:
        """One attempt: what is there is drained first, then up to ``timeout`` seconds are waited for more.

        None: not yet. ``needed``: the trainer waits for it; only then does the sampler's own time-out run. Raises
        StopIteration at the end of the stream, WaitTimeout, or what makes a group invalid.
        """
        self._required()
        if self._failure is not None:
            raise self._failure
        try:
            return self._attempt(timeout, needed)
        except StopIteration:
            raise
        except WaitTimeout:  # nothing is lost: whoever asks again waits again
            self._waiting_since = None
            raise
        except Exception as e:  # rows may have been read and not kept: going on would lose them
            self._failure = e
            raise

    # -- inside -----------------------------------------------------------------------------------------------------

    def _start(self, ledger: Ledger) -> None:
        self._ledger, self._failure = ledger, None
        policy = self.policy
        terms = Terms(self.group_size, self.quotas.attributes, self._seats().knows, policy, self.staleness is None)
        self._assembler = Assembler(terms, self.max_tokens)
        self._admission: Admission[Group] = Admission(self.sizes, self.quotas, self.staleness, self.seed)
        self._drops: list[Dropped] = []  # since the entry before
        self._ended: set[int] = set()  # keys of the groups among them
        self._waiting_since = None
        self._demanded: Outlook | None = None
        self.stream.reset(
            {"store": self.stream.store.id, "writers": [[w, s, 0] for w, s in sorted(ledger.cursors().items())]}
        )
        batch = [self._reread(runs) for runs in ledger.opened]
        self._admission.restore(ledger.progress, ledger.counts, batch)

    def _reread(self, runs: Runs) -> Group:
        """A group of the open train batch, again from its segments, for its later passes."""
        tables = [self._cut(head).take(rows) for head, rows in stored(self.stream.store, runs)]
        table = InfoTable.concat(tables)
        return Group(table[0].group, table, (), int(table.columns["policy_version"].min()), 0)

    def _attempt(self, timeout: float, needed: bool) -> Admitted | None:
        admission, clock = self._admission, self.stream.store.backend
        if admission.over:
            self._take(self.stream.poll(timeout))  # so that what is left over is counted after a resume, too
            self._drain()
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
        if self._waiting_since is None or not needed:
            self._waiting_since = now
        elif now - self._waiting_since > self.timeout:
            raise WaitTimeout(
                f"no mini-batch could be admitted for {self.timeout:g} s: {self.explain()} Are the rollout workers "
                "alive, do they serve store.demand(), and do they have the weights of published version "
                f"{self.stream.store.policy_version()}? Raise timeout to wait longer; call store.seal() when no more "
                "will come."
            )
        if timeout > 0:
            self._take(self.stream.poll(timeout))
        return None

    def _drain(self) -> None:
        while tables := self.stream.poll(0.0):
            self._take(tables)

    def _take(self, tables: Sequence[InfoTable]) -> None:
        for table in tables:
            rows = self._required().open_rows(table)
            if len(rows) < len(table):
                table = table.take(rows)
            table = self._cut(table)
            if self.group_size != 1:
                units = [table] if len(table) else []
            else:
                units = [table.take(np.array([i])) for i in range(len(table))] if len(table) > 1 else [table]
            for unit in units:
                self._offer(unit)

    def _cut(self, table: InfoTable) -> InfoTable:
        if self.policy.oversize != "truncate" or self.max_tokens is None:
            return table
        return truncated(self.stream.store, table, self.max_tokens)

    def _offer(self, table: InfoTable) -> None:
        """One group or lone row: of a name that is known already, or new."""
        outcomes = self._again(table)
        for outcome in self._assembler.offer(table) if outcomes is None else outcomes:
            if isinstance(outcome, Group):
                self._admission.offer(outcome)
                continue
            self._drops.append(outcome)
            if outcome.name is not None:
                self._ended.add(name_key(outcome.name))

    def _again(self, table: InfoTable) -> Sequence[Group | Dropped] | None:
        """What becomes of rows whose group was complete before they came; None: it was not."""
        ledger, size = self._required(), self.group_size
        name = table[0].id if size == 1 else table[0].group
        key = name_key(name)
        waiting = self._admission.waiting.get(key)
        whole = size == 1 or bool(table.columns["group_rows"][0])
        if waiting is not None:
            if not whole:
                return extras(waiting, table, self.policy)
            mark, (writer, segment, _) = waiting.mark, waiting.table[0].address
        elif key in self._ended:
            return [Dropped("late", table)]
        elif key in ledger.seen:
            mark, _, writer, segment = ledger.seen[key]
        elif key in ledger.hashes:
            return [Dropped("duplicate" if whole else "late", table)]
        else:
            return None
        if not whole or not mark:  # only what was trained has a mark
            return [Dropped("late", table)]
        if mark == group_mark(table.take(np.arange(min(size, len(table)))) if size else table):
            return [Dropped("duplicate", table)]
        if self.policy.invalid == "error":
            raise InvalidGroup(conflict(name, table, writer, segment))
        return [Dropped("conflict", table)]

    def _choose(self) -> list[Group] | None:
        if self._admission.progress.epoch == 0:
            for group, reason in self._admission.expire():
                self._drops.append(Dropped(reason, group.table, group.name))
                self._ended.add(group.key)
        return self._admission.choose()

    def _commit(self, chosen: list[Group]) -> Admitted:
        admission, ledger = self._admission, self._required()
        before = admission.progress
        tables = [annotated(group, self.policy.annotate) for group in chosen]
        for group, table in zip(chosen, tables, strict=True):
            if table.value_names != tables[0].value_names:
                raise InvalidGroup(
                    f"annotate gave group {group.name!r} the values {table.value_names}, group {chosen[0].name!r} "
                    f"{tables[0].value_names}; it must return the same names for every group."
                )
        index, is_last = admission.commit(chosen)
        fresh = chosen if before.epoch == 0 else []
        runs = runs_of([*(g.table for g in fresh), *(d.table for d in self._drops)])
        seen = [(g.key, g.mark, g.version, *g.table[0].address[:2]) for g in fresh]
        for drop in self._drops:
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
            dropped=_counted({}, self._drops),
            forget_below=self._oldest(admission.progress),
            starts=[(w, at) for w, at in self.stream.firsts().items() if at > ledger.cursors().get(w, 0)],
        )
        ledger.apply(entry)
        self._drops, self._ended, self._waiting_since = [], set(), None
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
        for members in list(self._assembler.incomplete.values()):  # another thread may be assembling
            attributes = parse_attributes(members[0].ragged["attributes"].text(0))
            combination = tuple(attributes.get(a, "") for a in self.quotas.attributes)
            counts[combination] = counts.get(combination, 0) + 1
        return counts

    def _publish_demand(self) -> None:
        demand = outlook_of(self._admission, None, True)
        if demand != self._demanded:
            self.stream.store.publish_demand(demand)
            self._demanded = demand

    def _seats(self) -> QuotaSeats:
        return QuotaSeats(self.quotas, self.sizes.train_batch, None, self.sizes.mini_batch)

    def _required(self) -> Ledger:
        if self._ledger is None:
            self.reset()
        assert self._ledger is not None
        return self._ledger


def _counted(before: Mapping[str, int], drops: Iterable[Dropped]) -> dict[str, int]:
    counts = dict(before)
    for drop in drops:
        counts[drop.reason] = counts.get(drop.reason, 0) + drop.count
    return counts
