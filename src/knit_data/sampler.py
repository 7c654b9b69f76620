"""The quota sampler: which groups form the next mini-batch, decided on global rank 0 for all.

A torchdata node over a ``TrajectoryStream``. The decisions themselves are pure (``groups``, ``admission``,
``quotas``, ``staleness``), ``intake`` feeds them and remembers what became of every row (``ledger``); this file says
when: what is read before what is decided, how long is waited, and what the consumer gets.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torchdata.nodes import BaseNode

from knit_data.admission import Admission, AdmittedMiniBatch, Sizes, check_progress, mini_batch
from knit_data.demand import Outlook, Pace, outlook_of
from knit_data.errors import InvalidArgument, InvalidGroup, StoreError, UsageError, WaitTimeout
from knit_data.explain import Around, explain
from knit_data.flights import Flights
from knit_data.groups import Group, Terms
from knit_data.infos import InfoTable
from knit_data.intake import Intake
from knit_data.ledger import Entry, Ledger, Progress
from knit_data.policy import GroupPolicy
from knit_data.quotas import Combination, Quotas
from knit_data.seats import QuotaSeats
from knit_data.staleness import Staleness
from knit_data.stream import TrajectoryStream, check_reachable

_SLICE = 0.05
_QUIET = 0.2  # seconds between two demands that differ only in what has come
_TEND = 0.1  # seconds between two looks while nothing is asked for


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
        self.quotas = quotas if isinstance(quotas, Quotas) else Quotas(quotas)
        self.staleness = (
            max_staleness if isinstance(max_staleness, Staleness) or max_staleness is None else Staleness(max_staleness)
        )
        self.policy = groups or GroupPolicy()
        if self.policy.incomplete == "drop" and self.staleness is None and group_size != 1:
            raise InvalidArgument(
                "GroupPolicy(incomplete='drop') is for groups of lone puts, which need max_staleness: without it, "
                "repeats of them cannot be recognised. Set max_staleness, or use put_group and incomplete='wait'."
            )
        self.max_tokens = self.policy.max_tokens
        QuotaSeats(self.quotas, train_batch_size, None, mini_batch_size)  # refuses quotas that cannot add up
        self._ledger: Ledger | None = None
        self._failure: Exception | None = None
        self._waiting_since: float | None = None
        self._demanded: Outlook | None = None
        self._tended, self._published, self._ended, self._warned = -math.inf, -math.inf, False, False
        self.hand_over: Callable[[Outlook], None] | None = None  # the loader's: has a demand written beside

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
        return explain(self._admission, self._around())

    def dropped(self) -> dict[str, int]:
        """What was dropped so far, by reason: groups, or for the reasons of ``EXTRAS`` single trajectories."""
        return self._intake.dropped() if self._ledger else {}

    def left_over(self) -> int:
        """Groups, complete or not, that have no fate yet."""
        return self._intake.left_over() if self._ledger else 0

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

    def spare(self) -> dict[int, int]:
        """Per writer the first segment that is needed, where what was dropped since the last mini-batch is not."""
        return self._intake.spare(self.stream.firsts())

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
        except BaseException:  # as Ctrl-C in a user's function
            self._failure = UsageError("the sampler was interrupted while it read; build a new one from a state.")
            raise

    def tend(self) -> None:
        """Between admissions: read what has come, so that launchers see it counted. Errors wait for the next."""
        now = self.stream.store.backend.now()
        if self._ledger is None or self._failure is not None or self._ended or now - self._tended < _TEND:
            return
        self._tended = now
        try:
            self._drain()
            self._publish_demand(at_once=False)
        except Exception as e:
            self._failure = e

    def write_demand(self, demand: Outlook) -> None:
        """For launchers, from any thread. Where it cannot be, they go on with the last one, and the next is tried."""
        try:
            self.stream.store.publish_demand(demand)
        except StoreError as e:
            self._demanded = None
            warnings.warn(f"the demand could not be written, launchers do not see it: {e}", UserWarning, stacklevel=2)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _start(self, ledger: Ledger) -> None:
        store = self.stream.store
        check_reachable(store, ledger)
        terms = Terms(self.group_size, self.quotas.attributes, self._seats().knows, self.policy, self.staleness is None)
        self._admission: Admission[Group] = Admission(self.sizes, self.quotas, self.staleness, self.seed)
        self._intake = Intake(terms, ledger, self._admission, store, self.max_tokens)
        self._annotated: dict[int, InfoTable] = {}  # groups of the open train batch, for its later passes
        self._flights, self._shown = Flights(store), Flights(store)  # the latter for explain, from any thread
        self._pace, self._starving, self._demanded = Pace(), False, None
        self._waiting_since, self._ended = None, False
        self._ledger, self._failure = ledger, None
        self.stream.reset({"store": store.id, "writers": [[w, s, 0] for w, s in sorted(ledger.cursors().items())]})
        batch = [self._intake.reread(runs) for runs in ledger.opened]
        self._admission.restore(ledger.progress, ledger.counts, batch)

    def _attempt(self, timeout: float, needed: bool) -> Admitted | None:
        admission, clock = self._admission, self.stream.store.backend
        if admission.over:
            self._take(timeout)  # so that what is left over is counted after a resume, too
            self._drain()
            self._end()
        if admission.progress.epoch == 0:
            if self._waits and self._flights.look():
                self.stream.hurry()  # what has landed must not lose its seat because its rows were not looked for
            self._drain()
            if self._intake.assembler.late(clock.now()):
                self.stream.hurry()  # its members may be there, in the segments of a writer that is seldom looked at
                self._drain()
            self._intake.expire(clock.now())
        chosen = admission.choose(self._held(), thorough=self.stream.ended)
        if chosen is not None:
            return self._commit(chosen)
        self._starving, before = needed, self._starving
        self._publish_demand(at_once=needed != before)
        if self.stream.ended:
            if not admission.cut_short():
                self._end()
            return self._commit(admission.choose() or [])
        now = clock.now()
        if not needed:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > self.timeout:
            raise WaitTimeout(
                f"no mini-batch could be admitted for {self.timeout:g} s: {self.explain()} Are the rollout workers "
                "alive, do their puts wait for room (max_bytes, loader.commit), do they launch what store.demand() "
                "asks for (a RolloutPacer does), and do they have the weights of published version "
                f"{self.stream.store.policy_version()}? Raise timeout to wait longer; call store.seal() when no more "
                "will come."
            )
        if timeout > 0:
            self._take(timeout)
        return None

    def _end(self) -> NoReturn:
        self._ended = True
        raise StopIteration

    def _take(self, timeout: float) -> bool:
        if tables := self.stream.poll(timeout):
            self._intake.take(tables, self.stream.store.backend.now())
        return bool(tables)

    def _drain(self) -> None:
        while self._take(0.0):
            pass

    def _commit(self, chosen: list[Group]) -> Admitted:
        admission, before, tables = self._admission, self._admission.progress, list(map(self._annotate, chosen))
        for group, table in zip(chosen, tables, strict=True):
            if table.columns.keys() != tables[0].columns.keys():
                raise InvalidGroup(
                    f"annotate gave group {group.name!r} the values {table.value_names}, group {chosen[0].name!r} "
                    f"{tables[0].value_names}; it must return the same names for every group."
                )
        index, is_last = admission.commit(chosen)
        entry = self._intake.settle(chosen if before.epoch == 0 else [], before, self.stream.firsts())
        if entry.closes:
            self._annotated = {}
        now = self.stream.store.backend.now()
        self._pace.admitted(now, 0.0 if self._waiting_since is None else now - self._waiting_since)
        self._waiting_since, self._starving = None, False
        self._publish_demand(at_once=True)
        return Admitted(mini_batch(tables, index, before, is_last), entry, self.stream.finite)

    def _annotate(self, group: Group) -> InfoTable:
        """The group's rows with the user's values, in later passes those of the first."""
        table = self._annotated.get(group.key)
        if table is None:
            table = self._intake.judge.annotated(group.name, group.table)
            if self.sizes.epochs > 1:
                self._annotated[group.key] = table
        return table

    # -- in flight --------------------------------------------------------------------------------------------------

    @property
    def _waits(self) -> bool:
        return self.staleness is not None and self.staleness.strategy == "wait"

    def _held(self) -> Counter[Combination]:
        """Groups in flight that the open train batch is the last to take."""
        if not self._waits or self._admission.progress.epoch or self.stream.ended:
            return Counter()
        if self._flights.launches is None:
            self._warn_unpaced()
        return self._last_chances(self._flights)

    def _last_chances(self, flights: Flights) -> Counter[Combination]:
        rule, clock, k = self.staleness, self.sizes.clock, self._admission.progress.train_batch
        found = self._intake.unfinished(flights.launches or ())
        return Counter(c for x, c in found if rule and rule.last_chance(x.version, clock, train_batch=k))

    def _warn_unpaced(self) -> None:
        if (self._admission.progress.train_batch or self._intake.dropped().get("stale")) and not self._warned:
            self._warned = True
            warnings.warn(
                "Staleness(strategy='wait') needs a RolloutPacer to know what is in flight; without it nothing is "
                "waited for, and groups that become too old are dropped as under 'drop'.",
                UserWarning,
                stacklevel=2,
            )

    def _around(self) -> Around:
        intake, flights = self._intake, self._shown
        flights.look()
        launched = flights.launches
        unread = intake.unfinished(x for x in launched or () if x.group not in intake.assembler.incomplete)
        waits = self._waits and not self.stream.ended
        return Around(
            intake.incomplete(),
            None if launched is None else Counter(combination for _, combination in unread),
            self._last_chances(flights) if waits else {},
            dict(intake.gone),
            intake.dropped(),
            intake.left_over(),
            ended=self._ended,
            unpaced=waits and launched is None,
            kept=intake.unsettled() if self.stream.store.reclaim == "commit" else 0,
        )

    def _publish_demand(self, at_once: bool) -> None:
        """What has come changes often, and launchers can wait a little for it."""
        now = self.stream.store.backend.now()
        if not at_once and now - self._published < _QUIET:
            return
        self._published = now
        demand = outlook_of(self._admission, self._pace, self._starving, self._intake.yields)
        if demand != self._demanded:
            self._demanded = demand
            (self.hand_over or self.write_demand)(demand)

    def _seats(self) -> QuotaSeats:
        return QuotaSeats(self.quotas, self.sizes.train_batch, None, self.sizes.mini_batch)

    def _required(self) -> Ledger:
        if self._ledger is None:
            self.reset()
        assert self._ledger is not None
        return self._ledger
