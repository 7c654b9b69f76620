"""Between stream and admission: rows become groups that wait for a seat, or drops with a name, each once.

It knows every group by its name: those that wait, those that ended since the last ledger entry, and, through the
ledger, those of before. What is dropped becomes final with the next entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from knit_data.admission import Admission
from knit_data.demand import Yields
from knit_data.errors import InvalidGroup
from knit_data.groups import (
    Assembler,
    Dropped,
    Group,
    Terms,
    combination_of,
    conflict,
    extras,
    group_mark,
    name_key,
)
from knit_data.infos import InfoTable
from knit_data.ledger import Entry, Ledger, Progress, Runs, runs_of
from knit_data.policy import Judge
from knit_data.quotas import Combination
from knit_data.store.store import InFlight, TrajectoryStore
from knit_data.stream import stored
from knit_data.truncate import truncated


class Intake:
    """Feeds the admission from the stream's tables, and writes what became of every row into the ledger."""

    def __init__(
        self,
        terms: Terms,
        ledger: Ledger,
        admission: Admission[Group],
        store: TrajectoryStore,
        max_tokens: int | None = None,
    ) -> None:
        self.terms, self.ledger, self.admission, self.store = terms, ledger, admission, store
        self.max_tokens = max_tokens
        self.assembler = Assembler(terms, max_tokens)
        self.judge = Judge(terms.policy)
        self.gone: dict[tuple[Combination, str], int] = {}  # groups dropped during the open train batch
        self.yields = Yields()
        self._drops: list[Dropped] = []  # since the entry before, and not in the next one yet
        self._begun = _Begun()
        self._ended: set[int] = set()  # keys of the groups among them
        self._accepted: list[int] = []  # keys of groups that keep accepted since then

    # -- rows -------------------------------------------------------------------------------------------------------

    def take(self, tables: Iterable[InfoTable], now: float) -> None:
        """Segments that were just read."""
        for table in tables:
            rows = self.ledger.open_rows(table)
            if len(rows) < len(table):
                table = table.take(rows)
            table = self._cut(table)
            if self.terms.group_size == 1 and len(table) > 1:
                units = [table.take(np.array([i])) for i in range(len(table))]
            else:
                units = [table] if len(table) else []
            for unit in units:
                self._offer(unit, now)

    def reread(self, runs: Runs) -> Group:
        """A group of the open train batch, again from its segments, for its later passes."""
        table = InfoTable.concat([self._cut(head).take(rows) for head, rows in stored(self.store, runs)])
        return Group(self._name(table), table, (), int(table.columns["policy_version"].min()), 0)

    def expire(self, now: float) -> None:
        """Drop what the staleness bound excludes from now on, and what waited too long for its members."""
        admission = self.admission
        for group, reason in admission.expire():
            self._drop(Dropped(reason, group.table, group.name))
        clock, rule = admission.sizes.clock, admission.staleness
        k, step = admission.progress.train_batch, admission.sizes.index(admission.progress)

        def excluded(version: int) -> str | None:
            return None if rule is None else rule.excludes(version, clock, train_batch=k, step=step)

        for drop in self.assembler.expire(now, excluded):
            self._drop(drop)

    def _name(self, table: InfoTable) -> str:
        return table[0].id if self.terms.group_size == 1 else table[0].group

    def _cut(self, table: InfoTable) -> InfoTable:
        if self.terms.policy.oversize != "truncate" or self.max_tokens is None:
            return table
        return truncated(self.store, table, self.max_tokens)

    def _offer(self, table: InfoTable, now: float) -> None:
        """One group or lone row: of a name that is known already, or new."""
        outcomes = self._again(table)
        for outcome in self.assembler.offer(table, now) if outcomes is None else outcomes:
            if isinstance(outcome, Dropped):
                self._drop(outcome)
            elif self._keeps(outcome):
                self.admission.offer(outcome)
                self.yields.add(outcome.combination, True, outcome.name)
            else:
                self._drop(Dropped("filtered", outcome.table, outcome.name))

    def _keeps(self, group: Group) -> bool:
        """The user's decision; what was accepted before a resume stays accepted."""
        if self.terms.policy.keep is None or group.key in self.ledger.accepted:
            return True
        kept = self.judge.keeps(group.name, group.table)
        if kept:
            self._accepted.append(group.key)
        return kept

    def _again(self, table: InfoTable) -> Sequence[Group | Dropped] | None:
        """What becomes of rows whose group was complete, or dropped, before they came; None: it was not."""
        ledger, size = self.ledger, self.terms.group_size
        name = self._name(table)
        key = name_key(name)
        waiting = self.admission.waiting.get(key)
        whole = size == 1 or bool(table.columns["group_rows"][0])
        if waiting is not None:
            if not whole:
                return extras(waiting, table, self.terms.policy)
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
        if self.terms.policy.invalid == "error":
            raise InvalidGroup(conflict(name, table, writer, segment))
        return [Dropped("conflict", table)]

    def _drop(self, drop: Dropped) -> None:
        self._drops.append(drop)
        if drop.name is not None:
            self._ended.add(name_key(drop.name))
            combination = combination_of(drop.table[0].attributes, self.terms.attributes)
            if not self.terms.known(combination):
                return
            self.gone[combination, drop.reason] = self.gone.get((combination, drop.reason), 0) + 1
            if drop.reason not in ("stale", "abandoned"):  # for what it is, whenever it comes
                self.yields.add(combination, False, drop.name)

    # -- asking -----------------------------------------------------------------------------------------------------

    def dropped(self) -> dict[str, int]:
        """What was dropped in this run, by reason, as ``Dropped.count`` counts."""
        return dict(Counter(self.ledger.dropped) + self._counted())

    def unsettled(self) -> int:
        """Dropped groups, and single trajectories, that no entry covers yet."""
        return self._counted().total()

    def left_over(self) -> int:
        """Groups, complete or not, that have no fate yet."""
        return len(self.admission.waiting) + len(self.assembler.incomplete)

    def incomplete(self) -> Counter[Combination]:
        members = [group.members[0] for group in list(self.assembler.incomplete.values())]  # a thread may be adding
        return Counter(combination_of(table[0].attributes, self.terms.attributes) for table in members)

    def unfinished(self, launches: Iterable[InFlight]) -> list[tuple[InFlight, Combination]]:
        """Launches of a known combination, with it, that are not complete, trained or dropped as far as was read."""
        out = []
        for launch in launches:
            key, combination = name_key(launch.group), combination_of(launch.attributes, self.terms.attributes)
            known = key in self.admission.waiting or key in self._ended
            if not (known or key in self.ledger.seen or key in self.ledger.hashes) and self.terms.known(combination):
                out.append((launch, combination))
        return out

    # -- the ledger -------------------------------------------------------------------------------------------------

    def spare(self, firsts: Mapping[int, int]) -> dict[int, int]:
        """The floors that the next entry leaves at least, by what was dropped so far; nothing is settled."""
        self._begin()
        return self.ledger.floors_after(self._entry([], self.admission.progress, firsts))

    def settle(self, admitted: Sequence[Group], before: Progress, firsts: Mapping[int, int]) -> Entry:
        """Write into the ledger what the admission committed at ``before``, and what was dropped since the last."""
        self._begin(before)
        entry = self._entry(admitted, before, firsts)
        self._begun, self._ended, self._accepted = _Begun(), set(), []
        self.ledger.apply(entry)
        if entry.closes:
            self.gone = {}
        return entry

    def _begin(self, before: Progress | None = None) -> None:
        """Move what was dropped into the next entry."""
        begun, drops, step = self._begun, self._drops, self.admission.sizes.index(before or self.admission.progress)
        begun.runs += runs_of(d.table for d in drops)
        begun.seen += [_seen(name_key(d.name), 0, d.table, step) for d in drops if d.name is not None]
        begun.dropped, self._drops = self._counted(), []

    def _entry(self, admitted: Sequence[Group], before: Progress, firsts: Mapping[int, int]) -> Entry:
        admission, ledger, begun = self.admission, self.ledger, self._begun
        after, step = admission.progress, admission.sizes.index(before)
        seen = [*(_seen(group.key, group.mark, group.table, step) for group in admitted), *begun.seen]
        ended, cursors = {key for key, *_ in seen}, ledger.cursors()
        return Entry(
            after,
            {c: n for c, n in admission.seats.counts.items() if n},
            [*runs_of(g.table for g in admitted), *begun.runs],
            seen,
            [runs_of([g.table]) for g in admitted] if admission.sizes.epochs > 1 else [],
            closes=after.train_batch > before.train_batch or admission.over,
            dropped=dict(begun.dropped),
            forget_below=self._oldest(after),
            starts=[(w, at) for w, at in firsts.items() if at > cursors.get(w, 0)],
            accepted=[key for key in self._accepted if key not in ended],
        )

    def _counted(self) -> Counter[str]:
        counts = Counter(self._begun.dropped)
        for drop in list(self._drops):
            counts[drop.reason] += drop.count
        return counts

    def _oldest(self, progress: Progress) -> int | None:
        """The oldest version that can still be admitted; groups below it need no remembering."""
        rule, clock = self.admission.staleness, self.admission.sizes.clock
        return None if rule is None else progress.train_batch * clock.steps - rule.steps(clock)


@dataclass
class _Begun:
    """What the next entry says of drops."""

    runs: Runs = field(default_factory=list)
    seen: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def _seen(key: int, mark: int, table: InfoTable, step: int) -> tuple[int, int, int, int, int]:
    return key, mark, _remembered_as(table, step), *table[0].address[:2]


def _remembered_as(table: InfoTable, step: int) -> int:
    """The version that a group which met its fate at this step is remembered by: for a staleness window from now on,
    so that members which come late are known, too, whose own version is out of bounds by then."""
    return max(step, int(table.columns["policy_version"].max()))
