"""The rollout side's launcher: what to generate next, just in time for the trainer.

    pacer = kd.RolloutPacer(store, capacity=64)
    while (launch := pacer.next()) is not None:
        ...                      # a prompt of launch.attributes; its group is named launch.group
        writer.put_group(group)
        pacer.done(launch)

The decisions are ``launching``'s; this file reads what the trainer published, and publishes what is in flight.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from knit_data.errors import InvalidArgument, UsageError, WaitTimeout
from knit_data.launching import Launching, Outlook
from knit_data.quotas import Combination
from knit_data.store.store import InFlight, TrajectoryStore

_LOOK = 0.02  # seconds between two looks at what the trainer wants; doubled while nothing changes
_SLOWEST = 0.5


@dataclass(frozen=True)
class Launch:
    """Generate one group: for a prompt with these attributes, named so."""

    attributes: Mapping[str, str]
    group: str


@dataclass
class _Flight:
    launch: Launch
    combination: Combination
    version: int
    began: float
    landed: Outlook | None = field(default=None)  # what was known when it was done: it counts until more is


class RolloutPacer:
    """Says what to launch next, and waits while the trainer has enough coming.

    ``capacity``: launched and unfinished groups of this launcher at most; as many as keep its engines busy. ``share``:
    (i, n) makes it the i-th of n launchers of one store; each publishes what it has in flight and counts what the
    others have, so that together they may overshoot by a group each. What the open train batch still needs is never
    held back, and nothing is while the trainer starves, except what would be too stale at its turn.

    Threads may call ``next`` and ``done`` at the same time. A launch that comes to nothing is done, too; a launcher
    that restarts has forgotten what it launched.
    """

    def __init__(self, store: TrajectoryStore, capacity: int = 64, share: tuple[int, int] = (0, 1)) -> None:
        if not isinstance(store, TrajectoryStore):
            raise InvalidArgument(f"RolloutPacer needs a TrajectoryStore, found {type(store).__name__}.")
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise InvalidArgument(f"capacity must be an int of at least 1, found {capacity!r}.")
        self.store, self.capacity, self.share = store, capacity, share
        self._launching, self._turn = Launching(), threading.Condition()
        self._flights: dict[str, _Flight] = {}  # by group; done ones until the trainer has counted them
        self._session, self._count = uuid.uuid4().hex[:8], 0
        store.publish_in_flight(share, [])

    def next(self, timeout: float = 1800.0) -> Launch | None:
        """What to launch next; waits while it should hold back. None: no more is needed, the run is over.

        Raises WaitTimeout, which says why it held back, after ``timeout`` seconds.
        """
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
            raise InvalidArgument(f"timeout must be at least 0 seconds, found {timeout!r}.")
        timeout, clock, pause, seen = min(timeout, sys.float_info.max), self.store.backend, _LOOK, None
        deadline = clock.now() + timeout
        while True:
            if any(self.store.exists(["finished.json", "sealing.json"])):
                return None
            with self._turn:
                outlook = self.store.outlook()
                launch, reason = self._decide(outlook)
            if launch is not None:
                return launch
            left = deadline - clock.now()
            if left <= 0:
                raise WaitTimeout(f"nothing was launched for {timeout:g} s: {reason}")
            self.store.exists(["finished.json"], min(left, pause))
            pause = min(2 * pause, _SLOWEST) if outlook == seen else _LOOK
            seen = outlook

    def done(self, launch: Launch) -> None:
        """Its group was put, or will not be."""
        with self._turn:
            flight = self._flights.get(launch.group)
            if flight is None or flight.landed is not None:
                raise UsageError(
                    f"launch {launch.group!r} is not in flight here; call done once, on the pacer that gave it out."
                )
            flight.landed = self.store.outlook() or Outlook()
            self._launching.took(flight.combination, self.store.backend.now() - flight.began)
            self._publish()

    @property
    def in_flight(self) -> int:
        """Launched and unfinished groups of this launcher."""
        return sum(flight.landed is None for flight in self._flights.values())

    def _decide(self, outlook: Outlook | None) -> tuple[Launch | None, str]:
        if outlook is None:
            return None, "the trainer has not started; its sampler publishes what it needs with the first mini-batch."
        if self.in_flight >= self.capacity:
            return None, f"{self.in_flight} groups are in flight, capacity is {self.capacity}; done was not called."
        for group in [g for g, f in self._flights.items() if f.landed is not None and f.landed != outlook]:
            del self._flights[group]
        version = self.store.policy_version()
        combination = self._launching.next(outlook, self._everywhere(outlook), version)
        if combination is None:
            return None, (
                f"the trainer has enough for train batch {outlook.train_batch} and what can be launched now "
                f"(version {version}); {self.in_flight} groups are in flight here, waiting: {dict(outlook.waiting)}."
            )
        self._count += 1
        attributes = dict(zip(outlook.attributes, combination, strict=True))
        launch = Launch(attributes, f"{self.share[0]}-{self._session}-{self._count:06d}")
        self._flights[launch.group] = _Flight(launch, combination, version, self.store.backend.now())
        self._publish()
        return launch, ""

    def _everywhere(self, outlook: Outlook) -> Counter[Combination]:
        """In flight by combination: here, and what other launchers say."""
        counts = Counter(flight.combination for flight in self._flights.values())
        if self.share[1] > 1:
            for other in self.store.in_flight() or ():
                if other.group not in self._flights:
                    counts[tuple(other.attributes.get(a, "") for a in outlook.attributes)] += 1
        return counts

    def _publish(self) -> None:
        flights = [f for f in self._flights.values() if f.landed is None]
        self.store.publish_in_flight(
            self.share, [InFlight(f.launch.group, f.launch.attributes, f.version) for f in flights]
        )
