"""The rollout side's launcher: what to generate next, just in time for the trainer.

    with kd.RolloutPacer(store, capacity=64) as pacer:
        while (launch := pacer.next()) is not None:
            try:
                ...              # a prompt of launch.attributes; its group is named launch.group
                writer.put_group(group)
            finally:
                pacer.done(launch)

The decisions are ``launching``'s; this file reads what the trainer published, and publishes what is in flight.
"""

from __future__ import annotations

import math
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from knit_data.demand import Outlook
from knit_data.errors import InvalidArgument, UsageError, WaitTimeout
from knit_data.flights import Flights
from knit_data.groups import combination_of
from knit_data.launching import Launching
from knit_data.quotas import Combination
from knit_data.store.store import InFlight, TrajectoryStore

_LOOK = 0.02  # seconds between two looks at what the trainer wants; doubled while nothing changes
_SLOWEST = 0.1
_BEAT = 60.0  # seconds after which a waiting launcher says that it lives
_LOST = 3.0  # seconds after which a group that was done and is not seen by the trainer came to nothing


@dataclass(frozen=True)
class Launch:
    """Generate one group: for a prompt with these attributes, named so; where groups have one member, that is its
    trajectory's id. The name lets the sampler see that it has come before ``done`` says so."""

    attributes: Mapping[str, str]
    group: str


@dataclass
class _Flight:
    launch: Launch
    combination: Combination
    version: int
    began: float


class RolloutPacer:
    """Says what to launch next, and waits while the trainer has enough coming.

    ``capacity``: launched and unfinished groups of this launcher at most; as many as keep its engines busy. ``share``:
    (i, n) makes it the i-th of n launchers of one store; each publishes what it has in flight and counts what the
    others have, so that together they may overshoot by a group each. What the open train batch still needs is never
    held back, and nothing is while the trainer starves, except what would be too stale at its turn.

    Name a group as its launch says: so the pacer learns at once that the trainer has it; else it counts as coming for
    three seconds after ``done``. Threads may call ``next`` and ``done`` at the same time. A launch that comes to
    nothing is done, too. A launcher that ends is closed (it is a context manager): what it had in flight is forgotten,
    as it is when it restarts, or has said nothing for ten minutes. It speaks with every launch and ``done``, and once a
    minute inside ``next``.

    Raises InvalidArgument for a capacity below 1 or a share that is not 0 <= i < n; later, StoreError if the store
    cannot be read, after which it may be asked again.
    """

    def __init__(self, store: TrajectoryStore, capacity: int = 64, share: tuple[int, int] = (0, 1)) -> None:
        if not isinstance(store, TrajectoryStore):
            raise InvalidArgument(f"RolloutPacer needs a TrajectoryStore, found {type(store).__name__}.")
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise InvalidArgument(f"capacity must be an int of at least 1, found {capacity!r}.")
        if not (isinstance(share, tuple) and len(share) == 2 and all(type(n) is int for n in share)):
            raise InvalidArgument(f"share must be (i, n), launcher i of n, found {share!r}.")
        if not 0 <= share[0] < share[1]:
            raise InvalidArgument(f"share must be (i, n), launcher i of n with 0 <= i < n, found {share!r}.")
        self.store, self.capacity, self.share = store, capacity, share
        self._launching, self._others, self._lock = Launching(), Flights(store), threading.Lock()
        self._flights: dict[str, _Flight] = {}  # by group
        self._landed: dict[str, tuple[Combination, float]] = {}  # done, and not seen by the trainer yet: since when
        self._session, self._count = uuid.uuid4().hex[:8], 0
        self._closed, self._spoke = False, -math.inf
        self._publish()

    def next(self, timeout: float = 1800.0) -> Launch | None:
        """What to launch next; waits while it should hold back. None: no more is needed, the run is over.

        Raises WaitTimeout, which says why it held back, after ``timeout`` seconds.
        """
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
            raise InvalidArgument(f"timeout must be at least 0 seconds, found {timeout!r}.")
        clock, pause = self.store.backend, _LOOK
        deadline = clock.now() + min(timeout, sys.float_info.max)
        while True:
            if any(self.store.exists(["finished.json", "sealing.json"])):
                return None
            with self._lock:
                launch, reason = self._decide(clock.now())
            if launch is not None:
                return launch
            left = deadline - clock.now()
            if left <= 0:
                raise WaitTimeout(f"nothing was launched for {timeout:g} s: {reason}")
            self.store.exists(["finished.json"], min(left, pause))
            pause = min(2 * pause, _SLOWEST)

    def done(self, launch: Launch) -> None:
        """Its group was put, or will not be."""
        with self._lock:
            if self._closed:
                return
            flight = self._flights.get(launch.group)
            if flight is None:
                raise UsageError(
                    f"launch {launch.group!r} is not in flight here; call done once, on the pacer that gave it out."
                )
            now = self.store.backend.now()
            del self._flights[launch.group]
            try:
                self._publish()
            except BaseException:  # to be done again
                self._flights[launch.group] = flight
                raise
            self._landed[launch.group] = flight.combination, now
            self._launching.took(flight.combination, now - flight.began)

    def close(self) -> None:
        """Nothing is in flight here any more; next raises UsageError from now on."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._flights.clear()
                self._publish()

    def __enter__(self) -> RolloutPacer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def in_flight(self) -> int:
        """Launched and unfinished groups of this launcher."""
        return len(self._flights)

    def _decide(self, now: float) -> tuple[Launch | None, str]:
        if self._closed:
            raise UsageError("the pacer is closed; make a new one.")
        if now - self._spoke >= _BEAT:
            self._publish()
        if self.in_flight >= self.capacity:
            return None, f"{self.in_flight} groups are in flight, capacity is {self.capacity}; done was not called."
        outlook = self.store.outlook()
        if outlook is None:
            return None, "the trainer has not started; its sampler publishes what it needs with the first mini-batch."
        version = self.store.policy_version()
        combination = self._launching.next(outlook, self._coming(outlook, now), version)
        if combination is None:
            return None, (
                f"the trainer has enough for train batch {outlook.train_batch} and what can be launched now "
                f"(version {version}); {self.in_flight} groups are in flight here, waiting there: "
                f"{sum(outlook.waiting.values())}."
            )
        self._count += 1
        attributes = dict(zip(outlook.attributes, combination, strict=True))
        launch = Launch(attributes, f"{self.share[0]}-{self._session}-{self._count:06d}")
        self._flights[launch.group] = _Flight(launch, combination, version, now)
        try:
            self._publish()
        except BaseException:  # nobody got it
            del self._flights[launch.group]
            raise
        return launch, ""

    def _coming(self, outlook: Outlook, now: float) -> Counter[Combination]:
        """By combination: in flight here and elsewhere, and landed here but not yet seen by the trainer."""
        recent = set(outlook.recent)
        gone = [g for g, (_, at) in self._landed.items() if g in recent or now - at >= _LOST]
        for group in gone:
            del self._landed[group]
        counts = Counter(flight.combination for flight in self._flights.values())
        counts.update(combination for combination, _ in self._landed.values())
        if self.share[1] > 1:
            self._others.look(at_once=True)
            for other in self._others.launches or ():
                if not other.group.startswith(f"{self.share[0]}-"):
                    counts[combination_of(other.attributes, outlook.attributes)] += 1
        return counts

    def _publish(self) -> None:
        flights = [InFlight(f.launch.group, f.launch.attributes, f.version) for f in self._flights.values()]
        self.store.publish_in_flight(self.share, flights)
        self._spoke = self.store.backend.now()
