"""What to launch next, and when to hold back: just in time, combination by combination.

Launching early makes data stale only across a publish. So a group is launched one lead ahead of its turn: when the
trainer will have used up what is there of its combination by the time it is complete. Two rules keep the run alive:
what the open train batch still needs is never held back, and while the trainer starves nothing is, except what would
be too stale at its turn. Each combination is judged by itself, so that a fast one's surplus never takes a slow one's
place. Published work: AReaL's launch gate (arXiv 2505.24298) bounds the whole; here each part is bounded.

Pure: observations in, decisions out.

>>> from dataclasses import replace
>>> launching = Launching()
>>> demand = Outlook(seats={("a",): 2}, mix={("a",): 4}, minis=4, steps=4, steps_left=2, pace=10.0, starving=False)
>>> launching.next(demand, {("a",): 1})               # the open train batch needs 2, 1 is there
('a',)
>>> launching.took(("a",), 15.0)
>>> launching.next(demand, {("a",): 2})               # needed in 2 steps, 20 s; complete in 15 s: too early
>>> launching.next(replace(demand, steps_left=1), {("a",): 2})
('a',)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from knit_data.admission import Admission, Candidate
from knit_data.quotas import Combination

C = TypeVar("C", bound=Candidate)
D = TypeVar("D", bound="Demand")
Counts = Mapping[Combination, int]

_RECENT = 64  # durations that a lead is estimated from
_SPREAD = 0.75  # standard deviations that a lead lies above the mean: holding back costs under 1 % of throughput
# How much the lead counts in the order of launches: all of it would favour slow combinations at the cost of fast ones.
# But while a train batch closes, what takes long goes first: whatever starts will wait through one publish, and long
# responses are the fewest that keep the slots busy; unless they are so long that they would wait through two.
_URGENCY, _LONG_FIRST = 0.5, 2.0
_BY_COMBINATION = {"deficits", "seats", "mix", "waiting", "surplus", "yields"}
_AMPLE = 0.02  # share of time that a trainer may wait and still be what limits the run
_MEMORY = 0.95  # of the trainer's pace, a step
_FAR = 2  # train batches ahead at most, where no staleness bound says otherwise


@dataclass(frozen=True)
class Demand:
    """What the open train batch still needs: groups by combination of quota attributes, and free seats beside."""

    train_batch: int = 0
    deficits: Counts = field(default_factory=dict)
    free: int = 0

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: [[list(c), n] for c, n in v.items()] if isinstance(v, Mapping) else v for k, v in data.items()}

    @classmethod
    def from_json(cls: type[D], data: Mapping[str, Any]) -> D:
        """Raises KeyError, TypeError or ValueError where it is not what ``to_json`` made."""
        values = {f.name: data[f.name] for f in fields(cls)}
        for name in _BY_COMBINATION & values.keys():
            kind = float if name in ("surplus", "yields") else int
            values[name] = {tuple(map(str, combination)): kind(n) for combination, n in values[name]}
        if "attributes" in values:
            values["attributes"] = tuple(map(str, values["attributes"]))
        return cls(**values)


@dataclass(frozen=True)
class Outlook(Demand):
    """A demand with what a launcher must know beside.

    ``attributes``: what combinations give values of. ``seats``: one way to fill all seats left; ``mix``: a whole
    train batch. ``waiting``: complete groups without a seat. ``surplus``: groups trained beyond their share of the mix
    so far. ``yields``: share of complete groups that were not dropped, where it is below 1. ``minis``, ``steps``:
    mini-batches of a pass and optimizer steps of a train batch; ``steps_left``: those not yet begun. ``pace``: seconds
    a step takes when nothing is waited for; None: not known yet. ``starving``: the trainer waits for groups.
    ``closing``: the last step before this train batch still runs, so that what starts now starts with weights that
    are about to be old. ``limit``: optimizer steps that a group may be older than its train batch's start; None: no
    bound.
    """

    attributes: tuple[str, ...] = ()
    seats: Counts = field(default_factory=dict)
    mix: Counts = field(default_factory=dict)
    waiting: Counts = field(default_factory=dict)
    surplus: Mapping[Combination, float] = field(default_factory=dict)
    yields: Mapping[Combination, float] = field(default_factory=dict)
    minis: int = 1
    steps: int = 1
    steps_left: int = 1
    pace: float | None = None
    starving: bool = True
    closing: bool = False
    limit: int | None = None


def outlook_of(
    admission: Admission[C], pace: Pace, starving: bool, yields: Mapping[Combination, float] | None = None
) -> Outlook:
    """The demand of the open train batch, for launchers.

    While the last step of a train batch runs, the next one is open already, but what is launched for it now will be
    older than its weights. So a trainer that need not wait for groups is not said to need them yet.
    """
    sizes, p, rule = admission.sizes, admission.progress, admission.staleness
    steps, (deficits, filled) = sizes.clock.steps, admission.needs()
    closing = not starving and p.train_batch > 0 and p.epoch == p.position == 0
    early = closing and pace.ample
    return Outlook(
        p.train_batch,
        deficits,
        admission.seats.left - sum(deficits.values()),
        admission.quotas.attributes,
        {} if early else filled,
        admission.mix,
        admission.waiting_by_combination(),
        admission.surplus(),
        yields or {},
        sizes.minis,
        steps,
        0 if early else steps * (p.train_batch + 1) - sizes.index(p),
        pace.seconds,
        starving,
        closing,
        None if rule is None else rule.steps(sizes.clock),
    )


class Pace:
    """How fast the trainer goes, from the times of admissions. ``seconds``: of an optimizer step, from those that
    nothing was waited for; None: not known yet. ``ample``: hardly any time was waited lately, training is what limits
    the run."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._last: float | None = None
        self._waited = self._passed = 0.0  # lately

    @property
    def ample(self) -> bool:
        return self.seconds is not None and self._waited <= _AMPLE * self._passed

    def admitted(self, now: float, waited: float) -> None:
        """A mini-batch was admitted after so many seconds of waiting for groups."""
        if self._last is not None:
            took = now - self._last
            self._waited, self._passed = _MEMORY * self._waited + waited, _MEMORY * self._passed + took
            if not waited:
                self.seconds = took if self.seconds is None else _MEMORY * self.seconds + (1 - _MEMORY) * took
        self._last = now


class Yields:
    """Share of groups, by combination, that complete and are not dropped for what they are."""

    def __init__(self) -> None:
        self._fates: dict[Combination, deque[bool]] = {}

    def add(self, combination: Combination, kept: bool) -> None:
        self._fates.setdefault(combination, deque(maxlen=_RECENT)).append(kept)

    def shares(self) -> dict[Combination, float]:
        """Where some were dropped lately; never 0, so that launching goes on."""
        return {c: (1 + sum(f)) / (1 + len(f)) for c, f in self._fates.items() if not all(f)}


class Launching:
    """Decides what to launch; learns how long groups take."""

    def __init__(self) -> None:
        self._seconds: dict[Combination, deque[float]] = {}
        self._taken: dict[Combination, tuple[float, float]] = {}  # their mean and deviation

    def took(self, combination: Combination, seconds: float) -> None:
        """A group was complete so many seconds after its launch."""
        recent = self._seconds.setdefault(combination, deque(maxlen=_RECENT))
        recent.append(seconds)
        mean = sum(recent) / len(recent)
        self._taken[combination] = mean, math.sqrt(sum((s - mean) ** 2 for s in recent) / len(recent))

    def next(self, demand: Outlook, in_flight: Counts, version: int = 0) -> Combination | None:
        """The combination to launch a group of, or None: hold back. ``in_flight``: launched and not complete;
        ``version``: the policy version that a group launched now would start with."""
        best: tuple[float, Combination] | None = None
        for combination, whole in demand.mix.items():
            needed = demand.seats.get(combination, 0)
            if not whole and not needed:
                continue
            coming = in_flight.get(combination, 0) * demand.yields.get(combination, 1.0)
            coming += demand.waiting.get(combination, 0)
            there = coming + demand.surplus.get(combination, 0.0)  # past surplus makes it less urgent; it fills no seat
            turn, batches = self._turn(demand, there, needed, whole)
            mean, spread = self._lead(combination, demand)
            if min(coming, there) >= needed:
                limit = _FAR * demand.steps if demand.limit is None else demand.limit
                if (demand.train_batch + batches) * demand.steps - version > limit:
                    continue
                if not demand.starving and turn >= mean + spread:
                    continue
            weight = _URGENCY if not demand.closing else _LONG_FIRST if mean < demand.steps else 0.0
            urgency = turn - weight * mean
            if best is None or urgency < best[0]:
                best = urgency, combination
        return best[1] if best else None

    @staticmethod
    def _turn(demand: Outlook, there: float, needed: int, whole: int) -> tuple[float, int]:
        """Steps until one more than ``there`` is needed, and the train batches until then."""
        if there < needed or not whole:
            first = sum(demand.seats.values()) * demand.minis / max(1, sum(demand.mix.values()))  # steps that fill them
            return (first * there / needed if there > 0 else demand.minis * there / max(1, whole)), 0
        batches, part = divmod((there - needed) / whole, 1.0)
        return demand.steps_left + batches * demand.steps + part * demand.minis, 1 + int(batches)

    def _lead(self, combination: Combination, demand: Outlook) -> tuple[float, float]:
        """Steps from launch to completion: the recent mean, and how much more to be safe. Before anything is known:
        a whole train batch."""
        taken = self._taken.get(combination)
        if taken is None or not demand.pace:
            return float(demand.steps), 0.0
        mean, deviation = taken
        return mean / demand.pace, _SPREAD * deviation / demand.pace
